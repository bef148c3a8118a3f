"""Arbitrary values of the domain, for the property tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

from hypothesis import strategies as st

from app.domain.capabilities import Capabilities, Limits
from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    LoadLora,
    Pause,
    PauseAround,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    StartProfile,
    UnderPause,
    UnloadLora,
    UpdateWeights,
)
from app.domain.facts import EngineFacts, WeightsFact
from app.domain.kinds import (
    Admission,
    CacheKind,
    CachePolicy,
    CollectiveBackend,
    Component,
    ContentPolicy,
    DrainRule,
    EngineRole,
    FailureEffect,
    NewRequests,
    OperationKind,
    OperationState,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    TensorDtype,
    Verification,
    WeightsState,
)
from app.domain.operation import (
    Actor,
    JsonObject,
    JsonValue,
    Operation,
    OperationError,
    OperationWarning,
    Progress,
)
from app.domain.ranks import RankReport, RankState
from app.domain.tensors import TensorSpec
from app.domain.transitions import (
    Cancelled,
    CancelRequested,
    Completed,
    Continued,
    Dispatched,
    EngineAccepted,
    Fact,
    Failed,
    OutcomeUnknown,
    Progressed,
    Queued,
    RankReported,
    Reattached,
    SentAgain,
    Settled,
    Started,
    Warned,
)
from app.domain.weight_sessions import (
    DiskTransfer,
    IpcTransfer,
    NcclTransfer,
    SessionWeights,
)
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

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

words = st.text(max_size=12)
names = st.text(min_size=1, max_size=12)
counts = st.integers(min_value=0, max_value=2**40)
times = st.timedeltas(min_value=timedelta(), max_value=timedelta(days=366)).map(
    lambda passed: NOON + passed
)

# Numbers as a canonical JSON text can carry them: no NaN, no infinity.
json_scalars: st.SearchStrategy[JsonValue] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**53), max_value=2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
)
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    json_scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
json_objects = cast(
    "st.SearchStrategy[JsonObject]", st.dictionaries(words, json_values, max_size=4)
)

progresses = st.builds(Progress, phase=names, done=counts, total=counts, unit=words)
reports = st.builds(
    RankReport,
    rank=st.integers(min_value=0, max_value=5),
    state=st.sampled_from(RankState),
    message=words,
)
warnings = st.builds(OperationWarning, reason=names, message=words)
errors = st.builds(
    OperationError,
    code=names,
    reason=names,
    message=words,
    retryable=st.booleans(),
    ranks=st.lists(st.integers(min_value=0, max_value=7), max_size=3).map(tuple),
    effect=st.sampled_from(FailureEffect),
)
revisions = st.none() | counts
places = st.integers(min_value=1, max_value=9)
# Few numbers, so that replays (numbers seen before) are as common as news.
engine_sequences = st.none() | st.integers(min_value=1, max_value=12)


def facts_numbered(numbers: st.SearchStrategy[int | None]) -> st.SearchStrategy[Fact]:
    """Any fact at all, with one of these numbers of the engine's."""
    return st.one_of(
        st.builds(Queued, engine_sequence=numbers, position=places),
        st.builds(Dispatched, engine_sequence=numbers, instance_id=st.none() | names),
        st.builds(Started, engine_sequence=numbers),
        st.builds(
            EngineAccepted,
            engine_sequence=numbers,
            engine_operation_id=names,
            instance_id=st.none() | names,
        ),
        st.builds(Progressed, engine_sequence=numbers, progress=progresses),
        st.builds(Continued, engine_sequence=numbers, progress=progresses),
        st.builds(RankReported, engine_sequence=numbers, report=reports),
        st.builds(Warned, engine_sequence=numbers, warning=warnings),
        st.builds(CancelRequested, engine_sequence=numbers),
        st.builds(OutcomeUnknown, engine_sequence=numbers, message=words),
        st.builds(Reattached, engine_sequence=numbers),
        st.builds(SentAgain, engine_sequence=numbers),
        st.builds(
            Completed,
            engine_sequence=numbers,
            result=json_objects,
            revision=revisions,
            verification=st.sampled_from(Verification),
        ),
        st.builds(Failed, engine_sequence=numbers, error=errors, revision=revisions),
        st.builds(Cancelled, engine_sequence=numbers, message=words, revision=revisions),
        st.builds(
            Settled,
            engine_sequence=numbers,
            end=st.sampled_from(OperationState),
            by=names,
            message=words,
        ),
    )


