// One operation, from its acceptance to its end, as it happens.
import { get } from "../core/api.js";
import { fleet, learn, onEvent } from "../core/fleet.js";
import { html, useEffect, useState } from "../core/html.js";
import { ROOT, to } from "../core/place.js";
import { refusedFor, session } from "../core/session.js";
import { useStore } from "../core/store.js";
import { atFull, between, span, useNow, zone } from "../core/time.js";
import { gatewayTime } from "../core/skew.js";
import { pathOf, orderOf, scopeOf } from "../orders/catalogue.js";
import { Action, Copy, Facts, Json, Progress } from "../parts/bits.js";
import { OperationState, Verification, stateMeaning } from "../parts/badge.js";
import { useLoad } from "../parts/load.js";
import { Actor, detail } from "../parts/operations.js";
import { Failure, Loading, Note } from "../parts/states.js";
import { count, title, words } from "../parts/words.js";
import { Evidence } from "./evidence.js";
import { CancelDialog, SettleDialog } from "./ending.js";
import { Lanes, Phases, Timeline } from "./timeline.js";
import { useTitle } from "./title.js";

export function OperationPage({ id }) {
  const live = useStore(fleet, (value) => value.operations.get(id));
  const [{ data, problem }, again] = useLoad(async (signal) => {
    const read = await get(`v1/operations/${encodeURIComponent(id)}`, { signal });
    learn(read);
    return read;
  }, id);
  const known = live ?? data;
  useTitle(known ? `${title(words(known.kind))} of ${known.engine}` : "Operation");
  return html`<nav class="crumbs" aria-label="Where you are"><a href=${to("operations")}>Ledger</a></nav>
    ${known
      ? html`<${Operation} operation=${known} />`
      : html`<h1>Operation</h1>${problem ? html`<${Failure} problem=${problem} retry=${again} title=${problem.status === 404 ? "There is no such operation, or none that you may see" : undefined} />` : html`<${Loading} what="Reading the operation" />`}`}`;
}

function useEvents(operation) {
  const [events, setEvents] = useState([]);
  const id = operation.id;
  const [{ data, problem }, again] = useLoad(async (signal) => {
    const found = [];
    let after;
    do {
      const page = await get(`v1/operations/${encodeURIComponent(id)}/events`, { query: { after, page_size: 1000 }, signal });
      found.push(...page.items);
      after = page.next_page_token;
    } while (after);
    return found;
  }, id);
  const add = (some) => setEvents((before) => {
    const bySequence = new Map([...before, ...some].map((one) => [one.sequence, one]));
    return bySequence.size === before.length ? before : [...bySequence.values()].sort((a, b) => a.sequence - b.sequence);
  });
  useEffect(() => {
    if (data) add(data.filter((one) => one.sequence));
  }, [data]);
  // A new snapshot says that something was missed: read them again.
  useEffect(() => onEvent((event) => (event.type === "snapshot" ? again() : event.operation === id && add([event]))), [id]);
  const cut = data?.some((one) => one.type === "reset");
  return { events, problem, cut };
}

