// One order to several engines: what it would do to each, then one order each, and how each ended.
import { call, get, newKey } from "../core/api.js";
import { fleet, learn } from "../core/fleet.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/html.js";
import { each } from "../core/pool.js";
import { refusedFor, session } from "../core/session.js";
import { useStore } from "../core/store.js";
import { Dialog } from "../parts/dialog.js";
import { Loading, Note } from "../parts/states.js";
import { count } from "../parts/words.js";
import { missing, named, orderOf, pathOf } from "./catalogue.js";
import { Field } from "./fields.js";
import { judgedAt } from "./plan.js";
import { Outcomes, Table } from "./several_rows.js";

const SETTLE_MS = 400;
const TYPED_FROM = 4;

/** Those that make sense for more than one engine at a time. */
export const SEVERAL = ["pause", "resume", "release_resources", "restore_resources", "update_weights", "flush_caches", "load_lora", "abort_requests"];

export function SeveralDialog({ engines, kind, onClose }) {
  const order = orderOf(kind);
  // Those that were chosen when it was opened, or that a retry is for; as they are now.
  const [ids, setIds] = useState(() => engines.map((one) => one.id));
  const known = useStore(fleet, (value) => value.engines);
  const chosen = ids.map((id) => known.get(id)).filter(Boolean);
  const [sent, setSent] = useState(null);
  const retry = (failed) => {
    setIds(failed);
    setSent(null);
  };
  return html`<${Dialog} wide title="${named(kind)}: ${count(chosen.length, "engine")}" onClose=${onClose}>${sent
    ? html`<${Outcomes} sent=${sent} retry=${retry} onClose=${onClose} />`
    : html`<${SeveralForm} key=${ids.join()} engines=${chosen} order=${order} onSent=${setSent} onClose=${onClose} />`}<//>`;
}

function useCapabilities(engines) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    const map = new Map();
    each(engines, async ({ id }) => {
      try {
        map.set(id, { can: await get(`v1/engines/${encodeURIComponent(id)}/capabilities`, { signal: stop.signal }) });
      } catch (problem) {
        map.set(id, { problem });
      }
    }, stop.signal).then(() => stop.signal.aborted || setFound(map));
    return () => stop.abort();
  }, []);
  return found;
}

function SeveralForm({ engines, order, onSent, onClose }) {
  const found = useCapabilities(engines);
  if (!found) return html`<${Loading} what="Asking the engines what they can do" />`;
  return html`<${Filled} engines=${engines} order=${order} found=${found} onSent=${onSent} onClose=${onClose} />`;
}

