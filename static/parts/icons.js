// Shapes, so that no state is told by its colour alone. They are decoration: words stand beside them.
import { html } from "../core/html.js";

const PATHS = {
  dot: html`<circle cx="8" cy="8" r="5" fill="currentColor" />`,
  half: html`<circle cx="8" cy="8" r="5" fill="none" stroke="currentColor" stroke-width="1.6" /><path d="M8 3a5 5 0 0 1 0 10z" fill="currentColor" />`,
  pause: html`<path d="M4 3h3v10H4zM9 3h3v10H9z" fill="currentColor" />`,
  drain: html`<path d="M8 2v7M4.8 6.6 8 9.8l3.2-3.2M3 13h10" fill="none" stroke="currentColor" stroke-width="1.8" />`,
  hollow: html`<circle cx="8" cy="8" r="4.8" fill="none" stroke="currentColor" stroke-width="1.8" />`,
  unknown: html`<circle cx="8" cy="8" r="4.8" fill="none" stroke="currentColor" stroke-width="1.8" stroke-dasharray="2.4 2" />`,
  cross: html`<path d="m4 4 8 8m0-8-8 8" stroke="currentColor" stroke-width="2.2" fill="none" />`,
  alert: html`<path d="M8 1.8 15 14H1z" fill="currentColor" /><path d="M8 6v4m0 1.2v1.3" stroke="var(--surface)" stroke-width="1.6" />`,
  check: html`<path d="m3 8.5 3.4 3.4L13 4.6" stroke="currentColor" stroke-width="2.2" fill="none" />`,
  run: html`<path d="M13 8a5 5 0 1 1-2.2-4.1" stroke="currentColor" stroke-width="2" fill="none" />`,
  wait: html`<circle cx="8" cy="8" r="5.4" fill="none" stroke="currentColor" stroke-width="1.6" /><path d="M8 5v3.3l2.2 1.4" stroke="currentColor" stroke-width="1.6" fill="none" />`,
  ask: html`<path d="M5.4 6a2.7 2.7 0 1 1 3.9 2.4C8.4 8.9 8 9.3 8 10.2M8 12v1.6" stroke="currentColor" stroke-width="1.9" fill="none" />`,
  stop: html`<path d="M3 3h10v10H3z" fill="none" stroke="currentColor" stroke-width="1.8" /><path d="m5.5 8h5" stroke="currentColor" stroke-width="1.8" />`,
  lock: html`<path d="M4 7h8v6H4zM5.5 7V5a2.5 2.5 0 0 1 5 0v2" fill="none" stroke="currentColor" stroke-width="1.6" />`,
  person: html`<circle cx="8" cy="5" r="2.6" fill="none" stroke="currentColor" stroke-width="1.6" /><path d="M3 14c.4-3.2 2.4-4.6 5-4.6s4.6 1.4 5 4.6" fill="none" stroke="currentColor" stroke-width="1.6" />`,
  snow: html`<path d="M8 2v12M2.8 5l10.4 6M13.2 5 2.8 11" stroke="currentColor" stroke-width="1.6" fill="none" />`,
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">${PATHS[name]}</svg>`;
}
