"""The dashboard: a page and its files. All that it shows it asks of the API, as its caller."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.auth.requires import Public
from app.http.dashboard import SHELL_POLICY
from app.http.refusals import NotThere
from app.http.rooms import House, Rooms, prefix_of
from app.http.route import PageRoute

DASHBOARD = "/ui/"
# The folder's name stands for what is in it.
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable"}


class _AnyQuery(PageRoute):
    """Filters stand in the query of a page's address, and are the script's to read."""

    any_query = True


router = APIRouter(route_class=_AnyQuery, dependencies=[Public], include_in_schema=False)


@router.get("/ui")
async def lead_to_dashboard(house: House) -> Response:
    return RedirectResponse(f"{prefix_of(house)}{DASHBOARD}", 303)


@router.get("/ui/assets/{digest}/{path:path}")
async def read_dashboard_file(house: House, digest: str, path: str) -> Response:
    files = house.dashboard
    asset = files.assets.get(path) if digest == files.digest else None
    if asset is None:
        raise NotThere
    return Response(asset.content, media_type=asset.media_type, headers=_KEPT)


@router.get("/ui/")
async def show_dashboard(house: House) -> Response:
    return _shell(house)


@router.get("/ui/{place:path}")
async def show_place(house: House, place: str) -> Response:
    """Every address below is the same page, whose script shows what it names."""
    return _shell(house)


def _shell(house: Rooms) -> Response:
    if not house.dashboard.shell:
        raise NotThere
    page = house.dashboard.page(prefix_of(house))
    return HTMLResponse(page, headers={"Content-Security-Policy": SHELL_POLICY})
