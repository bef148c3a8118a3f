"""Issuer settings that must not be started with, and how scopes are mapped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.bearer import bearer_token
from app.auth.tokens.errors import InsufficientScope, TokenMalformed, TokenMissing
from app.auth.tokens.fetch import discovery_urls
from app.auth.tokens.grants import granted_scopes, groups_of
from app.auth.tokens.issuers import (
    IssuerConfig,
    IssuerConfigError,
    RoleMap,
    RoleUse,
    TokenProfile,
    without_user,
)
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope

ISSUER = "https://id.test/tenant"


def config(**changes: Any) -> IssuerConfig:
    return IssuerConfig(**{"issuer": ISSUER, "audience": "admin", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"issuer": ""},
        {"issuer": "id.test"},
        {"issuer": "http://id.test"},
        {"issuer": "http://localhost.evil.test"},
        {"issuer": "http://127.0.0.1.evil.test"},
        {"issuer": "ftp://127.0.0.1"},
        {"issuer": "https://user@id.test"},
        {"issuer": "https://id.test/?a=b"},
        {"issuer": "https://id.test/#a"},
        {"issuer": "https://id.test:99999"},
        {"issuer": "https://[::1"},
        {"jwks_uri": "http://id.test/jwks"},
        {"jwks_uri": "http://127.0.0.1/jwks"},
        {"jwks_uri": "file:///etc/passwd"},
        {"audience": ""},
        {"audience": None},
        {"inference_audiences": ("",)},
        {"inference_audiences": ("admin",)},
        {"group_claims": ("",)},
        {"group_claims": ("a..b",)},
        {"group_claims": ((),)},
        {"algorithms": ()},
        *(
            {"algorithms": ("RS256", name)}
            for name in ("HS256", "none", "None", "dir", "", "rs256")
        ),
        {"leeway_s": -1},
        {"leeway_s": 301},
        {"scope_claims": ()},
        {"scope_claims": ("",)},
        {"client_id_claims": ("",)},
        {"client_id_claims": ("azp",)},
        {"client_id_claims": (), "profile": TokenProfile.CROSS_CLIENT},
        {"subject_claims": ()},
        {"subject_claims": ("",)},
        {"clients_without_audience": ("console",)},
        {"clients_without_audience": ("",), "profile": TokenProfile.COMPATIBLE},
        {
            "clients_without_audience": ("console",),
            "profile": TokenProfile.COMPATIBLE,
            "audience": None,
            "inference_audiences": ("inference",),
        },
    ],
)
def test_refuses_unsafe_settings(changes: dict[str, Any]) -> None:
    setting, value = next(iter(changes.items()))
    if setting.endswith("_claims") and value == ("",) and setting != "group_claims":
        setting = "claims"
    elif value == ("",) and setting == "inference_audiences":
        setting = "audience"
    with pytest.raises(IssuerConfigError, match=f"^issuer '.*': {setting}: ") as caught:
        config(**changes)
    if setting in ("issuer", "jwks_uri"):
        assert "needs an https URL" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"issuer": "http://127.0.0.1:9000"},
        {"issuer": "http://[::1]:9000", "jwks_uri": "http://localhost:1/jwks"},
        {"issuer": "http://localhost/x"},
        {"audience": None, "inference_audiences": ("inference",)},
        {"profile": TokenProfile.COMPATIBLE, "client_id_claims": ("azp",)},
        {"scope_claims": (), "role_maps": (RoleMap(claim="roles", scopes={}),)},
        {"leeway_s": 0},
        {"leeway_s": 300},
        {"client_id_claims": ("azp",), "profile": TokenProfile.CROSS_CLIENT},
        {"client_id_claims": ("azp", "client_id")},
        {"client_id_claims": (), "profile": TokenProfile.COMPATIBLE},
        {"clients_without_audience": ("console",), "profile": TokenProfile.COMPATIBLE},
        {"jwks_uri": "https://keys.test/jwks?a=b"},
        {"issuer": "https://id.test:65535/a"},
    ],
)
def test_takes_safe_settings(changes: dict[str, Any]) -> None:
    assert config(**changes)


@pytest.mark.parametrize("claim", ["", (), "a..b", ("a", "")])
def test_refuses_empty_role_path(claim: Any) -> None:
    with pytest.raises(IssuerConfigError, match="path is empty"):
        RoleMap(claim=claim, scopes={})


@pytest.mark.parametrize("scopes", [{"": frozenset([Scope.READ])}, {"r": frozenset(["admin:*"])}])
def test_refuses_roles_for_unknown_scopes(scopes: Any) -> None:
    with pytest.raises(IssuerConfigError, match="known scopes"):
        RoleMap(claim="roles", scopes=scopes)


def test_a_role_map_cannot_be_changed_behind_its_back() -> None:
    table = {"r": frozenset([Scope.READ])}
    made = RoleMap(claim="roles", scopes=table)
    table["r"] = frozenset(Scope)
    assert made.scopes == {"r": {Scope.READ}}
    with pytest.raises(TypeError):
        made.scopes["r"] = frozenset(Scope)  # type: ignore[index]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://id.test/a@b", "https://b"),
        ("https://ada:secret@id.test/a", "https://id.test/a"),
        ("https://ada:se//cr@et@id.test/a", "https://id.test/a"),
        ("https://id.test//a", "https://id.test//a"),
        ("ada:secret@id.test", "id.test"),
        ("id.test", "id.test"),
    ],
)
def test_what_may_be_a_secret_is_not_shown(url: str, shown: str) -> None:
    assert without_user(url) == shown


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("issuers", "why"),
    [([], "no token issuer"), ([config(), config()], "'https://id.test/tenant' is .* twice")],
)
async def test_verifier_needs_issuers_and_each_once(issuers: list[IssuerConfig], why: str) -> None:
    async with httpx2.AsyncClient(verify=False) as http:
        with pytest.raises(IssuerConfigError, match=why):
            TokenVerifier(issuers, http=http, now=lambda: datetime.now(UTC))


@pytest.mark.parametrize(
    ("issuer", "openid", "oauth"),
    [
        (
            "https://id.test",
            "https://id.test/.well-known/openid-configuration",
            "https://id.test/.well-known/oauth-authorization-server",
        ),
        (
            "https://id.test/",
            "https://id.test/.well-known/openid-configuration",
            "https://id.test/.well-known/oauth-authorization-server",
        ),
        (
            "https://id.test:8443/a/b",
            "https://id.test:8443/a/b/.well-known/openid-configuration",
            "https://id.test:8443/.well-known/oauth-authorization-server/a/b",
        ),
    ],
)
def test_where_metadata_is_looked_for(issuer: str, openid: str, oauth: str) -> None:
    assert discovery_urls(issuer) == (openid, oauth)


# ---- scopes


def test_scopes_from_string_and_list_and_several_claims() -> None:
    many = config(scope_claims=("scope", "scp"))
    assert granted_scopes(many, {"scope": "admin:read  admin:pause x"}) == {Scope.READ, Scope.PAUSE}
    assert granted_scopes(many, {"scp": ["admin:read", 7, None]}) == {Scope.READ}
    assert granted_scopes(many, {"scope": "admin:read", "scp": "admin:abort"}) == {
        Scope.READ,
        Scope.ABORT,
    }
    assert granted_scopes(config(), {"scp": "admin:read"}) == frozenset()


@pytest.mark.parametrize("text", ["admin:read\tadmin:pause", "admin:read\nx", "admin:read,x", " "])
def test_only_the_space_separates_scopes(text: str) -> None:
    assert granted_scopes(config(), {"scope": text}) == frozenset()


def test_a_prefix_is_taken_off_and_needed() -> None:
    prefixed = config(scope_prefix="gw/")
    scope = "gw/admin:read admin:pause other/admin:abort gw/gw/admin:cache gw/"
    assert granted_scopes(prefixed, {"scope": scope}) == {Scope.READ}


def test_items_of_a_list_are_taken_whole() -> None:
    assert granted_scopes(config(), {"scope": ["admin:read admin:pause"]}) == frozenset()


ROLES = RoleMap(
    claim="realm_access.roles",
    scopes={
        "operator": frozenset([Scope.READ, Scope.PAUSE]),
        "viewer": frozenset([Scope.READ]),
    },
)
DOTTED = RoleMap(claim=("https://gw.test/roles",), scopes={"boss": frozenset([Scope.SHUTDOWN])})


def test_roles_grant_what_they_are_mapped_to_and_nothing_else() -> None:
    roles = config(role_maps=(ROLES, DOTTED))
    assert granted_scopes(roles, {"realm_access": {"roles": ["operator", "other"]}}) == {
        Scope.READ,
        Scope.PAUSE,
    }
    assert granted_scopes(roles, {"https://gw.test/roles": "boss"}) == {Scope.SHUTDOWN}
    assert granted_scopes(roles, {"https://gw.test/roles": "boss x"}) == frozenset()
    assert granted_scopes(roles, {"realm_access": {"roles": ["admin:read"]}}) == frozenset()
    assert granted_scopes(roles, {"realm_access": ["operator"]}) == frozenset()
    assert granted_scopes(roles, {}) == frozenset()


def test_roles_cap_what_the_client_was_granted_unless_told_to_add() -> None:
    claims = {"scope": "admin:read", "realm_access": {"roles": ["operator"]}}
    capped, added = config(role_maps=(ROLES,)), config(role_maps=(ROLES,), role_use=RoleUse.ADD)
    assert granted_scopes(capped, claims) == {Scope.READ}
    assert granted_scopes(added, claims) == {Scope.READ, Scope.PAUSE}
    assert granted_scopes(capped, {**claims, "scope": "openid"}) == frozenset()
    assert granted_scopes(added, {**claims, "scope": "openid"}) == {Scope.READ, Scope.PAUSE}


SCOPEY = st.sampled_from(
    ["*", "admin:*", "admin:", "admin:read", "admin:readx", "ADMIN:READ", "admin:pause", " ", "\t"]
)
TEXT = st.lists(st.one_of(SCOPEY, st.text(max_size=12)), max_size=6).map(" ".join)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(scope=JSON, scp=JSON)
def test_no_input_yields_a_scope_that_is_not_literally_there(scope: Any, scp: Any) -> None:
    both = config(scope_claims=("scope", "scp"))
    literal: set[str] = set()
    for value in (scope, scp):
        if isinstance(value, str):
            literal.update(value.split(" "))
        elif isinstance(value, list):
            literal.update(item for item in value if isinstance(item, str))
    granted = granted_scopes(both, {"scope": scope, "scp": scp})
    assert granted == {known for known in Scope if known.value in literal}


@given(claims=st.dictionaries(st.sampled_from(["scope", "realm_access", "roles"]), JSON))
def test_roles_never_grant_more_than_the_map(claims: dict[str, Any]) -> None:
    roles = config(scope_claims=(), role_maps=(ROLES,))
    assert granted_scopes(roles, claims) <= {Scope.READ, Scope.PAUSE}


# ---- what a caller may do


def principal(*scopes: Scope, audience: AudienceKind = AudienceKind.ADMIN) -> Principal:
    return Principal(
        issuer=ISSUER,
        subject="s",
        client_id="c",
        scopes=frozenset(scopes),
        expires_at=datetime(2027, 1, 1, tzinfo=UTC),
        audience=audience,
    )


def test_all_required_scopes_are_needed() -> None:
    principal(Scope.READ, Scope.PAUSE).require(Scope.READ, Scope.PAUSE)
    principal(Scope.READ).require()
    for who, needed in [
        (principal(Scope.READ), (Scope.READ, Scope.PAUSE)),
        (principal(Scope.WEIGHTS), (Scope.WEIGHTS_UNSAFE,)),
        (principal(), (Scope.READ,)),
        (principal(), ()),
        (principal(Scope.READ, audience=AudienceKind.INFERENCE), (Scope.READ,)),
    ]:
        with pytest.raises(InsufficientScope) as caught:
            who.require(*needed)
        assert caught.value.required == tuple(sorted(needed))


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        ((), "This needs an admin scope."),
        ((Scope.READ,), "This needs the scope admin:read."),
        ((Scope.READ, Scope.PAUSE), "This needs the scopes admin:pause and admin:read."),
    ],
)
def test_says_which_scopes_it_takes(needed: tuple[Scope, ...], said: str) -> None:
    assert InsufficientScope(needed).message == said


# ---- the header


@pytest.mark.parametrize("value", ["Bearer abc.def", "bearer abc.def", "BEARER   abc.def "])
def test_takes_the_token(value: str) -> None:
    assert bearer_token([value]) == "abc.def"


@pytest.mark.parametrize("values", [[], ["Basic abc"], ["DPoP abc"], ["abc"], [""], ["Bearerabc"]])
def test_other_schemes_are_no_token(values: list[str]) -> None:
    with pytest.raises(TokenMissing):
        bearer_token(values)


@pytest.mark.parametrize(
    "values",
    [
        ["Bearer"],
        ["Bearer "],
        ["Bearer a b"],
        ["Bearer a,b"],
        ["Bearer a\tb"],
        ["Bearer é"],
        ["Bearer a, Bearer b"],
        ["Bearer a", "Bearer b"],
        ["Bearer a", "Basic b"],
    ],
)
def test_refuses_what_is_not_one_token(values: list[str]) -> None:
    with pytest.raises(TokenMalformed):
        bearer_token(values)


def test_groups_come_from_the_claims_that_the_settings_name_and_no_others() -> None:
    claims = {
        "groups": ["ops", 7, None, "", "a b"],
        "realm": {"teams": "search"},
        "https://gw.test/groups": ["dotted"],
        "scope": "admin:read",
    }
    named = config(group_claims=("groups", "realm.teams", ("https://gw.test/groups",)))
    assert groups_of(named, claims) == {"ops", "a b", "search", "dotted"}
    assert groups_of(config(), claims) == frozenset()
    assert groups_of(named, {"groups": "a b"}) == {"a b"}
    for odd in ({"groups": {"ops": True}}, {"groups": 7}, {"realm": ["teams"]}, {}):
        assert groups_of(named, odd) == frozenset()
