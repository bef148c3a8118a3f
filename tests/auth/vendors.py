"""Tokens in the shapes that identity providers document, one person and one program for each.

Made by hand from the providers' documentation: none of these products runs here. What they write
is the table; the settings that fit are those of docs/authorization.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.auth.principal import AudienceKind, PrincipalKind
from app.domain.scopes import Scope
from tests.auth.made_tokens import NOW

PERSON, PROGRAM = PrincipalKind.PERSON, PrincipalKind.CLIENT


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A token and what has to come of it: a caller, or a reason. `settings`: the heading of the
    configuration in the documentation. ``...`` as a claim leaves it out."""

    settings: str
    claims: Mapping[str, Any]
    typ: str | None = "JWT"
    scopes: frozenset[Scope] = frozenset()
    kind: PrincipalKind = PROGRAM
    client: str = ""
    subject: str = ""
    audience: AudienceKind = AudienceKind.ADMIN
    refused: str | None = None


def scopes(*names: Scope) -> frozenset[Scope]:
    return frozenset(names)


TIMES = {"iat": NOW - 60, "exp": NOW + 600}
READ_PAUSE = scopes(Scope.READ, Scope.PAUSE)

KEYCLOAK = {
    **TIMES,
    "iss": "https://keycloak.example/realms/ops",
    "jti": "onrtro:5c1d3a2e",
    "aud": ["chadburn", "account"],
    "sub": "b7a4c9e2-3c0f-4b5e-9c1a-5f0e2d7a1b3c",
    "typ": "Bearer",
    "azp": "console",
    "sid": "0e4f1c52",
    "acr": "1",
    "allowed-origins": ["https://console.example"],
    "realm_access": {"roles": ["default-roles-ops", "offline_access", "admin:shutdown"]},
    "resource_access": {
        "chadburn": {"roles": ["operator"]},
        "account": {"roles": ["manage-account", "reader"]},
    },
    "scope": "openid profile email admin:read admin:pause",
    "email_verified": True,
    "preferred_username": "nadia",
}
KEYCLOAK_MACHINE = {
    **KEYCLOAK,
    "sub": "1f7e6d5c-aaaa-bbbb-cccc-0123456789ab",
    "azp": "pipeline",
    "client_id": "pipeline",
    "sid": ...,
    "preferred_username": "service-account-pipeline",
    "clientHost": "10.0.0.7",
    "clientAddress": "10.0.0.7",
    "resource_access": {"chadburn": {"roles": ["reader"]}},
}
BY_SCOPE, BY_ROLE = "Keycloak, by client scopes", "Keycloak, by client roles"

OKTA = {
    **TIMES,
    "ver": 1,
    "jti": "AT.0mP4JKAZX1iACIT4vbEDF7LpvDVjxypPMf0D7uX39RE",
    "iss": "https://ops.okta.example/oauth2/default",
    "aud": "api://chadburn",
    "cid": "0oaconsole",
    "uid": "00unadia",
    "scp": ["openid", "admin:read", "admin:pause"],
    "auth_time": NOW - 120,
    "sub": "nadia@ops.example",
    "groups": ["Everyone", "admin:shutdown"],
}
OKTA_MACHINE = {
    **OKTA,
    "cid": "0oapipeline",
    "sub": "0oapipeline",
    "uid": ...,
    "auth_time": ...,
    "groups": ...,
    "scp": ["admin:read"],
}

AUTH0 = {
    **TIMES,
    "iss": "https://ops.eu.auth0.example/",
    "sub": "auth0|5f7c8ec7c33c6c004bbafe82",
    "aud": ["https://chadburn.example/admin", "https://ops.eu.auth0.example/userinfo"],
    "azp": "consoleClientId",
    "scope": "openid profile admin:read admin:pause",
    "permissions": ["admin:read", "admin:pause", "admin:shutdown"],
}
AUTH0_MACHINE = {
    **AUTH0,
    "sub": "pipelineClientId@clients",
    "azp": "pipelineClientId",
    "aud": "https://chadburn.example/admin",
    "gty": "client-credentials",
    "scope": "admin:read",
    "permissions": ["admin:read"],
}

