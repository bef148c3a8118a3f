"""What an issuer signs for its client: ID tokens and logout tokens, judged once their signature is
known to be the issuer's. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from app.auth.sessions.clients import LoginClient
from app.auth.tokens.compact import CompactToken

LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
_MAX_NAME_CHARS = 255
_LOGOUT_GOOD_FOR = timedelta(minutes=5)


class Unfit(Exception):
    """The token is not what it would have to be; the text is for an operator's log."""


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """What the issuer calls the person (`sub`) and the session there (`sid`), if it names one."""

    subject: str
    provider_session: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedOut:
    """Which session has ended at the issuer: `provider_session`, else all of `subject`. `token_id`
    is new with each token; until `good_until` it could be shown again."""

    subject: str | None
    provider_session: str | None
    token_id: str
    good_until: datetime


def judge_id_token(
    token: CompactToken,
    client: LoginClient,
    *,
    nonce: str | None,
    access_token: str,
    now: datetime,
) -> LoggedIn:
    """OpenID Connect Core section 3.1.3.7. `nonce` None: of a refresh, which has none of its own.

    Raises Unfit.
    """
    claims = token.claims
    if token.typ is not None and token.typ.lower() != "jwt":
        raise Unfit("the ID token is of another type")
    if "events" in claims:
        raise Unfit("the ID token is a security event")
    _check_for_us(claims, client)
    end, leeway_s = _moment(claims, "exp"), client.config.leeway_s
    if end is None or now.timestamp() >= end + leeway_s:
        raise Unfit("the ID token has expired or never does")
    made = _moment(claims, "iat")
    if made is None or made > now.timestamp() + leeway_s:
        raise Unfit("the ID token is from the future or does not say when it was made")
    if nonce is not None:
        shown = claims.get("nonce")
        if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(), nonce.encode()):
            raise Unfit("the ID token was made for another login")
    if "at_hash" in claims and claims["at_hash"] != _half_hash(token.alg, access_token):
        raise Unfit("the ID token belongs to another access token")
    subject = _name(claims, "sub")
    if subject is None:
        raise Unfit("the ID token names nobody")
    return LoggedIn(subject, _name(claims, "sid"))


def judge_logout_token(token: CompactToken, client: LoginClient, now: datetime) -> LoggedOut:
    """OpenID Connect Back-Channel Logout 1.0 section 2.6. Raises Unfit."""
    claims = token.claims
    if token.typ is not None and token.typ.lower() not in ("logout+jwt", "jwt"):
        raise Unfit("it is of another type")
    if "nonce" in claims:
        raise Unfit("it has a nonce")
    events = claims.get("events")
    if not isinstance(events, dict) or not isinstance(events.get(LOGOUT_EVENT), dict):
        raise Unfit("it tells of no logout")
    _check_for_us(claims, client)
    made, end, leeway_s = _moment(claims, "iat"), _moment(claims, "exp"), client.config.leeway_s
    if made is None or made > now.timestamp() + leeway_s:
        raise Unfit("it does not say when it was made, or is from the future")
    # Not all issuers write an end; none means one that is good for ever.
    latest = made + _LOGOUT_GOOD_FOR.total_seconds()
    good_until = (latest if end is None else min(end, latest)) + leeway_s
    if now.timestamp() >= good_until:
        raise Unfit("it has expired")
    token_id, subject, session = (_name(claims, name) for name in ("jti", "sub", "sid"))
    if token_id is None:
        raise Unfit("it has no id")
    if subject is None and session is None:
        raise Unfit("it names nobody")
    return LoggedOut(
        subject=subject,
        provider_session=session,
        token_id=token_id,
        good_until=datetime.fromtimestamp(good_until, UTC),
    )


def _check_for_us(claims: Mapping[str, Any], client: LoginClient) -> None:
    if claims.get("iss") != client.issuer:
        raise Unfit("it is of another issuer")
    audience = claims.get("aud")
    named = [audience] if isinstance(audience, str) else audience
    if not isinstance(named, list) or client.client_id not in named:
        raise Unfit("it was made for another client")
    party = claims.get("azp")
    if party != client.client_id and (party is not None or len(named) > 1):
        raise Unfit("it was got by another client")


def _moment(claims: Mapping[str, Any], claim: str) -> float | None:
    """Seconds since 1970. Raises Unfit for what is no such number."""
    if claim not in claims:
        return None
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"{claim} is no time")
    if not math.isfinite(value) or not 0 <= value < 1e11:
        raise Unfit(f"{claim} is no time")
    return float(value)


def _name(claims: Mapping[str, Any], claim: str) -> str | None:
    if claim not in claims:
        return None
    value = claims[claim]
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME_CHARS:
        raise Unfit(f"{claim} is no name")
    if not value.isprintable():
        raise Unfit(f"{claim} is no name")
    return value


def _half_hash(algorithm: str, access_token: str) -> str:
    """OpenID Connect Core section 3.1.3.6; Ed25519 signatures go with SHA-512."""
    size = algorithm[-3:] if algorithm[-3:] in ("256", "384", "512") else "512"
    size = "512" if algorithm.startswith("Ed") else size
    digest = hashlib.new(f"sha{size}", access_token.encode("ascii")).digest()
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()
