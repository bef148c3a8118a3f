"""From a click to a session: authorization code with PKCE at an issuer, and back (RFC 9700).

What belongs to a login under way is in a sealed cookie of its own in the browser that began it, so
that anybody may begin one and nothing is written for it. That it comes back once is kept in the
ledger. Login CSRF ends at the cookie: an answer that was got in another browser finds none. Of two
issuers that are mixed up the answer names one (RFC 9207), or has come to the path of one.
"""

from __future__ import annotations

import base64
import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from app.auth.principal import Principal
from app.auth.sessions.clients import LoginClient, LoginClients
from app.auth.sessions.desk import SessionDesk
from app.auth.sessions.errors import (
    LoginDenied,
    LoginFailed,
    LoginForbidden,
    LoginIssuerUnknown,
    LoginMixedUp,
    LoginReplayed,
    LoginUnknown,
)
from app.auth.sessions.issuer_tokens import LoggedIn, Unfit, judge_id_token
from app.auth.sessions.kept import Judge, Providers, Visitor
from app.auth.sessions.places import BrowserPlace, cookies_named
from app.auth.sessions.provider import GrantedTokens, GrantRefused
from app.auth.sessions.sealing import SealingKeys, Unsealable, digest_of
from app.auth.sessions.wire import error_code
from app.auth.tokens.errors import TokenInvalid
from app.clock import Clock

log = logging.getLogger(__name__)

LOGIN_S = 600
"""How long a person may take at the issuer."""
_PURPOSE = "login"
_MOST_UNDER_WAY = 8
"""In one browser: each is a cookie of half a kilobyte, and a request's headers have a limit."""
_MAX_ANSWER_CHARS = 4096


class UsedOnce(Protocol):
    """What `app.ledger.proofs.Proofs` offers here."""

    async def first_use(self, digest: str, until: datetime) -> bool: ...


