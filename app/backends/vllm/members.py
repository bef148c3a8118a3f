"""The members of one engine, over gRPC: asked and ordered side by side, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import grpc

from app.backends.endpoint import CLOSED, Endpoint, Metadata, NotKnownThere, was_asked_to_stop
from app.backends.port import EngineRefused, EngineSilent, Order, Silence
from app.backends.spelling import text_of
from app.backends.streams import no_way
from app.backends.stubs import stub_of
from app.backends.telling import Trouble
from app.backends.vllm.readings import (
    MOST_RANKS,
    EngineReading,
    MemberReading,
    adapters_of,
    kv_sources_of,
)
from app.backends.vllm.statuses import Done, Lost, Said, said
from app.domain.operation import JsonObject
from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm import control_pb2_grpc

log = logging.getLogger(__name__)

_C = grpc.StatusCode
# Of a read: there is no such call, or nothing behind it.
_NOT_THERE = frozenset({_C.UNIMPLEMENTED, _C.FAILED_PRECONDITION})
_BUSY_S = 1.0


class EngineDead(EngineSilent):
    """The front end answers, and the engine behind it does not any more."""

    def __init__(self) -> None:
        super().__init__(Silence.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class Seat:
    """One member. `orders` and `reads` may be the same."""

    rank: int
    orders: Endpoint
    reads: Endpoint


class Crew:
    """Seats in the order of their ranks. Belongs to one event loop."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._seats = tuple(seats)
        self._models: dict[int, tuple[str, pb.ModelInfo | None]] = {}
        self._trouble = Trouble(log, f"engine at {self._seats[0].reads.name}")

    def __len__(self) -> int:
        return len(self._seats)

    async def close(self) -> None:
        for seat in self._seats:
            await seat.orders.close()
            if seat.reads is not seat.orders:
                await seat.reads.close()

    # ---- reads ----

    async def read(self, timeout_s: float, *, busy: bool = False) -> EngineReading:
        """All that is to be read. `busy`: an order of ours may keep the engine from answering; then
        what the front end knows by itself is given, marked stale. Raises EngineSilent, EngineDead.
        """
        members = await _all(self._read_one(place, timeout_s, busy) for place in range(len(self)))
        stale = any(gone for _, gone in members)
        reading = EngineReading(tuple(member for member, _ in members), stale)
        if len(set(reading.instance_ids)) != len(members):
            # What is told to both would be done to it twice.
            said = f"two of its members are one process: {reading.instance_id}"
            self._trouble.seen(logging.ERROR, said)
            raise EngineSilent(Silence.MALFORMED)
        if reading.world_size > MOST_RANKS:
            self._trouble.seen(logging.ERROR, f"it says that it has {reading.world_size} ranks")
            raise EngineSilent(Silence.MALFORMED)
        self._trouble.over()
        return reading

    async def _read_one(
        self, place: int, timeout_s: float, busy: bool
    ) -> tuple[MemberReading, bool]:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        seat = self._seats[place]
        server: pb.ServerInfo | None = await self._ask(
            seat, "GetServerInfo", pb.GetServerInfoRequest(), timeout_s
        )
        if server is None or not server.instance_id:
            raise EngineSilent(Silence.MALFORMED)
        left_s = max(ends_at - loop.time(), 0.001)
        model = await self._model(place, server.instance_id, left_s)
        known = MemberReading(rank=seat.rank, server=server, model=model)
        try:
            return await self._state(seat, known, min(left_s, _BUSY_S) if busy else left_s), False
        except EngineDead:
            raise
        except EngineSilent as silent:
            if busy and silent.reason is Silence.DEADLINE:
                return known, True
            raise

    async def _model(self, place: int, instance_id: str, timeout_s: float) -> pb.ModelInfo | None:
        """Constant for the life of a process."""
        known = self._models.get(place)
        if known is None or known[0] != instance_id:
            seat = self._seats[place]
            found = await self._ask(seat, "GetModelInfo", pb.GetModelInfoRequest(), timeout_s)
            known = self._models[place] = (instance_id, found)
        return known[1]

    async def _state(self, seat: Seat, known: MemberReading, timeout_s: float) -> MemberReading:
        lora = known.model is not None and known.model.supports_lora
        paused, sleeping, version, loras = await _all(
            self._ask(seat, rpc, request, timeout_s)
            for rpc, request in (
                ("IsPaused", pb.IsPausedRequest()),
                ("IsSleeping", pb.IsSleepingRequest()),
                ("GetWeightVersion", pb.GetWeightVersionRequest()),
                ("ListLoras" if lora else "", pb.ListLorasRequest()),
            )
        )
        return replace(
            known,
            paused=None if paused is None else paused.paused,
            sleeping=None if sleeping is None else sleeping.sleeping,
            version=None if version is None else text_of(version.weight_version),
            loras=None if loras is None else adapters_of(loras),
        )

    async def kv_sources(self, timeout_s: float) -> tuple[JsonObject, ...] | None:
        found = await _all(
            self._ask(seat, "GetKvEventSources", pb.GetKvEventSourcesRequest(), timeout_s)
            for seat in self._seats
        )
        if any(one is None for one in found):
            return None
        sources: list[JsonObject] = []
        for seat, response in zip(self._seats, found, strict=True):
            sources += kv_sources_of(seat.rank, response)
        return tuple(sources)

    async def gone(self, timeout_s: float) -> tuple[bool, ...]:
        """Of each member, whether nothing listens there any more."""

        async def one(seat: Seat) -> bool:
            try:
                await self._ask(seat, "GetServerInfo", pb.GetServerInfoRequest(), timeout_s)
            except EngineSilent as silent:
                if silent.reason is not Silence.UNREACHABLE:
                    raise
                return True
            return False

        return tuple(await _all(one(seat) for seat in self._seats))

    async def _ask(self, seat: Seat, rpc: str, request: Any, timeout_s: float) -> Any:
        """None: there is no such call, or none was named. Raises EngineSilent, EngineDead."""
        if not rpc:
            return None

        async def call(channel: grpc.aio.Channel, rest: Any) -> Any:
            try:
                return await getattr(stub_of(control_pb2_grpc.ControlStub, channel), rpc)(
                    request, **rest
                )
            except grpc.aio.AioRpcError as error:
                if error.code() in _NOT_THERE:
                    return None
                if error.code() is _C.INTERNAL:
                    raise EngineDead from error
                raise

        try:
            return await seat.reads.read(call, timeout_s)
        except NotKnownThere as unknown:
            raise EngineSilent(Silence.MALFORMED) from unknown

    # ---- calls that change something ----

    async def make_ready(self, order: Order, now: Callable[[], datetime]) -> Calls:
        """For the calls that follow at once: nothing may be waited for between this and the first.
        Raises EngineRefused, OutcomeLost, NotSent: nothing was sent."""
        ready = []
        for place, seat in enumerate(self._seats):
            # The time by which it is to be sent is looked at last, with every line up.
            last = place == len(self) - 1
            given = order if last else replace(order, send_by=None)
            try:
                ready.append((seat.orders, *await seat.orders.open_for(given, now)))
            except EngineSilent as silent:
                raise EngineRefused(no_way(silent)) from silent
        return Calls(tuple(ready))

    async def lines(self) -> Calls:
        """For calls that are no order's. Raises EngineSilent."""
        return Calls(tuple([(seat.orders, *await seat.orders.open()) for seat in self._seats]))


