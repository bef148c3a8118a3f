"""How many refusals, orders and changes a caller may cause before it has to wait.

**Refusals** (401, 403, logins that come to nothing) are counted for each address and for each
caller who is known. Beyond the limit the answer is 429 in place of the refusal. What is good is let
in all the same: somebody who shares an address with a caller whose tokens are wrong, or a caller
some of whose calls are refused, must not be kept from what it may do, and a token is not found by
guessing.

**New tokens.** The exception is what costs a question to the issuer: a token that only its issuer
can judge and that was not good here before. It counts as a refusal of its address before anybody is
asked, whatever becomes of it, so that a flood of them is over its limit while the first are still
being asked about; and only few of one address are asked about at once, so that the places which the
issuer has for all are not filled from there.

**Answers of issuers** that browsers bring back from a login are counted like that too: anybody can
begin a login, and make up an answer that its issuer has to be asked about.

**Orders and changes** are counted for each caller and for each address, once it is clear that the
caller may give them.

Reads are never limited here. Each gateway counts for itself, so several of them let in as much
more; and who comes from many networks at once is as many addresses.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from app.auth.principal import Principal
from app.auth.sessions.errors import LoginRefused, LogoutTokenRefused
from app.auth.tokens.bearer import token_with_scheme
from app.auth.tokens.compact import is_opaque
from app.auth.tokens.errors import PermissionDenied, TokenRefused
from app.domain.errors import ChadburnError
from app.domain.operation import Actor
from app.http.rates import Meter, Rate, neighbourhood
from app.http.refusals import TooManyChanges, TooManyNewTokens, TooManyRefusals

_BURST_S = 5
_READING = frozenset({"GET", "HEAD"})
_ASKED_AT_ONCE = 8
"""Of the 32 questions that an issuer is asked at once."""


class Allowances:
    """0 for a number: no limit. `now`: seconds of a clock that never goes back."""

    def __init__(
        self,
        *,
        refusals_per_minute: int = 600,
        changes_per_s: int = 100,
        changes_per_s_of_address: int = 400,
        most_keys: int = 10_000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        refusals = Rate(refusals_per_minute / 60, refusals_per_minute)
        self._refused_addresses = _meter(refusals, most_keys)
        self._refused_callers = _meter(refusals, most_keys)
        self._changes = _meter(Rate(changes_per_s, changes_per_s * _BURST_S), most_keys)
        of_address = Rate(changes_per_s_of_address, changes_per_s_of_address * _BURST_S)
        self._changes_of_address = _meter(of_address, most_keys)
        self._good: OrderedDict[bytes, None] = OrderedDict()
        # For each address the tokens that are being judged, and in how many calls.
        self._asking: dict[str, Counter[bytes]] = {}
        self._asks_are_limited = refusals_per_minute > 0
        self._most = most_keys
        self._now = now

    @contextmanager
    def judging(self, request: Request) -> Iterator[None]:
        """While the caller's token and scopes are judged; an end without an error says that they
        are good. Raises TooManyNewTokens before, and TooManyChanges after."""
        token = _opaque_token_of(request)
        if token is None or token in self._good:
            yield
        else:
            with self._asked_about(request, token):
                yield
        if token is not None:
            self._good[token] = None
            self._good.move_to_end(token)
            if len(self._good) > self._most:
                self._good.popitem(last=False)
        if request.method not in _READING:
            self._count_change(request)

    @contextmanager
    def logging_in(self, request: Request) -> Iterator[None]:
        """While an answer that a browser has brought is judged. Raises TooManyNewTokens."""
        answer = hashlib.sha256(request.url.query.encode("utf-8", "replace")).digest()
        with self._asked_about(request, answer):
            yield

    def refused(self, request: Request, error: ChadburnError) -> ChadburnError:
        """What to answer: the refusal, or TooManyRefusals in its place."""
        now = self._now()
        if isinstance(error, TokenRefused | LoginRefused | LogoutTokenRefused):
            if getattr(request.state, "counted_as_new", False):
                return error
            wait_s = self._refused_addresses.take(_address_of(request), now)
        elif isinstance(error, PermissionDenied):
            caller = _caller_of(request)
            meter = self._refused_addresses if caller is None else self._refused_callers
            wait_s = meter.take(caller or _address_of(request), now)
        else:
            return error
        return TooManyRefusals(wait_s) if wait_s else error

    @contextmanager
    def _asked_about(self, request: Request, token: bytes) -> Iterator[None]:
        """One question more, or, with a token that is being asked about, one call more that waits
        for the same answer."""
        if not self._asks_are_limited:
            yield
            return
        address = _address_of(request)
        asking = self._asking.get(address, Counter())
        if token not in asking:
            if len(asking) >= _ASKED_AT_ONCE:
                raise TooManyNewTokens(1.0)
            wait_s = self._refused_addresses.take(address, self._now())
            if wait_s:
                raise TooManyNewTokens(wait_s)
            request.state.counted_as_new = True
        self._asking[address] = asking
        asking[token] += 1
        try:
            yield
        finally:
            asking[token] -= 1
            if not asking[token]:
                del asking[token]
            if not asking:
                self._asking.pop(address, None)

    def _count_change(self, request: Request) -> None:
        now = self._now()
        wait_s = self._changes.take(_caller_of(request), now)
        # Of two that are asked only the one that is left is used up.
        wait_s = wait_s or self._changes_of_address.take(_address_of(request), now)
        if wait_s:
            raise TooManyChanges(wait_s)


def _meter(rate: Rate, most: int) -> Meter:
    return Meter(rate if rate.per_s else None, most=most)


def _address_of(request: Request) -> str:
    return neighbourhood(request.state.source)


def _caller_of(request: Request) -> Actor | None:
    who: Principal | None = getattr(request.state, "principal", None)
    return None if who is None else Actor(who.issuer, who.subject, who.client_id)


def _opaque_token_of(request: Request) -> bytes | None:
    """A short form of the token, if it is none that can be judged without its issuer."""
    try:
        _, token = token_with_scheme(request.headers.getlist("authorization"))
    except TokenRefused:
        return None
    return hashlib.sha256(token.encode()).digest() if is_opaque(token) else None
