"""Tokens that are bound to a key: taken with a proof of it, and with nothing less."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from app.auth.tokens.dpop import MAX_PROOF_CHARS, Shown, check_proof
from app.auth.tokens.errors import NonceNeeded, ProofInvalid, TokenRefused
from app.auth.tokens.issuers import DpopUse, IssuerConfigError
from app.auth.tokens.nonces import Nonces
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope
from tests.auth.conftest import ADMIN, Clock, Verifiers
from tests.auth.made_tokens import NOW
from tests.auth.proving import Holder

pytestmark = pytest.mark.anyio

URL = "https://gateway.test/v1/engines/e%2D1"


@dataclass
class Bound:
    """A caller with a token that is bound to their key."""

    verifiers: Verifiers
    holder: Holder

    def token(self, **overrides: Any) -> str:
        overrides.setdefault("cnf", self.holder.binding)
        return self.verifiers.issuer.mint("ops", "console", ["admin:read"], ADMIN, **overrides)

    def make(self, use: DpopUse = DpopUse.ALLOWED, **changes: Any) -> TokenVerifier:
        return self.verifiers.make(self.verifiers.config(dpop=use, **changes))

    def shown(self, token: str, *, url: str = URL, method: str = "GET", **proof: Any) -> Shown:
        """By default a good proof for the request."""
        by: Holder = proof.pop("by", self.holder)
        made = by.proof(token, url, method=method, **{"at": NOW, **proof})
        return Shown(made, "GET", URL)


@pytest.fixture
def bound(verifiers: Verifiers) -> Bound:
    return Bound(verifiers, Holder())


async def refusal(verifier: TokenVerifier, token: str, shown: Shown | None = None) -> str:
    judging = verifier.verify(token) if shown is None else verifier.verify_bound(token, shown)
    with pytest.raises(TokenRefused) as caught:
        await judging
    return caught.value.reason


async def test_takes_a_bound_token_with_its_proof(bound: Bound) -> None:
    verifier, token = bound.make(), bound.token()
    for _ in range(2):  # also once it is remembered
        who = await verifier.verify_bound(token, bound.shown(token))
        assert who.subject == "ops"
        assert who.scopes == {Scope.READ}
        assert await refusal(verifier, token) == "TOKEN_BOUND"
    assert (await verifier.still_good(token)).subject == "ops"


@pytest.mark.parametrize(
    ("key", "alg"),
    [
        (RSAKey.generate_key(2048), "RS256"),
        (RSAKey.generate_key(2048), "PS256"),
        (ECKey.generate_key("P-384"), "ES384"),
        (OKPKey.generate_key("Ed25519"), "EdDSA"),
    ],
)
async def test_any_asymmetric_key_will_do(key: Any, alg: str, bound: Bound) -> None:
    bound.holder = Holder(key, alg)
    token = bound.token()
    assert await bound.make().verify_bound(token, bound.shown(token))


async def test_a_proof_counts_once(bound: Bound, clock: Clock) -> None:
    verifier, token = bound.make(), bound.token()
    shown = bound.shown(token)
    await verifier.verify_bound(token, shown)
    assert await refusal(verifier, token, shown) == "PROOF_REPLAYED"
    again = bound.shown(token, jti="one")
    await verifier.verify_bound(token, again)
    later = bound.shown(token, jti="one", at=NOW + 1)
    assert await refusal(verifier, token, later) == "PROOF_REPLAYED"
    # It is remembered for longer than it is taken.
    clock.advance(91)
    assert await refusal(verifier, token, again) == "PROOF_INVALID"
    assert all(until >= clock.now() for until in bound.verifiers.proofs.until.values())


async def test_nobody_without_a_token_of_theirs_fills_the_store(bound: Bound) -> None:
    verifier, other = bound.make(), Holder()
    token = bound.token()
    expired = bound.token(exp=NOW - 60)
    assert await refusal(verifier, token, bound.shown(token, by=other)) == "PROOF_INVALID"
    assert await refusal(verifier, expired, bound.shown(expired)) == "TOKEN_EXPIRED"
    assert not bound.verifiers.proofs.until


ECHO = ECKey.generate_key("P-256")
CASES: dict[str, dict[str, Any]] = {
    "no-typ": {"header": {"typ": ...}},
    "typ-jwt": {"header": {"typ": "JWT"}},
    "typ-access-token": {"header": {"typ": "at+jwt"}},
    "no-jwk": {"header": {"jwk": ...}},
    "jwk-no-object": {"header": {"jwk": "key"}},
    "jwk-empty": {"header": {"jwk": {}}},
    "jwk-with-its-private-half": {"header": {"jwk": ECHO.as_dict(private=True)}},
    "jwk-symmetric": {"header": {"jwk": OctKey.generate_key(256).as_dict(private=True)}},
    "jwk-of-another-key": {"header": {"jwk": ECHO.as_dict(private=False)}},
    "jwk-of-another-kind": {"header": {"jwk": RSAKey.generate_key(2048).as_dict(private=False)}},
    "crit": {"header": {"crit": ["exp"]}},
    "key-of-someone-else": {"by": Holder(ECHO)},
    "no-jti": {"jti": ...},
    "jti-empty": {"jti": ""},
    "jti-no-string": {"jti": 7},
    "jti-endless": {"jti": "x" * 256},
    "jti-with-control-characters": {"jti": "a\x00b"},
    "no-htm": {"htm": ...},
    "htm-other": {"htm": "POST"},
    "htm-lower": {"htm": "get"},
    "no-htu": {"htu": ...},
    "htu-no-string": {"htu": 7},
    "htu-relative": {"htu": "/v1/engines/e-1"},
    "htu-other-path": {"htu": "https://gateway.test/v1/engines/e-2"},
    "htu-longer": {"htu": URL + "/pause"},
    "htu-trailing-slash": {"htu": URL + "/"},
    "htu-other-host": {"htu": "https://gateway.evil/v1/engines/e-1"},
    "htu-other-port": {"htu": "https://gateway.test:8443/v1/engines/e-1"},
    "htu-http": {"htu": "http://gateway.test/v1/engines/e-1"},
    "htu-with-user": {"htu": "https://a@gateway.test/v1/engines/e-1"},
    "htu-port-nonsense": {"htu": "https://gateway.test:x/v1/engines/e-1"},
    "no-iat": {"iat": ...},
    "iat-no-number": {"iat": "now"},
    "iat-true": {"iat": True},
    "iat-endless": {"iat": 1e300},
    "iat-past": {"iat": NOW - 91},
    "iat-to-come": {"iat": NOW + 31},
    "no-ath": {"ath": ...},
    "ath-of-another-token": {"ath": base64.urlsafe_b64encode(b"x" * 32).decode().rstrip("=")},
    "ath-no-string": {"ath": 7},
    "ath-not-ascii": {"ath": "é"},
}


@pytest.mark.parametrize("case", CASES)
async def test_refuses_the_proof(case: str, bound: Bound) -> None:
    token = bound.token()
    assert await refusal(bound.make(), token, bound.shown(token, **CASES[case])) == "PROOF_INVALID"
    assert not bound.verifiers.proofs.until


def text(change: Callable[[str], str]) -> Callable[[Bound, str], Shown]:
    return lambda bound, token: Shown(change(bound.shown(token).proof), "GET", URL)


@pytest.mark.parametrize(
    "spoilt",
    [
        text(lambda _: ""),
        text(lambda _: "a.b.c"),
        text(lambda proof: proof.rpartition(".")[0]),
        text(lambda proof: f"{proof},{proof}"),
        text(lambda proof: proof.rpartition(".")[0] + "." + "A" * 86),
        text(lambda proof: proof + "x" * 9000),
        text(lambda _: "é"),
    ],
)
async def test_refuses_what_is_no_proof(
    spoilt: Callable[[Bound, str], Shown], bound: Bound
) -> None:
    token = bound.token()
    assert await refusal(bound.make(), token, spoilt(bound, token)) == "PROOF_INVALID"


@pytest.mark.parametrize("name", ["none", "HS256"])
async def test_refuses_a_proof_that_anybody_can_make(name: str, bound: Bound) -> None:
    token = bound.token()
    _, body, signature = bound.shown(token).proof.split(".")
    jwk = bound.holder.key.as_dict(private=False)
    header = json.dumps({"alg": name, "typ": "dpop+jwt", "jwk": jwk}).encode()
    made = f"{base64.urlsafe_b64encode(header).rstrip(b'=').decode()}.{body}.{signature}"
    assert await refusal(bound.make(), token, Shown(made, "GET", URL)) == "PROOF_INVALID"


@pytest.mark.parametrize(
    "htu",
    [
        "https://gateway.test/v1/engines/e-1",
        "https://gateway.test/v1/engines/%65-1",
        "HTTPS://Gateway.TEST:443/v1/engines/e-1",
        "https://gateway.test/v1/engines/e-1?a=b#c",
    ],
)
async def test_other_ways_to_write_the_same_address(htu: str, bound: Bound) -> None:
    token = bound.token()
    assert await bound.make().verify_bound(token, bound.shown(token, htu=htu))


@pytest.mark.parametrize(
    ("here", "htu", "same"),
    [
        ("http://[::1]:80/a", "http://[::1]/a", True),
        ("http://[::1]:8080/a", "http://[0::1]:8080/a", False),
        ("http://[::1]:8080/a", "http://[::1]:8080/a", True),
        ("http://[::1]:8080/a", "http://[::1:8080]/a", False),
        ("https://gateway.test:80/a", "https://gateway.test:443/a", False),
        ("https://gateway.test", "https://gateway.test/", True),
        ("https://gateway.test/a%2fb", "https://gateway.test/a%2Fb", True),
        ("https://gateway.test/a%2fb", "https://gateway.test/a/b", False),
        ("https://gateway.test/a%2fb", "https://gateway.test/a2Fb", False),
        ("https://gateway.test/%7Ea_b", "https://gateway.test/~a%5fb", True),
        ("ftp://gateway.test/a", "ftp://gateway.test/a", False),
        ("https:///a", "https:///a", False),
        ("https://a@gateway.test/a", "https://a@gateway.test/a", False),
        ("https://gateway.test/é", "https://gateway.test/é", False),
        ("/a", "/a", False),
    ],
)
def test_which_addresses_are_the_same(here: str, htu: str, same: bool) -> None:
    proof = Holder().proof("token", htu, at=NOW)
    shown, now = Shown(proof, "GET", here), datetime.fromtimestamp(NOW, UTC)
    if same:
        assert check_proof(shown, "token", now=now, leeway_s=0)
        return
    with pytest.raises(ProofInvalid, match="another address"):
        check_proof(shown, "token", now=now, leeway_s=0)


@pytest.mark.parametrize("typ", ["DPoP+JWT", "application/dpop+jwt"])
@pytest.mark.parametrize("jti", ["x", "x" * 255])
def test_it_is_remembered_until_no_replica_takes_it(typ: str, jti: str) -> None:
    """Its key is part of it: nobody can use up another's proofs."""
    now = datetime.fromtimestamp(NOW, UTC)
    one, other = (
        check_proof(
            Shown(holder.proof("token", URL, at=NOW, header={"typ": typ}, jti=jti), "GET", URL),
            "token",
            now=now,
            leeway_s=30,
        )
        for holder in (Holder(), Holder())
    )
    assert one.until == other.until == now + timedelta(seconds=60 + 30 + 30 + 60)
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("chars", "taken"), [(MAX_PROOF_CHARS, True), (MAX_PROOF_CHARS + 1, False)]
)
def test_the_longest_proof_that_is_looked_at(chars: int, taken: bool) -> None:
    holder, now = Holder(), datetime.fromtimestamp(NOW, UTC)
    about = (chars - len(holder.proof("token", URL, at=NOW, jti="x", pad=""))) // 4 * 3
    tries = (
        holder.proof("token", URL, at=NOW, jti="x", pad="x" * pad, header={"x": "x" * more})
        for more in range(4)
        for pad in range(about - 20, about + 4)
    )
    shown = Shown(next(proof for proof in tries if len(proof) == chars), "GET", URL)
    if taken:
        assert check_proof(shown, "token", now=now, leeway_s=0)
        return
    with pytest.raises(ProofInvalid, match="too large"):
        check_proof(shown, "token", now=now, leeway_s=0)


