"""The issuer's pages: plain HTML and one style sheet, no script."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from starlette.responses import HTMLResponse, Response

from app.devidp.people import Person, audience_scopes

STYLE_PATH = "/style.css"


def choose(
    people: Iterable[Person],
    *,
    client: str,
    scope: str,
    action: str,
    returns_to: str | None = None,
    user_code: str | None = None,
    wrong_code: bool = False,
) -> Response:
    """Pick a person, or say no. ``returns_to``: the origin that the answer leads to; ``user_code``:
    what a device shows."""
    compare = ""
    if user_code is not None:
        compare = (
            f'<p class="device">Go on only if your terminal shows this code, and it was you who'
            f' began there:</p><p class="code">{escape(user_code)}</p>'
            f'<input type="hidden" name="user_code" value="{escape(user_code)}">'
        )
    fault = '<p class="fault" role="alert">That is not the code of this run.</p>'
    # The first button is what Enter in the field would press: nobody, rather than the first person.
    body = f"""
<h1>Who are you?</h1>
<p><strong>{escape(client)}</strong> would like to act for you.</p>
<form method="post" action="{escape(action)}" autocomplete="off">
<button disabled hidden></button>
{compare}
<label for="code">Code of this run <small>shown by <kbd>chadburn demo</kbd></small></label>
{fault if wrong_code else ""}
<input id="code" name="code" type="password" required autofocus maxlength="40"
 autocomplete="current-password" spellcheck="false">
<div class="people">{"".join(_card(person, scope) for person in people)}</div>
<button class="deny" name="deny" value="1" formnovalidate>Refuse</button>
</form>"""
    status = 403 if wrong_code else 200
    return _page("Who are you?", body, status=status, form_to=returns_to)


def ask_user_code(*, unknown: bool = False) -> Response:
    """Where a person types what a device shows."""
    fault = (
        '<p class="fault" role="alert">No device waits under that code. It may have expired, or'
        " been used.</p>"
    )
    body = f"""
<h1>Log in a device</h1>
<form method="get" action="/device" autocomplete="off">
<label for="user_code">Code that your terminal shows</label>
{fault if unknown else ""}
<input id="user_code" name="user_code" required autofocus maxlength="20" spellcheck="false"
 placeholder="ABCD-EFGH">
<button>Go on</button>
</form>"""
    return _page("Log in a device", body, status=404 if unknown else 200)


def say(title: str, text: str, *, status: int = 200) -> Response:
    return _page(title, f"<h1>{escape(title)}</h1><p>{escape(text)}</p>", status=status)


def style(_: object) -> Response:
    headers = {"cache-control": "max-age=300", "x-content-type-options": "nosniff"}
    return Response(_STYLE, media_type="text/css", headers=headers)


def _card(person: Person, scope: str) -> str:
    granted = audience_scopes(person.granted(scope))
    scopes = "".join(f"<li>{escape(name.removeprefix('admin:'))}</li>" for name in granted)
    empty = '<p class="none">May do nothing of what is asked for.</p>'
    return f"""
<button class="person" name="person" value="{escape(person.subject)}">
<span class="initial" aria-hidden="true">{escape(person.name[:1])}</span>
<span class="who"><b>{escape(person.name)}</b> <i>{escape(person.group)}</i></span>
<span class="does">{escape(person.does)}</span>
<span class="may">{f"<ul>{scopes}</ul>" if granted else empty}</span>
</button>"""


def _page(title: str, body: str, *, status: int, form_to: str | None = None) -> Response:
    html = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · Chadburn development issuer</title>
<link rel="stylesheet" href="{STYLE_PATH}">
</head>
<body>
<header>
<span class="mark" aria-hidden="true"></span>Chadburn <small>development issuer</small>
</header>
<main>{body}
</main>
<footer>
For trying Chadburn on this machine. It knows no passwords: never trust it elsewhere.
</footer>
</body>
</html>
"""
    # A browser holds a form to its form-action on the way back to the client as well.
    form_action = f"'self' {form_to}" if form_to else "'self'"
    headers = {
        "content-security-policy": (
            "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'; "
            f"form-action {form_action}"
        ),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        # Not no-referrer, under which a browser sends its own form with `Origin: null`.
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }
    return HTMLResponse(html, status, headers)


_STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #f6f3ec; --card: #fffdf8; --ink: #1d2b36; --soft: #5c6b76; --line: #d9d2c3;
  --brass: #9a6a12; --fault: #a3241c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11191f; --card: #1a252d; --ink: #e9e4d8; --soft: #9aa8b1; --line: #33424c;
    --brass: #d9a94a; --fault: #f08a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem; max-width: 46rem; min-height: 100vh;
  display: flex; flex-direction: column; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif;
}
header { display: flex; align-items: center; gap: .6rem; font-weight: 600; }
header small, label small, footer { color: var(--soft); font-weight: 400; }
.mark {
  width: 1.5rem; height: 1.5rem; border-radius: 50%; border: .3rem solid var(--brass);
  background: linear-gradient(var(--ink), var(--ink)) center / .2rem 60% no-repeat;
}
main { flex: 1; padding: 1.5rem 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0 1rem; }
label { display: block; font-weight: 600; margin-top: 1.25rem; }
input:not([type=hidden]) {
  width: 100%; max-width: 20rem; margin: .35rem 0 0; padding: .6rem .75rem; font: inherit;
  letter-spacing: .08em; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: .4rem;
}
button { font: inherit; color: inherit; cursor: pointer; }
button:not(.person) {
  margin-top: 1.25rem; padding: .6rem 1.2rem; background: none;
  border: 1px solid var(--line); border-radius: .4rem;
}
button:focus-visible, input:focus-visible {
  outline: .15rem solid var(--brass); outline-offset: 2px;
}
.people { display: grid; gap: .75rem; margin-top: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); }
.person {
  display: grid; grid-template-columns: auto 1fr; gap: .1rem .9rem; align-content: start;
  padding: 1rem; text-align: left; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem;
}
.person:hover { border-color: var(--brass); }
.initial {
  grid-row: span 2; width: 2.6rem; height: 2.6rem; border-radius: 50%; display: grid;
  place-items: center; font-weight: 700; color: var(--paper); background: var(--brass);
}
.who i { color: var(--soft); font-style: normal; font-size: .85rem; }
.does { color: var(--soft); font-size: .9rem; }
.may { grid-column: 1 / -1; }
.may ul {
  display: flex; flex-wrap: wrap; gap: .3rem; list-style: none; margin: .6rem 0 0; padding: 0;
}
.may li {
  padding: 0 .55rem; font-size: .78rem; border: 1px solid var(--line); border-radius: 1rem;
}
.none { margin: .6rem 0 0; font-size: .85rem; }
.code {
  margin: 0; font: 700 1.8rem/1.2 ui-monospace, monospace; letter-spacing: .12em;
}
.fault { color: var(--fault); margin: .35rem 0 0; }
kbd { font: .85em ui-monospace, monospace; }
footer { font-size: .85rem; border-top: 1px solid var(--line); padding-top: 1rem; }
"""
