"""Judging a bearer token: from a string to a Principal, or a reason why not."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

import httpx2

from app.auth.principal import Principal
from app.auth.tokens.claims import Judged, Voucher, judge, merged
from app.auth.tokens.compact import CompactToken, is_opaque, parse
from app.auth.tokens.dpop import ProofStore, Shown, check_proof, use
from app.auth.tokens.errors import (
    AlgorithmRefused,
    ClaimInvalid,
    ClaimMissing,
    IssuerForeign,
    KeyUnknown,
    ProofInvalid,
    SignatureInvalid,
    TokenBound,
    TokenMalformed,
    TokenTooLarge,
    TokenUnbound,
)
from app.auth.tokens.introspection import Introspection, IntrospectionTimings
from app.auth.tokens.issuers import DpopUse, IssuerConfig, IssuerConfigError, refuse_conflicts
from app.auth.tokens.jwks import IssuerKeys, IssuerState, KeyTimings
from app.auth.tokens.keys import KeyRing
from app.auth.tokens.nonces import Nonces
from app.auth.tokens.remembered import RememberedTokens

MAX_TOKEN_CHARS = 16 * 1024
MAX_OPAQUE_CHARS = 4 * 1024


@dataclass(frozen=True, slots=True)
class _Trusted:
    """``keys`` None: no JWT of this issuer is taken."""

    config: IssuerConfig
    keys: IssuerKeys | None
    introspection: Introspection | None


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
        introspection_timings: IntrospectionTimings | None = None,
        proofs: ProofStore | None = None,
        nonces: Nonces | None = None,
        cache_size: int = 4096,
        cache_ttl_s: float = 60.0,
    ) -> None:
        """``http`` stays the caller's to close; ``now`` gives aware times. ``proofs`` is needed
        where an issuer's tokens may be bound to keys, ``nonces`` where proofs have to have one.

        Raises :class:`IssuerConfigError` when no issuer is given (a service that trusts nobody
        is a mistake in the settings, not a policy), one is given twice, or several of them would
        have to be asked about the same opaque token.
        """
        configs = tuple(issuers)
        refuse_conflicts(configs)
        if proofs is None and any(config.dpop is not DpopUse.OFF for config in configs):
            raise IssuerConfigError("dpop needs a place where proofs are remembered")
        if nonces is None and any(config.dpop_nonce for config in configs):
            raise IssuerConfigError("dpop_nonce needs nonces")
        self._proofs = proofs
        self._nonces = nonces
        self._now = now
        self._monotonic = monotonic
        self._cache_ttl_s = cache_ttl_s
        self._remembered = RememberedTokens(size=cache_size, ttl_s=cache_ttl_s)
        self._trusted: dict[str, _Trusted] = {}
        self._opaque: _Trusted | None = None
        for config in configs:
            keys = introspection = None
            if config.algorithms:
                keys = IssuerKeys(
                    config, http=http, monotonic=monotonic, timings=timings or KeyTimings()
                )
            if config.introspection is not None:
                introspection = Introspection(
                    config,
                    config.introspection,
                    http=http,
                    monotonic=monotonic,
                    timings=introspection_timings or IntrospectionTimings(),
                )
            trusted = _Trusted(config, keys, introspection)
            self._trusted[config.issuer] = trusted
            if config.introspection is not None and config.introspection.opaque:
                self._opaque = trusted

    async def verify(self, token: str) -> Principal:
        """The caller that a plain bearer token describes.

        A token for an inference audience is genuine: it gives a Principal of audience INFERENCE
        with no admin scopes, which every admin route answers with 403 insufficient_scope.

        Raises :class:`~app.auth.tokens.errors.TokenInvalid` (401, never 403) and
        :class:`~app.auth.tokens.errors.IssuerUnavailable` (503) where the issuer's keys or its
        answer cannot be had, so that the token is neither good nor bad.
        """
        judged = await self._judged(token)
        if judged.thumbprint is not None:
            raise TokenBound
        if self._config_of(judged).dpop is DpopUse.REQUIRED:
            raise TokenUnbound
        return judged.principal

    async def verify_bound(self, token: str, shown: Shown) -> Principal:
        """The caller that a token bound to a key describes, and who holds that key.

        Raises as `verify` does, ProofRefused, and what the store of proofs raises when it is not
        available.
        """
        judged = await self._judged(token)
        if judged.thumbprint is None or self._proofs is None:
            raise TokenUnbound
        config = self._config_of(judged)
        proof = check_proof(shown, token, now=self._now(), leeway_s=config.leeway_s)
        if proof.thumbprint != judged.thumbprint:
            raise ProofInvalid("The DPoP proof is by another key than the token is bound to.")
        if config.dpop_nonce and self._nonces is not None:
            self._nonces.require(proof.nonce)
        await use(proof, self._proofs)  # last: nobody fills the store without a token of theirs
        return judged.principal

    async def still_good(self, token: str) -> Principal:
        """The caller of a token that `verify_bound` has let in, while what it let them have goes
        on: a proof is for the beginning."""
        return (await self._judged(token)).principal

    async def signed(self, token: str, *, by: Collection[str]) -> CompactToken:
        """A JWT that one of these issuers has signed and that is no access token, such as an ID
        token. Nothing in it is judged but `iss` and the signature.

        Raises TokenInvalid, and IssuerUnavailable where the issuer's keys cannot be had.
        """
        if len(token) > MAX_TOKEN_CHARS:
            raise TokenTooLarge
        if not token.isascii():
            raise TokenMalformed
        parsed = parse(token)
        trusted = self._issuer_of(parsed)
        if trusted.config.issuer not in by:
            raise IssuerForeign
        if trusted.keys is None or parsed.alg not in trusted.config.algorithms:
            raise AlgorithmRefused
        await self._check_signature(parsed, trusted.keys)
        return parsed

    async def _judged(self, token: str) -> Judged:
        if len(token) > MAX_TOKEN_CHARS:  # before any work that grows with the token
            raise TokenTooLarge
        if not token.isascii():
            raise TokenMalformed
        remembered = self._recall(token)
        if remembered is not None:
            return remembered
        if self._opaque is not None and is_opaque(token):
            return await self._ask(token, self._opaque)
        return await self._check(token)

    async def keep_ready(self, every_s: float = 5.0) -> None:
        """Until cancelled: have every issuer's keys, and know that those who are to be asked can
        be, from the start on; an issuer that is down is tried again, callers or none.

        Never raises: an issuer that is down shows in :meth:`issuer_states`.
        """
        while True:
            await self.warm()
            await asyncio.sleep(every_s)

    async def warm(self) -> None:
        """One try with each issuer that is not known to be well, all at once, within one fetch
        deadline. Never raises."""
        tries: list[Awaitable[None]] = []
        for trusted in self._trusted.values():
            if trusted.keys is not None:
                tries.append(trusted.keys.prefetch())
            if trusted.introspection is not None:
                tries.append(trusted.introspection.probe())
        await asyncio.gather(*tries)

    def issuer_states(self) -> tuple[IssuerState, ...]:
        """How each issuer stands, for readiness; asks nobody and never raises."""
        return tuple(_state_of(trusted) for trusted in self._trusted.values())

    async def aclose(self) -> None:
        """End fetches and questions still under way."""
        for trusted in self._trusted.values():
            if trusted.keys is not None:
                await trusted.keys.aclose()
            if trusted.introspection is not None:
                await trusted.introspection.aclose()

    async def _check(self, token: str) -> Judged:
        """A JWT: by its issuer's keys, and then by its issuer's word where that is wanted too.

        The question comes after the signature: nobody but the issuer makes tokens that cost it
        one, and it is shown none but its own.
        """
        parsed = parse(token)
        trusted = self._issuer_of(parsed)
        if trusted.keys is None or parsed.alg not in trusted.config.algorithms:
            raise AlgorithmRefused
        generation = await self._check_signature(parsed, trusted.keys)
        claims, voucher, ttl_s = parsed.claims, Voucher(typ=parsed.typ), None
        asks = trusted.config.introspection
        if trusted.introspection is not None and asks is not None and asks.jwt:
            claims = merged(claims, await trusted.introspection.claims_of(token))
            voucher = replace(voucher, introspected=True)
            ttl_s = min(float(asks.cache_s), self._cache_ttl_s)
        judged = judge(trusted.config, voucher, claims, self._now())
        self._remembered.put(token, judged, generation, monotonic_s=self._monotonic(), ttl_s=ttl_s)
        return judged

    async def _ask(self, token: str, trusted: _Trusted) -> Judged:
        """An opaque token: by its issuer's word alone."""
        asks = trusted.config.introspection
        assert trusted.introspection is not None
        assert asks is not None
        if len(token) > MAX_OPAQUE_CHARS:
            raise TokenTooLarge
        claims = await trusted.introspection.claims_of(token)
        voucher = Voucher(signed=False, introspected=True)
        judged = judge(trusted.config, voucher, claims, self._now())
        self._remembered.put(
            token, judged, None, monotonic_s=self._monotonic(), ttl_s=float(asks.cache_s)
        )
        return judged

    def _config_of(self, judged: Judged) -> IssuerConfig:
        return self._trusted[judged.principal.issuer].config

    def _recall(self, token: str) -> Judged | None:
        found = self._remembered.get(
            token, now_s=self._now().timestamp(), monotonic_s=self._monotonic()
        )
        if found is None:
            return None
        judged, generation = found
        keys = self._trusted[judged.principal.issuer].keys
        if generation is not None and keys is not None and generation != keys.generation:
            self._remembered.forget(token)  # its key may be the one that was withdrawn
            return None
        return judged

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


def _state_of(trusted: _Trusted) -> IssuerState:
    state = IssuerState(issuer=trusted.config.issuer, ok=True, keys=0, age_s=None, problem=None)
    if trusted.keys is not None:
        state = trusted.keys.state()
    asked = trusted.introspection
    if asked is not None and not asked.ok:
        state = replace(state, ok=False, problem=state.problem or asked.problem)
    return state
