// The fleet: which engines serve, which do not, what runs on them now.
import { fleet } from "../core/fleet.js";
import { html, useMemo } from "../core/html.js";
import { to } from "../core/place.js";
import { route, setQuery } from "../core/router.js";
import { session } from "../core/session.js";
import { KeptStore, useStore } from "../core/store.js";
import { Age, Labels, OperationLink, Progress } from "../parts/bits.js";
import { CONDITIONS, Condition, STALE_MS, conditionOf, seenAt } from "../parts/condition.js";
import { Badge, OperationState } from "../parts/badge.js";
import { Icon } from "../parts/icons.js";
import { Sparkline } from "../parts/sparkline.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { brief, count, title, words } from "../parts/words.js";
import { Choose, ChooseAll, ChosenBar, chosen } from "./selection.js";
import { RegisterAction } from "./registering.js";
import { useTitle } from "./title.js";

const look = new KeptStore("fleet.look", "table", ["table", "cards"]);

export function FleetPage() {
  useTitle("Fleet");
  const { engines, seenAt, problem } = useStore(fleet);
  const { query } = useStore(route);
  const me = useStore(session, (value) => value.me);
  const list = useMemo(() => [...engines.values()].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true })), [engines]);
  const wanted = { text: query.get("q") ?? "", condition: query.get("state") ?? "", role: query.get("role") ?? "", version: query.get("version") ?? "", label: query.get("label") ?? "" };
  const shown = useMemo(() => list.filter((engine) => fits(engine, wanted)), [list, query.toString()]);
  const usual = useMemo(() => commonest(list.map((engine) => engine.facts?.weights.version).filter(Boolean)), [list]);
  if (!seenAt) {
    return html`<h1>Fleet</h1>${problem ? html`<${Failure} problem=${problem} />` : html`<${Loading} what="Reading the fleet" />`}`;
  }
  return html`<div class="head"><h1>Fleet</h1><p class="dim">${count(list.length, "engine")}</p><span class="head-end"><${RegisterAction} me=${me} />${list.length > 0 && html`<${Look} />`}</span></div>
    ${list.length === 0
      ? html`<${Empty} title="No engine is registered that you may see."><p>Register one here, with <code>chadburn engines register</code>, or have the gateway find them.</p><//>`
      : html`<${Summary} list=${list} chosen=${wanted.condition} />
        <${Filters} list=${list} shown=${shown} wanted=${wanted} />
        ${shown.length === 0
          ? html`<${Empty} title="No engine fits these filters."><button type="button" onClick=${() => setQuery({ q: "", state: "", role: "", version: "", label: "" })}>Show all</button><//>`
          : html`<${Engines} list=${shown} usual=${usual} />`}
        <${ChosenBar} />
        <p class="sr" role="status">${count(shown.length, "engine")} shown</p>`}`;
}

const labelsOf = (engine) => Object.entries(engine.labels).map(([name, value]) => `${name}=${value}`);

