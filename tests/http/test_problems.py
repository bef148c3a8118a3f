"""What a caller is told when something is wrong, and what is never told."""

from __future__ import annotations

import ast
import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response

import app
from app.auth.requires import Public
from app.domain.errors import ChadburnError
from app.domain.scopes import Scope
from app.http.reasons import CATALOGUE, slug_of
from app.http.route import EdgeRoute
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

MEMBERS = {
    *("type", "title", "status", "detail", "instance", "code", "reason", "request_id"),
    *("trace_id", "retryable", "errors", "operation"),
}
CODES = {
    *("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "ABORTED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"),
    *("UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"),
}
ROOT = Path(__file__).parents[2]
CANARY = "canary-5f1e-hunter2"


def assert_problem(answer: httpx2.Response, status: int, reason: str) -> dict[str, Any]:
    """The whole shape of a problem, whoever noticed it."""
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["reason"]) == (status, reason), body
    assert set(body) == MEMBERS
    assert body["status"] == status
    assert body["code"] in CODES
    assert body["type"] == f"/problems/{slug_of(reason)}"
    assert body["title"] == CATALOGUE[reason].title
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["instance"] == f"urn:uuid:{body['request_id']}"
    assert re.fullmatch(r"[0-9a-f]{32}", body["trace_id"])
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert CANARY not in answer.text
    return body


async def send(
    gate: Gateway, method: str, path: str, content: bytes | None = None, **headers: str
) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {**gate.auth(), **gate.key(), **named}
    if content is not None:
        sent.setdefault("Content-Type", "application/json")
    return await gate.http.request(method, path, content=content, headers=sent)


PAUSE = "/v1/engines/e1/pause"

BAD_BODIES: list[tuple[bytes, int, str, list[str]]] = [
    (b"", 400, "MALFORMED_JSON", []),
    (b"{", 400, "MALFORMED_JSON", []),
    (b'{"mode": "drain",}', 400, "MALFORMED_JSON", []),
    (b'{"mode": "drain", "mode": "abort"}', 400, "MALFORMED_JSON", []),
    (b'{"mode": "drain", "deadline_ms": NaN}', 400, "MALFORMED_JSON", []),
    (b"\xff\xfe{}", 400, "MALFORMED_JSON", []),
    (b"[" * 100_000, 400, "MALFORMED_JSON", []),
    (b"[]", 422, "SCHEMA_VIOLATION", []),
    (b'"drain"', 422, "SCHEMA_VIOLATION", []),
    (b"null", 422, "SCHEMA_VIOLATION", []),
    (b"{}", 422, "SCHEMA_VIOLATION", ["/mode"]),
    (b'{"mode": null}', 422, "SCHEMA_VIOLATION", ["/mode"]),
    (b'{"mode": 1}', 422, "SCHEMA_VIOLATION", ["/mode"]),
    (b'{"mode": "DRAIN"}', 422, "SCHEMA_VIOLATION", ["/mode"]),
    (b'{"mode": "drain", "deadline_ms": "5"}', 422, "SCHEMA_VIOLATION", ["/deadline_ms"]),
    (b'{"mode": "drain", "deadline_ms": 5.0}', 422, "SCHEMA_VIOLATION", ["/deadline_ms"]),
    (b'{"mode": "drain", "deadline_ms": true}', 422, "SCHEMA_VIOLATION", ["/deadline_ms"]),
    (b'{"mode": "drain", "deadline_ms": 0}', 422, "SCHEMA_VIOLATION", ["/deadline_ms"]),
    (b'{"mode": "drain", "deadline_ms": 999999999999}', 422, "INVALID_ARGUMENT", ["/deadline_ms"]),
    (b'{"mode": "drain", "dry_run": "yes"}', 422, "SCHEMA_VIOLATION", ["/dry_run"]),
    (
        b'{"mode": "drain", "expected_revision": -1}',
        422,
        "SCHEMA_VIOLATION",
        ["/expected_revision"],
    ),
    (
        b'{"mode": "drain", "expected_revision": ' + b"9" * 400 + b"}",
        422,
        "SCHEMA_VIOLATION",
        ["/expected_revision"],
    ),
    (b'{"mode": "drain", "canary-5f1e-hunter2": 1}', 422, "SCHEMA_VIOLATION", [""]),
    (b'{"mode": "canary-5f1e-hunter2"}', 422, "SCHEMA_VIOLATION", ["/mode"]),
    (b'{"mode": "drain", "reason": "a\\u0000b"}', 422, "SCHEMA_VIOLATION", ["/reason"]),
    (b'{"mode": "drain", "reason": "\\ud800"}', 422, "SCHEMA_VIOLATION", ["/reason"]),
    (b'{"mode": "drain", "reason": "' + b"x" * 501 + b'"}', 422, "SCHEMA_VIOLATION", ["/reason"]),
    (b'{"mode": "keep"}', 501, "UNSUPPORTED_OPERATION", []),
    (b'{"mode": "drain", "when_busy": "wait"}', 422, "SCHEMA_VIOLATION", ["/when_busy"]),
    (
        b'{"mode": "drain", "new_requests": "refuse", "hold_limit_ms": 5}',
        422,
        "INVALID_ARGUMENT",
        ["/hold_limit_ms"],
    ),
    (b'{"mode": "drain", "model": "canary-5f1e-hunter2"}', 422, "INVALID_ARGUMENT", ["/model"]),
]


