"""Sessions as credentials: who a cookie stands for, how long, and how it ends.

A session can do what its access token could do as a bearer, and is judged in the same way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from datetime import timedelta

from app.auth.principal import Principal
from app.auth.sessions.errors import LogoutTokenRefused, SessionEnded
from app.auth.sessions.issuer_tokens import LoggedIn, Unfit, judge_logout_token
from app.auth.sessions.kept import (
    Judge,
    KeptTokens,
    Providers,
    SessionRules,
    TokenSafe,
    Visitor,
    actor_of,
)
from app.auth.sessions.places import FRONT, BrowserPlace, cookies_named
from app.auth.sessions.provider import GrantedTokens
from app.auth.sessions.refreshing import Refreshes
from app.auth.sessions.sealing import digest_of
from app.auth.tokens.errors import IssuerUnavailable, TokenExpired, TokenInvalid
from app.clock import Clock
from app.ledger.browser_sessions import BrowserSessions, ProviderLogout, StoredSession

_ID = re.compile(r"[A-Za-z0-9_-]{43}")


class SessionDesk:
    def __init__(
        self,
        store: BrowserSessions,
        *,
        providers: Providers,
        judge: Judge,
        safe: TokenSafe,
        refreshes: Refreshes,
        place: BrowserPlace,
        clock: Clock,
        rules: SessionRules,
        new_secret: Callable[[], str],
    ) -> None:
        """`new_secret`: 256 random bits in base64url, without padding."""
        self.place = place
        self._store = store
        self._providers = providers
        self._judge = judge
        self._safe = safe
        self._refreshes = refreshes
        self._clock = clock
        self._rules = rules
        self._new_secret = new_secret

    async def begin(
        self,
        granted: GrantedTokens,
        who: Principal,
        logged_in: LoggedIn,
        visitor: Visitor,
        *,
        replaced: Sequence[str],
    ) -> str:
        """The text of Set-Cookie for a new session, whose id nobody has seen before. `replaced`:
        ids that the browser had until now, good or not; what they stood for ends, and at its issuer
        too, where that would not end the new one."""
        assert granted.id_token is not None
        now = self._clock.now()
        session_id = self._new_secret()
        digest = digest_of(session_id)
        ends_at = now + timedelta(seconds=self._rules.longest_s)
        tokens = KeptTokens(granted.access_token, granted.refresh_token, granted.id_token)
        session = StoredSession(
            digest=digest,
            actor=actor_of(who),
            login_subject=logged_in.subject,
            provider_session=logged_in.provider_session,
            sealed=self._safe.put(digest, tokens),
            access_ends_at=who.expires_at,
            started_at=now,
            seen_at=now,
            over_at=min(now + timedelta(seconds=self._rules.idle_s), ends_at),
            ends_at=ends_at,
        )
        ended = await self._store.begin(
            session,
            audit=visitor.entry(now, "login", session.actor),
            ended=lambda actor, reason: visitor.entry(now, "end_session", actor, reason),
            instead_of=[digest_of(one) for one in replaced],
            most=self._rules.most_of_person,
        )
        await asyncio.gather(*(self._revoke(one) for one in ended if is_apart(one, session)))
        return self.place.cookie(self.place.session_cookie, session_id, None)

    async def found(self, cookies: Sequence[str]) -> StoredSession | None:
        """The session that a request's Cookie headers show; None: they show none.

        Raises SessionEnded, LedgerUnavailable.
        """
        shown = cookies_named(self.place.session_cookie, cookies)
        if not shown:
            return None
        if len(shown) > 1 or not _ID.fullmatch(shown[0]):
            raise SessionEnded
        session = await self._store.get(digest_of(shown[0]))
        if session is None or self._clock.now() >= session.over_at:
            raise SessionEnded
        if session.actor.issuer not in self._providers:  # nobody logs in there any more
            raise SessionEnded
        return session

    async def principal(
        self, session: StoredSession, visitor: Visitor, *, in_use: bool
    ) -> Principal:
        """The caller that the session's access token describes, judged as a bearer's is.

        `in_use`: whether a person is at work, which keeps the session from being idle. Raises
        SessionEnded, TokenInvalid, IssuerUnavailable, LedgerUnavailable.
        """
        if self._refreshes.is_due(session):
            session = await self._refreshes.refreshed(session)
        try:
            who = await self._judge.verify(self._safe.take(session).access)
        except TokenExpired:
            raise await self._over(session, visitor, TokenExpired.reason) from None
        if actor_of(who) != session.actor:
            # Its claims are mapped in another way by now, or the issuer refreshed somebody else's.
            raise await self._over(session, visitor, "ACTOR_CHANGED")
        now = self._clock.now()
        if in_use and (now - session.seen_at).total_seconds() >= self._rules.notice_s:
            idle = timedelta(seconds=self._rules.idle_s)
            await self._store.seen(session.digest, min(now + idle, session.ends_at))
        return who

    async def log_out(self, session: StoredSession, visitor: Visitor) -> str | None:
        """End it here, and its refresh token. Where the browser goes to end it at its issuer too;
        None: that is not offered, or the issuer can't be asked at present."""
        entry = visitor.entry(self._clock.now(), "logout", session.actor)
        await self._store.end(session.digest, entry)
        tokens = await self._revoke(session)
        if tokens is None:
            return None
        try:
            return await self._providers[session.actor.issuer].end_session_url(
                tokens.identity, return_to=f"{self.place.base_url}{FRONT}"
            )
        except IssuerUnavailable:
            return None

    async def log_out_by_issuer(self, logout_token: str, visitor: Visitor) -> int:
        """How many sessions an issuer has ended with this. Each of its words counts once.

        Raises LogoutTokenRefused, IssuerUnavailable, LedgerUnavailable.
        """
        try:
            token = await self._judge.signed(logout_token, by=self._providers.keys())
            client = self._providers[token.claims["iss"]].client
            told = judge_logout_token(token, client, self._clock.now())
        except Unfit as unfit:
            raise LogoutTokenRefused(str(unfit)) from None
        except TokenInvalid as invalid:
            raise LogoutTokenRefused(invalid.reason) from None
        logout = ProviderLogout(
            issuer=client.issuer,
            login_subject=told.subject,
            provider_session=told.provider_session,
            once=digest_of(f"logout\x00{client.issuer}\x00{told.token_id}"),
            until=told.good_until,
        )
        ended = await self._store.end_by_provider(
            logout,
            lambda actor: visitor.entry(self._clock.now(), "logout", actor, "LOGGED_OUT_BY_ISSUER"),
        )
        if ended is None:
            raise LogoutTokenRefused("it was shown before")
        return ended

    async def _revoke(self, session: StoredSession) -> KeptTokens | None:
        """Have its refresh token made void, if that can be. None: its tokens are lost already."""
        provider = self._providers.get(session.actor.issuer)
        try:
            tokens = self._safe.take(session)
        except SessionEnded:
            return None
        if tokens.refresh is not None and provider is not None:
            await provider.revoke(tokens.refresh)
        return tokens

    async def _over(self, session: StoredSession, visitor: Visitor, reason: str) -> SessionEnded:
        entry = visitor.entry(self._clock.now(), "end_session", session.actor, reason)
        await self._store.end(session.digest, entry)
        return SessionEnded()


def is_apart(one: StoredSession, other: StoredSession) -> bool:
    """Whether they are known to be of two logins at the issuer. With a refresh token a provider
    ends all that came of the same one (RFC 7009 section 2.1), and may give a person who was logged
    in there already more of it: so what is not known is left alone."""
    if (one.actor.issuer, one.login_subject) != (other.actor.issuer, other.login_subject):
        return True
    sessions = {one.provider_session, other.provider_session}
    return None not in sessions and len(sessions) > 1
