// A value that is replaced whole, and those who want to know of it.
import { useLayoutEffect, useState } from "./html.js";

export class Store {
  #readers = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const reader of [...this.#readers]) reader(value);
  }

  /** Replace some fields of an object. */
  patch(fields) {
    this.set({ ...this.value, ...fields });
  }

  /** Gives the way to stop. */
  subscribe(reader) {
    this.#readers.add(reader);
    return () => this.#readers.delete(reader);
  }
}

/** What `select` makes of the store's value; the component is drawn again when that is another. */
export function useStore(store, select = (value) => value) {
  const chosen = select(store.value);
  const [, redraw] = useState(0);
  useLayoutEffect(() => {
    let last = chosen;
    const look = () => {
      const next = select(store.value);
      if (Object.is(next, last)) return;
      last = next;
      redraw((count) => count + 1);
    };
    look(); // it may have changed since it was drawn
    return store.subscribe(look);
  });
  return chosen;
}

/** A choice that this browser remembers. */
export class KeptStore extends Store {
  constructor(name, initial, allowed) {
    let value = initial;
    try {
      const kept = localStorage.getItem(`chadburn.${name}`);
      if (allowed.includes(kept)) value = kept;
    } catch {
      // Storage is switched off: not remembered then.
    }
    super(value);
    this.name = name;
  }

  set(value) {
    super.set(value);
    try {
      localStorage.setItem(`chadburn.${this.name}`, value);
    } catch {
      // As above.
    }
  }
}
