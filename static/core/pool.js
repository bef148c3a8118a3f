// Many things to ask for, and only so many at a time: a browser has six connections to a gateway.
const AT_ONCE = 4;

/** `work(item)` of each; gives when all have ended. A failure of one is its own to tell. */
export async function each(items, work, signal) {
  const waiting = [...items];
  const hand = async () => {
    while (waiting.length && !signal?.aborted) await work(waiting.shift());
  };
  await Promise.all(Array.from({ length: AT_ONCE }, hand));
}
