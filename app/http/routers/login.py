"""Logging in and out with a browser."""

from __future__ import annotations

from html import escape
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from app.auth.requires import Public, caller_by_session, visitor_of
from app.auth.sessions.desk import SessionDesk
from app.auth.sessions.errors import LogoutTokenRefused, SessionEnded
from app.auth.sessions.logins import LoginAnswer, Logins
from app.auth.sessions.places import CALLBACK, FRONT, HOME, SESSION_PAGE
from app.http.pages import LOGIN, page
from app.http.refusals import MediaTypeRefused, NotThere
from app.http.replies import problem_entry, reply
from app.http.rooms import House, Rooms
from app.http.route import EdgeRoute, PageRoute
from app.http.routers.dashboard import DASHBOARD

LOGOUT, BACKCHANNEL = "/auth/logout", "/auth/backchannel-logout"
_FORM = "application/x-www-form-urlencoded"
_MAX_FORM_BYTES = 64 * 1024


class _ByIssuers(EdgeRoute):
    """What issuers send here has what they add to it, and forms for bodies."""

    any_query = True
    any_body = True


class _BroughtByPeople(_ByIssuers):
    for_people = True


router = APIRouter(tags=["login"], route_class=EdgeRoute, dependencies=[Public])
for_people = APIRouter(route_class=PageRoute, dependencies=[Public], include_in_schema=False)
brought = APIRouter(route_class=_BroughtByPeople, dependencies=[Public], include_in_schema=False)
by_issuers = APIRouter(route_class=_ByIssuers, dependencies=[Public], include_in_schema=False)

OneParameter = Annotated[str | None, Query(max_length=8192)]


class LoginDocument(BaseModel):
    issuer: str
    name: str
    url: str = Field(description="Where to go to log in there, from this gateway's own address")


class SessionDocument(BaseModel):
    """Who is logged in in this browser, and what their token allows; nobody: all of it is empty."""

    signed_in: bool
    issuer: str | None = None
    subject: str | None = None
    client_id: str | None = None
    scopes: list[str] = []
    logins: list[LoginDocument] = Field(description="Where one can log in")


class LogoutDocument(BaseModel):
    end_session_url: str | None = Field(
        description="Where to send the browser to log out at the issuer too; null: nowhere"
    )


@for_people.get(FRONT)
async def show_front(house: House) -> Response:
    """Where issuers send the browser after a logout."""
    _, desk = _login_of(house)
    return RedirectResponse(_first_page(house, desk), 303)


@for_people.get(LOGIN)
async def begin_login(
    request: Request,
    house: House,
    issuer: OneParameter = None,
    return_to: OneParameter = None,
) -> Response:
    """Send the browser to the issuer, or let the person choose one of several."""
    logins, desk = _login_of(house)
    client = logins.client_for(issuer)
    if client is None:
        desk.place.return_path(return_to)  # refused now rather than behind the next click
        return _chooser(house, return_to)
    back = _first_page(house, desk) if return_to is None else return_to
    begun = await logins.begin(client, back, request.headers.getlist("cookie"))
    answer = RedirectResponse(begun.location, 303)
    for cookie in (*begun.gone, begun.cookie):
        answer.headers.append("Set-Cookie", cookie)
    return answer


@brought.get(CALLBACK)
async def finish_login(
    request: Request,
    house: House,
    state: OneParameter = None,
    code: OneParameter = None,
    iss: OneParameter = None,
    error: OneParameter = None,
) -> Response:
    """Where issuers send the browser back to."""
    given = LoginAnswer(state=state, code=code, issuer=iss, error=error, path_client=None)
    return await _finished(request, house, given)


@brought.get(CALLBACK + "/{client}")
async def finish_login_of(
    client: str,
    request: Request,
    house: House,
    state: OneParameter = None,
    code: OneParameter = None,
    iss: OneParameter = None,
    error: OneParameter = None,
) -> Response:
    """The same for an issuer with a path of its own."""
    given = LoginAnswer(state=state, code=code, issuer=iss, error=error, path_client=client)
    return await _finished(request, house, given)


