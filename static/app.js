// The dashboard begins here.
import { html, render } from "./core/html.js";
import { beginRouting } from "./core/router.js";
import { begin } from "./core/session.js";
import { App } from "./views/app.js";

beginRouting();
const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
begin();
