// One order to one engine: its form, what it would do, and the confirmation that its damage asks for.
import { call, get, newKey } from "../core/api.js";
import { learn } from "../core/fleet.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/html.js";
import { go } from "../core/router.js";
import { to } from "../core/place.js";
import { refusedFor, session } from "../core/session.js";
import { useStore } from "../core/store.js";
import { Dialog } from "../parts/dialog.js";
import { useLoad } from "../parts/load.js";
import { Failure, Loading, Note } from "../parts/states.js";
import { missing, named, orderOf, pathOf } from "./catalogue.js";
import { forgetDraft, keepDraft, readDraft } from "./draft.js";
import { Field } from "./fields.js";
import { Plan, judgedAt, usePlan } from "./plan.js";

export function OrderDialog({ engine, kind, preset, onClose }) {
  const order = orderOf(kind);
  const path = `v1/engines/${encodeURIComponent(engine.id)}`;
  const [{ data: can, problem }, again] = useLoad((signal) => get(`${path}/capabilities`, { signal }), engine.id);
  const body = !order
    ? html`<${Note}>There is no such order.<//>`
    : can && engine.facts
      ? html`<${OrderForm} engine=${engine} order=${order} can=${can} preset=${preset} onClose=${onClose} />`
      : problem
        ? html`<${Failure} problem=${problem} retry=${again} title="The engine does not say what it can do" />`
        : html`<${Loading} what="Asking the engine what it can do" />`;
  return html`<${Dialog} title="${order ? named(kind) : kind}: ${engine.id}" onClose=${onClose}>${body}<//>`;
}

