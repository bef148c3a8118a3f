// An order to several engines, row by row: before it is given, and after.
import { fleet } from "../core/fleet.js";
import { html } from "../core/html.js";
import { to } from "../core/place.js";
import { useStore } from "../core/store.js";
import { OperationLink } from "../parts/bits.js";
import { Badge, OperationState, Verification } from "../parts/badge.js";
import { Condition } from "../parts/condition.js";
import { Note } from "../parts/states.js";
import { count } from "../parts/words.js";

export function Table({ engines, rows, asking }) {
  return html`<div class="scroll"><table class="several"><caption class="sr">What it would do to each</caption><thead><tr><th scope="col">Engine</th><th scope="col">State</th><th scope="col">What it would do</th></tr></thead>
    <tbody>${engines.map((engine) => {
      const { plan, problem, hindrance } = rows(engine);
      return html`<tr key=${engine.id} class=${hindrance || problem ? "left-out" : ""}><th scope="row">${engine.id}</th><td><${Condition} engine=${engine} /></td><td class="wrap">${plan
        ? `${plan.effect}${plan.would === "queue" ? ` Waits in line, number ${plan.queue_position}.` : ""}`
        : hindrance || problem
          ? html`<${Badge} tone="warn" icon="lock">Left out<//> ${hindrance ?? problem.detail} ${problem && html`<span class="small">${problem.reason}</span>`}`
          : html`<span class="dim">${asking ? "Checking …" : ""}</span>`}</td></tr>`;
    })}</tbody></table></div>`;
}

/** `sent`: `{order, results}`; a result is an operation's id, or the problem that it came to. */
export function Outcomes({ sent, retry, onClose }) {
  const operations = useStore(fleet, (value) => value.operations);
  const rows = [...sent.results].map(([engine, { operation, problem }]) => ({ engine, problem, operation: operation && operations.get(operation) }));
  const state = (row) => (row.problem ? "refused" : (row.operation?.state ?? "accepted"));
  const having = (...wanted) => rows.filter((row) => wanted.includes(state(row)));
  const [good, bad, unknown] = [having("succeeded"), having("failed", "cancelled", "refused"), having("reconciling")];
  const open = rows.length - good.length - bad.length - unknown.length;
  const tone = bad.length ? "bad" : unknown.length ? "ask" : open ? "busy" : "good";
  const icon = { bad: "alert", ask: "ask", busy: "run", good: "check" }[tone];
  return html`<div><${Note} tone=${tone} icon=${icon} role="status"><b>${good.length} of ${rows.length} succeeded.</b>${bad.length > 0 && ` ${bad.length} did not.`}${unknown.length > 0 && ` Of ${unknown.length} the outcome is not known.`}${open > 0 && ` ${count(open, "is", "are")} under way.`}<//>
    <div class="scroll"><table class="several"><caption class="sr">How each stands</caption><thead><tr><th scope="col">Engine</th><th scope="col">How it stands</th><th scope="col">Operation</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.engine}><th scope="row"><a href=${to("engines", row.engine)}>${row.engine}</a></th><td class="wrap">${row.problem
      ? html`<${Badge} tone="bad" icon="lock">Refused<//> ${row.problem.detail}`
      : row.operation && html`<${OperationState} operation=${row.operation} /> <${Verification} value=${row.operation.verification} /> ${row.operation.error?.message ?? ""}`}</td>
      <td>${row.operation && html`<${OperationLink} id=${row.operation.id} />`}</td></tr>`)}</tbody></table></div>
    <footer>${bad.length > 0 && open === 0 && html`<button type="button" onClick=${() => retry(bad.map((row) => row.engine))}>Try ${count(bad.length, "engine")} again …</button>`}<button type="button" class="primary" onClick=${onClose}>Close</button></footer></div>`;
}
