// Who is logged in, what they may do, and what happens when that ends.
import { call, get, onLapse } from "./api.js";
import { HOME } from "./place.js";
import { Store } from "./store.js";

/**
 * `phase`: asking, out (nobody), in, lapsed (was in), away (the gateway does not answer).
 * `me`: as /v1/me says it; null: the token allows nothing here, and `refusal` says why.
 */
export const session = new Store({ phase: "asking", logins: [], me: null, refusal: null });

/** With this begins the name of each thing that was filled in and not ordered yet. */
export const DRAFTS = "chadburn.draft.";

const told = new BroadcastChannel("chadburn-session");

export async function begin() {
  onLapse(() => {
    if (session.value.phase === "in") session.patch({ phase: "lapsed" });
  });
  told.onmessage = () => look();
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && session.value.phase === "lapsed") look();
  });
  await look();
}

/** Ask who is logged in now. A session that was over is taken up again where it was. */
export async function look() {
  try {
    const found = await get("auth/session", { quiet: true });
    if (!found.signed_in) {
      const phase = ["in", "lapsed"].includes(session.value.phase) ? "lapsed" : "out";
      session.patch({ phase, logins: found.logins });
      return;
    }
    const before = session.value.me;
    let me = null;
    let refusal = null;
    try {
      me = await get("v1/me", { quiet: true });
    } catch (problem) {
      if (problem.status !== 403) throw problem;
      refusal = problem;
    }
    if (before && me && (before.subject !== me.subject || before.issuer !== me.issuer)) {
      // Somebody else: nothing of what the first one saw or typed may stay.
      forgetDrafts();
      location.reload();
      return;
    }
    session.set({ phase: "in", logins: found.logins, me, refusal, subject: found.subject });
  } catch (problem) {
    if (problem.status === 401) session.patch({ phase: "lapsed" });
    else if (session.value.phase === "asking") session.patch({ phase: "away", refusal: problem });
  }
}

/** Other windows that wait for it hear of a login that came about in this one. */
export function tellOthers() {
  told.postMessage("in");
}

export function loginUrl(login, back = location.pathname + location.search) {
  const joint = login.url.includes("?") ? "&" : "?";
  return `${login.url}${joint}return_to=${encodeURIComponent(back)}`;
}

function forgetDrafts() {
  try {
    for (const name of Object.keys(sessionStorage)) if (name.startsWith(DRAFTS)) sessionStorage.removeItem(name);
  } catch {
    // Storage is switched off: there are none.
  }
}

export async function logOut() {
  const { body } = await call("POST", "auth/logout");
  forgetDrafts();
  told.postMessage("out");
  location.assign(body.end_session_url ?? HOME);
}

function meets(engine, { id, labels, without }) {
  if (id !== null && !id.includes(engine.id)) return false;
  const has = engine.labels;
  return (
    Object.entries(labels).every(([name, values]) => values.includes(has[name])) &&
    !Object.entries(without).some(([name, values]) => values.includes(has[name]))
  );
}

const NAMED = 3;

/** Of which engines a permission is, in words. */
function place({ id, labels, without }) {
  const several = (values) => values.slice(0, NAMED).join(" or ") + (values.length > NAMED ? " or another" : "");
  return [
    ...(id === null ? [] : [`the engine is ${several(id)}`]),
    ...Object.entries(labels).map(([name, values]) => `${name} is ${several(values)}`),
    ...Object.entries(without).map(([name, values]) => `${name} is not ${several(values)}`),
  ].join(" and ");
}

/** Why the caller may not do what takes `scope`, in a sentence; null: they may. */
export function refusedFor(me, scope, engine) {
  if (!me) return "You are not logged in.";
  if (me.read_only && scope !== "admin:read" && scope !== "admin:audit") {
    return "This gateway is read-only at present.";
  }
  if (!me.scopes.includes(scope)) return `Needs the scope ${scope}, which you do not have.`;
  const fits = me.permissions.some(
    (one) => one.scopes.includes(scope) && (!engine || meets(engine, one.engines)),
  );
  if (fits) return null;
  const places = me.permissions.filter((one) => one.scopes.includes(scope)).map((one) => place(one.engines));
  return `Needs the scope ${scope} on ${engine.id}; the policy gives it to you only where ${places.join(", or where ")}.`;
}
