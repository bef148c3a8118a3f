// What was filled in, kept in this window until it was ordered, so that a reload or a session that
// ends loses nothing of it. It is for the person alone who filled it in.
import { DRAFTS, session } from "../core/session.js";

const name = (engine, kind) => `${DRAFTS}${JSON.stringify([session.value.me?.issuer, session.value.me?.subject, engine, kind])}`;

export function readDraft(engine, kind) {
  try {
    return JSON.parse(sessionStorage.getItem(name(engine, kind))) ?? {};
  } catch {
    return {};
  }
}

export function keepDraft(engine, kind, values) {
  try {
    sessionStorage.setItem(name(engine, kind), JSON.stringify(values));
  } catch {
    // Storage is switched off: then it lasts as long as the form is open.
  }
}

export function forgetDraft(engine, kind) {
  try {
    sessionStorage.removeItem(name(engine, kind));
  } catch {
    // As above.
  }
}
