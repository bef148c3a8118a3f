// Operations as rows: what, how it stands, who, why, how long.
import { fleet } from "../core/fleet.js";
import { html, useMemo } from "../core/html.js";
import { to } from "../core/place.js";
import { useStore } from "../core/store.js";
import { gatewayTime } from "../core/skew.js";
import { atBrief, between, span, useNow } from "../core/time.js";
import { OperationState, Verification } from "./badge.js";
import { count, title, words } from "./words.js";

export function OperationTable({ items, without }) {
  const engines = without !== "engine";
  const heads = ["Order", ...(engines ? ["Engine"] : []), "State", "By", "Reason", "When", "Took"];
  return html`<div class="scroll"><table class="operations"><thead><tr>${heads.map((one) => html`<th scope="col" key=${one}>${one}</th>`)}</tr></thead>
    <tbody>${items.map((one) => html`<${Row} key=${one.id} read=${one} engines=${engines} />`)}</tbody></table></div>`;
}

/** As it was read, or as it stands by now. */
function Row({ read, engines }) {
  const live = useStore(fleet, (value) => value.operations.get(read.id));
  const one = live && live.sequence >= read.sequence ? live : read;
  return useMemo(() => html`<tr>
      <th scope="row"><a href=${to("operations", one.id)}>${title(words(one.kind))}</a><span class="small dim detail">${detail(one)}</span></th>
      ${engines && html`<td data-label="Engine"><a href=${to("engines", one.engine)}>${one.engine}</a></td>`}
      <td data-label="State"><${OperationState} operation=${one} /> <${Verification} value=${one.verification} />${one.error && html`<span class="small dim detail">${one.error.reason}</span>`}</td>
      <td data-label="By"><${Actor} principal=${one.principal} /></td>
      <td data-label="Reason" class="wrap">${one.reason ?? html`<span class="dim">none</span>`}</td>
      <td data-label="When"><time datetime=${one.created_at}>${atBrief(one.created_at)}</time></td>
      <td data-label="Took">${one.ended_at ? span(between(one.created_at, one.ended_at)) : html`<${SoFar} since=${one.created_at} />`}</td></tr>`, [one, engines]);
}

function SoFar({ since }) {
  return html`<span class="dim">${span(gatewayTime(useNow()) - Date.parse(since))} so far</span>`;
}

export function Actor({ principal }) {
  const { subject, client_id, issuer } = principal;
  return html`<span title=${`${issuer}, by the client ${client_id}`}>${subject}${client_id !== subject && html` <span class="small dim">by ${client_id}</span>`}</span>`;
}

/** Of the request what tells one such order from another. */
export function detail({ request }) {
  const said = [
    request.mode, request.weight_version, request.name, request.profiler,
    request.resources?.map(words).join(", "), request.content, request.caches?.join(", "), request.role,
    request.all ? "all" : request.request_ids?.length ? count(request.request_ids.length, "request") : null,
  ];
  return said.filter(Boolean).join(" · ");
}
