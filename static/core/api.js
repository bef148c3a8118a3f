// The one way to the API. Failures are `Problem`s (RFC 9457), those of the network too.
import { ROOT, withQuery } from "./place.js";
import { noteDate } from "./skew.js";

export class Problem extends Error {
  constructor(fields) {
    const said = fields.detail || fields.title;
    super(said);
    Object.assign(this, { errors: [], operation: null, retryable: false }, fields);
    // Others' sentences stand among ours.
    this.detail = said.charAt(0).toUpperCase() + said.slice(1) + (/[.!?:]$/.test(said) ? "" : ".");
  }

  /** Of a place in the body, such as "/mode"; `below`: or of one in it. */
  at(pointer, below = false) {
    return this.errors.find((one) => one.pointer === pointer || (below && one.pointer?.startsWith(`${pointer}/`)))?.detail;
  }

  get forbidden() {
    return this.status === 403;
  }
}

const UNREACHABLE = {
  status: 0,
  reason: "GATEWAY_UNREACHABLE",
  title: "The gateway does not answer",
  detail: "The gateway does not answer. It may be restarting, or the network is down.",
  retryable: true,
};

let lapse = () => {};

/** What to do when the gateway says that nobody is logged in any more. */
export function onLapse(told) {
  lapse = told;
}

/**
 * `{status, headers, body}` of a success; raises Problem. `path` is below the gateway.
 * `quiet`: the caller sees to a session that has ended. `background`: nobody asked for it now.
 */
export async function call(method, path, { body, headers = {}, signal, query, quiet, background } = {}) {
  const sent = { Accept: "application/json", ...headers };
  // No form and no other origin can send it: it is what shows that a change comes from here.
  if (method !== "GET") sent["X-Requested-With"] = "chadburn";
  // What a page asks by itself must not keep a session open that nobody sits at.
  if (background) sent["X-Chadburn-Background"] = "1";
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer, text;
  try {
    answer = await fetch(withQuery(ROOT + path, query), {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
    noteDate(answer.headers.get("Date"));
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(UNREACHABLE);
  }
  let found = null;
  try {
    found = text ? JSON.parse(text) : null;
  } catch {
    // What stands between us and the gateway answers in its own way.
  }
  if (answer.ok) return { status: answer.status, headers: answer.headers, body: found };
  if (answer.status === 401 && !quiet) lapse();
  throw new Problem({
    title: "The gateway refused",
    detail: `The answer was ${answer.status}.`,
    reason: "UNEXPECTED_ANSWER",
    ...(found && typeof found === "object" ? found : {}),
    status: answer.status,
    retryAfterS: Number(answer.headers.get("Retry-After")) || null,
  });
}

export async function get(path, options) {
  return (await call("GET", path, options)).body;
}

/** All pages of a list, `most` rows at most. */
export async function all(path, { query = {}, most = 5000, signal, background } = {}) {
  const items = [];
  let token;
  do {
    const page = await get(path, { query: { ...query, page_size: 1000, page_token: token }, signal, background });
    items.push(...page.items);
    token = page.next_page_token;
  } while (token && items.length < most);
  return items;
}

/** For `Idempotency-Key`. Not randomUUID: that is missing where the page came without TLS. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `ui-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
