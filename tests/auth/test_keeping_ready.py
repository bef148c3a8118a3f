"""Having issuers' keys before a caller needs them, and saying how each issuer stands."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from app.auth.tokens.claims import Judged
from app.auth.tokens.errors import IssuerUnavailable, TokenInvalid
from app.auth.tokens.jwks import IssuerState, KeyTimings
from app.auth.tokens.remembered import RememberedTokens
from app.devidp.issuer import DevIssuer
from app.domain.scopes import Scope
from tests.auth.conftest import ADMIN, Clock, Origin, Verifiers
from tests.auth.policies import principal

pytestmark = pytest.mark.anyio

METADATA = "/.well-known/openid-configuration"


def good(issuer: DevIssuer, **overrides: Any) -> str:
    return issuer.mint("ops", "console", ["admin:read"], ADMIN, 7200, **overrides)


def state(issuer: DevIssuer, *, ok: bool, age_s: float) -> IssuerState:
    return IssuerState(issuer=issuer.issuer, ok=ok, keys=1, age_s=age_s, problem=None)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is a real server's progress
            await asyncio.sleep(0.001)


async def test_is_kept_ready_without_callers(
    verifiers: Verifiers, origin: Origin, clock: Clock
) -> None:
    verifier = verifiers.make()
    origin.say("/jwks", b"", status=503)
    keeping = asyncio.create_task(verifier.keep_ready(every_s=0.001))
    await until(lambda: origin.requests["/jwks"] == 1)
    await until(lambda: verifier.issuer_states()[0].problem == "HTTP 503")
    del origin.answers["/jwks"]
    clock.advance(5)
    await until(lambda: verifier.issuer_states()[0].ok)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])
    assert keeping.cancelled()


async def test_warming_waits_for_the_keys_and_finds_where_they_have_moved(
    verifiers: Verifiers, origin: Origin, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", b"", status=503)
    clock.advance(600)
    await verifier.warm()
    assert not verifier.issuer_states()[0].ok
    moved = {**issuer.metadata(), "jwks_uri": f"{origin.url}/new"}
    origin.say(METADATA, json.dumps(moved).encode())
    origin.say("/new", json.dumps(issuer.jwks()).encode())
    await verifier.warm()  # within the back-off: nobody is asked
    assert origin.requests["/jwks"] == 2
    clock.advance(5)
    await verifier.warm()
    assert verifier.issuer_states() == (state(issuer, ok=True, age_s=0.0),)


async def test_keys_are_well_until_they_are_too_old_to_serve(
    verifiers: Verifiers, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    clock.advance(86_399)
    assert verifier.issuer_states() == (state(issuer, ok=True, age_s=86_399.0),)
    clock.advance(1)
    assert verifier.issuer_states() == (state(issuer, ok=False, age_s=86_400.0),)


async def test_before_the_first_fetch_nothing_is_known_nor_wrong(verifiers: Verifiers) -> None:
    (found,) = verifiers.make().issuer_states()
    assert (found.ok, found.keys, found.age_s, found.problem) == (False, 0, None, None)


async def test_keys_too_old_to_serve_are_waited_for_where_they_are_now(
    verifiers: Verifiers, origin: Origin, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", b"", status=503)
    clock.advance(86_390)
    assert await verifier.verify(good(issuer))
    moved = {**issuer.metadata(), "jwks_uri": f"{origin.url}/new"}
    origin.say(METADATA, json.dumps(moved).encode())
    origin.say("/new", json.dumps(issuer.jwks()).encode())
    clock.advance(10)
    assert await verifier.verify(good(issuer))
    assert verifier.issuer_states() == (state(issuer, ok=True, age_s=0.0),)


async def test_keys_of_a_failing_issuer_serve_to_the_second(
    verifiers: Verifiers, origin: Origin, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", b"", status=503)
    clock.advance(86_399)
    assert await verifier.verify(good(issuer))
    clock.advance(1)
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))
    assert origin.requests["/jwks"] == 2


async def test_a_defect_backs_off_as_a_failure_does_and_is_shown(
    verifiers: Verifiers, tls: ssl.SSLContext, issuer: DevIssuer
) -> None:
    shown: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context))
    async with httpx2.AsyncClient(verify=tls, trust_env=False) as http:
        verifiers.http = http
        verifier = verifiers.make()
    try:
        for _ in range(2):
            with pytest.raises(IssuerUnavailable) as caught:
                await verifier.verify(good(issuer))
            assert caught.value.retry_after_s == 5
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert verifier.issuer_states()[0].problem == "internal error"
    (one,) = shown
    assert isinstance(one["exception"], RuntimeError)


async def test_a_fetch_that_is_ended_shows_nothing(verifiers: Verifiers, origin: Origin) -> None:
    shown: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context))
    verifier = verifiers.make()
    await verifier.aclose()  # and there was none
    gate = asyncio.Event()
    origin.say("/jwks", b"", gate=gate)
    warming = asyncio.create_task(verifier.warm())
    try:
        await until(lambda: origin.requests["/jwks"] == 1)
        await verifier.aclose()
        await warming
        await asyncio.sleep(0)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
        gate.set()
    assert not shown


async def test_says_which_issuer_is_out_of_reach_and_never_to_come_back_at_once(
    verifiers: Verifiers, origin: Origin, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make()
    origin.say("/jwks", b"", status=503)
    waits = []
    for passed_s in (0, 2.5, 2):
        clock.advance(passed_s)
        with pytest.raises(IssuerUnavailable) as caught:
            await verifier.verify(good(issuer))
        assert caught.value.issuer == issuer.issuer
        waits.append(caught.value.retry_after_s)
    assert waits == [5, 3, 1]


async def test_an_unknown_key_waits_for_a_fetch_under_way_whatever_the_interval(
    verifiers: Verifiers, origin: Origin, issuer: DevIssuer, clock: Clock
) -> None:
    verifier = verifiers.make(timings=KeyTimings(refresh_ahead_s=30.0))
    await verifier.warm()
    issuer.rotate()
    assert await verifier.verify(good(issuer))  # the interval begins
    issuer.rotate()
    clock.advance(30)
    assert await verifier.verify(good(issuer))
    assert origin.requests["/jwks"] == 3


async def test_a_key_that_came_by_an_unknown_id_goes_with_what_was_remembered_by_it(
    verifiers: Verifiers, issuer: DevIssuer
) -> None:
    verifier = verifiers.make(timings=KeyTimings(unknown_key_interval_s=0.0))
    await verifier.warm()
    issuer.rotate()
    stolen = good(issuer)
    assert await verifier.verify(stolen)
    issuer.rotate(keep_previous=False)
    assert await verifier.verify(good(issuer))
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(stolen)
    assert caught.value.reason == "TOKEN_KEY_UNKNOWN"


async def test_what_is_forgotten_takes_no_room() -> None:
    remembered = RememberedTokens(size=2, ttl_s=60.0)
    judged = Judged(principal(Scope.READ))
    remembered.forget("unknown")
    for token in ("one", "other"):
        remembered.put(token, judged, 1, monotonic_s=0.0)
    remembered.forget("one")
    assert len(remembered) == 1
    assert remembered.get("one", now_s=0.0, monotonic_s=0.0) is None
    assert remembered.get("other", now_s=0.0, monotonic_s=59.0) == (judged, 1)
    assert remembered.get("other", now_s=0.0, monotonic_s=60.0) is None
    assert len(remembered) == 0
