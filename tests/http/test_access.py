"""Every route of the application against every kind of token, read off the live route table."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx2
import pytest
from fastapi import APIRouter
from starlette.responses import Response

from app.auth.principal import Principal
from app.auth.requires import Requires
from app.devidp.running import DevIssuerSettings, running
from app.domain.scopes import Scope
from app.http.route import EdgeRoute, UndeclaredRoute, declaration_of
from tests.http.gateway import ADMIN, INFERENCE, Gateway, gateway

pytestmark = pytest.mark.anyio

PUBLIC = {
    "/healthz",
    "/readyz",
    "/.well-known/oauth-protected-resource",
    "/.well-known/oauth-protected-resource/{path:path}",
    "/problems",
    "/problems/{slug}",
    "/openapi.json",
}
LOGIN = {
    "/",
    "/auth/login",
    "/auth/callback",
    "/auth/callback/{client}",
    "/auth/session",
    "/auth/",
    "/auth/page.js",
    "/auth/logout",
    "/auth/backchannel-logout",
    "/ui",
    "/ui/",
    "/ui/{place:path}",
    "/ui/assets/{digest}/{path:path}",
}
"""Open too: see test_browser_login, test_browser_attacks and test_dashboard."""
NEEDS = {
    ("GET", "/v1/engines"): "admin:read",
    ("POST", "/v1/engines"): "admin:engines",
    ("GET", "/v1/engines/{engine}"): "admin:read",
    ("PATCH", "/v1/engines/{engine}"): "admin:engines",
    ("DELETE", "/v1/engines/{engine}"): "admin:engines",
    ("PUT", "/v1/engines/{engine}/freeze"): "admin:engines",
    ("DELETE", "/v1/engines/{engine}/freeze"): "admin:engines",
    ("GET", "/v1/engines/{engine}/capabilities"): "admin:read",
    ("GET", "/v1/engines/{engine}/info"): "admin:read",
    ("GET", "/v1/engines/{engine}/models"): "admin:read",
    ("GET", "/v1/engines/{engine}/load"): "admin:read",
    ("GET", "/v1/engines/{engine}/weight-version"): "admin:read",
    ("GET", "/v1/engines/{engine}/kv-event-sources"): "admin:read",
    ("POST", "/v1/engines/{engine}/flush-caches"): "admin:cache",
    ("POST", "/v1/engines/{engine}/pause"): "admin:pause",
    ("POST", "/v1/engines/{engine}/resume"): "admin:pause",
    ("POST", "/v1/engines/{engine}/release-resources"): "admin:resources",
    ("POST", "/v1/engines/{engine}/restore-resources"): "admin:resources",
    ("POST", "/v1/engines/{engine}/update-weights"): "admin:weights",
    ("POST", "/v1/engines/{engine}/weight-version"): "admin:weights",
    ("GET", "/v1/engines/{engine}/loras"): "admin:read",
    ("POST", "/v1/engines/{engine}/loras"): "admin:adapters",
    ("DELETE", "/v1/engines/{engine}/loras/{name:path}"): "admin:adapters",
    ("POST", "/v1/engines/{engine}/reconfigure"): "admin:reconfigure",
    ("POST", "/v1/engines/{engine}/profiles"): "admin:profile",
    ("GET", "/v1/engines/{engine}/profiles"): "admin:profile",
    ("GET", "/v1/engines/{engine}/profiles/{profile}"): "admin:profile",
    ("GET", "/v1/engines/{engine}/profiles/{profile}/artifact"): "admin:profile",
    ("POST", "/v1/engines/{engine}/profiles/{profile}/stop"): "admin:profile",
    ("POST", "/v1/engines/{engine}/abort-requests"): "admin:abort",
    ("POST", "/v1/engines/{engine}/shutdown"): "admin:shutdown",
    ("GET", "/v1/operations"): "admin:read",
    ("GET", "/v1/operations/{operation}"): "admin:read",
    ("GET", "/v1/operations/{operation}/events"): "admin:read",
    ("GET", "/v1/events"): "admin:read",
    ("POST", "/v1/operations/{operation}/cancel"): "admin:cancel",
    ("POST", "/v1/operations/{operation}/settle"): "admin:settle",
    ("GET", "/v1/audit"): "admin:audit",
    ("GET", "/v1/me"): "",  # any admin scope
    ("GET", "/metrics"): "admin:read",
}


@dataclass(frozen=True)
class Call:
    method: str
    template: str
    path: str


@asynccontextmanager
async def prepared(data_dir: Path) -> AsyncIterator[tuple[Gateway, list[Call]]]:
    """A gateway with an engine and an operation for the paths to name."""
    async with gateway(data_dir) as gate:
        operation = (await gate.flush())["id"]
        profile = await gate.ended_profile()
        calls = []
        for route in gate.app.routes:
            assert isinstance(route, EdgeRoute)
            for method in sorted(route.methods or ()):
                path = route.path_format.replace("{engine}", "e1")
                path = path.replace("{operation}", operation).replace("{slug}", "engine-busy")
                path = path.replace("{name}", "sql").replace("{profile}", profile)
                calls.append(Call(method, route.path, path.replace("{path}", "v1")))
        yield gate, calls


async def ask(gate: Gateway, call: Call, authorization: str | None) -> httpx2.Response:
    """Without a body: what lets the caller in then says what is missing. Streams are let go of
    at their first byte."""
    headers = {} if authorization is None else {"Authorization": authorization}
    request = gate.http.build_request(call.method, call.path, headers=headers)
    answer = await gate.http.send(request, stream=True)
    try:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer
        await answer.aread()
        return answer
    finally:
        await answer.aclose()


async def test_the_route_table_is_the_one_that_was_thought_about(tmp_path: Path) -> None:
    async with prepared(tmp_path / "data") as (gate, calls):
        public, needs = set(), {}
        for route in gate.app.routes:
            assert isinstance(route, EdgeRoute)
            declared = declaration_of(route)
            assert declared is not None
            if declared.need is None:
                public.add(route.path)
                continue
            for method in route.methods or ():
                needs[method, route.path] = " ".join(declared.need.scopes)
        assert public == PUBLIC | LOGIN
        assert needs == NEEDS
        assert len(calls) == len(PUBLIC) + len(LOGIN) + len(NEEDS)


async def test_public_routes_answer_without_a_token(tmp_path: Path) -> None:
    async with prepared(tmp_path / "data") as (gate, calls):
        for call in calls:
            if call.template in PUBLIC:
                assert (await ask(gate, call, None)).status_code == 200, call


async def test_each_route_lets_in_its_own_scope_alone_and_the_refused_cause_no_call(
    tmp_path: Path,
) -> None:
    async with prepared(tmp_path / "data") as (gate, calls):
        tokens = refused_tokens(gate)
        single = {scope: f"Bearer {gate.token(scope)}" for scope in Scope}
        kinds_own = f"Bearer {gate.token(Scope.CANCEL, Scope.CACHE)}"
        wrong: list[tuple[Call, str, int]] = []
        for call in calls:
            if call.template in PUBLIC | LOGIN:
                continue
            needed = NEEDS[call.method, call.template]
            before = dict(gate.engine.calls)
            for name, (authorization, status) in tokens.items():
                answer = await ask(gate, call, authorization)
                if answer.status_code != status:
                    wrong.append((call, name, answer.status_code))
                assert_challenge(gate, answer)
            for scope, authorization in single.items():
                if needed and scope != needed:
                    answer = await ask(gate, call, authorization)
                    if answer.status_code != 403:
                        wrong.append((call, scope, answer.status_code))
                    assert_challenge(gate, answer)
            if call.template.endswith("/cancel"):
                # Its own scope opens the door; the kind's scope is wanted at the operation.
                answer = await ask(gate, call, single[Scope.CANCEL])
                assert answer.status_code == 403
                challenge = answer.headers["www-authenticate"]
                assert 'scope="admin:cache admin:cancel"' in challenge
            assert dict(gate.engine.calls) == before, call
            for scope, authorization in single.items():
                if not needed or scope == needed:
                    if call.template.endswith("/cancel"):
                        authorization = kinds_own
                    answer = await ask(gate, call, authorization)
                    if answer.status_code in (401, 403, 404):
                        wrong.append((call, scope, answer.status_code))
        assert wrong == []
        assert gate.engine.orders == 1  # the one that was prepared


def refused_tokens(gate: Gateway) -> dict[str, tuple[str | None, int]]:
    """Authorization and the status it must get, on every route that takes a token."""
    everything = tuple(Scope)

    def bearer(*scopes: str, **how: object) -> str:
        return f"Bearer {gate.token(*scopes, **how)}"  # type: ignore[arg-type]

    return {
        "no token": (None, 401),
        "another scheme": ("Basic YWRhOmFkYQ==", 401),
        "garbage": ("Bearer garbage", 401),
        "no token in it": ("Bearer", 401),
        "inference token": (bearer("inference:generate", audience=INFERENCE), 403),
        "inference token with admin scopes": (bearer(*everything, audience=INFERENCE), 403),
        "wrong audience": (bearer(*everything, audience="urn:test:other"), 401),
        "no audience": (bearer(*everything, aud=None), 401),
        "expired": (bearer(*everything, ttl_s=-120), 401),
        "another issuer": (bearer(*everything, iss="http://127.0.0.1:1"), 401),
        "an id token": (bearer(*everything, header={"typ": "JWT"}, nonce="n"), 401),
        "no scope": (bearer(scope=None), 403),
        "empty scope": (bearer(), 403),
        "unknown scope": (bearer("admin:everything"), 403),
        "wildcards": (bearer("*", "admin:*", "admin"), 403),
    }


def assert_challenge(gate: Gateway, answer: httpx2.Response) -> None:
    """RFC 6750 and 9728: what is wrong, and where to find out how to do it right."""
    challenge = answer.headers["www-authenticate"]
    assert challenge.startswith('Bearer realm="chadburn"')
    metadata = f"{gate.url}/.well-known/oauth-protected-resource"
    assert f'resource_metadata="{metadata}"' in challenge
    if answer.status_code == 403:
        assert 'error="insufficient_scope"' in challenge
        assert answer.json()["reason"] == "INSUFFICIENT_SCOPE"
    elif answer.json()["reason"] == "TOKEN_MISSING":
        assert "error=" not in challenge
    else:
        assert 'error="invalid_token"' in challenge
    assert answer.headers["content-type"] == "application/problem+json"


async def test_scope_is_checked_before_anything_is_looked_up_or_parsed(gate: Gateway) -> None:
    """Who may not do it learns nothing of engines, operations or the schema."""
    reader = gate.auth(Scope.READ)
    for path in ("/v1/engines/none/pause", "/v1/engines/e1/pause"):
        answer = await gate.http.post(path, content=b"{not json", headers=reader)
        assert (answer.status_code, answer.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")
    unknown = "/v1/operations/0198c5f1-0000-7000-8000-000000000000/cancel"
    assert (await gate.http.post(unknown, headers=reader)).status_code == 403


async def test_the_audit_names_the_engine_that_a_denied_call_was_for(gate: Gateway) -> None:
    """Though nobody has looked whether it is there; what can't be an id is no name either."""
    for engine in ("e1", "none", "No~Id"):
        await gate.http.post(f"/v1/engines/{engine}/pause", json={}, headers=gate.auth(Scope.READ))
    rows = (await gate.get("/v1/audit?action=pause")).json()["items"]
    assert [(row["outcome"], row["engine"]) for row in rows] == [
        ("denied", None),
        ("denied", "none"),
        ("denied", "e1"),
    ]


