// Every order as data: what it takes, what may be filled in, and how much damage it can do. Forms
// are made from this and from what the engine says that it can do.
import { title, words } from "../parts/words.js";
import { MODES, choice, figure, flag, lines, many, number, text } from "./making.js";
import { UPDATE_WEIGHTS } from "./weights.js";

const DRAINS = {
  wait: "Wait until running requests have finished",
  refuse: "Refuse the order if requests are running",
  abort: "End running requests",
};
const NEW_REQUESTS = { hold: "Hold them until it is resumed", refuse: "Refuse them at once" };
const CONTENT = {
  preserve: "Keep the content in host memory",
  discard: "Drop the content",
};
const PROFILERS = { torch: "Torch: operators and kernels", memory: "Memory: allocations", device: "Device: the accelerator's own" };

/**
 * `fields({can, facts})` gives what is filled in; `body(values, {can, facts})` what is sent. `grave`
 * says of values whether it takes a typed confirmation. `idle` says why it makes no sense now.
 */
export const ORDERS = [
  {
    kind: "pause", verb: "pause", scope: "admin:pause", group: "Admission",
    says: "Closes admission, and finishes, ends or freezes what runs.",
    fields: ({ can }) => [
      choice("mode", "Running requests", can.pause_modes, MODES, "drain"),
      choice("new_requests", "New requests", can.new_requests, NEW_REQUESTS, "hold"),
      figure("hold_s", "Hold each for at most (seconds)", {
        when: (values) => values.new_requests === "hold",
        hint: can.limits.default_hold_limit_ms ? `Empty: ${can.limits.default_hold_limit_ms / 1000} s, the engine's own.` : "Empty: the engine's own limit.",
      }),
    ],
    body: ({ mode, new_requests, hold_s }) => ({
      mode, new_requests,
      hold_limit_ms: new_requests === "hold" && hold_s ? Math.round(number(hold_s) * 1000) : undefined,
    }),
    grave: ({ mode }) => mode === "abort",
  },
  {
    kind: "resume", verb: "resume", scope: "admin:pause", group: "Admission",
    says: "Lifts the pause that is in force, and no other.",
    idle: ({ facts }) => (facts.pause || facts.admission === "paused" ? null : "Nothing is paused."),
    fields: () => [],
    body: (_, { facts }) => ({ pause_epoch: facts.pause?.epoch ?? facts.pause_epoch }),
  },
  {
    kind: "release_resources", verb: "release-resources", scope: "admin:resources", group: "Memory",
    says: "Closes admission and gives memory back.",
    fields: ({ can }) => {
      const kinds = Object.keys(can.resources);
      const policies = ["preserve", "discard"].filter((one) => kinds.some((kind) => can.resources[kind].includes(one)));
      return [
        { ...many("resources", "What to release", kinds), fixed: can.resources_together, hint: can.resources_together ? "This engine releases them together." : undefined },
        choice("content", "Its content", policies, CONTENT, "preserve"),
        choice("drain", "Running requests", can.drain_rules, DRAINS, "wait"),
      ];
    },
    body: ({ resources, content, drain }) => ({ resources, content, drain }),
    grave: ({ content, drain, resources }) => drain === "abort" || (content === "discard" && resources.includes("weights")),
  },
  {
    kind: "restore_resources", verb: "restore-resources", scope: "admin:resources", group: "Memory",
    says: "Takes released memory again. It does not open admission.",
    idle: ({ facts }) => (facts.released.length ? null : "Nothing is released."),
    fields: ({ facts }) => [many("resources", "What to restore", facts.released)],
    body: ({ resources }, { facts }) => ({ resources: resources.filter((one) => facts.released.includes(one)), release_epoch: facts.release_epoch }),
  },
  UPDATE_WEIGHTS,
  {
    kind: "set_weight_version", verb: "weight-version", scope: "admin:weights", group: "Weights",
    says: "Gives the weights in place another name.",
    fields: ({ facts }) => [text("weight_version", "What they are called", { hint: `Now: ${facts.weights.version ?? "without a name"}` })],
    body: ({ weight_version }) => ({ weight_version }),
  },
  {
    kind: "flush_caches", verb: "flush-caches", scope: "admin:cache", group: "Memory",
    says: "Drops what the named caches hold.",
    fields: ({ can }) => [many("caches", "Caches", can.cache_kinds)],
    body: ({ caches }) => ({ caches }),
  },
  {
    kind: "load_lora", verb: "loras", scope: "admin:adapters", group: "Adapters",
    says: "Loads a LoRA adapter on all ranks.",
    fields: () => [
      text("name", "Name", { hint: "What requests call it." }),
      text("path", "Folder with the adapter", { hint: "As the engine's host sees it.", mono: true }),
      figure("id", "Number", { hint: "Empty: the engine chooses." }),
    ],
    body: ({ name, path, id }) => ({ name, path, id: number(id) }),
  },
  {
    kind: "unload_lora", verb: (values) => `loras/${values.name.split("/").map(encodeURIComponent).join("/")}`, method: "DELETE",
    scope: "admin:adapters", group: "Adapters",
    says: "Unloads a LoRA adapter from all ranks.",
    idle: ({ facts }) => (facts.loras.length ? null : "No adapter is loaded."),
    fields: ({ facts }) => [choice("name", "Adapter", facts.loras.map((one) => one.name), Object.fromEntries(facts.loras.map((one) => [one.name, one.name])))],
    body: () => ({}),
  },
  {
    kind: "abort_requests", verb: "abort-requests", scope: "admin:abort", group: "Requests",
    says: "Ends requests, all or by their ids.",
    fields: ({ can }) => [
      choice("which", "Which", can.abort_all ? ["ids", "all"] : ["ids"], { ids: "Those named below", all: "All of them" }, "ids"),
      lines("ids", "Request ids", { when: (values) => values.which === "ids", hint: "One a line." }),
    ],
    body: ({ which, ids }) => (which === "all" ? { all: true } : { request_ids: ids.split(/\s+/).filter(Boolean) }),
    grave: () => true,
  },
  {
    kind: "profile", verb: "profiles", scope: "admin:profile", group: "Profile",
    says: "Records what the engine does, and ends when the files exist.",
    fields: ({ can }) => [
      choice("profiler", "Profiler", can.profiler_kinds, PROFILERS, "torch"),
      choice("bound", "Until", ["duration", "steps", "stopped"], { duration: "A time has passed", steps: "A number of engine steps", stopped: "It is stopped by hand" }, "duration"),
      figure("duration_s", "Seconds", { value: "5", required: true, when: (values) => values.bound === "duration" }),
      figure("steps", "Steps", { value: "50", required: true, when: (values) => values.bound === "steps" }),
      flag("record_shapes", "Record the shapes of tensors"),
      flag("with_stack", "Record where in the source"),
    ],
    body: ({ profiler, bound, duration_s, steps, record_shapes, with_stack }) => ({
      profiler, record_shapes, with_stack,
      duration_ms: bound === "duration" ? Math.round(number(duration_s) * 1000) : undefined,
      steps: bound === "steps" ? number(steps) : undefined,
    }),
  },
  {
    kind: "reconfigure_serving", verb: "reconfigure", scope: "admin:reconfigure", group: "Engine",
    says: "Gives it another role, parallelism or limits. A failure leaves the shape that was.",
    fields: ({ can, facts }) => [
      ...can.reconfigurable.map((name) =>
        name === "role"
          ? { ...choice("role", "Role", ["", "aggregated", "prefill", "decode"], { "": `As it is (${facts.role})` }, ""), value: "" }
          : figure(name, title(name), { hint: "Empty: as it is." })),
      choice("drain", "Running requests", can.drain_rules, DRAINS, "wait"),
    ],
    body: (values, { can }) => ({
      drain: values.drain,
      ...Object.fromEntries(can.reconfigurable.map((name) => [name, name === "role" ? values.role || undefined : number(values[name])])),
    }),
    ready: (values, { can }) => (can.reconfigurable.some((name) => values[name]) ? null : "Fill in one at least."),
    grave: () => true,
  },
  {
    kind: "shutdown", verb: "shutdown", scope: "admin:shutdown", group: "Engine",
    says: "Ends the engine's process, and all requests with it.",
    fields: () => [],
    body: () => ({}),
    grave: () => true,
  },
];

export const orderOf = (kind) => ORDERS.find((one) => one.kind === kind);
export const scopeOf = (kind) => orderOf(kind)?.scope;
export const GROUPS = [...new Set(ORDERS.map((one) => one.group))];

/** Where it is sent, below the gateway. */
export function pathOf(order, engine, values) {
  const verb = typeof order.verb === "string" ? order.verb : order.verb(values);
  return `v1/engines/${encodeURIComponent(engine)}/${verb}`;
}

/** What is still missing, in a sentence; null: it can be sent. */
export function missing(order, fields, values, about) {
  for (const field of fields) {
    if (field.when && !field.when(values)) continue;
    const value = values[field.name];
    const empty = Array.isArray(value) ? !value.length : String(value ?? "").trim() === "";
    if (field.required && empty) return `“${field.label}” is still empty.`;
    if (field.type !== "number" || empty) continue;
    const enough = field.from === undefined ? Number(value) > 0 : Number(value) >= field.from;
    if (!enough) return `“${field.label}” takes a number ${field.from === undefined ? "above 0" : `from ${field.from} on`}.`;
  }
  return order.ready?.(values, about) ?? null;
}

export const named = (kind) => title(words(kind));
