"""The events of one operation, from the first to the terminal one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from app.domain.operation import Progress
from app.domain.transitions import Advanced, Progressed, advance
from tests.http.gateway import Gateway, gateway
from tests.streams.reading import Heard, Reader, first, heard, in_ledger, watching

pytestmark = pytest.mark.anyio


async def paused(gate: Gateway) -> str:
    """A drain that goes on until the engine is told to go; the path of its events."""
    gate.engine.go.clear()
    operation = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    return f"/v1/operations/{operation}/events"


async def flushed(gate: Gateway) -> str:
    return f"/v1/operations/{(await gate.flush())['id']}/events"


async def test_it_is_told_from_the_first_event_and_ends_with_the_last(gate: Gateway) -> None:
    gate.engine.progress = 3
    path = await paused(gate)
    async with watching(gate, path) as reader:
        assert reader.answer.headers["content-type"].startswith("text/event-stream")
        assert reader.answer.headers["cache-control"] == "no-store"
        assert reader.answer.headers["x-accel-buffering"] == "no"
        events: list[Heard] = []
        async for event in reader:
            events.append(event)
            gate.engine.go.set()
    assert reader.retry == [3000]
    types = [event.type for event in events]
    assert (types[0], types[1], types[-1]) == ("accepted", "dispatched", "completed")
    assert [event.data["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert all(event.data["type"] == event.type for event in events)
    identity = gate.rooms.ledger.identity
    assert all(event.id == f"{identity}.{event.data['position']}" for event in events)
    assert events[-1].data["data"]["result"]["pause_epoch"] == 1


async def test_an_ended_one_is_told_again_and_has_nothing_for_who_has_heard_it(
    gate: Gateway,
) -> None:
    path = await flushed(gate)
    events = await heard(gate, path)
    assert events[-1].type == "completed"
    assert await heard(gate, path, events[1].id) == events[2:]
    async with watching(gate, path, events[-1].id) as reader:
        assert reader.answer.status_code == 204
    assert (await gate.get(f"{path}?after={events[-1].id}")).status_code == 204
    assert (await gate.get(f"{path}?after={events[-1].data['position']}")).status_code == 204


async def test_the_header_is_newer_than_the_query(gate: Gateway) -> None:
    path = await flushed(gate)
    events = await heard(gate, path)
    assert await heard(gate, f"{path}?after={events[0].id}", events[2].id) == events[3:]


async def test_random_drops_lose_and_repeat_nothing(gate: Gateway) -> None:
    """AT-12b: a reader that is cut off thirty times sees each event once, in order."""
    gate.engine.progress = 300
    path = await paused(gate)
    chance = random.Random(7)
    seen: list[Heard] = []
    last: str | None = None
    for _ in range(30):
        part = await first(gate, path, chance.randint(1, 8), last)
        seen += part
        last = part[-1].id
    gate.engine.go.set()
    seen += await heard(gate, path, last)
    sequences = [event.data["sequence"] for event in seen]
    assert sequences == list(range(1, len(seen) + 1))
    assert len({event.id for event in seen}) == len(seen)
    assert len(seen) > 300
    assert [event.type for event in seen].count("completed") == 1
    positions = [event.data["position"] for event in seen]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    "cursor", ["garbage", "00000000.3", "1e3", "-1", "9" * 30, "99999999", "{ours}.99999999"]
)
async def test_a_cursor_that_leads_nowhere_is_answered_with_one_reset(
    gate: Gateway, cursor: str
) -> None:
    path = await paused(gate)
    given = cursor.replace("{ours}", gate.rooms.ledger.identity)
    async with watching(gate, path, given) as reader:
        events: list[Heard] = []
        async for event in reader:
            events.append(event)
            if event.type == "snapshot":
                gate.engine.go.set()
    reset, snapshot, *rest = events
    assert (reset.type, reset.id) == ("reset", None)
    assert reset.data == {"reason": "cursor_not_ours"}
    assert snapshot.type == "snapshot"
    assert snapshot.data["operation"]["kind"] == "pause"
    known = snapshot.data["operation"]["sequence"]
    assert [event.data["sequence"] for event in rest] == list(
        range(known + 1, known + 1 + len(rest))
    )
    assert rest[-1].type == "completed"


async def test_a_reset_of_an_ended_one_is_its_whole_story(gate: Gateway) -> None:
    path = await flushed(gate)
    reset, snapshot = await heard(gate, path, "garbage")
    assert (reset.type, snapshot.type) == ("reset", "snapshot")
    assert snapshot.data["operation"]["state"] == "succeeded"
    async with watching(gate, path, snapshot.id) as reader:
        assert reader.answer.status_code == 204


async def test_an_operation_that_is_there_has_its_whole_story(tmp_path: Path) -> None:
    """Whatever of others was pruned around it."""
    async with gateway(tmp_path / "data") as gate:
        path = await flushed(gate)
        whole = await heard(gate, path)
        position = whole[-1].data["position"]
        await in_ledger(tmp_path / "data", f"UPDATE ledger SET pruned_to = {position}")
        assert await heard(gate, path, whole[0].id) == whole[1:]
        assert await heard(gate, path) == whole
        page = (await gate.get(path, Accept="application/json")).json()
        assert page["items"] == [event.data for event in whole]


async def test_the_same_events_as_pages(gate: Gateway) -> None:
    gate.engine.progress = 20
    path = await flushed(gate)
    streamed = await heard(gate, path)
    for size in (1, 7, 50):
        seen, after = list[object](), ""
        while True:
            answer = await gate.get(f"{path}?page_size={size}{after}", Accept="application/json")
            page = answer.json()
            seen += page["items"]
            after = f"&after={page['cursor']}"
            if page["next_page_token"] is None:
                break
            assert page["next_page_token"] == page["cursor"]
            assert f"after={page['cursor']}" in answer.headers["link"]
        assert seen == [event.data for event in streamed]
    again = await gate.get(f"{path}?{after.removeprefix('&')}", Accept="application/json")
    assert again.json()["items"] == []


async def test_refusals_come_before_the_first_byte(gate: Gateway) -> None:
    path = await flushed(gate)
    for answer, status in (
        (await gate.http.get(path), 401),
        (await gate.get(path, Accept="image/png"), 406),
        (await gate.get(f"{path}?unknown=1"), 422),
        (await gate.get(path.replace("0", "1", 3)), 404),
    ):
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_stream_ends_with_its_token(gate: Gateway) -> None:
    path = await paused(gate)
    async with watching(gate, path, headers=gate.auth(ttl_s=2)) as reader:
        events = [event async for event in reader]
    assert (events[-1].type, events[-1].data) == ("goodbye", {"reason": "token_expired"})
    assert events[-1].id is None
    gate.engine.go.set()
    after = await heard(gate, path, reader.last_id)
    assert after[0].data["sequence"] == events[-2].data["sequence"] + 1


async def test_a_stream_ends_when_its_token_is_no_longer_good(gate: Gateway) -> None:
    object.__setattr__(gate.rooms.edge, "stream_look_s", 0.1)
    path = await paused(gate)
    old = gate.auth()
    async with watching(gate, path, headers=old) as reader:
        events = aiter(reader)
        first_heard = await anext(events)
        assert first_heard.type == "accepted"
        # The issuer withdraws the key, and the gateway hears of it by somebody else's token.
        gate.issuer.rotate(keep_previous=False)
        assert (await gate.get("/v1/engines")).status_code == 200
        rest = [event async for event in events]
    assert (rest[-1].type, rest[-1].data) == ("goodbye", {"reason": "permission_lost"})
    assert (await gate.http.get(path, headers=old)).status_code == 401
    gate.engine.go.set()
    after = await heard(gate, path, reader.last_id)
    assert after[-1].type == "completed"


async def test_a_stream_has_a_longest_life(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", stream_max_s=0.5) as gate:
        events = await heard(gate, await paused(gate))
        assert events[-1].data == {"reason": "lifetime_over"}


async def test_a_reader_that_takes_nothing_is_cut_off_and_loses_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", stream_send_timeout_s=2.0) as gate:
        path = await paused(gate)
        operation_id = path.split("/")[3]
        async with asyncio.timeout(20):
            while (await gate.rooms.ledger.operations.get(operation_id)).sequence < 3:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for number in range(200):
            operation = await gate.rooms.ledger.operations.get(operation_id)
            assert operation is not None
            long = Progressed(progress=Progress("x" * 100_000, done=number))
            step = advance(operation, long, gate.rooms.clock.now())
            assert isinstance(step, Advanced)
            await gate.rooms.ledger.operations.record(operation, step)
        reader, writer = await asyncio.open_connection(*gate.url.removeprefix("http://").split(":"))
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {{}}\r\n\r\n"
        writer.write(request.format(gate.auth()["Authorization"]).encode())
        await writer.drain()
        await reader.read(100)
        async with asyncio.timeout(20):
            while gate.rooms.streams.count:  # noqa: ASYNC110 - it is the count that is tested
                await asyncio.sleep(0.05)
        writer.close()
        gate.engine.go.set()
        events = await heard(gate, path)
        assert len(events) > 200


async def test_pings_keep_it_open(gate: Gateway) -> None:
    rooms = gate.rooms
    object.__setattr__(rooms.edge, "ping_s", 0.05)
    path = await paused(gate)
    async with watching(gate, path) as reader:
        async with asyncio.timeout(20):
            while reader.comments.count("ping") < 3:
                await anext_line(reader)


async def anext_line(reader: Reader) -> None:
    async for line in reader.answer.aiter_lines():
        if line == ": ping":
            reader.comments.append("ping")
            if reader.comments.count("ping") >= 3:
                return
