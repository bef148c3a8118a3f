"""Asking gateways and issuers: with deadlines, within bounds, and never led elsewhere."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import OAuth2Client

from app.commands.ending import CommandFailed, Exit
from app.commands.login.places import is_plain, number, said

MAX_BYTES = 256 * 1024
CONNECT_S, READ_S, WHOLE_S = 5.0, 10.0, 30.0
MAX_TOKEN_CHARS = 16 * 1024
ASSUMED_LIFETIME_S = 300.0
"""Of a token whose issuer does not say how long it lasts."""
MAX_LIFETIME_S = 366 * 24 * 3600.0


class _Bounded:
    """For an httpx2 client: an answer is read whole, or not taken.

    Redirects are not followed: a secret or token in the request is for that address alone.
    """

    def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"  # else it could grow while it is unpacked
        ends_at = time.monotonic() + WHOLE_S
        answer: httpx2.Response = super().send(request, **{**how, "stream": True})  # type: ignore[misc]
        try:
            body = bytearray()
            for chunk in answer.iter_raw():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise httpx2.RemoteProtocolError("the answer is too large")
                if time.monotonic() > ends_at:
                    raise httpx2.ReadTimeout("the answer does not end")
        finally:
            answer.close()
        return httpx2.Response(
            answer.status_code, headers=answer.headers, content=bytes(body), request=request
        )


class _Reader(_Bounded, httpx2.Client):
    """Without a token."""


class _Client(_Bounded, OAuth2Client):  # type: ignore[misc]
    """Authlib's."""

    def __del__(self) -> None:
        """Theirs fails aloud where Ctrl-C came while it was being made."""
        with suppress(AttributeError):
            super().__del__()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAs:
    """Who we are to an issuer. ``auth``: RFC 8414 §2, ``token_endpoint_auth_methods``."""

    client_id: str
    auth: str = "none"
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """RFC 6749 §5.1, of the type Bearer."""

    access_token: str = field(repr=False)
    lifetime_s: float
    refresh_token: str | None = field(default=None, repr=False)
    scope: str | None = None
    session: str | None = None
    """What the issuer calls this login, where it says so in an ID token (`sub` and `sid`)."""


class Refused(CommandFailed):
    """An error answer of RFC 6749 §5.2; ``error`` is its code."""

    def __init__(self, error: str, line: str) -> None:
        super().__init__(Exit.REFUSED, line)
        self.error = error


def fetch(url: str, bearer: str | None = None) -> httpx2.Response:
    """A document, whatever its status. Raises CommandFailed where nobody answers."""
    headers = {"accept": "application/json"}
    if bearer is not None:
        headers["authorization"] = f"Bearer {bearer}"
    with _told(url), _Reader(**_manner(url)) as http:
        return http.get(url, headers=headers)


def post(url: str, form: Mapping[str, str], who: AskedAs) -> dict[str, Any]:
    """The JSON object that a form is answered with, as a client. Raises CommandFailed."""
    with _told(url), _client(url, who) as http:
        auth = http.client_auth(who.auth)
        answer = http.request("POST", url, data=dict(form), auth=auth, withhold_token=True)
        return _object(url, answer)


def tokens(url: str, who: AskedAs, grant_type: str, **parameters: str) -> Tokens:
    """Of a token endpoint. Raises CommandFailed."""
    with _told(url), _client(url, who) as http:
        http.register_compliance_hook("access_token_response", _checked)
        answer: Any = http.fetch_token(url, grant_type=grant_type, **parameters)
    return _tokens(url, answer)


def revoke(url: str, who: AskedAs, token: str, hint: str) -> None:
    """RFC 7009. Raises CommandFailed unless the issuer says that the token is void."""
    with _told(url), _client(url, who) as http:
        answer = http.revoke_token(url, token=token, token_type_hint=hint)
        if answer.status_code != 200:  # whose content means nothing (RFC 7009 §2.2)
            _object(url, answer)


