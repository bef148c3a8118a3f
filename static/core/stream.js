// The one event stream of a window: opened once, resumed by id, and honest about its state.
import { look, session } from "./session.js";
import { ROOT } from "./place.js";
import { Store } from "./store.js";

const TYPES = [
  ...["accepted", "queued", "dispatched", "progress", "rank", "warning", "reconciling"],
  ...["completed", "failed", "cancelled", "settled"],
];
const LONGEST_WAIT_MS = 15_000;
const RENEWED = ["token_expired", "lifetime_over"];
const BRIEF_MS = 5_000; // one that ended so soon is taken up again as after a cut, after a while

/**
 * `state`: connecting, live, lost (it is being tried again), paused (by the reader, or since nobody
 * is logged in). `since`: when it became so, ms. `why`: what the gateway said when it closed.
 */
export const connection = new Store({ state: "connecting", since: Date.now(), why: null });

class EventStream {
  #source = null;
  #lastId = null;
  #position = 0;
  #tries = 0;
  #timer = 0;
  #readers = new Set();
  #why = null;
  #openedAt = 0;

  /** `reader({type, data})`: a ledger event, `snapshot` or `reset`. Gives the way to stop. */
  listen(reader) {
    this.#readers.add(reader);
    return () => this.#readers.delete(reader);
  }

  open() {
    this.#close();
    this.#become("connecting");
    // A browser resumes by itself after a cut; after a refusal, or a pause, it is for us to do.
    const after = this.#lastId ? `?after=${encodeURIComponent(this.#lastId)}` : "";
    const source = new EventSource(`${ROOT}v1/events${after}`);
    this.#source = source;
    source.onopen = () => {
      this.#tries = 0;
      this.#why = null;
      this.#openedAt = Date.now();
      this.#become("live");
    };
    source.onerror = () => this.#failed(source);
    for (const type of TYPES) source.addEventListener(type, (event) => this.#event(type, event));
    source.addEventListener("snapshot", (event) => this.#snapshot(event));
    source.addEventListener("reset", () => this.#tell("reset", {}));
    source.addEventListener("goodbye", (event) => this.#goodbye(source, JSON.parse(event.data).reason));
  }

  /** A stream ends with its token or its longest life; that is nothing to tell anybody of. */
  #goodbye(source, reason) {
    this.#why = reason;
    const brief = Date.now() - this.#openedAt < BRIEF_MS;
    if (source === this.#source && RENEWED.includes(reason) && !brief) this.open();
  }

  pause() {
    this.#close();
    this.#become("paused");
  }

  #close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  #become(state) {
    if (connection.value.state === state && connection.value.why === this.#why) return;
    const same = connection.value.state === state;
    connection.set({ state, since: same ? connection.value.since : Date.now(), why: this.#why });
  }

  #snapshot(event) {
    const data = JSON.parse(event.data);
    this.#lastId = event.lastEventId || this.#lastId;
    this.#position = data.position;
    this.#tell("snapshot", data);
  }

  #event(type, event) {
    const data = JSON.parse(event.data);
    // The gateway repeats nothing; a proxy that replays a buffer might.
    if (data.position <= this.#position) return;
    this.#position = data.position;
    this.#lastId = event.lastEventId;
    this.#tell(type, data);
  }

  #tell(type, data) {
    for (const reader of [...this.#readers]) reader({ type, data });
  }

  #failed(source) {
    if (source !== this.#source) return;
    this.#become("lost");
    if (source.readyState !== EventSource.CLOSED) return; // it tries again by itself
    this.#close();
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** this.#tries++);
    this.#timer = setTimeout(async () => {
      await look(); // a refusal may be the session's end
      if (session.value.phase === "in") this.open();
    }, wait * (0.75 + Math.random() / 2));
  }
}

export const stream = new EventStream();
