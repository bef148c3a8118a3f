// Addresses: which page is shown, and links that change it without loading anew.
import { HOME } from "./place.js";
import { Store } from "./store.js";

/** `parts`: of the path below the dashboard. `query`: URLSearchParams. */
export const route = new Store(read());

function read() {
  const below = location.pathname.startsWith(HOME) ? location.pathname.slice(HOME.length) : "";
  let parts;
  try {
    parts = below.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = ["?"];
  }
  return { parts, query: new URLSearchParams(location.search), path: location.pathname };
}

export function go(address, { replace = false } = {}) {
  const method = replace ? "replaceState" : "pushState";
  history[method](null, "", address);
  route.set(read());
}

/** Change the query of the page that is shown; an empty value takes a name away. */
export function setQuery(changes, { replace = true } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const one of [value].flat()) if (one) query.append(name, one);
  }
  const text = query.toString();
  go(location.pathname + (text ? `?${text}` : ""), { replace });
}

export function beginRouting() {
  addEventListener("popstate", () => route.set(read()));
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target.closest?.("a[href]");
    if (!link || link.target || link.hasAttribute("download")) return;
    const url = new URL(link.href);
    if (url.origin !== location.origin || !url.pathname.startsWith(HOME)) return;
    event.preventDefault();
    go(url.pathname + url.search);
  });
}
