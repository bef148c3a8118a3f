"""The course of one operation: from its acceptance, or from wherever a process before this one
left it, to its end.

    set out ──sent──▶ follow ──end──▶ done
                        │ ▲
                   lost │ │ known there: attach · proved unknown: send again
                        ▼ │
                       ask ──▶ done, where the answer is an end

What is not known is never told as an end. As long as the engine cannot be asked, the operation
stays `reconciling`, and asking goes on at a bounded pace.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from app.backends.port import (
    EngineBackend,
    EngineRefused,
    EngineSilent,
    NotSent,
    Order,
    OutcomeLost,
    StillRunning,
)
from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.commands import command_of
from app.domain.errors import ChadburnError
from app.domain.kinds import OperationState
from app.domain.operation import (
    DEADLINE_PASSED,
    Operation,
    OperationError,
    OperationWarning,
)
from app.domain.transitions import (
    Cancelled,
    Completed,
    Fact,
    Failed,
    OutcomeUnknown,
    Reattached,
    Refusal,
    SentAgain,
    Warned,
)
from app.operations.attention import Attention
from app.operations.backoff import Backoff
from app.operations.fleet import Fleet
from app.operations.logbook import Logbook
from app.operations.pace import Pace
from app.operations.setting_out import SettingOut
from app.operations.stage_sending import StageSender, session_id_of
from app.operations.unsent import nothing_to_send, too_late
from app.operations.watched import Origin, Watched, tell_written

log = logging.getLogger(__name__)

_UNSENT = frozenset({OperationState.ACCEPTED, OperationState.QUEUED})
_ENDS = (Completed, Failed, Cancelled)
_LEFT = "the gateway was restarted while the order was under way"
_KEY_KEPT = timedelta(hours=24)
_TRUSTED_MISSES = 3
_NO_NEWS = frozenset({"OPERATION_ENDED", "OPERATION_NOT_FOUND"})


class Course:
    def __init__(
        self,
        logbook: Logbook,
        fleet: Fleet,
        clock: Clock,
        pace: Pace,
        backoff: Backoff,
        watched: Watched,
        origin: Origin,
    ) -> None:
        self._watched = watched
        self._origin = origin
        self._context: contextvars.Context | None = None
        self._log = logbook
        self._fleet = fleet
        self._clock = clock
        self._pace = pace
        self._backoff = backoff
        self._attention = Attention(backoff)
        self._setting_out = SettingOut(logbook, fleet, clock, pace, self._attention)
        self._ended_elsewhere = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._sender: StageSender | None = None
        self._continuing: asyncio.Task[None] | None = None
        self._misses = 0
        self._refused: OperationError | None = None
        self._lost_at = clock.now()
        self._trouble = Trouble(log, f"operation {logbook.operation.id}")

    @property
    def operation(self) -> Operation:
        return self._log.operation

    def notice(self, operation: Operation) -> None:
        """Somebody else has written: a caller who cancels, a person who settles."""
        if operation.sequence > self.operation.sequence:
            self._log.learn(operation)
            if self._ended():
                self._ended_elsewhere.set()
            self._attention.call()
            self._heed_cancellation()
            self._heed_stages()

    @property
    def waits_for_others(self) -> bool:
        return self.operation.state is OperationState.QUEUED

    def call_up(self) -> None:
        """Of one that waits for others: it seems to be its turn."""
        self._setting_out.call_up()

    def doubt(self) -> None:
        """It does not seem to be open any more: look."""
        if self._looking is None or self._looking.done():
            self._looking = self._beside(self._look())

    async def run(self) -> None:
        """Until it has ended. Raises LetGo. Cancelling this detaches; nothing is undone."""
        with self._watched.driving(self.operation, self._origin) as span:
            self._context = contextvars.copy_context()
            self._log.written = partial(tell_written, span)
            await self._run()

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Whoever gave cause for it, it is this operation's affair."""
        return asyncio.get_running_loop().create_task(work, context=self._context)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        going = loop.create_task(self._go())
        over = loop.create_task(self._ended_elsewhere.wait())
        try:
            # Whoever ends it elsewhere ends what is asked of the engine here, in the middle of a
            # call too. A write that is under way is carried out, and finds that it comes too late.
            await asyncio.wait((going, over), return_when=asyncio.FIRST_COMPLETED)
            if going.done():
                going.result()
        finally:
            tasks = (going, over, self._looking, self._cancelling, self._continuing)
            beside = [task for task in tasks if task is not None]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _go(self) -> None:
        await self._log.read_again()
        if self._ended():
            return
        self._heed_cancellation()
        self._heed_stages()
        if self.operation.state in _UNSENT:
            backend = await self._setting_out.run()
            lost = None if backend is None else await self._follow(backend, first=True)
        else:
            lost = _LEFT
        if lost is not None and not self._ended():
            await self._ask(lost)

    async def _look(self) -> None:
        if await self._log.is_over():
            self._ended_elsewhere.set()

    # ---- sent ----

    async def _follow(
        self, backend: EngineBackend, *, first: bool = False, again: bool = False
    ) -> str | None:
        """Hear it to its end. Else why its outcome is not known. `again`: it is sent once more."""
        try:
            order = await self._whole_order()
        except ValueError as error:
            log.error("operation %s can't be sent: %s", self.operation.id, error)
            if first:
                await self._end(nothing_to_send())
                return None
            return "what went with the order is no longer there"
        try:
            async with aclosing(self._carried_out(backend, order, sent=first or again)) as facts:
                async for fact in facts:
                    await self._hear(fact)
                    if self._ended():
                        return None
            return "the engine's reply has no end"
        except NotSent:
            if first:
                await self._end(too_late("its deadline was over before it was sent"))
                return None
            return "its deadline was over before it was sent once more"
        except EngineRefused as refused:
            if first:
                await self._end(Failed(error=refused.error))
                return None
            if again:
                # It speaks of this attempt alone. Whether the one before has arrived meanwhile is
                # what is asked next.
                self._refused = refused.error
            return "the engine would not say how it goes"
        except OutcomeLost as lost:
            return lost.why

    async def _carried_out(
        self, backend: EngineBackend, order: Order, *, sent: bool
    ) -> AsyncGenerator[Fact, None]:
        """Raises NotSent: its deadline is over. LetGo, where this process stood still for so long
        that another one may have come to an end with the order."""
        while True:
            timely = replace(order, send_by=self._send_by(order)) if sent else order
            try:
                async with aclosing(backend.carry_out(timely)) as facts:
                    async for fact in facts:
                        yield fact
                return
            except NotSent:
                if self._is_late():
                    raise
                await self._log.confirm_lease()

    def _send_by(self, order: Order) -> datetime:
        """So long before the lease ends that what is under way by then has arrived before another
        holder asks for it."""
        transit = timedelta(seconds=self._pace.lease_ttl_s / 3)
        return min(order.deadline_at, self._log.leased_until - transit)

    async def _hear(self, fact: Fact) -> None:
        if self.operation.state is OperationState.RECONCILING:
            # Only now: a stream that could not be attached to is no news.
            await self._log.take(Reattached())
        if isinstance(fact, _ENDS):
            await self._end(fact)
        elif await self._log.take(fact) is None:
            self._misses = 0
        self._heed_cancellation()
        self._heed_stages()

    async def _end(self, fact: Completed | Failed | Cancelled) -> None:
        """What was changed is read before the end is told: who hears of the end and looks finds
        the engine as it was left."""
        await self._fleet.look(self.operation.engine_id, self._pace.after_end_s)
        if await self._log.take(fact) is Refusal.SEEN:
            # An engine that was restarted may have lost its last events and numbers its end
            # lower than what was heard. An end is an end.
            await self._log.take(replace(fact, engine_sequence=None))

    # ---- lost ----

    async def _ask(self, lost: str) -> None:
        """Ask the engine until it is known how it ended."""
        self._lost_at = self._clock.now()
        while not self._ended():
            if self.operation.state is not OperationState.RECONCILING:
                await self._log.take(OutcomeUnknown(message=lost))
                self._misses = max(self._misses, 1)
            await self._attention.pause(self._misses - 1)
            self._misses += 1
            if self._ended():
                return
            await self._warn_when_late()
            try:
                backend = await self._fleet.backend(self.operation.engine_id)
                end = backend.end_without_record(self._order())
                if end is not None:
                    await self._log.take(end)
                    return
                shown = await backend.read_back(
                    self._order(), self.operation.engine_instance_id, self._pace.find_timeout_s
                )
                if shown is not None:
                    await self._end(shown)
                    return
                found = await backend.find(self.operation.id, self._pace.find_timeout_s)
                # Asked after the loss, and after the engine has answered: it is this process
                # that does not know the order.
                unknown_to = None if found else (await self._instance_id())
            except (EngineSilent, StillRunning, ChadburnError) as silent:
                self._trouble.seen(logging.INFO, f"no answer: {silent}", "silent")
                continue
            self._trouble.over()
            if found is not None:
                lost = await self._follow(backend) or lost
                if found.end is not None and not self._ended() and self._misses > _TRUSTED_MISSES:
                    # It will not tell the story again, but it has kept how that ended.
                    await self._end(found.end)
            elif unknown_to is not None and await self._settle_unknown(unknown_to):
                lost = await self._follow(backend, again=True) or lost
                self._lost_at = self._clock.now()

    async def _instance_id(self) -> str:
        return (await self._fleet.discover(self.operation.engine_id)).facts.instance_id

    async def _settle_unknown(self, instance_id: str) -> bool:
        """The engine process answered that it does not know the order. True: send it again."""
        operation = self.operation
        sent_to, sent_at = operation.engine_instance_id, operation.started_at
        if sent_to is None or sent_at is None:
            return False
        if instance_id != sent_to:
            # Its memory went with the process, and what the order did before that is not known.
            message = (
                "the process that took the order (the engine, or its sidecar) was restarted, and "
                "does not know it"
            )
            await self._end(
                Failed(
                    error=OperationError("UNKNOWN", "ENGINE_RESTARTED", message, retryable=False)
                )
            )
            return False
        if operation.engine_operation_id is not None:
            # It had taken it on. That it forgot is no proof that nothing was done.
            await self._warn("ENGINE_FORGOT", "the engine no longer knows an order it had taken on")
            return False
        if self._clock.now() - sent_at >= _KEY_KEPT:
            await self._warn("KEY_EXPIRED", "the engine need not remember the order any more")
            return False
        end = self._end_of_unsent()
        if end is not None:
            # What was sent last may still be on its way to the engine, past all that was asked
            # since. Sent again it is the same order; ended it must not arrive any more.
            if self._clock.now() - self._lost_at >= timedelta(seconds=self._pace.transit_s):
                await self._end(end)
            return False
        return await self._log.take(SentAgain()) is None

    def _end_of_unsent(self) -> Cancelled | Failed | None:
        """Of an order that has not reached the engine. None: it is to be sent again."""
        if self.operation.cancel_requested:
            return Cancelled(message="cancelled; it had not reached the engine")
        if self._refused is not None:
            return Failed(error=self._refused)
        if self._is_late():
            return too_late("it had not reached the engine when its deadline was over")
        return None

    async def _warn_when_late(self) -> None:
        if self._is_late():
            said = "the deadline is over, and the outcome is still not known"
            await self._warn(DEADLINE_PASSED, said)

    async def _warn(self, reason: str, message: str) -> None:
        """Once."""
        if all(known.reason != reason for known in self.operation.warnings):
            await self._log.take(Warned(warning=OperationWarning(reason, message)))

    # ---- ordered by several calls ----

    def _heed_stages(self) -> None:
        """Further calls are sent once the engine has taken the first one on."""
        if self._sender is not None:
            self._sender.wake()
            return
        session_id = session_id_of(self.operation)
        known = self.operation.engine_operation_id is not None
        if session_id is not None and known and not self.operation.done:
            self._sender = StageSender(
                session_id, self._log, self._fleet, self._pace, self._backoff
            )
            self._continuing = self._beside(self._sender.run())
            self._continuing.add_done_callback(self._continued, context=self._context)

    def _continued(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        # The operation's own course goes on, and the engine's lease ends what nobody goes on with.
        log.error("operation %s: its further calls failed", self.operation.id, exc_info=error)

    # ---- cancelled by a caller ----

    def _heed_cancellation(self) -> None:
        operation = self.operation
        known = operation.engine_operation_id is not None
        if operation.cancel_requested and known and not operation.done and not self._cancelling:
            self._cancelling = self._beside(self._cancel())

    async def _cancel(self) -> None:
        """Ask the engine to cancel until it has heard. How it ends is heard like any end."""
        attempt = 0
        while not self._ended():
            engine_operation_id = self.operation.engine_operation_id
            assert engine_operation_id is not None
            try:
                backend = await self._fleet.backend(self.operation.engine_id)
                await backend.cancel(engine_operation_id, self._pace.cancel_timeout_s)
                return
            except EngineRefused as refused:
                if refused.error.reason not in _NO_NEWS:
                    await self._warn("CANCEL_REFUSED", refused.error.message)
                return
            except (EngineSilent, ChadburnError) as silent:
                self._trouble.seen(logging.INFO, f"not cancelled yet: {silent}", "cancelling")
                attempt += 1
                await asyncio.sleep(self._backoff.pause_s(attempt))

    # ---- parts ----

    def _ended(self) -> bool:
        # A method: what it says changes while this waits.
        return self.operation.done

    async def _whole_order(self) -> Order:
        """With what goes with it. ValueError: that is gone, or is another's."""
        order = self._order()
        if not order.command.lacks_payload:
            return order
        payload = await self._log.payload()
        if payload is None:
            raise ValueError("its payload is not there")
        return replace(order, command=order.command.carrying(payload))

    def _order(self) -> Order:
        operation = self.operation
        sent_at, deadline_at = operation.started_at, operation.deadline_at
        assert sent_at is not None
        assert deadline_at is not None
        return Order(
            operation_id=operation.id,
            command=command_of(operation.kind, operation.request),
            expected_revision=operation.expected_revision,
            deadline_at=deadline_at,
            # From the moment of the first sending, which does not change: nor does the payload.
            deadline_ms=max(int((deadline_at - sent_at).total_seconds() * 1_000), 1),
            trace_id=operation.trace_id,
        )

    def _is_late(self) -> bool:
        deadline_at = self.operation.deadline_at
        return deadline_at is not None and self._clock.now() >= deadline_at
