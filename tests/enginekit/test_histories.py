"""Random histories of orders, requests, failures and restarts, and what holds in all of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, Fault, running_engine
from tests.enginekit.client import Client, Event, Generation, assert_whole, client_of
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import explode, fault, hang

pytestmark = pytest.mark.anyio

Step = tuple[str, Any]

STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(
        st.just("pause"),
        st.tuples(
            st.sampled_from(["drain", "abort", "keep"]),
            st.sampled_from(["hold", "refuse"]),
            st.sampled_from([None, 40, 2_000]),
        ),
    ),
    st.tuples(st.just("resume"), st.sampled_from([0, 0, 0, -1, 1])),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(
        st.just("release"),
        st.tuples(
            st.sampled_from(["kv_cache", "weights"]),
            st.sampled_from(["preserve", "discard"]),
            st.sampled_from(["wait", "abort", "refuse"]),
        ),
    ),
    st.tuples(st.just("restore"), st.sampled_from([0, 0, -1])),
    st.tuples(st.just("update"), st.sampled_from([None, "drain", "abort", "keep"])),
    st.tuples(st.just("again"), st.integers(0, 5)),
    st.tuples(st.just("generate"), st.none()),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("stall"), st.booleans()),
    st.tuples(
        st.just("script"),
        st.tuples(
            st.sampled_from(["prepare", "commit", "conclude"]),
            st.sampled_from([None, fault, explode, hang]),
        ),
    ),
    st.tuples(st.just("drop"), st.sampled_from(list(Fault)[:3])),
    st.tuples(st.just("restart"), st.none()),
)


class History:
    """Applies steps to an engine and keeps all that any client has seen."""

    def __init__(self, double: EngineDouble, client: Client) -> None:
        self.double = double
        self.client = client
        self.sent: list[Any] = []
        self.under_way: set[asyncio.Task[None]] = set()
        self.requests: list[Generation] = []
        self.streams: dict[str, list[list[Event]]] = {}
        self.counters: list[tuple[int, int, int]] = []

    async def apply(self, step: Step) -> None:
        name, what = step
        action: Callable[[Any], Any] = getattr(self, name)
        await action(what)
        await self.look()

    async def look(self) -> None:
        profile = await self.client.profile()
        self.counters.append((profile.revision, profile.pause_epoch, profile.release_epoch))
        assert len(profile.state.open_operations) <= 1
        state = profile.state
        if state.admission == pb.ADMISSION_STATE_PAUSED:
            assert state.pause.epoch == profile.pause_epoch
        if state.released:
            assert state.admission == pb.ADMISSION_STATE_PAUSED
        ready = (
            state.admission == pb.ADMISSION_STATE_OPEN
            and state.weights.state == pb.WEIGHTS_STATE_VALID
            and not state.released
        )
        if not ready and not state.open_operations:
            assert await self.client.health("openengine.v1.Inference") == "NOT_SERVING"

    def send(self, order: Any) -> None:
        self.sent.append(order)
        task = asyncio.create_task(self.watch(order))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def watch(self, order: Any) -> None:
        events: list[Event] = []
        self.streams.setdefault(order.idempotency_key, []).append(events)
        try:
            async for event in self.client.stream(order):
                events.append(event)
        except grpc.aio.AioRpcError:
            events.append(Event())  # it broke off, or was refused: not a whole one

    # ---- steps ----

    async def pause(self, what: tuple[str, str, int | None]) -> None:
        mode, new_requests, deadline_ms = what
        self.send(self.client.pause(mode, new_requests=new_requests, deadline_ms=deadline_ms))
        await asyncio.sleep(0.01)

    async def resume(self, away: int) -> None:
        epoch = (await self.client.profile()).pause_epoch + away
        self.send(self.client.resume(max(1, epoch)))
        await asyncio.sleep(0.01)

    async def flush(self, _: None) -> None:
        self.send(self.client.flush())

    async def release(self, what: tuple[str, str, str]) -> None:
        kind, content, drain = what
        self.send(self.client.release(kind, content=content, drain=drain))
        await asyncio.sleep(0.01)

    async def restore(self, away: int) -> None:
        epoch = (await self.client.profile()).release_epoch + away
        self.send(self.client.restore("weights", "kv_cache", epoch=epoch))
        await asyncio.sleep(0.01)

    async def update(self, pause: str | None) -> None:
        number = len(self.sent)
        self.send(self.client.update(f"v{number}", pause=pause))
        await asyncio.sleep(0.01)

    async def again(self, back: int) -> None:
        if back < len(self.sent):
            self.send(self.sent[-1 - back])

    async def generate(self, _: None) -> None:
        self.requests.append(self.client.generate("a b c"))

    async def cancel(self, _: None) -> None:
        for opened in (await self.client.profile()).state.open_operations:
            try:
                await self.client.cancel(opened.operation_id)
            except grpc.aio.AioRpcError as refused:
                # Not cancellable, or ended meanwhile.
                if refused.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise

    async def settle(self, _: None) -> None:
        await asyncio.sleep(0.03)

    async def stall(self, wanted: bool) -> None:
        if wanted:
            self.double.engine.stall()
        else:
            self.double.engine.go()

    async def script(self, what: tuple[str, Any]) -> None:
        phase, hook = what
        self.double.engine.scripts.clear()
        if hook is not None:
            self.double.engine.script(phase, hook, -1 if phase == "conclude" else 1)

    async def drop(self, kind: Fault) -> None:
        self.double.fail_next("Pause", kind)
        self.double.fail_next("FlushCaches", kind)

    async def restart(self, _: None) -> None:
        await self.double.restart()

    # ---- the end ----

    async def finish(self) -> None:
        """Heal everything: all must come to an end, and the engine must serve."""
        engine = self.double.engine
        engine.scripts.clear()
        engine.go()
        for method in ("Pause", "FlushCaches"):
            while self.double.take_fault(method):
                pass
        await self.cancel(None)
        async with asyncio.timeout(30):
            while self.under_way or (await self.client.profile()).state.open_operations:
                await self.cancel(None)
                await asyncio.sleep(0.01)
        profile = await self.client.profile()
        if profile.state.released:
            everything = self.client.restore("weights", "kv_cache", epoch=profile.release_epoch)
            assert (await self.client.completed(everything)).changed
        if profile.state.weights.state != pb.WEIGHTS_STATE_VALID:
            healing = self.client.update("healed", pause="abort")
            assert (await self.client.completed(healing)).changed
        await self.check_ranks()
        profile = await self.client.profile()
        if profile.state.admission == pb.ADMISSION_STATE_PAUSED:
            assert (await self.client.completed(self.client.resume(profile.pause_epoch))).changed
        assert await self.client.admission() == "open"
        assert await self.client.generate().finish_reason() == "LENGTH"
        for request in self.requests:
            try:
                await request.end()
            except grpc.aio.AioRpcError:
                continue

    async def check_ranks(self) -> None:
        """Whatever happened, the ranks hold the same, and it is what the engine says of itself."""
        engine = self.double.engine
        assert isinstance(engine, FullEngine)
        first, second = engine.held.values()
        assert first == second
        told = (await self.client.profile()).state
        assert (told.weights.version, list(told.released)) == (first.version, [])

    async def check(self) -> None:
        for earlier, later in zip(self.counters, self.counters[1:], strict=False):
            assert all(a <= b for a, b in zip(earlier, later, strict=True)), self.counters
        for order in self.sent:
            await self.check_one(order)

    async def check_one(self, order: Any) -> None:
        key = order.idempotency_key
        seen = [[e for e in events if e.operation_id] for events in self.streams[key]]
        try:
            whole = await self.client.order(order)
        except grpc.aio.AioRpcError:
            assert not any(seen), "an accepted order was forgotten"
            return
        assert_whole(whole)
        for events in seen:
            # Whatever anybody saw, before or after restarts, is how it was.
            assert events == whole[: len(events)]
        stored = await self.client.operation(idempotency_key=key)
        assert stored.last_sequence == len(whole)
        end = whole[-1].WhichOneof("event") or ""
        assert stored.WhichOneof("outcome") == end
        assert getattr(stored, end) == getattr(whole[-1], end)


@settings(max_examples=25)
@given(steps=st.lists(STEPS, max_size=25))
async def test_whatever_happens(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_engine(
                Path(folder),
                make_engine=lambda: FullEngine(world_size=2),
                cancel_grace_s=0.5,
                rollback_timeout_s=2.0,
                progress_interval_s=0.01,
                default_deadline_ms=1500,  # what hangs in a commit is not cancelled before
            ) as double,
            client_of(double) as client,
        ):
            history = History(double, client)
            for step in steps:
                await history.apply(step)
            await history.finish()
            await history.check()
