// What stands around every page: where one can go, how live it is, who one is.
import { fleet, lookAgain } from "../core/fleet.js";
import { html, useState } from "../core/html.js";
import { HOME, to } from "../core/place.js";
import { route } from "../core/router.js";
import { logOut, session } from "../core/session.js";
import { connection, stream } from "../core/stream.js";
import { KeptStore, useStore } from "../core/store.js";
import { span, useNow } from "../core/time.js";
import { Badge } from "../parts/badge.js";
import { Mark } from "../parts/mark.js";
import { Note } from "../parts/states.js";

const theme = new KeptStore("theme", "auto", ["auto", "light", "dark"]);
theme.subscribe((chosen) => {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
});

const PAGES = [
  ["", "Fleet", HOME],
  ["operations", "Ledger", to("operations")],
  ["audit", "Audit", to("audit")],
];

export function Shell({ children }) {
  const { parts } = useStore(route);
  const here = parts[0] === "engines" ? "" : (parts[0] ?? "");
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <header class="bar">
      <a class="brand" href=${HOME}><${Mark} /><span>Chadburn</span></a>
      <nav aria-label="Pages">${PAGES.map(([name, label, address]) => html`<a key=${name} href=${address} aria-current=${here === name ? "page" : undefined}>${label}</a>`)}</nav>
      <div class="bar-end"><${Connection} /><${Who} /></div>
    </header>
    <${Trouble} />
    <main id="main" tabindex="-1">${children}</main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

const SAID = {
  connecting: ["dim", "run", "Connecting"],
  live: ["good", "dot", "Live"],
  lost: ["bad", "cross", "Not live"],
  paused: ["warn", "pause", "Held still"],
};

function Connection() {
  const { state } = useStore(connection);
  const [tone, icon, label] = SAID[state];
  const paused = state === "paused";
  const turn = () => {
    if (paused) {
      stream.open();
      lookAgain();
    } else stream.pause();
  };
  const does = paused ? "Show changes again as they happen" : "Hold the picture still";
  return html`<span class="sr" role="status">${label}</span>
    <button type="button" class="live" onClick=${turn} title=${does} aria-label="${label}. ${does}"><${Badge} tone=${tone} icon=${icon}>${label}<//></button>`;
}

/** What is shown may not be so any more: said on every page, above all else. */
function Trouble() {
  const { state, since, why } = useStore(connection);
  const problem = useStore(fleet, (value) => value.problem);
  const seenAt = useStore(fleet, (value) => value.seenAt);
  const now = useNow();
  const readOnly = useStore(session, (value) => value.me?.read_only);
  // Who may not look at engines has no stream to lose.
  const reads = useStore(session, (value) => value.me?.scopes.includes("admin:read"));
  const lost = reads && state === "lost" && now - since > 1500;
  const old = seenAt ? `What you see is ${span(now - seenAt)} old.` : "Nothing has been read yet.";
  return html`<div class="trouble">
    ${lost
      ? html`<${Note} tone="bad" role="alert"><b>${why === "shutting_down" ? "The gateway is restarting." : "The connection to the gateway is lost."}</b> ${old} It is being tried again, and goes on from where it was.<//>`
      : state === "paused"
        ? html`<${Note} icon="pause"><b>The picture is held still.</b> ${old} Orders go out all the same.<//>`
        : problem && html`<${Note} tone="bad" role="alert"><b>${problem.title}.</b> ${problem.detail} ${old}<//>`}
    ${readOnly && html`<${Note} icon="lock"><b>Read-only.</b> This gateway takes no orders at present.<//>`}
  </div>`;
}

function Who() {
  const { me, subject } = useStore(session);
  const chosen = useStore(theme);
  const [fault, setFault] = useState("");
  const leave = () => logOut().catch(() => setFault("That did not work: try again."));
  return html`<details class="menu" onKeyDown=${closeOnEscape}><summary><span class="who">${subject}</span></summary>
    <div class="menu-box">
      <p><b>${subject}</b><br /><span class="small dim">${me?.issuer}</span></p>
      <fieldset class="segments"><legend>Theme</legend>${["auto", "light", "dark"].map((one) => html`<label key=${one}>
        <input type="radio" name="theme" checked=${chosen === one} onChange=${() => theme.set(one)} /><span>${one}</span></label>`)}</fieldset>
      <details><summary>What you may do</summary><ul class="scopes">${(me?.scopes ?? []).map((one) => html`<li key=${one}><code>${one}</code></li>`)}</ul></details>
      <button type="button" onClick=${leave}>Log out</button><p role="status" class="small">${fault}</p>
    </div></details>`;
}

function closeOnEscape(event) {
  if (event.key !== "Escape") return;
  event.currentTarget.open = false;
  event.currentTarget.querySelector("summary").focus();
}
