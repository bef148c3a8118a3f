// Times as people read them. The browser's own zone is used, and named where it matters.
import { useEffect, useState } from "./html.js";
import { Store, useStore } from "./store.js";

const now = new Store(Date.now());
let readers = 0;
let timer = 0;

/** The time, each second, for as long as somebody is shown an age. */
export function useNow() {
  useEffect(() => {
    if (!readers++) timer = setInterval(() => now.set(Date.now()), 1000);
    now.set(Date.now());
    return () => --readers || clearInterval(timer);
  }, []);
  return useStore(now);
}

export function useLater(ms) {
  const [later, setLater] = useState(false);
  useEffect(() => {
    const waiting = setTimeout(() => setLater(true), ms);
    return () => clearTimeout(waiting);
  }, []);
  return later;
}

export function span(ms) {
  const s = Math.max(0, ms) / 1000;
  if (s < 0.95) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 172_800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} days`;
}

export function ago(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 1) return "now";
  if (s < 90) return `${s} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 172_800) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86_400)} days ago`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const brief = new Intl.DateTimeFormat("en-GB", {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

export const atClock = (text) => (text ? clock.format(new Date(text)) : "");
export const atBrief = (text) => (text ? brief.format(new Date(text)) : "");
export const atFull = (text) => (text ? `${full.format(new Date(text))} ${zone()}` : "");
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;
export const between = (from, until) => new Date(until).getTime() - new Date(from).getTime();
