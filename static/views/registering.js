// The register: an engine is added, changed, taken off. What may be said is the API's to judge; its
// refusals stand at the field that they are about.
import { call } from "../core/api.js";
import { forgetEngine, learnEngine } from "../core/fleet.js";
import { html, useRef, useState } from "../core/html.js";
import { HOME, to } from "../core/place.js";
import { go } from "../core/router.js";
import { refusedFor } from "../core/session.js";
import { Field } from "../orders/fields.js";
import { Action, OperationLink } from "../parts/bits.js";
import { Dialog } from "../parts/dialog.js";
import { finderOf, kept } from "../parts/origin.js";
import { Refused, useSending } from "../parts/sending.js";

const DIALECTS = [
  { value: "openengine", label: "OpenEngineAdmin, or openengine.v1.Control alone" },
  { value: "vllm", label: "vLLM's own control service" },
];
const ID = { name: "id", label: "Id", type: "text", mono: true, at: "/id", hint: "Small letters, digits and hyphens. It is never used again." };
const DIALECT = { name: "dialect", label: "What it speaks", type: "choice", options: DIALECTS, at: "/dialect" };
const FIELDS = [
  { name: "members", label: "Addresses", type: "lines", at: "/members", hint: "host:port or unix:/path: where orders go, then where it is read, if that is elsewhere. Of several members one a line, by rank." },
  { name: "labels", label: "Labels", type: "lines", at: "/labels", hint: "name=value, one a line." },
  { name: "credential", label: "Credential", type: "text", mono: true, at: "/tls/credential", hint: "Its name in the gateway's settings. Empty: none." },
  { name: "server_name", label: "Name in its certificate", type: "text", mono: true, at: "/tls/server_name", hint: "Empty: its host." },
];
// What is refused as a whole, and is about one field.
const ABOUT = { ENGINE_ALREADY_EXISTS: "id", UNSUPPORTED_DIALECT: "dialect", CREDENTIAL_UNKNOWN: "credential" };

const lines = (text) => text.split("\n").map((one) => one.trim()).filter(Boolean);
const pairs = (text) => lines(text).map((line) => {
  const [name, ...rest] = line.split("=");
  return [name.trim(), rest.join("=").trim()];
});
const members = (text) => lines(text).map((line, rank) => {
  const [admin, control] = line.split(/\s+/);
  return { rank, admin, control: control ?? admin };
});

const written = (engine) => ({
  members: engine.members.map((one) => (one.admin === one.control ? one.admin : `${one.admin} ${one.control}`)).join("\n"),
  labels: Object.entries(engine.labels).map((pair) => pair.join("=")).join("\n"),
  credential: engine.tls.credential ?? "",
  server_name: engine.tls.server_name ?? "",
});
const EMPTY = { id: "", dialect: "openengine", ...written({ members: [], labels: {}, tls: {} }) };

function said(values) {
  return {
    members: members(values.members),
    labels: Object.fromEntries(pairs(values.labels)),
    tls: { credential: values.credential.trim() || null, server_name: values.server_name.trim() || null },
  };
}

/** What is still missing, in a sentence; null: it can be sent. */
function missing(values, engine) {
  if (!engine && !values.id.trim()) return "“Id” is still empty.";
  if (!lines(values.members).length) return "“Addresses” is still empty.";
  if (lines(values.members).some((line) => line.split(/\s+/).length > 2)) return "A line of “Addresses” has two addresses at most.";
  const odd = lines(values.labels).find((line) => !line.includes("="));
  if (odd) return `The label “${odd}” has no value: write name=value.`;
  const names = pairs(values.labels).map(([name]) => name);
  return names.length === new Set(names).size ? null : "A label is there twice.";
}

/** Of a change what differs from what was: what is not named stays. */
function changes(values, engine) {
  const [now, before] = [said(values), said(written(engine))];
  return Object.fromEntries(Object.entries(now).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(before[name])));
}

function faultOf(problem, field) {
  if (!problem) return undefined;
  const at = problem.errors.find((one) => one.pointer === field.at || one.pointer?.startsWith(`${field.at}/`));
  if (!at) return ABOUT[problem.reason] === field.name ? problem.detail : undefined;
  const [, place] = at.pointer.match(/^\/members\/(\d+)/) ?? [];
  return `${place === undefined ? "" : `Line ${Number(place) + 1}: `}${at.detail}`;
}

