"""Fetching keys with restraint: rotation, outages, floods of unknown keys, strange answers."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from app.auth.tokens.errors import KeysUnavailable, TokenInvalid
from app.auth.tokens.fetch import FetchFailed, jwks_uri_in
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.jwks import KeyTimings

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
        with pytest.raises(KeysUnavailable) as caught:
            await verifier.verify(good(issuer))
        assert caught.value.retry_after_s == 5
    await origin.start()
    with pytest.raises(KeysUnavailable):
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
        with pytest.raises(KeysUnavailable):
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
    with pytest.raises(KeysUnavailable):
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
        with pytest.raises(KeysUnavailable):
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
        with pytest.raises(KeysUnavailable) as caught:
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
    verifier = verifiers.make(timings=KeyTimings(fetch_deadline_s=0.05))
    origin.say("/jwks", b"", gate=asyncio.Event())
    with pytest.raises(KeysUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == "no answer in 0.05 s"
    for _ in range(50):
        with pytest.raises(KeysUnavailable):
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
    with pytest.raises(KeysUnavailable):
        await call
    gate.set()


def jwk(key: Any, **more: Any) -> dict[str, Any]:
    return {**key.as_dict(private=False), **more}


def key_set(*keys: Any) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


EC = ECKey.generate_key("P-256", {"kid": "other"})
WEAK_MODULUS = "A" * 171 + str(RSAKey.generate_key(2048).as_dict(private=False)["n"])[:171]

USELESS: dict[str, bytes] = {
    "empty-body": b"",
    "not-json": b"<html>",
    "not-an-object": b"[]",
    "deep": b"[" * 10_000,
    "no-keys-member": b"{}",
    "keys-not-a-list": b'{"keys": {}}',
    "empty-set": b'{"keys": []}',
    "keys-of-nothing": b'{"keys": [null, 1, "x", [], {}]}',
    "symmetric-only": key_set(OctKey.generate_key(256).as_dict(private=True)),
    "encryption-only": key_set(jwk(EC, use="enc")),
    "signing-operation-only": key_set(jwk(EC, key_ops=["sign"])),
    "operations-not-a-list": key_set(jwk(EC, key_ops="verify")),
    "private-half-published": key_set(EC.as_dict(private=True)),
    "weak-rsa-behind-zeros": key_set({"kty": "RSA", "n": WEAK_MODULUS, "e": "AQAB"}),
    "rsa-not-base64": key_set({"kty": "RSA", "n": "!" * 342, "e": "AQAB"}),
    "rsa-without-exponent": key_set({"kty": "RSA", "n": "A" * 342}),
    "ec-off-curve": key_set({"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"}),
    "ec-unknown-curve": key_set({**jwk(EC), "crv": "P-999"}),
    "okp-unknown-curve": key_set({"kty": "OKP", "crv": "X", "x": "AQ"}),
    "kid-not-text": key_set(jwk(EC, kid=5)),
    "kty-not-text": key_set(jwk(EC, kty=["EC"])),
    "too-many": key_set(*[jwk(EC)] * 65),
}


@pytest.mark.parametrize("body", USELESS.values(), ids=USELESS)
async def test_useless_key_set_never_erases_good_keys(
    body: bytes, verifiers: Any, origin: Any, issuer: Any, clock: Any
) -> None:
    verifier = verifiers.make()
    await verifier.warm()
    origin.say("/jwks", body)
    clock.advance(601)
    assert await verifier.verify(good(issuer))
    (state,) = verifier.issuer_states()
    assert not state.ok
    assert state.problem
    assert state.keys == 1


async def test_strange_keys_beside_a_good_one_do_no_harm(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    strange = [
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
        jwk(EC, use="enc"),
        jwk(OKPKey.generate_key("X25519")),
        None,
        {**jwk(EC), "x5c": 7, "use": "sig", "key_ops": ["verify"]},
    ]
    origin.say("/jwks", key_set(*strange, *issuer.jwks()["keys"]))
    assert await verifiers.make().verify(good(issuer))


async def test_repeated_key_id_tries_each(verifiers: Any, origin: Any, issuer: Any) -> None:
    (own,) = issuer.jwks()["keys"]
    other = jwk(ECKey.generate_key("P-256"), kid=own["kid"])
    rsa = jwk(RSAKey.generate_key(2048), kid=own["kid"])
    origin.say("/jwks", key_set(other, rsa, own))
    verifier = verifiers.make()
    assert await verifier.verify(good(issuer))
    head, payload, _ = good(issuer).split(".")
    assert await refusal(verifier, f"{head}.{payload}.{'A' * 86}") == "TOKEN_SIGNATURE_INVALID"


async def test_token_without_key_id_finds_the_key_and_follows_a_rotation(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    verifier = verifiers.make()
    assert await verifier.verify(good(issuer, header={"kid": None}))
    issuer.rotate(keep_previous=False)
    assert await verifier.verify(good(issuer, header={"kid": None}))
    assert origin.requests["/jwks"] == 2


async def test_key_for_another_algorithm_is_not_used(
    verifiers: Any, origin: Any, issuer: Any
) -> None:
    (own,) = issuer.jwks()["keys"]
    origin.say("/jwks", key_set({**own, "alg": "ES384"}))
    assert await refusal(verifiers.make(), good(issuer)) == "TOKEN_KEY_UNKNOWN"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"body": b"x" * 300_000}, "answer larger than 262144 bytes"),
        ({"body": b"", "status": 500}, "HTTP 500"),
        ({"body": b"", "status": 404}, "HTTP 404"),
        ({"body": b"", "status": 204}, "HTTP 204"),
        (
            {"body": gzip.compress(b'{"keys": []}'), "headers": {"content-encoding": "gzip"}},
            "compressed answer refused",
        ),
        ({"body": b"", "status": 302, "headers": {"location": "/moved"}}, "redirect refused"),
        (
            {"body": b"", "status": 307, "headers": {"location": "http://127.0.0.1:9/jwks"}},
            "redirect refused",
        ),
        ({"body": b"x", "headers": {"content-length": "999"}}, "RemoteProtocolError"),
    ],
    ids=["oversized", "500", "404", "204", "gzip", "redirect", "redirect-elsewhere", "cut-off"],
)
async def test_answers_that_are_no_key_set(
    answer: dict[str, Any], problem: str, verifiers: Any, origin: Any, issuer: Any
) -> None:
    origin.say("/jwks", **answer)
    origin.say("/moved", json.dumps(issuer.jwks()).encode())
    verifier = verifiers.make()
    with pytest.raises(KeysUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == problem
    assert not origin.requests["/moved"]


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
    with pytest.raises(KeysUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == problem
    assert not origin.requests["/jwks"]


@pytest.mark.parametrize("uri", ["http://127.0.0.1/jwks", "http://localhost/jwks"])
async def test_a_remote_issuer_does_not_send_us_to_plaintext_on_this_machine(uri: str) -> None:
    config = IssuerConfig(issuer="https://id.test", audience=ADMIN)
    with pytest.raises(FetchFailed, match="jwks_uri"):
        jwks_uri_in(json.dumps({"issuer": config.issuer, "jwks_uri": uri}).encode(), config)


async def test_falls_back_to_oauth_metadata(verifiers: Any, origin: Any, issuer: Any) -> None:
    origin.say("/.well-known/openid-configuration", b"", status=404)
    verifier = verifiers.make()
    with pytest.raises(KeysUnavailable):
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


async def wait_for_request(origin: Any, path: str) -> None:
    await until(lambda: origin.requests[path] > 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is a real server's progress
            await asyncio.sleep(0.001)