function Filled({ engines, order, found, onSent, onClose }) {
  const { me, phase } = useStore(session);
  const [typed, setTyped] = useState({});
  const [plans, setPlans] = useState({ of: null, map: new Map() });
  const [sending, setSending] = useState(false);
  const keys = useRef(new Map());
  const able = engines.filter((one) => !hindrance(one, order, found.get(one.id), me));
  const names = able.map((one) => one.id).join();
  const shared = useMemo(() => able.length ? inCommon(able, found) : null, [names]);
  const fields = useMemo(() => shared ? order.fields(shared) : [], [shared]);
  const values = Object.fromEntries(fields.map((field) => [field.name, typed[field.name] ?? field.value]));
  const lacks = shared ? missing(order, fields, values, shared) : null;
  const reason = (typed.reason ?? "").trim();
  const bodies = new Map(able.map((one) => [one.id, said(order, one, found, values, reason, typed.queue)]));
  const key = JSON.stringify([[...bodies], engines.map((one) => [one.revision, one.running_operation])]);

  useEffect(() => {
    if (lacks || phase !== "in" || !able.length) return undefined;
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      const map = new Map();
      await each(able, async (engine) => {
        try {
          const answer = await call(order.method ?? "POST", pathOf(order, engine.id, values), { body: { ...bodies.get(engine.id), dry_run: true }, signal: stop.signal });
          map.set(engine.id, { plan: answer.body });
        } catch (problem) {
          map.set(engine.id, { problem });
        }
      }, stop.signal);
      if (!stop.signal.aborted) setPlans({ of: key, map });
    }, SETTLE_MS);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [key, lacks, phase]);

  const judged = plans.of === key ? plans.map : new Map();
  const ready = able.filter((one) => judged.get(one.id)?.plan);
  const grave = (order.grave?.(values) ?? false) || ready.length >= TYPED_FROM;
  const phrase = count(ready.length, "engine");
  const needsReason = me?.reason_required?.includes(order.kind) && !reason;
  const go = ready.length > 0 && !lacks && !needsReason && (!grave || typed.confirmation === phrase);
  const change = (name) => (value) => setTyped({ ...typed, [name]: value });

  const send = async (event) => {
    event.preventDefault();
    if (!go || sending) return;
    setSending(true);
    const results = new Map();
    await each(ready, async ({ id }) => {
      const body = { ...bodies.get(id), expected_revision: judgedAt(judged.get(id).plan) };
      if (!keys.current.has(id)) keys.current.set(id, newKey());
      results.set(id, await give(order, id, values, body, keys.current.get(id)));
    });
    onSent({ order, results });
  };

  return html`<form class="order" onSubmit=${send}>
    <p class="lead">${order.says}</p>
    ${able.length === 0 && html`<${Note} icon="lock">None of them can be given this order now.<//>`}
    ${fields.filter((field) => !field.when || field.when(values)).map((field) => html`<${Field} key=${field.name} id=${`several-${field.name}`} field=${field} value=${values[field.name]} onChange=${change(field.name)} />`)}
    ${able.length > 0 && html`<${Field} id="several-reason" field=${{ type: "text", label: needsReason ? "Reason (needed)" : "Reason", most: 500 }} value=${typed.reason ?? ""} onChange=${change("reason")} />
      <${Field} id="several-queue" field=${{ type: "flag", label: "Wait in line where another operation is under way" }} value=${typed.queue ?? false} onChange=${change("queue")} />`}
    ${lacks && html`<p class="dim">${lacks}</p>`}
    <${Table} engines=${engines} rows=${(engine) => ({ ...judged.get(engine.id), hindrance: hindrance(engine, order, found.get(engine.id), me) })} asking=${!lacks && able.length > 0 && plans.of !== key} />
    ${grave && ready.length > 0 && html`<div class="field grave"><label for="several-confirmation">${ready.map((one) => one.id).join(", ")}. Type <b class="mono">${phrase}</b> to confirm</label>
      <input id="several-confirmation" class="mono" autocomplete="off" value=${typed.confirmation ?? ""} onInput=${(event) => change("confirmation")(event.target.value)} /></div>`}
    <footer><button type="button" onClick=${onClose}>Close</button><button type="submit" class=${grave ? "danger" : "primary"} aria-disabled=${go ? undefined : "true"}>${sending ? "Giving the orders …" : `${named(order.kind)}: ${phrase}`}</button></footer>
  </form>`;
}

/** One order, twice at most: where there was no answer, once more under its key is not another. */
async function give(order, id, values, body, key) {
  const once = () => call(order.method ?? "POST", pathOf(order, id, values), { body, headers: { "Idempotency-Key": key } });
  try {
    const answer = await once().catch((problem) => (problem.status === 0 ? once() : Promise.reject(problem)));
    learn(answer.body);
    return { operation: answer.body.id };
  } catch (problem) {
    return { problem };
  }
}

/** Why an engine can't be given it, whatever the form says; null: it can. */
function hindrance(engine, order, found, me) {
  const refused = refusedFor(me, order.scope, engine);
  if (refused) return refused;
  if (!engine.facts) return "Nothing is known of it yet.";
  if (!found?.can) return found?.problem?.detail ?? "It does not say what it can do.";
  if (!found.can.operations.includes(order.kind)) return "It does not offer this order.";
  return order.idle?.({ can: found.can, facts: engine.facts, several: true }) ?? null;
}

/** What all of them offer, as one engine's capabilities would say it. */
function inCommon(engines, found) {
  const [first, ...others] = engines.map((one) => found.get(one.id).can);
  const both = (a, b) => a.filter((one) => b.includes(one));
  const can = { ...first };
  for (const other of others) {
    for (const [name, value] of Object.entries(can)) if (Array.isArray(value)) can[name] = both(value, other[name]);
    can.resources = Object.fromEntries(Object.entries(can.resources).filter(([name]) => name in other.resources).map(([name, policies]) => [name, both(policies, other.resources[name])]));
    can.resources_together ||= other.resources_together;
    can.abort_all &&= other.abort_all;
  }
  const all = engines.map((one) => one.facts);
  const paused = all.every((one) => one.admission === "paused");
  return {
    can,
    several: true,
    facts: { ...all[0], admission: paused ? "paused" : "open", released: [...new Set(all.flatMap((one) => one.released))] },
  };
}

function said(order, engine, found, values, reason, queue) {
  const body = order.body(values, { can: found.get(engine.id).can, facts: engine.facts, several: true });
  return JSON.parse(JSON.stringify({ ...body, reason: reason || undefined, when_busy: queue ? "queue" : undefined }));
}
