// Parts of an engine's page that are asked of the engine itself.
import { get } from "../core/api.js";
import { fleet } from "../core/fleet.js";
import { html, useEffect, useState } from "../core/html.js";
import { ROOT } from "../core/place.js";
import { setQuery } from "../core/router.js";
import { refusedFor } from "../core/session.js";
import { useStore } from "../core/store.js";
import { Action, Age, Copy, Facts, OperationLink } from "../parts/bits.js";
import { Badge } from "../parts/badge.js";
import { useLoad } from "../parts/load.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { bytes, count, title, words } from "../parts/words.js";
import { ProfileLook } from "./profile_look.js";

const under = (engine) => `v1/engines/${encodeURIComponent(engine.id)}`;

/** `read` again whenever the engine's revision is another. */
function useOf(engine, what) {
  return useLoad((signal) => get(`${under(engine)}/${what}`, { signal }), `${engine.id} ${engine.revision} ${engine.health.state === "unreachable"}`);
}

/** Said once at the head of its page. */
export const AWAY = "ENGINE_UNREACHABLE";

function Held({ state: [{ data, problem }, again], children, refusedTitle }) {
  if (problem?.reason === AWAY && !data) return html`<${Empty} title="Not known while it does not answer." />`;
  if (problem && !data) return html`<${Failure} problem=${problem} retry=${again} title=${problem.forbidden ? refusedTitle : undefined} />`;
  return data ? children(data) : html`<${Loading} />`;
}

export function Ranks({ engine, can }) {
  const state = useLoad((signal, background) => get(`${under(engine)}/load`, { signal, background }), engine.id);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || state[1](), 5000);
    return () => clearInterval(timer);
  }, [engine.id]);
  return html`<${Held} state=${state}>${({ load }) => {
    const ranks = load.ranks ?? [];
    return html`<p class="small dim">${can ? `${count(can.world_size, "rank")} in all. ` : ""}Load is told for each data-parallel rank.</p>
      ${ranks.length === 0 ? html`<${Empty} title="The engine tells no load by rank." />` : html`<div class="scroll"><table><thead><tr>${["Rank", "Running", "Queued", "KV cache", ""].map((one) => html`<th scope="col" key=${one}>${one || html`<span class="sr">Share</span>`}</th>`)}</tr></thead>
      <tbody>${ranks.map((one) => html`<tr key=${one.data_parallel_rank}><th scope="row">${one.data_parallel_rank}</th><td>${one.running_requests}</td><td>${one.queued_requests}</td>
        <td>${one.used_kv_blocks} of ${one.total_kv_blocks} blocks</td><td><${Share} used=${one.used_kv_blocks} of=${one.total_kv_blocks} /></td></tr>`)}</tbody></table></div>`}
      <${Memory} rows=${load.memory ?? []} />`;
  }}<//>`;
}

const MEMORY = [["weights_bytes", "Weights"], ["kv_cache_bytes", "KV cache"], ["kept_bytes", "Kept"], ["in_use_bytes", "In use"]];

/** Of engines that tell it; those that don't measure themselves tell it with the result of a release. */
function Memory({ rows }) {
  if (!rows.length) return null;
  const told = MEMORY.filter(([name]) => rows.some((one) => one[name] !== undefined));
  return html`<h3 id="memory">Memory</h3><div class="scroll"><table aria-labelledby="memory"><thead><tr><th scope="col">Rank</th>${told.map(([name, said]) => html`<th scope="col" key=${name}>${said}</th>`)}</tr></thead>
    <tbody>${rows.map((one) => html`<tr key=${one.rank}><th scope="row">${one.rank}</th>${told.map(([name]) => html`<td key=${name}>${one[name] === undefined ? html`<span class="dim">not told</span>` : bytes(one[name])}</td>`)}</tr>`)}</tbody></table></div>
    <p class="small dim">As each rank measures it. Kept: copies of what is released. In use: all that the rank takes.</p>`;
}

function Share({ used, of }) {
  const share = of ? Math.round((100 * used) / of) : 0;
  return html`<span class="meter" role="meter" aria-label="KV cache in use" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${share}><span style=${{ width: `${share}%` }}></span></span>`;
}

