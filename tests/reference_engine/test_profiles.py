"""Profiles of a real engine: what is recorded, where it ends up, and what is left when it fails."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.reference_engine.errors import CannotServe
from app.reference_engine.limits import CoreSettings
from app.reference_engine.profile_shelf import ProfileLimits
from app.reference_engine.profiling import opened_root
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.reference_engine.calling import Clients, Told, clients_of, key
from tests.reference_engine.ranks import nursery
from tests.reference_engine.serving import PATIENCE_S, eventually

pytestmark = pytest.mark.anyio

TORCH, MEMORY, DEVICE = pb.PROFILER_KIND_TORCH, pb.PROFILER_KIND_MEMORY, pb.PROFILER_KIND_DEVICE
Code = grpc.StatusCode


class Profiled:
    """One served engine, and how its profiles are ordered."""

    def __init__(self, engine: ServedEngine, clients: Clients, root: Path) -> None:
        self.engine = engine
        self.clients = clients
        self.root = root

    async def start(self, kind: pb.ProfilerKind.ValueType = TORCH, **fields: Any) -> str:
        request = pb.StartProfileRequest(idempotency_key=key(), kind=kind, **fields)
        started = await self.clients.admin.StartProfile(request, timeout=PATIENCE_S)
        assert started.state == pb.PROFILE_STATE_RUNNING
        profile_id: str = started.profile_id
        return profile_id

    async def stop(self, profile_id: str) -> pb.ProfileState.ValueType:
        request = pb.StopProfileRequest(idempotency_key=key(), profile_id=profile_id)
        answer = await self.clients.admin.StopProfile(request, timeout=PATIENCE_S)
        state: pb.ProfileState.ValueType = answer.state
        return state

    async def ended(self, profile_id: str) -> pb.AdminOperation:
        wanted = pb.GetAdminOperationRequest(operation_id=profile_id)
        seen: list[pb.AdminOperation] = []

        async def over() -> bool:
            seen[:] = [await self.clients.admin.GetOperation(wanted, timeout=PATIENCE_S)]
            return bool(seen[0].WhichOneof("outcome"))

        await eventually(over)
        return seen[0]

    async def recorded(self, profile_id: str) -> list[dict[str, Any]]:
        """The traces of all ranks, each checked against what was said of it."""
        operation = await self.ended(profile_id)
        assert operation.WhichOneof("outcome") == "completed", operation
        artifacts = operation.completed.profile.artifacts
        assert [one.rank for one in artifacts] == list(range(len(self.engine.rank_pids)))
        return [self._read(one) for one in artifacts]

    def _read(self, artifact: pb.ProfileArtifact) -> dict[str, Any]:
        assert artifact.media_type == "application/gzip"
        content = (self.root / artifact.path).read_bytes()
        assert len(content) == artifact.size_bytes
        assert hashlib.sha256(content).digest() == artifact.sha256
        trace = json.loads(gzip.decompress(content))
        assert isinstance(trace, dict)
        for event in trace["traceEvents"]:
            assert {"ph", "ts", "name"} <= event.keys()
        assert trace["chadburn"]["rank"] == artifact.rank
        return trace

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@asynccontextmanager
async def profiled(tiny: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[Profiled]:
    core = {name: settings.pop(name) for name in tuple(settings) if name in _CORE}
    core.setdefault("step_delay_ms", 5)
    of_engine = EngineSettings(
        nursery=nursery(),
        data_dir=tmp_path / "data",
        checkpoint=tiny,
        insecure_loopback=True,
        core=CoreSettings(torch_threads=1, device="cpu", **core),
        **settings,
    )
    root = of_engine.profile_root or of_engine.data_dir / "profiles"
    async with served(of_engine) as engine, clients_of(engine) as clients:
        yield Profiled(engine, clients, root)


_CORE = frozenset(CoreSettings.__dataclass_fields__)


def names(trace: dict[str, Any], phase: str = "X") -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == phase]


def steps(trace: dict[str, Any]) -> list[str]:
    found = [event for event in trace["traceEvents"] if event["name"].startswith("engine step")]
    found = [event for event in found if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: float(event["ts"]))]


@pytest.fixture(scope="module")
async def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Profiled]:
    """Two ranks, for tests that leave them whole."""
    folder = tmp_path_factory.mktemp("pair")
    async with profiled(tiny, folder, tensor_parallel_size=2) as it:
        yield it


@pytest.fixture(scope="module")
async def single(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Profiled]:
    folder = tmp_path_factory.mktemp("single")
    async with profiled(tiny, folder, profile_root=folder / "elsewhere") as it:
        yield it


async def same_steps(it: Profiled, world_size: int) -> None:
    before = (await it.clients.profile()).revision
    plain = await it.clients.generate("plain", max_tokens=60).whole()
    call = it.clients.generate("beside", max_tokens=1000)
    profile_id = await it.start(steps=5, record_shapes=True)
    traces = await it.recorded(profile_id)
    assert len(traces) == world_size
    for trace in traces:
        assert steps(trace) == [f"engine step {number}" for number in range(1, 6)]
        assert {"aten::linear", "aten::matmul"} <= set(names(trace))
        assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
        said = trace["chadburn"]
        assert (said["steps"], said["ended_by"], said["world_size"]) == (5, "steps", world_size)
        assert (said["profile_id"], said["profiler"]) == (profile_id, "torch")
    if world_size > 1:
        assert any("gloo" in name or "c10d" in name for name in names(traces[0]))
    await call.after(60)
    assert call.heard.text.startswith(plain.text)
    await call.hang_up()
    assert (await it.clients.profile()).revision == before


async def test_every_rank_records_the_same_steps_and_the_tokens_are_the_same(
    pair: Profiled,
) -> None:
    await same_steps(pair, 2)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 4])
async def test_other_world_sizes_do_too(tiny: Path, tmp_path: Path, world_size: int) -> None:
    async with profiled(tiny, tmp_path, tensor_parallel_size=world_size) as it:
        await same_steps(it, world_size)


async def test_memory_over_time_until_it_is_stopped(single: Profiled) -> None:
    it = single
    profile_id = await it.start(MEMORY)
    released = await it.clients.release(
        pb.RESOURCE_KIND_WEIGHTS, content=pb.CONTENT_POLICY_PRESERVE
    ).completed()
    held = released.release_resources.memory[0].bytes_before
    stopped = await it.stop(profile_id)
    assert stopped in (pb.PROFILE_STATE_EXPORTING, pb.PROFILE_STATE_READY)
    (trace,) = await it.recorded(profile_id)
    assert await it.stop(profile_id) == pb.PROFILE_STATE_READY
    assert set(names(trace, "C")) == {"resident set", "weights", "KV cache", "host copies"}
    sizes = {
        name: [e["args"]["bytes"] for e in trace["traceEvents"] if e["name"] == name]
        for name in ("weights", "host copies", "resident set")
    }
    assert (sizes["weights"][0], sizes["weights"][-1]) == (held, 0)
    assert (sizes["host copies"][0], sizes["host copies"][-1]) == (0, held)
    assert min(sizes["resident set"]) > 1 << 20
    assert trace["chadburn"]["ended_by"] == "stop"
    await it.clients.restore(pb.RESOURCE_KIND_WEIGHTS)
    await it.clients.resume()


async def test_time_bounds_it_also_where_nothing_runs(single: Profiled) -> None:
    traces = await single.recorded(await single.start(duration_ms=30, with_stack=True))
    assert [steps(trace) for trace in traces] == [[]]


async def test_a_release_goes_on_beside_it_and_it_does_not_start_during_one(
    single: Profiled,
) -> None:
    it = single
    profile_id = await it.start()
    await it.clients.generate("a", max_tokens=5).whole()
    kv_cache = (pb.RESOURCE_KIND_KV_CACHE, pb.CONTENT_POLICY_DISCARD)
    await it.clients.release(kv_cache[0], content=kv_cache[1]).completed()
    await it.clients.restore(kv_cache[0])
    await it.clients.resume()
    await it.clients.generate("b", max_tokens=5).whole()
    await it.stop(profile_id)
    (trace,) = await it.recorded(profile_id)
    assert len(steps(trace)) >= 10
    long = await it.clients.generate("c", max_tokens=1000).after(1)
    release = it.clients.release(kv_cache[0], content=kv_cache[1])
    await release.until("accepted")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await it.start()
    assert refused.value.code() is Code.FAILED_PRECONDITION
    await long.hang_up()
    await release.completed()
    await it.clients.restore(kv_cache[0])
    await it.clients.resume()


async def test_what_is_not_there_is_not_offered(pair: Profiled) -> None:
    kept = pair.left
    assert set((await pair.clients.profile()).profiler_kinds) == {TORCH, MEMORY}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pair.start(DEVICE)
    assert refused.value.code() is Code.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pair.start(MEMORY, with_stack=True)
    assert refused.value.code() is Code.INTERNAL
    assert pair.left == kept


async def test_what_is_cancelled_or_late_leaves_nothing(pair: Profiled) -> None:
    kept = pair.left
    profile_id = await pair.start()
    await pair.clients.cancel(profile_id)
    assert (await pair.ended(profile_id)).WhichOneof("outcome") == "cancelled"
    profile_id = await pair.start(deadline_ms=1500)
    assert (await pair.ended(profile_id)).failed.reason == "DEADLINE_EXCEEDED"

    async def clean() -> bool:
        return pair.left == kept

    await eventually(clean)
    await pair.recorded(await pair.start(duration_ms=10))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
async def test_a_rank_that_is_lost_ends_the_profile(
    tiny: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with profiled(tiny, tmp_path, tensor_parallel_size=2, step_deadline_s=2.0) as it:
        profile_id = await it.start()
        os.kill(it.engine.rank_pids[1], number)
        began = time.monotonic()
        operation = await it.ended(profile_id)
        # A death is told within 5 s, silence within the limit of a rank and 5 s more.
        assert time.monotonic() - began < 10 * 7
        assert operation.failed.reason == "RANK_LOST"
        assert list(operation.failed.ranks) == [1]
        assert "rank 1" in operation.failed.message

        async def clean() -> bool:
            return it.left == []

        await eventually(clean)


async def test_other_ranks_end_it_and_so_many_are_kept(tiny: Path, tmp_path: Path) -> None:
    limits = ProfileLimits(count=1)
    async with profiled(tiny, tmp_path, profile_limits=limits) as it:
        lost = await it.start(MEMORY)
        request = pb.ReconfigureServingRequest(
            idempotency_key=key(),
            tensor_parallel_size=2,
            drain=pb.DRAIN_RULE_WAIT,
            whole_engine=pb.WholeEngine(),
        )
        told = Told(it.clients.admin.ReconfigureServing(request, timeout=PATIENCE_S))
        await told.completed()
        failed = (await it.ended(lost)).failed
        assert (failed.reason, failed.retryable, list(failed.ranks)) == ("RANKS_REPLACED", True, [])
        assert it.left == []
        kept = []
        for _ in range(2):
            kept.append(await it.start(MEMORY, duration_ms=30))
            assert (await it.ended(kept[-1])).WhichOneof("outcome") == "completed"
        assert it.left == kept[1:]


async def test_folders_that_cannot_be_written_to(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "old.unfinished").mkdir(parents=True)
    (root / "old.unfinished" / "rank-0.json").write_text("{")
    (root / "kept").mkdir()
    async with profiled(tiny, tmp_path, profile_root=root) as it:
        assert it.left == ["kept"]  # not what an earlier life did not finish
        with pytest.raises(CannotServe, match="another engine"), opened_root(root):
            pass
        (root / "kept").rmdir()
        root.rmdir()
        root.write_text("")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.start()
        assert refused.value.code() is Code.INTERNAL
        assert "directory" in (refused.value.details() or "")
        root.unlink()
        root.mkdir()
        for kind in (TORCH, MEMORY):
            await full_disk(it, kind)
        profile_id = await it.start()
        root.rename(tmp_path / "away")
        await it.stop(profile_id)
        assert (await it.ended(profile_id)).failed.reason == "PROFILE_NOT_WRITTEN"
        assert (await it.clients.generate("a", max_tokens=5).whole()).tokens == 5


async def full_disk(it: Profiled, kind: pb.ProfilerKind.ValueType) -> None:
    """As it looks to a rank: it may not write more than so many bytes to a file."""
    (pid,) = it.engine.rank_pids
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
    profile_id = await it.start(kind)
    await it.clients.generate("a", max_tokens=5).whole()
    await it.stop(profile_id)
    operation = await it.ended(profile_id)
    assert operation.WhichOneof("outcome") == "failed", operation
    assert it.left == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
