"""An issuer that is slow, down, has moved or is asked by many: what it costs, and what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.tokens.errors import IssuerUnavailable, TokenInactive
from app.auth.tokens.fetch import discovery_urls, fetch_document, post_form
from app.auth.tokens.introspection import IntrospectionTimings
from app.auth.tokens.issuers import IntrospectionConfig
from app.auth.tokens.verifier import TokenVerifier
from tests.auth.conftest import ADMIN, Clock, Origin, Verifiers
from tests.auth.made_tokens import NOW

pytestmark = pytest.mark.anyio

METADATA, PATH, MOVED = "/.well-known/openid-configuration", "/introspect", "/moved"
INACTIVE = b'{"active": false}'


class Asking:
    """Verifiers of opaque tokens alone."""

    def __init__(self, verifiers: Verifiers, secret: Path) -> None:
        self.verifiers = verifiers
        self.issuer = verifiers.issuer.issuer
        self.secret = secret

    def make(self, endpoint: str | None, **timings: Any) -> TokenVerifier:
        asks = IntrospectionConfig(
            client_id="gateway", client_secret_file=self.secret, endpoint=endpoint, cache_s=0
        )
        return self.verifiers.make(
            self.verifiers.config(introspection=asks, algorithms=()),
            introspection_timings=IntrospectionTimings(**timings),
        )

    def active(self) -> bytes:
        claims = {"iss": self.issuer, "sub": "ops", "aud": ADMIN, "client_id": "console"}
        return json.dumps({**claims, "active": True, "exp": NOW + 600, "typ": "Bearer"}).encode()


@pytest.fixture
def asking(verifiers: Verifiers, tmp_path: Path) -> Asking:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    return Asking(verifiers, secret)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is a real server's progress
            await asyncio.sleep(0.001)


async def test_it_is_tried_once_and_again_only_when_that_failed(
    asking: Asking, origin: Origin, clock: Clock
) -> None:
    verifier = asking.make(f"{origin.url}{PATH}")
    (state,) = verifier.issuer_states()
    assert (state.ok, state.problem) == (False, None)
    origin.say(PATH, b"", status=503)
    await verifier.warm()
    await verifier.warm()  # within the back-off
    ((_, form),) = origin.posted
    probe = "chadburn-asks-whether-it-may-ask"
    assert form == {"token": probe, "token_type_hint": "access_token"}
    assert verifier.issuer_states()[0].problem == "introspection: HTTP 503"
    origin.say(PATH, INACTIVE)
    clock.advance(1)
    gate = asyncio.Event()
    origin.say(PATH, INACTIVE, gate=gate)
    both = [asyncio.create_task(verifier.warm()) for _ in range(2)]
    await until(lambda: origin.requests[PATH] == 2)
    gate.set()
    await asyncio.gather(*both)
    clock.advance(600)
    await verifier.warm()
    assert origin.requests[PATH] == 2
    (state,) = verifier.issuer_states()
    assert (state.ok, state.problem) == (True, None)
    origin.say(PATH, b"", status=503)
    with pytest.raises(IssuerUnavailable):
        await verifier.verify("token")
    assert not verifier.issuer_states()[0].ok
    clock.advance(1)
    await verifier.warm()
    assert origin.requests[PATH] == 4


async def test_an_endpoint_that_has_moved_is_found_again(
    asking: Asking, origin: Origin, clock: Clock
) -> None:
    metadata = asking.verifiers.issuer.metadata()
    for path in (PATH, MOVED):
        told = {**metadata, "introspection_endpoint": f"{origin.url}{path}"}
        origin.say(METADATA, json.dumps(told).encode())
        origin.say(path, asking.active())
        if path == PATH:
            verifier = asking.make(None)
            assert await verifier.verify("token")
            origin.say(PATH, b"", status=404)
        else:
            with pytest.raises(IssuerUnavailable):
                await verifier.verify("token")
            clock.advance(1)
            assert await verifier.verify("token")
    assert origin.requests[METADATA] == 2


async def test_a_hanging_issuer_is_given_up(asking: Asking, origin: Origin) -> None:
    verifier = asking.make(f"{origin.url}{PATH}", deadline_s=0.05)
    gate = asyncio.Event()
    origin.say(PATH, INACTIVE, gate=gate)
    with pytest.raises(IssuerUnavailable) as caught:
        await verifier.verify("token")
    assert (caught.value.issuer, caught.value.retry_after_s) == (asking.issuer, 1)
    assert verifier.issuer_states()[0].problem == "introspection: no answer in 0.05 s"
    gate.set()


async def test_failures_at_once_are_one_of_the_issuers(
    asking: Asking, origin: Origin, clock: Clock
) -> None:
    verifier = asking.make(f"{origin.url}{PATH}")
    gate = asyncio.Event()
    origin.say(PATH, b"", status=503, gate=gate)
    calls = [asyncio.create_task(verifier.verify(f"token-{n}")) for n in range(5)]
    await until(lambda: origin.requests[PATH] == 5)
    gate.set()
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [getattr(one, "retry_after_s", None) for one in failures] == [1] * 5
    clock.advance(1)
    with pytest.raises(IssuerUnavailable) as caught:
        await verifier.verify("token")
    assert caught.value.retry_after_s == 2


async def test_closing_ends_a_question_under_way(asking: Asking, origin: Origin) -> None:
    verifier = asking.make(f"{origin.url}{PATH}")
    await verifier.aclose()  # and there was none
    gate = asyncio.Event()
    origin.say(PATH, INACTIVE, gate=gate)
    calls = [asyncio.create_task(verifier.verify(f"token-{n}")) for n in range(2)]
    await until(lambda: origin.requests[PATH] == 2)
    assert [task.get_name() for task in asyncio.all_tasks()].count("introspection") == 2
    await verifier.aclose()
    assert "introspection" not in [task.get_name() for task in asyncio.all_tasks()]
    for call in calls:
        with pytest.raises(IssuerUnavailable):
            await call
    gate.set()


async def test_only_so_many_inactive_tokens_are_remembered(asking: Asking, origin: Origin) -> None:
    verifier = asking.make(f"{origin.url}{PATH}", inactive_kept=2)
    origin.say(PATH, INACTIVE)
    for token in ("a", "b", "c", "c", "b"):
        with pytest.raises(TokenInactive):
            await verifier.verify(token)
    assert origin.requests[PATH] == 3
    with pytest.raises(TokenInactive):
        await verifier.verify("a")  # the oldest was let go
    assert origin.requests[PATH] == 4


async def test_one_found_inactive_again_is_the_newest(
    asking: Asking, origin: Origin, clock: Clock
) -> None:
    verifier = asking.make(f"{origin.url}{PATH}", inactive_kept=2)
    origin.say(PATH, INACTIVE)
    for token, passed_s in (("a", 0), ("b", 5), ("a", 0), ("c", 0), ("a", 0)):
        clock.advance(passed_s)
        with pytest.raises(TokenInactive):
            await verifier.verify(token)
    assert origin.requests[PATH] == 4


async def test_documents_are_got_and_forms_are_posted() -> None:
    def answer(asked: httpx2.Request) -> httpx2.Response:
        async def body() -> AsyncIterator[bytes]:
            yield f"{asked.method} {asked.url}".encode()

        return httpx2.Response(200, content=body())

    url = "https://id.test/a"
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http:
        assert await fetch_document(http, url) == f"GET {url}".encode()
        assert await post_form(http, url, {"a": "b"}, {}) == f"POST {url}".encode()


@pytest.mark.parametrize("path", ["", "/tenant", "/tenants/X"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_where_an_issuer_s_metadata_are(path: str, slash: str) -> None:
    origin = "https://id.test:8443"
    assert discovery_urls(f"{origin}{path}{slash}") == (
        f"{origin}{path}/.well-known/openid-configuration",
        f"{origin}/.well-known/oauth-authorization-server{path}",
    )
