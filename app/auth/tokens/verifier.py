"""Judging a bearer token: from a string to a Principal, or a reason why not."""

import time
from collections.abc import Callable, Iterable
from datetime import datetime

import httpx2

from app.auth.principal import Principal
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.jwks import IssuerState


class TokenVerifier:
    """Verifies tokens of several issuers; safe to share between all requests of one event loop.

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
        cache_size: int = 4096,
        cache_ttl_s: float = 60.0,
    ) -> None:
        """``http`` stays the caller's to close; ``now`` gives aware UTC times."""
        raise NotImplementedError

    async def verify(self, token: str) -> Principal:
        """The caller the token describes.

        A token for an inference audience is genuine: it gives a Principal of audience INFERENCE
        with no admin scopes, which every admin route answers with 403 insufficient_scope.

        Raises :class:`~app.auth.tokens.errors.TokenInvalid` (401, never 403) and
        :class:`~app.auth.tokens.errors.KeysUnavailable` (503) where the issuer's keys cannot be
        had, so that the token is neither good nor bad.
        """
        raise NotImplementedError

    async def warm(self) -> None:
        """Fetch every issuer's keys at start; an issuer that is down shows in the states only."""
        raise NotImplementedError

    def issuer_states(self) -> tuple[IssuerState, ...]:
        """How each issuer's keys stand, for readiness; asks nobody and never raises."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End key fetches still under way."""
        raise NotImplementedError
