// Where a registration comes from, and whether an engine is registered once.
import { html } from "../core/html.js";
import { to } from "../core/place.js";
import { Badge } from "./badge.js";
import { Note } from "./states.js";

/** The list or the cluster that an engine was found in; null: somebody registered it. */
export const finderOf = (engine) => engine.labels["chadburn/discovery"] ?? null;

export function Found({ engine }) {
  const finder = finderOf(engine);
  return finder && html`<${Badge} tone="dim" icon="dot" title=${kept(finder)}>Found by ${finder}<//>`;
}

/** Why nobody changes it here. */
export const kept = (finder) => `It was found by “${finder}”, and is registered as that says. Change it there.`;

const addresses = (engine) => engine.members.flatMap((one) => [one.admin, one.control]);

/** Others that are this one once more, each with what shows it. */
function twinsOf(engine, engines) {
  const own = new Set(addresses(engine));
  const instance = engine.facts?.instance_id;
  return [...engines.values()].filter((one) => one.id !== engine.id).flatMap((one) => {
    if (instance && one.facts?.instance_id === instance) return [{ id: one.id, why: "says that it is the same process" }];
    return addresses(one).some((at) => own.has(at)) ? [{ id: one.id, why: "is at the same address" }] : [];
  });
}

export function Twins({ engine, engines }) {
  const twins = twinsOf(engine, engines);
  if (!twins.length) return null;
  return html`<${Note}><b>Registered more than once.</b> ${twins.map(({ id, why }, index) => html`<span key=${id}>${index > 0 && ", "}<a href=${to("engines", id)}>${id}</a> ${why}</span>`)}. Orders to the one don't wait for the other's, and a freeze holds for one alone.<//>`;
}
