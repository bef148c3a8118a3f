// How far this machine's clock is from the gateway's, so that ages are not off by it.
let ms = 0;

/** `date`: the Date header of an answer, whole seconds. Small differences count as none. */
export function noteDate(date) {
  const there = Date.parse(date ?? "");
  if (Number.isNaN(there)) return;
  const off = there + 500 - Date.now();
  ms = Math.abs(off) > 2000 ? off : 0;
}

/** A moment of this machine's as the gateway would say it, ms. */
export const gatewayTime = (here) => here + ms;
