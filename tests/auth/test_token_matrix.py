"""Every way a token can be wrong, and the ways it is right, over keys fetched by real HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.errors import ClaimInvalid, ClaimMissing, IssuerUnavailable, TokenInvalid
from app.auth.tokens.issuers import TokenProfile
from app.auth.tokens.verifier import MAX_TOKEN_CHARS
from app.devidp.issuer import DevIssuer
from app.domain.scopes import Scope
from tests.auth.made_tokens import (
    ADMIN,
    EC,
    ED,
    INFERENCE,
    NOW,
    OMIT,
    RSA,
    STRANGER,
    Make,
    b64,
    changed,
    claims,
    doubled_member,
    headed,
    hmac_with_public_pem,
    signed,
    swapped_signature,
    tampered,
    unsigned,
    with_algorithm,
    with_number,
)

pytestmark = pytest.mark.anyio


REFUSED: dict[str, tuple[Make, str]] = {
    # not a signed JWT at all
    "empty": (lambda iss: "", "TOKEN_MALFORMED"),
    "garbage": (lambda iss: "garbage", "TOKEN_MALFORMED"),
    "two-segments": (lambda iss: "a.b", "TOKEN_MALFORMED"),
    "four-segments": (lambda iss: signed(claims(iss=iss)) + ".x", "TOKEN_MALFORMED"),
    "five-segments-like-jwe": (lambda iss: "a.b.c.d.e", "TOKEN_MALFORMED"),
    "padding": (lambda iss: signed(claims(iss=iss)) + "=", "TOKEN_MALFORMED"),
    "newline": (lambda iss: signed(claims(iss=iss)) + "\n", "TOKEN_MALFORMED"),
    "space-inside": (lambda iss: signed(claims(iss=iss)).replace(".", " .", 1), "TOKEN_MALFORMED"),
    "not-ascii": (lambda iss: signed(claims(iss=iss)) + "é", "TOKEN_MALFORMED"),
    "lone-surrogate": (lambda iss: "\ud800.a.b", "TOKEN_MALFORMED"),
    "huge": (lambda iss: signed(claims(iss=iss, pad="x" * 17_000)), "TOKEN_TOO_LARGE"),
    "huge-garbage": (lambda iss: "x" * 1_000_000, "TOKEN_TOO_LARGE"),
    "header-not-json": (lambda iss: f"{b64(b'nope')}.{b64(b'{}')}.c2ln", "TOKEN_MALFORMED"),
    "header-list": (lambda iss: unsigned([], b"{}", b"sig"), "TOKEN_MALFORMED"),
    "header-without-alg": (lambda iss: unsigned({}, b"{}", b"sig"), "TOKEN_MALFORMED"),
    "header-alg-number": (lambda iss: unsigned({"alg": 1}, b"{}", b"sig"), "TOKEN_MALFORMED"),
    "header-kid-number": (
        lambda iss: unsigned({"alg": "ES256", "kid": 1}, b"{}", b"sig"),
        "TOKEN_MALFORMED",
    ),
    "payload-not-json": (lambda iss: signed(b"not json"), "TOKEN_MALFORMED"),
    "payload-list": (lambda iss: signed(b"[1]"), "TOKEN_MALFORMED"),
    "payload-null": (lambda iss: signed(b"null"), "TOKEN_MALFORMED"),
    "payload-not-utf8": (lambda iss: signed(b'{"iss": "\xff"}'), "TOKEN_MALFORMED"),
    "payload-nan": (lambda iss: signed(b'{"exp": NaN}'), "TOKEN_MALFORMED"),
    "payload-deep": (lambda iss: signed(b'{"a":' + b"[" * 5000), "TOKEN_MALFORMED"),
    "payload-member-twice": (lambda iss: signed(doubled_member(iss)), "TOKEN_MALFORMED"),
    "payload-huge-integer": (
        lambda iss: signed(b'{"exp":' + b"9" * 5000 + b"}"),
        "TOKEN_MALFORMED",
    ),
    # critical extensions: none is understood, so all are refused
    "crit-known-word": (headed(crit=["exp"], exp=1), "TOKEN_MALFORMED"),
    "crit-unknown": (headed(crit=["x"], x=1), "TOKEN_MALFORMED"),
    "crit-empty": (headed(crit=[]), "TOKEN_MALFORMED"),
    "b64-false": (
        lambda iss: unsigned({"alg": "ES256", "b64": False, "crit": ["b64"]}, b"{}", b"sig"),
        "TOKEN_MALFORMED",
    ),
    "b64-alone": (
        lambda iss: unsigned({"alg": "ES256", "b64": True}, b"{}", b"sig"),
        "TOKEN_MALFORMED",
    ),
    # issuer
    "iss-missing": (changed(iss=OMIT), "TOKEN_CLAIM_MISSING"),
    "iss-foreign": (changed(iss="https://other.test"), "TOKEN_ISSUER_FOREIGN"),
    "iss-slash-more": (lambda iss: changed(iss=iss + "/")(iss), "TOKEN_ISSUER_FOREIGN"),
    "iss-other-case": (lambda iss: changed(iss=iss.upper())(iss), "TOKEN_ISSUER_FOREIGN"),
    "iss-empty": (changed(iss=""), "TOKEN_ISSUER_FOREIGN"),
    "iss-list": (lambda iss: changed(iss=[iss])(iss), "TOKEN_CLAIM_INVALID"),
    "iss-null": (changed(iss=None), "TOKEN_CLAIM_INVALID"),
    # algorithm and key
    **{
        f"alg-{name}": (
            with_algorithm(name),
            "TOKEN_ALGORITHM_REFUSED",
        )
        for name in ("none", "None", "NONE", "nOnE", "", "HS256", "HS512", "es256", "ES256K")
    },
    "alg-none-without-signature": (
        lambda iss: unsigned({"alg": "none"}, json.dumps(claims(iss=iss)).encode(), b""),
        "TOKEN_MALFORMED",
    ),
    "hs256-with-rsa-public-pem": (
        lambda iss: hmac_with_public_pem(iss, RSA),
        "TOKEN_ALGORITHM_REFUSED",
    ),
    "hs256-with-ec-public-pem": (
        lambda iss: hmac_with_public_pem(iss, EC),
        "TOKEN_ALGORITHM_REFUSED",
    ),
    "ps256-not-configured": (headed(alg="PS256", key=RSA), "TOKEN_ALGORITHM_REFUSED"),
    "eddsa-not-configured": (headed(alg="EdDSA"), "TOKEN_ALGORITHM_REFUSED"),
    "ed25519-not-configured": (headed(alg="Ed25519"), "TOKEN_ALGORITHM_REFUSED"),
    "key-unknown": (headed(key=STRANGER), "TOKEN_KEY_UNKNOWN"),
    "key-unknown-no-kid": (headed(key=STRANGER, kid=OMIT), "TOKEN_KEY_UNKNOWN"),
    "key-borrowed-kid": (headed(key=STRANGER, kid="table-ec"), "TOKEN_SIGNATURE_INVALID"),
    "key-of-other-type": (headed(kid="table-rsa"), "TOKEN_KEY_UNKNOWN"),
    "key-brought-along": (
        headed(key=STRANGER, jwk=STRANGER.as_dict(private=False)),
        "TOKEN_KEY_UNKNOWN",
    ),
    "key-address-brought-along": (
        headed(key=STRANGER, jku="https://evil.test/jwks"),
        "TOKEN_KEY_UNKNOWN",
    ),
    "kid-as-path": (headed(key=STRANGER, kid="../../dev/null"), "TOKEN_KEY_UNKNOWN"),
    "payload-tampered": (tampered, "TOKEN_SIGNATURE_INVALID"),
    "signature-swapped": (swapped_signature, "TOKEN_SIGNATURE_INVALID"),
    "signature-cut": (lambda iss: signed(claims(iss=iss))[:-4], "TOKEN_SIGNATURE_INVALID"),
    # type (strict profile)
    "typ-missing": (headed(typ=OMIT), "TOKEN_TYPE_REFUSED"),
    "typ-jwt": (headed(typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "typ-logout": (headed(typ="logout+jwt"), "TOKEN_TYPE_REFUSED"),
    "typ-dpop": (headed(typ="dpop+jwt"), "TOKEN_TYPE_REFUSED"),
    "typ-number": (
        lambda iss: unsigned({"alg": "ES256", "typ": 1}, b"{}", b"sig"),
        "TOKEN_MALFORMED",
    ),
    "typ-near": (headed(typ="at+jwt "), "TOKEN_TYPE_REFUSED"),
    "nonce": (changed(nonce="n"), "TOKEN_TYPE_REFUSED"),
    "at-hash": (changed(at_hash="h"), "TOKEN_TYPE_REFUSED"),
    # bound tokens are no bearer tokens
    "cnf-dpop": (changed(cnf={"jkt": "abc"}), "TOKEN_BOUND"),
    "cnf-mtls": (changed(cnf={"x5t#S256": "abc"}), "TOKEN_BOUND"),
    "cnf-null": (changed(cnf=None), "TOKEN_BOUND"),
    # audience: string and list alike
    "aud-missing": (changed(aud=OMIT), "TOKEN_CLAIM_MISSING"),
    "aud-null": (changed(aud=None), "TOKEN_CLAIM_INVALID"),
    "aud-number": (changed(aud=1), "TOKEN_CLAIM_INVALID"),
    "aud-object": (changed(aud={ADMIN: True}), "TOKEN_CLAIM_INVALID"),
    "aud-empty-list": (changed(aud=[]), "TOKEN_CLAIM_INVALID"),
    "aud-empty-string": (changed(aud=""), "TOKEN_CLAIM_INVALID"),
    "aud-list-with-number": (changed(aud=[ADMIN, 1]), "TOKEN_CLAIM_INVALID"),
    "aud-nested-list": (changed(aud=[[ADMIN]]), "TOKEN_CLAIM_INVALID"),
    "aud-foreign": (changed(aud="https://else.test"), "TOKEN_AUDIENCE_FOREIGN"),
    "aud-foreign-list": (changed(aud=["https://else.test"]), "TOKEN_AUDIENCE_FOREIGN"),
    "aud-longer": (changed(aud=ADMIN + "/more"), "TOKEN_AUDIENCE_FOREIGN"),
    "aud-shorter": (changed(aud=ADMIN[:-1]), "TOKEN_AUDIENCE_FOREIGN"),
    "aud-upper": (changed(aud=ADMIN.upper()), "TOKEN_AUDIENCE_FOREIGN"),
    "aud-spaced-list": (changed(aud=f"{ADMIN} {INFERENCE}"), "TOKEN_AUDIENCE_FOREIGN"),
    # presence and value of the rest
    **{
        f"{name}-missing": (changed(**{name: OMIT}), "TOKEN_CLAIM_MISSING")
        for name in ("exp", "sub", "client_id", "iat", "jti")
    },
    **{
        f"{name}-{kind}": (changed(**{name: value}), "TOKEN_CLAIM_INVALID")
        for name in ("exp", "iat", "nbf")
        for kind, value in {
            "null": None,
            "text": str(NOW + 600),
            "true": True,
            "list": [NOW + 600],
            "infinite": 10**400,
        }.items()
    },
    **{
        f"{name}-{text}": (
            with_number(name, text),
            "TOKEN_CLAIM_INVALID",
        )
        for name in ("exp", "nbf", "iat")
        for text in ("1e999", "-1e999")
    },
    "exp-beyond-calendar": (changed(exp=10**14), "TOKEN_CLAIM_INVALID"),
    "exp-past": (changed(exp=NOW - 3600), "TOKEN_EXPIRED"),
    "exp-zero": (changed(exp=0), "TOKEN_EXPIRED"),
    "exp-negative": (changed(exp=-1), "TOKEN_EXPIRED"),
    "nbf-future": (changed(nbf=NOW + 3600), "TOKEN_NOT_YET_VALID"),
    "iat-future": (changed(iat=NOW + 3600), "TOKEN_NOT_YET_VALID"),
    **{
        f"{name}-{kind}": (changed(**{name: value}), "TOKEN_CLAIM_INVALID")
        for name in ("sub", "client_id", "jti")
        for kind, value in {
            "null": None,
            "empty": "",
            "number": 7,
            "list": ["ops"],
            "long": "x" * 256,
            "nul": "ops\0",
            "newline": "ops\nadmin",
            "surrogate": "\ud800",
        }.items()
    },
}


@pytest.fixture(autouse=True)
def published(origin: Any, issuer: DevIssuer) -> None:
    keys = [key.as_dict(private=False) for key in (EC, RSA, ED)]
    answer = {"keys": issuer.jwks()["keys"] + keys}
    origin.say("/jwks", json.dumps(answer).encode())


@pytest.mark.parametrize("case", REFUSED)
async def test_refuses(case: str, verifiers: Any) -> None:
    make, reason = REFUSED[case]
    verifier = verifiers.make()
    token = make(verifiers.issuer.issuer)
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    assert caught.value.reason == reason
    if isinstance(caught.value, ClaimMissing | ClaimInvalid):
        assert caught.value.claim == case.partition("-")[0]
    # Nor does the message give back anything of what was sent.
    assert "ops" not in caught.value.message
    with pytest.raises(TokenInvalid):
        await verifier.verify(token)  # a refusal is not remembered as anything better


ACCEPTED: dict[str, Make] = {
    "plain": changed(),
    "from-rsa": headed(alg="RS256"),
    "typ-long": headed(typ="application/at+jwt"),
    "typ-other-case": headed(typ="AT+JWT"),
    "unknown-header-parameter": headed(x="y"),
    "aud-list": changed(aud=[ADMIN]),
    "aud-list-of-many": changed(aud=["https://else.test", ADMIN]),
    "aud-both": changed(aud=[INFERENCE, ADMIN]),
    "exp-fraction": changed(exp=NOW + 600.5),
    "nbf-past": changed(nbf=NOW - 10),
    "extra-claims": changed(roles=["x"], groups=[], email="a@b.test"),
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_accepts(case: str, verifiers: Any) -> None:
    who = await verifiers.make().verify(ACCEPTED[case](verifiers.issuer.issuer))
    assert (who.issuer, who.subject, who.client_id) == (verifiers.issuer.issuer, "ops", "console")
    assert who.scopes == {Scope.READ}
    assert who.audience is AudienceKind.ADMIN
    assert who.kind is PrincipalKind.PERSON
    assert who.token_id == "t-1"
    assert int(who.expires_at.timestamp()) == NOW + 600
    assert who.expires_at.tzinfo is not None


@pytest.mark.parametrize(
    ("chars", "taken"), [(MAX_TOKEN_CHARS, True), (MAX_TOKEN_CHARS + 1, False)]
)
async def test_the_longest_token_that_is_looked_at(chars: int, taken: bool, verifiers: Any) -> None:
    iss = verifiers.issuer.issuer
    about = (chars - len(signed(claims(iss=iss, pad="")))) // 4 * 3
    # Base64 has no text of 4n + 1 characters, so the header may have to take up what is over.
    tries = (
        signed(claims(iss=iss, pad="x" * pad), x="x" * more)
        for more in range(4)
        for pad in range(about - 8, about + 4)
    )
    token = next(token for token in tries if len(token) == chars)
    if taken:
        assert await verifiers.make().verify(token)
        return
    with pytest.raises(TokenInvalid) as caught:
        await verifiers.make().verify(token)
    assert caught.value.reason == "TOKEN_TOO_LARGE"


@pytest.mark.parametrize(
    ("alg", "allowed"), [("PS256", "PS256"), ("EdDSA", "EdDSA"), ("Ed25519", "Ed25519")]
)
async def test_accepts_other_algorithms_when_configured(
    alg: str, allowed: str, verifiers: Any
) -> None:
    verifier = verifiers.make(verifiers.config(algorithms=(allowed,)))
    assert await verifier.verify(signed(claims(iss=verifiers.issuer.issuer), alg=alg))
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(signed(claims(iss=verifiers.issuer.issuer)))
    assert caught.value.reason == "TOKEN_ALGORITHM_REFUSED"


@pytest.mark.parametrize("aud", [INFERENCE, [INFERENCE], ["https://else.test", INFERENCE]])
@pytest.mark.parametrize("scope", ["", "admin:read admin:shutdown", "inference:generate"])
async def test_inference_tokens_are_genuine_and_may_nothing(
    aud: Any, scope: str, verifiers: Any
) -> None:
    token = signed(claims(iss=verifiers.issuer.issuer, aud=aud, scope=scope))
    who = await verifiers.make().verify(token)
    assert who.audience is AudienceKind.INFERENCE
    assert who.scopes == frozenset()
    assert not who.may_administer


@pytest.mark.parametrize(
    "scope", [OMIT, "", "*", "admin:*", "admin", "admin:READ", "inference:generate", None, 7, {}]
)
async def test_admin_audience_without_a_known_scope_may_nothing(scope: Any, verifiers: Any) -> None:
    token = signed(claims(iss=verifiers.issuer.issuer, scope=scope))
    who = await verifiers.make().verify(token)
    assert who.audience is AudienceKind.ADMIN
    assert who.scopes == frozenset()
    assert not who.may_administer


async def test_listener_for_inference_only_refuses_admin_tokens(verifiers: Any) -> None:
    verifier = verifiers.make(verifiers.config(audience=None))
    iss = verifiers.issuer.issuer
    assert (await verifier.verify(signed(claims(iss=iss, aud=INFERENCE)))).scopes == frozenset()
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(signed(claims(iss=iss, aud=ADMIN)))
    assert caught.value.reason == "TOKEN_AUDIENCE_FOREIGN"


@pytest.mark.parametrize("leeway_s", [0, 30])
@pytest.mark.parametrize(
    ("claim", "offset", "good"),
    # exp: good while now < exp + leeway; nbf, iat: from the claim minus the leeway on
    [("exp", -1, False), ("exp", 0, False), ("exp", 1, True)]
    + [
        (claim, offset, good)
        for claim in ("nbf", "iat")
        for offset, good in [(-1, True), (0, True), (1, False)]
    ],
)
async def test_times_to_the_second(
    leeway_s: int, claim: str, offset: int, good: bool, verifiers: Any
) -> None:
    verifier = verifiers.make(verifiers.config(leeway_s=leeway_s))
    edge = NOW - leeway_s if claim == "exp" else NOW + leeway_s
    token = signed(claims(**{"iss": verifiers.issuer.issuer, claim: edge + offset}))
    if good:
        assert await verifier.verify(token)
        return
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    assert caught.value.reason == ("TOKEN_EXPIRED" if claim == "exp" else "TOKEN_NOT_YET_VALID")


COMPATIBLE: dict[str, tuple[Make, str | None]] = {
    # access tokens as other issuers write them
    "keycloak": (
        lambda iss: signed(
            claims(iss=iss, client_id=OMIT, azp="console", typ="Bearer", aud=["account", ADMIN]),
            typ="JWT",
        ),
        None,
    ),
    "okta": (
        lambda iss: signed(
            claims(iss=iss, client_id=OMIT, cid="console", scope=OMIT, scp=["admin:read"]), typ=OMIT
        ),
        None,
    ),
    "entra": (
        lambda iss: signed(
            claims(iss=iss, client_id=OMIT, azp="console", jti=OMIT, scope=OMIT, scp="admin:read"),
            typ="JWT",
        ),
        None,
    ),
    "auth0": (
        lambda iss: signed(
            claims(
                iss=iss, client_id=OMIT, azp="console", jti=OMIT, aud=[ADMIN, f"{iss}/userinfo"]
            ),
            typ="JWT",
        ),
        None,
    ),
    "cognito-with-resource": (
        lambda iss: signed(claims(iss=iss, token_use="access"), typ=OMIT),
        None,
    ),
    "rfc9068-too": (changed(), None),
    # and what is not one
    "id-nonce": (lambda iss: signed(claims(iss=iss, nonce="n"), typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "id-at-hash": (
        lambda iss: signed(claims(iss=iss, at_hash="h"), typ="JWT"),
        "TOKEN_TYPE_REFUSED",
    ),
    "id-c-hash": (lambda iss: signed(claims(iss=iss, c_hash="h"), typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "id-s-hash": (lambda iss: signed(claims(iss=iss, s_hash="h"), typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "keycloak-id": (lambda iss: signed(claims(iss=iss, typ="ID"), typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "keycloak-refresh": (
        lambda iss: signed(claims(iss=iss, typ="Refresh"), typ="JWT"),
        "TOKEN_TYPE_REFUSED",
    ),
    "payload-typ-odd": (
        lambda iss: signed(claims(iss=iss, typ=["Bearer"]), typ="JWT"),
        "TOKEN_TYPE_REFUSED",
    ),
    "payload-typ-null": (
        lambda iss: signed(claims(iss=iss, typ=None), typ="JWT"),
        "TOKEN_TYPE_REFUSED",
    ),
    "cognito-id": (
        lambda iss: signed(claims(iss=iss, token_use="id"), typ=OMIT),
        "TOKEN_TYPE_REFUSED",
    ),
    "logout": (lambda iss: signed(claims(iss=iss, events={}), typ="JWT"), "TOKEN_TYPE_REFUSED"),
    "typ-logout": (headed(typ="logout+jwt"), "TOKEN_TYPE_REFUSED"),
    "typ-security-event": (headed(typ="secevent+jwt"), "TOKEN_TYPE_REFUSED"),
    # an ID token of a login without nonce: only that it lacks an access token's marks tells
    "bare-id-token": (
        lambda iss: signed(claims(iss=iss, client_id=OMIT, scope=OMIT, jti=OMIT), typ="JWT"),
        "TOKEN_TYPE_REFUSED",
    ),
    "bare-id-token-with-roles": (
        lambda iss: signed(
            claims(iss=iss, client_id=OMIT, azp=ADMIN, scope=OMIT, roles=["admin"]), typ="JWT"
        ),
        "TOKEN_TYPE_REFUSED",
    ),
    "cnf": (lambda iss: signed(claims(iss=iss, cnf={"jkt": "k"}), typ="JWT"), "TOKEN_BOUND"),
    "no-exp": (lambda iss: signed(claims(iss=iss, exp=OMIT), typ="JWT"), "TOKEN_CLAIM_MISSING"),
    "no-aud": (lambda iss: signed(claims(iss=iss, aud=OMIT), typ="JWT"), "TOKEN_CLAIM_MISSING"),
    "no-sub": (lambda iss: signed(claims(iss=iss, sub=OMIT), typ="JWT"), "TOKEN_CLAIM_MISSING"),
}


@pytest.mark.parametrize("case", COMPATIBLE)
async def test_compatible_profile(case: str, verifiers: Any) -> None:
    make, reason = COMPATIBLE[case]
    verifier = verifiers.make(
        verifiers.config(
            profile=TokenProfile.COMPATIBLE,
            scope_claims=("scope", "scp"),
            client_id_claims=("client_id", "azp", "cid"),
        )
    )
    token = make(verifiers.issuer.issuer)
    if reason is None:
        who = await verifier.verify(token)
        assert who.scopes == {Scope.READ}
        assert who.client_id == "console"
        return
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    assert caught.value.reason == reason


PEOPLE: dict[str, tuple[TokenProfile, dict[str, Any], PrincipalKind]] = {
    "rfc9068-user": (TokenProfile.STRICT, {}, PrincipalKind.PERSON),
    "rfc9068-client": (TokenProfile.STRICT, {"sub": "console"}, PrincipalKind.CLIENT),
    "okta-client": (TokenProfile.COMPATIBLE, {"sub": "console", "scp": []}, PrincipalKind.CLIENT),
    "auth0-machine": (TokenProfile.COMPATIBLE, {"sub": "console@clients"}, PrincipalKind.CLIENT),
    "auth0-machine-gty": (
        TokenProfile.COMPATIBLE,
        {"gty": "client-credentials", "auth_time": 1},
        PrincipalKind.CLIENT,
    ),
    "entra-app": (TokenProfile.COMPATIBLE, {"idtyp": "app", "sid": "x"}, PrincipalKind.CLIENT),
    "keycloak-service-account": (
        TokenProfile.COMPATIBLE,
        {"preferred_username": "service-account-x", "sid": "x"},
        PrincipalKind.CLIENT,
    ),
    "keycloak-user": (TokenProfile.COMPATIBLE, {"sid": "x"}, PrincipalKind.PERSON),
    "nobody-says": (TokenProfile.COMPATIBLE, {}, PrincipalKind.CLIENT),
    "no-client": (TokenProfile.COMPATIBLE, {"client_id": OMIT, "sid": "x"}, PrincipalKind.CLIENT),
}


@pytest.mark.parametrize("case", PEOPLE)
async def test_person_or_program(case: str, verifiers: Any) -> None:
    profile, overrides, kind = PEOPLE[case]
    verifier = verifiers.make(verifiers.config(profile=profile))
    token = signed(claims(**{"iss": verifiers.issuer.issuer, **overrides}))
    assert (await verifier.verify(token)).kind is kind


async def test_two_issuers_do_not_vouch_for_each_other(verifiers: Any) -> None:
    """A key of one trusted issuer, used to sign in the name of another."""
    other = "https://other.test"
    verifier = verifiers.make(
        verifiers.config(),
        verifiers.config(issuer=other, jwks_uri="https://127.0.0.1:1/jwks"),
    )
    with pytest.raises(IssuerUnavailable):  # and not: signed by a key we know
        await verifier.verify(signed(claims(iss=other)))
