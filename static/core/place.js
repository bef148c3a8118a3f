// Where the gateway is. This file is at {gateway}/ui/assets/{digest}/core/place.js, and the gateway
// may have a path of its own behind a proxy.
export const ROOT = new URL("../../../../", import.meta.url).pathname;
export const HOME = `${ROOT}ui/`;

/** An address of the dashboard: `to("engines", id)`. */
export function to(...parts) {
  return HOME + parts.map(encodeURIComponent).join("/");
}

/** `query`: names to values; lists are repeated, what is empty is left out. */
export function withQuery(path, query = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) {
      if (one !== undefined && one !== null && one !== "") found.append(name, one);
    }
  }
  const text = found.toString();
  return text ? `${path}?${text}` : path;
}
