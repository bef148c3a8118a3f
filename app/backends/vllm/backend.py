"""An engine that speaks `vllm.Control`: one member, or several that are ordered as one.

That service has no revision, no epochs, no keys and no memory of orders, and says OK to what kills
it. So facts are read back, what can't be read is kept in the ledger's row of the engine, and an
order is sent only when what it needs is known.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.backends.kept_states import KeptStates
from app.backends.port import (
    Discovery,
    EngineSilent,
    Found,
    Order,
    OutcomeLost,
    Silence,
)
from app.backends.spelling import Malformed
from app.backends.streams import StreamLimits
from app.backends.telling import Trouble
from app.backends.vllm import aborting
from app.backends.vllm.aims import aim_of
from app.backends.vllm.errands import Errand, Means, conclude, one_call
from app.backends.vllm.groups import join
from app.backends.vllm.kept import Kept, UnderWay
from app.backends.vllm.members import Crew, EngineDead
from app.backends.vllm.notes import Notes, Overtaken
from app.backends.vllm.observing import facts_of, observe, troubles_of
from app.backends.vllm.readings import EngineReading, capabilities_of, info_of, models_of
from app.backends.vllm.refusals import refused
from app.backends.vllm.restoring import conclude_restore, restore
from app.backends.vllm.sessions import OpenSession, not_open
from app.backends.vllm.stopping import shut_down, until_gone
from app.backends.vllm.update_ends import conclude_update
from app.backends.vllm.updating import update
from app.backends.vllm.verdicts import NoEffect, Undecided, verdict
from app.clock import Clock
from app.domain.capabilities import Capabilities
from app.domain.commands import (
    AbortRequests,
    RestoreResources,
    Shutdown,
    UpdateWeights,
    command_of,
)
from app.domain.errors import ChadburnError, UnsupportedOperation
from app.domain.kinds import OperationKind
from app.domain.operation import JsonObject
from app.domain.transitions import Completed, Fact
from app.domain.weight_sessions import (
    AbortSession,
    NcclTransfer,
    SessionStage,
    SessionWeights,
)

log = logging.getLogger(__name__)

_DEFAULT_LIMITS = StreamLimits()
_TRIES = 3


class VllmBackend:
    """Implements `EngineBackend`. `states`: where the engine's row is kept."""

    def __init__(
        self,
        engine_id: str,
        crew: Crew,
        states: KeptStates,
        clock: Clock,
        *,
        limits: StreamLimits = _DEFAULT_LIMITS,
    ) -> None:
        self._crew = crew
        self._notes = Notes(engine_id, states)
        self._clock = clock
        self._limits = limits
        self._capable: tuple[tuple[str, ...], Capabilities] | None = None
        self._sessions: dict[str, OpenSession] = {}
        self._trouble = Trouble(log, f"engine {engine_id}")
        self._means = Means(crew, self._notes, clock.now, limits.settle_s)

    async def discover(self, timeout_s: float) -> Discovery:
        kept, reading = await self._observed(timeout_s)
        try:
            info = info_of(reading)
        except Malformed as malformed:
            said = f"what it says of itself can't be read: {malformed}"
            self._trouble.seen(logging.WARNING, said)
            raise EngineSilent(Silence.MALFORMED) from malformed
        self._trouble.over()
        return Discovery(
            info=info,
            models=models_of(reading),
            capabilities=self._capabilities(reading),
            facts=facts_of(kept, reading, self._clock.now()),
            troubles=troubles_of(kept, reading),
        )

    async def _observed(self, timeout_s: float) -> tuple[Kept, EngineReading]:
        """The row is read before the engine and written only in its own place: what an order does
        in between is not taken for somebody else's doing."""
        for _ in range(_TRIES):
            kept = await self._notes.read()
            busy = kept.under_way is not None and not kept.abandoned
            reading = await self._crew.read(timeout_s, busy=busy)
            after = observe(kept, reading, self._clock.now())
            if after == kept:
                return kept, reading
            try:
                return await self._notes.write(after), reading
            except Overtaken:
                continue
        raise EngineSilent(Silence.DEADLINE)

    def _capabilities(self, reading: EngineReading) -> Capabilities:
        """Constant for the life of the engine processes. Raises EngineSilent: they can't be read
        while the engine is at an order, and were not before."""
        if not reading.stale:
            self._capable = (reading.instance_ids, capabilities_of(reading))
        if self._capable is None or self._capable[0] != reading.instance_ids:
            raise EngineSilent(Silence.DEADLINE)
        return self._capable[1]

    async def load(self, timeout_s: float) -> JsonObject:
        """Raises UnsupportedOperation: vLLM does not tell."""
        raise UnsupportedOperation("this engine does not tell how busy it is")

    async def kv_event_sources(self, timeout_s: float) -> tuple[JsonObject, ...] | None:
        return await self._crew.kv_sources(timeout_s)

    async def carry_out(self, order: Order) -> AsyncGenerator[Fact, None]:
        if isinstance(order.command, AbortRequests):
            facts = aborting.abort_requests(
                order, order.command, self._crew, self._clock.now, self._limits.abort_s
            )
        else:
            facts = self._carried_out(Errand(order, self._means))
        try:
            async with aclosing(facts):
                async for fact in facts:
                    yield fact
        except ChadburnError as away:
            raise OutcomeLost("the ledger does not answer") from away

    async def _carried_out(self, errand: Errand) -> AsyncGenerator[Fact, None]:
        order = errand.order
        kept = await self._notes.read()
        if kept.ended is not None and kept.ended.operation_id == order.operation_id:
            yield kept.ended.end
            return
        way = kept.under_way
        own = way is not None and way.operation_id == order.operation_id
        if own and order.send_by is None and isinstance(order.command, Shutdown):
            errand.kept = kept  # there may be nothing to look at any more
            known = True
        else:
            known = await errand.look()
        if order.send_by is None and not known:
            raise OutcomeLost("the order has not been sent")
        if order.send_by is None:
            # From here on whoever had it before makes no further call.
            await errand.write(errand.kept)
        course = self._attached(errand) if order.send_by is None else self._sent(errand)
        async with aclosing(course) as facts:
            async for fact in facts:
                yield fact

    def _sent(self, errand: Errand) -> AsyncGenerator[Fact, None]:
        command = errand.order.command
        if aim_of(command, errand.kept, errand.reading) is not None:
            return one_call(errand)
        if isinstance(command, RestoreResources):
            return restore(errand, command)
        if isinstance(command, Shutdown):
            return shut_down(errand)
        if isinstance(command, UpdateWeights):
            return self._update(errand, command)
        message = f"vLLM does not offer {command.kind.value}"
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", message)

    def _attached(self, errand: Errand) -> AsyncGenerator[Fact, None]:
        """To an order whose replies nobody hears any more: what it has done is read."""
        command = errand.order.command
        if isinstance(command, RestoreResources):
            return conclude_restore(errand, command)
        if isinstance(command, Shutdown):
            return until_gone(errand)
        if isinstance(command, UpdateWeights):
            return conclude_update(errand, command, None)
        return conclude(errand)

    async def _update(self, errand: Errand, command: UpdateWeights) -> AsyncGenerator[Fact, None]:
        session = None
        if isinstance(command.source, SessionWeights):
            session = OpenSession(command.source.session_id, command.source.lease_ms)
            self._sessions[errand.order.operation_id] = session
        try:
            async with aclosing(update(errand, command, session)) as facts:
                async for fact in facts:
                    yield fact
        finally:
            self._sessions.pop(errand.order.operation_id, None)

    def end_without_record(self, order: Order) -> Fact | None:
        if isinstance(order.command, AbortRequests):
            return aborting.all_unverified(order.command)
        return None

    async def read_back(
        self, order: Order, sent_to: str | None, timeout_s: float
    ) -> Completed | None:
        return None  # what is kept of an order is found by `find`

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        """In the row; None also for an order that was to be sent and that, as the very process it
        was for shows, was not carried out."""
        kept = await self._notes.read()
        instance_id = ",".join(kept.instance_ids)
        if kept.ended is not None and kept.ended.operation_id == operation_id:
            return Found(operation_id, instance_id, ended=True, end=kept.ended.end)
        way = kept.under_way
        known = way is not None and way.operation_id == operation_id
        if way is not None and known and way.kind is OperationKind.SHUTDOWN:
            return Found(operation_id, instance_id)
        try:
            reading = await self._crew.read(timeout_s, busy=True)
        except EngineDead:
            if known:  # nothing more can come of it
                return Found(operation_id, instance_id)
            raise
        if way is None or not known or self._had_no_effect(kept, way, reading):
            return None
        return Found(operation_id, instance_id)

    def _had_no_effect(self, kept: Kept, way: UnderWay, reading: EngineReading) -> bool:
        command = command_of(way.kind, way.request)
        if reading.stale:
            return False
        aim = aim_of(command, kept, reading)
        if aim is None:
            return False
        try:
            verdict(aim, kept, reading, self._clock.now())
        except NoEffect:
            return True
        except Undecided:
            return False
        return False

    async def join_group(self, transfer: NcclTransfer, timeout_s: float) -> bool:
        try:
            await join(transfer, self._crew, self._notes, self._clock.now, timeout_s)
        except ChadburnError as away:
            raise EngineSilent(Silence.UNREACHABLE) from away
        return True

    async def cancel(self, engine_operation_id: str, timeout_s: float) -> None:
        """Of an update that comes in pieces: its caller calls it off."""
        session = self._sessions.get(engine_operation_id)
        if session is None:
            raise refused("UNIMPLEMENTED", "NOT_CANCELLABLE", "the engine does not cancel this")
        session.call_off(AbortSession("cancelled"))

    async def stop_profile(self, engine_operation_id: str, key: str, timeout_s: float) -> None:
        raise refused("UNIMPLEMENTED", "UNSUPPORTED_OPERATION", "vLLM does not offer this here")

    async def go_on(
        self, stage: SessionStage, key: str, expected_revision: int | None, timeout_s: float
    ) -> None:
        """`key` begins with the operation's id."""
        session = self._sessions.get(key.partition(".")[0])
        if session is None:
            raise not_open()
        session.take(stage, key)

    async def close(self) -> None:
        await self._crew.close()