TENANT = "11111111-2222-3333-4444-555555555555"
ENTRA_V2 = {
    **TIMES,
    "nbf": NOW - 60,
    "aud": "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    "iss": f"https://login.microsoftonline.com/{TENANT}/v2.0",
    "aio": "AXQAi",
    "azp": "99999999-0000-1111-2222-333333333333",
    "azpacr": "0",
    "name": "Nadia",
    "oid": "77777777-8888-9999-0000-111111111111",
    "preferred_username": "nadia@ops.example",
    "rh": "0.AXYA",
    "roles": ["Chadburn.Operator"],
    "scp": "admin:read admin:pause admin:shutdown",
    "sub": "pairwise-AAAA",
    "tid": TENANT,
    "uti": "4LS3uti",
    "ver": "2.0",
}
ENTRA_V2_MACHINE = {
    **ENTRA_V2,
    "azp": "33333333-3333-3333-3333-333333333333",
    "azpacr": "1",
    "oid": "44444444-4444-4444-4444-444444444444",
    "sub": "44444444-4444-4444-4444-444444444444",
    "roles": ["Chadburn.Reader"],
    "scp": ...,
    "name": ...,
    "preferred_username": ...,
}
ENTRA_V1 = {
    **ENTRA_V2,
    "aud": "api://chadburn",
    "iss": f"https://sts.windows.net/{TENANT}/",
    "azp": ...,
    "azpacr": ...,
    "appid": "99999999-0000-1111-2222-333333333333",
    "appidacr": "0",
    "amr": ["pwd", "mfa"],
    "unique_name": "nadia@ops.example",
    "upn": "nadia@ops.example",
    "ver": "1.0",
}
ENTRA_V1_MACHINE = {
    **ENTRA_V2_MACHINE,
    "aud": "api://chadburn",
    "iss": f"https://sts.windows.net/{TENANT}/",
    "azp": ...,
    "azpacr": ...,
    "appid": "33333333-3333-3333-3333-333333333333",
    "appidacr": "1",
    "idtyp": "app",
    "ver": "1.0",
}

COGNITO = {
    **TIMES,
    "sub": "c2a5b4d4-1111-2222-3333-444455556666",
    "cognito:groups": ["ops", "admin:shutdown"],
    "iss": "https://cognito-idp.eu-central-1.amazonaws.com/eu-central-1_Example",
    "version": 2,
    "client_id": "4console",
    "origin_jti": "o-1",
    "event_id": "e-1",
    "token_use": "access",
    "scope": "openid chadburn/admin:read chadburn/admin:pause other/admin:abort admin:shutdown",
    "auth_time": NOW - 60,
    "jti": "j-1",
    "username": "nadia",
}
COGNITO_MACHINE = {
    **COGNITO,
    "sub": "4pipeline",
    "client_id": "4pipeline",
    "username": ...,
    "cognito:groups": ...,
    "origin_jti": ...,
    "event_id": ...,
    "scope": "chadburn/admin:read",
}

DEX = {
    **TIMES,
    "iss": "https://dex.example",
    "sub": "CgVuYWRpYRIEbGRhcA",
    "aud": ["chadburn", "chadburn-cli"],
    "azp": "chadburn-cli",
    "at_hash": "Uk8nNW0CVh0vdbLqbgbEgQ",
    "nonce": "n",
    "email": "nadia@ops.example",
    "email_verified": True,
    "groups": ["ops:operators", "admin:shutdown"],
    "name": "Nadia",
}

PLAIN = {
    **TIMES,
    "iss": "https://id.example",
    "sub": "nadia",
    "aud": "https://chadburn.example/admin",
    "client_id": "console",
    "scope": "admin:read admin:pause",
    "jti": "t-1",
    "auth_time": NOW - 60,
}


@dataclass(frozen=True, kw_only=True)
class _Of:
    """Shapes that share a table of claims."""

    settings: str
    claims: Mapping[str, Any]
    typ: str | None = "JWT"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, **changes: Any) -> Shape:
        facts = {name: changes.pop(name) for name in list(changes) if name in _FACTS}
        return Shape(
            settings=self.settings,
            claims={**self.claims, **changes.pop("also", {}), **changes},
            **{"typ": self.typ, **self.facts, **facts},
        )

    def refuses(self, reason: str, **changes: Any) -> Shape:
        return self.takes(refused=reason, **changes)


