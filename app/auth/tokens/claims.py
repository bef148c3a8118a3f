"""Judging the claims of a token whose signature is known to be the issuer's. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.auth.principal import AudienceKind, Principal, PrincipalKind
from app.auth.tokens.errors import (
    AudienceForeign,
    ClaimInvalid,
    ClaimMissing,
    IssuerForeign,
    TokenBound,
    TokenExpired,
    TokenNotYetValid,
    TokenTypeRefused,
)
from app.auth.tokens.grants import granted_scopes, groups_of, has_scope_claim
from app.auth.tokens.issuers import DpopUse, IssuerConfig, PersonProof, TokenProfile

MAX_IDENTITY_CHARS = 255

_ACCESS_TOKEN_TYPES = frozenset(["at+jwt", "application/at+jwt"])
_COMPATIBLE_TYPES = _ACCESS_TOKEN_TYPES | {"jwt"}
_ACCESS_TOKEN_USES = ("access", "access_token")
# OpenID Connect Core §2 and §3.3.2.11: only an ID token answers a nonce or hashes its siblings.
# ``events`` marks logout and security-event tokens (RFC 8417).
_NEVER_IN_ACCESS_TOKENS = frozenset(["c_hash", "s_hash", "events"])
_ID_TOKEN_CLAIMS = _NEVER_IN_ACCESS_TOKENS | {"nonce", "at_hash"}
# Claims an issuer writes only where a person took part: RFC 9068 §2.2.1, RFC 8176 and Okta's and
# Entra's ``scp``, which their client-credentials tokens lack or carry beside sub = client.
_PERSON_CLAIMS = frozenset(["auth_time", "amr", "sid", "scp"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Voucher:
    """What vouches for the claims: a signature, the issuer's answer about the token, or both."""

    typ: str | None = None
    """Of the signed header."""
    signed: bool = True
    introspected: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A good token: whose it is, and the thumbprint (RFC 7638) of the key that has to come with
    it, if any."""

    principal: Principal
    thumbprint: str | None = None


def judge(
    config: IssuerConfig, voucher: Voucher, claims: Mapping[str, Any], now: datetime
) -> Judged:
    """The caller these claims describe at ``now`` (aware), or the reason to refuse them.

    Each required claim is asked for its presence first and its value second: a check that only
    compares passes when there is nothing to compare. A token is good while
    ``now < exp + leeway``, and from ``nbf`` and ``iat`` minus the leeway on.
    """
    if _identity(claims, "iss") != config.issuer:
        raise IssuerForeign
    client_id = _client_id(config, claims)
    thumbprint = _bound_to(config, claims)
    _check_type(config, voucher, claims, client_id, bound=thumbprint is not None)
    expires_at = _check_times(config, claims, now.timestamp())
    subject = _subject(config, claims)
    audience = _audience(config, claims, client_id)
    token_id = _optional_identity(claims, "jti")
    if config.profile is TokenProfile.STRICT:
        # RFC 7662 has no answer that is sure to have the other two.
        for claim in ("client_id", "iat", "jti") if voucher.signed else ("client_id",):
            if claim not in claims:
                raise ClaimMissing(claim)
    administers = audience is AudienceKind.ADMIN
    principal = Principal(
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
    return Judged(principal, thumbprint)


def merged(signed: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The claims of a JWT and of its issuer's answer about it: the answer is the later word, but
    about the same token, and it makes none live longer.

    Raises ClaimInvalid where the two speak of different callers.
    """
    for claim in ("iss", "sub", "client_id", "jti", "cnf"):
        if claim in signed and claim in answer and signed[claim] != answer[claim]:
            raise ClaimInvalid(claim)
    claims = {**signed, **answer}
    ends = [end for end in (_time(signed, "exp"), _time(answer, "exp")) if end is not None]
    if ends:
        claims["exp"] = min(ends)
    return claims


def _bound_to(config: IssuerConfig, claims: Mapping[str, Any]) -> str | None:
    """The thumbprint in ``cnf``; None: a plain bearer token. Any other binding, such as to a
    certificate (RFC 8705), or one beside it, is one that nothing here proves."""
    if "cnf" not in claims:
        return None
    confirmation = claims["cnf"]
    if config.dpop is DpopUse.OFF or not isinstance(confirmation, dict):
        raise TokenBound
    thumbprint = confirmation.get("jkt")
    if len(confirmation) != 1 or not isinstance(thumbprint, str) or not thumbprint:
        raise TokenBound
    return thumbprint


