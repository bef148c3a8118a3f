"""Restarts on the same store, the store itself, and a store that fails."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.enginekit.server import EngineServer, KitSettings, StoreInUse, StoreUnreadable
from app.enginekit.store import FILE_NAME
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused, until
from tests.enginekit.minimal_engine import MinimalEngine, hang

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


async def test_every_start_is_a_new_life_with_higher_counters(double: EngineDouble) -> None:
    seen = []
    for _ in range(3):
        async with client_of(double) as client:
            await client.completed(client.pause())
            seen.append(await client.profile())
        await double.restart()
    instances = [profile.instance_id for profile in seen]
    assert len(set(instances)) == 3
    assert len({name.partition("-")[0] for name in instances}) == 1  # one identity
    for earlier, later in pairwise(seen):
        assert later.revision > earlier.revision
        assert later.pause_epoch > earlier.pause_epoch
        assert later.release_epoch > earlier.release_epoch


async def test_a_pause_of_an_earlier_life_cannot_be_resumed(double: EngineDouble) -> None:
    async with client_of(double) as client:
        paused = await client.completed(client.pause())
    await double.restart()
    async with client_of(double) as client:
        assert await client.admission() == "open"
        seen = await refused(client.stream(client.resume(paused.pause.pause_epoch)))
        assert seen.reason == "STALE_PAUSE_EPOCH"


async def test_operations_that_had_not_ended_end_with_the_restart(double: EngineDouble) -> None:
    async with client_of(double) as client:
        done = await client.order(client.pause(idempotency_key="done"))
        double.engine.script("prepare", hang)
        order = client.flush(idempotency_key="open")
        running = await client.begin(order)
        await double.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await running.rest()
    await double.start()
    async with client_of(double) as client:
        assert await client.order(client.pause(idempotency_key="done")) == done
        events = await client.order(order)
        assert_whole(events)
        assert events[: len(running.events)] == running.events
        failed = events[-1].failed
        assert (failed.reason, failed.effect) == ("ENGINE_RESTARTED", pb.FAILURE_EFFECT_UNKNOWN)
        # What took it may be a sidecar, whose engine lives on.
        assert "(the engine, or its sidecar) was restarted" in failed.message
        operation = await client.operation(idempotency_key="open")
        assert operation.state == pb.ADMIN_OPERATION_STATE_FAILED
        assert operation.failed == failed
        assert operation.instance_id != double.instance_id
        # The slot is free again, and the ended order did not run a second time.
        assert len(double.orders) == 2
        assert (await client.completed(client.pause())).changed


async def test_a_drain_that_is_killed_leaves_an_open_engine(double: EngineDouble) -> None:
    async with client_of(double) as client:
        double.engine.stall()
        running = client.generate()
        await running.first()
        before = await client.begin(client.pause(idempotency_key="drain"))
        await before.next()
        await double.restart()
        before.detach()
        running.hang_up()
    async with client_of(double) as client:
        assert await client.admission() == "open"
        failed = (await client.operation(idempotency_key="drain")).failed
        assert failed.reason == "ENGINE_RESTARTED"
        assert await client.generate().finish_reason() == "LENGTH"


async def test_an_empty_store_is_a_new_identity(tmp_path: Path) -> None:
    names = set()
    for folder in ("a", "b"):
        async with running_engine(tmp_path / folder) as double:
            names.add(double.instance_id.partition("-")[0])
    assert len(names) == 2


def settings(folder: Path, **more: Any) -> KitSettings:
    return KitSettings(data_dir=folder, insecure_loopback=True, **more)


async def test_two_engines_never_share_a_store(double: EngineDouble, tmp_path: Path) -> None:
    second = EngineServer(MinimalEngine(), settings(tmp_path / "engine"))
    with pytest.raises(StoreInUse):
        await second.start()
    async with client_of(double) as client:
        assert (await client.completed(client.pause())).changed


async def test_a_damaged_store_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnreadable):
        await EngineServer(MinimalEngine(), settings(tmp_path)).start()


async def test_a_store_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreUnreadable, match="version 99"):
        await EngineServer(MinimalEngine(), settings(tmp_path)).start()


async def test_a_store_that_cannot_be_written_is_said_to_be(tmp_path: Path) -> None:
    first = EngineServer(MinimalEngine(), settings(tmp_path))
    await first.start()
    await first.stop(1.0)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute(
            "CREATE TRIGGER no_space BEFORE UPDATE ON engine"
            " BEGIN SELECT RAISE(ABORT, 'no space'); END"
        )
    db.close()
    with pytest.raises(StoreUnreadable, match="no space"):
        await EngineServer(MinimalEngine(), settings(tmp_path)).start()


async def test_an_address_that_is_taken_is_said_to_be(double: EngineDouble, tmp_path: Path) -> None:
    taken = settings(tmp_path / "other", admin_address=double.admin_address)
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1"):
        await EngineServer(MinimalEngine(), taken).start()
    # Nothing is left behind: neither a lock nor the other listener's port.
    server = EngineServer(MinimalEngine(), settings(tmp_path / "other"))
    await server.start()
    await server.stop(0)


async def test_stop_lets_requests_finish_and_turns_held_ones_back(tmp_path: Path) -> None:
    engine = MinimalEngine()
    server = EngineServer(engine, settings(tmp_path))
    await server.start()
    async with client_of(server) as client:
        engine.stall()
        running = client.generate()
        await running.first()
        draining = await client.begin(client.pause())
        await draining.next()
        held = client.generate()
        await client.held(1)
        stopping = asyncio.create_task(server.stop(20))
        end = await held.end()
        assert (end.error.retryable, end.error.message) == (True, "the engine is stopping")
        engine.go()
        assert await running.finish_reason() == "LENGTH"
        assert (await draining.end()).HasField("completed")
        await asyncio.wait_for(stopping, 20)
        await server.wait()
        await server.stop(0)  # again: nothing to do
    assert engine.closed


class BrokenDisk:
    """Makes every write of a running store fail, as a full disk would."""

    def __init__(self, folder: Path) -> None:
        self.broken = False

    def install(self, double: EngineDouble) -> None:
        store = double.server._served.state.journal._store  # type: ignore[union-attr]
        write = store._writing

        def failing() -> Any:
            if self.broken:
                raise sqlite3.OperationalError("database or disk is full")
            return write()

        store._writing = failing  # type: ignore[method-assign]


@pytest.fixture
def disk(double: EngineDouble, tmp_path: Path) -> BrokenDisk:
    disk = BrokenDisk(tmp_path)
    disk.install(double)
    return disk


async def test_without_a_store_no_order_is_taken_on(
    client: Client, double: EngineDouble, disk: BrokenDisk
) -> None:
    disk.broken = True
    seen = await refused(client.stream(client.pause()))
    assert (seen.code, seen.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert double.orders == []
    assert await client.generate().finish_reason() == "LENGTH"

    async def serving(expected: str) -> None:
        async def reached() -> bool:
            return await client.health("openengine.v1.OpenEngineAdmin") == expected

        await until(reached)

    await serving("NOT_SERVING")
    disk.broken = False
    await serving("SERVING")
    assert (await client.completed(client.pause())).changed


async def test_a_store_that_fails_in_the_middle_loses_no_end(
    client: Client, double: EngineDouble, disk: BrokenDisk
) -> None:
    """A drain is cancelled while the disk is full: requests go on at once, the end follows."""
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause(deadline_ms=300))
    await draining.next()
    held = client.generate("held")
    await client.held(1)
    disk.broken = True
    assert await held.finish_reason() == "LENGTH"
    assert await client.admission() == "open"
    seen = await refused(client.stream(client.flush()))
    assert seen.code in (Code.UNAVAILABLE, Code.ABORTED)
    disk.broken = False
    events = await draining.rest()
    assert_whole(events)
    assert events[-1].failed.reason == "DEADLINE_EXCEEDED"
    assert (await client.completed(client.flush())).revision


async def test_a_success_that_cannot_be_written_is_not_told(
    client: Client, double: EngineDouble, disk: BrokenDisk
) -> None:
    release = asyncio.Event()

    async def break_the_disk(_order: object, _rank: int) -> None:
        disk.broken = True
        release.set()

    double.engine.script("conclude", break_the_disk)
    pausing = await client.begin(client.pause())
    await release.wait()
    assert await client.admission() in ("open", "draining")
    disk.broken = False
    assert (await pausing.end()).completed.changed
    assert await client.admission() == "paused"


def test_time_is_told_in_nanoseconds() -> None:
    from app.enginekit.wire import nanos

    assert nanos(None) == 0
    assert nanos(datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)) == 1767225600123456000
