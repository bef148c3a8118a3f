"""The keys of one issuer: fetched, kept, refreshed, without letting callers hammer it."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import httpx2

from app.auth.tokens.errors import IssuerUnavailable
from app.auth.tokens.fetch import FetchFailed, discover, fetch_document
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.keys import KeyRing, KeySetUnusable, parse_key_set


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTimings:
    """When keys are fetched again; all in seconds."""

    ttl_s: float = 600.0
    """Age at which a request waits for fresh keys. While the issuer can be reached, a key it
    withdrew is trusted no longer than this and the minute a token is remembered."""
    refresh_ahead_s: float = 480.0
    """Age from which a request starts a refresh without waiting for it."""
    max_stale_s: float = 86_400.0
    """How long old keys serve while the issuer cannot be reached."""
    unknown_key_interval_s: float = 60.0
    """Least time between two fetches caused by tokens naming keys we do not have."""
    first_backoff_s: float = 5.0
    max_backoff_s: float = 60.0
    fetch_deadline_s: float = 5.0
    """For discovery and keys together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerState:
    """How an issuer's keys stand."""

    issuer: str
    ok: bool
    """False (degraded): no keys, or the last attempt to refresh them failed."""
    keys: int
    age_s: float | None
    """Seconds since the keys were last fetched; None when they never were."""
    problem: str | None
    """Why the last attempt failed, in words for an operator's log, not for the public."""


class IssuerKeys:
    """Cache of one issuer's key set.

    There is at most one fetch under way, shared by everyone who waits, and it belongs to the
    cache and not to a caller: a client that hangs up neither breaks it for the others nor gets
    a new one started for the next. The event loop runs one task at a time and nothing here
    awaits between a check and the act on it, so there are no locks.
    """

    def __init__(
        self,
        config: IssuerConfig,
        *,
        http: httpx2.AsyncClient,
        monotonic: Callable[[], float],
        timings: KeyTimings,
    ) -> None:
        self._config = config
        self._http = http
        self._monotonic = monotonic
        self._timings = timings
        self._ring: KeyRing | None = None
        self._jwks_uri = config.jwks_uri
        self._fetched_at: float | None = None
        self._failures = 0
        self._problem: str | None = None
        self._retry_at = float("-inf")
        self._unknown_key_at = float("-inf")
        self._under_way: asyncio.Task[None] | None = None
        self._generation = 0

    @property
    def generation(self) -> int:
        """Rises whenever the set of trusted keys changes: what was concluded from the old set
        has to be concluded anew."""
        return self._generation

    async def current(self) -> KeyRing:
        """The keys to verify with, fetched or refreshed if need be.

        Raises :class:`IssuerUnavailable` when there are none that may still be used. An issuer
        known to be failing costs nobody a wait: between attempts the answer is immediate.
        """
        age = self._age()
        if age is None or age >= self._timings.max_stale_s:
            if self._under_way or self._may_retry():
                await self._wait_for(self._start(rediscover=True))
        elif age >= self._timings.refresh_ahead_s and self._may_retry():
            task = self._start(rediscover=True)
            if age >= self._timings.ttl_s and not self._failures:
                await self._wait_for(task)
        return self._usable()

    async def after_unknown_key(self) -> KeyRing | None:
        """The keys after one more look at the issuer, or None if it may not be asked now.

        The interval is the defence against a stream of made-up key ids: it caps the fetches they
        cause, whatever comes of them. Not covered: a key published within the interval of such a
        stream is picked up only when the interval ends.
        """
        task = self._under_way
        if task is None:
            now = self._monotonic()
            if now < self._unknown_key_at + self._timings.unknown_key_interval_s:
                return None
            if not self._may_retry():
                return None
            self._unknown_key_at = now
            task = self._start(rediscover=False)
        await self._wait_for(task)
        return self._usable()

    async def prefetch(self) -> None:
        """Have the keys before a caller needs them, also after a failure. Never raises."""
        if self._failures:
            if self._may_retry():
                await self._wait_for(self._start(rediscover=True))
            return
        with contextlib.suppress(IssuerUnavailable):
            await self.current()

    @property
    def failing(self) -> bool:
        """Whether the last attempt to fetch failed, so that our set may be out of date."""
        return self._failures > 0

    def unavailable(self) -> IssuerUnavailable:
        """The error for a token that cannot be judged, with the time to the next attempt."""
        wait_s = max(self._retry_at - self._monotonic(), 1.0)
        return IssuerUnavailable(self._config.issuer, retry_after_s=math.ceil(wait_s))

    def state(self) -> IssuerState:
        """Without asking anybody."""
        age = self._age()
        usable = age is not None and age < self._timings.max_stale_s
        return IssuerState(
            issuer=self._config.issuer,
            ok=usable and not self._failures,
            keys=len(self._ring.keys) if self._ring is not None else 0,
            age_s=age,
            problem=self._problem,
        )

    async def aclose(self) -> None:
        """End a fetch under way; those who wait for it go on with the keys there are."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait([self._under_way])

    def _age(self) -> float | None:
        return None if self._fetched_at is None else self._monotonic() - self._fetched_at

    def _may_retry(self) -> bool:
        return self._monotonic() >= self._retry_at

    def _usable(self) -> KeyRing:
        age = self._age()
        if self._ring is None or age is None or age >= self._timings.max_stale_s:
            raise self.unavailable()
        return self._ring

    def _start(self, *, rediscover: bool) -> asyncio.Task[None]:
        if self._under_way is None:
            task = asyncio.create_task(self._refresh(rediscover=rediscover), name="issuer-keys")
            task.add_done_callback(self._ended)
            self._under_way = task
        return self._under_way

    @staticmethod
    async def _wait_for(task: asyncio.Task[None]) -> None:
        """Neither hands a waiter's cancellation on to the fetch nor the fetch's to a waiter."""
        await asyncio.wait([task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way = None
        if not task.cancelled():
            task.result()  # what still comes out of there is a defect, for the loop to show

    async def _refresh(self, *, rediscover: bool) -> None:
        try:
            async with asyncio.timeout(self._timings.fetch_deadline_s):
                ring = parse_key_set(await self._fetch(rediscover=rediscover))
        except (FetchFailed, KeySetUnusable, TimeoutError) as error:
            self._failed(str(error) or f"no answer in {self._timings.fetch_deadline_s:g} s")
            return
        except Exception:
            self._failed("internal error")  # a defect of ours backs off like any failure
            raise
        if self._ring is None or not self._ring.same_as(ring):
            self._generation += 1
        self._ring = ring
        self._fetched_at = self._monotonic()
        self._failures = 0
        self._problem = None
        self._retry_at = float("-inf")

    def _failed(self, problem: str) -> None:
        self._failures += 1
        self._problem = problem
        self._retry_at = self._monotonic() + min(
            self._timings.max_backoff_s,
            self._timings.first_backoff_s * 2.0 ** min(self._failures - 1, 16),
        )

    async def _fetch(self, *, rediscover: bool) -> bytes:
        if self._config.jwks_uri is None and (rediscover or self._jwks_uri is None):
            self._jwks_uri = await discover(self._http, self._config, "jwks_uri")
        assert self._jwks_uri is not None  # set in the settings or just discovered
        return await fetch_document(self._http, self._jwks_uri)
