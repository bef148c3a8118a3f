// Lists that the gateway pages: filters in the address, pages by key, and all of it as a file.
import { Problem, get } from "../core/api.js";
import { html, useState } from "../core/html.js";
import { ROOT, withQuery } from "../core/place.js";
import { setQuery } from "../core/router.js";
import { useLoad } from "./load.js";

const ROWS = 50;

/** `{items, problem, more, again, loading}`; `query` are filters as the API names them. */
export function usePages(path, query) {
  const key = JSON.stringify(query);
  const [more, setMore] = useState({ key, items: [], token: undefined, problem: null, loading: false });
  const [first, again] = useLoad((signal) => get(path, { query: { ...query, page_size: ROWS }, signal }), key);
  const held = more.key === key && more.of === first.data ? more : { items: [], token: first.data?.next_page_token };
  const next = async () => {
    setMore({ ...held, key, of: first.data, loading: true });
    try {
      const page = await get(path, { query: { ...query, page_size: ROWS, page_token: held.token } });
      setMore({ key, of: first.data, items: [...held.items, ...page.items], token: page.next_page_token, problem: null });
    } catch (problem) {
      setMore({ ...held, key, of: first.data, problem });
    }
  };
  const items = first.data && [...first.data.items, ...held.items];
  return { items, problem: first.problem ?? held.problem, next: held.token ? next : null, loading: held.loading, again };
}

export function Search({ fields, query, children }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.currentTarget);
    setQuery(Object.fromEntries(fields.map(({ name }) => [name, (given.get(name) ?? "").trim()])), { replace: false });
  };
  // The key draws the form anew when the address says something else.
  return html`<form class="search" role="search" onSubmit=${submit} key=${fields.map(({ name }) => query.get(name)).join("|")}>
    ${fields.map((one) => html`<label key=${one.name}><span>${one.label}</span>${one.options
      ? html`<select name=${one.name}>${["", ...one.options].map((value) => html`<option key=${value} value=${value} selected=${value === (query.get(one.name) ?? "")}>${value ? (one.said?.(value) ?? value) : "all"}</option>`)}</select>`
      : html`<input name=${one.name} type=${one.type ?? "text"} class=${one.mono ? "mono" : ""} value=${query.get(one.name) ?? ""} spellcheck="false" autocomplete="off" placeholder=${one.hint} />`}</label>`)}
    <button type="submit" class="primary">Search</button>${children}</form>`;
}

/** All rows that fit the filters, as the API gives them to any client. */
export function Export({ path, query, name }) {
  const [said, say] = useState("");
  const fetched = async (accept) => {
    const answer = await fetch(withQuery(ROOT + path, accept === "text/csv" ? query : { ...query, page_size: 1000 }), { headers: { Accept: accept } });
    if (!answer.ok) throw new Problem({ status: answer.status, title: "Not exported", detail: `The answer was ${answer.status}.` });
    return answer;
  };
  const csv = async () => save(await (await fetched("text/csv")).blob(), `${name}.csv`);
  const json = async () => {
    const items = [];
    let token;
    do {
      const page = await get(path, { query: { ...query, page_size: 1000, page_token: token } });
      items.push(...page.items);
      token = page.next_page_token;
      say(`${items.length} rows …`);
    } while (token);
    save(new Blob([JSON.stringify({ items }, null, 2)], { type: "application/json" }), `${name}.json`);
  };
  const run = (how) => async () => {
    say("Reading …");
    try {
      await how();
      say("Saved");
    } catch (problem) {
      say(problem.detail ?? "That did not work: try again.");
    }
  };
  return html`<span class="export"><button type="button" class="quiet" onClick=${run(csv)}>Export CSV</button><button type="button" class="quiet" onClick=${run(json)}>Export JSON</button><span role="status" class="small dim">${said}</span></span>`;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A local time of a form's as the API takes it. */
export const moment = (text) => (text && !Number.isNaN(Date.parse(text)) ? new Date(text).toISOString() : undefined);