facts = facts_numbered(engine_sequences)
news = facts.filter(lambda fact: not isinstance(fact, Completed | Failed | Cancelled | Settled))
actors = st.builds(Actor, issuer=names, subject=names, client_id=names)


def operations_in(states: st.SearchStrategy[OperationState]) -> st.SearchStrategy[Operation]:
    """Operations in any of `states`, with some of their history behind them."""
    return st.builds(
        Operation,
        id=names,
        engine_id=names,
        kind=st.sampled_from(OperationKind),
        state=states,
        request=json_objects,
        actor=actors,
        created_at=times,
        sequence=st.integers(min_value=1, max_value=50),
        engine_sequence=st.integers(min_value=0, max_value=12),
        engine_operation_id=st.none() | names,
        engine_instance_id=st.none() | names,
        cancel_requested=st.booleans(),
        warnings=st.lists(warnings, max_size=2).map(tuple),
        ranks=st.lists(reports, max_size=3, unique_by=lambda r: r.rank).map(
            lambda found: tuple(sorted(found, key=lambda r: r.rank))
        ),
        progress=st.none() | progresses,
    )


operations = operations_in(st.sampled_from(OperationState))


def new_operation(kind: OperationKind = OperationKind.PAUSE) -> Operation:
    return Operation(
        id="op-1",
        engine_id="torch-0",
        kind=kind,
        state=OperationState.ACCEPTED,
        request={"mode": "drain"},
        actor=Actor("https://issuer.test", "ada", "cli"),
        created_at=NOON,
    )


# ---- orders ----

models = st.none() | names
flushes = st.builds(
    FlushCaches,
    model=models,
    caches=st.lists(st.sampled_from(CacheKind), min_size=1, unique=True).map(tuple),
)
pauses = st.one_of(
    st.builds(
        Pause,
        model=models,
        mode=st.sampled_from(PauseMode),
        new_requests=st.just(NewRequests.HOLD),
        hold_limit_ms=st.none() | st.integers(min_value=1, max_value=2**40),
    ),
    st.builds(
        Pause,
        model=models,
        mode=st.sampled_from(PauseMode),
        new_requests=st.just(NewRequests.REFUSE),
    ),
)
resumes = st.builds(Resume, model=models, pause_epoch=st.integers(min_value=1, max_value=2**40))
aborts = st.one_of(
    st.builds(AbortRequests, model=models, all=st.just(True)),
    st.builds(
        AbortRequests,
        model=models,
        request_ids=st.lists(names, min_size=1, max_size=4, unique=True).map(tuple),
    ),
)
resources = st.lists(st.sampled_from(ResourceKind), min_size=1, unique=True).map(tuple)
releases = st.builds(
    ReleaseResources,
    model=models,
    resources=resources,
    content=st.sampled_from(ContentPolicy),
    drain=st.sampled_from(DrainRule),
)
restores = st.builds(
    RestoreResources,
    model=models,
    resources=resources,
    release_epoch=st.integers(min_value=1, max_value=4),
)
labels = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
sha256s = st.binary(min_size=32, max_size=32).map(bytes.hex)
specs = st.builds(
    TensorSpec,
    name=labels,
    dtype=st.sampled_from(TensorDtype),
    shape=st.lists(st.integers(min_value=0, max_value=3), max_size=3).map(tuple),
)
spec_lists = st.lists(specs, min_size=1, max_size=3, unique_by=lambda spec: spec.name)


def _inline(wanted: list[TensorSpec]) -> InlineWeights:
    return InlineWeights(
        tuple(InlineTensor.carrying(spec, b"\7" * spec.size_bytes) for spec in wanted)
    )


def _shared(wanted: list[TensorSpec], name: str, sha256: str | None) -> SharedMemoryWeights:
    tensors, size = [], 0
    for spec in wanted:
        tensors.append(SharedMemoryTensor(spec, size))
        size += spec.size_bytes
    return SharedMemoryWeights(name.replace("/", "_"), size, tuple(tensors), sha256)


