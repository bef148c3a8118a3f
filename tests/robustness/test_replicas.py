"""Two gateways and more on one PostgreSQL: one dies, is frozen or leaves, all give orders at once,
and what connects them breaks.

The seed of whatever goes by chance is printed, and stands in the history, a file that
`python -m tests.robustness.check` holds against the guarantees again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import Heard, Json, sequences, server_sent
from tests.postgres import Server, running_server
from tests.robustness.history import History, LedgerEvent
from tests.robustness.replicas import FLUSH, LEASE_S, Replica, Replicas, replicas, until
from tests.robustness.stand import Stand, stand, taken

pytestmark = pytest.mark.anyio

HISTORIES = Path(__file__).parents[2] / ".data" / "histories"
# A reply that is lost is missed after seconds, and the question what became of the order may be
# lost as well: with such faults an order takes half a minute.
LAST_S = 1800.0
ORDERS: tuple[tuple[str, str, Json], ...] = (
    ("flush-caches", "flush_caches", {"caches": ["prefix"]}),
    ("flush-caches", "flush_caches", {"caches": ["prefix"], "deadline_ms": 40}),
    ("pause", "pause", {"mode": "keep"}),
    ("pause", "pause", {"mode": "abort", "deadline_ms": 2_000}),
)
# Half of the orders wait where the engine is busy, some of them longer than they may.
RACING = (*ORDERS, *((verb, kind, {**body, "when_busy": "queue"}) for verb, kind, body in ORDERS))


def seed() -> int:
    return int(os.environ.get("ROBUSTNESS_SEED") or random.SystemRandom().randrange(1 << 31))


def history_of(name: str) -> Path:
    HISTORIES.mkdir(parents=True, exist_ok=True)
    return HISTORIES / f"{name}.jsonl"


@pytest.fixture(scope="module")
def database() -> Iterator[Server]:
    with running_server() as server:
        server.execute("CREATE DATABASE replicas")
        yield server


@pytest.fixture(scope="module")
async def made(
    tmp_path_factory: pytest.TempPathFactory, database: Server
) -> AsyncIterator[Replicas]:
    """Two that were started at once, on an empty database."""
    folder = tmp_path_factory.mktemp("fleet")
    async with replicas(folder, database.url("replicas"), 2) as fleet:
        yield fleet


@pytest.fixture
async def fleet(made: Replicas) -> AsyncIterator[Replicas]:
    """All of them running, whatever a test before did to them."""
    await made.start(each for each in made.all if not each.process.running)
    yield made
    for each in made.all:
        if each.process.running:
            each.thaw()


@pytest.fixture(scope="module")
async def one(made: Replicas, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with stand(made, history_of("one"), "one", 0) as stood:
        yield stood


@pytest.fixture
def pair(fleet: Replicas, one: Stand) -> Iterator[Stand]:
    """With nothing open at the engine."""
    yield one
    one.engine.let_go()


async def events_of(replica: Replica, operation: Json) -> list[Json]:
    events = await replica.gateway.events(operation["id"])
    assert sequences(events) == list(range(1, len(events) + 1))
    return events


async def succeeded(replica: Replica, operation: Json) -> Json:
    ended = await replica.gateway.ended(operation["id"])
    assert ended["state"] == "succeeded", ended
    await events_of(replica, operation)
    return ended


# ---- one of two ----


async def test_a_dead_gateways_engine_is_taken_over(pair: Stand) -> None:
    operation, holder = await pair.begun(pair.fleet[0])
    holder.process.kill()
    peer = await pair.fleet.held(pair.name, but=holder)
    pair.engine.let_go()
    await succeeded(peer, operation)
    assert pair.carried(operation) == ["begun", "done"]


async def test_a_live_gateways_engine_is_not_touched(pair: Stand) -> None:
    operation, _ = await pair.begun(pair.fleet[1])
    first = pair.fleet.lease(pair.name)
    assert first is not None

    def outlived() -> bool:
        lease = pair.fleet.lease(pair.name)
        assert lease is not None
        assert lease[0] == first[0]
        return lease[1] > first[1] + timedelta(seconds=LEASE_S)

    await until(outlived)
    pair.engine.let_go()
    await succeeded(pair.fleet[0], operation)
    told = [event["type"] for event in await events_of(pair.fleet[1], operation)]
    assert "reconciling" not in told


async def test_a_frozen_gateway_writes_nothing_after_it_was_overtaken(pair: Stand) -> None:
    operation, holder = await pair.begun(pair.fleet[0])
    holder.freeze()
    peer = await pair.fleet.held(pair.name, but=holder)
    pair.engine.let_go()
    ended = await succeeded(peer, operation)
    told = await events_of(peer, operation)
    later = await peer.gateway.does(pair.name, *FLUSH)

    holder.thaw()
    assert await holder.gateway.get(f"/v1/operations/{operation['id']}") == ended
    assert (await holder.gateway.does(pair.name, *FLUSH))["id"] != later["id"]
    assert await events_of(holder, operation) == told
    for each in (operation, later):
        assert pair.carried(each) == ["begun", "done"]


async def test_a_stream_of_one_is_gone_on_with_at_the_other(pair: Stand) -> None:
    first, second = pair.fleet[0], pair.fleet[1]
    operation, _ = await pair.begun(first)
    heard: list[Heard] = []
    async with first.gateway.stream(f"/v1/operations/{operation['id']}/events") as response:
        async for each in server_sent(response.aiter_lines()):
            heard.append(each)
            if each.type == "dispatched":
                break
    pair.engine.let_go()
    heard += await second.gateway.hear(operation["id"], after=heard[-1].id)
    assert [each.data for each in heard] == await events_of(second, operation)
    assert await first.gateway.hear(operation["id"], after=heard[-1].id) == []


async def test_what_one_drives_is_cancelled_at_the_other(pair: Stand) -> None:
    operation, holder = await pair.begun(pair.fleet[0])
    peer = pair.fleet.peer(holder)
    answer = await peer.gateway.client.post(f"/v1/operations/{operation['id']}/cancel")
    assert answer.is_success, answer.text
    ended = await peer.gateway.ended(operation["id"])
    assert ended["state"] == "cancelled", ended
    assert pair.carried(operation) == ["begun", "undone"]


async def test_one_that_leaves_says_goodbye_and_hands_over(pair: Stand) -> None:
    operation, holder = await pair.begun(pair.fleet[0])
    peer = pair.fleet.peer(holder)
    heard: list[Heard] = []

    async def listen() -> None:
        async with holder.gateway.stream("/v1/events") as response:
            async for each in server_sent(response.aiter_lines()):
                heard.append(each)

    listening = asyncio.create_task(listen())
    await until(lambda: heard)
    assert await holder.stop() == 0
    assert pair.fleet.holder(pair.name) in (None, peer)  # not one that is no more
    await listening
    assert heard[-1].type == "goodbye"
    assert heard[-1].data == {"reason": "shutting_down"}
    assert await pair.fleet.held(pair.name) is peer
    pair.engine.let_go()
    await succeeded(peer, operation)
    assert pair.carried(operation) == ["begun", "done"]


# ---- all at once ----


async def race(fleet: Replicas, name: str, rounds: int) -> History:
    """Of one caller more than there are gateways, each of which gives so many orders."""
    async with stand(fleet, history_of(name), name, seed(), delay_s=0.02) as stood:
        callers = len(fleet.all) + 1
        await stood.under_traffic(RACING, rounds, callers, pause_s=0.1)
        history = await stood.holds()
        assert taken(history)
        return history


@pytest.mark.timeout(LAST_S)
async def test_orders_race_for_one_engine(fleet: Replicas) -> None:
    await race(fleet, "raced", rounds=8)


@pytest.mark.long
@pytest.mark.timeout(LAST_S)
@pytest.mark.parametrize("count", [2, 3])
async def test_many_orders_race_for_one_engine(fleet: Replicas, count: int) -> None:
    while len(fleet.all) < count:
        await fleet.start([fleet.make()])
    history = await race(fleet, f"raced-by-{count}", rounds=200)
    assert "queued" in {event.type for event in history.all(LedgerEvent)}


# ---- what connects them ----

Fault = Callable[[Stand, random.Random], Awaitable[None]]


async def delay(stood: Stand, chance: random.Random) -> None:
    stood.proxy.delay_s = (0.0, 0.2)
    await asyncio.sleep(chance.uniform(0.5, 1.5))


async def cut(stood: Stand, chance: random.Random) -> None:
    for _ in range(3):
        stood.proxy.cut()
        await asyncio.sleep(chance.uniform(0.05, 0.5))


async def black_hole(stood: Stand, chance: random.Random) -> None:
    stood.proxy.black_hole()
    await asyncio.sleep(chance.uniform(0.5, 4.0))


async def reply_lost(stood: Stand, chance: random.Random) -> None:
    stood.proxy.lose_replies()
    await asyncio.sleep(chance.uniform(0.2, 1.0))


async def doubled(stood: Stand, chance: random.Random) -> None:
    stood.proxy.double()
    await asyncio.sleep(chance.uniform(0.5, 1.5))


FAULTS: tuple[Fault, ...] = (delay, cut, black_hole, reply_lost, doubled)


async def strike(stood: Stand, faults: tuple[Fault, ...], chance: random.Random) -> None:
    """One after the other, with a breath in between."""
    while True:
        for fault in faults:
            stood.struck("proxy", fault.__name__)
            await fault(stood, chance)
            stood.proxy.heal()
            stood.struck("proxy", "healed")
            await asyncio.sleep(chance.uniform(0.2, 0.8))


async def disturbed(stood: Stand, striking: Coroutine[Any, Any, None], rounds: int) -> History:
    """Two callers, and what they went through."""
    task = asyncio.create_task(striking)
    try:
        await stood.under_traffic(ORDERS[:1], rounds, callers=2, pause_s=0.5)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    stood.proxy.heal()
    return await stood.holds()


@pytest.mark.parametrize(
    ("rounds", "faults"),
    [
        pytest.param(4, FAULTS, id="some"),
        *(
            pytest.param(20, (fault,), id=fault.__name__, marks=pytest.mark.long)
            for fault in FAULTS
        ),
        pytest.param(60, FAULTS, id="all", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(LAST_S)
async def test_the_way_to_the_engine_breaks(
    fleet: Replicas, request: pytest.FixtureRequest, rounds: int, faults: tuple[Fault, ...]
) -> None:
    name = "behind-" + request.node.callspec.id.replace("_", "-")
    async with stand(fleet, history_of(name), name, seed(), delay_s=0.05) as stood:
        striking = strike(stood, faults, random.Random(stood.chance.random()))
        assert taken(await disturbed(stood, striking, rounds))


async def crash(stood: Stand, database: Server, chance: random.Random) -> None:
    """The database is gone at once, and back after a while; again and again."""
    while True:
        away = asyncio.create_task(_away(stood, database, chance.uniform(0.2, 1.5)))
        try:
            await asyncio.shield(away)
        except asyncio.CancelledError:
            await away  # whoever ends this finds it there
            raise
        await asyncio.sleep(chance.uniform(1.0, 4.0))


async def _away(stood: Stand, database: Server, seconds: float) -> None:
    stood.struck("database", "killed")
    await asyncio.to_thread(database.crash)
    for gateway in [each.gateway for each in stood.fleet.all]:
        answer = await gateway.client.get("/v1/operations")
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) > 0
    await asyncio.sleep(seconds)
    await asyncio.to_thread(database.start_again)
    stood.struck("database", "started")


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.timeout(LAST_S)
async def test_the_database_is_stopped_and_started(
    fleet: Replicas, database: Server, rounds: int
) -> None:
    name = f"recorded-{rounds}"
    async with stand(fleet, history_of(name), name, seed(), delay_s=0.05) as stood:
        striking = crash(stood, database, random.Random(stood.chance.random()))
        history = await disturbed(stood, striking, rounds)
        assert taken(history)