_FACTS = frozenset(["scopes", "kind", "client", "subject", "audience", "refused"])


def _of(settings: str, claims: Mapping[str, Any], *, typ: str | None = "JWT", **facts: Any) -> _Of:
    return _Of(settings=settings, claims=claims, typ=typ, facts=facts)


KEYCLOAK_USER = _of(
    BY_SCOPE, KEYCLOAK, kind=PERSON, client="console", subject=KEYCLOAK["sub"], scopes=READ_PAUSE
)
KEYCLOAK_ROLES = _of(
    BY_ROLE, KEYCLOAK, kind=PERSON, client="console", scopes=READ_PAUSE | {Scope.ABORT}
)
OKTA_USER = _of(
    "Okta", OKTA, typ=None, kind=PERSON, client="0oaconsole", subject=OKTA["sub"], scopes=READ_PAUSE
)
AUTH0_USER = _of(
    "Auth0", AUTH0, kind=PERSON, client="consoleClientId", subject=AUTH0["sub"], scopes=READ_PAUSE
)
ENTRA_USER = _of(
    "Entra ID",
    ENTRA_V2,
    kind=PERSON,
    client=ENTRA_V2["azp"],
    subject=ENTRA_V2["oid"],
    scopes=READ_PAUSE,
)
ENTRA_1_USER = _of(
    "Entra ID, tokens of version 1",
    ENTRA_V1,
    kind=PERSON,
    client=ENTRA_V1["appid"],
    subject=ENTRA_V2["oid"],
    scopes=READ_PAUSE,
)
COGNITO_USER = _of(
    "Amazon Cognito", COGNITO, typ=None, kind=PERSON, client="4console", scopes=READ_PAUSE
)
DEX_USER = _of("Dex", DEX, typ=None, client="chadburn-cli", scopes=READ_PAUSE | {Scope.ABORT})
PLAIN_USER = _of("RFC 9068", PLAIN, typ="at+jwt", kind=PERSON, client="console", scopes=READ_PAUSE)

