"""What streams may not do to the rest: hold connections, leave tasks, keep the process."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.http.gateway import Gateway, gateway
from tests.streams.reading import watching

pytestmark = pytest.mark.anyio


async def settled(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 - the end of connections has no event here
            await asyncio.sleep(0.02)


async def drain_path(gate: Gateway) -> str:
    gate.engine.go.clear()
    operation = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    return f"/v1/operations/{operation}/events"


async def open_streams(gate: Gateway, path: str, count: int, held: AsyncExitStack) -> None:
    async def one() -> None:
        reader = await held.enter_async_context(watching(gate, path))
        assert reader.answer.status_code == 200
        chunks = reader.answer.aiter_raw()
        held.push_async_callback(chunks.aclose)
        await anext(chunks)

    await asyncio.gather(*(one() for _ in range(count)))


async def test_two_hundred_open_streams_hold_no_connection(tmp_path: Path) -> None:
    small = gateway(tmp_path / "data", database_pool_size=5)
    async with small as gate, AsyncExitStack() as held:
        path = await drain_path(gate)
        await open_streams(gate, path, 200, held)
        assert gate.rooms.streams.count == 200
        await settled(lambda: gate.rooms.ledger.pool_in_use() == 0)
        assert (await gate.get("/v1/operations")).status_code == 200
        gate.engine.go.set()
        # Each of them ends by itself, and all of that is given back.
        await settled(lambda: gate.rooms.streams.count == 0)
        assert gate.rooms.ledger.pool_in_use() <= 2


async def test_as_many_as_may_be(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_streams=3) as gate, AsyncExitStack() as held:
        path = await drain_path(gate)
        await open_streams(gate, path, 3, held)
        refused = await gate.get(path)
        assert (refused.status_code, refused.json()["reason"]) == (429, "TOO_MANY_STREAMS")
        assert int(refused.headers["retry-after"]) >= 1
        pages = await gate.get(path, Accept="application/json")
        assert pages.status_code == 200
        await held.aclose()
        await settled(lambda: gate.rooms.streams.count == 0)
        await open_streams(gate, path, 1, held)


async def test_as_many_as_one_caller_may_have(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path / "data", max_streams_per_caller=2) as gate,
        AsyncExitStack() as held,
    ):
        path = await drain_path(gate)
        await open_streams(gate, path, 2, held)
        refused = await gate.get(path)
        assert (refused.status_code, refused.json()["reason"]) == (429, "TOO_MANY_STREAMS")
        somebody_else = gate.auth(subject="bob")
        async with watching(gate, path, headers=somebody_else) as reader:
            assert reader.answer.status_code == 200
        await held.aclose()
        await settled(lambda: gate.rooms.streams.count == 0)
        await open_streams(gate, path, 2, held)


async def test_of_many_that_come_at_once_no_more_than_may_be_get_in(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_streams=5) as gate, AsyncExitStack() as held:
        path = await drain_path(gate)

        async def one() -> int:
            reader = await held.enter_async_context(watching(gate, path))
            return reader.answer.status_code

        statuses = await asyncio.gather(*(one() for _ in range(20)))
        assert sorted(statuses) == [200] * 5 + [429] * 15


async def test_streams_do_not_take_the_places_of_requests(tmp_path: Path) -> None:
    narrow = gateway(tmp_path / "data", max_concurrent_requests=2)
    async with narrow as gate, AsyncExitStack() as held:
        path = await drain_path(gate)
        for _ in range(6):
            await open_streams(gate, path, 1, held)
        assert (await gate.get("/v1/engines")).status_code == 200


async def test_opening_and_leaving_leaves_nothing_behind(gate: Gateway) -> None:
    path = await drain_path(gate)
    await gate.http.aclose()
    # Once for what is opened when it is first needed and then kept, as the pool's connections are.
    await asyncio.gather(*(reset_at_once(gate, path) for _ in range(100)))
    await settled(lambda: not gate.server.server_state.connections)
    await settled(lambda: gate.rooms.streams.count == 0)
    await settled(lambda: gate.rooms.ledger.pool_in_use() == 0)
    before, files = len(asyncio.all_tasks()), open_files()
    for _ in range(5):
        await asyncio.gather(*(reset_at_once(gate, path) for _ in range(100)))
    await settled(lambda: gate.rooms.streams.count == 0)
    await settled(lambda: len(asyncio.all_tasks()) <= before + 5)
    await settled(lambda: gate.rooms.ledger.pool_in_use() == 0)
    await settled(lambda: not gate.server.server_state.connections)
    await settled(lambda: open_files() <= files + 2)


def open_files() -> int:
    """Without the ledger's: its pool opens a connection when one is needed, and keeps it."""
    return sum("chadburn.db" not in target for target in map(target_of, open_descriptors()))


