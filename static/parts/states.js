// What is shown instead of things: while they come, where there are none, why they can't be had.
import { html } from "../core/html.js";
import { useLater } from "../core/time.js";
import { Icon } from "./icons.js";

/** Shown a little late: what comes at once should not flicker. */
export function Loading({ what = "Loading" }) {
  const later = useLater(250);
  return html`<div class="state" role="status" aria-live="polite">${later && html`<span class="spinner" aria-hidden="true"></span><p>${what} …</p>`}</div>`;
}

export function Empty({ title, children }) {
  return html`<div class="state"><p class="state-title">${title}</p>${children && html`<div class="state-text">${children}</div>`}</div>`;
}

export function Failure({ problem, retry, title }) {
  const forbidden = problem.forbidden;
  return html`<div class="state ${forbidden ? "forbidden" : "fault"}" role="alert">
    <${Icon} name=${forbidden ? "lock" : "alert"} />
    <p class="state-title">${title ?? problem.title}</p>
    <p class="state-text">${problem.detail}</p>
    ${retry && !forbidden && html`<button type="button" onClick=${retry}>Try again</button>`}
    <p class="small dim">${problem.reason}${problem.request_id && html` · request <code>${problem.request_id}</code>`}</p>
  </div>`;
}

/** A line beside what is still shown. */
export function Note({ tone = "warn", icon = "alert", children, role }) {
  return html`<div class="note ${tone}" role=${role}><${Icon} name=${icon} /><div>${children}</div></div>`;
}
