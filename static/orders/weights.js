// New weights: from where the engine takes them, as far as a person can say it in a form. Sessions
// are several calls with a lease: they are for programs.
import { count } from "../parts/words.js";
import { MODES, choice, figure, flag, lines, many, number, text } from "./making.js";
import { carried, linesOf, tensorsOf } from "./safetensors.js";

const SOURCES = {
  disk: "A folder on its host",
  distributed: "A trainer's process group, which its ranks join",
  shared_memory: "Shared memory on its host",
  inline: "A file of mine, sent with the order",
};
const CACHE_POLICIES = {
  flush: "Flush what the earlier weights computed",
  keep: "Keep what the earlier weights computed (outputs may mix)",
};
const OFFSET = "offset_bytes";

/** Several engines at once can each read a folder; of all others each engine has its own. */
const offered = ({ can, several }) => Object.keys(SOURCES).filter((one) => can.weight_sources.includes(one) && (!several || one === "disk"));

const inside = (source, place) => ({ when: (values) => values.source === source, at: `/source/${place}` });
const listed = "One a line: name, type, shape, such as lm_head.weight bfloat16 256x64";

function places({ can }) {
  const group = (name) => inside("distributed", `distributed/${name}`);
  const shared = (name) => inside("shared_memory", `tensors/shared_memory/${name}`);
  return {
    disk: [
      text("path", "Folder with the weights", { hint: "Safetensors files, as the engine's host sees them.", mono: true, ...inside("disk", "disk/path") }),
    ],
    distributed: [
      { ...choice("backend", "Over", ["nccl", "gloo"], { nccl: "NCCL", gloo: "Gloo" }, "nccl"), ...group("backend") },
      text("address", "Address of the meeting point", { mono: true, ...group("address") }),
      figure("port", "Its port", { required: true, ...group("port") }),
      text("group", "Name of the group", { mono: true, ...group("group") }),
      figure("world_size", "Processes in the group", { required: true, hint: "The trainer's and the engine's together.", ...group("world_size") }),
      figure("rank_offset", "The engine's first rank in it", { required: true, from: 0, hint: `${count(can.world_size, "rank")} of the group from there on.`, ...group("rank_offset") }),
      figure("source_rank", "The one that sends", { required: true, from: 0, value: "0", ...group("source_rank") }),
      lines("sent", "Tensors", { hint: `${listed}; in the order in which they are sent.`, fill: linesOf, ...group("tensors") }),
    ],
    shared_memory: [
      text("object_name", "Name of the object", { mono: true, ...shared("object_name") }),
      figure("size_bytes", "Its size in bytes", { required: true, ...shared("size_bytes") }),
      lines("placed", "Tensors", { hint: `${listed} 0; the last is where in the object it begins, in bytes.`, ...shared("tensors") }),
      text("sha256", "Checksum of all of it", { required: false, mono: true, hint: "SHA-256. Empty: not checked.", ...shared("sha256") }),
    ],
    inline: [
      { name: "file", label: "Safetensors file", type: "file", value: null, required: true, read: (file) => carried(file, can.limits.max_message_bytes), ...inside("inline", "tensors/inline") },
    ],
  };
}

const SAID = {
  disk: ({ path }) => ({ disk: { path } }),
  distributed: ({ backend, address, port, group, world_size, rank_offset, source_rank, sent }) => ({
    distributed: { backend, address, port: number(port), group, world_size: number(world_size), rank_offset: number(rank_offset), source_rank: number(source_rank), tensors: tensorsOf(sent) },
  }),
  shared_memory: ({ object_name, size_bytes, placed, sha256 }) => ({
    tensors: { shared_memory: { object_name, size_bytes: number(size_bytes), tensors: tensorsOf(placed, OFFSET), sha256: sha256.trim() || undefined } },
  }),
  inline: ({ file }) => ({ tensors: { inline: { tensors: file.tensors } } }),
};

const FAULTS = {
  distributed: ({ sent }) => tensorsOf(sent).fault,
  shared_memory: ({ placed }) => tensorsOf(placed, OFFSET).fault,
};

export const UPDATE_WEIGHTS = {
  kind: "update_weights", verb: "update-weights", scope: "admin:weights", group: "Weights",
  says: "Puts new weights in place, on all ranks or on none.",
  idle: (about) => {
    if (offered(about).length) return null;
    return about.several ? "It takes no weights from a folder; give it the order by itself." : "This engine takes weights in pieces only, from trainers, by the API.";
  },
  fields: (about) => {
    const { can, facts } = about;
    const sources = offered(about);
    const origin = choice("source", "Where they are", sources, SOURCES, "disk");
    return [
      ...(sources.length > 1 ? [origin] : []),
      ...sources.flatMap((one) => places(about)[one]).map((field) => (sources.length > 1 ? field : { ...field, when: undefined })),
      text("weight_version", "What they are called", { hint: facts.weights.version ? `Now: ${facts.weights.version}` : undefined }),
      choice("around", "While they are exchanged",
        [...(facts.admission === "paused" ? ["under"] : can.pause_modes)],
        { ...Object.fromEntries(Object.entries(MODES).map(([mode, said]) => [mode, `Pause: ${said.toLowerCase()}`])), under: "It is paused already, and stays so" }, "drain"),
      choice("cache_policy", "Caches", can.cache_policies, CACHE_POLICIES, "flush"),
      ...(can.components.length > 1 ? [many("components", "Components", can.components, ["target"])] : []),
      flag("check_finite", "Refuse weights with NaN or infinity"),
    ];
  },
  body: (values, about) => {
    const { weight_version, around, cache_policy, components, check_finite } = values;
    const { facts } = about;
    return {
      source: SAID[sourceOf(values, about)](values), weight_version, cache_policy,
      ...(components ? { components } : {}),
      ...(around === "under" ? { under_pause: { pause_epoch: facts.pause?.epoch ?? facts.pause_epoch } } : { pause: around }),
      ...(check_finite ? { check_finite } : {}),
    };
  },
  ready: (values, about) => FAULTS[sourceOf(values, about)]?.(values) ?? null,
  grave: () => true,
};

const sourceOf = ({ source }, about) => source ?? offered(about)[0];
