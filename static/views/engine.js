// One engine: what it says of itself, and the orders that it takes.
import { get } from "../core/api.js";
import { fleet, learnEngine, onEvent } from "../core/fleet.js";
import { html, useEffect, useMemo, useRef } from "../core/html.js";
import { HOME, to } from "../core/place.js";
import { route, setQuery } from "../core/router.js";
import { refusedFor, session } from "../core/session.js";
import { useStore } from "../core/store.js";
import { atFull } from "../core/time.js";
import { GROUPS, ORDERS, named } from "../orders/catalogue.js";
import { OrderDialog } from "../orders/dialog.js";
import { Action, Age, Copy, Facts, Labels, Progress } from "../parts/bits.js";
import { OperationState } from "../parts/badge.js";
import { Condition, STALE_MS, conditionOf, seenAt } from "../parts/condition.js";
import { Found, Twins } from "../parts/origin.js";
import { useLoad } from "../parts/load.js";
import { OperationTable } from "../parts/operations.js";
import { Empty, Failure, Loading, Note } from "../parts/states.js";
import { title, words } from "../parts/words.js";
import { AWAY, Adapters, Capabilities, KvEventSources, Profiles, Ranks } from "./engine_parts.js";
import { Weights } from "./fleet.js";
import { Freezing } from "./freezing.js";
import { LoadChart } from "./load_chart.js";
import { Registration } from "./registering.js";
import { useTitle } from "./title.js";

export function EnginePage({ id }) {
  useTitle(id);
  const engine = useStore(fleet, (value) => value.engines.get(id));
  const path = `v1/engines/${encodeURIComponent(id)}`;
  const [{ data, problem }, again] = useLoad(async (signal) => {
    const read = await get(path, { signal });
    learnEngine(read);
    return read;
  }, id);
  const listed = useRef(false);
  useEffect(() => {
    if (!engine && listed.current) again(); // it was there and is not: removed, or out of sight
    listed.current = Boolean(engine);
  }, [!engine]);
  const shown = engine ?? data;
  if (!shown) {
    return html`<${Crumbs} /><h1>${id}</h1>${problem
      ? html`<${Failure} problem=${problem} retry=${again} title=${problem.status === 404 ? "There is no such engine, or none that you may see" : undefined} />`
      : html`<${Loading} what="Reading the engine" />`}`;
  }
  return html`<${Crumbs} /><${Engine} engine=${shown} />`;
}

function Crumbs() {
  return html`<nav class="crumbs" aria-label="Where you are"><a href=${HOME}>Fleet</a></nav>`;
}

function Engine({ engine }) {
  const { query } = useStore(route);
  const me = useStore(session, (value) => value.me);
  const engines = useStore(fleet, (value) => value.engines);
  const ordering = query.get("order");
  const preset = useMemo(() => (query.get("name") ? { name: query.get("name") } : {}), [ordering]);
  const condition = conditionOf(engine);
  const { facts } = engine;
  const path = `v1/engines/${encodeURIComponent(engine.id)}`;
  // Asked anew of an engine that is another one, or that answers again.
  const away = engine.health.state === "unreachable";
  const [capabilities] = useLoad((signal) => get(`${path}/capabilities`, { signal }), `${engine.id} ${facts?.instance_id} ${away}`);
  const [info] = useLoad((signal) => get(`${path}/info`, { signal }), `${engine.id} ${engine.revision} ${away}`);
  return html`<div class="head"><h1>${engine.id}</h1><${Condition} engine=${engine} /><${Found} engine=${engine} /><${Labels} labels=${engine.labels} /><span class="head-end"><${Freezing} engine=${engine} me=${me} /><${Registration} engine=${engine} me=${me} /></span></div>
    <p class="dim why">${condition.why} Seen <${Age} at=${seenAt(engine)} stale=${STALE_MS} />.</p>
    <${Twins} engine=${engine} engines=${engines} />
    ${engine.frozen && html`<${Note} tone="cold" icon="snow"><b>Frozen until ${atFull(engine.frozen.until)}.</b> ${engine.frozen.reason} <span class="dim">By ${engine.frozen.by.subject}.</span><//>`}
    <${UnderWay} engine=${engine} />
    <${OrderBar} engine=${engine} can=${capabilities.data} problem=${capabilities.problem} me=${me} />
    <div class="columns"><div>
      <section aria-labelledby="facts"><h2 id="facts">Facts</h2>${facts ? html`<${EngineFacts} engine=${engine} info=${info.data?.info} />` : html`<${Empty} title="Nothing is known of it yet." />`}</section>
      <section aria-labelledby="ranks"><h2 id="ranks">Ranks</h2><${Ranks} engine=${engine} can=${capabilities.data} /></section>
      <section aria-labelledby="adapters"><h2 id="adapters">LoRA adapters</h2><${Adapters} engine=${engine} me=${me} can=${capabilities.data} /></section>
    </div><div>
      <section aria-labelledby="load"><h2 id="load">Load</h2><${LoadChart} engine=${engine.id} /></section>
      <section aria-labelledby="profiles"><h2 id="profiles">Profiles</h2><${Profiles} engine=${engine} me=${me} /></section>
      <section aria-labelledby="kv"><h2 id="kv">KV event sources</h2><${KvEventSources} engine=${engine} /></section>
    </div></div>
    <section aria-labelledby="history"><h2 id="history">History</h2><${History} engine=${engine.id} /></section>
    <section aria-labelledby="can"><h2 id="can">Capabilities</h2>${capabilities.data
      ? html`<${Capabilities} can=${capabilities.data} />`
      : capabilities.problem?.reason === AWAY ? html`<${Empty} title="Not known while it does not answer." />` : capabilities.problem ? html`<${Failure} problem=${capabilities.problem} title="The engine does not say what it can do" />` : html`<${Loading} />`}</section>
    ${ordering && html`<${OrderDialog} key=${ordering} engine=${engine} kind=${ordering} preset=${preset} onClose=${() => setQuery({ order: "", name: "" }, { replace: false })} />`}`;
}

function UnderWay({ engine }) {
  const operation = useStore(fleet, (value) => value.operations.get(engine.running_operation));
  if (!engine.running_operation || !operation || operation.done) return null;
  const { progress } = operation;
  return html`<a class="underway" href=${to("operations", operation.id)}><b>${title(words(operation.kind))}</b> <${OperationState} operation=${operation} />
    <span class="dim">${progress ? `${words(progress.phase)}${progress.total ? `, ${progress.done} of ${progress.total} ${progress.unit}` : ""}` : ""} · by ${operation.principal.subject}</span>
    ${progress && operation.state !== "reconciling" && html`<${Progress} done=${progress.done} total=${progress.total} label=${words(operation.kind)} />`}</a>`;
}

/** What the engine offers and the caller may not, or not now, is shown with the reason. */
function OrderBar({ engine, can, problem, me }) {
  if (problem) return html`<${Note} tone="bad"><b>No orders can be formed.</b> ${problem.detail}<//>`;
  if (!can || !engine.facts) return null;
  const offered = ORDERS.filter((one) => can.operations.includes(one.kind));
  const about = { can, facts: engine.facts };
  return html`<div class="orders" role="group" aria-label="Orders">${GROUPS.map((group) => {
    const orders = offered.filter((one) => one.group === group);
    return orders.length > 0 && html`<div class="order-group" key=${group}><span class="small dim">${group}</span><div>${orders.map((order) => {
      const refused = refusedFor(me, order.scope, engine) ?? order.idle?.(about) ?? null;
      return html`<${Action} key=${order.kind} id=${`do-${order.kind}`} refused=${refused} onClick=${() => setQuery({ order: order.kind }, { replace: false })}>${named(order.kind)}<//>`;
    })}</div></div>`;
  })}</div>`;
}