SHAPES: dict[str, Shape] = {
    "keycloak": KEYCLOAK_USER.takes(),
    "keycloak-service-account": _of(
        BY_SCOPE, KEYCLOAK_MACHINE, client="pipeline", scopes=READ_PAUSE
    ).takes(),
    "keycloak-at+jwt": _of(
        BY_SCOPE, KEYCLOAK, typ="at+jwt", kind=PERSON, client="console", scopes=READ_PAUSE
    ).takes(),
    "keycloak-no-scope-of-ours": KEYCLOAK_USER.takes(scope="openid profile email", scopes=scopes()),
    "keycloak-inference": KEYCLOAK_USER.takes(
        aud="inference", scopes=scopes(), audience=AudienceKind.INFERENCE
    ),
    "keycloak-without-audience-mapper": KEYCLOAK_USER.refuses(
        "TOKEN_AUDIENCE_FOREIGN", aud="account"
    ),
    "keycloak-lightweight": KEYCLOAK_USER.refuses("TOKEN_CLAIM_MISSING", sub=..., aud="chadburn"),
    "keycloak-id-token": KEYCLOAK_USER.refuses(
        "TOKEN_TYPE_REFUSED", also={"typ": "ID"}, aud="chadburn", at_hash="h"
    ),
    "keycloak-id-token-without-nonce": KEYCLOAK_USER.refuses(
        "TOKEN_TYPE_REFUSED", also={"typ": "ID"}, aud="chadburn", scope=...
    ),
    "keycloak-refresh-token": KEYCLOAK_USER.refuses(
        "TOKEN_TYPE_REFUSED", also={"typ": "Refresh"}, aud="chadburn"
    ),
    "keycloak-offline-token": KEYCLOAK_USER.refuses(
        "TOKEN_TYPE_REFUSED", also={"typ": "Offline"}, aud="chadburn"
    ),
    "keycloak-bound": KEYCLOAK_USER.refuses(
        "TOKEN_BOUND", also={"typ": "Bearer"}, cnf={"x5t#S256": "x"}
    ),
    "keycloak-roles": KEYCLOAK_ROLES.takes(),
    "keycloak-roles-service-account": _of(
        BY_ROLE, KEYCLOAK_MACHINE, client="pipeline", scopes=scopes(Scope.READ)
    ).takes(),
    "keycloak-roles-of-another-client": KEYCLOAK_ROLES.takes(
        resource_access={"account": {"roles": ["operator"]}}, scopes=scopes()
    ),
    "keycloak-roles-of-the-realm": KEYCLOAK_ROLES.takes(
        resource_access=..., realm_access={"roles": ["operator"]}, scopes=scopes()
    ),
    "keycloak-several-roles": KEYCLOAK_ROLES.takes(
        resource_access={"chadburn": {"roles": ["reader", "operator", "other"]}}
    ),
    "okta": OKTA_USER.takes(),
    "okta-at+jwt": _of(
        "Okta", OKTA, typ="at+jwt", kind=PERSON, client="0oaconsole", scopes=READ_PAUSE
    ).takes(),
    "okta-machine": _of(
        "Okta", OKTA_MACHINE, typ=None, client="0oapipeline", scopes=scopes(Scope.READ)
    ).takes(),
    "okta-without-scopes-of-ours": OKTA_USER.takes(scp=["openid"], scopes=scopes()),
    "okta-scope-instead-of-scp": OKTA_USER.takes(scp=[], scope="admin:shutdown", scopes=scopes()),
    "okta-of-the-organisation": _of("Okta", OKTA, typ="application/okta-internal-at+jwt").refuses(
        "TOKEN_TYPE_REFUSED"
    ),
    "okta-id-token": OKTA_USER.refuses(
        "TOKEN_TYPE_REFUSED", cid=..., uid=..., scp=..., amr=["pwd"], at_hash="h"
    ),
    "okta-id-token-without-marks": OKTA_USER.refuses(
        "TOKEN_TYPE_REFUSED", cid=..., uid=..., scp=..., amr=["pwd"], idp="00o1"
    ),
    "auth0": AUTH0_USER.takes(),
    "auth0-machine": _of(
        "Auth0", AUTH0_MACHINE, client="pipelineClientId", scopes=scopes(Scope.READ)
    ).takes(),
    "auth0-rfc9068-profile": _of(
        "Auth0",
        {**AUTH0, "azp": ..., "client_id": "consoleClientId", "jti": "j"},
        typ="at+jwt",
        kind=PERSON,
        client="consoleClientId",
        scopes=READ_PAUSE,
    ).takes(),
    "auth0-permissions-alone": AUTH0_USER.takes(scope="openid", scopes=scopes()),
    "auth0-issuer-without-its-slash": AUTH0_USER.refuses(
        "TOKEN_ISSUER_FOREIGN", iss="https://ops.eu.auth0.example"
    ),
    "auth0-id-token": AUTH0_USER.refuses(
        "TOKEN_TYPE_REFUSED", azp=..., scope=..., permissions=..., sid="s", nickname="nadia"
    ),
    "auth0-for-userinfo-alone": AUTH0_USER.refuses(
        "TOKEN_AUDIENCE_FOREIGN", aud="https://ops.eu.auth0.example/userinfo"
    ),
    "entra": ENTRA_USER.takes(),
    "entra-person-without-a-role": ENTRA_USER.takes(roles=..., scopes=scopes()),
    "entra-role-beyond-the-scopes": ENTRA_USER.takes(scp="admin:read", scopes=scopes(Scope.READ)),
    "entra-machine": _of(
        "Entra ID",
        ENTRA_V2_MACHINE,
        client=ENTRA_V2_MACHINE["azp"],
        subject=ENTRA_V2_MACHINE["oid"],
        scopes=scopes(Scope.READ),
    ).takes(),
    "entra-role-named-like-a-scope": ENTRA_USER.takes(
        scp=..., roles=["admin:shutdown"], kind=PROGRAM, scopes=scopes()
    ),
    "entra-too-many-groups": ENTRA_USER.takes(
        roles=..., _claim_names={"groups": "src1"}, hasgroups=True, scopes=scopes()
    ),
    "entra-other-tenant": ENTRA_USER.refuses(
        "TOKEN_ISSUER_FOREIGN", iss="https://login.microsoftonline.com/another/v2.0"
    ),
    "entra-for-graph": ENTRA_USER.refuses(
        "TOKEN_AUDIENCE_FOREIGN", aud="00000003-0000-0000-c000-000000000000"
    ),
    "entra-id-token": ENTRA_USER.refuses(
        "TOKEN_TYPE_REFUSED", azp=..., azpacr=..., scp=..., nonce="n"
    ),
    "entra-id-token-without-nonce": ENTRA_USER.refuses(
        "TOKEN_TYPE_REFUSED", azp=..., azpacr=..., scp=...
    ),
    "entra-v1": ENTRA_1_USER.takes(),
    "entra-v1-machine": _of(
        "Entra ID, tokens of version 1",
        ENTRA_V1_MACHINE,
        client=ENTRA_V1_MACHINE["appid"],
        scopes=scopes(Scope.READ),
    ).takes(),
    "entra-v1-id-token": ENTRA_1_USER.refuses("TOKEN_TYPE_REFUSED", appid=..., scp=...),
    "cognito": COGNITO_USER.takes(),
    "cognito-machine": _of(
        "Amazon Cognito", COGNITO_MACHINE, typ=None, client="4pipeline", scopes=scopes(Scope.READ)
    ).takes(),
    "cognito-of-another-client": COGNITO_USER.refuses("TOKEN_AUDIENCE_FOREIGN", client_id="4else"),
    "cognito-with-resource-binding": COGNITO_USER.takes(
        aud="https://chadburn.example/admin", client_id="4else", client="4else"
    ),
    "cognito-bound-to-another-resource": COGNITO_USER.refuses(
        "TOKEN_AUDIENCE_FOREIGN", aud="https://else.example"
    ),
    "cognito-unmarked": COGNITO_USER.refuses("TOKEN_CLAIM_MISSING", token_use=...),
    "cognito-id-token": COGNITO_USER.refuses(
        "TOKEN_TYPE_REFUSED", client_id=..., scope=..., aud="4console", token_use="id", at_hash="h"
    ),
    "cognito-id-token-as-if-for-us": COGNITO_USER.refuses(
        "TOKEN_TYPE_REFUSED",
        client_id=...,
        scope=...,
        aud="https://chadburn.example/admin",
        token_use="id",
    ),
    "dex": DEX_USER.takes(),
    "dex-without-groups": DEX_USER.takes(groups=..., scopes=scopes()),
    "dex-other-groups": DEX_USER.takes(groups=["staff"], scopes=scopes()),
    "dex-of-a-login-at-another-client": DEX_USER.refuses("TOKEN_TYPE_REFUSED", aud="wiki", azp=...),
    "dex-for-another-client": DEX_USER.refuses("TOKEN_TYPE_REFUSED", aud=["wiki", "chadburn-cli"]),
    "dex-of-a-login-at-our-client": DEX_USER.refuses("TOKEN_TYPE_REFUSED", aud="chadburn", azp=...),
    "dex-got-by-our-client-for-another": DEX_USER.refuses(
        "TOKEN_TYPE_REFUSED", aud=["wiki", "chadburn"], azp="chadburn"
    ),
    "rfc9068": PLAIN_USER.takes(),
    "rfc9068-machine": PLAIN_USER.takes(sub="console", auth_time=..., kind=PROGRAM),
    "rfc9068-full-media-type": _of(
        "RFC 9068",
        PLAIN,
        typ="application/at+jwt",
        kind=PERSON,
        client="console",
        scopes=READ_PAUSE,
    ).takes(),
    "rfc9068-inference": PLAIN_USER.takes(
        aud="https://chadburn.example/inference",
        scopes=scopes(),
        audience=AudienceKind.INFERENCE,
    ),
    "rfc9068-as-jwt": _of("RFC 9068", PLAIN).refuses("TOKEN_TYPE_REFUSED"),
}
