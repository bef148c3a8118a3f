"""Calls to the gateway. Problem documents become one line and an exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from app.commands.ending import CommandFailed, Exit, OutcomeLost, usage
from app.commands.login.places import is_loopback
from app.commands.target import Target, plain

Json = dict[str, Any]

CONNECT_S = 5.0
ANSWER_S = 30.0
ATTEMPTS = 4
_CANNOT_NOW = frozenset({429, 502, 503, 504})


class _Bearer(httpx2.Auth):
    """With the token of the moment: a command may outlive the one it began with."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers["authorization"] = f"Bearer {plain(self._token())}"
        yield request


class Gateway:
    """One gateway. Every method raises CommandFailed with the line to print."""

    def __init__(self, target: Target) -> None:
        self._url = target.url
        try:
            self._client = httpx2.Client(
                base_url=target.url,
                headers={"accept": "application/json"},
                auth=_Bearer(target.token),
                # Plaintext for this machine must not leave it by way of a proxy.
                trust_env=not (target.url.startswith("http://") and is_loopback(target.url)),
                timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            )
        except httpx2.InvalidURL as error:
            raise usage(f"--url is no usable address: {error}") from error

    def get(self, path: str, **query: Any) -> Json:
        """A JSON document, read again after a broken connection."""
        given = {name: value for name, value in query.items() if value is not None}
        return document(self._send("GET", path, params=given, again=True))

    def pages(self, path: str, **query: Any) -> Iterator[Json]:
        """The items of all pages of a list."""
        token: str | None = None
        while True:
            page = self.get(path, **query, page_token=token)
            yield from page["items"]
            token = page.get("next_page_token")
            if not token:
                return

    def post(
        self,
        path: str,
        body: Json,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
    ) -> Json:
        """Sent once, or with an Idempotency-Key again and again until an answer comes."""
        given = dict(headers or {})
        again = "idempotency-key" in {name.lower() for name in given}
        return document(self._send(method, path, json=body, headers=given, again=again))

    def delete(self, path: str, **query: Any) -> None:
        """Sent once, and answered with nothing."""
        given = {name: value for name, value in query.items() if value is not None}
        response = self._send("DELETE", path, params=given, again=False)
        if response.status_code >= 300:
            raise problem(response)

    def _send(self, method: str, path: str, *, again: bool, **what: Any) -> httpx2.Response:
        kind = CommandFailed
        for attempt in range(ATTEMPTS if again else 1):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                return self._client.request(method, path, **what)
            except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
                raise usage(f"{self._url} is no usable address: {error}") from error
            except httpx2.TransportError as error:
                last = str(error) or type(error).__name__
                if not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    kind = OutcomeLost
        raise kind(Exit.UNREACHABLE, f"no answer from {self._url}: {last}")

    @contextmanager
    def stream(self, path: str, after: str | None, quiet_s: float) -> Iterator[httpx2.Response]:
        """An event stream. TransportError is for the caller, who can go on where it broke; one of
        them says that nothing came for `quiet_s`."""
        headers = {"accept": "text/event-stream"}
        if after is not None:
            headers["last-event-id"] = after
        limits = httpx2.Timeout(CONNECT_S, read=quiet_s)
        with self._client.stream("GET", path, headers=headers, timeout=limits) as response:
            if response.status_code >= 300:
                response.read()
                raise problem(response)
            yield response

    @contextmanager
    def download(self, path: str, **query: Any) -> Iterator[Iterator[bytes]]:
        """The content of a file, piece by piece."""
        headers = {"accept": "*/*"}
        try:
            with self._client.stream("GET", path, params=query, headers=headers) as response:
                if response.status_code >= 300:
                    response.read()
                    raise problem(response)
                yield response.iter_raw()
        except httpx2.TransportError as error:
            line = f"no answer from {self._url}: {str(error) or type(error).__name__}"
            raise CommandFailed(Exit.UNREACHABLE, line) from error

    def close(self) -> None:
        self._client.close()


@contextmanager
def connected(target: Target) -> Iterator[Gateway]:
    gateway = Gateway(target)
    try:
        yield gateway
    finally:
        gateway.close()


def document(response: httpx2.Response) -> Json:
    if response.status_code >= 300:
        raise problem(response)
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        line = f"{response.url} answered {response.status_code} with something that is no JSON"
        raise CommandFailed(Exit.UNREACHABLE, line)
    return found


def problem(response: httpx2.Response) -> CommandFailed:
    """What a refusal says, in one line: title, fields or detail, reason, operation, request."""
    status = response.status_code
    exit_ = Exit.UNREACHABLE if status in _CANNOT_NOW else Exit.REFUSED
    kind = OutcomeLost if status >= 500 and status != 501 else CommandFailed
    try:
        found = response.json()
    except (ValueError, httpx2.DecodingError):
        found = None
    if not isinstance(found, dict) or "title" not in found:
        return kind(exit_, f"{response.url} answered {status} without saying why")
    line, faults = str(found["title"]), found.get("errors") or []
    if found.get("detail") and not faults:  # the fields say the same again, each at its place
        line += f": {found['detail']}"
    for fault in faults:
        place = fault.get("pointer") or fault.get("parameter") or "/"
        line += f"; {place}: {fault.get('detail')}"
    known = {"": "reason", "operation ": "operation", "request ": "request_id"}
    tail = [f"{word}{found[name]}" for word, name in known.items() if found.get(name)]
    return kind(exit_, f"{line} ({', '.join(tail)})" if tail else line)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
