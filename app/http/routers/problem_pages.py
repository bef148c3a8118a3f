"""The pages behind the `type` of problems."""

from __future__ import annotations

import re
from html import escape

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from app.auth.requires import Public
from app.http.pages import page
from app.http.reason import Reason
from app.http.reasons import CATALOGUE, slug_of
from app.http.refusals import NotThere
from app.http.replies import problem_entry
from app.http.route import EdgeRoute

router = APIRouter(
    tags=["problems"],
    route_class=EdgeRoute,
    dependencies=[Public],
    default_response_class=HTMLResponse,
)

_BY_SLUG = {slug_of(reason): reason for reason in CATALOGUE}
_CACHED = {"Cache-Control": "public, max-age=3600"}


@router.get("/problems")
async def list_problems() -> Response:
    """Every reason that a problem can have."""
    rows = "".join(
        f'<li><a href="/problems/{slug}">{reason}</a>: {escape(CATALOGUE[reason].title)}</li>'
        for slug, reason in sorted(_BY_SLUG.items())
    )
    return _page("Problems", f"<h1>Problems</h1><ul>{rows}</ul>")


@router.get("/problems/{slug}", responses=problem_entry(404))
async def explain_problem(slug: str) -> Response:
    """What one reason means and what can be done."""
    reason = _BY_SLUG.get(slug)
    if reason is None:
        raise NotThere
    return _page(reason, _explained(reason, CATALOGUE[reason]))


def _explained(reason: str, entry: Reason) -> str:
    return (
        f"<h1>{escape(entry.title)}</h1><p><code>{reason}</code></p>"
        f"<p>{_prose(entry.meaning)}</p><h2>What to do</h2><p>{_prose(entry.todo)}</p>"
        '<p><a href="/problems">All problems</a></p>'
    )


def _prose(text: str) -> str:
    """What stands between backticks in the catalogue is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _page(title: str, body: str) -> Response:
    return page(title, body, headers=_CACHED)