function Operation({ operation }) {
  const me = useStore(session, (value) => value.me);
  const engine = useStore(fleet, (value) => value.engines.get(operation.engine)) ?? { id: operation.engine, labels: {} };
  const { events, problem, cut } = useEvents(operation);
  const [asking, ask] = useState(null);
  const scope = scopeOf(operation.kind);
  const close = () => ask(null);
  const running = operation.state === "running";
  const [can] = useLoad((signal) => get(`v1/engines/${encodeURIComponent(operation.engine)}/capabilities`, { signal }), running ? operation.engine : null);
  const unknown = operation.state === "reconciling";
  return html`<div class="head"><h1>${title(words(operation.kind))}</h1><${OperationState} operation=${operation} /><${Verification} value=${operation.verification} /></div>
    <p class="lead">of <a href=${to("engines", operation.engine)}>${operation.engine}</a>${detail(operation) && html` · ${detail(operation)}`} · <${Actor} principal=${operation.principal} /> · <${Duration} operation=${operation} /></p>
    ${operation.reason && html`<blockquote>${operation.reason}</blockquote>`}
    ${unknown
      ? html`<${Note} tone="ask" icon="ask"><b>The outcome is not known.</b> ${stateMeaning("reconciling")} Until it is known, no other exclusive order goes to this engine.<//>`
      : !operation.done && html`<p class="dim">${stateMeaning(operation.state)}</p>`}
    ${operation.error && html`<${Fault} error=${operation.error} />`}
    ${operation.warnings.map((one, index) => html`<${Note} key=${index}><b>${words(one.reason.toLowerCase())}.</b> ${one.message}<//>`)}
    <div class="buttons">
      ${!operation.done && html`<${Action} id="cancel" refused=${refusedFor(me, "admin:cancel", engine) ?? refusedFor(me, scope, engine) ?? tooLate(operation, can.data)} onClick=${() => ask("cancel")}>Cancel …<//>`}
      ${unknown && html`<${Action} id="settle" refused=${refusedFor(me, "admin:settle", engine) ?? refusedFor(me, scope, engine)} onClick=${() => ask("settle")}>Settle …<//>`}
      <${Copy} text=${asCurl(operation)} label="Copy as curl" />
      <${Copy} text=${operation.id} label="Copy its id" />
      ${me.scopes.includes("admin:audit") && html`<a class="button quiet" href=${`${to("audit")}?operation=${operation.id}`}>In the audit</a>`}
    </div>
    <div class="columns"><div>
      <section aria-labelledby="progress"><h2 id="progress">Progress</h2><${Phases} events=${events} operation=${operation} />
        ${operation.ranks.length > 0 && html`<h3>${count(operation.ranks.length, "rank")}</h3><${Lanes} events=${events} operation=${operation} />`}</section>
      ${operation.result && html`<section aria-labelledby="result"><h2 id="result">Result</h2><${Evidence} operation=${operation} /></section>`}
      <section aria-labelledby="order"><h2 id="order">Order</h2><${Order} operation=${operation} /></section>
    </div><div>
      <section aria-labelledby="events"><h2 id="events">Events <span class="small dim">${zone()}</span></h2>
        ${problem && !events.length ? html`<${Failure} problem=${problem} />` : html`${cut && html`<p class="dim">Earlier events are no longer kept.</p>`}<${Timeline} events=${events} operation=${operation} />`}</section>
    </div></div>
    ${asking === "cancel" && html`<${CancelDialog} operation=${operation} onClose=${close} />`}
    ${asking === "settle" && html`<${SettleDialog} operation=${operation} onClose=${close} />`}`;
}

/** Why it is not for the engine to cancel any more; null: it may be. */
function tooLate({ state, kind, cancel_requested }, can) {
  if (state === "reconciling") return "Its outcome is not known, and the engine is being asked. A person can settle it.";
  if (cancel_requested) return "The engine was asked already.";
  if (state === "running" && can && !can.cancellable.includes(kind)) return `This engine does not cancel ${words(kind)} once it is sent.`;
  return null;
}

function Duration({ operation }) {
  const now = useNow();
  if (operation.ended_at) return html`took ${span(between(operation.created_at, operation.ended_at))}`;
  return html`for ${span(gatewayTime(now) - Date.parse(operation.created_at))}`;
}

const EFFECTS = {
  none: "Nothing was changed at the engine.",
  rolled_back: "What had been changed was taken back.",
  applied_in_part: "A part of it is in effect. Look at the ranks before the next order.",
  unknown: "What it left behind at the engine is not known.",
};

function Fault({ error }) {
  return html`<div class="note bad"><div><p><b>${title(words(error.reason.toLowerCase()))}.</b> ${error.message}</p>
    <p>${EFFECTS[error.effect] ?? error.effect}${error.ranks.length > 0 && ` ${error.ranks.length === 1 ? "Rank" : "Ranks"} ${error.ranks.join(", ")} failed.`}${error.retryable && " The same order may be given again."}</p>
    <p class="small dim"><a href=${`${ROOT}problems/${error.reason.toLowerCase().replaceAll("_", "-")}`} target="_blank" rel="noopener">${error.reason}</a> · ${error.code}</p></div></div>`;
}

function Order({ operation }) {
  return html`<${Facts} rows=${[
    ["Accepted", atFull(operation.created_at)],
    ["Begun", atFull(operation.started_at)],
    ["Ended", atFull(operation.ended_at)],
    ["Deadline", atFull(operation.deadline_at)],
    ["By", html`${operation.principal.subject}, client ${operation.principal.client_id}`],
    ["Issuer", html`<span class="break">${operation.principal.issuer}</span>`],
    ["Idempotency key", operation.idempotency_key && html`<code class="break">${operation.idempotency_key}</code>`],
    ["Revision", operation.expected_revision === null && operation.revision === null ? null : `${operation.expected_revision === null ? "not asked for" : `expected ${operation.expected_revision}`}${operation.revision === null ? "" : `, ${operation.revision} after it`}`],
    ["Trace", operation.trace_id && html`<code class="break">${operation.trace_id}</code>`],
    ["Id", html`<code class="break">${operation.id}</code>`],
  ]} /><details><summary>Request as JSON</summary><${Json} value=${operation.request} label="Request" /></details>`;
}

/** The order again, for a terminal; under a key of its own, and with a token of whoever runs it. */
function asCurl(operation) {
  const order = orderOf(operation.kind);
  const { admission, ...request } = operation.request;
  const body = admission?.pause ? { ...request, pause: admission.pause } : admission?.under_pause ? { ...request, under_pause: admission.under_pause } : request;
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const url = `${location.origin}${ROOT}${pathOf(order, operation.engine, operation.request)}`;
  const sent = { ...body, ...(operation.reason ? { reason: operation.reason } : {}) };
  if (order.method === "DELETE") delete sent.name;
  return [
    `curl -sS -X ${order.method ?? "POST"} ${quoted(url)}`,
    `  -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json'`,
    `  -H "Idempotency-Key: $(date +%s%N)"`,
    `  -d ${quoted(JSON.stringify(sent, (_, value) => (value === null ? undefined : value)))}`,
  ].join(" \\\n");
}
