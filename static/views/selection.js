// Engines that are chosen on the fleet's page, and the orders that they can be given together.
import { fleet } from "../core/fleet.js";
import { html, useState } from "../core/html.js";
import { session } from "../core/session.js";
import { Store, useStore } from "../core/store.js";
import { named, orderOf } from "../orders/catalogue.js";
import { SEVERAL, SeveralDialog } from "../orders/several.js";
import { Action } from "../parts/bits.js";
import { count } from "../parts/words.js";

export const chosen = new Store(new Set());

export function choose(ids, on) {
  const next = new Set(chosen.value);
  for (const id of ids) {
    if (on) next.add(id);
    else next.delete(id);
  }
  chosen.set(next);
}

export function Choose({ id, on }) {
  return html`<input type="checkbox" aria-label="Choose ${id}" checked=${on} onChange=${(event) => choose([id], event.target.checked)} />`;
}

/** All that are shown, which are not all that are chosen. */
export function ChooseAll({ list }) {
  const ids = useStore(chosen);
  const on = list.filter((one) => ids.has(one.id)).length;
  return html`<label class="choose-all"><input type="checkbox" checked=${on > 0 && on === list.length} indeterminate=${on > 0 && on < list.length}
    onChange=${(event) => choose(list.map((one) => one.id), event.target.checked)} /><span>Choose all ${list.length} shown</span></label>`;
}

export function ChosenBar() {
  const ids = useStore(chosen);
  const engines = useStore(fleet, (value) => value.engines);
  const me = useStore(session, (value) => value.me);
  const [kind, setKind] = useState(null);
  const list = [...ids].map((id) => engines.get(id)).filter(Boolean);
  if (!list.length) return null;
  const refusal = (order) => {
    if (me.read_only) return "This gateway is read-only at present.";
    return me.scopes.includes(order.scope) ? null : `Needs the scope ${order.scope}, which you do not have.`;
  };
  return html`<section class="chosen" aria-label="Orders to the chosen engines"><b role="status">${count(list.length, "engine")} chosen</b>
    <div>${SEVERAL.map(orderOf).map((order) => html`<${Action} key=${order.kind} id=${`several-${order.kind}`} refused=${refusal(order)} onClick=${() => setKind(order.kind)}>${named(order.kind)}<//>`)}</div>
    <button type="button" class="quiet" onClick=${() => chosen.set(new Set())}>Choose none</button>
    ${kind && html`<${SeveralDialog} key=${kind} engines=${list} kind=${kind} onClose=${() => setKind(null)} />`}</section>`;
}