function EngineFacts({ engine, info }) {
  const { facts } = engine;
  const pause = facts.pause;
  const by = pause && (pause.by === "external" ? "another client" : html`<a href=${to("operations", pause.by)}>an operation</a>`);
  const shape = info?.parallelism;
  return html`<${Facts} rows=${[
    ["Admission", title(facts.admission)],
    ["Pause", pause && html`${pause.mode ? title(pause.mode) : "Mode unknown"}, epoch ${pause.epoch}, by ${by}${pause.since && html`, <${Age} at=${pause.since} />`}; ${pause.requests_held} held, ${pause.requests_kept} frozen`],
    ["Released", facts.released.length ? facts.released.map(words).join(", ") : "Nothing"],
    ["Weights", html`<${Weights} facts=${facts} />`],
    ["Role", title(facts.role)],
    ["Engine", info && [info.engine_name, info.engine_version].filter(Boolean).join(" ")],
    ["Models", info?.models?.join(", ")],
    ["Parallelism", shape && Object.entries(shape).map(([name, value]) => `${words(name).replace(" parallel size", "")} ${value}`).join(" · ")],
    ["Revision", html`r${engine.revision} <span class="dim">${engine.revision_source === "gateway" ? "kept by the gateway: other clients are not held off by it" : "kept by the engine"}</span>`],
    ["Epochs", `pause ${facts.pause_epoch}, release ${facts.release_epoch}`],
    ["Instance", html`<code class="break">${facts.instance_id}</code> <${Copy} text=${facts.instance_id} what="instance id" />`],
    ["Address", html`<code class="break">${engine.members.map((one) => (one.admin === one.control ? one.admin : `${one.admin} (read at ${one.control})`)).join(", ")}</code>`],
    ["Dialect", engine.dialect],
    ["Credential", engine.tls.credential],
    ["Registered", html`<${Age} at=${engine.created_at} />${engine.generation > 1 && html`, changed <${Age} at=${engine.updated_at} />`}`],
  ]} />`;
}

function History({ engine }) {
  const [{ data, problem }, again] = useLoad((signal, background) => get("v1/operations", { query: { engine, page_size: 12 }, signal, background }), engine);
  useEffect(() => onEvent((event) => {
    const read = event.type === "snapshot"; // what came before it, and after this was read, it does not tell
    if (!read && (event.engine !== engine || !["accepted", "completed", "failed", "cancelled", "settled", "reconciling"].includes(event.type))) return;
    setTimeout(again, 200);
  }), [engine]);
  if (problem && !data) return html`<${Failure} problem=${problem} retry=${again} />`;
  if (!data) return html`<${Loading} />`;
  if (!data.items.length) return html`<${Empty} title="No order has been given to it yet." />`;
  return html`<${OperationTable} items=${data.items} without="engine" />
    ${data.next_page_token && html`<p><a href=${`${to("operations")}?engine=${encodeURIComponent(engine)}`}>All of its history</a></p>`}`;
}
