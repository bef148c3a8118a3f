"""The page of who is logged in in this browser: their session, and a button that ends it."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.auth.principal import Principal
from app.auth.requires import Public, caller_by_session
from app.auth.sessions.errors import SessionEnded
from app.auth.sessions.places import HOME
from app.http.pages import page
from app.http.refusals import NotThere
from app.http.rooms import House
from app.http.route import PageRoute
from app.http.routers.login import LOGOUT, choices

SCRIPT_PATH = "/auth/page.js"
_SCRIPT = """\
"use strict";
const button = document.getElementById("log-out");
button.addEventListener("click", async () => {
  button.disabled = true;
  try {
    const answer = await fetch(button.dataset.url, {
      method: "POST",
      headers: { "X-Requested-With": "chadburn" },
    });
    if (!answer.ok) throw new Error();
    location.assign((await answer.json()).end_session_url ?? location.pathname);
  } catch {
    button.disabled = false;
    document.getElementById("told").textContent = "That did not work: try again.";
  }
});
"""

router = APIRouter(route_class=PageRoute, dependencies=[Public], include_in_schema=False)


@router.get(HOME)
async def show_session(request: Request, house: House) -> Response:
    """To look keeps no session from being idle."""
    desk = house.browser_sessions
    if desk is None:
        raise NotThere
    try:
        who = await caller_by_session(desk, request, going_on=True)
    except SessionEnded:
        who = None
    if who is None:
        links = "".join(
            f'<li><a href="{escape(choice.url)}">{escape(choice.name)}</a></li>'
            for choice in choices(house, None)
        )
        return page("Log in", f"<h1>Nobody is logged in</h1><ul>{links}</ul>")
    body = _of(who, f"{desk.place.prefix}{LOGOUT}")
    return page("Session", body, script=f"{desk.place.prefix}{SCRIPT_PATH}")


@router.get(SCRIPT_PATH)
async def read_script() -> Response:
    return Response(_SCRIPT, media_type="text/javascript; charset=utf-8")


def _of(who: Principal, logout: str) -> str:
    scopes = "".join(f"<li><code>{escape(scope)}</code></li>" for scope in sorted(who.scopes))
    return (
        f"<h1>Logged in</h1><p>{escape(who.subject)}, by {escape(who.issuer)}</p>"
        f"<p>The token allows:</p><ul>{scopes}</ul>"
        f'<p><button id="log-out" data-url="{escape(logout)}">Log out</button></p>'
        '<p id="told" role="status"></p>'
    )
