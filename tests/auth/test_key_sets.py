"""Key sets as they should not be: broken, weak, doubled."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import httpx2
import pytest
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from app.auth.tokens.errors import IssuerUnavailable, TokenInvalid
from app.auth.tokens.issuers import SUPPORTED_ALGORITHMS
from app.auth.tokens.keys import signing_key

pytestmark = pytest.mark.anyio
ADMIN = "https://gateway.test/admin"


def good(issuer: Any, **overrides: Any) -> str:
    token: str = issuer.mint("ops", "console", ["admin:read"], ADMIN, 7200, **overrides)
    return token


async def refusal(verifier: Any, token: str) -> str:
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    return caught.value.reason


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


@pytest.mark.parametrize("bits", [2048, 2096, 3072])  # their base64 ends with =, with == or alike
async def test_a_modulus_may_have_any_length_in_bounds(
    bits: int, verifiers: Any, origin: Any
) -> None:
    origin.say("/jwks", key_set(jwk(RSAKey.generate_key(bits))))
    verifier = verifiers.make()
    await verifier.warm()
    assert verifier.issuer_states()[0].keys == 1


@pytest.mark.parametrize(
    ("bits", "taken"), [(2047, False), (2048, True), (8192, True), (8193, False)]
)
async def test_the_shortest_and_the_longest_modulus(bits: int, taken: bool) -> None:
    number = (1 << (bits - 1)) + 1
    text = base64.urlsafe_b64encode(number.to_bytes((bits + 7) // 8)).rstrip(b"=").decode()
    found = signing_key({"kty": "RSA", "n": text, "e": "AQAB"})
    assert (found is not None) is taken


ED, RSA = OKPKey.generate_key("Ed25519"), RSAKey.generate_key(2048)


@pytest.mark.parametrize("key", [EC, ED, RSA])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kid": None, "alg": None},
        {"kid": "k", "alg": "ES256"},
        {"use": "sig"},
        {"key_ops": ["verify"]},
        {"key_ops": ["sign", "verify"]},
        {"x5c": ["x"]},
    ],
)
async def test_what_a_key_says_of_itself(key: Any, more: dict[str, Any]) -> None:
    found = signing_key({name: v for name, v in jwk(key).items() if name != "kid"} | more)
    assert found is not None
    assert (found.kid, found.alg) == (more.get("kid"), more.get("alg"))
    assert found.thumbprint == key.thumbprint()
    assert found.key.as_dict(private=False) == found.key.as_dict()


@pytest.mark.parametrize("key", [EC, ED, RSA])
@pytest.mark.parametrize(
    "more",
    [
        *({name: "x"} for name in ("d", "p", "q", "dp", "dq", "qi", "k", "oth")),
        {"use": "enc"},
        {"use": None},
        {"key_ops": []},
        {"key_ops": ["sign"]},
        {"key_ops": "verify"},
        {"kid": 5},
        {"alg": 5},
        {"kty": "oct"},
        {"kty": ["EC"]},
        {"kty": None},
    ],
)
async def test_what_no_key_may_say_of_itself(key: Any, more: dict[str, Any]) -> None:
    assert signing_key(jwk(key, **more)) is None


@pytest.mark.parametrize("key", [EC, ED, RSA])
async def test_each_of_its_numbers_is_needed(key: Any) -> None:
    for name in {"n", "e", "crv", "x", "y"} & jwk(key).keys():
        for value in (None, 7, "", "!"):
            assert signing_key(jwk(key, **{name: value})) is None


async def test_as_many_keys_as_are_looked_at(verifiers: Any, origin: Any, issuer: Any) -> None:
    origin.say("/jwks", key_set(*[jwk(EC)] * 63, *issuer.jwks()["keys"]))
    assert await verifiers.make().verify(good(issuer))


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        (ECKey.generate_key("P-256"), {"ES256"}),
        (ECKey.generate_key("P-384"), {"ES384"}),
        (ECKey.generate_key("P-521"), {"ES512"}),
        (OKPKey.generate_key("Ed25519"), {"EdDSA", "Ed25519"}),
        (RSAKey.generate_key(2048), {f"{k}{n}" for k in ("RS", "PS") for n in (256, 384, 512)}),
    ],
)
async def test_which_algorithms_a_key_is_for(key: Any, fits: set[str]) -> None:
    found = signing_key(jwk(key))
    assert found is not None
    assert {name for name in SUPPORTED_ALGORITHMS if found.fits(name)} == fits
    for name in fits:
        meant = signing_key(jwk(key, alg=name))
        assert meant is not None
        assert {other for other in SUPPORTED_ALGORITHMS if meant.fits(other)} == {name}


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
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(good(issuer))
    assert verifier.issuer_states()[0].problem == problem
    assert not origin.requests["/moved"]


async def test_a_redirect_is_refused_whatever_the_client_would_do(
    verifiers: Any, origin: Any, issuer: Any, tls: Any
) -> None:
    origin.say("/jwks", b"", status=302, headers={"location": "/moved"})
    origin.say("/moved", json.dumps(issuer.jwks()).encode())
    async with httpx2.AsyncClient(verify=tls, trust_env=False, follow_redirects=True) as http:
        verifiers.http = http
        verifier = verifiers.make()
        await verifier.warm()
        assert verifier.issuer_states()[0].problem == "redirect refused"
    assert not origin.requests["/moved"]


async def test_the_largest_answer_that_is_read(verifiers: Any, origin: Any, issuer: Any) -> None:
    body = json.dumps(issuer.jwks()).encode()
    origin.say("/jwks", body.ljust(256 * 1024), headers={"content-encoding": "identity"})
    assert await verifiers.make().verify(good(issuer))