sources: st.SearchStrategy[WeightSource] = st.one_of(
    st.builds(
        DiskWeights,
        path=labels,
        digests=st.lists(
            st.builds(FileDigest, name=st.from_regex("[a-z]{1,8}", fullmatch=True), sha256=sha256s),
            max_size=2,
            unique_by=lambda digest: digest.name,
        ).map(tuple),
    ),
    st.builds(_inline, spec_lists),
    st.builds(_shared, spec_lists, labels, st.none() | sha256s),
    st.builds(
        DistributedWeights,
        backend=st.sampled_from(CollectiveBackend),
        address=labels,
        port=st.integers(min_value=1, max_value=65535),
        world_size=st.integers(min_value=3, max_value=9),
        rank_offset=st.integers(min_value=1, max_value=2),
        group=words,
        source_rank=st.integers(min_value=0, max_value=2),
        tensors=spec_lists.map(tuple),
    ),
    st.builds(
        SessionWeights,
        session_id=labels,
        transfer=st.builds(DiskTransfer, labels)
        | st.just(IpcTransfer())
        | st.builds(
            NcclTransfer,
            address=labels,
            port=st.integers(min_value=1, max_value=65535),
            world_size=st.integers(min_value=3, max_value=9),
            rank_offset=st.integers(min_value=1, max_value=2),
            backend=st.sampled_from(CollectiveBackend),
            group=words,
        ),
        lease_ms=st.none() | st.integers(min_value=1, max_value=2**40),
    ),
)
admissions = st.one_of(
    st.builds(UnderPause, st.none() | st.integers(min_value=1, max_value=4)),
    st.builds(PauseAround, st.sampled_from(PauseMode), st.sampled_from(NewRequests)),
    st.builds(
        PauseAround,
        st.sampled_from(PauseMode),
        st.just(NewRequests.HOLD),
        st.integers(min_value=1, max_value=2**40),
    ),
)
updates = st.builds(
    UpdateWeights,
    model=models,
    source=sources,
    weight_version=labels,
    cache_policy=st.sampled_from(CachePolicy),
    admission=admissions,
    components=st.lists(st.sampled_from(Component), min_size=1, unique=True).map(tuple),
    check_finite=st.booleans(),
)
targets = st.none() | st.integers(min_value=1, max_value=8)
reconfigurations = st.builds(
    ReconfigureServing,
    model=models,
    role=st.sampled_from([role for role in EngineRole if role is not EngineRole.UNKNOWN]),
    tensor_parallel_size=targets,
    data_parallel_size=targets,
    max_running_requests=targets,
    max_batched_tokens=targets,
    drain=st.sampled_from(DrainRule),
) | st.builds(
    ReconfigureServing,
    max_running_requests=st.integers(min_value=1, max_value=8),
    drain=st.sampled_from(DrainRule),
)
profiles = st.builds(
    StartProfile,
    model=models,
    profiler=st.sampled_from(ProfilerKind),
    steps=st.none() | counts.filter(bool),
    record_shapes=st.booleans(),
    with_stack=st.booleans(),
) | st.builds(
    StartProfile,
    profiler=st.sampled_from(ProfilerKind),
    duration_ms=st.none() | counts.filter(bool),
)
loras: st.SearchStrategy[Command] = st.builds(
    LoadLora, model=models, name=labels, path=labels, id=counts
) | st.builds(UnloadLora, model=models, name=labels)
commands: st.SearchStrategy[Command] = st.one_of(
    flushes,
    pauses,
    resumes,
    aborts,
    releases,
    restores,
    updates,
    reconfigurations,
    profiles,
    loras,
)

capabilities = st.builds(
    Capabilities,
    operations=st.frozensets(st.sampled_from(OperationKind)),
    cancellable=st.frozensets(st.sampled_from(OperationKind)),
    cache_kinds=st.frozensets(st.sampled_from(CacheKind)),
    pause_modes=st.frozensets(st.sampled_from(PauseMode)),
    new_requests=st.frozensets(st.sampled_from(NewRequests)),
    models=st.lists(names, max_size=2, unique=True).map(tuple),
    limits=st.builds(Limits, max_hold_limit_ms=st.integers(min_value=0, max_value=2**40)),
)

engine_facts = st.builds(
    EngineFacts,
    instance_id=names,
    revision=counts,
    admission=st.sampled_from(Admission),
    pause_epoch=st.integers(min_value=0, max_value=4),
    released=st.frozensets(st.sampled_from(ResourceKind)),
    weights=st.builds(WeightsFact, state=st.sampled_from(WeightsState)),
    observed_at=times,
)
