"""The engine as a service: orders and generations over both listeners, with the real model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from app.reference_engine.errors import CannotServe, ReferenceEngineError
from app.reference_engine.limits import CoreSettings
from app.reference_engine.recovery import Pace
from app.reference_engine.serving import EngineSettings, ServedEngine, TokenSettings, served
from app.rpc.openengine.v1 import admin_pb2, error_pb2, generation_pb2, lifecycle_pb2
from tests.reference_engine.calling import Call, Clients, clients_of
from tests.reference_engine.ranks import alive, nursery, ranks
from tests.reference_engine.serving import PATIENCE_S, PROMPT, eventually

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
# At 2 ms a step well over a second: time enough for orders to meet a generation, on any machine.
LONG = 600
DRAIN = admin_pb2.PAUSE_MODE_DRAIN
ABORT = admin_pb2.PAUSE_MODE_ABORT
KEEP = admin_pb2.PAUSE_MODE_KEEP
STOP, LENGTH, CANCELLED = (
    generation_pb2.FINISH_REASON_STOP,
    generation_pb2.FINISH_REASON_LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED,
)
SERVING = health_pb2.HealthCheckResponse.SERVING


def settings(checkpoint: Path, data_dir: Path, **core: Any) -> EngineSettings:
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        insecure_loopback=True,
        core=CoreSettings(torch_threads=1, **core),
        stop_grace_s=0.0,
    )


@pytest.fixture(scope="module")
async def engine(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedEngine]:
    data_dir = tmp_path_factory.mktemp("engine")
    async with served(
        settings(tiny, data_dir, step_delay_ms=2, kv_blocks=256, max_running=4)
    ) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine) -> AsyncIterator[Clients]:
    """Every test leaves the engine open, idle and with an empty cache."""
    async with clients_of(engine) as connected:
        yield connected
        await connected.abort(None)
        if (await connected.profile()).state.admission == admin_pb2.ADMISSION_STATE_PAUSED:
            await connected.resume()
        await connected.flush()
        assert (await connected.load()).used_kv_blocks == 0


async def held(clients: Clients, requests: int) -> None:
    async def reached() -> bool:
        return (await clients.profile()).state.pause.requests_held == requests

    await eventually(reached)


async def running(clients: Clients, requests: int) -> None:
    async def reached() -> bool:
        return (await clients.load()).running_requests == requests

    await eventually(reached)


async def test_generation_over_the_wire(clients: Clients) -> None:
    heard = await clients.generate("a").whole()
    assert heard.finished is not None
    assert heard.usage is not None
    assert heard.finished.reason == LENGTH
    assert heard.usage.completion_tokens == heard.tokens == 20
    assert heard.usage.total_tokens == heard.usage.prompt_tokens + 20
    assert len(heard.text.split()) > 5


async def test_drain_finishes_what_was_there_and_holds_what_comes(clients: Clients) -> None:
    """Six are in when the drain begins, of which two wait for their turn in the engine."""
    expected = await clients.generate("expected", seed=7).whole()
    there = [clients.generate(f"there{n}", 250 + 10 * n, seed=n) for n in range(6)]
    await running(clients, 4)
    drain = clients.pause(DRAIN)
    accepted = await drain.until("accepted")
    new = clients.generate("new", seed=7)
    await held(clients, 1)
    completed = await drain.completed()
    assert completed.pause.requests_finished == 6
    for n, call in enumerate(there):
        heard = await call.whole()
        assert heard.finished is not None
        assert heard.finished.reason == LENGTH
        assert heard.tokens == 250 + 10 * n
    progress = [event.progress for event in drain.events if event.HasField("progress")]
    assert progress
    assert progress[-1].unit == "requests"
    assert [event.sequence for event in drain.events] == list(range(1, len(drain.events) + 1))
    assert all(event.operation_id == accepted.operation_id for event in drain.events)
    assert not new.over
    assert new.heard.tokens == 0
    resumed = await clients.resume()
    assert resumed.resume.requests_admitted == 1
    assert (await new.whole()).text == expected.text


async def test_held_requests_go_on_in_the_order_in_which_they_came(clients: Clients) -> None:
    await clients.pause(DRAIN).completed()
    calls = []
    for n in range(8):
        calls.append(clients.generate(str(n), 10 + 10 * n))
        await held(clients, n + 1)
    await clients.resume()
    # Four run at once, so a later one can only have begun when an earlier one was through.
    for at in range(4, 8):
        await calls[at].after(1)
        assert calls[at - 4].heard.tokens > 0
    for call in calls:
        await call.whole()


async def test_cancelled_drain_opens_admission_again(clients: Clients) -> None:
    call = await clients.generate("long", LONG).after(1)
    drain = clients.pause(DRAIN)
    accepted = await drain.until("accepted")
    waits = clients.generate("waits", 5)
    await held(clients, 1)
    await clients.cancel(accepted.operation_id)
    assert (await drain.end()).WhichOneof("event") == "cancelled"
    assert (await waits.whole()).tokens == 5
    assert (await clients.profile()).state.admission == admin_pb2.ADMISSION_STATE_OPEN
    await call.hang_up()


async def test_drain_that_takes_too_long_fails_and_opens_admission_again(clients: Clients) -> None:
    call = await clients.generate("long", LONG).after(1)
    drain = clients.pause(DRAIN, deadline_ms=100)
    assert (await drain.end()).WhichOneof("event") == "failed"
    assert (await clients.generate("next", 5).whole()).tokens == 5
    assert (await call.whole()).tokens == LONG


async def test_keep_freezes_and_continues_token_for_token(clients: Clients) -> None:
    unfrozen = [clients.generate(f"e{n}", LONG, seed=n) for n in range(3)]
    expected = [await call.whole() for call in unfrozen]
    calls = [clients.generate(f"k{n}", LONG, seed=n) for n in range(3)]
    for call in calls:
        await call.after(5)
    paused = await clients.pause(KEEP).completed()
    assert paused.pause.requests_kept == 3
    steps = [call.heard.tokens for call in calls]
    blocks = (await clients.load()).used_kv_blocks
    await asyncio.sleep(0.1)
    assert blocks == (await clients.load()).used_kv_blocks > 0
    assert not any(call.over for call in calls)
    resumed = await clients.resume()
    assert resumed.resume.requests_continued == 3
    for call, whole, frozen_at in zip(calls, expected, steps, strict=True):
        assert (await call.whole()).text == whole.text
        assert frozen_at < LONG


async def test_keep_then_abort_ends_what_is_frozen(clients: Clients) -> None:
    call = await clients.generate("frozen", LONG).after(2)
    await clients.pause(KEEP).completed()
    aborted = await clients.pause(ABORT).completed()
    assert aborted.pause.requests_aborted == 1
    heard = await call.whole()
    assert heard.finished is not None
    assert heard.finished.reason == CANCELLED


async def test_abort_pause_ends_everything_with_its_reason(clients: Clients) -> None:
    calls = [clients.generate(str(n), LONG, seed=n) for n in range(6)]
    await running(clients, 4)
    paused = await clients.pause(ABORT).completed()
    assert paused.pause.requests_aborted == 6
    for call in calls:
        heard = await call.whole()
        assert heard.finished is not None
        assert heard.finished.reason == CANCELLED
        assert "paused" in heard.finished.message
    assert (await clients.load()).used_kv_blocks == 0


async def test_pause_meets_requests_that_arrive_all_the_time(clients: Clients) -> None:
    """Whatever the moment at which it takes effect: each request ends, in one of three ways, and
    nothing runs while the engine says that it is paused."""
    calls: list[Call] = []
    stop = asyncio.Event()

    async def arrive() -> None:
        while not stop.is_set():
            calls.append(clients.generate(f"r{len(calls)}", 6, seed=len(calls)))
            await asyncio.sleep(0.008)

    arriving = asyncio.create_task(arrive())
    for mode in (ABORT, DRAIN, KEEP, ABORT, KEEP, DRAIN):
        await asyncio.sleep(0.05)
        await clients.pause(mode).completed()
        before = await clients.load()
        await asyncio.sleep(0.02)
        after = await clients.load()
        assert before.running_tokens == after.running_tokens
        if mode != KEEP:
            assert after.used_kv_blocks == 0
        await clients.resume()
    stop.set()
    await arriving
    for call in calls:
        heard = await call.whole()
        assert heard.finished is not None, (heard.status, heard.detail, heard.error)
        assert heard.finished.reason in (LENGTH, CANCELLED, STOP)
        if heard.finished.reason == LENGTH:
            assert heard.tokens == 6


async def test_held_too_long_ends_clearly(clients: Clients) -> None:
    await clients.pause(DRAIN, hold_limit_ms=50).completed()
    heard = await clients.generate("held").whole()
    assert heard.error is not None
    assert heard.error.code == error_pb2.ERROR_CODE_DRAINING
    assert heard.error.retryable
    assert heard.error.message


async def test_refused_at_once(clients: Clients) -> None:
    refuse = admin_pb2.NEW_REQUESTS_REFUSE
    await clients.pause(DRAIN, new_requests=refuse).completed()
    heard = await clients.generate("refused").whole()
    assert heard.status is grpc.StatusCode.UNAVAILABLE
    await clients.resume()
    assert (await clients.generate("again", 5).whole()).tokens == 5


async def test_flush_is_seen_in_the_next_prompt(clients: Clients) -> None:
    first = await clients.generate("first").whole()
    second = await clients.generate("second").whole()
    assert (first.cached, second.cached >= 16) == (0, True)
    flushed = await clients.flush()
    assert flushed.blocks_freed >= 2
    assert flushed.blocks_in_use == 0
    third = await clients.generate("third").whole()
    assert third.cached == 0
    assert first.text == second.text == third.text


async def test_flush_leaves_what_runs(clients: Clients) -> None:
    call = await clients.generate("runs", LONG).after(2)
    flushed = await clients.flush()
    assert flushed.blocks_in_use > 0
    assert (await call.whole()).tokens == LONG


async def test_aborts(clients: Clients) -> None:
    await clients.generate("done", 3).whole()
    call = await clients.generate("runs", LONG).after(1)
    assert (await clients.abort("runs")).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    heard = await call.whole()
    assert heard.finished is not None
    assert heard.finished.reason == CANCELLED
    again = await clients.abort("done")
    assert again.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await clients.abort("unknown")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_abort_all_reaches_waiting_and_held_ones(clients: Clients) -> None:
    calls = [clients.generate(str(n), LONG) for n in range(6)]
    await running(clients, 4)
    await clients.abort(None)
    for call in calls:
        heard = await call.whole()
        assert heard.finished is not None
        assert heard.finished.reason == CANCELLED


async def test_hanging_up_frees_the_blocks(clients: Clients) -> None:
    call = await clients.generate("gone", LONG).after(1)
    await call.hang_up()
    await running(clients, 0)
    assert (await clients.load()).used_kv_blocks == 0


async def test_load_and_capacity(clients: Clients) -> None:
    for n in range(6):
        clients.generate(str(n), LONG, seed=n)
    await running(clients, 4)
    load = await clients.load(per_rank=True)
    assert (load.queued_requests, load.total_kv_blocks) == (2, 256)
    (rank,) = load.ranks  # the one data-parallel rank that there is
    for field in ("running_requests", "queued_requests", "used_kv_blocks", "total_kv_blocks"):
        assert getattr(rank, field) == getattr(load, field)
    assert rank.HasField("data_parallel_rank")
    assert rank.prefill_batch_size + rank.decode_batch_size > 0
    alone = await clients.load()
    assert not alone.ranks
    assert not alone.attributes.fields
    assert load.waiting_tokens > 0
    assert load.running_tokens > load.waiting_tokens


async def test_what_each_rank_holds_is_told(clients: Clients) -> None:
    """Measured by the rank itself: there, not there, or kept elsewhere."""

    async def memory() -> list[dict[str, int]]:
        load = await clients.load(per_rank=True)
        rows = load.attributes.fields["memory"].list_value.values
        return [
            {name: int(value.number_value) for name, value in row.struct_value.fields.items()}
            for row in rows
        ]

    (before,) = await memory()
    assert before.pop("rank") == 0
    assert before["weights_bytes"] > 0
    assert before["kv_cache_bytes"] > 0
    assert before["kept_bytes"] == 0
    assert before["in_use_bytes"] > before["weights_bytes"] + before["kv_cache_bytes"]


async def test_requests_that_can_never_be_served(clients: Clients) -> None:
    too_long = generation_pb2.GenerateRequest(prompt=PROMPT * 1000)
    foreign = generation_pb2.GenerateRequest()
    foreign.token_ids.ids.append(10**6)
    everything = generation_pb2.GenerateRequest(prompt="x")
    everything.response.output_candidates.all.SetInParent()
    for request, status in (
        (too_long, grpc.StatusCode.INVALID_ARGUMENT),
        (foreign, grpc.StatusCode.INVALID_ARGUMENT),
        (everything, grpc.StatusCode.UNIMPLEMENTED),
    ):
        heard = await clients.send(request).whole()
        assert heard.status is status, heard
        assert heard.detail


async def test_health_with_a_probe(clients: Clients) -> None:
    health = await clients.control.Health(
        lifecycle_pb2.HealthRequest(include_inference_probe=True), timeout=PATIENCE_S
    )
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY
    assert {check.state for check in health.checks} == {lifecycle_pb2.HEALTH_STATE_READY}


async def test_lost_rank_takes_the_engine_out_of_service(tiny: Path, tmp_path: Path) -> None:
    others = set(ranks())
    # After the first loss ranks are back at once, before anybody has looked; after another, later.
    slow = replace(
        settings(tiny, tmp_path, step_delay_ms=2), recovery=Pace(first_s=600, longest_s=600)
    )
    async with served(slow) as engine, clients_of(engine) as clients:
        call = await clients.generate("a", LONG).after(1)
        before = await clients.profile()
        os.kill(engine.rank_pids[0], signal.SIGKILL)
        heard = await call.whole()
        assert heard.error is not None
        assert heard.error.code == error_pb2.ERROR_CODE_INTERNAL

        async def ready() -> bool:
            check = health_pb2.HealthCheckRequest(service="openengine.v1.Inference")
            return bool((await clients.health.Check(check, timeout=PATIENCE_S)).status == SERVING)

        async def unready() -> bool:
            return not await ready()

        def those_after() -> set[int]:
            return set(ranks()) - others - set(engine.rank_pids)

        async def replaced() -> bool:
            return bool(those_after())

        await eventually(replaced)
        await eventually(ready)
        (again,) = those_after()
        os.kill(again, signal.SIGKILL)
        await eventually(unready)
        after = await clients.profile()
        assert after.revision > before.revision
        assert [(one.rank, one.state) for one in after.state.ranks] == [
            (0, admin_pb2.RANK_STATE_FAILED)
        ]
        assert (await clients.generate("b").whole()).status is grpc.StatusCode.UNAVAILABLE
        end = await clients.pause(KEEP).end()
        assert end.WhichOneof("event") == "failed"
        assert list(end.failed.ranks) == [0]


async def test_unsafe_or_impossible_settings_start_nothing(tiny: Path, tmp_path: Path) -> None:
    tokens = TokenSettings(
        issuer="http://issuer.example", inference_audience="i", admin_audience="a"
    )
    missing = tmp_path / "missing"
    for wrong in (
        EngineSettings(data_dir=tmp_path, checkpoint=tiny),
        EngineSettings(data_dir=tmp_path, checkpoint=tiny, tokens=tokens),
        EngineSettings(data_dir=tmp_path, checkpoint=missing, insecure_loopback=True),
        EngineSettings(data_dir=Path("/proc/nowhere"), insecure_loopback=True),
    ):
        with pytest.raises(ReferenceEngineError):
            async with served(wrong):
                pass


async def test_listeners_with_tokens_let_nobody_in_without(tiny: Path, tmp_path: Path) -> None:
    # Nobody answers there, and nobody has to: who shows nothing is refused before keys matter.
    tokens = TokenSettings(
        issuer="http://127.0.0.1:9", inference_audience="inference", admin_audience="admin"
    )
    guarded = EngineSettings(data_dir=tmp_path, checkpoint=tiny, tokens=tokens)
    async with served(guarded) as engine, clients_of(engine) as clients:
        heard = await clients.generate("a").whole()
        assert heard.status is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await clients.profile()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_one_process_per_data_folder_and_per_address(tiny: Path, tmp_path: Path) -> None:
    async with served(settings(tiny, tmp_path)) as engine:
        with pytest.raises(CannotServe):
            async with served(settings(tiny, tmp_path)):
                pass
        host, _, port = engine.admin_address.rpartition(":")
        taken = EngineSettings(
            nursery=nursery(),
            data_dir=tmp_path / "other",
            checkpoint=tiny,
            insecure_loopback=True,
            admin_address=f"{host}:{port}",
        )
        with pytest.raises(CannotServe, match=port):
            async with served(taken):
                pass


def start_process(data_dir: Path, ready: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.reference_engine", f"--data-dir={data_dir}"]
    command += [f"--ready-file={ready}", "--insecure-loopback", "--step-delay-ms=5", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> ServedEngine:
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    found = json.loads(path.read_text())
    return ServedEngine(**found | {"rank_pids": tuple(found["rank_pids"])})


async def test_process_from_first_start_to_sigterm(tmp_path: Path) -> None:
    """Makes its checkpoint, serves, ends what runs with a word, and leaves nothing behind."""
    ready = tmp_path / "ready.json"
    process = start_process(tmp_path / "data", ready, "--stop-grace-s=0")
    with process:
        engine = await asyncio.to_thread(wait_for, ready, process)
        assert engine.model_name == "tiny-llama"
        async with clients_of(engine) as clients:
            call = await clients.generate("a", 4000).after(1)
            process.terminate()
            heard = await call.whole()
            assert heard.status is not None or heard.error is not None
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert not alive(engine.rank_pids[0])


async def test_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    with start_process(tmp_path / "data", tmp_path / "ready.json") as process:
        while not (tmp_path / "data").exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.01)
        process.terminate()
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert not (tmp_path / "ready.json").exists()


def test_process_says_in_one_line_why_it_can_not_serve(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.reference_engine", f"--data-dir={tmp_path}"]
    ended = subprocess.run(
        [*command, "--insecure-loopback", "--model=/nowhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr == "engine: no checkpoint directory at /nowhere\n"
    wrong = subprocess.run([*command, "--issuer=x"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "go together" in wrong.stderr
