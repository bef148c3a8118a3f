"use strict";
// Before the first picture, so that it does not flash in the other theme.
try {
  const chosen = localStorage.getItem("chadburn.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is switched off: the system's theme then.
}
