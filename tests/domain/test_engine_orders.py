"""Orders about memory, weights, shape, profiles and adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from app.domain.capabilities import Capabilities, Limits
from app.domain.commands import (
    Command,
    LoadLora,
    PauseAround,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    StartProfile,
    UnderPause,
    UnloadLora,
    UpdateWeights,
    command_of,
)
from app.domain.errors import (
    ChadburnError,
    DrainRunning,
    FailedPrecondition,
    InvalidArgument,
    LoraExists,
    NotPaused,
    ProfileRunning,
    RequestsFrozen,
    RequestsInFlight,
    ResourcesReleased,
    StalePauseEpoch,
    StaleReleaseEpoch,
    UnknownLora,
    UnsupportedOperation,
    WeightsNotValid,
)
from app.domain.facts import EngineFacts, LoraFact, PauseFact, ProfileFact, WeightsFact
from app.domain.kinds import (
    Admission,
    CachePolicy,
    CollectiveBackend,
    Component,
    ContentPolicy,
    DrainRule,
    EngineRole,
    NewRequests,
    OperationKind,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    WeightSourceKind,
    WeightsState,
)
from app.domain.tensors import TensorSpec
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    FileDigest,
    InlineTensor,
    InlineWeights,
    SharedMemoryTensor,
    SharedMemoryWeights,
    WeightSource,
)
from tests.domain.strategies import NOON, engine_facts, restores

WEIGHTS, KV = ResourceKind.WEIGHTS, ResourceKind.KV_CACHE
SPEC = TensorSpec("w", TensorDtype.FLOAT16, (2, 3))
SHA = "ab" * 32
GROUP = DistributedWeights(
    backend=CollectiveBackend.GLOO,
    address="trainer",
    port=29500,
    world_size=3,
    rank_offset=1,
    group="g",
    source_rank=0,
    tensors=(SPEC,),
)
FULL = Capabilities(
    operations=frozenset(OperationKind),
    resources={KV: frozenset(ContentPolicy), WEIGHTS: frozenset({ContentPolicy.PRESERVE})},
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset(NewRequests),
    drain_rules=frozenset({DrainRule.WAIT, DrainRule.ABORT}),
    weight_sources=frozenset({WeightSourceKind.DISK, WeightSourceKind.DISTRIBUTED}),
    cache_policies=frozenset({CachePolicy.FLUSH}),
    components=frozenset({Component.TARGET}),
    profiler_kinds=frozenset({ProfilerKind.TORCH}),
    reconfigurable=frozenset({ReconfigurableField.ROLE, ReconfigurableField.MAX_RUNNING_REQUESTS}),
    models=("tiny",),
    world_size=2,
    limits=Limits(max_hold_limit_ms=60_000),
)


def release(**changes: Any) -> ReleaseResources:
    fields: dict[str, Any] = {
        "resources": (KV,),
        "content": ContentPolicy.PRESERVE,
        "drain": DrainRule.WAIT,
    }
    return ReleaseResources(**(fields | changes))


def update(**changes: Any) -> UpdateWeights:
    fields: dict[str, Any] = {
        "source": DiskWeights("/models/new"),
        "weight_version": "v8",
        "cache_policy": CachePolicy.FLUSH,
        "admission": PauseAround(PauseMode.DRAIN),
    }
    return UpdateWeights(**(fields | changes))


def facts(**changes: Any) -> EngineFacts:
    known: dict[str, Any] = {
        "instance_id": "i-1",
        "revision": 7,
        "admission": Admission.OPEN,
        "pause_epoch": 3,
        "release_epoch": 5,
        "weights": WeightsFact("v7", WeightsState.VALID),
        "observed_at": NOON,
    }
    return EngineFacts(**(known | changes))


FROZEN = facts(
    admission=Admission.PAUSED,
    pause=PauseFact(mode=PauseMode.KEEP, epoch=3, by="op-1", since=None, requests_kept=2),
)


SENSELESS: list[tuple[Any, str]] = [
    (lambda: release(resources=()), "/resources"),
    (lambda: release(resources=(KV, KV)), "/resources"),
    (lambda: RestoreResources(resources=(), release_epoch=1), "/resources"),
    (lambda: RestoreResources(resources=(KV,), release_epoch=0), "/release_epoch"),
    (lambda: DiskWeights(""), "/source/disk/path"),
    (lambda: DiskWeights("a\0b"), "/source/disk/path"),
    (
        lambda: DiskWeights("/m", (FileDigest("a", SHA), FileDigest("a", SHA))),
        "/source/disk/digests",
    ),
    (lambda: DiskWeights("/m", (FileDigest("../a", SHA),)), "/source/disk/digests/0/name"),
    (lambda: DiskWeights("/m", (FileDigest("/a", SHA),)), "/source/disk/digests/0/name"),
    (lambda: DiskWeights("/m", (FileDigest("a\0", SHA),)), "/source/disk/digests/0/name"),
    (lambda: DiskWeights("/m", (FileDigest("a", "xy"),)), "/source/disk/digests/0/sha256"),
    (
        lambda: SharedMemoryWeights("a/b", 12, (SharedMemoryTensor(SPEC, 0),)),
        "/source/tensors/shared_memory/object_name",
    ),
    (lambda: SharedMemoryWeights("a", 12, ()), "/source/tensors/shared_memory/tensors"),
    (
        lambda: SharedMemoryWeights("a", 12, (SharedMemoryTensor(SPEC, 1),)),
        "/source/tensors/shared_memory/tensors/0",
    ),
    (
        lambda: SharedMemoryWeights("a", 12, (SharedMemoryTensor(SPEC, -1),)),
        "/source/tensors/shared_memory/tensors/0",
    ),
    (
        lambda: SharedMemoryWeights("a", 12, (SharedMemoryTensor(SPEC, 0),), "zz"),
        "/source/tensors/shared_memory/sha256",
    ),
    (lambda: InlineWeights(()), "/source/tensors/inline/tensors"),
    (
        lambda: InlineWeights((InlineTensor.carrying(SPEC, b"short"),)),
        "/source/tensors/inline/tensors/0/data",
    ),
    (
        lambda: InlineWeights((InlineTensor.carrying(replace(SPEC, name=""), b"x" * 12),)),
        "/source/tensors/inline/tensors",
    ),
    (lambda: replace(GROUP, address=""), "/source/distributed/address"),
    (lambda: replace(GROUP, address="a\nb"), "/source/distributed/address"),
    (lambda: replace(GROUP, port=0), "/source/distributed/port"),
    (lambda: replace(GROUP, world_size=1), "/source/distributed/world_size"),
    (lambda: replace(GROUP, rank_offset=3), "/source/distributed/rank_offset"),
    (lambda: replace(GROUP, source_rank=9), "/source/distributed/source_rank"),
    (lambda: replace(GROUP, tensors=()), "/source/distributed/tensors"),
    (lambda: update(weight_version=""), "/weight_version"),
    (lambda: update(weight_version="v\n8"), "/weight_version"),
    (lambda: update(weight_version="v" * 257), "/weight_version"),
    (lambda: update(components=()), "/components"),
    (lambda: update(components=(Component.TARGET, Component.TARGET)), "/components"),
    (lambda: update(admission=UnderPause(0)), "/under_pause/pause_epoch"),
    (
        lambda: update(admission=PauseAround(PauseMode.KEEP, NewRequests.REFUSE, 5)),
        "/pause/hold_limit_ms",
    ),
    (
        lambda: update(admission=PauseAround(PauseMode.KEEP, NewRequests.HOLD, 0)),
        "/pause/hold_limit_ms",
    ),
    (lambda: ReconfigureServing(drain=DrainRule.WAIT), ""),
    (lambda: ReconfigureServing(role=EngineRole.UNKNOWN, drain=DrainRule.WAIT), "/role"),
    (
        lambda: ReconfigureServing(tensor_parallel_size=0, drain=DrainRule.WAIT),
        "/tensor_parallel_size",
    ),
    (lambda: StartProfile(profiler=ProfilerKind.TORCH, steps=1, duration_ms=1), "/duration_ms"),
    (lambda: StartProfile(profiler=ProfilerKind.TORCH, steps=0), "/steps"),
    (lambda: StartProfile(profiler=ProfilerKind.TORCH, duration_ms=0), "/duration_ms"),
    (lambda: LoadLora(name="", path="/l"), "/name"),
    (lambda: LoadLora(name="a\n", path="/l"), "/name"),
    (lambda: LoadLora(name="a", path=""), "/path"),
    (lambda: LoadLora(name="a", path="/l", id=-1), "/id"),
    (lambda: UnloadLora(name="x" * 257), "/name"),
]


@pytest.mark.parametrize(("make", "pointer"), SENSELESS)
def test_a_senseless_order_cannot_be_made(make: Any, pointer: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert [fault.pointer for fault in refused.value.faults] == [pointer]


class TestSources:
    @pytest.mark.parametrize(
        ("dtype", "size"),
        [
            (TensorDtype.FLOAT64, 8),
            (TensorDtype.FLOAT32, 4),
            (TensorDtype.BFLOAT16, 2),
            (TensorDtype.FLOAT8_E4M3FN, 1),
            (TensorDtype.BOOL, 1),
        ],
    )
    def test_sizes(self, dtype: TensorDtype, size: int) -> None:
        assert TensorSpec("w", dtype, ()).size_bytes == size
        assert TensorSpec("w", dtype, (5, 3)).size_bytes == 15 * size
        assert TensorSpec("w", dtype, (5, 0)).size_bytes == 0

    @pytest.mark.parametrize(
        "source",
        [
            DiskWeights("/m", (FileDigest("a", SHA),)),
            SharedMemoryWeights("a", 12, (SharedMemoryTensor(SPEC, 0),)),
            SharedMemoryWeights("a", 13, (SharedMemoryTensor(SPEC, 1),), SHA),
            InlineWeights((InlineTensor.carrying(SPEC, b"x" * 12),)),
            GROUP,
        ],
    )
    def test_every_source_comes_back_from_its_document(self, source: WeightSource) -> None:
        order = update(source=source)
        document = json.loads(json.dumps(dict(order.document())))
        assert command_of(order.kind, document) == order

    def test_a_payload_is_neither_kept_nor_shown(self) -> None:
        order = update(source=InlineWeights((InlineTensor.carrying(SPEC, b"secret bytes"),)))
        document = order.document()
        assert "secret" not in repr(order)
        assert "secret" not in str(document)
        again = command_of(order.kind, document)
        assert again == order
        assert isinstance(again, UpdateWeights)
        assert isinstance(again.source, InlineWeights)
        assert again.source.tensors[0].data is None

    def test_another_payload_is_another_order(self) -> None:
        one, other = (
            update(source=InlineWeights((InlineTensor.carrying(SPEC, data),)))
            for data in (b"a" * 12, b"b" * 12)
        )
        assert one != other

    @pytest.mark.parametrize("document", [{"tape": {}}, {}, {"disk": {}, "tape": {}}])
    def test_a_source_nobody_wrote_is_not_read(self, document: dict[str, Any]) -> None:
        kept = dict(update().document()) | {"source": document}
        with pytest.raises((KeyError, ValueError)):
            command_of(OperationKind.UPDATE_WEIGHTS, kept)


class TestCapability:
    @pytest.mark.parametrize(
        "command",
        [
            release(content=ContentPolicy.DISCARD),
            release(drain=DrainRule.ABORT),
            RestoreResources(resources=(WEIGHTS, KV), release_epoch=1),
            update(),
            update(source=GROUP, admission=UnderPause()),
            update(admission=PauseAround(PauseMode.KEEP, hold_limit_ms=60_000)),
            ReconfigureServing(role=EngineRole.PREFILL, drain=DrainRule.WAIT),
            StartProfile(profiler=ProfilerKind.TORCH),
            LoadLora(name="a", path="/l"),
            UnloadLora(name="a"),
        ],
    )
    def test_what_is_advertised_passes(self, command: Command) -> None:
        command.check_supported(FULL)

    @pytest.mark.parametrize(
        "command",
        [
            release(resources=(WEIGHTS,), content=ContentPolicy.DISCARD),
            release(resources=(ResourceKind.EXECUTION_GRAPHS,)),
            release(drain=DrainRule.REFUSE),
            RestoreResources(resources=(ResourceKind.EXECUTION_GRAPHS,), release_epoch=1),
            update(source=InlineWeights((InlineTensor.carrying(SPEC, b"x" * 12),))),
            update(cache_policy=CachePolicy.KEEP),
            update(components=(Component.TARGET, Component.DRAFT)),
            ReconfigureServing(tensor_parallel_size=2, drain=DrainRule.WAIT),
            ReconfigureServing(role=EngineRole.PREFILL, drain=DrainRule.REFUSE),
            StartProfile(profiler=ProfilerKind.MEMORY),
        ],
    )
    def test_what_is_not_advertised_is_refused(self, command: Command) -> None:
        with pytest.raises(UnsupportedOperation):
            command.check_supported(FULL)

    def test_what_is_released_together_is_not_released_alone(self) -> None:
        can = replace(FULL, resources_together=True)
        release(resources=(WEIGHTS, KV)).check_supported(can)
        with pytest.raises(UnsupportedOperation):
            release(resources=(KV,)).check_supported(can)

    @pytest.mark.parametrize(
        "changes",
        [
            {"pause_modes": frozenset({PauseMode.ABORT})},
            {"new_requests": frozenset({NewRequests.REFUSE})},
        ],
    )
    def test_an_update_pauses_only_as_the_engine_can(self, changes: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedOperation):
            update().check_supported(replace(FULL, **changes))

    @pytest.mark.parametrize(
        ("command", "pointer"),
        [
            (
                update(admission=PauseAround(PauseMode.KEEP, hold_limit_ms=60_001)),
                "/pause/hold_limit_ms",
            ),
            (update(source=replace(GROUP, rank_offset=2)), "/source/distributed/rank_offset"),
            (update(source=replace(GROUP, source_rank=2)), "/source/distributed/source_rank"),
        ],
    )
    def test_what_does_not_fit_the_engine(self, command: Command, pointer: str) -> None:
        with pytest.raises(InvalidArgument) as refused:
            command.check_supported(FULL)
        assert [fault.pointer for fault in refused.value.faults] == [pointer]

    def test_an_engine_that_tells_no_limit_has_none(self) -> None:
        longest = update(admission=PauseAround(PauseMode.KEEP, hold_limit_ms=10**9))
        longest.check_supported(replace(FULL, limits=Limits()))


class TestState:
    @pytest.mark.parametrize(
        ("command", "changes", "refusal"),
        [
            (
                RestoreResources(resources=(KV,), release_epoch=4),
                {},
                StaleReleaseEpoch,
            ),
            (update(), {"released": frozenset({WEIGHTS, KV})}, ResourcesReleased),
            (update(admission=UnderPause()), {}, NotPaused),
            (
                update(admission=UnderPause()),
                {"admission": Admission.DRAINING},
                DrainRunning,
            ),
            (
                update(admission=UnderPause(2)),
                {"admission": Admission.PAUSED},
                StalePauseEpoch,
            ),
            (
                ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.WAIT),
                {"released": frozenset({KV})},
                ResourcesReleased,
            ),
            (
                ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.WAIT),
                {"weights": WeightsFact("v7", WeightsState.MISSING)},
                WeightsNotValid,
            ),
            (
                StartProfile(profiler=ProfilerKind.TORCH),
                {"profile": ProfileFact("p", "memory", "running")},
                ProfileRunning,
            ),
            (
                LoadLora(name="a", path="/l"),
                {"released": frozenset({WEIGHTS})},
                ResourcesReleased,
            ),
            (LoadLora(name="a", path="/l"), {"loras": (LoraFact("a", 1, "/x"),)}, LoraExists),
            (LoadLora(name="a", path="/l", id=2), {"loras": (LoraFact("a", 1, "/l"),)}, LoraExists),
            (UnloadLora(name="a"), {"loras": (LoraFact("b", 1, "/l"),)}, UnknownLora),
        ],
    )
    def test_what_the_state_forbids(
        self, command: Command, changes: dict[str, Any], refusal: type[ChadburnError]
    ) -> None:
        with pytest.raises(refusal):
            command.check_state(facts(**changes))

    @pytest.mark.parametrize(
        ("command", "refusal"),
        [
            (release(content=ContentPolicy.DISCARD), RequestsFrozen),
            (release(drain=DrainRule.REFUSE), RequestsInFlight),
            (update(), RequestsFrozen),
            (
                ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.WAIT),
                RequestsFrozen,
            ),
            (
                ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.REFUSE),
                RequestsInFlight,
            ),
        ],
    )
    def test_what_frozen_requests_forbid(
        self, command: Command, refusal: type[ChadburnError]
    ) -> None:
        with pytest.raises(refusal):
            command.check_state(FROZEN)

    @pytest.mark.parametrize(
        "command",
        [
            release(),
            release(drain=DrainRule.ABORT),
            update(admission=PauseAround(PauseMode.KEEP)),
            update(admission=UnderPause(3)),
            ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.ABORT),
        ],
    )
    def test_what_is_possible_around_frozen_requests(self, command: Command) -> None:
        command.check_state(FROZEN)

    @pytest.mark.parametrize(
        ("command", "changes"),
        [
            (release(content=ContentPolicy.DISCARD, drain=DrainRule.REFUSE), {}),
            (RestoreResources(resources=(KV,), release_epoch=5), {}),
            (update(), {"released": frozenset({KV})}),
            (update(), {"weights": WeightsFact("v7", WeightsState.INCONSISTENT)}),
            (update(admission=UnderPause()), {"admission": Admission.UNKNOWN}),
            (
                ReconfigureServing(role=EngineRole.DECODE, drain=DrainRule.REFUSE),
                {"weights": WeightsFact()},
            ),
            (
                StartProfile(profiler=ProfilerKind.TORCH),
                {"profile": ProfileFact("p", "torch", "running")},
            ),
            (StartProfile(profiler=ProfilerKind.TORCH), {}),
            (LoadLora(name="a", path="/l"), {"released": frozenset({KV})}),
            (LoadLora(name="a", path="/l"), {"loras": (LoraFact("a", 1, "/l"),)}),
            (LoadLora(name="a", path="/l"), {"loras": (LoraFact("b", 1, "/x"),)}),
            (UnloadLora(name="a"), {"loras": (LoraFact("a", 1, "/l"),)}),
        ],
    )
    def test_what_the_state_allows(self, command: Command, changes: dict[str, Any]) -> None:
        command.check_state(facts(**changes))

    def test_a_stale_release_says_which_one_is_current(self) -> None:
        with pytest.raises(StaleReleaseEpoch) as refused:
            RestoreResources(resources=(KV,), release_epoch=4).check_state(facts())
        assert (refused.value.given, refused.value.current) == (4, 5)

    @given(restores, engine_facts)
    def test_no_restore_of_an_older_release_passes(
        self, command: RestoreResources, known: EngineFacts
    ) -> None:
        try:
            command.check_state(known)
        except FailedPrecondition:
            return
        assert command.release_epoch == known.release_epoch