@dataclass(frozen=True, slots=True)
class Begun:
    """Where the browser goes, and the cookie that it takes along; others that are to go before it
    (texts of Set-Cookie)."""

    location: str
    cookie: str
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginAnswer:
    """What came to the callback. `path_client`: the client that its path names."""

    state: str | None = field(repr=False)
    code: str | None = field(repr=False)
    issuer: str | None
    error: str | None
    path_client: str | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Where the browser goes, with these cookies (texts of Set-Cookie)."""

    location: str
    cookies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    client: LoginClient
    nonce: str = field(repr=False)
    code_verifier: str = field(repr=False)
    return_path: str
    until: datetime
    state_digest: str


class Logins:
    def __init__(
        self,
        clients: LoginClients,
        *,
        providers: Providers,
        desk: SessionDesk,
        judge: Judge,
        used: UsedOnce,
        keys: SealingKeys,
        place: BrowserPlace,
        clock: Clock,
        new_secret: Callable[[], str],
    ) -> None:
        """`new_secret`: 256 random bits in base64url, without padding."""
        self.clients = clients
        self._providers = providers
        self._desk = desk
        self._judge = judge
        self._used = used
        self._keys = keys
        self._place = place
        self._clock = clock
        self._new_secret = new_secret

    def client_for(self, issuer: str | None) -> LoginClient | None:
        """The one that was asked for, or the only one there is; None: a person has to choose.

        Raises LoginIssuerUnknown.
        """
        if issuer is None:
            return next(iter(self.clients)) if len(self.clients) == 1 else None
        client = self.clients.of(issuer)
        if client is None:
            raise LoginIssuerUnknown
        return client

    async def begin(
        self, client: LoginClient, return_to: str | None, cookies: Sequence[str] = ()
    ) -> Begun:
        """`cookies`: the Cookie headers of the request, in which logins that were given up must not
        pile up. Raises ReturnRefused, IssuerUnavailable."""
        return_path = self._place.return_path(return_to)
        state, nonce, code_verifier = (self._new_secret() for _ in range(3))
        provider = self._providers[client.issuer]
        location = await provider.authorization_url(
            state=state, nonce=nonce, code_verifier=code_verifier
        )
        until = self._clock.now() + timedelta(seconds=LOGIN_S)
        sealed = self._keys.seal(
            {
                "issuer": client.issuer,
                "state": state,
                "nonce": nonce,
                "code_verifier": code_verifier,
                "return_path": return_path,
                "until": int(until.timestamp()),
            },
            _PURPOSE,
        )
        value = base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()
        name = self._place.login_cookie(digest_of(state))
        under_way = self._place.logins_under_way(cookies)
        given_up = under_way if len(under_way) >= _MOST_UNDER_WAY else ()
        return Begun(
            location,
            self._place.cookie(name, value, LOGIN_S),
            tuple(self._place.cookie(one, "", 0) for one in given_up),
        )

    async def finish(
        self, answer: LoginAnswer, cookies: Sequence[str], visitor: Visitor
    ) -> Finished:
        """A session in the place of any that the browser had.

        Raises LoginRefused, LoginForbidden, IssuerUnavailable, LedgerUnavailable. After any of them
        the login is over.
        """
        login = self._under_way(answer.state, cookies)
        once = digest_of(f"login\x00{login.state_digest}")
        if not await self._used.first_use(once, login.until):
            raise LoginReplayed
        await self._refuse_mixed_up(login.client, answer)
        if answer.error is not None:
            denied = LoginDenied(error_code(answer.error))
            log.info("%s did not log a person in: %s", login.client.issuer, denied.error)
            raise denied
        if not answer.code or len(answer.code) > _MAX_ANSWER_CHARS or not answer.code.isascii():
            raise LoginFailed("the answer has no code")
        try:
            granted, who, logged_in = await self._granted(login, answer.code)
        except LoginFailed as failed:
            log.warning("a login at %s failed: %s", login.client.issuer, failed.why)
            raise
        if not who.may_administer:
            if granted.refresh_token is not None:
                await self._providers[login.client.issuer].revoke(granted.refresh_token)
            raise LoginForbidden(who)
        cookie = await self._desk.begin(
            granted,
            who,
            logged_in,
            visitor,
            replaced=cookies_named(self._place.session_cookie, cookies),
        )
        spent = self._place.cookie(self._place.login_cookie(login.state_digest), "", 0)
        return Finished(login.return_path, (cookie, spent))

    def _under_way(self, state: str | None, cookies: Sequence[str]) -> _UnderWay:
        if not state or len(state) > _MAX_ANSWER_CHARS:
            raise LoginUnknown
        state_digest = digest_of(state)
        kept = cookies_named(self._place.login_cookie(state_digest), cookies)
        if len(kept) != 1:
            raise LoginUnknown
        try:
            sealed = base64.urlsafe_b64decode(kept[0] + "=" * (-len(kept[0]) % 4))
            login = self._keys.unseal(sealed, _PURPOSE)
        except (ValueError, Unsealable):
            raise LoginUnknown from None
        return self._read(login, state, state_digest)

    def _read(self, login: dict[str, Any], state: str, state_digest: str) -> _UnderWay:
        until = datetime.fromtimestamp(login["until"], UTC)
        client = self.clients.of(login["issuer"])
        same = hmac.compare_digest(login["state"].encode(), state.encode())
        if not same or client is None or self._clock.now() >= until:
            raise LoginUnknown
        return _UnderWay(
            client,
            login["nonce"],
            login["code_verifier"],
            login["return_path"],
            until,
            state_digest,
        )

    async def _refuse_mixed_up(self, client: LoginClient, answer: LoginAnswer) -> None:
        """Raises LoginMixedUp unless the answer is certain to be of the issuer that was asked.

        That one's metadata alone says nothing against one that is malicious: it would not announce
        that it names itself. So with several issuers each answer names its own, or comes to a path
        that only one of them knows.
        """
        named_by_path = answer.path_client is not None
        if named_by_path != client.own_path:
            raise LoginMixedUp
        if named_by_path and answer.path_client != client.name:
            raise LoginMixedUp
        if answer.issuer is not None:
            if answer.issuer != client.issuer:
                raise LoginMixedUp
            return
        if len(self.clients) > 1 and not named_by_path:
            raise LoginMixedUp
        if (await self._providers[client.issuer].endpoints()).names_itself:
            raise LoginMixedUp

    async def _granted(
        self, login: _UnderWay, code: str
    ) -> tuple[GrantedTokens, Principal, LoggedIn]:
        """Raises LoginFailed, IssuerUnavailable."""
        client = login.client
        try:
            granted = await self._providers[client.issuer].exchange(code, login.code_verifier)
            if granted.id_token is None:
                raise LoginFailed("the token endpoint gave no ID token")
            signed = await self._judge.signed(granted.id_token, by=(client.issuer,))
            logged_in = judge_id_token(
                signed,
                client,
                nonce=login.nonce,
                access_token=granted.access_token,
                now=self._clock.now(),
            )
            # As a bearer's is: what a session may do is what its token could do by itself.
            who = await self._judge.verify(granted.access_token)
        except GrantRefused as refused:
            raise LoginFailed(f"the token endpoint says {refused.error}") from None
        except Unfit as unfit:
            raise LoginFailed(str(unfit)) from None
        except TokenInvalid as invalid:
            raise LoginFailed(f"{invalid.reason}: {invalid.message}") from None
        if who.issuer != client.issuer:
            raise LoginFailed("the access token is of another issuer")
        return granted, who, logged_in
