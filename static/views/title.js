import { useEffect } from "../core/html.js";

export function useTitle(text) {
  useEffect(() => {
    document.title = `${text} · Chadburn`;
  }, [text]);
}