/** Adding one, or changing `engine`. */
function RegisterDialog({ engine, onClose }) {
  // Of the registration as it was when the form was opened: what was typed is about that.
  const generation = useRef(engine?.generation);
  const [values, setValues] = useState(() => (engine ? written(engine) : EMPTY));
  const before = useRef(engine);
  const [reason, setReason] = useState("");
  const [shared, share] = useState(false);
  const fields = engine ? FIELDS : [ID, DIALECT, ...FIELDS];
  const change = (name) => (value) => {
    setValues({ ...values, [name]: value });
    forget();
  };
  const body = engine ? changes(values, before.current) : { id: values.id.trim(), dialect: values.dialect, ...said(values) };
  const lacks = missing(values, engine) ?? (engine && !Object.keys(body).length ? "Nothing is changed yet." : null);
  const { problem, forget, send } = useSending(!lacks, async () => {
    const sent = { ...body, reason: reason.trim() || undefined, allow_shared_address: shared || undefined };
    const { body: made } = engine
      ? await call("PATCH", `v1/engines/${encodeURIComponent(engine.id)}`, { body: sent, headers: { "If-Match": `"g${generation.current}"` } })
      : await call("POST", "v1/engines", { body: sent });
    learnEngine(made);
    onClose();
    if (!engine) go(to("engines", made.id));
  });
  const elsewhere = problem && !fields.some((field) => faultOf(problem, field));
  return html`<${Dialog} title=${engine ? `Change ${engine.id}` : "Register an engine"} onClose=${onClose}><form onSubmit=${send}>
    <p class="lead">${engine ? "What the gateway knows it by. The engine hears nothing of it." : "The gateway connects to it and watches it from then on."}</p>
    ${fields.map((field) => html`<${Field} key=${field.name} id=${`register-${field.name}`} field=${field} value=${values[field.name]} onChange=${change(field.name)} fault=${faultOf(problem, field)} />`)}
    <${Field} id="register-reason" field=${{ type: "text", label: "Reason", most: 500, hint: "Kept in the audit." }} value=${reason} onChange=${setReason} />
    ${(problem?.reason === "ENGINE_ADDRESS_TAKEN" || shared) && html`<${Field} id="register-shared" field=${{ type: "flag", label: "Two engines share that address" }} value=${shared} onChange=${share} />`}
    <${Refused} problem=${problem}>${elsewhere && problem.detail}${problem?.status === 412 && " Close this and open it again to see what it is now."}<//>
    ${lacks && html`<p class="dim small">${lacks}</p>`}
    <footer><button type="button" onClick=${onClose}>Close</button><button type="submit" class="primary" aria-disabled=${lacks ? "true" : undefined}>${engine ? "Change" : "Register"}</button></footer></form><//>`;
}

function RemoveDialog({ engine, onClose }) {
  const generation = useRef(engine.generation);
  const [values, setValues] = useState({ reason: "", confirmation: "" });
  const ready = values.confirmation === engine.id;
  const { problem, send } = useSending(ready, async () => {
    await call("DELETE", `v1/engines/${encodeURIComponent(engine.id)}`, { query: { reason: values.reason.trim() }, headers: { "If-Match": `"g${generation.current}"` } });
    go(HOME);
    forgetEngine(engine.id);
  });
  return html`<${Dialog} title="Remove ${engine.id}" onClose=${onClose}><form onSubmit=${send}>
    <p>The gateway watches it no more and takes no orders for it. The engine itself goes on as it is, a pause included. Its history stays; its id is not used again.</p>
    <${Field} id="remove-reason" field=${{ type: "text", label: "Reason", most: 500, hint: "Kept in the audit." }} value=${values.reason} onChange=${(reason) => setValues({ ...values, reason })} />
    <div class="field grave"><label for="remove-confirmation">This can't be taken back. Type <b class="mono">${engine.id}</b> to confirm</label>
      <input id="remove-confirmation" type="text" class="mono" autocomplete="off" spellcheck="false" value=${values.confirmation} onInput=${(event) => setValues({ ...values, confirmation: event.target.value })} /></div>
    <${Refused} problem=${problem}>${problem?.detail}${problem?.operation && html` <${OperationLink} id=${problem.operation} />`}<//>
    <footer><button type="button" onClick=${onClose}>Close</button><button type="submit" class="danger" aria-disabled=${ready ? undefined : "true"}>Remove</button></footer></form><//>`;
}

export function RegisterAction({ me }) {
  const [asking, ask] = useState(false);
  return html`<${Action} id="register" refused=${refusedFor(me, "admin:engines")} onClick=${() => ask(true)}>Register an engine …<//>
    ${asking && html`<${RegisterDialog} onClose=${() => ask(false)} />`}`;
}

export function Registration({ engine, me }) {
  const [asking, ask] = useState(null);
  const finder = finderOf(engine);
  const refused = refusedFor(me, "admin:engines", engine) ?? (finder && kept(finder));
  const close = () => ask(null);
  return html`<${Action} id="change" tone="quiet" refused=${refused} onClick=${() => ask("change")}>Change …<//>
    <${Action} id="remove" tone="quiet" refused=${refused} onClick=${() => ask("remove")}>Remove …<//>
    ${asking === "change" && html`<${RegisterDialog} engine=${engine} onClose=${close} />`}
    ${asking === "remove" && html`<${RemoveDialog} engine=${engine} onClose=${close} />`}`;
}
