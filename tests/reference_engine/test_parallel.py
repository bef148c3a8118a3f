"""Several ranks that divide one model: the same tokens as one, and an end when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.errors import RankLost
from tests.reference_engine.ranks import alive
from tests.reference_engine.serving import PATIENCE_S, PROMPT, Answer, ask, eventually, serving

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
LONG = 1000


@pytest.fixture(scope="module")
async def two(tiny: Path) -> AsyncIterator[Engine]:
    """Tests that lose ranks start them again."""
    async with serving(
        tiny,
        tensor_parallel_size=2,
        order_deadline_s=5.0,
        step_deadline_s=3.0,
        watch_interval_s=0.2,
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
async def whole_again(two: Engine) -> AsyncIterator[None]:
    yield
    await two.restart()
    await two.set_gate(m.SetGate(gate=m.Gate.OPEN))
    await two.abort(None, "the test is over")
    assert two.open_requests == ()


async def scored(engine: Engine, name: str) -> list[Answer]:
    """Greedy, a few at once, with the likeliest tokens' log probabilities at every place."""
    asked = [
        ask(
            engine,
            f"{name}{n}",
            PROMPT[: 30 * n + 10],
            40,
            temperature=0.0,
            logprobs=m.Logprobs(top_n=20),
        )
        for n in range(3)
    ]
    return [await one.whole() for one in asked]


@pytest.mark.parametrize("world_size", [2, 4])
async def test_as_one_rank_computes_it(tiny: Path, two: Engine, world_size: int) -> None:
    """With four ranks the two key-value heads are held by two ranks each."""
    async with serving(tiny) as one:
        expected = await scored(one, "one")
    if world_size == 2:
        found = await scored(two, "two")
        await two.probe()
    else:
        async with serving(tiny, tensor_parallel_size=world_size) as four:
            assert four.ranks == (0, 1, 2, 3)
            found = await scored(four, "four")
    for answer, like in zip(found, expected, strict=True):
        assert answer.ids == like.ids
        for token, same in zip(answer.tokens, like.tokens, strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=TOLERANCE)
            scores = {one.token_id: one.logprob for one in token.candidates}
            for candidate in same.candidates[:10]:
                assert scores[candidate.token_id] == pytest.approx(candidate.logprob, abs=TOLERANCE)


async def test_company_does_not_change_what_a_request_draws(two: Engine) -> None:
    alone = await ask(two, "alone", max_tokens=60, seed=9).whole()
    mates = [ask(two, f"mate{n}", PROMPT[: 9 * n + 3], 40, seed=n) for n in range(5)]
    await mates[0].after(3)
    together = await ask(two, "mine", max_tokens=60, seed=9, bypass_prefix_cache=True).whole()
    assert together.ids == alone.ids
    for mate in mates:
        await mate.whole()


async def test_every_rank_acknowledges_every_order(two: Engine) -> None:
    asked = await ask(two, "a", max_tokens=LONG).after(2)
    frozen = two.issue(m.SetGate(gate=m.Gate.FROZEN))
    assert isinstance(await two.ack(frozen, 0), m.GateSet)
    assert await two.ack(frozen, 1) == m.Done()
    at = len(asked.answer.tokens)
    await two.probe()
    assert len(asked.answer.tokens) == at
    await two.set_gate(m.SetGate(gate=m.Gate.OPEN))
    await asked.after(at + 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_rank_lost_while_decoding(two: Engine, rank: int, how: signal.Signals) -> None:
    """Whichever rank it is, that one is named, all streams end, and no process stays behind."""
    asked = [ask(two, str(n), max_tokens=LONG, seed=n) for n in range(3)]
    for one in asked:
        await one.after(2)
    pids = two.pids
    os.kill(pids[rank], how)
    for one in asked:
        end = (await one.whole()).end
        assert isinstance(end, m.Failed)
        assert end.retryable
        assert f"rank {rank} of the engine was lost" in end.message
    assert two.blamed == (rank,)
    assert two.lost.keys() == {0, 1}
    assert f"because rank {rank}" in two.lost[1 - rank]
    with pytest.raises(RankLost):
        await two.load()

    async def gone() -> bool:
        return not any(map(alive, pids))

    await eventually(gone)
    await two.restart()
    assert two.lost == {}
    assert set(two.pids).isdisjoint(pids)
    assert (await two.load()).running_requests == 0
    assert len((await ask(two, "again", max_tokens=5).whole()).ids) == 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_rank_lost_during_an_order(two: Engine, how: signal.Signals) -> None:
    """The order fails on the lost rank by name; on the other it counts for nothing either."""
    os.kill(two.pids[1], signal.SIGSTOP)
    issued = two.issue(m.Probe())
    await asyncio.sleep(0)
    os.kill(two.pids[1], how)
    async with asyncio.timeout(PATIENCE_S):
        for rank in two.ranks:
            with pytest.raises(RankLost, match="rank 1"):
                await two.ack(issued, rank)
    assert two.blamed == (1,)


async def test_rank_that_misses_an_orders_deadline(two: Engine) -> None:
    """The first rank can not answer either, for it waits for the stopped one: it is not blamed."""
    os.kill(two.pids[1], signal.SIGSTOP)
    issued = two.issue(m.Probe())
    with pytest.raises(RankLost) as raised:
        await issued.ack(0, 0.3)
    assert raised.value.ranks == (1,)
    assert two.blamed == (1,)


async def test_restart_keeps_a_closed_gate(two: Engine) -> None:
    os.kill(two.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost):
        await two.probe()
    await two.restart(lambda: m.Gate.FROZEN)
    await two.restart()  # nothing is lost, so nothing happens
    assert (await two.set_gate(m.SetGate(gate=m.Gate.OPEN))).previous is m.Gate.FROZEN
