"""Pages for people who look with a browser: plain HTML, no style, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from app.domain.errors import ChadburnError
from app.http.negotiation import chosen_type
from app.http.problems import MEDIA_TYPE, problem_of
from app.http.reasons import describe
from app.http.refusals import NothingAcceptable
from app.http.rooms import Rooms
from app.observability.tracing import current_ids

LOGIN = "/auth/login"
_HTML = "text/html"
_WITH_SCRIPT = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_OWN = frozenset({"content-type", "content-length"})


def page(
    title: str,
    body: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    script: str | None = None,
) -> Response:
    """`body` is HTML already. `script`: the address of one of the gateway's own."""
    policy = {} if script is None else {"Content-Security-Policy": _WITH_SCRIPT}
    run = "" if script is None else f'<script src="{escape(script)}" defer></script>'
    content = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Chadburn</title>{run}</head><body>{body}</body></html>"
    )
    return HTMLResponse(content, status, {**(headers or {}), **policy})


def prefers_page(request: Request) -> bool:
    """Whether HTML is what is asked for first, as browsers do when a person goes somewhere."""
    offered = (MEDIA_TYPE, "application/json", _HTML)
    try:
        return chosen_type(request.headers.getlist("accept"), offered) == _HTML
    except NothingAcceptable:
        return False


def failure_page(request: Request, error: ChadburnError) -> Response:
    """What the problem says, for a person, and how to begin anew. Nothing of what came."""
    problem = problem_of(error, request.scope)
    entry, ids = describe(error.reason), current_ids()
    rooms: Rooms | None = getattr(request.state, "rooms", None)
    again = ""
    if rooms is not None and rooms.browser_sessions is not None:
        there = f"{rooms.browser_sessions.place.prefix}{LOGIN}"
        again = f'<p><a href="{escape(there)}">Log in again</a></p>'
    named = "" if ids is None else f", request <code>{ids.request_id}</code>"
    body = (
        f"<h1>{escape(entry.title)}</h1><p>{escape(error.message)}</p>{again}"
        f"<p>Reason <code>{escape(error.reason)}</code>{named}</p>"
    )
    kept = {name: value for name, value in problem.headers.items() if name not in _OWN}
    return page(entry.title, body, status=problem.status_code, headers={**kept, "Vary": "Accept"})
