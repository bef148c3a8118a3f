"""Asking an issuer about a token (RFC 7662), without letting callers hammer it."""

import asyncio
import base64
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

import httpx2

from app.auth.tokens.errors import IssuerUnavailable, TokenInactive
from app.auth.tokens.fetch import Answered, FetchFailed, discover, post_form
from app.auth.tokens.issuers import ClientAuth, IntrospectionConfig, IssuerConfig
from app.auth.tokens.strict_json import json_object

# Says nothing and belongs to nobody: what the issuer answers to it does not matter, that it
# answers shows that it can be asked, and that it knows this gateway.
_PROBE = "chadburn-asks-whether-it-may-ask"
# About the token and not about the issuer or us: others may still be asked about.
_OF_ONE_TOKEN = frozenset([400, 413, 414, 422, 431])


@dataclass(frozen=True, slots=True, kw_only=True)
class IntrospectionTimings:
    """In seconds."""

    deadline_s: float = 5.0
    """For one question, with discovery where it is needed."""
    inactive_s: float = 5.0
    """How long a token that was found inactive is refused without asking again."""
    first_backoff_s: float = 1.0
    max_backoff_s: float = 15.0
    most_at_once: int = 32
    """Questions under way, each about another token; callers beyond them get 503."""
    inactive_kept: int = 4096


@dataclass(frozen=True, slots=True)
class _Answer:
    """``claims`` None: not active. ``failed``: there is no answer."""

    claims: Mapping[str, Any] | None = None
    failed: bool = False


class Introspection:
    """One issuer's introspection endpoint.

    There is at most one question under way about a token, shared by all who wait for it, and
    owned by nobody who may hang up. Answers for active tokens are kept by the verifier, together
    with what it made of them. The event loop runs one task at a time and nothing here awaits
    between a check and the act on it, so there are no locks.
    """

    def __init__(
        self,
        config: IssuerConfig,
        asks: IntrospectionConfig,
        *,
        http: httpx2.AsyncClient,
        monotonic: Callable[[], float],
        timings: IntrospectionTimings,
    ) -> None:
        self._config = config
        self._asks = asks
        self._http = http
        self._monotonic = monotonic
        self._timings = timings
        self._endpoint = asks.endpoint
        self._under_way: dict[bytes, asyncio.Task[_Answer]] = {}
        self._inactive: OrderedDict[bytes, float] = OrderedDict()
        self._failures = 0
        self._answered = False
        self._problem: str | None = None
        self._retry_at = float("-inf")

    async def claims_of(self, token: str) -> Mapping[str, Any]:
        """What the issuer says of an active token, believed in nothing yet but that.

        Raises TokenInactive, and IssuerUnavailable where the issuer could not be asked or did not
        give an answer that can be read: between attempts at one that fails, at once.
        """
        digest = hashlib.sha256(token.encode("ascii")).digest()
        if self._inactive.get(digest, float("-inf")) > self._monotonic():
            raise TokenInactive
        task = self._under_way.get(digest)
        if task is None:
            if self._monotonic() < self._retry_at:
                raise self._unavailable()
            if len(self._under_way) >= self._timings.most_at_once:
                raise IssuerUnavailable(self._config.issuer, retry_after_s=1)
            task = self._start(digest, token)
        await asyncio.wait([task])
        if task.cancelled():
            raise self._unavailable()
        answer = task.result()
        if answer.failed:
            raise self._unavailable()
        if answer.claims is None:
            self._remember_inactive(digest)
            raise TokenInactive
        return answer.claims

    async def probe(self) -> None:
        """Find out whether the issuer can be asked, unless that is known, or was tried in vain a
        moment ago; what comes of it shows in `ok`."""
        if (self._answered and not self._failures) or self._monotonic() < self._retry_at:
            return
        digest = hashlib.sha256(_PROBE.encode()).digest()
        task = self._under_way.get(digest) or self._start(digest, _PROBE)
        await asyncio.wait([task])

    @property
    def ok(self) -> bool:
        """Whether the last question was answered; False before the first one."""
        return self._answered and not self._failures

    @property
    def problem(self) -> str | None:
        """Why not, in words for an operator's log."""
        return self._problem

    async def aclose(self) -> None:
        """End the questions under way; who waits for one hears that the issuer is unavailable."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, digest: bytes, token: str) -> asyncio.Task[_Answer]:
        task = asyncio.create_task(self._ask(token), name="introspection")
        self._under_way[digest] = task
        task.add_done_callback(lambda _: self._under_way.pop(digest, None))
        return task

    async def _ask(self, token: str) -> _Answer:
        try:
            async with asyncio.timeout(self._timings.deadline_s):
                answer = await self._question(token)
        except Answered as error:
            if error.status in _OF_ONE_TOKEN:
                self._succeeded()  # it can be asked, only not about this one
            else:
                self._failed(str(error))
            return _Answer(failed=True)
        except (FetchFailed, TimeoutError) as error:
            self._failed(str(error) or f"no answer in {self._timings.deadline_s:g} s")
            return _Answer(failed=True)
        self._succeeded()
        return answer

    async def _question(self, token: str) -> _Answer:
        if self._endpoint is None:
            self._endpoint = await discover(self._http, self._config, "introspection_endpoint")
        form = {"token": token, "token_type_hint": "access_token"}
        headers: dict[str, str] = {}
        secret = await asyncio.to_thread(self._secret)
        if self._asks.client_auth is ClientAuth.POST:
            form |= {"client_id": self._asks.client_id, "client_secret": secret}
        else:
            # Each half form-encoded before they are joined (RFC 6749 §2.3.1).
            pair = f"{quote_plus(self._asks.client_id)}:{quote_plus(secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return _read(await post_form(self._http, self._endpoint, form, headers))

    def _secret(self) -> str:
        try:
            return self._asks.client_secret_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise FetchFailed(f"client secret file: {type(error).__name__}") from error

    def _remember_inactive(self, digest: bytes) -> None:
        self._inactive[digest] = self._monotonic() + self._timings.inactive_s
        self._inactive.move_to_end(digest)
        while len(self._inactive) > self._timings.inactive_kept:
            self._inactive.popitem(last=False)

    def _succeeded(self) -> None:
        self._answered = True
        self._failures = 0
        self._problem = None
        self._retry_at = float("-inf")

    def _failed(self, problem: str) -> None:
        self._problem = f"introspection: {problem}"
        if self._asks.endpoint is None:
            self._endpoint = None  # it may have moved
        if self._monotonic() < self._retry_at:
            return  # one of several that were under way together: one failure of the issuer's
        self._failures += 1
        self._retry_at = self._monotonic() + min(
            self._timings.max_backoff_s,
            self._timings.first_backoff_s * 2.0 ** min(self._failures - 1, 16),
        )

    def _unavailable(self) -> IssuerUnavailable:
        wait_s = max(self._retry_at - self._monotonic(), 1.0)
        return IssuerUnavailable(self._config.issuer, retry_after_s=math.ceil(wait_s))


def _read(body: bytes) -> _Answer:
    try:
        claims = json_object(body)
    except ValueError as error:
        raise FetchFailed("the answer is not a JSON object") from error
    active = claims.get("active")
    if not isinstance(active, bool):  # neither yes nor no: nothing to go by
        raise FetchFailed("the answer does not say whether the token is active")
    if not active:
        return _Answer()
    return _Answer(claims)
