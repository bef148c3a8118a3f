// The course of an operation: phases, ranks, and every event.
import { html } from "../core/html.js";
import { atClock, atFull, between, span } from "../core/time.js";
import { Progress } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Empty } from "../parts/states.js";
import { title, words } from "../parts/words.js";

/** One bar for each phase that the engine has told of, the last one under way. */
export function Phases({ events, operation }) {
  const phases = [];
  for (const { type, data, time } of events) {
    if (type !== "progress") continue;
    if (phases.at(-1)?.phase !== data.phase) {
      if (phases.length) phases.at(-1).until = time;
      phases.push({ phase: data.phase, from: time, until: null });
    }
    Object.assign(phases.at(-1), { done: data.done, total: data.total, unit: data.unit });
  }
  if (!phases.length) return html`<p class="dim">${operation.done ? "It told of no phases." : "The engine has told of no progress yet."}</p>`;
  if (operation.ended_at) phases.at(-1).until ??= operation.ended_at;
  return html`<ol class="phases">${phases.map((one, index) => {
    const over = one.until !== null;
    const lost = operation.state === "reconciling"; // nobody says that it goes on
    return html`<li key=${index} class=${over ? "over" : lost ? "lost" : "now"}><span class="phase-name">${title(words(one.phase))}</span>
      <${Progress} done=${over && !one.total ? 1 : one.done} total=${over && !one.total ? 1 : one.total} label=${words(one.phase)} />
      <span class="small dim">${one.total ? `${one.done} of ${one.total} ${one.unit}` : ""}${over ? ` ${span(between(one.from, one.until))}` : lost ? " heard of last" : " now"}</span></li>`;
  })}</ol>`;
}

const RANK = {
  pending: ["dim", "wait"],
  prepared: ["busy", "half"],
  committed: ["good", "check"],
  rolled_back: ["warn", "stop"],
  failed: ["bad", "cross"],
  unknown: ["ask", "ask"],
};

/** For each rank what it came through, in order. */
export function Lanes({ events, operation }) {
  const lanes = operation.ranks.map((now) => {
    const steps = events.filter((one) => one.type === "rank" && one.data.rank === now.rank).map((one) => ({ ...one.data, time: one.time }));
    // Told twice is come through once.
    const fresh = steps.filter((one, index) => one.state !== steps[index - 1]?.state || one.message !== steps[index - 1]?.message);
    return { rank: now.rank, steps: fresh.length ? fresh : [now] };
  });
  return html`<ol class="lanes">${lanes.map(({ rank, steps }) => html`<li key=${rank}><span class="lane-name">Rank ${rank}</span>
    <ol>${steps.map(({ state, message, time }, index) => {
      const [tone, icon] = RANK[state] ?? ["dim", "unknown"];
      return html`<li key=${index} class=${tone} title=${time && atFull(time)}><${Icon} name=${icon} /> ${words(state)}${message && html`<span class="small lane-message">${message}</span>`}</li>`;
    })}</ol></li>`)}</ol>`;
}

const LOOKS = {
  accepted: ["dim", "wait", "Accepted"],
  queued: ["dim", "wait", "Queued"],
  dispatched: ["busy", "run", "Sent to the engine"],
  progress: ["dim", "run", "Progress"],
  rank: ["dim", "dot", "Rank"],
  warning: ["warn", "alert", "Warning"],
  reconciling: ["ask", "ask", "Outcome unknown; the engine is being asked"],
  completed: ["good", "check", "Succeeded"],
  failed: ["bad", "cross", "Failed"],
  cancelled: ["dim", "stop", "Cancelled"],
  settled: ["warn", "person", "Settled by a person"],
};

export function Timeline({ events, operation }) {
  if (!events.length) return html`<${Empty} title="No events yet." />`;
  return html`<ol class="timeline" aria-live=${operation.done ? undefined : "polite"} aria-relevant="additions">${events.map((one) => {
    const [usual, sign, label] = LOOKS[one.type] ?? ["dim", "dot", one.type];
    const [tone, icon] = one.type === "rank" && one.data.state === "failed" ? RANK.failed : [usual, sign];
    return html`<li key=${one.sequence} class=${tone}><time datetime=${one.time} title=${atFull(one.time)}>${atClock(one.time)}</time><${Icon} name=${icon} /><span><b>${label}</b> ${said(one)}</span></li>`;
  })}</ol>`;
}

function said({ type, data }) {
  switch (type) {
    case "progress":
      return `${words(data.phase)}${data.total ? `: ${data.done} of ${data.total} ${data.unit}` : ""}`;
    case "rank":
      return `${data.rank} ${words(data.state)}${data.message ? `: ${data.message}` : ""}`;
    case "warning":
      return data.message ?? data.reason ?? "";
    case "failed":
      return `${data.error?.reason ?? ""}${data.error?.message ? `: ${data.error.message}` : ""}`;
    case "settled":
      return data.reason ?? "";
    case "cancelled":
      return data.message ?? "";
    default:
      return data.revision && type === "completed" ? `revision ${data.revision}` : "";
  }
}