def _client(url: str, who: AskedAs) -> Any:
    return _Client(
        client_id=who.client_id,
        client_secret=who.secret,
        token_endpoint_auth_method=who.auth,
        revocation_endpoint_auth_method=who.auth,
        **_manner(url),
    )


def _manner(url: str) -> dict[str, Any]:
    plaintext = url.startswith("http://")
    return {
        "timeout": httpx2.Timeout(READ_S, connect=CONNECT_S),
        "follow_redirects": False,
        # http is allowed on this machine alone, and shows no certificate: to read those of all
        # authorities would take longer than all else here.
        "verify": not plaintext,
        # And it must not leave this machine by way of a proxy.
        "trust_env": not plaintext,
    }


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Whatever goes wrong as one line. Nothing that was sent is in it."""
    try:
        yield
    except httpx2.TransportError as error:
        line = f"no answer from {url}: {said(error) or type(error).__name__}"
        raise CommandFailed(Exit.UNREACHABLE, line) from error
    except httpx2.HTTPStatusError as error:
        line = f"{url} answered {error.response.status_code} without saying why"
        raise _cannot(error.response.status_code, line) from error
    except AuthlibBaseError as error:
        raise _refused(url, error.error, error.description) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        line = f"{url} answered with something that is no answer to that"
        raise CommandFailed(Exit.UNREACHABLE, line) from error


def _object(url: str, answer: httpx2.Response) -> dict[str, Any]:
    found = _checked(answer).json()
    if not isinstance(found, dict):
        raise TypeError("no JSON object")
    if "error" in found:
        raise _refused(url, found["error"], found.get("error_description"))
    return found


def _checked(answer: httpx2.Response) -> httpx2.Response:
    """One that is an answer at all. An error may come with any status: some issuers tell devices to
    wait with 403, or 429."""
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, dict) and "error" in found):
        answer.raise_for_status()
        if answer.status_code != 200:
            raise ValueError("no answer to a form")
    return answer


def _cannot(status: int, line: str) -> CommandFailed:
    refused = 400 <= status < 500 and status != 429
    return CommandFailed(Exit.REFUSED if refused else Exit.UNREACHABLE, line)


def _refused(url: str, error: object, description: object) -> Refused:
    why = f": {said(description)}" if description else ""
    code = said(error) if isinstance(error, str) else "no reason"
    return Refused(code, f"{url} refuses{why} ({code})")


def _tokens(url: str, answer: Mapping[str, Any]) -> Tokens:
    kind, access, refresh = (
        answer.get(name) for name in ("token_type", "access_token", "refresh_token")
    )
    if not isinstance(kind, str) or kind.lower() != "bearer":
        line = f"{url} gives tokens of the type {said(kind)}; only Bearer can be used here"
        raise CommandFailed(Exit.REFUSED, line)
    if not _is_token(access) or not (refresh is None or _is_token(refresh)):
        raise CommandFailed(Exit.UNREACHABLE, f"{url} answered with no usable token")
    scope = answer.get("scope")
    return Tokens(
        access_token=str(access),
        lifetime_s=_lifetime_s(answer.get("expires_in")),
        refresh_token=refresh,
        scope=scope if isinstance(scope, str) else None,
        session=_session(answer.get("id_token")),
    )


def _session(id_token: object) -> str | None:
    """It came over the connection that the tokens came over, and nobody is let in by it: to read it
    is enough."""
    parts = id_token.split(".") if isinstance(id_token, str) else []
    if len(parts) != 3 or len(parts[1]) > MAX_TOKEN_CHARS:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        named = [claims["sub"], claims["sid"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return json.dumps(named) if all(isinstance(one, str) for one in named) else None


def _is_token(found: object) -> bool:
    return isinstance(found, str) and is_plain(found) and 0 < len(found) <= MAX_TOKEN_CHARS


def _lifetime_s(expires_in: object) -> float:
    seconds = number(expires_in)
    if seconds is None or seconds <= 0:
        return ASSUMED_LIFETIME_S
    return min(seconds, MAX_LIFETIME_S)