def _check_type(
    config: IssuerConfig,
    voucher: Voucher,
    claims: Mapping[str, Any],
    client_id: str,
    *,
    bound: bool,
) -> None:
    typ = voucher.typ
    typ = typ.lower() if typ is not None else None  # media types ignore case (RFC 2045 §5.1)
    if voucher.signed and config.profile is TokenProfile.STRICT:
        if typ not in _ACCESS_TOKEN_TYPES:
            raise TokenTypeRefused
    elif typ is not None and typ not in _COMPATIBLE_TYPES:
        raise TokenTypeRefused
    # In both profiles: an issuer that types its ID tokens wrongly must not open the door either.
    cross_client = config.profile is TokenProfile.CROSS_CLIENT
    if (_NEVER_IN_ACCESS_TOKENS if cross_client else _ID_TOKEN_CLAIMS) & claims.keys():
        raise TokenTypeRefused
    if cross_client and not _got_for_another(config, claims, client_id):
        raise TokenTypeRefused
    if claims.get("token_use", "access") not in _ACCESS_TOKEN_USES:
        raise TokenTypeRefused
    kinds = frozenset(["bearer", "dpop"] if bound else ["bearer"])
    if "typ" in claims and not _one_of(claims["typ"], _ACCESS_TOKEN_TYPES | kinds):
        raise TokenTypeRefused
    if voucher.introspected and not _answers_for_access_token(claims, kinds):
        raise TokenTypeRefused
    if (
        voucher.signed
        and config.profile is TokenProfile.COMPATIBLE
        and not _shows_access_token(config, typ, claims, client_id)
    ):
        raise TokenTypeRefused


def _got_for_another(config: IssuerConfig, claims: Mapping[str, Any], client_id: str) -> bool:
    """Dex writes the client that asked beside the one it asked for: a login at either alone has
    that one as its only audience. What remains is an ID token got in the same way; whoever got it
    asked for something to show here."""
    named = _audiences(claims)
    ours = {config.audience, *config.inference_audiences}
    return client_id in named and client_id not in ours and bool(named & ours)


def _answers_for_access_token(claims: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """Refresh tokens are introspected too, and are active. ``token_type`` is of access tokens
    alone (RFC 7662 §2.2 with RFC 6749 §5.1)."""
    if "token_type" in claims:
        return _one_of(claims["token_type"], kinds | {"access_token"})
    return "typ" in claims or "token_use" in claims


def _one_of(value: Any, allowed: frozenset[str]) -> bool:
    return isinstance(value, str) and value.lower() in allowed


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


def _audience(config: IssuerConfig, claims: Mapping[str, Any], client_id: str) -> AudienceKind:
    if "aud" not in claims and config.clients_without_audience:
        # Only where the token says itself that it is no ID token: in those the client is ``aud``.
        if claims.get("token_use") not in _ACCESS_TOKEN_USES:
            raise ClaimMissing("aud")
        if client_id not in config.clients_without_audience:
            raise AudienceForeign
        return AudienceKind.ADMIN
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


def _subject(config: IssuerConfig, claims: Mapping[str, Any]) -> str:
    for claim in config.subject_claims:
        if claim in claims:
            return _identity(claims, claim)
    raise ClaimMissing(config.subject_claims[0])


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
    and none for a program. Not covered: such an issuer that writes neither; its people count as
    programs.
    """
    if not client_id or subject in (client_id, f"{client_id}@clients"):
        return PrincipalKind.CLIENT
    account = claims.get("preferred_username")
    if (
        claims.get("gty") == "client-credentials"
        or claims.get("idtyp") == "app"
        or (isinstance(account, str) and account.startswith("service-account-"))
    ):
        return PrincipalKind.CLIENT
    if config.person_proof is PersonProof.SUBJECT:
        return PrincipalKind.PERSON
    return PrincipalKind.PERSON if _PERSON_CLAIMS & claims.keys() else PrincipalKind.CLIENT
