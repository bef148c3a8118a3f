"""Judging the claims of a token whose signature is known to be the issuer's. Pure."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app.auth.principal import AudienceKind, Principal, PrincipalKind
from app.auth.tokens.errors import (
    AudienceForeign,
    ClaimInvalid,
    ClaimMissing,
    TokenBound,
    TokenExpired,
    TokenNotYetValid,
    TokenTypeRefused,
)
from app.auth.tokens.grants import granted_scopes, groups_of, has_scope_claim
from app.auth.tokens.issuers import IssuerConfig, TokenProfile

MAX_IDENTITY_CHARS = 255

_ACCESS_TOKEN_TYPES = frozenset(["at+jwt", "application/at+jwt"])
_COMPATIBLE_TYPES = _ACCESS_TOKEN_TYPES | {"jwt"}
# OpenID Connect Core §2 and §3.3.2.11: only an ID token answers a nonce or hashes its siblings.
# ``events`` marks logout and security-event tokens (RFC 8417).
_ID_TOKEN_CLAIMS = frozenset(["nonce", "at_hash", "c_hash", "s_hash", "events"])
# Claims an issuer writes only where a person took part: RFC 9068 §2.2.1, RFC 8176 and Okta's and
# Entra's ``scp``, which their client-credentials tokens lack or carry beside sub = client.
_PERSON_CLAIMS = frozenset(["auth_time", "amr", "sid", "scp"])


def judge(
    config: IssuerConfig, typ: str | None, claims: Mapping[str, Any], now: datetime
) -> Principal:
    """The caller these claims describe at ``now`` (aware), or the reason to refuse them.
    ``typ`` is the header's.

    Each required claim is asked for its presence first and its value second: a check that only
    compares passes when there is nothing to compare. A token is good while
    ``now < exp + leeway``, and from ``nbf`` and ``iat`` minus the leeway on.
    """
    client_id = _client_id(config, claims)
    _check_type(config, typ, claims, client_id)
    if "cnf" in claims:
        raise TokenBound
    expires_at = _check_times(config, claims, now.timestamp())
    subject = _identity(claims, "sub")
    audience = _audience(config, claims)
    token_id = _optional_identity(claims, "jti")
    if config.profile is TokenProfile.STRICT:
        for claim in ("client_id", "iat", "jti"):
            if claim not in claims:
                raise ClaimMissing(claim)
    administers = audience is AudienceKind.ADMIN
    return Principal(
        issuer=config.issuer,
        subject=subject,
        client_id=client_id,
        scopes=granted_scopes(config, claims) if administers else frozenset(),
        expires_at=expires_at,
        token_id=token_id,
        kind=_kind(config, claims, subject, client_id),
        audience=audience,
        groups=groups_of(config, claims),
    )


def _check_type(
    config: IssuerConfig, typ: str | None, claims: Mapping[str, Any], client_id: str
) -> None:
    typ = typ.lower() if typ is not None else None  # media types ignore case (RFC 2045 §5.1)
    if config.profile is TokenProfile.STRICT:
        if typ not in _ACCESS_TOKEN_TYPES:
            raise TokenTypeRefused
    elif typ is not None and typ not in _COMPATIBLE_TYPES:
        raise TokenTypeRefused
    # In both profiles: an issuer that types its ID tokens wrongly must not open the door either.
    if _ID_TOKEN_CLAIMS & claims.keys():
        raise TokenTypeRefused
    if claims.get("token_use", "access") != "access":
        raise TokenTypeRefused
    payload_typ = claims.get("typ")
    if "typ" in claims and not (
        isinstance(payload_typ, str) and payload_typ.lower() in _ACCESS_TOKEN_TYPES | {"bearer"}
    ):
        raise TokenTypeRefused
    if config.profile is TokenProfile.COMPATIBLE and not _shows_access_token(
        config, typ, claims, client_id
    ):
        raise TokenTypeRefused


def _shows_access_token(
    config: IssuerConfig, typ: str | None, claims: Mapping[str, Any], client_id: str
) -> bool:
    """Some mark that ID tokens lack. Not seeing an ID token's marks is not enough: without a
    nonce in the login its ID token has none, and with one client registration for login and API
    it even has the right audience."""
    if typ in _ACCESS_TOKEN_TYPES or "typ" in claims or "token_use" in claims:
        return True
    if has_scope_claim(config, claims):
        return True
    return bool(client_id) and client_id not in _audiences(claims)


def _check_times(config: IssuerConfig, claims: Mapping[str, Any], now_s: float) -> datetime:
    expires_s = _time(claims, "exp")
    if expires_s is None:
        raise ClaimMissing("exp")
    if now_s >= expires_s + config.leeway_s:
        raise TokenExpired
    for claim in ("nbf", "iat"):
        starts_s = _time(claims, claim)
        if starts_s is not None and now_s < starts_s - config.leeway_s:
            raise TokenNotYetValid
    try:
        return datetime.fromtimestamp(expires_s, UTC)
    except (OverflowError, ValueError, OSError) as error:
        raise ClaimInvalid("exp") from error


def _time(claims: Mapping[str, Any], claim: str) -> float | None:
    """Seconds since the epoch; None when absent."""
    if claim not in claims:
        return None
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClaimInvalid(claim)
    try:
        seconds = float(value)
    except OverflowError as error:
        raise ClaimInvalid(claim) from error
    if not math.isfinite(seconds):
        raise ClaimInvalid(claim)
    return seconds


def _audience(config: IssuerConfig, claims: Mapping[str, Any]) -> AudienceKind:
    named = _audiences(claims)
    if config.audience is not None and config.audience in named:
        return AudienceKind.ADMIN
    if named.intersection(config.inference_audiences):
        return AudienceKind.INFERENCE
    raise AudienceForeign


def _audiences(claims: Mapping[str, Any]) -> frozenset[str]:
    """``aud`` as a set: a string and a list of one string mean the same (RFC 7519 §4.1.3)."""
    if "aud" not in claims:
        raise ClaimMissing("aud")
    value = claims["aud"]
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not named:
        raise ClaimInvalid("aud")
    if not all(isinstance(item, str) and item for item in named):
        raise ClaimInvalid("aud")
    return frozenset(named)


def _client_id(config: IssuerConfig, claims: Mapping[str, Any]) -> str:
    for claim in config.client_id_claims:
        if claim in claims:
            return _identity(claims, claim)
    return ""


def _identity(claims: Mapping[str, Any], claim: str) -> str:
    value = _optional_identity(claims, claim)
    if value is None:
        raise ClaimMissing(claim)
    return value


def _optional_identity(claims: Mapping[str, Any], claim: str) -> str | None:
    """A name that goes into logs, SQL and comparisons: bounded, and printable, which leaves out
    NUL, line breaks and the lone surrogates that JSON can write and UTF-8 cannot."""
    if claim not in claims:
        return None
    value = claims[claim]
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_IDENTITY_CHARS:
        raise ClaimInvalid(claim)
    if not value.isprintable():
        raise ClaimInvalid(claim)
    return value


def _kind(
    config: IssuerConfig, claims: Mapping[str, Any], subject: str, client_id: str
) -> PrincipalKind:
    """A person only where the token shows one, since a person may do more than a program.

    RFC 9068 gives client credentials the client as subject. Other issuers do not keep to that
    (Keycloak and Entra use an account of the client), so there a claim must speak for a person
    and none for a program. Not covered: an issuer of the compatible profile that writes neither;
    its people count as programs.
    """
    if not client_id or subject in (client_id, f"{client_id}@clients"):
        return PrincipalKind.CLIENT
    if config.profile is TokenProfile.STRICT:
        return PrincipalKind.PERSON
    account = claims.get("preferred_username")
    if (
        claims.get("gty") == "client-credentials"
        or claims.get("idtyp") == "app"
        or (isinstance(account, str) and account.startswith("service-account-"))
    ):
        return PrincipalKind.CLIENT
    return PrincipalKind.PERSON if _PERSON_CLAIMS & claims.keys() else PrincipalKind.CLIENT
