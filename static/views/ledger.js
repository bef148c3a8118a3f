// The ledger: every order that was ever accepted.
import { get } from "../core/api.js";
import { onEvent } from "../core/fleet.js";
import { html, useEffect, useState } from "../core/html.js";
import { to } from "../core/place.js";
import { go, route, setQuery } from "../core/router.js";
import { useStore } from "../core/store.js";
import { ORDERS } from "../orders/catalogue.js";
import { OPERATION_STATES, stateWord } from "../parts/badge.js";
import { OperationTable } from "../parts/operations.js";
import { Export, Search, moment, usePages } from "../parts/pager.js";
import { Empty, Failure, Loading, Note } from "../parts/states.js";
import { title, words } from "../parts/words.js";
import { useTitle } from "./title.js";

const FIELDS = [
  { name: "engine", label: "Engine" },
  { name: "kind", label: "Order", options: ORDERS.map((one) => one.kind), said: (kind) => title(words(kind)) },
  { name: "state", label: "State", options: OPERATION_STATES, said: stateWord },
  { name: "principal", label: "By" },
  { name: "idempotency_key", label: "Key", hint: "the whole key", mono: true },
  { name: "since", label: "Since", type: "datetime-local" },
];

export function LedgerPage() {
  useTitle("Ledger");
  const { query } = useStore(route);
  const filters = { ...Object.fromEntries(FIELDS.map(({ name }) => [name, query.get(name) ?? ""])), since: moment(query.get("since")) };
  const { items, problem, next, loading, again } = usePages("v1/operations", filters);
  const [fresh, setFresh] = useState(0);
  useEffect(() => onEvent((event) => event.type === "accepted" && setFresh((number) => number + 1)), []);
  const show = () => {
    setFresh(0);
    again();
  };
  return html`<div class="head"><h1>Ledger</h1><p class="dim">Every order that was accepted, newest first.</p></div>
    <${FindById} />
    <${Search} fields=${FIELDS} query=${query}><${Export} path="v1/operations" query=${filters} name="operations" /><//>
    ${fresh > 0 && html`<${Note} tone="busy" icon="run">${fresh === 1 ? "One order has" : `${fresh} orders have`} been given since. <button type="button" class="quiet" onClick=${show}>Show</button><//>`}
    ${problem && html`<${Failure} problem=${problem} retry=${again} />`}
    ${!items ? !problem && html`<${Loading} />` : items.length === 0
      ? html`<${Empty} title="No order fits."><button type="button" onClick=${() => setQuery(Object.fromEntries(FIELDS.map(({ name }) => [name, ""])))}>Show all</button><//>`
      : html`<${OperationTable} items=${items} />`}
    ${next && html`<p class="center"><button type="button" onClick=${next}>${loading ? "Reading …" : "Show more"}</button></p>`}`;
}

function FindById() {
  const [said, say] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const id = new FormData(event.currentTarget).get("id").trim();
    if (!id) return;
    say("Looking …");
    try {
      await get(`v1/operations/${encodeURIComponent(id)}`);
      go(to("operations", id));
    } catch (problem) {
      say(problem.status === 404 ? "There is no such operation, or none that you may see." : problem.detail);
    }
  };
  return html`<form class="search by-id" onSubmit=${submit}><label><span>Operation id</span><input name="id" class="mono" autocomplete="off" spellcheck="false" /></label><button type="submit">Open</button><span role="status" class="small">${said}</span></form>`;
}
