// Data that one page asks for: loading, there, or why not.
import { useCallback, useEffect, useRef, useState } from "../core/html.js";
import { onEvent } from "../core/fleet.js";
import { session } from "../core/session.js";

/** `[state, again]`; state is `{data, problem}`, both null while it comes. `key`: what it depends on. */
export function useLoad(read, key) {
  const [state, setState] = useState({ data: null, problem: null, key: null });
  const [round, setRound] = useState(0);
  const reading = useRef(read);
  reading.current = read;
  useEffect(() => {
    if (key === null) return undefined; // there is nothing to ask for
    const stop = new AbortController();
    // The first time somebody came to see it; later it is the page that looks again.
    reading.current(stop.signal, round > 0).then(
      (data) => stop.signal.aborted || setState({ data, problem: null, key }),
      (problem) => {
        if (stop.signal.aborted || problem.name === "AbortError") return;
        // What was there is still worth a look, beside what has gone wrong; what may not be seen is not.
        const hidden = problem.status === 403 || problem.status === 404;
        setState((before) => ({ data: before.key === key && !hidden ? before.data : null, problem, key }));
      },
    );
    return () => stop.abort();
  }, [key, round]);
  const again = useCallback(() => setRound((number) => number + 1), []);
  useEffect(() => onEvent((event) => event.type === "reset" && again()), []);
  const ended = state.problem?.status === 401;
  useEffect(() => {
    if (!ended) return undefined;
    return session.subscribe(({ phase }) => phase === "in" && again()); // after logging in anew
  }, [ended]);
  return [state.key === key ? state : { data: null, problem: null }, again];
}