async def test_every_way_in_which_a_body_can_be_wrong(gate: Gateway) -> None:
    for content, status, reason, places in BAD_BODIES:
        answer = await send(gate, "POST", PAUSE, content)
        body = assert_problem(answer, status, reason)
        assert [place.get("pointer") for place in body["errors"]] == places, content
    assert gate.engine.orders == 0


async def test_faults_inside_nested_values_have_their_pointer(gate: Gateway) -> None:
    member = b'{"rank": 0, "admin": "127.0.0.1:1", "control": "127.0.0.1:1"}'
    for content, pointer in (
        (b'{"id": "e2", "members": []}', "/members"),
        (b'{"id": "e2", "members": [{"rank": 0}]}', "/members/0/admin"),
        (b'{"id": "e2", "members": [{"canary-5f1e-hunter2": 0}]}', "/members/0"),
        (b'{"id": "E2", "members": [' + member + b"]}", "/id"),
        (
            b'{"id": "e2", "members": [' + member + b'], "labels": {"canary-5f1e-hunter2": 7}}',
            "/labels",
        ),
        (
            b'{"id": "e2", "members": [' + member + b'], "tls": {"credential": "none"}}',
            "/tls/credential",
        ),
    ):
        answer = await send(gate, "POST", "/v1/engines", content)
        body = answer.json()
        assert answer.status_code == 422
        assert pointer in [place.get("pointer") for place in body["errors"]], (content, body)
        assert CANARY not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/v1/nothing", 404, "ROUTE_NOT_FOUND"),
        ("GET", f"/v1/{CANARY}", 404, "ROUTE_NOT_FOUND"),
        ("GET", "/v1/engines/", 404, "ROUTE_NOT_FOUND"),
        ("GET", "/", 404, "ROUTE_NOT_FOUND"),
        ("POST", "/v1/engines/e1/levitate", 404, "ROUTE_NOT_FOUND"),
        ("GET", f"/problems/{CANARY}", 404, "ROUTE_NOT_FOUND"),
        ("PUT", "/v1/engines", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/v1/engines/e1/pause", 405, "METHOD_NOT_ALLOWED"),
        ("OPTIONS", "/v1/engines/e1", 405, "METHOD_NOT_ALLOWED"),
        ("GET", f"/v1/engines/{CANARY}", 404, "ENGINE_NOT_FOUND"),
        ("GET", "/v1/engines/%00", 404, "ENGINE_NOT_FOUND"),
        ("GET", "/v1/engines/" + "x" * 3000, 404, "ENGINE_NOT_FOUND"),
        ("GET", f"/v1/operations/{CANARY}", 404, "OPERATION_NOT_FOUND"),
        ("GET", "/v1/operations/%ff", 404, "OPERATION_NOT_FOUND"),
        ("GET", f"/v1/operations/{CANARY}/events", 404, "OPERATION_NOT_FOUND"),
        ("GET", f"/v1/engines?{CANARY}=1", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/engines?role={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/engines?label={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/engines?page_size=0", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/engines?page_size=1&page_size=2", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/engines?page_size={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/engines?page_token={CANARY}", 400, "PAGE_TOKEN_INVALID"),
        ("GET", f"/v1/operations?kind={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?state=done", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/operations?since={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?since=1767225600", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?since=2026-01-01T00:00:00", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?since=9999-12-31T23:59:59-23:59", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/audit?since=0001-01-01T00:00:00%2B23:59", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/engines/e1/load?since=0001-01-01T00:00:00%2B23:59", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?principal=%00", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?idempotency_key=", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/operations?idempotency_key={'k' * 129}", 422, "SCHEMA_VIOLATION"),
        ("GET", "/v1/operations?idempotency_key=k%C3%A9", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/events?type={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", f"/v1/audit?who={CANARY}", 422, "SCHEMA_VIOLATION"),
        ("GET", "/healthz?x=1", 422, "SCHEMA_VIOLATION"),
        ("POST", "/v1/operations/0198c5f1-0000-7000-8000-000000000000/cancel", 404,
         "OPERATION_NOT_FOUND"),
    ],
)  # fmt: skip
async def test_paths_methods_and_queries(
    gate: Gateway, method: str, path: str, status: int, reason: str
) -> None:
    assert_problem(await send(gate, method, path), status, reason)


async def test_405_names_every_method_of_the_path(gate: Gateway) -> None:
    answer = await send(gate, "POST", "/v1/engines/e1")
    assert_problem(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, PATCH"


async def test_media_types(gate: Gateway) -> None:
    body = b'{"mode": "drain"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        answer = await send(gate, "POST", PAUSE, body, Content_Type=kind)
        assert_problem(answer, 415, "UNSUPPORTED_MEDIA_TYPE")
    packed = await send(gate, "POST", PAUSE, body, Content_Encoding="gzip")
    assert_problem(packed, 415, "UNSUPPORTED_MEDIA_TYPE")
    taken = await send(gate, "POST", PAUSE, body, Content_Type="application/json; charset=utf-8")
    assert taken.status_code == 202
    odd = await send(gate, "GET", "/v1/operations", Accept="image/png")
    assert_problem(odd, 406, "NOT_ACCEPTABLE")
    unasked = await send(gate, "GET", "/v1/engines", b"{}")
    assert_problem(unasked, 400, "MALFORMED_REQUEST")


async def test_bodies_over_the_limit(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_body_bytes=2048) as gate:
        large = b'{"mode": "drain", "reason": "' + b"x" * 4096 + b'"}'
        assert_problem(await send(gate, "POST", PAUSE, large), 413, "BODY_TOO_LARGE")

        async def in_parts() -> Any:
            for _ in range(8):
                yield b" " * 512

        headers = {**gate.auth(), **gate.key(), "Content-Type": "application/json"}
        answer = await gate.http.post(PAUSE, content=in_parts(), headers=headers)
        assert_problem(answer, 413, "BODY_TOO_LARGE")
        # Who may not send it is not told how large it may be.
        refused = await gate.http.post(PAUSE, content=large)
        assert_problem(refused, 401, "TOKEN_MISSING")


async def test_hosts(gate: Gateway) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", ""):
        answer = await gate.get("/v1/engines", Host=host)
        assert_problem(answer, 421, "HOST_NOT_ALLOWED")
        assert (await gate.get("/healthz", Host=host)).status_code == 200
    for host in ("localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:80"):
        assert (await gate.get("/v1/engines", Host=host)).status_code == 200


async def test_no_cross_origin_grant_is_ever_given(gate: Gateway) -> None:
    answer = await gate.get("/v1/engines", Origin="https://evil.example")
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "path", ["/v1/engines", "/v1/engines/e1", "/v1/events", "/healthz", "/v1/operations"]
)
async def test_head_is_get_without_the_body(gate: Gateway, path: str) -> None:
    answer = await gate.http.head(path, headers=gate.auth())
    assert (answer.status_code, answer.content) == (200, b"")
    assert "content-type" in answer.headers
    assert gate.rooms.streams.count == 0
    assert (await gate.http.head("/v1/engines")).status_code == (401)


async def test_a_defect_of_ours_is_a_problem_that_says_nothing(
    logged: io.StringIO, gate: Gateway
) -> None:
    async def broken(request: Request) -> Response:
        raise RuntimeError(f"cannot digest {CANARY}")

    gate.app.router.routes.append(EdgeRoute("/v1/broken", broken, dependencies=[Public]))
    answer = await gate.get("/v1/broken")
    body = assert_problem(answer, 500, "INTERNAL")
    assert body["retryable"] is False
    assert CANARY not in logged.getvalue()
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    (told,) = [line for line in lines if line["event"] == "unexpected"]
    assert told["exception"]["type"] == "RuntimeError"
    assert told["request_id"] == body["request_id"]
    assert "test_problems.py" in told["exception"]["raised_at"][-1]


async def test_an_engine_out_of_reach(gate: Gateway) -> None:
    member = {"rank": 0, "admin": "127.0.0.1:9", "control": "127.0.0.1:9"}
    made = await gate.http.post(
        "/v1/engines", json={"id": "gone", "members": [member]}, headers=gate.auth()
    )
    assert made.status_code == 201
    answer = await gate.get("/v1/engines/gone/capabilities")
    assert_problem(answer, 503, "ENGINE_UNREACHABLE")
    order = await gate.order("pause", {"mode": "drain"}, engine="gone")
    assert_problem(order, 503, "ENGINE_UNREACHABLE")
    known = (await gate.get("/v1/engines/gone")).json()
    assert (known["health"]["state"], known["facts"]) == ("unreachable", None)


async def test_a_ledger_that_does_not_answer(gate: Gateway) -> None:
    await gate.rooms.ledger.close()
    assert_problem(await gate.get("/v1/engines"), 503, "LEDGER_UNAVAILABLE")
    assert_problem(await gate.http.get("/readyz"), 503, "NOT_READY")
    assert (await gate.http.get("/healthz")).status_code == 200


async def test_the_callers_trace_is_kept(gate: Gateway) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = await gate.get("/v1/nothing", traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    assert answer.json()["trace_id"] == trace
    for bad in (
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "garbage",
        f"ff-{trace}-00f067aa0ba902b7-01",
    ):
        assert (await gate.get("/v1/nothing", traceparent=bad)).json()["trace_id"] != trace


GATEWAY = ("app.domain", "app.ledger", "app.backends", "app.operations", "app.auth", "app.http")


def test_every_reason_has_its_page() -> None:
    for module in pkgutil.walk_packages(app.__path__, "app."):
        if module.name.startswith(GATEWAY):
            importlib.import_module(module.name)
    ours = [e for e in subclasses(ChadburnError) if e.__module__.startswith(GATEWAY)]
    assert {error.reason for error in ours} - set(CATALOGUE) == set()
    assert len({slug_of(reason) for reason in CATALOGUE}) == len(CATALOGUE)


GIVEN_BY = (
    "enginekit",
    "reference_engine",
    "sidecars",
    "backends",
    "operations",
    "domain",
    "ledger",
)
REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")


def test_every_reason_of_an_operation_that_failed_has_its_page() -> None:
    """Those that stand in the code as words, of a refusal, a fault or an operation's error."""
    for given in reasons_in("app/backends/vllm/refusals.py"), reasons_in("app/sidecars/faults.py"):
        assert given  # else the words are not found any more
    found = {reason for room in GIVEN_BY for reason in reasons_in(f"app/{room}/**/*.py")}
    assert found - set(CATALOGUE) == set()


def reasons_in(pattern: str) -> set[str]:
    called = {
        "RuntimeFault": 0,
        "OperationError": 1,
        "refused": 1,
        "unknown": 0,
        "_unsent": 1,
        "_failed": 1,
    }
    found = set()
    for path in ROOT.glob(pattern):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name), args=given, keywords=named) if name in called:
                    words = given[called[name] : called[name] + 1]
                    words += [one.value for one in named if one.arg == "reason"]
                case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                    words = [value]
                case ast.AnnAssign(target=ast.Name(id="reason"), value=ast.Constant() as value):
                    words = [value]
                case _:
                    continue
            found |= {one.value for one in words if isinstance(one, ast.Constant)}
    return {one for one in found if isinstance(one, str) and REASON.fullmatch(one)}


def test_the_list_of_reasons_is_as_the_catalogue() -> None:
    script = ROOT / "scripts" / "gen-problems"
    checked = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def subclasses(parent: type[ChadburnError]) -> set[type[ChadburnError]]:
    found = {parent}
    for child in parent.__subclasses__():
        found |= subclasses(child)
    return found


async def test_the_pages_of_problems(gate: Gateway) -> None:
    index = await gate.http.get("/problems")
    for reason, entry in CATALOGUE.items():
        assert f"/problems/{slug_of(reason)}" in index.text
        page = await gate.http.get(f"/problems/{slug_of(reason)}")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert entry.title[:5] in page.text
        assert "`" not in page.text
    page = await gate.http.get("/problems/schema-violation")
    assert "<code>errors</code>" in page.text


async def test_secrets_sent_anywhere_come_back_nowhere(logged: io.StringIO, gate: Gateway) -> None:
    """A token and a word planted in every place of a request, looked for in every answer, log
    line and audit row."""
    token = gate.token(*Scope)
    bearer = {"Authorization": f"Bearer {token}"}
    planted = {**bearer, "User-Agent": CANARY, "Cookie": CANARY, "X-Canary": CANARY}
    texts: list[str] = []
    for method, path, content in (
        ("GET", f"/v1/{CANARY}?q={CANARY}", None),
        ("GET", f"/v1/engines/{CANARY}", None),
        ("GET", f"/v1/engines?token={token}", None),
        ("GET", f"/v1/operations?principal=x&{CANARY}={CANARY}", None),
        ("POST", PAUSE, f'{{"mode": "drain", "x": "{CANARY}"}}'.encode()),
        ("POST", PAUSE, f'{{"mode": "{CANARY}"}}'.encode()),
        ("POST", PAUSE, f"{{{CANARY}".encode()),
        ("PATCH", "/v1/engines/e1", f'{{"tls": {{"credential": "{CANARY}"}}}}'.encode()),
    ):
        headers = {**planted, "Idempotency-Key": '"', "If-Match": '"g1"'}
        headers["Content-Type"] = "application/json"
        answer = await gate.http.request(method, path, content=content, headers=headers)
        assert answer.status_code >= 400
        texts += [answer.text, str(answer.headers)]
    bad = await gate.http.get("/v1/engines", headers={"Authorization": f"Bearer {CANARY}.a.b"})
    texts += [bad.text, str(bad.headers)]
    audit = await gate.get("/v1/audit?page_size=1000")
    everything = "\n".join([*texts, logged.getvalue(), audit.text])
    assert '"event": "request"' in everything
    assert CANARY not in everything
    assert token not in everything
    assert token.rpartition(".")[2] not in everything


async def test_an_upgrade_to_a_websocket_is_not_taken_up(gate: Gateway) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert (await gate.http.get("/v1/events", headers=upgrade)).status_code == 401
    assert (await gate.get("/v1/engines", **upgrade)).status_code == 200
