"""Calls to a vLLM server: each has a deadline, and what its answer proves is told apart.

`Refused` and `NotSent` prove that nothing was done. `NoAnswer`, `Died` and `WrongAnswer` prove
nothing: what was asked for may have been done, or may yet be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from app.sidecars.vllm.answers import Answer, error_text

Query = Sequence[tuple[str, str]]


class VllmError(Exception):
    """`message` may be shown to callers: it holds no address and no body."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotSent(VllmError):
    """No connection was made, so nothing was asked for."""


class NoAnswer(VllmError):
    """Sent, and not answered in time, or the connection broke."""


class Died(NoAnswer):
    """Sent, and the engine ended while the answer was waited for."""


class WrongAnswer(VllmError):
    """Something other than such a server answers."""


class Refused(VllmError):
    """The server said no. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. `watch_s`: how often a call that takes longer looks whether the engine is alive."""

    connect_s: float = 2.0
    read_s: float = 4.0  # of what only reads
    control_s: float = 60.0  # of an order that waits for nothing but the engine itself
    watch_s: float = 1.0


class VllmHttp:
    """`url` is `http://host:port`. `key` goes with requests below /v1 and nowhere else: the server
    asks for it there alone."""

    def __init__(
        self, url: str, *, key: str | None = None, patience: Patience | None = None
    ) -> None:
        self.patience = patience or Patience()
        self.url = url
        self._key = key
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
        return _accepted(await self.get(path, query))

    async def post(
        self,
        path: str,
        query: Query = (),
        *,
        body: Mapping[str, Any] | None = None,
        within_s: float | None = None,
    ) -> Answer:
        """Status 200 alone. A call that takes its time is given up early when the engine has ended:
        vLLM does not answer calls that were under way then, ever.

        Raises NotSent, NoAnswer, Died, Refused.
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
            answer = sending.result()
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
        if answer.status >= 500 and not await self.alive():
            raise Died("the engine has ended")
        return _accepted(answer)

    async def alive(self) -> bool:
        """As the server sees its engine. Not in time: true, since a busy server is not a dead one,
        and the call that is looked after has a deadline of its own."""
        try:
            answer = await self.get("/health")
        except NotSent:
            return False
        except NoAnswer:
            return True
        return answer.status == 200

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.Response]:
        """For events of the server's own making. Raises NotSent, NoAnswer."""
        request = self._client.build_request(
            "POST", path, json=dict(body), headers={**self._auth(path), **headers}
        )
        with _told():
            response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    def _auth(self, path: str) -> dict[str, str]:
        if self._key is None or not path.startswith("/v1/"):
            return {}
        return {"Authorization": f"Bearer {self._key}"}

    async def _send(
        self, method: str, path: str, query: Query, body: Mapping[str, Any] | None, within_s: float
    ) -> Answer:
        headers = self._auth(path)
        content = None
        if body is not None:
            content, headers = json.dumps(body).encode(), {**headers, **_JSON}
        try:
            async with asyncio.timeout(within_s):
                request = self._client.build_request(
                    method, path, params=list(query), content=content, headers=headers
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


def _accepted(answer: Answer) -> Answer:
    if answer.status == 200:
        return answer
    raise Refused(answer.status, error_text(answer))
