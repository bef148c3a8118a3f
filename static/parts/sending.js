// What dialogs have in common that send something: once at a time, and a refusal stays to be seen.
import { html, useState } from "../core/html.js";
import { Note } from "./states.js";

export function useSending(ready, work) {
  const [state, setState] = useState({});
  const send = async (event) => {
    event.preventDefault();
    if (!ready || state.sending) return;
    setState({ sending: true });
    try {
      await work();
    } catch (problem) {
      setState({ problem });
    }
  };
  return { ...state, send, forget: () => setState({}) };
}

export function Refused({ problem, children }) {
  return problem ? html`<${Note} tone="bad" role="alert"><b>${problem.title}.</b> ${children ?? problem.detail}<//>` : null;
}
