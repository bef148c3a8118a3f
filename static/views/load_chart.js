// Load over time, as this gateway saw it. The chart's code is fetched when one is shown.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { atClock } from "../core/time.js";
import { useLoad } from "../parts/load.js";
import { history } from "../parts/sparkline.js";

const SPANS = [["10 min", 600_000], ["1 h", 3_600_000]];
const AGAIN_MS = 5_000;
const HEIGHT = 150;

export function LoadChart({ engine }) {
  const [[, windowMs], choose] = useState(SPANS[0]);
  const [{ data, problem }, again] = useLoad((signal) => history(engine, windowMs, signal), `${engine} ${windowMs}`);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || again(), AGAIN_MS);
    return () => clearInterval(timer);
  }, [engine]);
  if (!data) return problem ? html`<${Failure} problem=${problem} retry=${again} />` : html`<${Loading} />`;
  const last = data.at(-1)?.load;
  return html`<fieldset class="segments"><legend class="sr">Time shown</legend>${SPANS.map((one) => html`<label key=${one[0]}>
      <input type="radio" name="span" checked=${one[1] === windowMs} onChange=${() => choose(one)} /><span>${one[0]}</span></label>`)}</fieldset>
    ${data.length < 2 ? html`<${Empty} title="There are no samples yet."><p>The gateway keeps what it saw within the last hour.</p><//>` : html`
      <p class="small">Now ${last.running_requests ?? 0} running, ${last.queued_requests ?? 0} queued; KV cache ${last.used_kv_blocks ?? 0} of ${last.total_kv_blocks ?? 0} blocks.</p>
      <${Chart} items=${data} />`}`;
}

function Chart({ items }) {
  const box = useRef();
  const chart = useRef(null);
  const [failed, setFailed] = useState(false);
  const data = series(items);
  const shown = useRef(data);
  shown.current = data;
  useEffect(() => {
    const element = box.current;
    let gone = false;
    let stop = () => {};
    import("../vendor/uplot.mjs").then(({ default: UPlot }) => {
      if (gone) return;
      const draw = () => {
        chart.current?.destroy();
        chart.current = new UPlot(options(element), shown.current, element);
      };
      draw();
      const sizes = new ResizeObserver(() => chart.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
      sizes.observe(element);
      // Colours are read when it is drawn, so another theme draws it anew.
      const themes = new MutationObserver(draw);
      themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
      const system = matchMedia("(prefers-color-scheme: dark)");
      system.addEventListener("change", draw);
      stop = () => {
        sizes.disconnect();
        themes.disconnect();
        system.removeEventListener("change", draw);
      };
    }, () => gone || setFailed(true));
    return () => {
      gone = true;
      stop();
      chart.current?.destroy();
      chart.current = null;
    };
  }, []);
  useEffect(() => chart.current?.setData(data), [items]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${spoken(items)}></div>
    <p class="legend small" aria-hidden="true"><span class="key">running</span><span class="key queued">queued</span><span class="key kv">KV cache, %</span></p>
    ${failed && html`<p class="small dim">The chart could not be loaded; the figures above are current.</p>`}`;
}

function series(items) {
  const of = (read) => items.map((one) => read(one.load) ?? null);
  return [
    items.map((one) => Date.parse(one.at) / 1000),
    of((load) => load.running_requests),
    of((load) => load.queued_requests),
    of((load) => (load.total_kv_blocks ? (100 * load.used_kv_blocks) / load.total_kv_blocks : null)),
  ];
}

function spoken(items) {
  const busy = items.map((one) => one.load.running_requests ?? 0);
  return `Running requests from ${Math.min(...busy)} to ${Math.max(...busy)}, now ${busy.at(-1)}`;
}

function clock(seconds) {
  return atClock(seconds * 1000).replace(/:00$/, "");
}

function options(element) {
  const style = getComputedStyle(element);
  // A canvas takes colours as they come out, not the tokens they are made of.
  const colour = (name) => {
    element.style.color = `var(${name})`;
    return style.color;
  };
  const axis = { stroke: colour("--chart-ink"), grid: { stroke: colour("--chart-grid"), width: 1 }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
  const line = (label, name, more) => ({ label, stroke: colour(name), width: 1.6, points: { show: false }, ...more });
  return {
    width: element.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(4, high)] }, share: { range: [0, 100] } },
    axes: [{ ...axis, size: 26, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }, { ...axis, scale: "share", side: 1, size: 38, grid: { show: false }, values: (_, ticks) => ticks.map((one) => `${one}%`) }],
    series: [{}, line("running", "--chart-1"), line("queued", "--chart-2", { dash: [4, 3] }), line("KV", "--chart-3", { scale: "share", width: 1.2, dash: [2, 3] })],
  };
}
