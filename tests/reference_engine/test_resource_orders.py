"""Releases, restores and updates through the kit, over real gRPC, with real rank processes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.reference_engine.errors import CannotServe
from app.reference_engine.limits import CoreSettings
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2
from tests.reference_engine.calling import Clients, clients_of
from tests.reference_engine.ranks import nursery

pytestmark = pytest.mark.anyio

WEIGHTS, KV_CACHE = pb.RESOURCE_KIND_WEIGHTS, pb.RESOURCE_KIND_KV_CACHE
PRESERVE, DISCARD = pb.CONTENT_POLICY_PRESERVE, pb.CONTENT_POLICY_DISCARD
OPEN, PAUSED = pb.ADMISSION_STATE_OPEN, pb.ADMISSION_STATE_PAUSED
VALID, MISSING = pb.WEIGHTS_STATE_VALID, pb.WEIGHTS_STATE_MISSING
LENGTH = generation_pb2.FINISH_REASON_LENGTH
FILE = "model.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"
LONG = 300
PREFIX = f"chadburn-test-{uuid4().hex}-"  # other engines are tried at the same time


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the small model."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


def settings(checkpoint: Path, data_dir: Path, ranks: int, *roots: Path) -> EngineSettings:
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        weight_version="v1",
        weights_roots=roots,
        shared_prefix=PREFIX,
        insecure_loopback=True,
        core=CoreSettings(
            torch_threads=1, step_delay_ms=2, kv_blocks=4096, tensor_parallel_size=ranks
        ),
        stop_grace_s=0.0,
    )


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module", params=[1])
async def engine(
    request: pytest.FixtureRequest,
    tiny: Path,
    other: Path,
    allowed: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServedEngine]:
    data_dir = tmp_path_factory.mktemp("engine")
    roots = (tiny, other, allowed)
    async with served(settings(tiny, data_dir, request.param, *roots)) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine, tiny: Path) -> AsyncIterator[Clients]:
    """Every test leaves the engine with the first version, open and idle."""
    async with clients_of(engine) as connected:
        yield connected
        await connected.abort(None)
        state = (await connected.profile()).state
        if state.released:
            await connected.restore(*state.released)
        if state.weights != pb.WeightsStatus(version="v1", state=VALID):
            await connected.update("v1", disk=disk(tiny)).completed()
        if (await connected.profile()).state.admission == PAUSED:
            await connected.resume()


def disk(directory: Path, sha256: bytes | None = None) -> pb.DiskWeights:
    digests = [] if sha256 is None else [pb.FileDigest(name=FILE, sha256=sha256)]
    return pb.DiskWeights(path=str(directory), digests=digests)


async def said(clients: Clients) -> str:
    heard = await clients.generate(uuid4().hex, 24, seed=3).whole()
    assert heard.finished is not None, heard
    assert heard.finished.reason == LENGTH
    return heard.text


async def test_profile_tells_what_can_be_done(clients: Clients) -> None:
    profile = await clients.profile()
    cancellable = {one.kind for one in profile.operations if one.cancellable}
    assert cancellable >= {
        pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES,
        pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES,
        pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS,
    }
    assert {one.kind: set(one.content) for one in profile.resources} == {
        WEIGHTS: {PRESERVE, DISCARD},
        KV_CACHE: {PRESERVE, DISCARD},
    }
    assert set(profile.weight_sources) == {
        pb.WEIGHT_SOURCE_KIND_DISK,
        pb.WEIGHT_SOURCE_KIND_INLINE,
        pb.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
        pb.WEIGHT_SOURCE_KIND_SESSION,
    }
    assert set(profile.cache_policies) == {pb.CACHE_POLICY_FLUSH, pb.CACHE_POLICY_KEEP}
    assert list(profile.components) == [pb.COMPONENT_TARGET]


async def test_discarded_cache_comes_back_and_serves(clients: Clients) -> None:
    before = await said(clients)
    completed = await clients.release(KV_CACHE, content=DISCARD).completed()
    (held,) = completed.release_resources.memory
    assert (held.rank, held.resource) == (0, KV_CACHE)
    assert held.bytes_before > 30 << 20
    assert held.bytes_after < held.bytes_before / 4
    state = (await clients.profile()).state
    assert (list(state.released), state.admission) == ([KV_CACHE], PAUSED)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await clients.resume()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    restored = await clients.restore(KV_CACHE)
    (again,) = restored.restore_resources.memory
    assert (again.bytes_before, again.bytes_after) == (0, held.bytes_before)
    assert (await clients.profile()).state.admission == PAUSED
    await clients.resume()
    assert await said(clients) == before


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
async def test_preserved_weights_say_the_same_again(clients: Clients, engine: ServedEngine) -> None:
    before = await said(clients)
    completed = await clients.release(WEIGHTS, KV_CACHE, content=PRESERVE).completed()
    memory = completed.release_resources.memory
    ranks = range(len(engine.rank_pids))
    assert sorted((one.rank, one.resource) for one in memory) == [
        (rank, kind) for rank in ranks for kind in (WEIGHTS, KV_CACHE)
    ]
    assert all(one.bytes_after < one.bytes_before / 4 for one in memory), memory
    assert (await clients.profile()).state.weights.state == VALID
    await clients.restore(WEIGHTS)
    assert list((await clients.profile()).state.released) == [KV_CACHE]
    await clients.restore(KV_CACHE)
    await clients.resume()
    assert await said(clients) == before


async def test_what_was_preserved_can_be_discarded(clients: Clients) -> None:
    await clients.release(WEIGHTS, content=PRESERVE).completed()
    completed = await clients.release(WEIGHTS, content=DISCARD).completed()
    assert completed.changed
    await clients.restore(WEIGHTS)
    assert (await clients.profile()).state.weights.state == MISSING


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
async def test_discarded_weights_are_missing_until_an_update(
    clients: Clients, engine: ServedEngine, other: Path
) -> None:
    before = await said(clients)
    await clients.release(WEIGHTS, content=DISCARD).completed()
    await clients.restore(WEIGHTS)
    state = (await clients.profile()).state
    assert (list(state.released), state.weights.state) == ([], MISSING)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await clients.resume()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    digest = hashlib.sha256((other / FILE).read_bytes()).digest()
    completed = await clients.update(
        "v2", disk=disk(other, digest), under_pause=pb.UnderPause()
    ).completed()
    evidence = completed.update_weights.evidence
    assert [one.rank for one in evidence] == list(range(len(engine.rank_pids)))
    assert all(one.tensors and one.bytes and len(one.sha256) == 32 for one in evidence)
    assert completed.verification == pb.VERIFICATION_VERIFIED
    weights = (await clients.profile()).state.weights
    assert (weights.version, weights.state) == ("v2", VALID)
    await clients.resume()
    assert await said(clients) != before


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
async def test_file_that_can_not_be_used_changes_nothing(
    clients: Clients, other: Path, allowed: Path
) -> None:
    before, profile = await said(clients), await clients.profile()
    damaged = Path(shutil.copytree(other, allowed / uuid4().hex))
    tensors = load_file(damaged / FILE)
    tensors[GATE] = tensors[GATE][:-1].clone()
    save_file(tensors, damaged / FILE)
    end = await clients.update("v2", disk=disk(damaged)).end()
    assert end.WhichOneof("event") == "failed"
    assert GATE in end.failed.message
    assert end.failed.ranks
    assert end.failed.effect == pb.FAILURE_EFFECT_NONE
    after = await clients.profile()
    assert after.state.weights == profile.state.weights
    assert after.state.admission == OPEN
    assert await said(clients) == before


async def test_only_allowed_roots_are_read(clients: Clients, tmp_path: Path, allowed: Path) -> None:
    outside = ensure_tiny_checkpoint(tmp_path, 2)
    link = allowed / uuid4().hex
    link.symlink_to(outside)
    for path in (outside, link, allowed / "nothing"):
        end = await clients.update("v2", disk=disk(path)).end()
        assert end.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert end.failed.reason == "SOURCE_REFUSED"
    assert (await clients.profile()).state.weights.version == "v1"


async def test_update_around_a_pause_goes_on_by_itself(clients: Clients, other: Path) -> None:
    call = await clients.generate("long", LONG).after(5)
    completed = await clients.update(
        "v2", disk=disk(other), pause=pb.PauseAround(mode=pb.PAUSE_MODE_KEEP)
    ).completed()
    assert completed.update_weights.previous_weight_version == "v1"
    assert [one.kind for one in completed.update_weights.flushed] == [pb.CACHE_KIND_PREFIX]
    heard = await call.whole()
    assert heard.finished is not None
    assert (heard.finished.reason, heard.tokens) == (LENGTH, LONG)
    assert (await clients.profile()).state.admission == OPEN


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{PREFIX}*")}


def spec(name: str, tensor: torch.Tensor) -> pb.TensorSpec:
    return pb.TensorSpec(name=name, dtype=pb.TENSOR_DTYPE_FLOAT32, shape=list(tensor.shape))


async def test_tensors_in_the_order_and_in_shared_memory(clients: Clients, other: Path) -> None:
    """All three ways bring the same weights, proved by checksum, and leave no segment behind."""
    found = segments()
    from_disk = await clients.update("v2", disk=disk(other)).completed()
    expected = from_disk.update_weights.evidence
    new = {name: tensor.float().contiguous() for name, tensor in load_file(other / FILE).items()}
    whole = [
        pb.InlineTensor(spec=spec(name, one), data=one.numpy().tobytes())
        for name, one in new.items()
    ]
    inline = pb.TensorWeights(inline=pb.InlineWeights(tensors=whole))
    completed = await clients.update("v3", tensors=inline).completed()
    assert completed.update_weights.evidence == expected
    part = pb.TensorWeights(inline=pb.InlineWeights(tensors=whole[1:]))
    end = await clients.update("v4", tensors=part).end()
    assert whole[0].spec.name in end.failed.message
    assert segments() == found

    path = Path("/dev/shm") / f"{PREFIX}{uuid4().hex}"
    content = b"".join(one.data for one in whole)
    path.touch(0o600)
    try:
        path.write_bytes(content)
        at, placed = 0, []
        for one in whole:
            placed.append(
                pb.SharedMemoryTensor(spec=one.spec, offset_bytes=at, length_bytes=len(one.data))
            )
            at += len(one.data)
        for sha256, size, fits in (
            (hashlib.sha256(content).digest(), at, True),
            (bytes(32), at, False),
            (b"", at + 1, False),
        ):
            shared = pb.SharedMemoryWeights(
                object_name=path.name, size_bytes=size, tensors=placed, sha256=sha256
            )
            told = clients.update("v5", tensors=pb.TensorWeights(shared_memory=shared))
            if fits:
                assert (await told.completed()).update_weights.evidence == expected
            else:
                assert (await told.end()).failed.reason == "SOURCE_REFUSED"
    finally:
        path.unlink()
    assert (await clients.profile()).state.weights.version == "v5"


async def test_without_roots_nothing_comes_from_disk(tiny: Path, tmp_path: Path) -> None:
    missing = settings(tiny, tmp_path, 1, tmp_path / "nothing")
    with pytest.raises(CannotServe, match="nothing"):
        async with served(missing):
            pass
    async with served(settings(tiny, tmp_path, 1)) as bare, clients_of(bare) as clients:
        profile = await clients.profile()
        assert pb.WEIGHT_SOURCE_KIND_DISK not in profile.weight_sources
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await clients.update("v2", disk=disk(tiny)).end()
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
