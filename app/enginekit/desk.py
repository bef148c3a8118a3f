"""Where orders are taken on, carried out one at a time, followed and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from datetime import timedelta
from typing import Any, TypeVar

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    Command,
    ReconfigureServing,
    ReleaseResources,
    StartProfile,
    UpdateWeights,
    check_revision,
)
from app.domain.errors import (
    NotCancellable,
    OperationEnded,
    ProfileRunning,
    ProfilingRefused,
    RequestsInFlight,
    UnknownOperation,
)
from app.domain.idempotency import replay_of
from app.domain.kinds import Admission, DrainRule, OperationKind, OperationState
from app.domain.operation import Actor, Operation, OperationEvent
from app.domain.transitions import CancelRequested
from app.domain.weight_sessions import SessionWeights
from app.enginekit.execution import Execution, ExecutionSettings
from app.enginekit.journal import Journal, LiveOperation
from app.enginekit.phases import Interrupts
from app.enginekit.profiling import ProfileRun
from app.enginekit.records import Record
from app.enginekit.refusals import NamedBusy, Stopping
from app.enginekit.requests import ReadOrder, check_deadline, check_target
from app.enginekit.runtime import ProfilerRuntime, Runtime
from app.enginekit.sessions import OpenSession, ReadStage, Sessions
from app.enginekit.state import EngineState
from app.observability.spans import NO_TRACING, Tracing, spanned

T = TypeVar("T")

_K = OperationKind
_SINGLE_FLIGHT = frozenset({_K.RECONFIGURE_SERVING, _K.LOAD_LORA, _K.UNLOAD_LORA})
_NOT_TO_BE_PROFILED = frozenset(
    {_K.RELEASE_RESOURCES, _K.RESTORE_RESOURCES, _K.RECONFIGURE_SERVING}
)


class OrderDesk:
    def __init__(
        self,
        runtime: Runtime,
        state: EngineState,
        settings: ExecutionSettings,
        *,
        capabilities: Callable[[], Capabilities],
        new_id: Callable[[], str],
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._tracing = tracing
        self._runtime = runtime
        self._state = state
        self._journal: Journal = state.journal
        self._settings = settings
        self._capabilities = capabilities
        self._new_id = new_id
        self._accepting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._interrupts: dict[str, Interrupts] = {}
        self._profiles: dict[str, ProfileRun] = {}
        self._sessions = Sessions()
        self._stopping = False

    # ---- taking on ----

    async def submit(self, order: ReadOrder | ReadStage, actor: Actor) -> str:
        """The id of the operation that the key stands for: a new one, already committed, or the
        earlier one of the same call.

        Judged in this order: replay of the key, capability, revision, epoch and state, busy. What
        is being judged when the caller goes away is carried on: whether the caller has seen the
        acceptance cannot be known.
        """
        task = asyncio.ensure_future(self._submit(order, actor))
        self._keep(task)
        return await asyncio.shield(task)

    async def _submit(self, order: ReadOrder | ReadStage, actor: Actor) -> str:
        async with self._accepting:
            earlier = replay_of(await self._journal.known(order.key), order.fingerprint)
            if earlier is not None:
                if (session := self._sessions.of_operation(earlier)) is not None:
                    session.heard()
                return earlier
            if self._stopping:
                raise Stopping("the engine is stopping")
            if isinstance(order, ReadStage):
                return await self._go_on(order)
            deadline_ms, joined = await self._judge(order)
            if joined is not None:
                return joined
            return await self._accept(order, actor, deadline_ms)

    async def _go_on(self, order: ReadStage) -> str:
        """With the weight session that it names."""
        order.command.check_supported(self._capabilities())
        session = self._sessions.named(order.command.session_id)
        await self._state.refresh()
        check_revision(order.expected_revision, self._state.facts())
        await session.take(order)
        return session.operation_id

    async def _judge(self, order: ReadOrder) -> tuple[int, str | None]:
        """The deadline that holds, and the running operation that is this very order already."""
        can, command = self._capabilities(), order.command
        command.check_supported(can)
        check_target(order, can)
        deadline_ms = check_deadline(order, can)
        await self._state.refresh()
        facts = self._state.facts()
        check_revision(order.expected_revision, facts)
        command.check_state(facts)
        joined = self._join(command)
        if joined is None:
            self._check_in_flight(command)
        return deadline_ms, joined

    def _join(self, command: Command) -> str | None:
        """Raises NamedBusy, ProfileRunning or ProfilingRefused where something is in the way."""
        running = self._journal.running_exclusive()
        if isinstance(command, StartProfile):
            self.check_profiling()
            running = self._journal.running_profile()
            if running is None:
                return None
            if running.operation.request == command.document():
                return running.operation.id
            text = "another profile is running"
            raise ProfileRunning(text, operation_id=running.operation.id)
        if running is None or not command.kind.exclusive:
            return None
        if command.kind in _SINGLE_FLIGHT and _same(running.operation, command):
            return running.operation.id
        raise NamedBusy(operation_id=running.operation.id, idempotency_key=running.key)

    def check_profiling(self) -> None:
        """Raises ProfilingRefused while what would be profiled is taken apart."""
        running = self._journal.running_exclusive()
        if running is not None and running.operation.kind in _NOT_TO_BE_PROFILED:
            raise ProfilingRefused(
                "resources are being released or serving is being reconfigured",
                operation_id=running.operation.id,
            )

    def _check_in_flight(self, command: Command) -> None:
        """Only the gate knows what runs. Whoever is let in after this makes the order fail."""
        gate = self._state.gate
        if not isinstance(command, ReleaseResources | ReconfigureServing):
            return
        waits = command.drain is not DrainRule.REFUSE or gate.admission is not Admission.OPEN
        if gate.in_flight and not waits:
            raise RequestsInFlight(f"{gate.in_flight} requests are in flight")

    async def _accept(self, order: ReadOrder, actor: Actor, deadline_ms: int) -> str:
        now = self._state.now()
        operation = Operation(
            id=self._new_id(),
            engine_id=self._journal.identity,
            kind=order.command.kind,
            state=OperationState.ACCEPTED,
            request=order.command.document(),
            actor=actor,
            created_at=now,
            engine_instance_id=self._state.instance_id,
            idempotency_key=order.key,
            expected_revision=order.expected_revision,
            deadline_at=now + timedelta(milliseconds=deadline_ms),
        )
        # There before the operation can be found: a cancellation must not fall between the two.
        deadline_at = asyncio.get_running_loop().time() + deadline_ms / 1000
        interrupts = Interrupts(deadline_at, self._settings.timings)
        self._interrupts[operation.id] = interrupts
        try:
            live = await self._journal.accept(operation, order.fingerprint)
        except BaseException:
            del self._interrupts[operation.id]
            raise
        work = self._work(live, order.command, interrupts)
        self._keep(asyncio.create_task(self._run(live, work)))
        return operation.id

    def _work(
        self, live: LiveOperation, command: Command, interrupts: Interrupts
    ) -> Callable[[], Awaitable[None]]:
        runtime, state, settings = self._runtime, self._state, self._settings
        if isinstance(command, StartProfile):
            assert isinstance(runtime, ProfilerRuntime)  # else it is not offered
            profile = ProfileRun(runtime, state, live, command, interrupts, settings.timings)
            # There before the operation can be found: whoever started it waits for it.
            self._profiles[live.operation.id] = profile
            return profile.run
        hold_limit_ms = self._capabilities().limits.default_hold_limit_ms
        session = None
        if isinstance(command, UpdateWeights) and isinstance(command.source, SessionWeights):
            # There before the operation can be found: its next call may follow at once.
            session = OpenSession(
                live, command, self._journal, interrupts, settings.default_lease_ms
            )
            self._sessions.add(session)
        return Execution(
            runtime, state, live, command, interrupts, settings, hold_limit_ms, session
        ).run

    async def _run(self, live: LiveOperation, work: Callable[[], Awaitable[None]]) -> None:
        operation_id, kind = live.operation.id, live.operation.kind.value
        about = {"chadburn.kind": kind, "chadburn.engine_operation": operation_id}
        try:
            # Below the call that brought the order, however long it goes on after that.
            with spanned(self._tracing, f"carry out {kind}", about) as span:
                await work()
                ended = live.operation
                span.note({"chadburn.operation.state": ended.state.value})
                if ended.error is not None:
                    span.fail(ended.error.reason)
        finally:
            del self._interrupts[operation_id]
            self._profiles.pop(operation_id, None)
            self._sessions.forget(operation_id)

    def profile_run(self, operation_id: str) -> ProfileRun | None:
        """None: it has ended, or there never was one of that id."""
        return self._profiles.get(operation_id)

    # ---- following and cancelling ----

    async def follow(
        self, operation_id: str
    ) -> AsyncGenerator[tuple[Record, OperationEvent], None]:
        """All events from the first, then the end. Closing it only detaches."""
        async with aclosing(self._journal.follow(operation_id)) as told:
            async for record, event in told:
                yield record, event

    async def find(self, *, operation_id: str | None = None, key: str | None = None) -> Record:
        """Raises UnknownOperation."""
        if operation_id is not None:
            record = await self._journal.by_id(operation_id)
        else:
            record = await self._journal.by_key(key or "")
        if record is None:
            raise UnknownOperation("this engine knows no such operation")
        return record

    async def cancel(self, operation_id: str) -> Record:
        """Ask. The operation ends by itself, cancelled or, when it had gone too far, otherwise.

        Raises UnknownOperation, OperationEnded, NotCancellable.
        """
        record = await self.find(operation_id=operation_id)
        operation = record.operation
        if operation.done:
            raise OperationEnded("the operation has ended", operation_id=operation_id)
        if operation.kind not in self._capabilities().cancellable:
            raise NotCancellable(
                f"this engine cannot cancel {operation.kind.value}", operation_id=operation_id
            )
        live = self._journal.live(operation_id)
        if live is not None:
            await self._journal.record(live, lambda _: CancelRequested())
            if operation_id in self._interrupts:
                self._interrupts[operation_id].cancelled.set()
        return await self.find(operation_id=operation_id)

    async def stop(self) -> None:
        """Take nothing on any more, and leave what runs. It stays open in the store, and the next
        life ends it: what the ranks hold then is not what they hold now."""
        self._stopping = True
        async with self._accepting:
            tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def carry(self, command: Command, actor: Actor) -> Operation:
        """An order of a service that knows no keys, to its end. A caller that goes away leaves it
        running."""
        key = f"{command.kind.value}-{self._new_id()}"
        order = ReadOrder(
            command=command,
            key=key,
            fingerprint=key,
            expected_revision=None,
            deadline_ms=None,
            whole_engine=True,
        )
        operation_id = await self.submit(order, actor)
        async with aclosing(self.follow(operation_id)) as told:
            async for _ in told:
                pass
        return (await self.find(operation_id=operation_id)).operation

    def beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Something that is no order, begun while no exclusive one runs. It goes on when nobody
        waits for it. Raises NamedBusy, Stopping."""
        running = self._journal.running_exclusive()
        if running is not None or self._stopping:
            work.close()
        if self._stopping:
            raise Stopping("the engine is stopping")
        if running is not None:
            raise NamedBusy(operation_id=running.operation.id, idempotency_key=running.key)
        task = asyncio.get_running_loop().create_task(work)
        self._keep(task)
        return task

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, who may have gone


def _same(running: Operation, command: Command) -> bool:
    """Whether both want the same in the end; how requests are treated on the way does not count."""
    wanted = {**command.document(), "drain": None}
    return running.kind is command.kind and {**running.request, "drain": None} == wanted
