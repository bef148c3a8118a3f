// The audit: who asked for what, from where, and whether it was allowed.
import { html } from "../core/html.js";
import { to } from "../core/place.js";
import { route, setQuery } from "../core/router.js";
import { refusedFor, session } from "../core/session.js";
import { useStore } from "../core/store.js";
import { atBrief, atFull } from "../core/time.js";
import { Badge } from "../parts/badge.js";
import { OperationLink } from "../parts/bits.js";
import { Actor } from "../parts/operations.js";
import { Export, Search, moment, usePages } from "../parts/pager.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { title, words } from "../parts/words.js";
import { useTitle } from "./title.js";

const FIELDS = [
  { name: "action", label: "Action", hint: "such as pause, login" },
  { name: "engine", label: "Engine" },
  { name: "operation", label: "Operation", mono: true },
  { name: "principal", label: "By" },
  { name: "since", label: "Since", type: "datetime-local" },
];

const TONES = {
  allowed: ["dim", "check"], accepted: ["dim", "wait"], succeeded: ["good", "check"],
  refused: ["warn", "lock"], denied: ["warn", "lock"], failed: ["bad", "cross"], cancelled: ["dim", "stop"], settled: ["warn", "person"],
};

export function AuditPage() {
  useTitle("Audit");
  const me = useStore(session, (value) => value.me);
  const refused = refusedFor(me, "admin:audit");
  return html`<div class="head"><h1>Audit</h1><p class="dim">Who asked for what, allowed or refused, newest first. That you read it is written down too.</p></div>
    ${refused ? html`<${Failure} problem=${{ forbidden: true, title: "You may not read the audit", detail: refused, reason: "INSUFFICIENT_SCOPE" }} />` : html`<${Rows} />`}`;
}

function Rows() {
  const { query } = useStore(route);
  const filters = { ...Object.fromEntries(FIELDS.map(({ name }) => [name, query.get(name) ?? ""])), since: moment(query.get("since")) };
  const { items, problem, next, loading, again } = usePages("v1/audit", filters);
  return html`<${Search} fields=${FIELDS} query=${query}><${Export} path="v1/audit" query=${filters} name="audit" /><//>
    ${problem && html`<${Failure} problem=${problem} retry=${again} />`}
    ${!items ? !problem && html`<${Loading} />` : items.length === 0
      ? html`<${Empty} title="No entry fits."><button type="button" onClick=${() => setQuery(Object.fromEntries(FIELDS.map(({ name }) => [name, ""])))}>Show all</button><//>`
      : html`<div class="scroll"><table class="audit"><thead><tr>${["When", "Who", "Action", "Outcome", "Engine", "Operation", "From", "Words"].map((one) => html`<th scope="col" key=${one}>${one}</th>`)}</tr></thead>
        <tbody>${items.map((one) => html`<${Entry} key=${one.id} entry=${one} />`)}</tbody></table></div>`}
    ${next && html`<p class="center"><button type="button" onClick=${next}>${loading ? "Reading …" : "Show more"}</button></p>`}`;
}

function Entry({ entry }) {
  const [tone, icon] = TONES[entry.outcome] ?? ["dim", "dot"];
  return html`<tr><td><time datetime=${entry.at} title=${atFull(entry.at)}>${atBrief(entry.at)}</time></td>
    <td data-label="Who">${entry.principal ? html`<${Actor} principal=${entry.principal} />` : html`<span class="dim">nobody known</span>`}</td>
    <td data-label="Action"><span title=${entry.scopes.join(", ")}>${title(words(entry.action))}</span></td>
    <td data-label="Outcome"><${Badge} tone=${tone} icon=${icon}>${title(words(entry.outcome))}<//>${entry.reason && html`<span class="small dim detail">${entry.reason}</span>`}</td>
    <td data-label="Engine">${entry.engine && html`<a href=${to("engines", entry.engine)}>${entry.engine}</a>`}</td>
    <td data-label="Operation">${entry.operation && html`<${OperationLink} id=${entry.operation} />`}</td>
    <td data-label="From" class="mono small">${entry.source}</td>
    <td data-label="Words" class="wrap">${entry.note}</td></tr>`;
}
