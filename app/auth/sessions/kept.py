"""What a session holds for its person, and what all that work on sessions share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from app.auth.principal import Principal
from app.auth.sessions.errors import SessionEnded
from app.auth.sessions.provider import Provider
from app.auth.sessions.sealing import SealingKeys, Unsealable
from app.auth.tokens.compact import CompactToken
from app.domain.operation import Actor
from app.ledger.browser_sessions import StoredSession
from app.ledger.values import AuditEntry

Providers = Mapping[str, Provider]
"""By issuer: those at which people log in."""


class Judge(Protocol):
    """What `app.auth.tokens.verifier.TokenVerifier` offers here."""

    async def verify(self, token: str) -> Principal: ...

    async def signed(self, token: str, *, by: Collection[str]) -> CompactToken: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """In seconds."""

    idle_s: float = 1800.0
    longest_s: float = 43_200.0
    most_of_person: int = 16
    refresh_ahead_s: float = 30.0
    refresh_lease_s: float = 30.0
    """Longer than a call to the token endpoint may take."""
    refresh_pause_s: float = 5.0
    """After one that came to nothing."""
    refresh_wait_s: float = 15.0
    """How long a request waits for another gateway's."""
    look_s: float = 0.1

    @property
    def notice_s(self) -> float:
        """How long a session's use may go unwritten."""
        return min(60.0, self.idle_s / 4)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """`identity`: the ID token, which the issuer wants to see at a logout."""

    access: str = field(repr=False)
    refresh: str | None = field(repr=False)
    identity: str = field(repr=False)


class TokenSafe:
    """Seals the tokens of a session to that session: a row's tokens are none in another row."""

    def __init__(self, keys: SealingKeys) -> None:
        self._keys = keys

    def put(self, digest: str, tokens: KeptTokens) -> bytes:
        document = {
            "access": tokens.access,
            "refresh": tokens.refresh,
            "identity": tokens.identity,
        }
        return self._keys.seal(document, _purpose(digest))

    def take(self, session: StoredSession) -> KeptTokens:
        """Raises SessionEnded where no key for them is there any more."""
        try:
            document = self._keys.unseal(session.sealed, _purpose(session.digest))
        except Unsealable:
            raise SessionEnded from None
        return KeptTokens(document["access"], document["refresh"], document["identity"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The request that something is done for, as the audit names it; empty: none."""

    request_id: str | None = None
    trace_id: str | None = None
    source: str | None = None

    def entry(
        self, at: datetime, action: str, actor: Actor, reason: str | None = None
    ) -> AuditEntry:
        return AuditEntry(
            at=at,
            action=action,
            outcome="accepted",
            actor=actor,
            reason=reason,
            request_id=self.request_id,
            trace_id=self.trace_id,
            source=self.source,
        )


def actor_of(who: Principal) -> Actor:
    return Actor(who.issuer, who.subject, who.client_id)


def _purpose(digest: str) -> str:
    return f"session {digest}"
