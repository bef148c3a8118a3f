"""The kit's port over the real engine: two phases, their way back, and what each rank says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from app.domain.commands import AbortRequests, Command, FlushCaches, Pause, Resume
from app.domain.kinds import AbortOutcome, CacheKind, PauseMode, WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Order, RequestRefused, Runtime, RuntimeFault
from app.reference_engine.engine import Engine
from app.reference_engine.intake import Intake
from app.reference_engine.runtime import ReferenceRuntime
from app.rpc.openengine.v1 import error_pb2, generation_pb2
from tests.reference_engine.serving import PATIENCE_S, PROMPT, serving

pytestmark = pytest.mark.anyio

_NUMBERS = count()
LONG = 400
KEEP, ABORT, DRAIN = (
    Pause(mode=mode) for mode in (PauseMode.KEEP, PauseMode.ABORT, PauseMode.DRAIN)
)
RESUME = Resume(pause_epoch=1)
FLUSH = FlushCaches(caches=(CacheKind.PREFIX,))


def runtime_of(engine: Engine) -> ReferenceRuntime:
    intake = Intake(
        tokenizer=engine.tokenizer,
        vocab_size=engine.config.vocab_size,
        max_model_len=engine.ready.max_model_len,
        draw_seed=lambda: 0,
    )
    return ReferenceRuntime(
        engine, intake, model_name="tiny", engine_version="0", weight_version="v1"
    )


@pytest.fixture(scope="module")
async def engine(tiny: Path) -> AsyncIterator[Engine]:
    async with serving(tiny, step_delay_ms=2) as started:
        yield started


@pytest.fixture
async def runtime(engine: Engine) -> AsyncIterator[ReferenceRuntime]:
    made = runtime_of(engine)
    yield made
    await carry_out(made, RESUME)
    await made.abort(None, "the test is over")
    await carry_out(made, FLUSH)


def order(command: Command) -> Order:
    return Order(operation_id=str(next(_NUMBERS)), command=command, report=lambda _: None)


async def both_phases(runtime: Runtime, one: Order) -> None:
    await asyncio.gather(*(runtime.prepare(one, rank) for rank in runtime.ranks))
    await asyncio.gather(*(runtime.commit(one, rank) for rank in runtime.ranks))


async def carry_out(runtime: Runtime, command: Command) -> Order:
    one = order(command)
    await both_phases(runtime, one)
    await runtime.conclude(one)
    return one


class Stream:
    """A generation through the port, counted in the background."""

    def __init__(self, runtime: Runtime, request_id: str, max_tokens: int = LONG) -> None:
        request = generation_pb2.GenerateRequest(request_id=request_id, prompt=PROMPT)
        request.stopping.max_tokens = max_tokens
        self.tokens = 0
        self.last: generation_pb2.GenerateResponse | None = None
        self._began = asyncio.Event()
        self.task = asyncio.create_task(self._read(runtime, request))

    async def _read(self, runtime: Runtime, request: generation_pb2.GenerateRequest) -> None:
        async for response in runtime.generate(request):
            self.last = response
            self.tokens += len(response.token.tokens)
            self._began.set()

    async def began(self) -> Stream:
        async with asyncio.timeout(PATIENCE_S):
            await self._began.wait()
        return self

    async def end(self) -> generation_pb2.GenerateResponse:
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        assert self.last is not None
        return self.last


async def test_it_is_what_the_port_asks_for(runtime: ReferenceRuntime) -> None:
    as_port: Runtime = runtime
    assert as_port.ranks == (0,)
    assert as_port.describe().models == as_port.capabilities().models == ("tiny",)
    observed = await as_port.observe()
    assert observed == await as_port.observe()
    assert (observed.weights.version, observed.weights.state) == ("v1", WeightsState.VALID)
    await as_port.probe()


async def test_a_request_is_known_before_generate_suspends(runtime: ReferenceRuntime) -> None:
    """A pause that commits at the very next moment finds it among those in flight."""
    stream = Stream(runtime, "new")
    await asyncio.sleep(0)
    one = order(ABORT)
    await both_phases(runtime, one)
    assert (await runtime.conclude(one)).requests_aborted == 1
    finished = (await stream.end()).finished
    assert finished.reason == generation_pb2.FINISH_REASON_CANCELLED


async def test_closing_the_iterator_ends_the_request_before_it_returns(
    runtime: ReferenceRuntime,
) -> None:
    stream = await Stream(runtime, "a").began()
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)
    load = await runtime.load()
    assert (load.running_requests, load.used_kv_blocks) == (0, 0)
    one = order(DRAIN)
    await both_phases(runtime, one)
    assert (await runtime.conclude(one)).requests_aborted == 0


async def test_drain_that_commits_too_early_is_refused(runtime: ReferenceRuntime) -> None:
    stream = await Stream(runtime, "a", LONG).began()
    one = order(DRAIN)
    with pytest.raises(RuntimeFault, match="in flight"):
        await both_phases(runtime, one)
    await runtime.rollback(one, 0)
    assert (await stream.end()).finished.reason == generation_pb2.FINISH_REASON_LENGTH


async def test_rolled_back_freeze_lets_requests_go_on(runtime: ReferenceRuntime) -> None:
    stream = await Stream(runtime, "a", LONG).began()
    one = order(KEEP)
    await both_phases(runtime, one)
    await runtime.rollback(one, 0)
    await stream.end()
    assert stream.tokens == LONG


async def test_rollback_returns_to_the_earlier_pause(runtime: ReferenceRuntime) -> None:
    stream = await Stream(runtime, "a", LONG).began()
    await carry_out(runtime, KEEP)
    frozen_at = stream.tokens
    one = order(RESUME)
    await both_phases(runtime, one)
    await runtime.rollback(one, 0)
    await asyncio.sleep(0.05)
    seen = stream.tokens
    await asyncio.sleep(0.05)
    assert frozen_at <= stream.tokens == seen < LONG
    resumed = order(RESUME)
    await both_phases(runtime, resumed)
    assert (await runtime.conclude(resumed)).requests_continued == 1
    await stream.end()
    assert stream.tokens == LONG


async def test_rollback_of_what_was_only_prepared_or_not_even_that(
    runtime: ReferenceRuntime,
) -> None:
    stream = await Stream(runtime, "a", 40).began()
    one = order(KEEP)
    await runtime.prepare(one, 0)
    await runtime.rollback(one, 0)
    await runtime.rollback(order(ABORT), 0)
    await stream.end()
    assert stream.tokens == 40


async def test_flush_says_what_it_freed_and_can_not_be_undone(runtime: ReferenceRuntime) -> None:
    await Stream(runtime, "a", 3).end()
    one = order(FLUSH)
    await both_phases(runtime, one)
    (flushed,) = (await runtime.conclude(one)).flushed
    assert (flushed.kind, flushed.blocks_in_use) == (CacheKind.PREFIX, 0)
    assert flushed.blocks_freed > 0
    await runtime.rollback(one, 0)


async def test_a_flush_of_what_is_empty_changes_nothing(runtime: ReferenceRuntime) -> None:
    await Stream(runtime, "a", 3).end()
    for changed in (True, False):
        one = order(FLUSH)
        await both_phases(runtime, one)
        assert (await runtime.conclude(one)).changed is changed


async def test_abort_tells_each_id(runtime: ReferenceRuntime) -> None:
    await Stream(runtime, "done", 2).end()
    stream = await Stream(runtime, "runs").began()
    tally = await runtime.abort(("runs", "done", "other"), "enough")
    assert tally.outcomes == {
        "runs": AbortOutcome.ABORTED,
        "done": AbortOutcome.ALREADY_FINISHED,
        "other": AbortOutcome.NOT_FOUND,
    }
    assert (await stream.end()).finished.message == "enough"


async def test_orders_that_do_not_go_to_ranks(runtime: ReferenceRuntime) -> None:
    one = order(AbortRequests(all=True))
    await runtime.prepare(one, 0)
    with pytest.raises(RuntimeFault) as raised:
        await runtime.commit(one, 0)
    assert raised.value.reason == "UNSUPPORTED_OPERATION"


@pytest.mark.parametrize(
    ("token_id", "code"), [(10**6, error_pb2.ERROR_CODE_INVALID_ARGUMENT), (1, None)]
)
async def test_refusals_come_before_the_first_response(
    runtime: ReferenceRuntime, token_id: int, code: int | None
) -> None:
    open_one = await Stream(runtime, "same").began()
    request = generation_pb2.GenerateRequest(request_id="same")
    request.token_ids.ids.append(token_id)
    with pytest.raises(RequestRefused) as raised:
        await anext(runtime.generate(request))
    assert raised.value.code == (code or error_pb2.ERROR_CODE_DUPLICATE_REQUEST)
    assert not open_one.task.done()


async def test_lost_rank_is_reported_in_every_answer(tiny: Path) -> None:
    async with serving(tiny) as engine:
        runtime = runtime_of(engine)
        os.kill(engine.pids[0], signal.SIGKILL)
        one = order(KEEP)
        with pytest.raises(RuntimeFault) as raised:
            await runtime.prepare(one, 0)
        assert raised.value.reason == "RANK_LOST"
        for call in (runtime.commit(one, 0), runtime.load(), runtime.probe()):
            with pytest.raises(RuntimeFault, match="rank 0"):
                await call
        with pytest.raises(RuntimeFault, match="rank 0"):
            await runtime.abort(None, "")
        with pytest.raises(RequestRefused) as refused:
            await Stream(runtime, "a").end()
        assert refused.value.code == error_pb2.ERROR_CODE_INTERNAL
        assert refused.value.retryable
        observed = await runtime.observe()
        assert observed.ranks == (RankReport(0, RankState.FAILED, "its process ended"),)
        assert observed.weights.state is WeightsState.UNKNOWN
        await runtime.close()
