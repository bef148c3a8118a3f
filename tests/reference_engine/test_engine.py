"""The engine with its rank as a process of its own: requests, orders, prefixes, preemption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.errors import DuplicateRequest, OrderRejected, Overloaded
from tests.reference_engine.serving import (
    PROMPT,
    Asked,
    ask,
    load_becomes,
    request_for,
    serving,
)

pytestmark = pytest.mark.anyio

# At 2 ms a step most of a second: time enough for an order to meet a generation.
LONG = 400


@pytest.fixture(scope="module")
async def engine(tiny: Path) -> AsyncIterator[Engine]:
    """Slow enough for orders to meet a running generation."""
    async with serving(tiny, step_delay_ms=2, kv_blocks=256, max_running=8) as started:
        yield started


@pytest.fixture(autouse=True)
async def left_as_found(engine: Engine) -> AsyncIterator[None]:
    """Every test leaves the engine open, idle and with nothing referenced."""
    await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))
    await engine.flush_prefix_cache()
    yield
    await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))
    await engine.abort(None, "the test is over")
    assert engine.open_requests == ()
    assert (await engine.load()).used_kv_blocks == 0


async def test_same_seed_same_text_another_seed_another_text(engine: Engine) -> None:
    first = await ask(engine, "a", seed=3).whole()
    second = await ask(engine, "b", seed=3).whole()
    other = await ask(engine, "c", seed=4).whole()
    assert first.ids == second.ids != other.ids
    assert first.text == second.text == engine.tokenizer.decode(first.ids)
    assert first.finished.reason is m.FinishReason.LENGTH
    assert first.finished.usage.completion_tokens == len(first.ids) == 20


async def test_company_does_not_change_what_a_request_draws(engine: Engine) -> None:
    alone = await ask(engine, "alone", max_tokens=80, seed=9).whole()
    mates = [
        ask(engine, f"mate{n}", PROMPT[: 5 * n + 3], 40 + 9 * n, seed=n, bypass_prefix_cache=True)
        for n in range(6)
    ]
    await mates[0].after(3)
    together = await ask(
        engine, "together", max_tokens=80, seed=9, bypass_prefix_cache=True
    ).whole()
    assert together.ids == alone.ids
    for mate in mates:
        await mate.whole()


async def test_requests_are_computed_together(engine: Engine) -> None:
    asked = [ask(engine, str(n), max_tokens=LONG, seed=n) for n in range(4)]
    for one in asked:
        await one.after(2)
    load = await load_becomes(engine, running=4, waiting=0)
    assert (load.prefill_batch_size, load.decode_batch_size) == (0, 4)
    assert load.running_tokens > 4 * len(engine.tokenizer.encode(PROMPT))
    assert 0 < load.used_kv_blocks < load.total_kv_blocks == 256


async def test_more_than_may_run_wait_their_turn(engine: Engine) -> None:
    asked = [ask(engine, str(n), max_tokens=LONG, seed=n) for n in range(11)]
    load = await load_becomes(engine, running=8, waiting=3)
    assert load.waiting_tokens == 3 * len(engine.tokenizer.encode(PROMPT))
    for one in asked:
        assert len((await one.whole()).ids) == LONG


async def test_prefix_is_reused_and_changes_nothing(engine: Engine) -> None:
    first = await ask(engine, "first", seed=5).whole()
    second = await ask(engine, "second", seed=5).whole()
    assert first.finished.usage.cached_prompt_tokens == 0
    assert second.finished.usage.cached_prompt_tokens >= 16
    assert second.ids == first.ids
    bypassed = await ask(engine, "third", seed=5, bypass_prefix_cache=True).whole()
    assert bypassed.finished.usage.cached_prompt_tokens == 0
    assert bypassed.ids == first.ids
    salted = await ask(engine, "fourth", seed=5, cache_salt="tenant").whole()
    assert salted.finished.usage.cached_prompt_tokens == 0


async def test_flush_really_empties_the_prefix_cache(engine: Engine) -> None:
    first = await ask(engine, "first").whole()
    cached = (await engine.load()).cached_kv_blocks
    flushed = await engine.flush_prefix_cache()
    assert (flushed.blocks_freed, flushed.blocks_in_use) == (cached, 0)
    assert cached >= 2
    second = await ask(engine, "second").whole()
    assert second.finished.usage.cached_prompt_tokens == 0
    assert second.ids == first.ids


async def test_flush_leaves_running_requests_their_blocks(engine: Engine) -> None:
    await ask(engine, "earlier", "a lamp on the mast, a light on the pier, a whistle").whole()
    expected = await ask(engine, "expected", max_tokens=LONG, seed=2, cache_salt="x").whole()
    running = ask(engine, "running", max_tokens=LONG, seed=2, cache_salt="y")
    await running.after(5)
    used = (await engine.load()).used_kv_blocks
    flushed = await engine.flush_prefix_cache()
    assert flushed.blocks_freed > 0
    assert flushed.blocks_in_use >= used > 0
    assert (await running.whole()).ids == expected.ids
    again = await ask(engine, "again", cache_salt="y").whole()
    assert again.finished.usage.cached_prompt_tokens == 0


async def test_frozen_requests_continue_token_for_token(engine: Engine) -> None:
    unfrozen = [ask(engine, f"w{n}", max_tokens=LONG, seed=n) for n in range(3)]
    whole = [await one.whole() for one in unfrozen]
    await engine.flush_prefix_cache()
    asked = [ask(engine, f"f{n}", max_tokens=LONG, seed=n) for n in range(3)]
    for one in asked:
        await one.after(10)
    frozen = await engine.set_gate(m.SetGate(gate=m.Gate.FROZEN))
    assert (frozen.previous, frozen.kept) == (m.Gate.OPEN, 3)
    # What had been sent before the order was acknowledged has arrived by now.
    await asyncio.sleep(0)
    lengths = [len(one.answer.ids) for one in asked]
    steps = (await engine.load()).steps
    await asyncio.sleep(0.1)
    assert [len(one.answer.ids) for one in asked] == lengths
    load = await engine.load()
    assert load.steps == steps
    assert load.used_kv_blocks > 0
    thawed = await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))
    assert thawed.continued == 3
    for one, expected in zip(asked, whole, strict=True):
        answer = await one.whole()
        assert answer.text == expected.text
        assert answer.ids == expected.ids
        assert answer.finished.reason is m.FinishReason.LENGTH


async def test_several_freezes_change_nothing_either(engine: Engine) -> None:
    expected = await ask(engine, "expected", max_tokens=120, seed=6).whole()
    asked = ask(engine, "frozen", max_tokens=120, seed=6, bypass_prefix_cache=True)
    for tokens in (1, 20, 21, 60):
        await asked.after(tokens)
        await engine.set_gate(m.SetGate(gate=m.Gate.FROZEN))
        await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))
    assert (await asked.whole()).ids == expected.ids


async def test_flush_spares_what_is_frozen(engine: Engine) -> None:
    expected = await ask(engine, "expected", max_tokens=LONG, seed=8).whole()
    asked = await ask(engine, "kept", max_tokens=LONG, seed=8).after(5)
    await engine.set_gate(m.SetGate(gate=m.Gate.FROZEN))
    flushed = await engine.flush_prefix_cache()
    assert flushed.blocks_in_use > 0
    await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))
    assert (await asked.whole()).ids == expected.ids


async def test_frozen_requests_can_be_aborted(engine: Engine) -> None:
    asked = await ask(engine, "a", max_tokens=LONG).after(2)
    await engine.set_gate(m.SetGate(gate=m.Gate.FROZEN))
    aborted = await engine.abort(("a",), "no longer wanted")
    assert aborted.outcomes == (m.AbortOf("a", m.AbortStatus.ABORTED),)
    assert (await asked.whole()).finished.message == "no longer wanted"
    assert (await engine.load()).used_kv_blocks == 0


async def test_closing_ends_what_runs_and_what_waits_and_what_is_still_on_its_way(
    engine: Engine,
) -> None:
    asked = [ask(engine, str(n), max_tokens=LONG, seed=n) for n in range(10)]
    await asked[0].after(2)
    closed = await engine.set_gate(m.SetGate(gate=m.Gate.CLOSED, message="paused"))
    assert closed.aborted == 10
    late = ask(engine, "late")
    for one in [*asked, late]:
        answer = await one.whole()
        assert answer.finished.reason is m.FinishReason.CANCELLED
        assert answer.finished.message == "paused"
    assert len(asked[0].answer.ids) < LONG
    assert asked[9].answer.finished.usage.completion_tokens == 0


async def test_closing_only_if_idle_waits_for_nobody(engine: Engine) -> None:
    asked = await ask(engine, "a", max_tokens=LONG).after(1)
    order = m.SetGate(gate=m.Gate.CLOSED, only_if_idle=True)
    with pytest.raises(OrderRejected, match="1 requests are in flight"):
        await engine.set_gate(order)
    assert len((await asked.whole()).ids) == LONG
    assert (await engine.set_gate(order)).aborted == 0


async def test_abort_by_id(engine: Engine) -> None:
    await ask(engine, "done").whole()
    goes, stays = ask(engine, "goes", max_tokens=LONG), ask(engine, "stays", max_tokens=60)
    await goes.after(2)
    aborted = await engine.abort(("goes", "done", "unknown"), "out of time")
    assert aborted.outcomes == (
        m.AbortOf("goes", m.AbortStatus.ABORTED),
        m.AbortOf("done", m.AbortStatus.ALREADY_FINISHED),
        m.AbortOf("unknown", m.AbortStatus.NOT_FOUND),
    )
    ended = (await goes.whole()).finished
    assert (ended.reason, ended.message) == (m.FinishReason.CANCELLED, "out of time")
    assert ended.usage.completion_tokens == len(goes.answer.ids)
    assert len((await stays.whole()).ids) == 60
    (again,) = (await engine.abort(("goes",), "")).outcomes
    assert again.status is m.AbortStatus.ALREADY_FINISHED


async def test_abort_all(engine: Engine) -> None:
    asked = [ask(engine, str(n), max_tokens=LONG) for n in range(10)]
    await asked[0].after(1)
    aborted = await engine.abort(None, "all out")
    assert {one.request_id for one in aborted.outcomes} == {str(n) for n in range(10)}
    assert {one.status for one in aborted.outcomes} == {m.AbortStatus.ABORTED}
    for one in asked:
        assert (await one.whole()).finished.message == "all out"
    assert (await engine.abort(None, "")).outcomes == ()


async def test_a_client_that_leaves_frees_everything_at_once(engine: Engine) -> None:
    asked = await ask(engine, "gone", max_tokens=LONG).after(3)
    await asked.leave()
    assert engine.open_requests == ()
    load = await engine.load()
    assert (load.running_requests, load.used_kv_blocks) == (0, 0)
    # The id is free again, and nothing of the earlier request reaches the new one.
    again = await ask(engine, "gone", max_tokens=3).whole()
    assert len(again.ids) == 3


async def test_a_client_that_leaves_while_waiting(engine: Engine) -> None:
    running = [ask(engine, str(n), max_tokens=LONG) for n in range(8)]
    await load_becomes(engine, running=8, waiting=0)
    waits = ask(engine, "waits")
    await load_becomes(engine, running=8, waiting=1)
    await waits.leave()
    load = await engine.load()
    assert (load.running_requests, load.waiting_requests) == (len(running), 0)


async def test_an_open_id_is_not_taken_twice(engine: Engine) -> None:
    asked = await ask(engine, "same", max_tokens=LONG).after(1)
    with pytest.raises(DuplicateRequest):
        await ask(engine, "same").whole()
    assert len((await asked.whole()).ids) == LONG


async def test_stop_conditions_reach_the_model(engine: Engine) -> None:
    free = await ask(engine, "free", max_tokens=30, seed=2).whole()
    third, word = free.tokens[2], free.tokens[5].text
    by_token = await ask(
        engine, "token", max_tokens=30, seed=2, stop_token_ids=(third.token_id,)
    ).whole()
    assert by_token.ids == free.ids[:2]
    assert by_token.finished.stop == m.StopMatch(m.StopKind.TOKEN, token_id=third.token_id)
    assert by_token.finished.usage.completion_tokens == 3
    by_text = await ask(engine, "text", max_tokens=30, seed=2, stop_texts=(word,)).whole()
    assert by_text.text == free.text[: free.text.index(word)]
    assert by_text.finished.stop == m.StopMatch(m.StopKind.TEXT, text=word)


async def test_banned_until_the_minimum(engine: Engine) -> None:
    """The first token of a free run as a stop token: banned, another one must be drawn."""
    free = await ask(engine, "free", temperature=0).whole()
    stopped = await ask(
        engine, "min", temperature=0, min_tokens=4, stop_token_ids=(free.ids[0],)
    ).whole()
    assert len(stopped.ids) >= 4
    assert free.ids[0] not in stopped.ids


async def test_log_probabilities(engine: Engine) -> None:
    wanted = m.Logprobs(top_n=3)
    answer = await ask(engine, "a", temperature=0, max_tokens=5, logprobs=wanted).whole()
    for token in answer.tokens:
        assert token.place == 1
        assert token.candidates[0].token_id == token.token_id
        assert token.candidates[0].logprob == token.logprob
        assert [one.place for one in token.candidates] == [1, 2, 3]
        assert 0 > token.candidates[0].logprob > token.candidates[1].logprob
    named = m.Logprobs(token_ids=(7, 9))
    answer = await ask(engine, "b", temperature=0, max_tokens=1, logprobs=named).whole()
    assert [one.token_id for one in answer.tokens[0].candidates] == [7, 9]


async def test_probe_computes_beside_everything(engine: Engine) -> None:
    await engine.set_gate(m.SetGate(gate=m.Gate.CLOSED, message=""))
    await engine.probe()
    assert (await engine.load()).used_kv_blocks == 0


async def test_waiting_line_is_bounded(tiny: Path) -> None:
    async with serving(tiny, max_running=1, max_waiting=2, step_delay_ms=2) as engine:
        running = await ask(engine, "running", max_tokens=LONG).after(1)
        waiting = [ask(engine, str(n), max_tokens=3) for n in range(2)]
        await load_becomes(engine, running=1, waiting=2)
        with pytest.raises(Overloaded):
            await ask(engine, "too many").whole()
        await running.leave()
        for one in waiting:
            assert len((await one.whole()).ids) == 3
        assert engine.open_requests == ()


async def test_preempted_requests_end_as_if_they_had_had_room(engine: Engine, tiny: Path) -> None:
    def requests(on: Engine) -> list[Asked]:
        return [
            ask(on, str(n), PROMPT[: 10 + 7 * n], 120, seed=n, temperature=0.9) for n in range(5)
        ]

    expected = [(await one.whole()).ids for one in requests(engine)]
    async with serving(tiny, kv_blocks=20, block_size=8, max_running=5) as small:
        assert small.ready.max_model_len == 160
        answers = [await one.whole() for one in requests(small)]
        load = await small.load()
    assert load.preemptions > 0
    assert load.used_kv_blocks == 0
    assert [one.ids for one in answers] == expected
    assert all(one.finished.usage.completion_tokens == 120 for one in answers)


async def test_chunked_prompt_ends_as_a_whole_one(engine: Engine, tiny: Path) -> None:
    prompt = " ".join([PROMPT] * 8)
    expected = await ask(engine, "whole", prompt, seed=3).whole()
    async with serving(tiny, max_batched_tokens=24, max_running=4) as chunked:
        answer = await ask(chunked, "chunked", prompt, seed=3).whole()
        assert (await chunked.load()).steps >= 19 + len(chunked.tokenizer.encode(prompt)) // 24
    assert answer.ids == expected.ids


async def test_closing_the_engine_ends_open_streams(tiny: Path) -> None:
    async with serving(tiny, step_delay_ms=2) as engine:
        asked = await ask(engine, "a", max_tokens=LONG).after(1)
        await engine.close()
        end = (await asked.whole()).end
    assert isinstance(end, m.Failed)
    assert end.retryable
    assert "shutting down" in end.message


async def test_the_iterator_itself_can_be_closed(engine: Engine) -> None:
    reports = engine.generate(request_for(engine, "a", max_tokens=LONG))
    await anext(reports)
    await reports.aclose()
    assert engine.open_requests == ()
    assert (await engine.load()).running_requests == 0
