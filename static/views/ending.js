// Two ways to end an operation before its time, and they are not the same: asking the engine to
// cancel it, and a person's stating how it has ended.
import { call } from "../core/api.js";
import { learn } from "../core/fleet.js";
import { html, useState } from "../core/html.js";
import { Field } from "../orders/fields.js";
import { Dialog } from "../parts/dialog.js";
import { Refused, useSending } from "../parts/sending.js";
import { words } from "../parts/words.js";

function useEnding(ready, operation, verb, body, onClose) {
  return useSending(ready, async () => {
    learn((await call("POST", `v1/operations/${encodeURIComponent(operation.id)}/${verb}`, { body })).body);
    onClose();
  });
}

export function CancelDialog({ operation, onClose }) {
  const [reason, setReason] = useState("");
  const { send, sending, problem } = useEnding(true, operation, "cancel", { reason: reason.trim() || undefined }, onClose);
  return html`<${Dialog} title="Cancel “${words(operation.kind)}”?" onClose=${onClose}><form onSubmit=${send}>
    <p>The engine is asked to end it. That may be too late, and its end is told as any other: the operation can still succeed or fail.</p>
    <${Field} id="cancel-reason" field=${{ type: "text", label: "Reason", most: 500 }} value=${reason} onChange=${setReason} />
    <${Refused} problem=${problem} />
    <footer><button type="button" onClick=${onClose}>Let it go on</button><button type="submit" class="primary">${sending ? "Asking …" : "Cancel it"}</button></footer></form><//>`;
}

const OUTCOMES = [
  { value: "succeeded", label: "It succeeded" },
  { value: "failed", label: "It failed" },
  { value: "cancelled", label: "It was cancelled" },
];

export function SettleDialog({ operation, onClose }) {
  const [outcome, setOutcome] = useState("");
  const [reason, setReason] = useState("");
  const [typed, setTyped] = useState("");
  const ready = outcome && reason.trim() && typed === operation.engine;
  const { send, sending, problem } = useEnding(ready, operation, "settle", { outcome, reason: reason.trim() }, onClose);
  return html`<${Dialog} title="State how “${words(operation.kind)}” has ended" onClose=${onClose}><form onSubmit=${send}>
    <p>Nothing is asked of the engine, and no fact is changed. You state the end, under your name, and it can't be taken back. It frees the engine for other orders.</p>
    <${Field} id="settle-outcome" field=${{ type: "choice", label: "Outcome", options: OUTCOMES }} value=${outcome} onChange=${setOutcome} />
    <${Field} id="settle-reason" field=${{ type: "text", label: "How you know", most: 500 }} value=${reason} onChange=${setReason} />
    <div class="field grave"><label for="settle-confirm">Type <b class="mono">${operation.engine}</b> to confirm</label><input id="settle-confirm" class="mono" autocomplete="off" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></div>
    <${Refused} problem=${problem} />
    <footer><button type="button" onClick=${onClose}>Close</button><button type="submit" class="danger" aria-disabled=${ready ? undefined : "true"}>${sending ? "Writing …" : "State it"}</button></footer></form><//>`;
}
