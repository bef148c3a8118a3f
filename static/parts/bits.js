// Small things that stand in many places.
import { html, useRef, useState } from "../core/html.js";
import { to } from "../core/place.js";
import { ago, atFull, useNow } from "../core/time.js";
import { gatewayTime } from "../core/skew.js";
import { brief } from "./words.js";

export function Age({ at, stale = Infinity, none = "never" }) {
  const now = useNow();
  if (!at) return html`<span class="dim">${none}</span>`;
  const age = gatewayTime(now) - Date.parse(at);
  const old = age > stale;
  return html`<time datetime=${at} title=${atFull(at)} class=${old ? "stale" : ""}>${ago(age)}${old && html`<span class="sr"> (stale)</span>`}</time>`;
}

/** `total` 0: how much there is to do is not known. */
export function Progress({ done, total, label }) {
  const known = total > 0;
  const share = known ? Math.min(100, (100 * done) / total) : 0;
  return html`<span class="progress ${known ? "" : "open"}" role="progressbar" aria-label=${label}
    aria-valuemin="0" aria-valuemax=${known ? total : undefined} aria-valuenow=${known ? done : undefined}>
    <span style=${{ width: known ? `${share}%` : "30%" }}></span></span>`;
}

export function Copy({ text, label = "Copy", what }) {
  const [said, say] = useState("");
  const timer = useRef(0);
  const copy = async () => {
    clearTimeout(timer.current);
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch {
      say("Not copied: the browser does not allow it");
    }
    timer.current = setTimeout(() => say(""), 2500);
  };
  return html`<button type="button" class="quiet" onClick=${copy} aria-label=${what ? `${label}: ${what}` : undefined}>
    <span aria-live="polite">${said || label}</span></button>`;
}

export function OperationLink({ id, children }) {
  return html`<a class="mono" href=${to("operations", id)} title=${id}>${children ?? brief(id)}</a>`;
}

export function Json({ value, label }) {
  return html`<pre class="json" tabindex="0" role="region" aria-label=${label}>${JSON.stringify(value, null, 2)}</pre>`;
}

export function Facts({ rows }) {
  return html`<dl class="facts">${rows
    .filter((row) => row && row[1] !== null && row[1] !== undefined && row[1] !== "")
    .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Labels({ labels }) {
  const names = Object.keys(labels).sort();
  if (!names.length) return null;
  return html`<span class="labels">${names.map((name) => html`<span class="label" key=${name}>${name}=${labels[name]}</span>`)}</span>`;
}

/** An action that is shown also to those who may not take it, with the reason. */
export function Action({ refused, onClick, tone = "", children, id }) {
  const hint = id && refused ? `${id}-why` : undefined;
  return html`<span class="action">
    <button type="button" class=${tone} aria-disabled=${refused ? "true" : undefined} aria-describedby=${hint}
      title=${refused ?? undefined} onClick=${(event) => (refused ? event.preventDefault() : onClick(event))}>${children}</button>
    ${hint && html`<span id=${hint} class="sr">${refused}</span>`}</span>`;
}