class Calls:
    """Calls to the members, whose lines are up."""

    def __init__(self, lines: tuple[tuple[Endpoint, grpc.aio.Channel, Metadata], ...]) -> None:
        self._lines = lines

    async def order(
        self, rpc: str, requests: Any, timeout_s: float, places: Iterable[int] | None = None
    ) -> dict[int, Said]:
        """One call to each member, or to those at `places`, side by side: a collective transfer
        needs all of them at the same time. `requests`: one message for all, or one for each."""
        wanted = list(range(len(self._lines)) if places is None else places)
        each = requests if isinstance(requests, list) else [requests] * len(self._lines)
        answers = await asyncio.gather(
            *(self._order_one(place, rpc, each[place], timeout_s) for place in wanted)
        )
        return dict(zip(wanted, answers, strict=True))

    async def _order_one(self, place: int, rpc: str, request: Any, timeout_s: float) -> Said:
        endpoint, channel, metadata = self._lines[place]
        stub = stub_of(control_pb2_grpc.ControlStub, channel)
        try:
            answer = await getattr(stub, rpc)(
                request, timeout=max(timeout_s, 0.001), metadata=metadata
            )
            return Done(answer)
        except CLOSED as closed:
            if was_asked_to_stop(closed):
                raise
            return Lost("the connection to the engine was closed")
        except grpc.aio.AioRpcError as error:
            endpoint.failed(error)
            return said(rpc, error)


async def _all(asked: Iterable[Any]) -> list[Any]:
    """All of them, or the first that fails when the others are done too: no read outlives this."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for kind in (EngineDead, BaseException):
        for answer in answers:
            if isinstance(answer, kind):
                raise answer
    return answers
