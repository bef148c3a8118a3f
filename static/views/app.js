// Which page is shown, and to whom.
import { beginFleet } from "../core/fleet.js";
import { html, useEffect, useRef } from "../core/html.js";
import { HOME } from "../core/place.js";
import { route } from "../core/router.js";
import { look, session } from "../core/session.js";
import { stream } from "../core/stream.js";
import { useStore } from "../core/store.js";
import { Empty, Failure, Loading } from "../parts/states.js";
import { AuditPage } from "./audit.js";
import { EnginePage } from "./engine.js";
import { FleetPage } from "./fleet.js";
import { LedgerPage } from "./ledger.js";
import { Lapsed, LoginPage, SignedIn } from "./login.js";
import { OperationPage } from "./operation.js";
import { Shell } from "./shell.js";

export function App() {
  const { phase, me, refusal } = useStore(session);
  const { parts } = useStore(route);
  const known = phase === "in" || phase === "lapsed";
  const begun = useRef(false);
  useEffect(() => {
    if (phase !== "in" || !me?.scopes.includes("admin:read")) return;
    if (begun.current) stream.open();
    else beginFleet();
    begun.current = true;
  }, [phase, me?.subject]);
  useEffect(() => {
    if (phase === "lapsed") stream.pause();
  }, [phase]);

  if (phase === "asking") return html`<main class="alone"><${Loading} what="Asking who you are" /></main>`;
  if (phase === "away") return html`<main class="alone"><${Failure} problem=${refusal} retry=${look} /></main>`;
  if (!known) return html`<${LoginPage} />`;
  if (parts[0] === "signed-in") return html`<${SignedIn} />`;
  return html`<${Shell}>${me ? html`<${Page} key=${pageKey(parts)} parts=${parts} me=${me} />` : html`<${Failure} problem=${refusal} title="Your token allows nothing here" />`}<//>
    ${phase === "lapsed" && html`<${Lapsed} />`}`;
}

/** Pages of different things start anew; filters in the query do not make another page. */
const pageKey = (parts) => parts.slice(0, 2).join("/");

function Page({ parts, me }) {
  const [first, second] = parts;
  const main = useRef();
  useEffect(() => {
    // Who goes on by keyboard or screen reader begins at the page's heading.
    const heading = main.current.querySelector("h1");
    if (heading && document.activeElement === document.body) {
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    }
    scrollTo(0, 0);
  }, []);
  return html`<div ref=${main} class="page">${shown(first, second, parts.length, me)}</div>`;
}

function shown(first, second, length, me) {
  const reads = me.scopes.includes("admin:read");
  if (first !== "audit" && !reads) {
    const problem = { title: "You may not look at engines", detail: "That needs the scope admin:read, which you do not have.", reason: "INSUFFICIENT_SCOPE", forbidden: true };
    return html`<h1>Fleet</h1><${Failure} problem=${problem} />`;
  }
  if (length === 0) return html`<${FleetPage} />`;
  if (first === "engines" && length === 2) return html`<${EnginePage} id=${second} />`;
  if (first === "operations" && length === 1) return html`<${LedgerPage} />`;
  if (first === "operations" && length === 2) return html`<${OperationPage} id=${second} />`;
  if (first === "audit" && length === 1) return html`<${AuditPage} />`;
  return html`<h1>There is no such page</h1><${Empty} title="The address leads nowhere."><a href=${HOME}>Go to the fleet</a><//>`;
}
