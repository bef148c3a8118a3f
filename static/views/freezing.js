// Freezing an engine for a time, and lifting that: it takes no new orders meanwhile.
import { call, get } from "../core/api.js";
import { learnEngine } from "../core/fleet.js";
import { html, useState } from "../core/html.js";
import { refusedFor } from "../core/session.js";
import { gatewayTime } from "../core/skew.js";
import { atFull, zone } from "../core/time.js";
import { Field } from "../orders/fields.js";
import { Action } from "../parts/bits.js";
import { Dialog } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { Refused, useSending } from "../parts/sending.js";

const HOURS = [["1", "An hour"], ["4", "Four hours"], ["12", "Twelve hours"], ["24", "A day"], ["at", "Until a time"]];

export function Freezing({ engine, me }) {
  const [asking, ask] = useState(null);
  const refused = refusedFor(me, "admin:engines", engine);
  return html`
    <${Action} id="freeze" tone="quiet" refused=${refused} onClick=${() => ask("freeze")}><${Icon} name="snow" /> ${engine.frozen ? "Change the freeze …" : "Freeze …"}<//>
    ${engine.frozen && html`<${Action} id="thaw" tone="quiet" refused=${refused} onClick=${() => ask("thaw")}>Lift the freeze …<//>`}
    ${asking && html`<${FreezeDialog} key=${asking} engine=${engine} lift=${asking === "thaw"} onClose=${() => ask(null)} />`}`;
}

function FreezeDialog({ engine, lift, onClose }) {
  const [values, setValues] = useState({ reason: "", hours: "1", at: "" });
  const path = `v1/engines/${encodeURIComponent(engine.id)}`;
  const change = (name) => (value) => setValues({ ...values, [name]: value });
  const reason = values.reason.trim();
  const until = values.hours === "at" ? Date.parse(values.at) : gatewayTime(Date.now()) + Number(values.hours) * 3_600_000;
  const ready = lift || (reason && !Number.isNaN(until));
  const { problem, send } = useSending(ready, async () => {
    if (lift) {
      await call("DELETE", `${path}/freeze`, { query: { reason } });
      learnEngine(await get(path));
    } else {
      learnEngine((await call("PUT", `${path}/freeze`, { body: { reason, until: new Date(until).toISOString() } })).body);
    }
    onClose();
  });
  return html`<${Dialog} title="${lift ? "Lift the freeze of" : "Freeze"} ${engine.id}" onClose=${onClose}><form onSubmit=${send}>
    <p>${lift ? "It takes orders again." : "It takes no new orders until then, but those that override it. What runs goes on."}</p>
    <${Field} id="freeze-reason" field=${{ type: "text", label: lift ? "Reason" : "Reason (needed)", most: 500, hint: lift ? undefined : "Told to everybody whose order is refused." }} value=${values.reason} onChange=${change("reason")} />
    ${!lift && html`<${Field} id="freeze-hours" field=${{ type: "choice", label: "For how long", options: HOURS.map(([value, label]) => ({ value, label })) }} value=${values.hours} onChange=${change("hours")} />
      ${values.hours === "at" && html`<div class="field"><label for="freeze-at">Until (${zone()})</label><input id="freeze-at" type="datetime-local" value=${values.at} onInput=${(event) => change("at")(event.target.value)} /></div>`}
      ${!Number.isNaN(until) && html`<p class="dim small">Until ${atFull(new Date(until).toISOString())}</p>`}`}
    <${Refused} problem=${problem} />
    <footer><button type="button" onClick=${onClose}>Close</button><button type="submit" class="primary" aria-disabled=${ready ? undefined : "true"}>${lift ? "Lift it" : "Freeze"}</button></footer></form><//>`;
}
