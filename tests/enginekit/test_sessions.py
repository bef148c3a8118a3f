"""New weights in pieces: one operation, several calls, each of them safe to repeat."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.operation import Progress
from app.domain.ranks import RankReport
from app.domain.ranks import RankState as RankHealth
from app.enginekit.sessions import MOST_WAITING
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused
from tests.enginekit.full_engine import RankState, checksum
from tests.enginekit.minimal_engine import fault, hang
from tests.enginekit.minimal_engine import until as until_set
from tests.enginekit.session_engine import COMPLETE, Sender, SessionEngine, told

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
DISK = pb.DiskTransfer(path="/x")
GROUP = pb.NcclTransfer(address="::1", port=1, world_size=2, rank_offset=1)  # the engine is two
SPEC = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[2, 2])


def make() -> SessionEngine:
    return SessionEngine(world_size=2)


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(
        tmp_path / "engine",
        make_engine=make,
        cancel_grace_s=0.2,
        rollback_timeout_s=0.5,
        straggler_s=0.2,
    ) as running:
        yield running


@pytest.fixture
def engine(double: EngineDouble) -> SessionEngine:
    assert isinstance(double.engine, SessionEngine)
    return double.engine


@pytest.fixture
def sender(client: Client) -> Sender:
    return Sender(client)


def progresses(events: list[Any]) -> list[tuple[str, int, int]]:
    return [
        (event.progress.phase, event.progress.done, event.progress.total)
        for event in events
        if event.HasField("progress")
    ]


def as_before(engine: SessionEngine) -> bool:
    return all(engine.held[rank] == RankState() for rank in engine.ranks) and not engine.staged


async def test_it_is_offered(client: Client) -> None:
    profile = await client.profile()
    assert pb.WEIGHT_SOURCE_KIND_SESSION in profile.weight_sources
    assert list(profile.weight_sessions) == [
        pb.WEIGHT_TRANSFER_BACKEND_NCCL,
        pb.WEIGHT_TRANSFER_BACKEND_DISK,
    ]


async def test_the_pieces_make_one_operation(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    begun = await sender.begun()
    (open_one,) = (await client.profile()).state.open_operations
    assert open_one.operation_id == begun.events[0].operation_id
    assert open_one.kind == pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS
    assert await client.generate().finish_reason() == "LENGTH"
    ids = [await sender.sent(sender.chunk(0)), await sender.sent(sender.chunk(1, COMPLETE))]
    committed = await client.order(sender.commit(2))
    assert set(ids) == {begun.events[0].operation_id}
    events = await begun.rest()
    # Every call is answered by the same stream.
    assert committed == events
    assert_whole(events)
    phases = progresses(events)
    assert phases[0] == ("open", 0, 0)
    assert [done for phase, done, _ in phases if phase == "staged"] == [1, 2]
    assert [total for phase, _, total in phases if phase == "receiving"] == [1, 2]
    assert [total for phase, _, total in phases if phase == "completing"] == [2]
    assert phases[-1][0] == "committing"
    result = events[-1].completed.update_weights
    assert (result.weight_version, result.previous_weight_version) == ("v2", "v1")
    assert [one.sha256 for one in result.evidence] == [checksum(rank, "v2") for rank in (0, 1)]
    assert engine.staged == {(ids[0], 0): [0, 1], (ids[0], 1): [0, 1]}
    profile = await client.profile()
    assert profile.state.weights.version == "v2"
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN
    assert not profile.state.open_operations


async def test_the_version_may_be_said_at_the_end(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    await sender.begun()
    await sender.sent(sender.chunk(0, COMPLETE))
    updated = (await client.completed(sender.commit(1, "step-7"))).update_weights
    assert (updated.weight_version, updated.previous_weight_version) == ("step-7", "v1")
    assert [one.sha256 for one in updated.evidence] == [checksum(rank, "step-7") for rank in (0, 1)]
    assert (await client.profile()).state.weights.version == "step-7"


async def test_each_call_is_safe_to_repeat(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    begin, chunk, commit = sender.begin(), sender.chunk(0, COMPLETE), sender.commit(1)
    operation_id = await sender.sent(begin)
    assert await sender.sent(begin) == operation_id
    assert await sender.sent(chunk) == operation_id
    assert await sender.sent(chunk) == operation_id
    assert (await client.operation(idempotency_key=chunk.idempotency_key)).idempotency_key == (
        begin.idempotency_key
    )
    events = await client.order(commit)
    for again in (begin, chunk, commit):
        assert await client.order(again) == events
    assert [phase for phase, *_ in progresses(events)].count("staged") == 1
    assert engine.staged[operation_id, 0] == [0]
    other = sender.chunk(0, "another", idempotency_key=chunk.idempotency_key)
    seen = await refused(client.stream(other))
    assert (seen.code, seen.reason) == (Code.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
    flush = client.flush(idempotency_key=chunk.idempotency_key)
    seen = await refused(client.stream(flush))
    assert (seen.code, seen.reason) == (Code.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")


async def test_chunks_in_parallel_under_one_key(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    operation_id = (await sender.begun()).events[0].operation_id
    chunk = sender.chunk(0, COMPLETE)
    assert set(await asyncio.gather(*(sender.sent(chunk) for _ in range(8)))) == {operation_id}
    assert (await client.completed(sender.commit(1))).changed
    assert engine.staged[operation_id, 1] == [0]


async def test_what_a_session_refuses(client: Client, sender: Sender) -> None:
    begun = await sender.begun()
    operation_id = begun.events[0].operation_id
    nccl = {"nccl": pb.NcclChunk(tensors=[SPEC])}
    ipc = {"ipc": pb.IpcChunk(tensors=[SPEC], handles=[pb.IpcHandle(handle=b"x")])}
    expected = (
        (sender.chunk(1), Code.FAILED_PRECONDITION, "CHUNK_OUT_OF_ORDER"),
        (sender.chunk(0, session_id="another"), Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        (sender.commit(0, session_id="another"), Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        (sender.chunk(0, payload=nccl), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (sender.chunk(0, payload=ipc), Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION"),
        (sender.chunk(0, "../up"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (sender.chunk(0, deadline_ms=5), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (sender.chunk(0, weight_version="v9"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (sender.chunk(0, model="other"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (sender.chunk(0, expected_revision=99), Code.ABORTED, "REVISION_MISMATCH"),
        (sender.chunk(0, session_id=""), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    )
    for request, code, reason in expected:
        seen = await refused(client.stream(request))
        assert (seen.code, seen.reason) == (code, reason), request
    seen = await refused(client.stream(sender.chunk(1)))
    assert seen.metadata["expected_index"] == "0"
    assert seen.metadata["operation_id"] == operation_id
    second = Sender(client, "session-2")
    for begin in (sender.begin(), second.begin()):
        seen = await refused(client.stream(begin))
        assert (seen.code, seen.reason) == (Code.ABORTED, "ENGINE_BUSY")
        assert seen.metadata["operation_id"] == operation_id
    # None of it counted.
    await sender.sent(sender.chunk(0, COMPLETE))
    assert (await client.completed(sender.commit(1))).changed
    late = await refused(client.stream(sender.chunk(1)))
    assert (late.code, late.reason) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")


@pytest.mark.parametrize(
    "begin",
    [
        pb.WeightSession(session_id="s"),
        pb.WeightSession(session_id="s", begin=pb.WeightSessionBegin()),
        pb.WeightSession(session_id="a b", begin=pb.WeightSessionBegin(disk=DISK)),
        pb.WeightSession(session_id="s", begin=pb.WeightSessionBegin(lease_ms=0, disk=DISK)),
        pb.WeightSession(session_id="s", begin=pb.WeightSessionBegin(disk=pb.DiskTransfer())),
        pb.WeightSession(session_id="s", begin=pb.WeightSessionBegin(nccl=GROUP)),
    ],
)
async def test_begins_that_make_no_sense(begin: pb.WeightSession, client: Client) -> None:
    seen = await refused(client.stream(client.update(session=begin, pause="drain")))
    assert seen.code is Code.INVALID_ARGUMENT
    assert not (await client.profile()).state.open_operations


async def test_the_ways_that_are_not_offered(client: Client, sender: Sender) -> None:
    seen = await refused(client.stream(sender.begin(transfer={"ipc": pb.IpcTransfer()})))
    assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION")


async def test_abort_changes_nothing(client: Client, sender: Sender, engine: SessionEngine) -> None:
    begun = await sender.begun()
    before = await client.profile()
    await sender.sent(sender.chunk(0))
    await told(begun, "staged", 1)
    abort = sender.abort("the loss is not a number")
    events = await client.order(abort)
    assert_whole(events)
    assert events[-1].HasField("cancelled")
    (warning,) = [event.warning for event in events if event.HasField("warning")]
    assert (warning.reason, warning.message) == ("SESSION_ABORTED", "the loss is not a number")
    assert as_before(engine)
    assert await client.order(abort) == events
    after = await client.profile()
    assert after.state.weights == before.state.weights
    assert after.revision == before.revision
    assert (await client.completed(client.update(pause="drain"))).changed


async def test_abort_ends_a_piece_that_hangs(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    engine.script("stage", hang, 1)
    begun = await sender.begun()
    await sender.sent(sender.chunk(0))
    await told(begun, "receiving", 0)
    assert (await client.order(sender.abort()))[-1].HasField("cancelled")
    assert as_before(engine)


async def test_cancelling_the_operation_ends_the_session(client: Client, sender: Sender) -> None:
    begun = await sender.begun()
    await client.cancel(begun.events[0].operation_id)
    assert (await begun.end()).HasField("cancelled")
    seen = await refused(client.stream(sender.chunk(0)))
    assert seen.reason == "SESSION_NOT_FOUND"


async def test_the_lease_ends_a_silent_session(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    begun = await sender.begun(lease_ms=200)
    failed = (await begun.end()).failed
    assert (failed.reason, failed.effect) == ("SESSION_LEASE_EXPIRED", pb.FAILURE_EFFECT_NONE)
    assert failed.retryable
    assert as_before(engine)
    assert (await client.completed(client.update(pause="drain"))).changed


async def test_the_lease_also_ends_a_piece_that_hangs(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    engine.script("stage", hang, 0)
    begun = await sender.begun(lease_ms=300)
    await sender.sent(sender.chunk(0))
    failed = (await begun.end()).failed
    assert (failed.reason, failed.effect) == ("SESSION_LEASE_EXPIRED", pb.FAILURE_EFFECT_NONE)
    assert as_before(engine)


async def test_every_call_renews_the_lease_and_commit_ends_it(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))
    lease_s = 2.0
    begun = await sender.begun(lease_ms=int(lease_s * 1000))
    chunk = sender.chunk(0, COMPLETE)
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    while loop.time() - began_at < 1.5 * lease_s:
        await sender.sent(chunk)  # the same again, which is a call all the same
        await asyncio.sleep(lease_s / 20)
    await sender.sent(sender.commit(1))
    await told(begun, "completing", 1)
    # The piece is staged: this waits for longer than the lease, which must not matter any more.
    await asyncio.sleep(1.2 * lease_s)
    let_go.set()
    assert (await begun.end()).HasField("completed")


async def test_another_count_at_commit_aborts(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    await sender.begun()
    await sender.sent(sender.chunk(0, COMPLETE))
    failed = await client.failed(sender.commit(2))
    assert (failed.reason, failed.effect) == ("CHUNK_COUNT_MISMATCH", pb.FAILURE_EFFECT_NONE)
    assert as_before(engine)


async def test_nothing_is_taken_after_commit(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))
    await sender.begun()
    await sender.sent(sender.chunk(0, COMPLETE))
    committing = await client.begin(sender.commit(1))
    for request in (sender.chunk(1), sender.commit(1), sender.abort()):
        seen = await refused(client.stream(request))
        assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "SESSION_CLOSED")
    let_go.set()
    assert (await committing.end()).HasField("completed")


@pytest.mark.parametrize("phase", ["open", "stage", "prepare", "commit"])
async def test_a_rank_that_fails(
    phase: str, client: Client, sender: Sender, engine: SessionEngine
) -> None:
    engine.script(phase, fault, 1)
    begun = await client.begin(sender.begin(pause="abort"))
    if phase != "open":
        await sender.sent(sender.chunk(0, COMPLETE))
    if phase in ("prepare", "commit"):
        await sender.sent(sender.commit(1))
    failed = (await begun.end()).failed
    assert (failed.reason, list(failed.ranks)) == ("RANK_BROKEN", [1])
    effect = pb.FAILURE_EFFECT_ROLLED_BACK if phase == "commit" else pb.FAILURE_EFFECT_NONE
    assert failed.effect == effect
    assert as_before(engine)
    profile = await client.profile()
    assert profile.state.weights.state == pb.WEIGHTS_STATE_VALID
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN


async def test_pieces_that_are_no_whole(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    await sender.begun()
    await sender.sent(sender.chunk(0))
    failed = await client.failed(sender.commit(1))
    assert (failed.reason, failed.effect) == ("TENSOR_MISSING", pb.FAILURE_EFFECT_NONE)
    assert as_before(engine)


async def test_a_rank_that_is_lost_while_the_session_waits(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    begun = await sender.begun()
    gone = RankReport(1, RankHealth.FAILED, "killed")
    engine.observation = replace(engine.observation, ranks=(gone,))
    failed = (await begun.end()).failed
    assert (failed.reason, failed.retryable, list(failed.ranks)) == ("RANK_LOST", True, [1])


async def test_no_more_wait_than_can_be_kept(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("stage", until_set(let_go))
    begun = await sender.begun()
    for index in range(MOST_WAITING):
        await sender.sent(sender.chunk(index, COMPLETE))
    late = sender.chunk(MOST_WAITING)
    seen = await refused(client.stream(late))
    assert (seen.code, seen.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CHUNKS")
    let_go.set()
    await told(begun, "staged", MOST_WAITING)
    await sender.sent(late)
    assert (await client.completed(sender.commit(MOST_WAITING + 1))).changed


async def test_a_restart_in_the_middle(
    client: Client, sender: Sender, double: EngineDouble
) -> None:
    begin, chunk = sender.begin(), sender.chunk(0, COMPLETE)
    operation_id = await sender.sent(begin)
    await sender.sent(chunk)
    await double.restart()
    await client.profile()
    for again in (begin, chunk):
        events = await client.order(again)
        assert {event.operation_id for event in events} == {operation_id}
        assert events[-1].failed.reason == "ENGINE_RESTARTED"
    seen = await refused(client.stream(sender.chunk(1)))
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")
    assert isinstance(double.engine, SessionEngine)
    assert as_before(double.engine)
    assert (await client.profile()).state.weights.version == "v1"


async def test_progress_of_the_runtime_does_not_hide_the_pieces(
    client: Client, sender: Sender, engine: SessionEngine
) -> None:
    engine.progress = (Progress("checking", 1, 2, "tensors"),)
    await sender.begun()
    await sender.sent(sender.chunk(0, COMPLETE))
    events = await client.order(sender.commit(1))
    assert ("staged", 1, 1) in progresses(events)


async def test_a_store_of_the_release_before(tmp_path: Path) -> None:
    """It is taken over, and its keys still stand."""
    folder = tmp_path / "engine"
    async with running_engine(folder, make_engine=make) as double, client_of(double) as client:
        paused = client.pause()
        earlier = await client.order(paused)
    with closing(sqlite3.connect(folder / "operations.sqlite3")) as store, store:
        store.execute("DROP TRIGGER first_keys_are_new")
        store.execute("DROP TABLE further_keys")
        store.execute("PRAGMA user_version = 1")
    async with running_engine(folder, make_engine=make) as double, client_of(double) as client:
        assert await client.order(paused) == earlier
        sender = Sender(client)
        chunk = sender.chunk(0)
        operation_id = await sender.sent(sender.begin())
        assert await sender.sent(chunk) == operation_id
        assert (await client.operation(idempotency_key=chunk.idempotency_key)).operation_id == (
            operation_id
        )
