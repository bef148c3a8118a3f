// The API's names as words.
const SAID = {
  kv_cache: "KV cache",
  load_lora: "load adapter",
  unload_lora: "unload adapter",
  reconfigure_serving: "reconfigure",
  set_weight_version: "set weight version",
  accepted_by_engine: "accepted by the engine",
};

export const words = (name) => SAID[name] ?? String(name ?? "").replaceAll("_", " ");

export function title(name) {
  const text = words(name);
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(number) {
  let [value, unit] = [number, 0];
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** Of an id: enough to tell one from another at a glance. Ids of one hour begin alike. */
export const brief = (id) => (id.length > 13 ? `…${id.slice(-8)}` : id);