@pytest.mark.parametrize("iat", [NOW - 90, NOW + 30, NOW + 0.5])
async def test_made_within_a_minute_and_the_leeway(iat: float, bound: Bound) -> None:
    token = bound.token()
    assert await bound.make().verify_bound(token, bound.shown(token, iat=iat))


@pytest.mark.parametrize(
    "cnf",
    [
        None,
        "x",
        {},
        {"jkt": 7},
        {"jkt": ""},
        {"x5t#S256": "x"},
        {"jwk": {}},
        {"jkt": "x", "x5t#S256": "x"},
    ],
)
async def test_a_token_that_is_not_bound_to_a_key_is_not_taken_with_a_proof(
    cnf: Any, bound: Bound
) -> None:
    """Bound to a certificate, it would have to be shown over that certificate's connection."""
    token = bound.token(cnf=cnf)
    reason = await refusal(bound.make(), token, bound.shown(token))
    assert reason == ("TOKEN_UNBOUND" if cnf is None else "TOKEN_BOUND")
    if cnf is not None:
        assert await refusal(bound.make(), token) == "TOKEN_BOUND"


async def test_off_takes_none_and_required_takes_no_other(bound: Bound) -> None:
    off, required = bound.make(DpopUse.OFF), bound.make(DpopUse.REQUIRED)
    plain, token = bound.token(cnf=None), bound.token()
    assert await refusal(off, token, bound.shown(token)) == "TOKEN_BOUND"
    assert await off.verify(plain)
    assert await required.verify_bound(token, bound.shown(token))
    assert await refusal(required, plain) == "TOKEN_UNBOUND"
    assert await bound.make().verify(plain)


