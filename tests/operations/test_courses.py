"""Whatever an engine, the way to it and this process do: an operation ends as it truly ended, or
stays open; it takes effect once at most; and it is sent again only on proof."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from app.backends.port import EngineRefused, EngineSilent, Silence
from app.domain.errors import NotCancellable, OperationEnded
from app.domain.kinds import FailureEffect, OperationState
from app.domain.operation import Operation, OperationError
from app.domain.transitions import (
    Advanced,
    Cancelled,
    Completed,
    Failed,
    Settled,
    advance,
)
from app.ledger import Ledger
from app.operations.pace import Pace
from app.operations.runner import Runner
from tests.operations.gateway import CALLER, DRAIN, Gateway, running_gateway, until
from tests.operations.scripted_backend import (
    ASKS,
    SENDS,
    Ask,
    ScriptedBackend,
    ScriptedBackends,
    Send,
)

HURRY = Pace(
    lease_ttl_s=0.5,
    sweep_s=0.005,
    find_timeout_s=1.0,
    cancel_timeout_s=1.0,
    after_end_s=0.5,
    transit_s=0.01,
    retry_first_s=0.001,
    retry_most_s=0.004,
)


class World:
    """One ledger and one event loop for all examples; an engine of its own for each."""

    def __init__(
        self, folder: Path, seen_as: Callable[[Ledger], Any] = lambda ledger: ledger
    ) -> None:
        self._loop = asyncio.Runner()
        self._engines: dict[str, ScriptedBackend] = {}
        self._numbers = itertools.count(1)
        self.gateway = Gateway(
            f"sqlite+aiosqlite:///{folder}/ledger.db",
            pace=HURRY,
            make_backends=lambda _clock: ScriptedBackends(self._engines),
            seen_as=seen_as,
        )
        self.run(self.gateway.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(work)

    async def engine(self, backend: ScriptedBackend) -> str:
        engine_id = f"e{next(self._numbers)}"
        self._engines[engine_id] = backend
        await self.gateway.register("127.0.0.1:1", engine_id)
        return engine_id

    async def restart_runner(self) -> None:
        """The orders are left as they are, and found again by the next process."""
        gateway = self.gateway
        await gateway.runner.stop(5.0)
        owner = f"again-{next(self._numbers)}"
        gateway.runner = Runner(
            gateway.ledger, gateway.fleet, gateway.clock, owner=owner, pace=HURRY
        )
        gateway.orders._runner = gateway.runner  # the same orders, given to the new runner
        await gateway.runner.start()

    def close(self) -> None:
        self.run(self.gateway.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


sends = st.lists(st.sampled_from(SENDS), max_size=6)
asks = st.lists(st.sampled_from(ASKS), max_size=6)
moments = st.lists(st.sampled_from([0.0, 0.0005, 0.002, 0.008]), max_size=3)


class TestAnyWeather:
    # Not shrunk: an example that fails waits half a minute for an end that does not come.
    @settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(sends=sends, finds=asks, reads=asks, restarts=moments, cancel=st.none() | moments)
    def test_an_operation_ends_truthfully(
        self,
        world: World,
        sends: list[Send],
        finds: list[Ask],
        reads: list[Ask],
        restarts: list[float],
        cancel: list[float] | None,
    ) -> None:
        backend = ScriptedBackend(sends)
        world.run(_live(world, backend, finds, reads, restarts, cancel))


async def _live(
    world: World,
    backend: ScriptedBackend,
    finds: list[Ask],
    reads: list[Ask],
    restarts: list[float],
    cancel: list[float] | None,
) -> None:
    engine_id = await world.engine(backend)
    # Registered in fine weather: an engine that never answered is not ordered at all.
    backend.finds, backend.reads = finds, reads
    operation = await world.gateway.give(DRAIN, engine_id)
    if cancel is not None:
        await asyncio.sleep(sum(cancel))
        with contextlib.suppress(NotCancellable, OperationEnded):
            await world.gateway.orders.cancel(operation.id, CALLER)
    for pause_s in restarts:
        await asyncio.sleep(pause_s)
        await world.restart_runner()
    ended = await world.gateway.end_of(operation)
    _true(backend, ended)
    _proved(backend, ended)


def _true(backend: ScriptedBackend, ended: Operation) -> None:
    effects, really = backend.effects[ended.id], backend.ends.get(ended.id)
    assert effects <= 1, "it took effect twice"
    match ended.state:
        case OperationState.SUCCEEDED:
            assert (effects, really) == (1, Completed)
        case OperationState.CANCELLED:
            assert effects == 0
            assert really in (Cancelled, None)
        case OperationState.FAILED:
            assert ended.error is not None
            if ended.error.effect is FailureEffect.UNKNOWN:
                # Its process is gone, and what it did before that with it.
                assert backend.instance_id != "life-1"
            else:
                assert effects == 0
                assert really in (Failed, None)


def _proved(backend: ScriptedBackend, ended: Operation) -> None:
    """Between two sendings the engine was asked and has answered: that it knows the order, so
    that this one only attaches; or, in the life that it was first sent to, that it does not."""
    about = [step for step in backend.trace if step[1] in (ended.id, "")]
    first_life: str | None = None
    answers: list[tuple[str, str, bool]] = []
    for what, _, life, known in about:
        if what != "send":
            answers.append((what, life, known))
            continue
        if first_life is None:
            first_life = life
        else:
            asked = [(at, answer) for kind, at, answer in answers if kind == "find"]
            assert asked, "sent again without asking"
            at, answer = asked[-1]
            if not answer:
                assert at == first_life, "another life can't prove that this one did nothing"
                assert answers[-1][:2] == ("read", first_life)
        answers = []


class TestParticularWeather:
    """Cases worth naming, each once found or nearly overlooked."""

    def run(self, world: World, backend: ScriptedBackend) -> Operation:
        async def live() -> Operation:
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            ended = await world.gateway.end_of(operation)
            _true(backend, ended)
            _proved(backend, ended)
            return ended

        ended: Operation = world.run(live())
        return ended

    def test_refused_when_sent_again_is_a_refusal_without_effect(self, world: World) -> None:
        ended = self.run(world, ScriptedBackend(["lost on the way", "refuses"]))
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == ("ENGINE_BUSY", FailureEffect.NONE)

    def test_a_fault_in_this_process_does_not_lose_the_order(self, world: World) -> None:
        ended = self.run(world, ScriptedBackend(["breaks", "breaks"], ["breaks", "silent"]))
        assert ended.state is OperationState.SUCCEEDED

    def test_forgotten_by_the_next_life(self, world: World) -> None:
        ended = self.run(world, ScriptedBackend(["restarts and forgets"], ["silent"] * 3))
        assert ended.error is not None
        assert ended.error.effect is FailureEffect.UNKNOWN

    def test_an_end_numbered_lower_than_what_was_heard_is_an_end(self, world: World) -> None:
        """The engine lost its last events with its process, and not the order."""
        backend = ScriptedBackend(["drains"])
        backend.drain_s = 60.0

        async def live() -> Operation:
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            await _heard(world, operation, 2)
            kept = backend.kept[operation.id]
            del kept.facts[1:]
            backend.restart(remembers=True)
            kept.cancelled.set()  # the stream of the life before ends, without an end
            return await world.gateway.end_of(operation)

        ended = world.run(live())
        assert ended.state is OperationState.FAILED
        assert (ended.engine_sequence, ended.error.reason) == (2, "ENGINE_RESTARTED")

    def test_an_engine_that_forgets_what_it_took_on_is_not_believed(self, world: World) -> None:
        """The same process says that it does not know an order it had acknowledged."""
        backend = ScriptedBackend(["lost when half told"])

        async def live() -> Operation:
            engine_id = await world.engine(backend)
            backend.finds = ["silent"] * 3
            operation = await world.gateway.give(DRAIN, engine_id)
            await world.gateway.until(operation, OperationState.RECONCILING)
            backend.kept.clear()
            await _warned(world, operation, 1)
            await asyncio.sleep(0.05)  # and goes on asking
            known = await world.gateway.ledger.operations.get(operation.id)
            assert known is not None
            return known

        known = world.run(live())
        assert known.state is OperationState.RECONCILING
        assert [warning.reason for warning in known.warnings] == ["ENGINE_FORGOT"]
        assert backend.effects[known.id] == 1

    def test_a_story_that_is_not_told_again_still_has_its_end(self, world: World) -> None:
        """Each attempt to attach fails; the engine's record has kept how it ended."""
        weather: list[Send] = ["lost when half told", *["lost on the way"] * 1000]  # type: ignore[list-item]
        ended = self.run(world, ScriptedBackend(weather, records_ends=True))
        assert ended.state is OperationState.SUCCEEDED

    def test_silence_after_a_day_proves_nothing(self, tmp_path: Path) -> None:
        """By then the engine may have forgotten the key of an order that it has carried out."""
        backend = ScriptedBackend(["lost on the way"])

        async def live() -> Operation:
            made = running_gateway(
                tmp_path, pace=HURRY, make_backends=lambda _: ScriptedBackends({"e1": backend})
            )
            async with made as gateway:
                await gateway.register("127.0.0.1:1")
                backend.finds = ["silent"] * 1000
                operation = await gateway.give(DRAIN)
                await gateway.until(operation, OperationState.RECONCILING)
                gateway.clock.go(86_400)
                backend.finds = []

                async def warned() -> bool:
                    known = await gateway.ledger.operations.get(operation.id)
                    assert known is not None
                    return len(known.warnings) == 2

                await until(warned)
                known = await gateway.ledger.operations.get(operation.id)
                assert known is not None
                return known

        known = asyncio.run(live())
        assert known.state is OperationState.RECONCILING
        reasons = {warning.reason for warning in known.warnings}
        assert reasons == {"DEADLINE_PASSED", "KEY_EXPIRED"}
        assert [what for what, *_ in backend.trace].count("send") == 1

    def test_a_cancelled_order_that_never_arrived_is_not_sent_again(self, world: World) -> None:
        backend = ScriptedBackend(["lost on the way"])
        backend.on_the_way = asyncio.Event()

        async def live() -> Operation:
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            await world.gateway.until(operation, OperationState.RUNNING)
            await world.gateway.orders.cancel(operation.id, CALLER)
            assert backend.on_the_way is not None
            backend.on_the_way.set()
            return await world.gateway.end_of(operation)

        assert world.run(live()).state is OperationState.CANCELLED
        assert [what for what, *_ in backend.trace].count("send") == 1

    def test_a_cancellation_is_asked_for_until_it_is_heard(self, world: World) -> None:
        backend = ScriptedBackend(["drains"])
        backend.drain_s = 60.0
        backend.cancels = [EngineSilent(Silence.UNREACHABLE)] * 3

        async def live() -> Operation:
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            await _heard(world, operation, 2)
            await world.gateway.orders.cancel(operation.id, CALLER)
            return await world.gateway.end_of(operation)

        assert world.run(live()).state is OperationState.CANCELLED
        assert backend.cancels == []

    @pytest.mark.parametrize(
        ("reason", "warnings"),
        [("NOT_CANCELLABLE", ["CANCEL_REFUSED"]), ("OPERATION_ENDED", [])],
    )
    def test_a_cancellation_that_is_refused_is_told(
        self, world: World, reason: str, warnings: list[str]
    ) -> None:
        backend = ScriptedBackend(["drains"])
        backend.drain_s = 60.0
        error = OperationError("FAILED_PRECONDITION", reason, "no")
        backend.cancels = [EngineRefused(error)]

        async def live() -> Operation:
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            await _heard(world, operation, 1)
            await world.gateway.orders.cancel(operation.id, CALLER)
            await until(lambda: not backend.cancels)
            await _warned(world, operation, len(warnings))
            backend.finish_drain()
            return await world.gateway.end_of(operation)

        ended = world.run(live())
        assert ended.state is OperationState.SUCCEEDED
        assert [warning.reason for warning in ended.warnings] == warnings

    def test_an_operation_that_somebody_settles_is_let_go(self, world: World) -> None:
        """Written into the ledger by another process; nothing tells this one."""
        backend = ScriptedBackend(["lost on the way"])

        async def live() -> int:
            engine_id = await world.engine(backend)
            backend.finds = ["silent"] * 10_000
            operation = await world.gateway.give(DRAIN, engine_id)
            open_one = await world.gateway.until(operation, OperationState.RECONCILING)
            fact = Settled(end=OperationState.FAILED, by="ada", reason="seen by eye")
            step = advance(open_one, fact, world.gateway.clock.now())
            assert isinstance(step, Advanced)
            await world.gateway.ledger.operations.record(open_one, step)
            await until(lambda: engine_id not in world.gateway.runner._desks)
            left = len(backend.finds)
            await asyncio.sleep(0.05)
            return left - len(backend.finds)

        assert world.run(live()) == 0


async def _heard(world: World, operation: Operation, number: int) -> None:
    """Until the engine's event of that number is in the ledger."""

    async def heard() -> bool:
        known = await world.gateway.ledger.operations.get(operation.id)
        assert known is not None
        return known.engine_sequence >= number

    await until(heard)


async def _warned(world: World, operation: Operation, number: int) -> None:
    """Until so many warnings are in the ledger."""

    async def warned() -> bool:
        known = await world.gateway.ledger.operations.get(operation.id)
        assert known is not None
        return len(known.warnings) >= number

    await until(warned)
