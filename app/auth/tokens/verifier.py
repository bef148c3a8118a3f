"""Judging a bearer token: from a string to a Principal, or a reason why not."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

import httpx2

from app.auth.principal import Principal
from app.auth.tokens.claims import judge
from app.auth.tokens.compact import CompactToken, parse
from app.auth.tokens.errors import (
    AlgorithmRefused,
    ClaimInvalid,
    ClaimMissing,
    IssuerForeign,
    KeyUnknown,
    SignatureInvalid,
    TokenMalformed,
    TokenTooLarge,
)
from app.auth.tokens.issuers import IssuerConfig, IssuerConfigError
from app.auth.tokens.jwks import IssuerKeys, IssuerState, KeyTimings
from app.auth.tokens.keys import KeyRing
from app.auth.tokens.remembered import RememberedTokens

MAX_TOKEN_CHARS = 16 * 1024


@dataclass(frozen=True, slots=True)
class _Trusted:
    config: IssuerConfig
    keys: IssuerKeys


class TokenVerifier:
    """Verifies tokens of several issuers; shared between all requests of one event loop.

    The audience rule lives in each :class:`IssuerConfig`: the gateway, an engine's admin listener
    and its inference listener differ only in the configs they pass.
    """

    def __init__(
        self,
        issuers: Iterable[IssuerConfig],
        *,
        http: httpx2.AsyncClient,
        now: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
        timings: KeyTimings | None = None,
        cache_size: int = 4096,
        cache_ttl_s: float = 60.0,
    ) -> None:
        """``http`` stays the caller's to close; ``now`` gives aware times.

        Raises :class:`IssuerConfigError` when no issuer is given (a service that trusts nobody
        is a mistake in the settings, not a policy) or one is given twice.
        """
        self._now = now
        self._monotonic = monotonic
        self._remembered = RememberedTokens(size=cache_size, ttl_s=cache_ttl_s)
        self._trusted: dict[str, _Trusted] = {}
        for config in issuers:
            if config.issuer in self._trusted:
                raise IssuerConfigError(f"issuer {config.issuer!r} is configured twice")
            keys = IssuerKeys(
                config, http=http, monotonic=monotonic, timings=timings or KeyTimings()
            )
            self._trusted[config.issuer] = _Trusted(config, keys)
        if not self._trusted:
            raise IssuerConfigError("no token issuer is configured")

    async def verify(self, token: str) -> Principal:
        """The caller the token describes.

        A token for an inference audience is genuine: it gives a Principal of audience INFERENCE
        with no admin scopes, which every admin route answers with 403 insufficient_scope.

        Raises :class:`~app.auth.tokens.errors.TokenInvalid` (401, never 403) and
        :class:`~app.auth.tokens.errors.KeysUnavailable` (503) where the issuer's keys cannot be
        had, so that the token is neither good nor bad.
        """
        if len(token) > MAX_TOKEN_CHARS:  # before any work that grows with the token
            raise TokenTooLarge
        if not token.isascii():
            raise TokenMalformed
        remembered = self._recall(token)
        if remembered is not None:
            return remembered
        parsed = parse(token)
        trusted = self._issuer_of(parsed)
        if parsed.alg not in trusted.config.algorithms:
            raise AlgorithmRefused
        generation = await self._check_signature(parsed, trusted.keys)
        principal = judge(trusted.config, parsed.typ, parsed.claims, self._now())
        self._remembered.put(token, principal, generation, monotonic_s=self._monotonic())
        return principal

    async def warm(self) -> None:
        """Fetch every issuer's keys at start, all at once, within one fetch deadline.

        Never raises: an issuer that is down shows in :meth:`issuer_states`.
        """
        await asyncio.gather(*(trusted.keys.prefetch() for trusted in self._trusted.values()))

    def issuer_states(self) -> tuple[IssuerState, ...]:
        """How each issuer's keys stand, for readiness; asks nobody and never raises."""
        return tuple(trusted.keys.state() for trusted in self._trusted.values())

    async def aclose(self) -> None:
        """End key fetches still under way."""
        for trusted in self._trusted.values():
            await trusted.keys.aclose()

    def _recall(self, token: str) -> Principal | None:
        found = self._remembered.get(
            token, now_s=self._now().timestamp(), monotonic_s=self._monotonic()
        )
        if found is None:
            return None
        principal, generation = found
        if generation != self._trusted[principal.issuer].keys.generation:
            self._remembered.forget(token)  # its key may be the one that was withdrawn
            return None
        return principal

    def _issuer_of(self, token: CompactToken) -> _Trusted:
        """The settings to judge by; ``iss`` is unverified and chooses among our own only."""
        if "iss" not in token.claims:
            raise ClaimMissing("iss")
        issuer = token.claims["iss"]
        if not isinstance(issuer, str):
            raise ClaimInvalid("iss")
        trusted = self._trusted.get(issuer)
        if trusted is None:
            raise IssuerForeign
        return trusted

    @staticmethod
    async def _check_signature(token: CompactToken, keys: IssuerKeys) -> int:
        """Returns the key generation the signature was found good under."""
        ring = await keys.current()
        generation = keys.generation
        if _signed_by_one_of(token, ring):
            return generation
        if token.kid is not None and ring.candidates(token.alg, token.kid):
            # The very key it names says no: nothing a fetch could change.
            raise SignatureInvalid
        newer = await keys.after_unknown_key()
        generation = keys.generation
        if newer is not None and _signed_by_one_of(token, newer):
            return generation
        if keys.failing:
            raise keys.unavailable()
        raise KeyUnknown


def _signed_by_one_of(token: CompactToken, ring: KeyRing) -> bool:
    return any(token.is_signed_by(key) for key in ring.candidates(token.alg, token.kid))
