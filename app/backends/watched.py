"""Calls to engines as somebody watches them: begun, and ended by a code.

A channel in front of gRPC's own, and no interceptor: those put calls of their own between the
caller and the stream, and what a reading that is cut off means is decided by gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc

Headers = tuple[tuple[str, str], ...]


class BegunCall(Protocol):
    @property
    def headers(self) -> Headers:
        """To be sent with it, in place of its own of the same names."""

    def ended(self, code: str) -> None:
        """`code`: the name of a status; NOT_SENT where gRPC would not begin."""


Begin = Callable[[str], BegunCall]
"""Of the method, as `package.Service/Method`."""


class CallWatcher(Protocol):
    def begin(self, dialect: str, engine_id: str, method: str) -> BegunCall: ...


class WatchedChannel(grpc.aio.Channel):
    """In everything else the channel that it is in front of."""

    def __init__(self, inner: grpc.aio.Channel, begin: Begin) -> None:
        self._inner = inner
        self._begin = begin

    async def __aenter__(self) -> WatchedChannel:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self._inner.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *rest: Any, **named: Any) -> Any:
        return self._watched(method, self._inner.unary_unary(method, *rest, **named))

    def unary_stream(self, method: str, *rest: Any, **named: Any) -> Any:
        return self._watched(method, self._inner.unary_stream(method, *rest, **named))

    def stream_unary(self, method: str, *rest: Any, **named: Any) -> Any:
        return self._watched(method, self._inner.stream_unary(method, *rest, **named))

    def stream_stream(self, method: str, *rest: Any, **named: Any) -> Any:
        return self._watched(method, self._inner.stream_stream(method, *rest, **named))

    def _watched(self, method: str, inner: Any) -> Any:
        def call(request: Any, *, metadata: Sequence[Any] | None = None, **rest: Any) -> Any:
            begun = self._begin(method.removeprefix("/"))
            try:
                made = inner(request, metadata=_with(metadata, begun.headers), **rest)
            except BaseException:
                begun.ended("NOT_SENT")
                raise
            made.add_done_callback(lambda done: begun.ended(_code_of(done)))
            return made

        return call


def _with(metadata: Sequence[Any] | None, headers: Headers) -> Sequence[Any] | None:
    if not headers:
        return metadata
    named = {name for name, _ in headers}
    return (*(one for one in metadata or () if one[0] not in named), *headers)


def _code_of(call: Any) -> str:
    """Of one that is over: its coroutine has nothing to wait for, and needs no task."""
    code = call.code()
    try:
        code.send(None)
    except StopIteration as told:
        return str(told.value.name)
    except BaseException:
        return "CANCELLED"
    code.close()
    return "UNKNOWN"