def open_descriptors() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def target_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # the one that listed them
        return ""


async def reset_at_once(gate: Gateway, path: str) -> None:
    """Ask for a stream and reset the connection before a byte of it has come."""
    host, _, port = gate.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    authorization = gate.auth()["Authorization"]
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {authorization}\r\n\r\n".encode()
    )
    await writer.drain()
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def test_the_end_of_the_process_is_told_to_every_stream(tmp_path: Path) -> None:
    last: list[dict[str, str]] = []

    async def listen(gate: Gateway, path: str, opened: asyncio.Semaphore) -> None:
        async with watching(gate, path) as reader:
            said = None
            async for event in reader:
                if said is None:
                    opened.release()
                said = event
            assert said is not None
            assert said.type == "goodbye"
            last.append(said.data)

    async with gateway(tmp_path / "data") as gate:
        path = await drain_path(gate)
        opened = asyncio.Semaphore(0)
        listeners = [
            asyncio.create_task(listen(gate, where, opened)) for where in [path, "/v1/events"] * 25
        ]
        for _ in listeners:
            await opened.acquire()
        gate.server.should_exit = True
        await asyncio.gather(*listeners)
    assert last == [{"reason": "shutting_down"}] * 50


async def test_no_new_stream_is_opened_at_the_end(gate: Gateway) -> None:
    path = await drain_path(gate)
    gate.rooms.closing.set()
    answer = await gate.get(path)
    assert (answer.status_code, answer.json()["reason"]) == (503, "SHUTTING_DOWN")
    assert (await gate.http.get("/readyz")).status_code == 503


async def test_an_order_that_is_watched_goes_on_without_its_watchers(tmp_path: Path) -> None:
    """The gateway ends during a drain and begins again: the operation ends truthfully, and a
    reader who comes back with its last id misses and repeats nothing."""
    sequences: list[int] = []
    last: str | None = None

    async def take(gate: Gateway, path: str, enough: Callable[[int], bool]) -> None:
        nonlocal last
        async with watching(gate, path, last) as reader:
            async for event in reader:
                if event.type == "goodbye":
                    break
                sequences.append(event.data["sequence"])
                last = event.id
                if enough(len(sequences)):
                    break

    async with gateway(tmp_path / "data") as gate:
        gate.engine.progress = 5
        path = await drain_path(gate)
        await take(gate, path, lambda count: count == 5)
        engine = gate.engine
        keys = list(engine.keys)
    async with gateway(tmp_path / "data", registered=False) as again:
        # The engine of the first life is gone with it; what is asked of is the new one.
        generation = (await again.get("/v1/engines/e1")).json()["generation"]
        again.engine.adopt(engine)
        member = {"rank": 0, "admin": again.engine.address, "control": again.engine.address}
        moved = await again.http.patch(
            "/v1/engines/e1",
            json={"members": [member]},
            headers={**again.auth(), "If-Match": f'"g{generation}"'},
        )
        assert moved.status_code == 200
        await take(again, path, lambda count: False)
        ended = (await again.get(path.removesuffix("/events"))).json()
        assert ended["state"] == "succeeded"
        assert again.engine.keys == keys  # it was not ordered a second time
    assert sequences == list(range(1, len(sequences) + 1))
