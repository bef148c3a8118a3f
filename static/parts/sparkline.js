// A small curve of requests, read when it comes into sight.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { get } from "../core/api.js";
import { gatewayTime } from "../core/skew.js";

const WINDOW_MS = 10 * 60_000;
const AGAIN_MS = 15_000;
const [WIDTH, HEIGHT] = [96, 20];

export const busyOf = (load) => (load.running_requests ?? 0) + (load.queued_requests ?? 0);

export async function history(engine, windowMs = WINDOW_MS, signal) {
  const since = new Date(gatewayTime(Date.now()) - windowMs).toISOString();
  return (await get(`v1/engines/${encodeURIComponent(engine)}/load`, { query: { since }, signal, background: true })).items;
}

export function Sparkline({ engine }) {
  const box = useRef();
  const [items, setItems] = useState(null);
  useEffect(() => {
    let [timer, seen, gone] = [0, false, false];
    const read = async () => {
      clearTimeout(timer);
      if (!seen || gone) return;
      if (!document.hidden) await history(engine).then((found) => gone || setItems(found), () => {});
      timer = setTimeout(read, AGAIN_MS);
    };
    const watching = new IntersectionObserver((found) => {
      seen = found.at(-1).isIntersecting;
      if (seen) read();
    });
    watching.observe(box.current);
    return () => {
      gone = true;
      clearTimeout(timer);
      watching.disconnect();
    };
  }, [engine]);
  return html`<span class="spark" ref=${box}>${items && drawn(items)}</span>`;
}

function drawn(items) {
  if (!items.length) return html`<span class="dim small">no samples</span>`;
  const values = items.map((one) => busyOf(one.load));
  const most = Math.max(1, ...values);
  const end = Date.parse(items.at(-1).at);
  const x = (at) => WIDTH - 2.5 - ((end - Date.parse(at)) / WINDOW_MS) * (WIDTH - 4);
  const y = (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 5);
  const line = items.map((one, index) => `${x(one.at).toFixed(1)},${y(values[index]).toFixed(1)}`).join(" ");
  const now = values.at(-1);
  const said = `${now} requests now, ${most} at most in the last 10 minutes`;
  return html`<b>${now}</b><svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label=${said}><title>${said}</title>
    <line class="floor" x1="0" y1=${HEIGHT - 1.5} x2=${WIDTH} y2=${HEIGHT - 1.5} />
    <polyline points=${line} fill="none" stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" />
    <circle cx=${WIDTH - 2.5} cy=${y(now)} r="1.8" fill="currentColor" /></svg>`;
}
