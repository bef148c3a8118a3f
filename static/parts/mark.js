import { html } from "../core/html.js";

/** The dial of an engine-order telegraph. */
export function Mark() {
  return html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true"><circle cx="16" cy="16" r="15" fill="var(--mark-back)" />
    <circle cx="16" cy="16" r="11.5" fill="none" stroke="var(--brass)" stroke-width="2" />
    <path d="M16 16 22.5 8" stroke="var(--brass)" stroke-width="3" stroke-linecap="round" /><circle cx="16" cy="16" r="2.6" fill="var(--brass)" />
    <path d="M16 5.5v2.6M5.5 16h2.6M26.5 16h-2.6M16 26.5v-2.6" stroke="var(--brass)" stroke-width="1.6" /></svg>`;
}
