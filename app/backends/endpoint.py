"""One listener of an engine: the line to it, and what is shown there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

import grpc

from app.backends import status_map
from app.backends.channels import Line
from app.backends.credentials import Bearer, CredentialUnavailable
from app.backends.port import EngineSilent, NotSent, Order, OutcomeLost, Silence
from app.backends.telling import Trouble

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECONNECT_S = 1.0
_CONNECT_S = 2.0
_LOOK_AGAIN_S = 0.02
_AWAY = frozenset({Silence.UNREACHABLE, Silence.DEADLINE})

Metadata = tuple[tuple[str, str], ...]


CLOSED = (asyncio.CancelledError, grpc.aio.UsageError)
"""What gRPC raises in a call whose channel is closed under it: a registration was changed."""


def was_asked_to_stop(raised: BaseException) -> bool:
    """Whether a cancellation is meant for this task, and is not the channel's."""
    task = asyncio.current_task()
    asked = task is not None and task.cancelling() > 0
    return isinstance(raised, asyncio.CancelledError) and asked


class NotKnownThere(Exception):
    """The engine itself says that it does not know what was asked for."""


class Endpoint:
    def __init__(self, line: Line, bearer: Bearer | None, span_id: Callable[[], str]) -> None:
        self._line = line
        self._bearer = bearer
        self._span_id = span_id
        self._trouble = Trouble(log, f"engine at {line.name}")

    @property
    def name(self) -> str:
        return self._line.name

    async def open(self, trace_id: str | None = None) -> tuple[grpc.aio.Channel, Metadata]:
        """What a call needs. Raises EngineSilent: there is no way, or nothing to show."""
        return await self._line.channel(), await self._metadata(trace_id)

    async def open_for(
        self, order: Order, now: Callable[[], datetime]
    ) -> tuple[grpc.aio.Channel, Metadata]:
        """What the call that sends the order needs. It has to follow at once: nothing may be waited
        for between this and that. Raises EngineSilent, OutcomeLost, NotSent.
        """
        channel, metadata = await self.open(order.trace_id)
        # On a line that is not up yet the call would wait inside gRPC, where no clock of ours
        # reaches it, and could be sent when it has long been decided that it never was.
        # NOT covered: a process that is stopped within the next instruction, and what is held up
        # on its way to the engine.
        if not await _connected(channel, _CONNECT_S):
            raise OutcomeLost("the engine could not be reached")
        if order.send_by is not None and now() >= order.send_by:
            raise NotSent
        return channel, metadata

    async def read(
        self, call: Callable[[grpc.aio.Channel, Any], Awaitable[T]], timeout_s: float
    ) -> T:
        """Something that changes nothing, so it may be repeated: once, within the same deadline,
        when the connection turns out to be dead and can be made anew. An engine that is not there
        is not waited for until the deadline. Raises EngineSilent, NotKnownThere.

        `call` gets the channel and the keyword arguments of the call.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        channel, metadata = await self.open()
        repeated = False
        while True:
            left_s = max(ends_at - loop.time(), 0.001)
            try:
                answer = await call(channel, {"timeout": left_s, "metadata": metadata})
                self._trouble.over()
                return answer
            except CLOSED as closed:
                if was_asked_to_stop(closed):
                    raise
                raise EngineSilent(Silence.UNREACHABLE) from closed
            except grpc.aio.AioRpcError as error:
                if status_map.is_unknown_operation(error):
                    raise NotKnownThere from error
                lost = error.code() is grpc.StatusCode.UNAVAILABLE
                if (
                    repeated
                    or not lost
                    or not await _connected(channel, min(ends_at - loop.time(), _RECONNECT_S))
                ):
                    raise self.failed(error, again=True) from error
                repeated = True

    def failed(self, error: grpc.aio.AioRpcError, *, again: bool = False) -> EngineSilent:
        """Take note of a failed call, so that the next one does not fail for the same reason.
        `again`: it is one that is made every few seconds."""
        silent = status_map.silence_of(error, connected=self._line.connected)
        if silent.reason is Silence.AUTH_REFUSED and self._bearer is not None:
            self._bearer.forget()
        if silent.reason in (Silence.UNREACHABLE, Silence.AUTH_REFUSED):
            self._line.doubt()
        said = status_map.for_the_log(error)
        if silent.reason in _AWAY:
            # One state, whichever code and words this call and that one find for it.
            self._trouble.seen(logging.INFO, said, "away")
        elif again:
            self._trouble.seen(logging.INFO, said, error.code().name)
        else:
            log.info("an engine's answer: %s", said)
        return silent

    async def close(self) -> None:
        await self._line.close()

    async def _metadata(self, trace_id: str | None) -> Metadata:
        found: list[tuple[str, str]] = []
        if self._bearer is not None:
            try:
                found.append(("authorization", f"Bearer {await self._bearer.token()}"))
            except CredentialUnavailable as missing:
                self._trouble.seen(logging.ERROR, f"no credential: {missing}", "credential")
                raise EngineSilent(Silence.AUTH_REFUSED) from missing
        if trace_id is not None:
            found.append(("traceparent", f"00-{trace_id}-{self._span_id()}-01"))
        return tuple(found)


async def _connected(channel: grpc.aio.Channel, left_s: float) -> bool:
    """Looked at again and again: gRPC's own way to wait for a state leaves a watch behind when
    it is given up, which outlives the channel."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + left_s
    while channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
        if loop.time() >= ends_at:
            return False
        await asyncio.sleep(_LOOK_AGAIN_S)
    return True
