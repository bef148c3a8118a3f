// A modal window: the browser's own, which keeps the focus in it and gives it back.
import { html, useEffect, useRef } from "../core/html.js";

let opened = 0; // one can open over another, and each has a title of its own

export function Dialog({ title, onClose, children, wide, sealed }) {
  const box = useRef();
  const named = useRef(null);
  named.current ??= `dialog-${++opened}`;
  useEffect(() => {
    const dialog = box.current;
    const before = document.activeElement;
    dialog.showModal();
    dialog.querySelector("h2").focus(); // a screen reader begins with what it is
    return () => {
      dialog.close();
      before?.isConnected && before.focus?.();
    };
  }, []);
  return html`<dialog ref=${box} class="${wide ? "wide" : ""} ${sealed ? "sealed" : ""}" aria-labelledby=${named.current}
    onCancel=${(event) => { event.preventDefault(); onClose?.(); }}>
    <header><h2 id=${named.current} tabindex="-1">${title}</h2>
      ${onClose && html`<button type="button" class="quiet" onClick=${onClose} aria-label="Close">✕</button>`}</header>
    ${children}
  </dialog>`;
}
