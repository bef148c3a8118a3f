// A look at a profile without another program: the operators that took the time, and a flame picture.
import { Problem } from "../core/api.js";
import { html } from "../core/html.js";
import { ROOT } from "../core/place.js";
import { Dialog } from "../parts/dialog.js";
import { useLoad } from "../parts/load.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { bytes } from "../parts/words.js";
import { boxesOf, readTrace } from "./trace.js";

const LARGEST_BYTES = 24 * 1024 * 1024;
const ROWS = 25;
const BOX = 19;
const SCALE = 1000;

export function ProfileLook({ file, engine, onClose }) {
  const [{ data, problem }, again] = useLoad((signal) => read(file, signal), file.download);
  return html`<${Dialog} wide title="Profile of ${engine}, rank ${file.rank}" onClose=${onClose}><div>${problem
    ? html`<${Failure} problem=${problem} retry=${again} />`
    : !data ? html`<${Loading} what="Reading ${bytes(file.size_bytes)}" />`
    : data.trace ? html`<${Trace} trace=${data.trace} />`
    : html`<${Empty} title="There are no calls in it that could be drawn."><p>A trace viewer shows all that is in it.</p><//>`}
    <footer><a class="button" href=${ROOT + file.download.slice(1)} download>Download</a><button type="button" class="primary" onClick=${onClose}>Close</button></footer></div><//>`;
}

async function read(file, signal) {
  if (file.size_bytes > LARGEST_BYTES) {
    throw new Problem({ status: 0, title: "Too large to be drawn here", detail: `It has ${bytes(file.size_bytes)}. Download it, and use a trace viewer.`, reason: "TOO_LARGE" });
  }
  const answer = await fetch(ROOT + file.download.slice(1), { signal });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Problem({ title: "It can't be read", detail: `The answer was ${answer.status}.`, ...said, status: answer.status });
  }
  const packed = file.media_type === "application/gzip";
  const stream = packed ? answer.body.pipeThrough(new DecompressionStream("gzip")) : answer.body;
  try {
    return { trace: readTrace(await new Response(stream).json()) };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ status: 0, title: "It can't be drawn", detail: "The file is not a trace that this page can read. Download it.", reason: "NOT_A_TRACE" });
  }
}

const time = (us) => (us >= 1000 ? `${(us / 1000).toFixed(us >= 100_000 ? 0 : 1)} ms` : `${Math.round(us)} µs`);

function Trace({ trace }) {
  const { operators, total, threads } = trace;
  return html`<p>${time(total)} in ${operators.length} operators${threads > 1 ? `, of the busiest of ${threads} threads` : ""}. What waits in between is not in it.</p>
    <${Flame} tree=${trace.tree} />
    <div class="scroll"><table><caption class="sr">Operators by the time that they took themselves</caption><thead><tr><th scope="col">Operator</th><th scope="col">Itself</th><th scope="col"><span class="sr">Share</span></th><th scope="col">With what it calls</th><th scope="col">Calls</th></tr></thead>
    <tbody>${operators.slice(0, ROWS).map((one) => html`<tr key=${one.name}><th scope="row" class="break mono wrap">${one.name}</th><td>${time(one.own)}</td>
      <td><span class="meter" role="meter" aria-label="Share" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round((100 * one.own) / total)}><span style=${{ width: `${(100 * one.own) / total}%` }}></span></span></td><td>${time(one.total)}</td><td>${one.count}</td></tr>`)}</tbody></table></div>
    ${operators.length > ROWS && html`<p class="dim small">The first ${ROWS} of ${operators.length}.</p>`}`;
}

/** Wider is longer; below a box is what it called. */
function Flame({ tree }) {
  const boxes = boxesOf(tree);
  const height = (Math.max(0, ...boxes.map((one) => one.depth)) + 1) * BOX;
  return html`<div class="flame" role="img" aria-label="What called what, by time. The table below has the figures."><svg viewBox="0 0 ${SCALE} ${height}" preserveAspectRatio="none" style=${{ height: `${height}px` }}>
    ${boxes.map((one, index) => html`<g key=${index}><title>${`${one.name}: ${time(one.total)}, ${one.count} calls`}</title>
      <rect x=${one.left * SCALE} y=${one.depth * BOX} width=${one.width * SCALE} height=${BOX - 1} class="flame-${one.depth % 4}" /></g>`)}</svg>
    ${boxes.filter((one) => one.width > 0.06).map((one, index) => html`<span key=${index} aria-hidden="true" style=${{ left: `${one.left * 100}%`, width: `${one.width * 100}%`, top: `${one.depth * BOX}px` }}>${one.name}</span>`)}</div>`;
}
