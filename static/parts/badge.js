import { html } from "../core/html.js";
import { Icon } from "./icons.js";

export function Badge({ tone = "dim", icon, title, children }) {
  return html`<span class="badge ${tone}" title=${title}>${icon && html`<${Icon} name=${icon} />`}<span>${children}</span></span>`;
}

const STATES = {
  accepted: ["Accepted", "dim", "wait", "Taken on, and not yet sent to the engine."],
  queued: ["Queued", "dim", "wait", "Waits behind another order."],
  running: ["Running", "busy", "run", "The engine has it."],
  cancelling: ["Cancelling", "busy", "run", "The engine was asked to cancel it, and it has not ended yet."],
  reconciling: ["Outcome unknown", "ask", "ask", "It was sent, and the engine has not said how it ended. It is being asked; the order may have worked."],
  succeeded: ["Succeeded", "good", "check", "The engine has said so."],
  failed: ["Failed", "bad", "cross", "It has come to nothing, or to less than all; its error says what is left of it."],
  cancelled: ["Cancelled", "dim", "stop", "It was ended before it was done."],
};

export function OperationState({ operation }) {
  const [label, tone, icon, why] = STATES[operation.state] ?? [operation.state, "dim", "unknown", ""];
  const place = operation.queue_position ? `, number ${operation.queue_position} in line` : "";
  return html`<${Badge} tone=${tone} icon=${icon} title=${why}>${label}${place}<//>`;
}

export const stateWord = (state) => STATES[state]?.[0] ?? state;
export const stateMeaning = (state) => STATES[state]?.[3] ?? "";
export const OPERATION_STATES = Object.keys(STATES);

/** What an end rests on, where it is not the engine's own word. */
export function Verification({ value }) {
  if (value === "unverified") {
    return html`<${Badge} tone="warn" icon="ask" title="The engine took the order and offers nothing by which its effect could be checked.">Unverified<//>`;
  }
  if (value === "settled") {
    return html`<${Badge} tone="warn" icon="person" title="A person stated this end; the engine never said.">Settled by a person<//>`;
  }
  return null;
}
