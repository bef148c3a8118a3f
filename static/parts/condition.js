// How an engine stands, in one word, and why.
import { html } from "../core/html.js";
import { Badge } from "./badge.js";
import { words } from "./words.js";

export const STALE_MS = 30_000;

/**
 * `{name, label, tone, icon, why}`; what hinders most comes first. Facts are what the engine said
 * last, so one that can't be reached is told as that, whatever it said before.
 */
export function conditionOf(engine) {
  const { health, facts } = engine;
  if (health.state === "unreachable") {
    return { name: "unreachable", label: "Unreachable", tone: "bad", icon: "cross", why: "The gateway gets no answer from it. What it said last may be out of date." };
  }
  if (!facts || health.state === "unknown") {
    return { name: "unknown", label: "Unknown", tone: "dim", icon: "unknown", why: "The gateway has not read it yet." };
  }
  const weights = facts.weights.state;
  if (weights === "inconsistent" || weights === "missing") {
    return { name: "weights", label: weights === "missing" ? "No weights" : "Weights inconsistent", tone: "bad", icon: "alert", why: "It serves nothing until an update of its weights succeeds." };
  }
  if (weights === "updating") {
    return { name: "updating", label: "Updating weights", tone: "busy", icon: "run", why: "New weights are being put in place." };
  }
  if (facts.released.length) {
    return { name: "released", label: "Released", tone: "warn", icon: "hollow", why: `It has given back ${facts.released.map(words).join(", ")}, and serves nothing until that is restored.` };
  }
  if (facts.admission === "draining") {
    return { name: "draining", label: "Draining", tone: "busy", icon: "drain", why: "Running requests finish; new ones are not let in." };
  }
  if (facts.admission === "paused") {
    return { name: "paused", label: "Paused", tone: "warn", icon: "pause", why: "No request is let in until it is resumed." };
  }
  if (health.state === "degraded") {
    return { name: "degraded", label: "Degraded", tone: "warn", icon: "half", why: "It answers, and says that it is not ready to serve." };
  }
  if (facts.admission !== "open" || weights !== "valid") {
    return { name: "unclear", label: "Partly known", tone: "dim", icon: "half", why: "It answers, and does not say whether it lets requests in or which weights it has." };
  }
  return { name: "serving", label: "Serving", tone: "good", icon: "dot", why: "Admission is open, nothing is released, its weights are valid." };
}

export const CONDITIONS = [
  { name: "serving", label: "Serving", tone: "good", icon: "dot", has: ["serving"] },
  { name: "busy", label: "In transition", tone: "busy", icon: "run", has: ["draining", "updating"] },
  { name: "paused", label: "Paused", tone: "warn", icon: "pause", has: ["paused"] },
  { name: "released", label: "Released", tone: "warn", icon: "hollow", has: ["released"] },
  { name: "attention", label: "Needs attention", tone: "bad", icon: "alert", has: ["weights", "degraded", "unreachable", "unclear", "unknown"] },
];

export function Condition({ engine }) {
  const condition = conditionOf(engine);
  return html`<${Badge} tone=${condition.tone} icon=${condition.icon} title=${condition.why}>${condition.label}<//>`;
}

/** When it answered last: of one that does not, that is when its facts are from. */
export function seenAt({ health, facts }) {
  return health.state === "unreachable" ? facts?.observed_at : health.observed_at;
}
