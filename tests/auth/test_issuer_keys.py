"""Fetching keys with restraint: rotation, outages, floods of unknown keys, strange answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.auth.tokens.errors import IssuerUnavailable, TokenInvalid
from app.auth.tokens.fetch import FetchFailed, address_in
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.jwks import KeyTimings
from app.auth.tokens.verifier import MAX_TOKEN_CHARS

pytestmark = pytest.mark.anyio

ADMIN = "https://gateway.test/admin"


def good(issuer: Any, **overrides: Any) -> str:
    token: str = issuer.mint("ops", "console", ["admin:read"], ADMIN, 7200, **overrides)
    return token


async def refusal(verifier: Any, token: str) -> str:
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    return caught.value.reason


async def test_rotation_costs_one_fetch(verifiers: Any, origin: Any, issuer: Any) -> None:
    verifier = verifiers.make()
    before = good(issuer)
    await verifier.verify(before)
    issuer.rotate()
    assert await verifier.verify(good(issuer))
    assert await verifier.verify(good(issuer))
    assert await verifier.verify(before)
    assert origin.requests["/jwks"] == 2
    assert origin.requests["/.well-known/openid-configuration"] == 1


async def test_thousand_made_up_keys_cost_one_fetch(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    for number in range(1000):
        clock.advance(0.01)
        assert await refusal(verifier, good(issuer, header={"kid": f"made-up-{number}"})) == (
            "TOKEN_KEY_UNKNOWN"
        )
        if number % 100 == 0:
            assert await verifier.verify(good(issuer))
    assert origin.requests["/jwks"] == 2  # the first, and one for all of those
    assert verifier.issuer_states()[0].ok


async def test_flood_at_once_shares_one_fetch(verifiers: Any, origin: Any, issuer: Any) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    tokens = [good(issuer, header={"kid": f"made-up-{n}"}) for n in range(300)]
    answers = await asyncio.gather(
        *(verifier.verify(token) for token in tokens), verifier.verify(good(issuer)),
        return_exceptions=True,
    )  # fmt: skip
    assert all(isinstance(answer, TokenInvalid) for answer in answers[:-1])
    assert not isinstance(answers[-1], BaseException)
    assert origin.requests["/jwks"] == 2


async def test_unknown_key_may_ask_again_after_the_interval(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    await refusal(verifier, good(issuer, header={"kid": "made-up"}))
    issuer.rotate()
    clock.advance(59)
    assert await refusal(verifier, good(issuer)) == "TOKEN_KEY_UNKNOWN"
    clock.advance(1)
    assert await verifier.verify(good(issuer))
    assert origin.requests["/jwks"] == 3


async def test_withdrawn_key_is_dropped_with_what_was_remembered(
    verifiers: Any, issuer: Any
) -> None:
    """A remembered token must not outlive the key it was verified with."""
    verifier = verifiers.make()
    stolen = good(issuer)
    await verifier.verify(stolen)
    issuer.rotate(keep_previous=False)
    await verifier.verify(good(issuer))  # makes the verifier see the new set
    assert await refusal(verifier, stolen) == "TOKEN_KEY_UNKNOWN"


async def test_withdrawn_key_is_dropped_by_age_alone(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    stolen = good(issuer)
    await verifier.verify(stolen)
    issuer.rotate(keep_previous=False)
    clock.advance(599)
    assert await verifier.verify(stolen)  # 480 s and on: refreshes, does not wait for it
    await until(lambda: verifier.issuer_states()[0].age_s == 0)
    assert await refusal(verifier, stolen) == "TOKEN_KEY_UNKNOWN"


async def test_old_keys_do_not_serve_an_idle_gateway_past_their_age(
    verifiers: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    stolen = good(issuer)
    await verifier.verify(stolen)
    issuer.rotate(keep_previous=False)
    clock.advance(600)
    assert await refusal(verifier, stolen) == "TOKEN_KEY_UNKNOWN"


async def test_same_keys_again_keep_what_was_remembered(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    verifier = verifiers.make()
    first = await verifier.verify(token := good(issuer))
    await refusal(verifier, good(issuer, header={"kid": "made-up"}))  # refreshes, to no change
    assert await verifier.verify(token) is first


async def test_issuer_down_from_the_start(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await origin.stop()
    await verifier.warm()  # raises nothing
    (state,) = verifier.issuer_states()
    assert (state.ok, state.keys, state.age_s) == (False, 0, None)
    assert state.problem == "ConnectError"
    for _ in range(100):
        with pytest.raises(IssuerUnavailable) as caught:
            await verifier.verify(good(issuer))
        assert caught.value.retry_after_s == 5
    await origin.start()
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))  # still within the back-off: nobody is asked
    assert not origin.requests
    clock.advance(5)
    assert await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].ok


async def test_issuer_down_later_leaves_good_tokens_good(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    await origin.stop()
    clock.advance(3600)
    assert await verifier.verify(good(issuer))
    clock.advance(61)
    assert await verifier.verify(good(issuer))
    (state,) = verifier.issuer_states()
    assert (state.ok, state.keys, state.age_s) == (False, 1, 3661)
    # A key we do not know may be new: while the issuer cannot be asked, that is not "invalid".
    for number in range(100):
        with pytest.raises(IssuerUnavailable):
            await verifier.verify(good(issuer, header={"kid": f"new-{number}"}))


async def test_keys_of_an_unreachable_issuer_end_some_day(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    await origin.stop()
    clock.advance(86_399)
    assert await verifier.verify(good(issuer))
    clock.advance(61)  # past both the limit and what is remembered
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))


async def test_failing_issuer_is_left_alone_between_attempts(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", b"", status=503)
    clock.advance(600)
    for number in range(100):
        assert await verifier.verify(good(issuer))
        with pytest.raises(IssuerUnavailable):
            await verifier.verify(good(issuer, header={"kid": f"new-{number}"}))
    assert origin.requests["/jwks"] == 2


async def test_only_the_first_to_find_the_issuer_hanging_waits_for_it(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make(timings=KeyTimings(fetch_deadline_s=0.05))
    await verifier.warm()
    gate = asyncio.Event()
    origin.say("/jwks", b"", gate=gate)
    clock.advance(600)
    assert await verifier.verify(good(issuer))  # waits, in vain, and takes the keys there are
    assert verifier.issuer_states()[0].problem == "no answer in 0.05 s"
    clock.advance(5)
    fetches = [task for task in asyncio.all_tasks() if task.get_name() == "issuer-keys"]
    assert not fetches
    assert await verifier.verify(good(issuer))
    # It came back while the next attempt was still under way.
    assert [task for task in asyncio.all_tasks() if task.get_name() == "issuer-keys"]
    gate.set()


async def test_backoff_grows_to_its_limit(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    origin.say("/.well-known/openid-configuration", b"", status=503)
    waits = []
    for _ in range(6):
        with pytest.raises(IssuerUnavailable) as caught:
            await verifier.verify(good(issuer))
        waits.append(caught.value.retry_after_s)
        clock.advance(waits[-1])
    assert waits == [5, 10, 20, 40, 60, 60]
    assert origin.requests["/.well-known/openid-configuration"] == 6


async def test_slow_issuer_is_asked_once(verifiers: Any, origin: Any, issuer: Any) -> None:
    verifier = verifiers.make()
    gate = asyncio.Event()
    origin.say("/jwks", json.dumps(issuer.jwks()).encode(), gate=gate)
    calls = [asyncio.create_task(verifier.verify(good(issuer))) for _ in range(50)]
    await wait_for_request(origin, "/jwks")
    gate.set()
    await asyncio.gather(*calls)
    assert origin.requests["/jwks"] == 1


async def test_caller_that_hangs_up_does_not_end_the_fetch_for_others(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    verifier = verifiers.make()
    gate = asyncio.Event()
    origin.say("/jwks", json.dumps(issuer.jwks()).encode(), gate=gate)
    first = asyncio.create_task(verifier.verify(good(issuer)))
    await wait_for_request(origin, "/jwks")
    second = asyncio.create_task(verifier.verify(good(issuer)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    gate.set()
    assert await second
    assert origin.requests["/jwks"] == 1


async def test_hanging_issuer_costs_its_deadline_once(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make(timings=KeyTimings(fetch_deadline_s=1.0))
    origin.say("/jwks", b"", gate=asyncio.Event())
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == "no answer in 1 s"
    for _ in range(50):
        with pytest.raises(IssuerUnavailable):
            await verifier.verify(good(issuer))
    assert origin.requests["/jwks"] == 1
    origin.answers["/jwks"].gate.set()


async def test_closing_ends_a_fetch_under_way(verifiers: Any, origin: Any, issuer: Any) -> None:
    verifier = verifiers.make()
    gate = asyncio.Event()
    origin.say("/jwks", b"", gate=gate)
    call = asyncio.create_task(verifier.verify(good(issuer)))
    await wait_for_request(origin, "/jwks")
    await verifier.aclose()
    with pytest.raises(IssuerUnavailable):
        await call
    gate.set()


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (b"nope", "the metadata is not JSON"),
        (b"[]", "the metadata is not a JSON object"),
        (b"{}", "the metadata names another issuer"),
        (b'{"issuer": "ISSUER/"}', "the metadata names another issuer"),
        (b'{"issuer": "ISSUER"}', "the metadata has no acceptable jwks_uri"),
        (b'{"issuer": "ISSUER", "jwks_uri": 7}', "the metadata has no acceptable jwks_uri"),
        (
            b'{"issuer": "ISSUER", "jwks_uri": "http://keys.test/jwks"}',
            "the metadata has no acceptable jwks_uri",
        ),
        (
            b'{"issuer": "ISSUER", "jwks_uri": "file:///etc/passwd"}',
            "the metadata has no acceptable jwks_uri",
        ),
    ],
)
async def test_metadata_that_is_not_believed(
    metadata: bytes, problem: str, verifiers: Any, origin: Any, issuer: Any
) -> None:
    body = metadata.replace(b"ISSUER", issuer.issuer.encode())
    origin.say("/.well-known/openid-configuration", body)
    verifier = verifiers.make()
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == problem
    assert not origin.requests["/jwks"]


@pytest.mark.parametrize("uri", ["http://127.0.0.1/jwks", "http://localhost/jwks"])
async def test_a_remote_issuer_does_not_send_us_to_plaintext_on_this_machine(uri: str) -> None:
    config = IssuerConfig(issuer="https://id.test", audience=ADMIN)
    with pytest.raises(FetchFailed, match="jwks_uri"):
        address_in(
            json.dumps({"issuer": config.issuer, "jwks_uri": uri}).encode(), config, "jwks_uri"
        )


@pytest.mark.parametrize("status", [404, 410])
async def test_falls_back_to_oauth_metadata(
    status: int, verifiers: Any, origin: Any, issuer: Any
) -> None:
    origin.say("/.well-known/openid-configuration", b"", status=status)
    verifier = verifiers.make()
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == "the issuer serves no metadata document"
    metadata = json.dumps(issuer.metadata()).encode()
    origin.say("/.well-known/oauth-authorization-server", metadata)
    verifier = verifiers.make()
    assert await verifier.verify(good(issuer))


async def test_keys_at_a_set_address_need_no_metadata(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    verifier = verifiers.make(verifiers.config(jwks_uri=f"{origin.url}/keys"))
    origin.say("/keys", json.dumps(issuer.jwks()).encode())
    assert await verifier.verify(good(issuer))
    assert set(origin.requests) == {"/keys"}


async def test_moved_keys_are_found_again(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", json.dumps(issuer.jwks()).encode())  # the old place, never updated again
    moved = {**issuer.metadata(), "jwks_uri": f"{origin.url}/new"}
    origin.say("/.well-known/openid-configuration", json.dumps(moved).encode())
    issuer.rotate(keep_previous=False)
    origin.say("/new", json.dumps(issuer.jwks()).encode())
    clock.advance(600)
    assert await verifier.verify(good(issuer))


async def test_remembers_for_a_minute_and_never_past_expiry(
    verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make(verifiers.config(leeway_s=0))
    long, short = good(issuer), issuer.mint("ops", "console", ["admin:read"], ADMIN, 10)
    first, brief = await verifier.verify(long), await verifier.verify(short)
    assert await verifier.verify(long) is first
    clock.advance(9)
    assert await verifier.verify(short) is brief
    clock.advance(1)
    assert await refusal(verifier, short) == "TOKEN_EXPIRED"
    clock.advance(49)
    assert await verifier.verify(long) is first
    clock.advance(1)
    again = await verifier.verify(long)
    assert again == first
    assert again is not first


async def test_remembers_a_bounded_number(verifiers: Any, issuer: Any) -> None:
    verifier = verifiers.make(cache_size=2)
    one, two, three = good(issuer), good(issuer), good(issuer)
    first = await verifier.verify(one)
    second = await verifier.verify(two)
    assert await verifier.verify(one) is first  # now the one used last
    await verifier.verify(three)
    assert await verifier.verify(one) is first
    assert await verifier.verify(two) is not second


async def test_other_tokens_of_an_issuer_are_known_by_its_signature(
    verifiers: Any, issuer: Any
) -> None:
    other = "https://other.test"
    verifier = verifiers.make(
        verifiers.config(), verifiers.config(issuer=other, jwks_uri="https://127.0.0.1:1/jwks")
    )
    id_token = good(issuer, header={"typ": "JWT"}, nonce="n")
    found = await verifier.signed(id_token, by=[issuer.issuer, other])
    assert (found.claims["nonce"], found.typ) == ("n", "JWT")
    head, body, _ = id_token.split(".")
    exact = id_token.ljust(MAX_TOKEN_CHARS, "A")
    for token, by, reason in [
        (id_token, [other], "TOKEN_ISSUER_FOREIGN"),
        (id_token, [], "TOKEN_ISSUER_FOREIGN"),
        (good(issuer, iss="https://else.test"), ["https://else.test"], "TOKEN_ISSUER_FOREIGN"),
        (f"{head}.{body}.{'A' * 86}", [issuer.issuer], "TOKEN_SIGNATURE_INVALID"),
        (exact, [issuer.issuer], "TOKEN_SIGNATURE_INVALID"),
        (exact + "A", [issuer.issuer], "TOKEN_TOO_LARGE"),
        (id_token + "é", [issuer.issuer], "TOKEN_MALFORMED"),
        ("\ud800.a.b", [issuer.issuer], "TOKEN_MALFORMED"),
    ]:
        with pytest.raises(TokenInvalid) as caught:
            await verifier.signed(token, by=by)
        assert caught.value.reason == reason
    for algorithms in (("RS256",), ("RS256", "EdDSA")):
        narrow = verifiers.make(verifiers.config(algorithms=algorithms))
        with pytest.raises(TokenInvalid) as caught:
            await narrow.signed(id_token, by=[issuer.issuer])
        assert caught.value.reason == "TOKEN_ALGORITHM_REFUSED"


async def wait_for_request(origin: Any, path: str) -> None:
    await until(lambda: origin.requests[path] > 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is a real server's progress
            await asyncio.sleep(0.001)