async def test_needs_a_store(bound: Bound, clock: Clock) -> None:
    config = bound.verifiers.config(dpop=DpopUse.ALLOWED)
    with pytest.raises(IssuerConfigError, match="dpop"):
        TokenVerifier([config], http=bound.verifiers.http, now=clock.now)


async def test_a_nonce_needs_proofs_and_something_that_makes_it(bound: Bound, clock: Clock) -> None:
    with pytest.raises(IssuerConfigError, match="dpop_nonce"):
        bound.verifiers.config(dpop_nonce=True)
    config = bound.verifiers.config(dpop=DpopUse.ALLOWED, dpop_nonce=True)
    with pytest.raises(IssuerConfigError, match="dpop_nonce"):
        TokenVerifier(
            [config], http=bound.verifiers.http, now=clock.now, proofs=bound.verifiers.proofs
        )


async def test_a_proof_repeats_a_nonce_of_this_service_where_its_issuer_s_settings_say_so(
    bound: Bound, clock: Clock
) -> None:
    nonces, token = Nonces(b"k" * 32, clock.now), bound.token()
    wants, does_not = (
        bound.verifiers.make(
            bound.verifiers.config(dpop=DpopUse.ALLOWED, dpop_nonce=wanted), nonces=nonces
        )
        for wanted in (True, False)
    )
    for wrong in ({}, {"nonce": "x"}):
        with pytest.raises(NonceNeeded) as needed:
            await wants.verify_bound(token, bound.shown(token, **wrong))
        assert await does_not.verify_bound(token, bound.shown(token, **wrong))
    assert await wants.verify_bound(token, bound.shown(token, nonce=needed.value.nonce))
