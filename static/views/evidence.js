// A result: the evidence of each rank as a table, the rest as facts.
import { html } from "../core/html.js";
import { Facts, Json } from "../parts/bits.js";
import { Note } from "../parts/states.js";
import { bytes, title, words } from "../parts/words.js";

export function Evidence({ operation }) {
  const { result, verification } = operation;
  const flat = [];
  const lists = [];
  for (const [name, value] of Object.entries(result)) {
    if (Array.isArray(value) && value.length && typeof value[0] === "object") lists.push([name, value]);
    else if (value === null || typeof value !== "object" || Array.isArray(value)) flat.push([title(words(name)), shown(name, value)]);
  }
  return html`${verification === "verified" && html`<p class="dim">Verified: the engine acknowledged it with something that was read back.</p>`}
    ${verification === "unverified" && html`<${Note} icon="ask"><b>Unverified.</b> The engine took it, and offers nothing by which its effect could be checked.<//>`}
    <${Facts} rows=${flat} />${lists.map(([name, rows]) => html`<h3 key=${name}>${title(words(name))}</h3><${Rows} name=${name} rows=${rows} />`)}
    <details><summary>Result as JSON</summary><${Json} value=${result} label="Result" /></details>`;
}

function Rows({ name, rows }) {
  const columns = [...new Set(rows.flatMap(Object.keys))];
  return html`<div class="scroll"><table><caption class="sr">${words(name)}</caption><thead><tr>${columns.map((one) => html`<th scope="col" key=${one}>${title(words(one))}</th>`)}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${index}>${columns.map((one) => html`<td key=${one}>${shown(one, row[one])}</td>`)}</tr>`)}</tbody></table></div>`;
}

function shown(name, value) {
  if (value === true) return "yes";
  if (value === false) return "no";
  if (value === null || value === undefined) return "";
  if (name === "sha256") return html`<code title=${value}>${value.slice(0, 16)}…</code>`;
  if (name.startsWith("bytes") || name.endsWith("_bytes")) return bytes(value);
  if (Array.isArray(value)) return value.map((one) => (typeof one === "object" ? JSON.stringify(one) : words(one))).join(", ") || "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