export function Adapters({ engine, me, can }) {
  const adapters = engine.facts?.loras ?? [];
  const order = (kind, name) => setQuery({ order: kind, name }, { replace: false });
  const refused = refusedFor(me, "admin:adapters", engine);
  const offers = (kind) => can?.operations.includes(kind);
  if (!engine.facts) return html`<${Empty} title="Which there are is not known." />`;
  return html`${adapters.length === 0
    ? html`<${Empty} title="No adapter is loaded." />`
    : html`<div class="scroll"><table><thead><tr><th scope="col">Name</th><th scope="col">Number</th><th scope="col"><span class="sr">Orders</span></th></tr></thead><tbody>
      ${adapters.map((one) => html`<tr key=${one.name}><th scope="row" class="break">${one.name}</th><td>${one.id}</td><td class="end">${offers("unload_lora") && html`<${Action} tone="quiet" refused=${refused} id=${`unload-${one.id}`} onClick=${() => order("unload_lora", one.name)}>Unload<//>`}</td></tr>`)}</tbody></table></div>`}
    ${offers("load_lora") && html`<p><${Action} refused=${refused} id="load-adapter" onClick=${() => order("load_lora", "")}>Load an adapter<//></p>`}`;
}

const PROFILE_TONES = { ready: ["good", "check"], failed: ["bad", "cross"], running: ["busy", "run"], exporting: ["busy", "run"], unknown: ["ask", "ask"] };

export function Profiles({ engine, me }) {
  const [looked, look] = useState(null);
  const refused = refusedFor(me, "admin:profile", engine);
  const ended = useStore(fleet, (value) => [...value.operations.values()].filter((one) => one.engine === engine.id && one.kind === "profile").map((one) => one.state).join());
  const state = useLoad((signal) => get(`${under(engine)}/profiles`, { query: { page_size: 8 }, signal }), refused ? null : `${engine.id} ${ended}`);
  if (refused) return html`<p class="dim">${refused}</p>`;
  return html`${looked && html`<${ProfileLook} file=${looked} engine=${engine.id} onClose=${() => look(null)} />`}<${Held} state=${state}>${({ items }) => items.length === 0 ? html`<${Empty} title="Nothing was recorded yet." />` : html`<ul class="profiles">${items.map((one) => {
    const [tone, icon] = PROFILE_TONES[one.state] ?? ["dim", "wait"];
    return html`<li key=${one.id}><div><${OperationLink} id=${one.id} /> ${title(one.profiler)} <${Badge} tone=${tone} icon=${icon}>${title(one.state)}<//> <span class="small dim"><${Age} at=${one.created_at} /> by ${one.principal.subject}</span></div>
      ${one.artifacts.map((file) => html`<div class="small" key=${file.rank}>Rank ${file.rank}: ${bytes(file.size_bytes)} ${file.download
        ? html`<a href=${ROOT + file.download.slice(1)} download>Download</a> <button type="button" class="quiet" onClick=${() => look(file)}>Look at it</button>`
        : html`<span class="dim">at the engine: <code class="break">${file.path}</code></span>`}</div>`)}</li>`;
  })}</ul>`}<//>`;
}

export function KvEventSources({ engine }) {
  const state = useOf(engine, "kv-event-sources");
  if (state[0].problem?.reason === "UNSUPPORTED_OPERATION") return html`<${Empty} title="It does not say where it publishes cache events." />`;
  return html`<${Held} state=${state}>${({ items }) => items.length === 0 ? html`<${Empty} title="It publishes no cache events." />` : items.map((one, index) => html`<${Facts} key=${index} rows=${[
    ["Transport", one.transport],
    ["Endpoint", one.endpoint && html`<code class="break">${one.endpoint}</code>`],
    ["Topic", one.topic],
    ["Replay", one.replay_endpoint],
    ["Encoding", one.encoding],
    ["Data-parallel rank", one.data_parallel_rank],
  ]} />`)}<//>`;
}

export function Capabilities({ can }) {
  const list = (values) => (values.length ? values.map(words).join(", ") : "none");
  return html`<${Facts} rows=${[
    ["Orders", list(can.operations)],
    ["Can be cancelled", list(can.cancellable)],
    ["Pause modes", list(can.pause_modes)],
    ["Resources", Object.entries(can.resources).map(([name, policies]) => `${words(name)} (${policies.join(", ")})`).join("; ") || "none"],
    ["Weight sources", list(can.weight_sources)],
    ["Weight sessions", list(can.weight_sessions)],
    ["Caches", list(can.cache_kinds)],
    ["Profilers", list(can.profiler_kinds)],
    ["Can be reconfigured", list(can.reconfigurable)],
    ["Models", can.models.join(", ")],
  ]} /><p><${Copy} text=${JSON.stringify(can, null, 2)} label="Copy all as JSON" /></p>`;
}