function OrderForm({ engine, order, can, preset, onClose }) {
  // The facts as they were when the form was opened: what is typed is about those. That they are
  // still so is for the gateway to judge, by the revision of the preview.
  const about = useMemo(() => ({ can, facts: engine.facts }), [can, engine.facts.instance_id, engine.revision]);
  const { me, phase } = useStore(session);
  const fields = useMemo(() => order.fields(about), [about]);
  const [typed, setTyped] = useState(() => ({ ...readDraft(engine.id, order.kind), ...preset }));
  const [sending, setSending] = useState(false);
  const [problem, setProblem] = useState(null);
  const key = useRef({ key: newKey(), of: null });
  const values = { ...Object.fromEntries(fields.map((field) => [field.name, valid(field, typed[field.name])])), ...common(typed) };
  const change = (name, value) => {
    // Of what is there by then: a file takes a while to be read, and more may be typed meanwhile.
    setTyped((now) => {
      const next = { ...now, [name]: value };
      keepDraft(engine.id, order.kind, next);
      return next;
    });
    setProblem(null);
  };

  const lacks = missing(order, fields, values, about);
  const forbidden = refusedFor(me, order.scope, engine);
  const body = useMemo(() => (lacks ? null : complete(order, values, about)), [JSON.stringify(values), about, lacks]);
  const target = pathOf(order, engine.id, values);
  const method = order.method ?? "POST";
  const plan = usePlan(forbidden || phase !== "in" ? null : body, method, target, [engine.revision, engine.running_operation, engine.frozen?.until]);
  const grave = order.grave?.(values) ?? false;
  const confirmed = !grave || typed.confirmation === engine.id;
  const needsReason = me?.reason_required?.includes(order.kind) && !values.reason.trim();
  const shown = problem ?? plan.problem;

  const send = async (event) => {
    event.preventDefault();
    if (lacks || forbidden || !confirmed || needsReason || !plan.plan || sending) return;
    const sent = { ...body, expected_revision: judgedAt(plan.plan) };
    // The same order keeps its key, so that giving it once more after no answer is not a second one.
    const text = JSON.stringify([target, sent]);
    if (key.current.of !== null && key.current.of !== text) key.current.key = newKey();
    key.current.of = text;
    setSending(true);
    setProblem(null);
    try {
      const answer = await call(method, target, { body: sent, headers: { "Idempotency-Key": key.current.key } });
      forgetDraft(engine.id, order.kind);
      learn(answer.body);
      go(to("operations", answer.body.id));
    } catch (failed) {
      setProblem(failed);
      setSending(false);
      if (failed.status !== 0 && failed.status !== 401) plan.again();
    }
  };

  const id = (name) => `order-${name}`;
  return html`<form class="order" onSubmit=${send}>
    <p class="lead">${order.says}</p>
    ${forbidden && html`<${Note} icon="lock">${forbidden}<//>`}
    ${fields.filter((field) => !field.when || field.when(values)).map((field) => html`<${Field} key=${field.name} id=${id(field.name)} field=${field}
      value=${values[field.name]} onChange=${(value) => change(field.name, value)} fault=${shown?.at?.(field.at ?? `/${field.name}`, Boolean(field.at))} />`)}
    <${Field} id=${id("reason")} value=${values.reason} onChange=${(value) => change("reason", value)}
      field=${{ type: "text", label: me?.reason_required?.includes(order.kind) ? "Reason (needed)" : "Reason", most: 500, hint: "Kept with the operation and in the audit." }} />
    <details class="more"><summary>More</summary>
      <${Field} id=${id("deadline")} value=${values.deadline_min} onChange=${(value) => change("deadline_min", value)}
        field=${{ type: "number", label: "Deadline (minutes)", hint: "Nothing is sent after it. Empty: the usual one of this order." }} />
      ${can.models.length > 1 && html`<${Field} id=${id("model")} value=${values.model} onChange=${(value) => change("model", value)}
        field=${{ type: "choice", label: "Model", options: [{ value: "", label: "The whole engine" }, ...can.models.map((value) => ({ value, label: value }))] }} />`}
    </details>
    ${!forbidden && html`<${Plan} plan=${plan} problem=${shown} lacks=${lacks} values=${values} change=${change} me=${me} engine=${engine} />`}
    ${grave && !forbidden && html`<div class="field grave"><label for=${id("confirmation")}>This can't be taken back. Type <b class="mono">${engine.id}</b> to confirm</label>
      <input id=${id("confirmation")} type="text" class="mono" autocomplete="off" spellcheck="false" value=${typed.confirmation ?? ""}
        onInput=${(event) => setTyped({ ...typed, confirmation: event.target.value })} /></div>`}
    <footer><button type="button" onClick=${onClose}>Close</button>
      <button type="submit" class=${grave ? "danger" : "primary"} aria-disabled=${!plan.plan || !confirmed || needsReason || forbidden ? "true" : undefined}>
        ${sending ? "Giving the order …" : `${named(order.kind)}${plan.plan?.would === "queue" ? " (in line)" : ""}`}</button></footer>
  </form>`;
}

/** What was typed, if the field still takes it: the engine may offer something else by now. */
function valid(field, value) {
  if (value === undefined) return field.value;
  const offered = field.options?.map((one) => one.value);
  if (field.type === "choice") return offered.includes(value) ? value : field.value;
  // Of a draft there is no file: that has to be picked anew.
  if (field.type === "file") return typeof value === "object" ? value : null;
  if (field.type === "many") return field.fixed ? field.value : value.filter((one) => offered.includes(one));
  return value;
}

const common = (typed) => ({
  reason: typed.reason ?? "",
  deadline_min: typed.deadline_min ?? "",
  model: typed.model ?? "",
  queue: typed.queue ?? false,
  override: typed.override ?? false,
});

function complete(order, values, about) {
  const said = {
    ...order.body(values, about),
    reason: values.reason.trim() || undefined,
    deadline_ms: values.deadline_min ? Math.round(Number(values.deadline_min) * 60_000) || undefined : undefined,
    model: values.model || undefined,
    when_busy: values.queue ? "queue" : undefined,
    override_freeze: values.override || undefined,
  };
  return JSON.parse(JSON.stringify(said)); // without what is undefined
}