@router.get(SESSION_PAGE, response_model=SessionDocument, responses=problem_entry(403))
async def read_session(request: Request, house: House) -> Response:
    """Who is logged in in this browser. To ask keeps no session from being idle."""
    desk, logins = house.browser_sessions, choices(house, None)
    who = None
    if desk is not None:
        try:
            who = await caller_by_session(desk, request, going_on=True)
        except SessionEnded:
            who = None
    if who is None:
        return reply(SessionDocument(signed_in=False, logins=logins))
    return reply(
        SessionDocument(
            signed_in=True,
            issuer=who.issuer,
            subject=who.subject,
            client_id=who.client_id,
            scopes=sorted(who.scopes),
            logins=logins,
        )
    )


@router.post(LOGOUT, response_model=LogoutDocument, responses=problem_entry(403))
async def log_out(request: Request, house: House) -> Response:
    """End the session of this browser. Without one there is nothing to end. Takes what every change
    with a session takes: the gateway's own origin, and `X-Requested-With: chadburn`."""
    desk = house.browser_sessions
    if desk is None:
        return reply(LogoutDocument(end_session_url=None))
    url = None
    try:
        session = await desk.found(request.headers.getlist("cookie"))
    except SessionEnded:
        session = None
    if session is not None:
        request.state.actor = session.actor
    # Also of whoever shows no session: another site's form must not take the cookie away.
    desk.place.refuse_cross_site(request.method, request.headers)
    if session is not None:
        url = await desk.log_out(session, visitor_of(request))
    answer = reply(LogoutDocument(end_session_url=url))
    answer.headers.append("Set-Cookie", desk.place.cookie(desk.place.session_cookie, "", 0))
    return answer


@by_issuers.post(BACKCHANNEL)
async def log_out_by_issuer(request: Request, house: House) -> Response:
    """OpenID Connect Back-Channel Logout 1.0: an issuer says that a session there has ended."""
    _, desk = _login_of(house)
    token = await _form_value(request, "logout_token")
    await desk.log_out_by_issuer(token, visitor_of(request))
    return Response(status_code=200)


def _login_of(house: Rooms) -> tuple[Logins, SessionDesk]:
    if house.logins is None or house.browser_sessions is None:
        raise NotThere
    return house.logins, house.browser_sessions


async def _finished(request: Request, house: Rooms, given: LoginAnswer) -> Response:
    logins, _ = _login_of(house)
    cookies = request.headers.getlist("cookie")
    with house.allowances.logging_in(request):
        finished = await logins.finish(given, cookies, visitor_of(request))
    answer = RedirectResponse(finished.location, 303)
    for cookie in finished.cookies:
        answer.headers.append("Set-Cookie", cookie)
    return answer


async def _form_value(request: Request, name: str) -> str:
    """Raises MediaTypeRefused, LogoutTokenRefused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _FORM:
        raise MediaTypeRefused
    body = await request.body()
    try:
        if len(body) > _MAX_FORM_BYTES:
            raise ValueError
        given = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise LogoutTokenRefused("the form cannot be read") from None
    values = [value for field, value in given if field == name]
    if len(values) != 1:
        raise LogoutTokenRefused(f"the form has not one {name}")
    return values[0]


def _first_page(house: Rooms, desk: SessionDesk) -> str:
    """Of whoever wants none in particular: the dashboard where there is one, else who they are."""
    return f"{desk.place.prefix}{DASHBOARD if house.dashboard.shell else HOME}"


def choices(house: Rooms, return_to: str | None) -> list[LoginDocument]:
    if house.logins is None or house.browser_sessions is None:
        return []
    more = {} if return_to is None else {"return_to": return_to}
    prefix = house.browser_sessions.place.prefix
    return [
        LoginDocument(
            issuer=client.issuer,
            name=client.name,
            url=f"{prefix}{LOGIN}?{urlencode({'issuer': client.issuer, **more})}",
        )
        for client in house.logins.clients
    ]


def _chooser(house: Rooms, return_to: str | None) -> Response:
    links = "".join(
        f'<li><a href="{escape(choice.url)}">{escape(choice.name)}</a></li>'
        for choice in choices(house, return_to)
    )
    return page("Log in", f"<h1>Log in</h1><ul>{links}</ul>")