function fits(engine, { text, condition, role, version, label }) {
  const group = CONDITIONS.find((one) => one.name === condition);
  if (group && !group.has.includes(conditionOf(engine).name)) return false;
  if (role && engine.facts?.role !== role) return false;
  if (version && (engine.facts?.weights.version ?? "none") !== version) return false;
  const labels = labelsOf(engine);
  if (label && !labels.includes(label)) return false;
  const all = [engine.id, ...labels, engine.facts?.instance_id ?? ""].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

/** What most have; where that is all of them, it is nothing to speak of. */
function commonest(versions) {
  const counts = new Map();
  for (const one of versions) counts.set(one, (counts.get(one) ?? 0) + 1);
  return counts.size < 2 ? null : [...counts].sort((a, b) => b[1] - a[1])[0][0];
}

function Look() {
  const chosen = useStore(look);
  return html`<fieldset class="segments look"><legend class="sr">Shown as</legend>${["table", "cards"].map((one) => html`<label key=${one}>
    <input type="radio" name="look" checked=${chosen === one} onChange=${() => look.set(one)} /><span>${title(one)}</span></label>`)}</fieldset>`;
}

function Summary({ list, chosen }) {
  const names = list.map((engine) => conditionOf(engine).name);
  return html`<div class="summary" role="group" aria-label="Show engines that are">${CONDITIONS.map(({ name, label, tone, icon, has }) => {
    const number = names.filter((one) => has.includes(one)).length;
    const on = chosen === name;
    return html`<button type="button" key=${name} class="tile ${number ? tone : "none"}" aria-pressed=${on} onClick=${() => setQuery({ state: on ? "" : name })}>
      <span class="number">${number}</span><span class="tile-label"><${Icon} name=${icon} /> ${label}</span></button>`;
  })}</div>`;
}

function Filters({ list, shown, wanted }) {
  const values = (read) => [...new Set(list.map(read).filter(Boolean))].sort();
  const roles = values((engine) => engine.facts?.role);
  const versions = values((engine) => engine.facts && (engine.facts.weights.version ?? "none"));
  const labels = [...new Set(list.flatMap(labelsOf))].sort();
  const pick = (name, label, options, value) => options.length > 1 || value
    ? html`<label class="pick"><span>${label}</span><select value=${value} onChange=${(event) => setQuery({ [name]: event.target.value })}>
        <option value="">all</option>${options.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`
    : null;
  return html`<div class="filters" role="search">
    <label class="find"><span class="sr">Find by id or label</span><input type="search" placeholder="Find by id or label, such as zone=eu" value=${wanted.text}
      onInput=${(event) => setQuery({ q: event.target.value })} /></label>
    ${pick("label", "Label", labels, wanted.label)}${pick("role", "Role", roles, wanted.role)}${pick("version", "Weights", versions, wanted.version)}
    ${versions.length > 1 && html`<span class="skew"><${Icon} name="alert" /> ${versions.length} weight versions in this fleet</span>`}
    ${shown.length > 1 && html`<${ChooseAll} list=${shown} />`}
  </div>`;
}

function Engines({ list, usual }) {
  const cards = useStore(look) === "cards";
  const operations = useStore(fleet, (value) => value.operations);
  const ids = useStore(chosen);
  const runs = (engine) => (engine.running_operation ? operations.get(engine.running_operation) ?? null : null);
  if (cards) return html`<ul class="cards">${list.map((engine) => html`<${Card} key=${engine.id} engine=${engine} running=${runs(engine)} usual=${usual} on=${ids.has(engine.id)} />`)}</ul>`;
  return html`<div class="scroll"><table class="fleet"><thead><tr>${["Engine", "State", "Weights", "Role", "Under way", "Requests", "Seen", "Revision"].map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr></thead>
    <tbody>${list.map((engine) => html`<${Row} key=${engine.id} engine=${engine} running=${runs(engine)} usual=${usual} on=${ids.has(engine.id)} />`)}</tbody></table></div>`;
}

/** Nothing is drawn anew for an engine that is as it was. */
function useDrawn(draw, ...seen) {
  return useMemo(draw, seen);
}

function Row({ engine, running, usual, on }) {
  return useDrawn(() => html`<tr class=${stale(engine)}>
    <th scope="row"><${Choose} id=${engine.id} on=${on} /> <a class="name" href=${to("engines", engine.id)}>${engine.id}</a><${Labels} labels=${engine.labels} /></th>
    <td><${Condition} engine=${engine} />${engine.frozen && html` <${Frozen} frozen=${engine.frozen} />`}<${Released} facts=${engine.facts} /></td>
    <td data-label="Weights"><${Weights} facts=${engine.facts} usual=${usual} told /></td>
    <td data-label="Role">${engine.facts ? title(engine.facts.role) : ""}</td>
    <td data-label="Under way"><${Running} engine=${engine} operation=${running} /></td>
    <td data-label="Requests"><${Sparkline} engine=${engine.id} /></td>
    <td data-label="Seen"><${Age} at=${seenAt(engine)} stale=${STALE_MS} /></td>
    <td data-label="Revision"><${Revision} engine=${engine} /></td></tr>`, engine, running, usual, on);
}

function Card({ engine, running, usual, on }) {
  return useDrawn(() => html`<li class="card ${stale(engine)}">
    <div class="card-head"><${Choose} id=${engine.id} on=${on} /><a class="name grow" href=${to("engines", engine.id)}>${engine.id}</a><${Condition} engine=${engine} /></div>
    <${Labels} labels=${engine.labels} />
    ${engine.frozen && html`<p><${Frozen} frozen=${engine.frozen} /></p>`}<${Released} facts=${engine.facts} />
    <div class="card-facts"><span><${Weights} facts=${engine.facts} usual=${usual} told /></span><span>${engine.facts ? title(engine.facts.role) : ""}</span><span class="grow"></span><${Sparkline} engine=${engine.id} /></div>
    <${Running} engine=${engine} operation=${running} />
    <p class="card-foot small dim"><span>Seen <${Age} at=${seenAt(engine)} stale=${STALE_MS} /></span><${Revision} engine=${engine} /></p></li>`, engine, running, usual, on);
}

const stale = (engine) => (engine.health.state === "unreachable" ? "old" : "");

export function Frozen({ frozen }) {
  return html`<${Badge} tone="cold" icon="snow" title=${`${frozen.reason} (until ${frozen.until})`}>Frozen<//>`;
}

function Released({ facts }) {
  if (!facts?.released.length) return null;
  return html`<span class="small dim released">${facts.released.map(words).join(", ")}</span>`;
}

/** `usual`: the version that most have. `told`: what is wrong with them stands beside it already. */
export function Weights({ facts, usual, told }) {
  if (!facts) return html`<span class="dim">unknown</span>`;
  const { version, state, updates_since_flush: since } = facts.weights;
  const odd = usual && version !== usual;
  return html`<span class="version ${odd ? "odd" : ""}" title=${odd ? `Most engines have ${usual}` : undefined}>${version ?? html`<span class="dim">no version</span>`}${odd && html`<span class="sr"> (most engines have ${usual})</span>`}</span>${state !== "valid" && !told && html` <${Badge} tone=${state === "updating" ? "busy" : state === "unknown" ? "dim" : "bad"} icon=${state === "unknown" ? "unknown" : "alert"}>${state}<//>`}${since > 0 && html` <span class="small dim" title="Updates since the caches were flushed: cached values of earlier weights may still be used">${since} unflushed</span>`}`;
}

function Running({ engine, operation }) {
  if (!engine.running_operation) return html`<span class="dim nothing">nothing</span>`;
  if (!operation || operation.done) return html`<${OperationLink} id=${engine.running_operation} />`;
  const { progress } = operation;
  return html`<div class="running"><a href=${to("operations", operation.id)}>${title(words(operation.kind))}</a> ${operation.state === "running" ? "" : html`<${OperationState} operation=${operation} />`}
    ${progress && html`<span class="small dim">${words(progress.phase)}${progress.total ? ` ${progress.done} of ${progress.total} ${progress.unit}` : ""}</span>
    ${operation.state !== "reconciling" && html`<${Progress} done=${progress.done} total=${progress.total} label=${`${words(operation.kind)} of ${engine.id}`} />`}`}</div>`;
}

function Revision({ engine }) {
  if (engine.revision === null) return html`<span class="dim">none</span>`;
  const instance = engine.facts.instance_id;
  return html`<span><span class="mono">r${engine.revision}</span>${engine.revision_source === "gateway" && html` <span class="small dim" title="Kept by the gateway: changes by other clients of the engine may not show">by gateway</span>`}
    <span class="mono small dim instance" title=${`Instance ${instance}`}>${brief(instance)}</span></span>`;
}
