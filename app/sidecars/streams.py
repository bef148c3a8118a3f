"""Requests that come through a sidecar, as streams of the engine's own server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import RequestRefused, RuntimeFault
from app.rpc.openengine.v1 import error_pb2
from app.rpc.openengine.v1 import generation_pb2 as pb
from app.sidecars.answers import Answer, error_text
from app.sidecars.http import CallError, EngineHttp, NotSent

_E = error_pb2.ErrorCode
# After which an abort that the engine was told of is made good by hanging up on it.
_SETTLE_S = 2.0
_GONE_REMEMBERED = 4096
_CODES = {
    400: _E.ERROR_CODE_INVALID_ARGUMENT,
    404: _E.ERROR_CODE_MODEL_NOT_FOUND,
    422: _E.ERROR_CODE_INVALID_ARGUMENT,
    503: _E.ERROR_CODE_DRAINING,
}
_BY_ENGINE = "the engine ended the request before it was finished"


@dataclass(slots=True, eq=False)
class Stream:
    """`engine_id`: what the server calls it. `aborted`: it came to no end of its own."""

    request_id: str
    engine_id: str
    why: str | None = None
    aborted: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange(Protocol):
    """One request in the engine's own words: what is posted, and what its events mean. `engine_id`:
    what the server calls it. The server answers with server-sent events of JSON objects."""

    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> Mapping[str, Any]: ...
    @property
    def engine_id(self) -> str: ...

    def tokens(self, event: Mapping[str, Any]) -> pb.TokenOutput | None:
        """None: the event brings none."""

    def finished(self, event: Mapping[str, Any]) -> pb.GenerationFinished | None: ...
    def usage(self, event: Mapping[str, Any]) -> pb.Usage | None: ...


Ask = Callable[[pb.GenerateRequest, str], Exchange]
"""Of a request and an id that no other request has."""
EndAll = Callable[[list[str], float], Awaitable[object]]
"""Tells the engine to end requests, by what it calls them, within so many seconds. Raises
CallError, RuntimeFault."""

EndOthers = Callable[[list[str]], Awaitable[AbortOutcome]]
"""Ends requests by ids that the caller gave, and says what became of them all. Raises
RuntimeFault."""


class Streams:
    """In flight through this process. An id is the engine's for one request and never again: it
    ends every request of the same id by one abort."""

    def __init__(
        self, http: EngineHttp, ask: Ask, end_all: EndAll, new_id: Callable[[], str]
    ) -> None:
        self._http = http
        self._ask = ask
        self._end_all = end_all
        self._new_id = new_id
        self._running: dict[str, Stream] = {}
        self._gone: dict[str, None] = {}

    @property
    def running(self) -> tuple[Stream, ...]:
        return tuple(self._running.values())

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """See `Runtime.generate`. Known before anything is awaited."""
        exchange = self._ask(request, self._new_id())
        stream = Stream(request.request_id, exchange.engine_id)
        self._running[request.request_id] = stream
        try:
            async for response in self._responses(exchange, stream):
                response.request_id = request.request_id
                yield response
        finally:
            del self._running[request.request_id]
            self._gone[request.request_id] = None
            if len(self._gone) > _GONE_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            stream.over.set()

    async def _responses(
        self, exchange: Exchange, stream: Stream
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        usage: pb.Usage | None = None
        end: pb.GenerationFinished | None = None
        told = False
        try:
            asking = self._http.stream(exchange.path, exchange.body, exchange.headers)
            async with asking as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for event in _events(response, stream):
                    error = event.get("error")
                    if isinstance(error, dict):
                        refused = _of_event(error)
                        if not told:
                            raise refused
                        yield _failed(refused)
                        return
                    usage = exchange.usage(event) or usage
                    end = exchange.finished(event) or end
                    tokens = exchange.tokens(event)
                    if tokens is not None:
                        told = True
                        yield pb.GenerateResponse(token=tokens)
        except CallError as error:
            refused = RequestRefused(
                _E.ERROR_CODE_INTERNAL, error.message, retryable=isinstance(error, NotSent)
            )
            if not told:
                raise refused from error
            yield _failed(refused)
            return
        except httpx2.TransportError as error:
            refused = RequestRefused(
                _E.ERROR_CODE_INTERNAL, "the connection to the engine broke", retryable=True
            )
            if not told:
                raise refused from error
            yield _failed(refused)
            return
        # Ended before its first token, a request comes to an end without a word on how.
        if end is None or end.reason == pb.FINISH_REASON_CANCELLED:
            stream.aborted = True
            end = pb.GenerationFinished(
                output_index=0,
                reason=pb.FINISH_REASON_CANCELLED,
                message=stream.why or _BY_ENGINE,
            )
        yield pb.GenerateResponse(finished=end, usage=usage)

    # ---- ending them ----

    async def end(self, streams: Iterable[Stream], message: str) -> None:
        """Ends them here whether the engine takes the abort or not: it notices that nobody listens
        any more."""
        ending = tuple(streams)
        for stream in ending:
            stream.why = stream.why or message
        with suppress(CallError, RuntimeFault):
            if ending:
                await self._end_all([stream.engine_id for stream in ending], _SETTLE_S)
                await over(ending, _SETTLE_S)
        for stream in ending:
            stream.hang_up.set()
        await over(ending)

    async def abort(
        self, request_ids: Iterable[str], message: str, others: EndOthers
    ) -> dict[str, AbortOutcome]:
        """By id, those that never came through here by `others`. Raises what that raises."""
        wanted = tuple(request_ids)
        mine = [self._running[name] for name in wanted if name in self._running]
        known = {name for name in wanted if name in self._running or name in self._gone}
        outcomes = {name: AbortOutcome.ALREADY_FINISHED for name in wanted if name in known}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            outcomes |= dict.fromkeys(unknown, await others(unknown))
        await self.end(mine, message)
        return outcomes | outcomes_of(mine)


def outcomes_of(streams: Iterable[Stream]) -> dict[str, AbortOutcome]:
    """Once they have ended."""
    return {
        one.request_id: AbortOutcome.ABORTED if one.aborted else AbortOutcome.ALREADY_FINISHED
        for one in streams
    }


async def over(streams: Iterable[Stream], within_s: float = 5.0) -> None:
    """Until all have ended, or the time is up."""
    waiting = {asyncio.ensure_future(stream.over.wait()) for stream in streams}
    if not waiting:
        return
    _, late = await asyncio.wait(waiting, timeout=within_s)
    for one in late:
        one.cancel()


async def _events(response: httpx2.Response, stream: Stream) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events until [DONE], or until it is hung up."""
    lines = response.aiter_lines()
    hung_up = asyncio.ensure_future(stream.hang_up.wait())
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(_next(lines))
            await asyncio.wait({coming, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            line = coming.result()
            if line == _END or line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            try:
                event = json.loads(line.removeprefix("data: "))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
    finally:
        hung_up.cancel()
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


_END = "\0"


async def _next(lines: AsyncIterator[str]) -> str:
    try:
        return await anext(lines)
    except StopAsyncIteration:
        return _END


def _refusal(status: int, body: bytes) -> RequestRefused:
    code = _CODES.get(status, _E.ERROR_CODE_INTERNAL)
    return RequestRefused(code, error_text(Answer(status, body)), retryable=status == 503)


def _of_event(error: dict[str, Any]) -> RequestRefused:
    status = error.get("code")
    answer = Answer(0, json.dumps({"error": error}).encode())
    code = _CODES.get(status if isinstance(status, int) else 500, _E.ERROR_CODE_INTERNAL)
    return RequestRefused(code, error_text(answer), retryable=status == 503)


def _failed(refused: RequestRefused) -> pb.GenerateResponse:
    code: Any = refused.code
    return pb.GenerateResponse(
        error=error_pb2.EngineError(code=code, message=refused.message, retryable=refused.retryable)
    )