async def test_the_engine_is_looked_up_before_the_body_is_judged(gate: Gateway) -> None:
    for engine, status in (("none", 404), ("e1", 400)):
        answer = await gate.http.post(
            f"/v1/engines/{engine}/pause",
            content=b"{not json",
            headers={**gate.auth(Scope.PAUSE), "Content-Type": "application/json"},
        )
        assert answer.status_code == status


async def test_two_authorization_headers_are_refused(gate: Gateway) -> None:
    headers = [("Authorization", f"Bearer {gate.token(*Scope)}")] * 2
    answer = await gate.http.get("/v1/engines", headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (401, "TOKEN_MALFORMED")


@pytest.mark.parametrize("path", ["/v1/engines", "/healthz", "/nothing", "/v1/events"])
async def test_a_token_in_the_url_is_refused_everywhere(gate: Gateway, path: str) -> None:
    for name in ("access_token", "token", "Access_Token"):
        answer = await gate.get(f"{path}?{name}={gate.token(*Scope)}")
        assert (answer.status_code, answer.json()["reason"]) == (400, "TOKEN_IN_QUERY")


async def test_an_issuer_that_is_down_is_neither_yes_nor_no(tmp_path: Path) -> None:
    gone = {"issuer": "http://127.0.0.1:9", "audience": ADMIN, "inference_audiences": ()}
    async with gateway(tmp_path / "data", registered=False, issuers=(gone,)) as gate:
        token = gate.token(*Scope, iss="http://127.0.0.1:9")
        answer = await gate.http.get("/v1/me", headers={"Authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["reason"]) == (503, "ISSUER_UNAVAILABLE")
        assert int(answer.headers["retry-after"]) >= 1
        ready = await gate.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "degraded"})


async def test_an_issuer_that_was_down_at_start_is_found_without_callers(tmp_path: Path) -> None:
    with socket.socket() as place:  # nobody answers there yet
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    coming = {"issuer": f"http://127.0.0.1:{port}", "audience": ADMIN, "inference_audiences": ()}
    async with gateway(tmp_path / "data", registered=False, issuers=(coming,)) as gate:
        assert (await gate.http.get("/readyz")).json() == {"status": "degraded"}
        issuing = DevIssuerSettings(
            secret="s" * 40,
            admin_audience=ADMIN,
            inference_audience=INFERENCE,
            engine_audience="urn:test:engine",
            port=port,
        )
        async with running(issuing) as issuer, asyncio.timeout(120):
            while (await gate.http.get("/readyz")).json() != {"status": "ready"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            token = issuer.mint("ada", "console", [Scope.READ], ADMIN)
            answer = await gate.http.get("/v1/me", headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 200


async def test_a_gateway_set_read_only_takes_no_orders(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", registered=False, read_only=True) as gate:
        answer = await gate.register()
        assert (answer.status_code, answer.json()["reason"]) == (403, "GATEWAY_READ_ONLY")
        assert (await gate.get("/v1/engines")).status_code == 200


async def test_who_asks_who_they_are(gate: Gateway) -> None:
    answer = await gate.http.get("/v1/me", headers=gate.auth(Scope.READ, subject="grace"))
    assert answer.status_code == 200
    me = answer.json()
    assert (me["subject"], me["client_id"], me["scopes"]) == ("grace", "console", ["admin:read"])


async def test_an_application_with_a_route_that_declares_nothing_does_not_start(
    gate: Gateway,
) -> None:
    router = APIRouter(route_class=EdgeRoute)

    @router.get("/v1/open-by-mistake")
    async def open_by_mistake() -> Response:
        return Response()

    gate.app.router.routes.extend(router.routes)
    with pytest.raises(UndeclaredRoute, match="open-by-mistake"):
        async with gate.app.router.lifespan_context(gate.app):
            pass
    # And were it served all the same, it would not be open.
    assert (await gate.http.get("/v1/open-by-mistake")).status_code == 500


async def test_a_route_declares_its_need_once() -> None:
    router = APIRouter(route_class=EdgeRoute)
    with pytest.raises(ValueError, match="once"):

        @router.get("/twice")
        async def twice(
            one: Annotated[Principal, Requires(Scope.READ)],
            two: Annotated[Principal, Requires(Scope.AUDIT)],
        ) -> Response:
            return Response()


def test_the_documentation_has_every_route_and_scope() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    for _, template in NEEDS:
        last = template.rpartition("/")[2].replace(":path", "")
        assert f"/{last}`" in text, template
    assert {scope for scope in NEEDS.values() if scope} <= set(re.findall(r"admin:\w+", text))
