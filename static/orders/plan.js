// What an order would do: asked of the gateway with `dry_run` while the form is filled in.
import { call } from "../core/api.js";
import { html, useCallback, useEffect, useState } from "../core/html.js";
import { refusedFor } from "../core/session.js";
import { OperationLink } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Field } from "./fields.js";

const SETTLE_MS = 350;

/** `body` null: there is nothing to ask yet. `seen`: what else the answer depends on. */
export function usePlan(body, method, path, seen) {
  const [state, setState] = useState({ plan: null, problem: null, of: null });
  const [round, setRound] = useState(0);
  const key = JSON.stringify([body, path, seen]);
  useEffect(() => {
    if (!body) return undefined;
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      // A session that has ended is said over the form; the plan is asked for again after it.
      try {
        const answer = await call(method, path, { body: { ...body, dry_run: true }, signal: stop.signal });
        setState({ plan: answer.body, problem: null, of: key });
      } catch (problem) {
        if (problem.name !== "AbortError") setState({ plan: null, problem, of: key });
      }
    }, SETTLE_MS);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [key, round]);
  const again = useCallback(() => setRound((number) => number + 1), []);
  const current = body && state.of === key;
  return { plan: current ? state.plan : null, problem: current ? state.problem : null, asking: Boolean(body) && !current, again };
}

export function Plan({ plan, problem, lacks, values, change, me, engine }) {
  return html`<section class="plan ${problem ? "refused" : ""}" aria-live="polite" aria-label="What it will do">
    ${lacks
      ? html`<p class="dim">${lacks}</p>`
      : problem
        ? html`<${Refused} problem=${problem} again=${plan.again} />`
        : plan.plan
          ? html`<${Told} plan=${plan.plan} />`
          : html`<p class="dim">${plan.asking ? "Checking what it would do …" : ""}</p>`}
    <${Ways} problem=${problem} values=${values} change=${change} me=${me} engine=${engine} />
  </section>`;
}

/**
 * The revision that the order is given under. One that waits has none: what is before it changes the
 * engine, and the order would be refused at its turn for no other reason.
 */
export const judgedAt = ({ would, revision }) => (would === "queue" ? undefined : (revision ?? undefined));

function Told({ plan }) {
  const ends = `Ends by itself after ${Math.round(plan.deadline_ms / 6000) / 10} min at most.`;
  if (plan.would === "queue") {
    return html`<p class="effect"><${Icon} name="wait" /> ${plan.effect}</p>
      <p class="small dim">It waits in line, number ${plan.queue_position}. At its turn it is judged again, by what the engine says then. ${ends}</p>`;
  }
  return html`<p class="effect"><${Icon} name="check" /> ${plan.effect}</p>
    <p class="small dim">${plan.revision === null || plan.revision === undefined
      ? "The engine has no revision to check it against."
      : `Checked against revision ${plan.revision}${plan.revision_source === "gateway" ? ", which the gateway keeps: other clients of the engine are not held off by it" : ""}.`}
      ${" "}${ends}</p>`;
}

/** What can be chosen against a refusal. It stays to be seen, and to be taken back. */
function Ways({ problem, values, change, me, engine }) {
  const frozen = problem?.reason === "ENGINE_FROZEN" && !refusedFor(me, "admin:engines", engine);
  return html`${(problem?.reason === "ENGINE_BUSY" || values.queue) && html`<${Field} id="order-queue" value=${values.queue} onChange=${(value) => change("queue", value)} field=${{ type: "flag", label: "Wait in line behind what is under way" }} />`}
    ${(frozen || values.override) && html`<${Field} id="order-override" value=${values.override} onChange=${(value) => change("override", value)} field=${{ type: "flag", label: "Order it in spite of the freeze; that is written down" }} />`}`;
}

function Refused({ problem, again }) {
  const busy = problem.reason === "ENGINE_BUSY";
  return html`<p class="effect"><${Icon} name="alert" /> ${problem.title}</p>
    <p>${problem.detail}</p>
    ${problem.errors.map((one, index) => html`<p class="small" key=${index}><code>${one.pointer ?? one.parameter}</code> ${one.detail}</p>`)}
    ${problem.operation && html`<p>Under way: <${OperationLink} id=${problem.operation} /></p>`}
    ${(problem.retryable || problem.status === 0) && !busy && html`<button type="button" onClick=${again}>Check again</button>`}
    <p class="small dim">${problem.reason}</p>`;
}
