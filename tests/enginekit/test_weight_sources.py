"""Where weights come from: what reaches the ranks, and what is refused before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.commands import UpdateWeights
from app.domain.operation import Progress
from app.domain.weight_sources import InlineWeights
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, refused
from tests.enginekit.full_engine import FullEngine

pytestmark = pytest.mark.anyio
Code = grpc.StatusCode
SPEC = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[2, 2])


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


async def test_inline_weights_reach_the_ranks_and_no_store(
    client: Client, engine: FullEngine, tmp_path: Path
) -> None:
    data = b"canary-canary-16"
    seen: list[Any] = []

    async def look(order: Order, _rank: int) -> None:
        if isinstance(order.command, UpdateWeights):
            seen.append(order.command.source)
            order.report(Progress("staging", 1, 1, "tensors"))

    engine.script("prepare", look, 0)
    inline = pb.InlineWeights(tensors=[pb.InlineTensor(spec=SPEC, data=data)])
    order = client.update(pause="drain", tensors=pb.TensorWeights(inline=inline))
    assert (await client.completed(order)).changed
    (source,) = seen
    assert isinstance(source, InlineWeights)
    assert source.tensors[0].data == data
    assert source.tensors[0].sha256 == hashlib.sha256(data).hexdigest()
    files = [path.read_bytes() for path in (tmp_path / "engine").iterdir()]
    assert any(b"update_weights" in content for content in files)
    assert not any(b"canary" in content for content in files)
    # The same key with other bytes is another order.
    other = pb.UpdateWeightsRequest()
    other.CopyFrom(order)
    other.tensors.inline.tensors[0].data = b"canary-canary-17"
    assert (await refused(client.stream(other))).code is Code.ALREADY_EXISTS
    assert (await client.order(order))[-1].HasField("completed")
    assert len(seen) == 1


SHARED = pb.SharedMemoryWeights(
    object_name="/engine-1",
    size_bytes=16,
    tensors=[pb.SharedMemoryTensor(spec=SPEC, offset_bytes=0, length_bytes=16)],
    sha256=b"\1" * 32,
)


GROUP = pb.DistributedWeights(
    backend=pb.COLLECTIVE_BACKEND_GLOO,
    address="trainer",
    port=29500,
    world_size=3,
    rank_offset=1,
    group="g",
    tensors=[SPEC],
)


@pytest.mark.parametrize(
    "source",
    [
        {"disk": pb.DiskWeights(path="/m", digests=[pb.FileDigest(name="a", sha256=b"\1" * 32)])},
        {"tensors": pb.TensorWeights(shared_memory=SHARED)},
        {"distributed": GROUP},
    ],
    ids=["disk", "shared memory", "distributed"],
)
async def test_every_source_comes_through(
    source: dict[str, Any], client: Client, engine: FullEngine
) -> None:
    pause = pb.PauseAround(mode=1, new_requests=1, hold_limit_ms=500)  # type: ignore[arg-type]
    order = client.update(**source, under_pause=None)
    order.pause.CopyFrom(pause)
    assert (await client.completed(order)).changed


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        copy.ClearField(name)
        copy.MergeFrom(type(message)(**{name: value}))
    return copy


def update(**fields: Any) -> pb.UpdateWeightsRequest:
    known: dict[str, Any] = {
        "idempotency_key": "k",
        "disk": pb.DiskWeights(path="/m"),
        "weight_version": "v2",
        "cache_policy": 1,
        "components": [1],
        "pause": pb.PauseAround(mode=pb.PAUSE_MODE_DRAIN),
    }
    return pb.UpdateWeightsRequest(**{k: v for k, v in (known | fields).items() if v is not None})


def shared(**fields: Any) -> pb.UpdateWeightsRequest:
    memory = changed(SHARED, **fields)
    return update(disk=None, tensors=pb.TensorWeights(shared_memory=memory))


def one_shared(**fields: Any) -> list[Any]:
    return [changed(SHARED.tensors[0], **fields)]


def inline(*tensors: Any) -> pb.UpdateWeightsRequest:
    told = pb.InlineWeights(tensors=list(tensors))
    return update(disk=None, tensors=pb.TensorWeights(inline=told))


def group(**fields: Any) -> pb.UpdateWeightsRequest:
    return update(disk=None, distributed=changed(GROUP, **fields))


def pausing(**fields: Any) -> pb.UpdateWeightsRequest:
    return update(pause=pb.PauseAround(**fields))


MALFORMED: list[tuple[Any, str]] = [
    (update(disk=None), "source"),
    (update(disk=None, tensors=pb.TensorWeights()), "tensors"),
    (update(disk=pb.DiskWeights()), "disk.path"),
    (
        update(disk=pb.DiskWeights(path="/m", digests=[pb.FileDigest(name="a", sha256=b"x")])),
        "disk.digests[0].sha256",
    ),
    (update(weight_version=None), "weight_version"),
    (update(cache_policy=None), "cache_policy"),
    (update(cache_policy=9), "cache_policy"),
    (update(components=[]), "components"),
    (update(components=[1, 0]), "components[1]"),
    (update(components=[1, 1]), "components"),
    (update(pause=None), "under_pause"),
    (update(pause=None, under_pause=pb.UnderPause(pause_epoch=0)), "under_pause.pause_epoch"),
    (pausing(), "pause.mode"),
    (pausing(mode=1, new_requests=0), "pause.new_requests"),
    (pausing(mode=1, new_requests=2, hold_limit_ms=5), "pause.hold_limit_ms"),
    (pausing(mode=1, hold_limit_ms=10**9), "pause.hold_limit_ms"),
    (inline(), "tensors.inline.tensors"),
    (
        inline(pb.InlineTensor(spec=SPEC, data=b"short")),
        "tensors.inline.tensors[0].data",
    ),
    (
        inline(pb.InlineTensor(spec=changed(SPEC, dtype=0), data=b"")),
        "tensors.inline.tensors[0].spec.dtype",
    ),
    (shared(object_name=""), "tensors.shared_memory.object_name"),
    (
        shared(tensors=one_shared(length_bytes=15)),
        "tensors.shared_memory.tensors[0].length_bytes",
    ),
    (shared(tensors=one_shared(offset_bytes=1)), "tensors.shared_memory.tensors[0]"),
    (group(backend=0), "distributed.backend"),
    (group(port=0), "distributed.port"),
    (group(rank_offset=2), "distributed.rank_offset"),
    (group(source_rank=1), "distributed.source_rank"),
]


@pytest.mark.parametrize(("request_", "field"), MALFORMED)
async def test_malformed_orders_are_refused(
    request_: Any, field: str, client: Client, double: EngineDouble
) -> None:
    seen = await refused(client.stream(request_))
    assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, (field,))
    assert double.orders == []


async def test_sessions_are_not_offered(client: Client) -> None:
    begin = pb.WeightSession(session_id="s", begin=pb.WeightSessionBegin())
    seen = await refused(client.stream(client.update(session=begin, pause="drain")))
    assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION")
    profile = await client.profile()
    assert pb.WEIGHT_SOURCE_KIND_SESSION not in profile.weight_sources
    assert list(profile.weight_sessions) == []
