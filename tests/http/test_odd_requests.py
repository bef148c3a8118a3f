"""Every route of the application asked in odd ways: what a path or a method is written like never
opens what its plain form keeps shut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from app.domain.scopes import Scope
from app.http.route import EdgeRoute, declaration_of
from tests.http.gateway import INFERENCE, Gateway

pytestmark = pytest.mark.anyio

NOBODY = "0198c5f1-0000-7000-8000-000000000000"
ODD_METHODS = ("OPTIONS", "TRACE", "PROPFIND", "LINK", "GETT", "get", "Post", "PATCH", "PUT")


async def raw(gate: Gateway, method: str, target: str, *lines: str, host: str | None = None) -> int:
    """The status of an answer to exactly this; 0: the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    try:
        named = [f"Host: 127.0.0.1:{gate.port}"] if host is None else [host] if host else []
        head = [f"{method} {target} HTTP/1.1", *named, "Connection: close", *lines]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
        status = await asyncio.wait_for(reader.readline(), 30)
        return int(status.split()[1]) if status else 0
    finally:
        writer.close()


def routes(gate: Gateway) -> Iterator[tuple[str, str, str]]:
    """Method, path and scopes of each that is not open."""
    for route in gate.app.routes:
        assert isinstance(route, EdgeRoute)
        say = declaration_of(route)
        assert say is not None
        if say.need is None:
            continue
        path = route.path_format.replace("{engine}", "e1").replace("{operation}", NOBODY)
        path = path.replace("{profile}", NOBODY).replace("{name}", "sql")
        for method in sorted(route.methods or ()):
            yield method, path, " ".join(say.need.scopes)


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


def written(path: str) -> dict[str, str]:
    """The same path, or what some part of the way may take for the same."""
    first, _, rest = path.removeprefix("/").partition("/")
    last = path.rpartition("/")[2]
    return {
        "two slashes first": f"/{path}",
        "two slashes within": f"/{first}//{rest}",
        "two slashes last": path.replace(f"/{last}", f"//{last}"),
        "slash last": f"{path}/",
        "dot": f"/./{first}/{rest}",
        "dots": f"/{first}/x/../{rest}",
        "dots into an open path": f"/healthz/..{path}",
        "encoded dots": f"/healthz/%2e%2e{path}",
        "encoded letter": path.replace(f"/{last}", f"/%{ord(last[0]):02x}{last[1:]}"),
        "encoded slashes": "/" + quote(path[1:], safe=""),
        "encoded twice": path.replace("/", "%252f"),
        "upper case": path.upper(),
        "semicolon": f"{path};x=/healthz",
        "encoded nul": f"{path}%00",
        "encoded newline": f"{path}%0d%0ax: y",
        "question within": f"{path}%3f/healthz",
        "absolute": f"http://127.0.0.1{path}",
        "absolute elsewhere": f"http://healthz.example{path}",
    }


async def test_no_spelling_of_a_path_lets_in_who_may_not(gate: Gateway) -> None:
    before = dict(gate.engine.calls)
    inference = bearer(gate.token(*Scope, audience=INFERENCE))
    wrong = []
    for method, path, needed in routes(gate):
        others = [scope for scope in Scope if scope not in needed.split()]
        lacking = bearer(gate.token(*others)) if needed else inference
        for how, target in written(path).items():
            status = await raw(gate, method, target, lacking)
            if status not in (400, 403, 404, 405, 421):
                wrong.append((method, target, how, status))
    assert wrong == []
    assert dict(gate.engine.calls) == before


async def test_odd_methods_do_nothing_for_anybody(gate: Gateway) -> None:
    before = dict(gate.engine.calls)
    everything = bearer(gate.token(*Scope))
    known: dict[str, set[str]] = {}
    for method, path, _ in routes(gate):
        known.setdefault(path, set()).add(method)
    wrong = []
    for path, methods in known.items():
        for method in ODD_METHODS:
            if method not in methods:
                status = await raw(gate, method, path, everything)
                if status not in (400, 404, 405):
                    wrong.append((method, path, status))
    assert wrong == []
    assert dict(gate.engine.calls) == before
    register = await gate.get("/v1/engines")
    assert [engine["id"] for engine in register.json()["items"]] == ["e1"]


async def test_head_asks_for_what_get_asks_for(gate: Gateway) -> None:
    for method, path, needed in routes(gate):
        if method != "GET":
            continue
        others = [scope for scope in Scope if scope not in needed.split()]
        lacking = bearer(gate.token(*others)) if needed else ""
        assert await raw(gate, "HEAD", path) == 401, path
        if lacking:
            assert await raw(gate, "HEAD", path, lacking) == 403, path


async def test_a_header_makes_no_other_method_of_a_request(gate: Gateway) -> None:
    reader = bearer(gate.token(Scope.READ))
    for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
        assert await raw(gate, "GET", "/v1/engines/e1", reader, f"{name}: DELETE") == 200
    for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix"):
        target = "/v1/engines/e1/pause"
        assert await raw(gate, "POST", target, f"{name}: /healthz") == 401
    assert (await gate.get("/v1/engines/e1")).status_code == 200


HOSTS = (
    "",
    "Host:",
    "Host: evil.example",
    "Host: 127.0.0.1.evil.example",
    "Host: 127.0.0.1@evil.example",
    "Host: evil.example:80\r\nHost: 127.0.0.1",
    "Host: 127.0.0.1\r\nHost: evil.example",
    "Host: 127.0.0.1, evil.example",
    "Host: [::1",
    "Host: [::1]x",
    "Host: %31%32%37.0.0.1",
    "Host: evil.example\r\nX-Forwarded-Host: 127.0.0.1",
)


async def test_no_other_host_is_answered(gate: Gateway) -> None:
    """It is looked at before the path is, so one route of each method will do."""
    everything = bearer(gate.token(*Scope))
    one_each = {method: path for method, path, _ in routes(gate)}
    for host in HOSTS:
        for method, path in one_each.items():
            assert await raw(gate, method, path, everything, host=host) in (400, 421), host


async def test_nobody_gets_in_by_an_odd_path(gate: Gateway) -> None:
    one_each = {method: path for method, path, _ in routes(gate)}
    for method, path in one_each.items():
        for how, target in written(path).items():
            assert await raw(gate, method, target) in (400, 401, 404, 405, 421), (target, how)
