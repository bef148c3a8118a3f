"""One stream of everything."""

from __future__ import annotations

import asyncio

import pytest

from tests.http.gateway import Gateway
from tests.streams.reading import Heard, first, heard, watching

pytestmark = pytest.mark.anyio

EVENTS = "/v1/events"


async def until(gate: Gateway, path: str, count: int, last_id: str | None = None) -> list[Heard]:
    async with asyncio.timeout(30):
        return await first(gate, path, count, last_id)


async def test_it_begins_with_what_there_is(gate: Gateway) -> None:
    gate.engine.go.clear()
    operation = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    (snapshot,) = await until(gate, EVENTS, 1)
    assert snapshot.type == "snapshot"
    assert [engine["id"] for engine in snapshot.data["engines"]] == ["e1"]
    assert [known["id"] for known in snapshot.data["operations"]] == [operation]
    assert snapshot.id == f"{gate.rooms.ledger.identity}.{snapshot.data['position']}"


async def test_what_follows_is_everything_behind_the_snapshot(gate: Gateway) -> None:
    before = await gate.flush()
    async with watching(gate, EVENTS) as reader:
        events: list[Heard] = []
        after = ""
        async for event in reader:
            events.append(event)
            if event.type == "snapshot":
                after = (await gate.flush())["id"]
            if event.type == "completed":
                break
    snapshot, *rest = events
    assert {event.data["operation"] for event in rest} == {after}
    assert before["id"] not in {event.data["operation"] for event in rest}
    assert [event.data["sequence"] for event in rest] == list(range(1, len(rest) + 1))
    assert all(event.data["position"] > snapshot.data["position"] for event in rest)


async def test_it_is_resumed_behind_a_cursor(gate: Gateway) -> None:
    (snapshot,) = await until(gate, EVENTS, 1)
    told = [
        event
        for operation in ((await gate.flush())["id"], (await gate.flush())["id"])
        for event in await heard(gate, f"/v1/operations/{operation}/events")
    ]
    assert await until(gate, EVENTS, len(told), snapshot.id) == told
    middle = told[3]
    assert await until(gate, EVENTS, len(told) - 4, middle.id) == told[4:]
    bare = f"{EVENTS}?after={middle.data['position']}"
    assert await until(gate, bare, len(told) - 4) == told[4:]
    reset, again, *_ = await until(gate, f"{EVENTS}?after=nonsense", 2)
    assert (reset.type, again.type) == ("reset", "snapshot")


async def test_it_can_be_narrowed(gate: Gateway) -> None:
    await gate.register("e2")
    await gate.rooms.fleet.discover("e2")
    (snapshot,) = await until(gate, EVENTS, 1)
    flush = {"caches": ["prefix"]}
    wait = {"Prefer": "wait=20"}
    one = (await gate.order("flush-caches", flush, wait)).json()["id"]
    two = (await gate.order("pause", {"mode": "drain"}, wait, engine="e2")).json()["id"]

    async def operations(query: str, count: int) -> set[str]:
        found = await until(gate, f"{EVENTS}?{query}", count, snapshot.id)
        return {event.data["operation"] for event in found}

    assert await operations("engine=e2", 4) == {two}
    assert await operations("kind=flush_caches", 4) == {one}
    both = await until(gate, f"{EVENTS}?type=completed", 2, snapshot.id)
    assert [(event.type, event.data["operation"]) for event in both] == [
        ("completed", one),
        ("completed", two),
    ]
    (narrow,) = await until(gate, f"{EVENTS}?engine=e2", 1)
    assert [engine["id"] for engine in narrow.data["engines"]] == ["e2"]


async def test_the_same_as_pages(gate: Gateway) -> None:
    page = (await gate.get(EVENTS, Accept="application/json")).json()
    assert [item["type"] for item in page["items"]] == ["snapshot"]
    operation = (await gate.flush())["id"]
    told = await heard(gate, f"/v1/operations/{operation}/events")
    cursor, seen = page["cursor"], []
    while True:
        answer = await gate.get(f"{EVENTS}?page_size=2&after={cursor}", Accept="application/json")
        seen += answer.json()["items"]
        cursor = answer.json()["cursor"]
        if answer.json()["next_page_token"] is None:
            break
    assert seen == [event.data for event in told]
    # Nothing new, and the cursor is still good for what comes.
    idle = (await gate.get(f"{EVENTS}?after={cursor}", Accept="application/json")).json()
    assert (idle["items"], idle["cursor"]) == ([], cursor)


async def test_two_hundred_readers_hear_the_same_while_work_goes_on(gate: Gateway) -> None:
    (snapshot,) = await until(gate, EVENTS, 1)

    async def read() -> list[tuple[str, str | None]]:
        found = await until(gate, EVENTS, 20, snapshot.id)
        return [(event.type, event.id) for event in found]

    readers = [asyncio.create_task(read()) for _ in range(200)]
    for _ in range(6):
        await gate.flush()
    stories = await asyncio.gather(*readers)
    assert all(story == stories[0] for story in stories)
