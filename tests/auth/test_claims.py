"""What is made of claims whose signature, or whose issuer's answer, is known to be good."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.claims import Judged, Voucher, judge, merged
from app.auth.tokens.errors import ClaimInvalid, ClaimMissing, TokenInvalid
from app.auth.tokens.issuers import DpopUse, IssuerConfig, PersonProof, TokenProfile
from tests.auth.made_tokens import ADMIN, INFERENCE, NOW, OMIT, claims

ISSUER = "https://id.test"
SIGNED = Voucher(typ="at+jwt")
ANSWERED = Voucher(signed=False, introspected=True)


def config(**changes: Any) -> IssuerConfig:
    return IssuerConfig(**{"issuer": ISSUER, "audience": ADMIN, **changes})


def judged(settings: IssuerConfig, voucher: Voucher, **changes: Any) -> Judged:
    table = claims(**{"iss": ISSUER, **changes})
    return judge(settings, voucher, table, datetime.fromtimestamp(NOW, UTC))


def refusal(settings: IssuerConfig, voucher: Voucher, **changes: Any) -> str | None:
    try:
        judged(settings, voucher, **changes)
    except TokenInvalid as error:
        return error.reason
    return None


# ---- a token and its issuer's answer about it


@pytest.mark.parametrize("claim", ["iss", "sub", "client_id", "jti", "cnf"])
def test_the_two_have_to_be_about_one_token(claim: str) -> None:
    token, answer = {claim: "one"}, {claim: "other"}
    with pytest.raises(ClaimInvalid) as caught:
        merged(token, answer)
    assert caught.value.claim == claim
    assert merged(token, token) == token
    assert merged(token, {}) == merged({}, token) == token


def test_the_earlier_end_counts_whoever_names_it() -> None:
    assert merged({"exp": 300}, {"exp": 600})["exp"] == 300
    assert merged({"exp": 600}, {"exp": 300})["exp"] == 300
    assert merged({"exp": 600}, {})["exp"] == merged({}, {"exp": 600})["exp"] == 600
    assert "exp" not in merged({}, {})
    for token, answer in (({"exp": "x"}, {}), ({}, {"exp": "x"})):
        with pytest.raises(ClaimInvalid) as caught:
            merged(token, answer)
        assert caught.value.claim == "exp"


# ---- what kind of token it is


@pytest.mark.parametrize("kind", ["Bearer", "bearer", "DPoP", "access_token"])
def test_an_answer_names_a_bound_token_as_it_likes(kind: str) -> None:
    bound = config(dpop=DpopUse.ALLOWED)
    assert refusal(bound, ANSWERED, token_type=kind, cnf={"jkt": "x"}) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Bearer", None),
        ("access_token", None),
        ("DPoP", "TOKEN_TYPE_REFUSED"),
        ("refresh_token", "TOKEN_TYPE_REFUSED"),
    ],
)
def test_an_answer_does_not_call_a_plain_token_a_bound_one(kind: str, reason: str | None) -> None:
    assert refusal(config(dpop=DpopUse.ALLOWED), ANSWERED, token_type=kind) == reason


@pytest.mark.parametrize(
    ("typ", "marks", "reason"),
    [
        ("at+jwt", {}, None),
        ("application/at+jwt", {}, None),
        ("JWT", {"typ": "Bearer"}, None),
        ("JWT", {"token_use": "access"}, None),
        ("JWT", {"scope": ""}, None),
        ("JWT", {"client_id": "console"}, None),
        ("JWT", {"client_id": ADMIN}, "TOKEN_TYPE_REFUSED"),
        ("JWT", {}, "TOKEN_TYPE_REFUSED"),
        (None, {}, "TOKEN_TYPE_REFUSED"),
    ],
)
def test_each_mark_of_an_access_token_is_enough_and_one_is_needed(
    typ: str | None, marks: dict[str, Any], reason: str | None
) -> None:
    compatible = config(profile=TokenProfile.COMPATIBLE)
    bare = {"client_id": OMIT, "scope": OMIT, "jti": OMIT}
    assert refusal(compatible, Voucher(typ=typ), **{**bare, **marks}) == reason


@pytest.mark.parametrize(
    ("typ", "bound", "reason"),
    [
        ("at+jwt", False, None),
        ("Application/AT+JWT", False, None),
        ("Bearer", False, None),
        ("Bearer", True, None),
        ("DPoP", True, None),
        ("DPoP", False, "TOKEN_TYPE_REFUSED"),
        ("ID", False, "TOKEN_TYPE_REFUSED"),
    ],
)
def test_a_type_among_the_claims_has_to_be_an_access_tokens(
    typ: str, bound: bool, reason: str | None
) -> None:
    changes = {"cnf": {"jkt": "x"}} if bound else {}
    assert refusal(config(dpop=DpopUse.ALLOWED), SIGNED, typ=typ, **changes) == reason


@pytest.mark.parametrize(
    ("client", "audience", "reason"),
    [
        ("cli", ["cli", ADMIN], None),
        ("cli", ["cli", INFERENCE], None),
        ("cli", [ADMIN], "TOKEN_TYPE_REFUSED"),
        ("cli", ["cli"], "TOKEN_TYPE_REFUSED"),
        ("cli", ["cli", "else"], "TOKEN_TYPE_REFUSED"),
        (ADMIN, [ADMIN], "TOKEN_TYPE_REFUSED"),
        (ADMIN, ["cli", ADMIN], "TOKEN_TYPE_REFUSED"),
        (INFERENCE, [INFERENCE, ADMIN], "TOKEN_TYPE_REFUSED"),
        (OMIT, ["cli", ADMIN], "TOKEN_TYPE_REFUSED"),
    ],
)
@pytest.mark.parametrize("nonce", [{}, {"nonce": "n"}])
def test_one_client_has_to_have_asked_for_another(
    client: Any, audience: list[str], reason: str | None, nonce: dict[str, str]
) -> None:
    cross = config(profile=TokenProfile.CROSS_CLIENT, inference_audiences=(INFERENCE,))
    found = refusal(cross, Voucher(typ="JWT"), client_id=client, aud=audience, **nonce)
    assert found == reason


# ---- for whom it was made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_use": "access"}, None),
        ({"token_use": "access_token"}, None),
        ({}, "TOKEN_CLAIM_MISSING"),
        ({"token_use": "access", "client_id": "other"}, "TOKEN_AUDIENCE_FOREIGN"),
        ({"token_use": "access", "aud": "else"}, "TOKEN_AUDIENCE_FOREIGN"),
        ({"token_use": "access", "aud": None}, "TOKEN_CLAIM_INVALID"),
        ({"token_use": "id"}, "TOKEN_TYPE_REFUSED"),
    ],
)
def test_named_clients_need_no_audience_where_the_token_says_what_it_is(
    changes: dict[str, Any], reason: str | None
) -> None:
    named = config(profile=TokenProfile.COMPATIBLE, clients_without_audience=("console",))
    table = {"aud": OMIT, **changes}
    assert refusal(named, Voucher(), **table) == reason
    if reason is None:
        assert judged(named, Voucher(), **table).principal.audience is AudienceKind.ADMIN
    if reason == "TOKEN_CLAIM_MISSING":
        with pytest.raises(ClaimMissing) as caught:
            judged(named, Voucher(), **table)
        assert caught.value.claim == "aud"


# ---- who it is


@pytest.mark.parametrize("name", ["x", "x" * 255])
def test_the_shortest_and_the_longest_name(name: str) -> None:
    who = judged(config(), SIGNED, sub=name, client_id=name[:-1] + "y", jti=name).principal
    assert (who.subject, who.token_id) == (name, name)


def test_groups_are_taken_over() -> None:
    who = judged(config(group_claims=("groups",)), SIGNED, groups=["ops"]).principal
    assert who.groups == {"ops"}


COMPATIBLE, SUBJECT = TokenProfile.COMPATIBLE, PersonProof.SUBJECT


@pytest.mark.parametrize(
    ("settings", "changes", "kind"),
    [
        ({}, {}, PrincipalKind.PERSON),
        ({"persons": PersonProof.CLAIMS}, {}, PrincipalKind.CLIENT),
        ({"persons": PersonProof.CLAIMS}, {"amr": ["pwd"]}, PrincipalKind.PERSON),
        ({"profile": COMPATIBLE, "persons": SUBJECT}, {}, PrincipalKind.PERSON),
        ({}, {"sub": "console@clients"}, PrincipalKind.CLIENT),
        ({}, {"gty": "client-credentials"}, PrincipalKind.CLIENT),
        ({}, {"gty": "password"}, PrincipalKind.PERSON),
        ({}, {"idtyp": "app"}, PrincipalKind.CLIENT),
        ({}, {"idtyp": "user"}, PrincipalKind.PERSON),
        ({}, {"preferred_username": "service-account-x"}, PrincipalKind.CLIENT),
        ({}, {"preferred_username": "x-service-account-"}, PrincipalKind.PERSON),
        ({}, {"preferred_username": 7}, PrincipalKind.PERSON),
    ],
)
def test_what_speaks_for_a_person_and_what_for_a_program(
    settings: dict[str, Any], changes: dict[str, Any], kind: PrincipalKind
) -> None:
    assert judged(config(**settings), SIGNED, **changes).principal.kind is kind
