"""New access tokens for sessions, each got by one gateway.

An issuer that rotates refresh tokens takes a second use of one for a theft and ends the whole grant
(RFC 9700 section 4.14.2), so of all gateways one refreshes: whoever gets the row's lease. The
refresh belongs to the process and not to the request that began it: a caller who hangs up would
take the only copy of the new token along.

Not covered: a process that ends between the issuer's answer and the row, and a gateway whose clock
is ahead of another's by more than the lease outlives the call. The session ends then at its next
refresh, and its person logs in again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from app.auth.sessions.errors import LoginFailed, SessionEnded
from app.auth.sessions.issuer_tokens import Unfit, judge_id_token
from app.auth.sessions.kept import (
    Judge,
    KeptTokens,
    Providers,
    SessionRules,
    TokenSafe,
    Visitor,
)
from app.auth.sessions.provider import GrantedTokens, GrantRefused, Provider
from app.auth.tokens.errors import IssuerUnavailable, TokenInvalid
from app.clock import Clock
from app.domain.errors import ChadburnError
from app.ledger.browser_sessions import BrowserSessions, StoredSession
from app.ledger.errors import LedgerUnavailable

log = logging.getLogger(__name__)

_NO_SUCH_GRANT = "invalid_grant"
_TRIES_S = (0.2, 1.0)
"""Pauses before the row is written again."""


class Refreshes:
    def __init__(
        self,
        store: BrowserSessions,
        *,
        providers: Providers,
        judge: Judge,
        safe: TokenSafe,
        clock: Clock,
        rules: SessionRules,
        new_secret: Callable[[], str],
    ) -> None:
        self._store = store
        self._providers = providers
        self._judge = judge
        self._safe = safe
        self._clock = clock
        self._rules = rules
        self._new_secret = new_secret
        self._under_way: dict[str, asyncio.Task[StoredSession]] = {}

    def is_due(self, session: StoredSession) -> bool:
        """Whether its access token is at its end, or nearly so, and can be replaced."""
        ahead = timedelta(seconds=self._rules.refresh_ahead_s)
        near = self._clock.now() >= session.access_ends_at - ahead
        return near and self._safe.take(session).refresh is not None

    async def refreshed(self, session: StoredSession) -> StoredSession:
        """As it stands after a refresh, by whomever; as it was, where that came to nothing and the
        access token is still good. Raises SessionEnded, IssuerUnavailable, LedgerUnavailable."""
        task = self._under_way.get(session.digest)
        if task is None:
            task = asyncio.create_task(self._refresh(session), name="session-refresh")
            self._under_way[session.digest] = task
            task.add_done_callback(lambda done: self._ended(session.digest, done))
        await asyncio.wait([task])
        if task.cancelled():
            raise self._unavailable(session)
        return task.result()

    async def aclose(self, within_s: float) -> None:
        """Let what is under way come to its end: a refresh that is cut off is a session lost."""
        tasks = list(self._under_way.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, digest: str, task: asyncio.Task[StoredSession]) -> None:
        self._under_way.pop(digest, None)
        # Whoever waited may have left by then. What is wrong here, and not with the session, shows.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ChadburnError):
            log.error("a refresh broke off", exc_info=error)

    async def _refresh(self, session: StoredSession) -> StoredSession:
        refresher = self._new_secret()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._rules.refresh_wait_s
        while True:
            now = self._clock.now()
            until = now + timedelta(seconds=self._rules.refresh_lease_s)
            if await self._store.claim_refresh(session.digest, session.version, refresher, until):
                return await self._carried_out(session, refresher)
            # Another gateway refreshes it, has done so, or has failed to a moment ago.
            if now < session.access_ends_at:
                return session
            latest = await self._store.get(session.digest)
            if latest is None:
                raise SessionEnded
            if latest.version > session.version:
                return latest
            pausing = latest.refreshing_until is not None and latest.refresher is None
            if pausing or loop.time() >= give_up_at:
                raise self._unavailable(session)
            await asyncio.sleep(self._rules.look_s)

    async def _carried_out(self, session: StoredSession, refresher: str) -> StoredSession:
        old = self._safe.take(session)
        assert old.refresh is not None
        provider = self._providers[session.actor.issuer]
        try:
            granted = await provider.refresh(old.refresh)
        except GrantRefused as refused:
            if refused.error == _NO_SUCH_GRANT:
                raise await self._over(session, "REFRESH_REFUSED") from None
            # The gateway's own registration at the issuer, most likely: no login would cure that.
            log.error("a refresh at %s failed: %s", session.actor.issuer, refused.error)
            return await self._as_it_was(session, refresher)
        except IssuerUnavailable:
            return await self._as_it_was(session, refresher)
        except LoginFailed as failed:
            log.warning("a refresh at %s is no good: %s", session.actor.issuer, failed.why)
            raise await self._over(session, "REFRESH_UNUSABLE") from None
        try:
            identity = await self._identity(session, granted, provider) or old.identity
            access_ends_at = await self._end_of(granted.access_token)
        except (Unfit, TokenInvalid) as unfit:
            log.warning("a refresh at %s is no good: %s", session.actor.issuer, unfit)
            raise await self._over(session, "REFRESH_UNUSABLE") from None
        tokens = KeptTokens(granted.access_token, granted.refresh_token or old.refresh, identity)
        stored = await self._written(session, refresher, tokens, access_ends_at)
        if stored is None:
            if granted.refresh_token is not None:
                await provider.revoke(granted.refresh_token)
            raise SessionEnded
        return stored

    async def _identity(
        self, session: StoredSession, granted: GrantedTokens, provider: Provider
    ) -> str | None:
        """A newer ID token of the same person (OpenID Connect Core section 12.2); None: the one
        there is stays. Raises Unfit, TokenInvalid."""
        if granted.id_token is None:
            return None
        try:
            signed = await self._judge.signed(granted.id_token, by=(session.actor.issuer,))
        except IssuerUnavailable:
            return None  # not believed, and not needed
        logged_in = judge_id_token(
            signed,
            provider.client,
            nonce=None,
            access_token=granted.access_token,
            now=self._clock.now(),
        )
        if logged_in.subject != session.login_subject:
            raise Unfit("the ID token of a refresh names another person")
        return granted.id_token

    async def _end_of(self, access_token: str) -> datetime:
        """Raises TokenInvalid. Where the token can't be judged at present it is kept all the same:
        the old refresh token is spent. Each request judges it again."""
        try:
            return (await self._judge.verify(access_token)).expires_at
        except IssuerUnavailable:
            return self._clock.now() + timedelta(seconds=2 * self._rules.refresh_ahead_s)

    async def _written(
        self, session: StoredSession, refresher: str, tokens: KeptTokens, access_ends_at: datetime
    ) -> StoredSession | None:
        """Tried again: with the row goes the only refresh token that is good from here on."""
        sealed = self._safe.put(session.digest, tokens)
        for pause_s in (*_TRIES_S, None):
            try:
                return await self._store.refreshed(
                    session.digest,
                    session.version,
                    refresher,
                    sealed=sealed,
                    access_ends_at=access_ends_at,
                )
            except LedgerUnavailable:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _as_it_was(self, session: StoredSession, refresher: str) -> StoredSession:
        pause_until = self._clock.now() + timedelta(seconds=self._rules.refresh_pause_s)
        await self._store.give_up_refresh(session.digest, refresher, pause_until)
        if self._clock.now() < session.access_ends_at:
            return session
        raise self._unavailable(session)

    async def _over(self, session: StoredSession, reason: str) -> SessionEnded:
        entry = Visitor().entry(self._clock.now(), "end_session", session.actor, reason)
        await self._store.end(session.digest, entry)
        return SessionEnded()

    def _unavailable(self, session: StoredSession) -> IssuerUnavailable:
        return IssuerUnavailable(session.actor.issuer, retry_after_s=5)
