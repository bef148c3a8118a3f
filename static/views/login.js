// Logging in, and what is shown when a session has ended.
import { html, useEffect } from "../core/html.js";
import { HOME, to } from "../core/place.js";
import { loginUrl, look, session, tellOthers } from "../core/session.js";
import { useStore } from "../core/store.js";
import { Dialog } from "../parts/dialog.js";
import { Mark } from "../parts/mark.js";
import { useTitle } from "./title.js";

export function LoginPage() {
  useTitle("Log in");
  const logins = useStore(session, (value) => value.logins);
  return html`<main class="alone"><section class="login"><${Mark} /><h1>Chadburn</h1>
    <p class="dim">Orders to inference engines, and the book of what became of them.</p>
    ${logins.length
      ? logins.map((login) => html`<a key=${login.issuer} class="button primary" href=${loginUrl(login)}>Log in${logins.length > 1 ? ` with ${login.name}` : ""}</a>`)
      : html`<p><b>Nobody can log in here yet.</b></p><p class="dim">This gateway has no identity provider with a <code>login</code> in its settings; its documentation has it under “Logging in with a browser”.</p>`}
  </section></main>`;
}

/** Over the page that it leaves as it is: what was typed there is not lost. */
export function Lapsed() {
  const logins = useStore(session, (value) => value.logins);
  useEffect(() => {
    look(); // for where one can log in
  }, []);
  return html`<${Dialog} title="Your session has ended" sealed>
    <p>Log in again and go on where you were. It opens in another tab; what you typed here stays.</p>
    <p class="choices">${logins.map((login) => html`<a key=${login.issuer} class="button primary" target="_blank" rel="noopener" href=${loginUrl(login, to("signed-in"))}>Log in${logins.length > 1 ? ` with ${login.name}` : ""}</a>`)}
      <button type="button" onClick=${look}>I have logged in</button></p>
  <//>`;
}

/** Of the tab that was opened for a login alone. */
export function SignedIn() {
  useTitle("Logged in");
  const subject = useStore(session, (value) => value.subject);
  useEffect(tellOthers, []);
  return html`<main class="alone"><section class="login"><${Mark} /><h1>You are logged in</h1>
    <p class="dim">As ${subject}. The other tab goes on where it was; this one can be closed.</p><a class="button" href=${HOME}>Or go to the fleet here</a></section></main>`;
}
