"""Whose tokens a sidecar takes: those of an issuer, or those that stand in files."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx2

from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope
from app.enginekit.settings import Verifier

_KEY_FETCH_TIMEOUT_S = 5.0
_NEVER = datetime(9999, 1, 1, tzinfo=UTC)
_FEWEST_CHARS = 32
ISSUER = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerTokens:
    """Of one issuer; each listener takes its own audience alone."""

    issuer: str
    inference_audience: str
    admin_audience: str


class StaticTokens:
    """Tokens that were handed out by file, one for each listener. Kept as digests, and compared in
    a time that tells nothing of them. They do not expire: a new file and a restart replace them."""

    def __init__(self, *, admin: str, inference: str | None = None) -> None:
        """Raises ValueError for a token that is too short to be a secret."""
        self._principals = [(_digest(admin), _principal(AudienceKind.ADMIN))]
        if inference is not None:
            self._principals.append((_digest(inference), _principal(AudienceKind.INFERENCE)))

    async def verify(self, token: str) -> Principal:
        """Raises TokenInvalid."""
        shown = hashlib.sha256(token.encode()).digest()
        found = None
        for digest, principal in self._principals:
            if hmac.compare_digest(shown, digest):
                found = principal
        if found is None:
            raise TokenInvalid
        return found


def _digest(token: str) -> bytes:
    if len(token) < _FEWEST_CHARS or not token.isascii() or not token.isprintable():
        raise ValueError(f"a token is {_FEWEST_CHARS} printable ASCII characters or more")
    return hashlib.sha256(token.encode()).digest()


def _principal(audience: AudienceKind) -> Principal:
    admin = audience is AudienceKind.ADMIN
    return Principal(
        issuer=ISSUER,
        subject=f"{audience.value}-token",
        client_id="",
        scopes=frozenset(Scope) if admin else frozenset(),
        expires_at=_NEVER,
        audience=audience,
    )


@asynccontextmanager
async def verifying(
    tokens: IssuerTokens | StaticTokens | None, now: Callable[[], datetime]
) -> AsyncIterator[Verifier | None]:
    """Raises IssuerConfigError. None: no tokens are asked for."""
    if not isinstance(tokens, IssuerTokens):
        yield tokens
        return
    trusted = IssuerConfig(
        issuer=tokens.issuer,
        audience=tokens.admin_audience,
        inference_audiences=(tokens.inference_audience,),
    )
    async with httpx2.AsyncClient(timeout=_KEY_FETCH_TIMEOUT_S, follow_redirects=False) as http:
        verifier = TokenVerifier([trusted], http=http, now=now)
        try:
            yield verifier
        finally:
            await verifier.aclose()
