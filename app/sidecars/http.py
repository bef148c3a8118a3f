"""Calls to an engine's server: each has a deadline, and what its answer proves is told apart.

`Refused` and `NotSent` prove that nothing was done. `NoAnswer`, `Died` and `WrongAnswer` prove
nothing: what was asked for may have been done, or may yet be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from app.sidecars.answers import Answer, error_text

Query = Sequence[tuple[str, str]]
Headers = Callable[[str, str, bytes], Mapping[str, str]]
"""What goes with one call besides its body: of method, path and body. Asked anew for each."""
Words = Callable[[Answer], str]
"""What a refusal says, fit to be shown: one line, without the server's paths or addresses."""


def no_headers(method: str, path: str, body: bytes) -> Mapping[str, str]:
    del method, path, body
    return {}


def answered_well(answer: Answer) -> bool:
    return answer.status == 200


def bearer(key: str | None) -> Mapping[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class CallError(Exception):
    """`message` may be shown to callers: it holds no address and no body."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotSent(CallError):
    """No connection was made, so nothing was asked for."""


class NoAnswer(CallError):
    """Sent, and not answered in time, or the connection broke."""


class Died(NoAnswer):
    """Sent, and the engine ended while the answer was waited for."""


class WrongAnswer(CallError):
    """Something other than such a server answers."""


class Refused(CallError):
    """The server said no. `status` is HTTP's."""

    def __init__(self, status: int, message: str, answer: Answer | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. `watch_s`: how often a call that takes longer looks whether the engine is alive."""

    connect_s: float = 2.0
    read_s: float = 4.0  # of what only reads
    control_s: float = 60.0  # of an order that waits for nothing but the engine itself
    watch_s: float = 1.0


class EngineHttp:
    """`url` is `http://host:port`. `alive_path` costs the engine nothing; its answer is `living`
    for as long as the engine lives."""

    def __init__(
        self,
        url: str,
        *,
        headers: Headers = no_headers,
        words: Words = error_text,
        alive_path: str = "/health",
        living: Callable[[Answer], bool] = answered_well,
        patience: Patience | None = None,
    ) -> None:
        self.patience = patience or Patience()
        self.url = url
        self._headers = headers
        self._words = words
        self._alive_path = alive_path
        self._living = living
        # No proxies of the environment: the engine is a neighbour, and its orders are nobody's.
        self._client = httpx2.AsyncClient(
            base_url=url,
            trust_env=False,
            verify=url.startswith("https:"),  # certificates take a while to load
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8),
            timeout=httpx2.Timeout(None, connect=self.patience.connect_s),
        )

    async def close(self) -> None:
        await self._client.aclose()

    # ---- calls ----

    async def get(self, path: str, query: Query = (), *, within_s: float | None = None) -> Answer:
        """Any status. Raises NotSent, NoAnswer."""
        return await self._send("GET", path, query, None, within_s or self.patience.read_s)

    async def read(self, path: str, query: Query = ()) -> Answer:
        """Status 200 alone. Raises NotSent, NoAnswer, Refused."""
        return self._accepted(await self.get(path, query))

    async def post(
        self,
        path: str,
        query: Query = (),
        *,
        body: Mapping[str, Any] | None = None,
        within_s: float | None = None,
    ) -> Answer:
        """Status 200 alone. Raises what `post_any` raises, and Refused."""
        return self._accepted(await self.post_any(path, query, body=body, within_s=within_s))

    async def post_any(
        self,
        path: str,
        query: Query = (),
        *,
        body: Mapping[str, Any] | None = None,
        within_s: float | None = None,
    ) -> Answer:
        """Any status. A call that takes its time is given up early when the engine has ended: not
        every server answers calls that were under way then, ever.

        Raises NotSent, NoAnswer, Died.
        """
        limit = self.patience.control_s if within_s is None else within_s
        sending = asyncio.ensure_future(self._send("POST", path, query, body, limit))
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=self.patience.watch_s)
                if not sending.done() and not await self.alive():
                    # An answer may have come while the engine was looked at.
                    await asyncio.sleep(0)
                    if not sending.done():
                        raise Died("the engine ended while it was carrying this out")
            try:
                answer = sending.result()
            except NoAnswer as error:
                if not await self.alive():
                    raise Died("the engine ended while it was carrying this out") from error
                raise
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
            if not sending.cancelled():
                sending.exception()  # whoever was told, or has gone
        if answer.status >= 500 and not await self.alive():
            raise Died("the engine has ended")
        return answer

    async def alive(self) -> bool:
        """As the server sees its engine. Not in time: true, since a busy server is not a dead one,
        and the call that is looked after has a deadline of its own."""
        try:
            answer = await self.get(self._alive_path)
        except NotSent:
            return False
        except NoAnswer:
            return True
        return self._living(answer)

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.Response]:
        """For events of the server's own making. Raises NotSent, NoAnswer."""
        content = json.dumps(dict(body)).encode()
        request = self._client.build_request(
            "POST",
            path,
            content=content,
            headers={**self._headers("POST", path, content), **_JSON, **headers},
        )
        with _told():
            response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    def _accepted(self, answer: Answer) -> Answer:
        if answer.status == 200:
            return answer
        raise Refused(answer.status, self._words(answer), answer)

    async def _send(
        self, method: str, path: str, query: Query, body: Mapping[str, Any] | None, within_s: float
    ) -> Answer:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {**self._headers(method, path, content), **({} if body is None else _JSON)}
        try:
            async with asyncio.timeout(within_s):
                request = self._client.build_request(
                    method, path, params=list(query), content=content or None, headers=headers
                )
                with _told():
                    response = await self._client.send(request, stream=True)
                    try:
                        return Answer(response.status_code, await _whole(response))
                    finally:
                        await response.aclose()
        except TimeoutError:
            raise NoAnswer("the engine did not answer in time") from None


_JSON = {"Content-Type": "application/json"}
_MOST_BYTES = 64 << 20
"""Of an answer. Checksums of a big model are some megabytes."""


async def _whole(response: httpx2.Response) -> bytes:
    """Raises NoAnswer: there is more than anything that is asked for can be."""
    found = bytearray()
    async for some in response.aiter_bytes():
        found += some
        if len(found) > _MOST_BYTES:
            raise NoAnswer("the engine's answer is too long")
    return bytes(found)


@contextmanager
def _told() -> Generator[None]:
    """The client's exceptions by what they prove."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NotSent("the engine cannot be reached") from error
    except httpx2.TransportError as error:
        raise NoAnswer("the connection to the engine broke") from error
    except httpx2.RequestError as error:  # it came, and can't be unpacked
        raise NoAnswer("the engine's answer cannot be read") from error
