// What is known of the engines and of the operations under way: from the stream's snapshot, kept up
// by its events, and by looking at the engines again, of whose health no events tell.
import { all, get } from "./api.js";
import { look, session } from "./session.js";
import { connection, stream } from "./stream.js";
import { Store } from "./store.js";

const LOOK_MS = 4_000;
const SETTLE_MS = 120;
const KEPT = 500;
const ENDS = ["completed", "failed", "cancelled", "settled"];

/**
 * `engines`, `operations`: by id. `seenAt`: when the engines were read last, ms; null: not yet.
 * `problem`: why they can't be read now.
 */
export const fleet = new Store({ engines: new Map(), operations: new Map(), seenAt: null, problem: null });

const readers = new Set();
const due = { operations: new Set(), engines: new Set(), timer: 0 };
let looking = 0;
let anew = false;

export function beginFleet() {
  stream.listen(hear);
  document.addEventListener("visibilitychange", () => !document.hidden && lookAgain());
  connection.subscribe(({ state }) => state === "live" && lookAgain());
  stream.open();
}

/**
 * `reader(event)` of each ledger event as it happens; `{type: "snapshot"}` when all is known anew, and
 * `{type: "reset"}` instead where nothing that was read before holds. Gives the way to stop.
 */
export function onEvent(reader) {
  readers.add(reader);
  return () => readers.delete(reader);
}

/** An operation that was read or ordered elsewhere is known from now on. */
export function learn(operation) {
  const known = fleet.value.operations.get(operation.id);
  if (known && known.sequence > operation.sequence) return;
  putOperations([operation]);
}

export function learnEngine(engine) {
  putEngines([engine]);
}

/** It was taken off the register here; the next look says so anyway. */
export function forgetEngine(id) {
  const engines = new Map(fleet.value.engines);
  engines.delete(id);
  fleet.patch({ engines });
}

function hear({ type, data }) {
  if (type === "reset") {
    anew = true; // the snapshot behind it replaces all
    look(); // what one may do can be another thing now
    return;
  }
  if (type === "snapshot") begin(data);
  else apply(type, data);
  const event = type === "snapshot" ? { type: anew ? "reset" : "snapshot", data: {} } : data;
  if (type === "snapshot") anew = false;
  for (const reader of [...readers]) reader(event);
}

function begin({ engines, operations }) {
  const open = new Map(operations.map((one) => [one.id, one]));
  const seen = new Set(engines.map((one) => one.id));
  // Of an engine that has gone out of sight nothing may stay on the screen.
  const known = [...fleet.value.operations.values()].filter((one) => !open.has(one.id) && (!anew || seen.has(one.engine)));
  // What was open and is so no more has ended meanwhile; how, has to be asked.
  const ended = known.filter((one) => !one.done);
  fleet.set({
    engines: new Map(engines.map((one) => [one.id, one])),
    operations: new Map([...known, ...open.values()].map((one) => [one.id, one])),
    seenAt: Date.now(),
    problem: null,
  });
  for (const one of ended) readSoon(one.id, one.engine);
}

/**
 * What an event changes is taken from it only where it is the very next of what is known: the answer
 * to an order, a read, and the stream come in any order. Else the operation is read.
 */
function apply(type, event) {
  const known = fleet.value.operations.get(event.operation);
  if (known && event.sequence <= known.sequence) return;
  const change = known && event.sequence === known.sequence + 1 ? changed(type, known, event) : null;
  if (change) putOperations([{ ...known, ...change, sequence: event.sequence }]);
  if (!change || type === "dispatched") readSoon(event.operation, event.engine);
  if (type === "dispatched" || ENDS.includes(type)) moveUp(event.engine);
}

/** Who waits at the engine has another place in line now, and no event of its own says so. */
function moveUp(engine) {
  for (const one of fleet.value.operations.values()) {
    if (one.engine === engine && one.state === "queued") readSoon(one.id, engine);
  }
}

function readSoon(operation, engine) {
  due.operations.add(operation);
  due.engines.add(engine);
  // Not begun anew by each: many events, one soon after another, must not put it off for ever.
  due.timer ||= setTimeout(readDue, SETTLE_MS);
}

/** null: the event alone does not say all of it. */
function changed(type, operation, { data, time }) {
  switch (type) {
    case "dispatched":
      return { state: "running", started_at: time };
    case "progress":
      return { progress: data };
    case "rank": {
      const others = operation.ranks.filter((one) => one.rank !== data.rank);
      return { ranks: [...others, data].sort((a, b) => a.rank - b.rank) };
    }
    default:
      return null;
  }
}

async function readDue() {
  due.timer = 0;
  const [operations, engines] = [[...due.operations], [...due.engines]];
  due.operations.clear();
  due.engines.clear();
  const gone = [];
  const quietly = (path, id) => get(path, { background: true }).catch((problem) => {
    if (problem.status === 404) gone.push(id);
    return null;
  });
  const [read, looked] = await Promise.all([
    Promise.all(operations.map((id) => quietly(`v1/operations/${encodeURIComponent(id)}`, id))),
    Promise.all(engines.map((id) => quietly(`v1/engines/${encodeURIComponent(id)}`, null))),
  ]);
  for (const operation of read) if (operation) learn(operation);
  putEngines(looked.filter(Boolean));
  if (gone.some((id) => fleet.value.operations.has(id))) {
    fleet.patch({ operations: new Map([...fleet.value.operations].filter(([id]) => !gone.includes(id))) });
  }
}

function putOperations(some) {
  const operations = new Map(fleet.value.operations);
  for (const one of some) operations.set(one.id, one);
  // A window that stays open for days need not know all that ever ended.
  for (const one of operations.values()) {
    if (operations.size <= KEPT) break;
    if (one.done) operations.delete(one.id);
  }
  fleet.patch({ operations });
}

function putEngines(some) {
  if (!some.length) return;
  const engines = new Map(fleet.value.engines);
  for (const one of some) engines.set(one.id, one);
  fleet.patch({ engines });
}

/** Read the engines now, and from then on every few seconds while somebody looks. */
export async function lookAgain() {
  clearTimeout(looking);
  if (document.hidden || session.value.phase !== "in" || connection.value.state === "paused") return;
  try {
    const found = await all("v1/engines", { background: true });
    fleet.patch({ engines: kept(found), seenAt: Date.now(), problem: null });
  } catch (problem) {
    fleet.patch({ problem });
  }
  clearTimeout(looking);
  looking = setTimeout(lookAgain, LOOK_MS);
}

/** What is as it was stays the same object, so that it is not drawn again. */
function kept(found) {
  const before = fleet.value.engines;
  return new Map(
    found.map((one) => {
      const known = before.get(one.id);
      return [one.id, known && JSON.stringify(known) === JSON.stringify(one) ? known : one];
    }),
  );
}
