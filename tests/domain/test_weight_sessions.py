"""Weight sessions as values: what makes sense, what an engine offers, and the way through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.capabilities import Capabilities, Limits
from app.domain.commands import PauseAround, UpdateWeights
from app.domain.engine_payloads import EnginePayloadChunk, EnginePayloadTransfer
from app.domain.errors import ChunkOutOfOrder, InvalidArgument, UnsupportedOperation
from app.domain.kinds import (
    CachePolicy,
    Component,
    NewRequests,
    OperationKind,
    PauseMode,
    TensorDtype,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import (
    MAX_CHUNKS,
    AbortSession,
    Chunk,
    CommitSession,
    DiskChunk,
    DiskTransfer,
    IpcChunk,
    IpcHandle,
    IpcTransfer,
    NcclChunk,
    NcclTransfer,
    Payload,
    SessionStage,
    SessionWeights,
    Stage,
    Transfer,
    stage_document,
    stage_of,
)
from app.domain.weight_sources import source_document, source_of
from tests.domain.strategies import labels, spec_lists

SPECS = (
    TensorSpec("a", TensorDtype.FLOAT32, (2,)),
    TensorSpec("b", TensorDtype.FLOAT32, ()),
)
HANDLES = tuple(IpcHandle("", b"segment", 8 * number) for number in range(4))
OWN = EnginePayloadTransfer("engine.own")
GROUP = NcclTransfer(address="::1", port=29500, world_size=3, rank_offset=1)
CAN = Capabilities(
    operations=frozenset({OperationKind.UPDATE_WEIGHTS}),
    weight_sources=frozenset({WeightSourceKind.SESSION}),
    weight_sessions=frozenset(WeightTransferBackend),
    payload_formats=frozenset({"engine.own"}),
    cache_policies=frozenset(CachePolicy),
    components=frozenset({Component.TARGET}),
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset(NewRequests),
    world_size=2,
)

payloads: st.SearchStrategy[Payload] = st.one_of(
    st.builds(NcclChunk, tensors=spec_lists.map(tuple), packed=st.booleans()),
    st.builds(
        NcclChunk,
        tensors=spec_lists.map(tuple),
        packed=st.just(True),
        packed_buffer_bytes=st.integers(1, 2**40),
        packed_buffers=st.integers(1, 8),
    ),
    spec_lists.map(lambda specs: IpcChunk(tuple(specs), HANDLES[:1] * len(specs) * 2)),
    st.builds(
        EnginePayloadChunk,
        st.lists(st.binary(min_size=1), min_size=1, max_size=3).map(tuple),
        st.none() | st.just("direct"),
    ),
    st.builds(DiskChunk, st.integers(1, 4).map(lambda count: tuple(f"f{n}" for n in range(count)))),
)
stages: st.SearchStrategy[Stage] = st.one_of(
    st.builds(Chunk, st.integers(0, MAX_CHUNKS - 1), payloads),
    st.builds(
        CommitSession, st.integers(0, MAX_CHUNKS), st.none() | st.sampled_from(("v2", "step 7"))
    ),
    st.builds(AbortSession, labels),
)


@given(stages)
def test_a_stage_survives_json(stage: Stage) -> None:
    assert stage_of(json.loads(json.dumps(stage_document(stage)))) == stage


@pytest.mark.parametrize("transfer", [DiskTransfer("/x"), IpcTransfer(), GROUP, OWN])
@pytest.mark.parametrize("lease_ms", [None, 1])
def test_a_begin_survives_json(transfer: Transfer, lease_ms: int | None) -> None:
    source = SessionWeights("s", transfer, lease_ms)
    assert source_of(json.loads(json.dumps(source_document(source)))) == source


def test_a_chunk_out_of_order_says_which_is_due() -> None:
    assert (error := ChunkOutOfOrder(given=3, expected=1)).reason == "CHUNK_OUT_OF_ORDER"
    assert (error.given, error.expected) == (3, 1)


MALFORMED: list[tuple[Callable[[], object], str]] = [
    (lambda: SessionWeights("", DiskTransfer("/x")), "/source/session/session_id"),
    (lambda: SessionWeights("a b", DiskTransfer("/x")), "/source/session/session_id"),
    (lambda: SessionWeights("é", DiskTransfer("/x")), "/source/session/session_id"),
    (lambda: SessionWeights("s" * 129, DiskTransfer("/x")), "/source/session/session_id"),
    (lambda: SessionWeights("s", DiskTransfer("/x"), 0), "/source/session/begin/lease_ms"),
    (lambda: SessionStage("", CommitSession(0)), "/source/session/session_id"),
    (lambda: CommitSession(0, ""), "/source/session/commit/weight_version"),
    (lambda: CommitSession(0, "a\nb"), "/source/session/commit/weight_version"),
    (lambda: DiskTransfer(""), "/source/session/begin/disk/path"),
    (lambda: DiskTransfer("a\0b"), "/source/session/begin/disk/path"),
    (lambda: replace(GROUP, address=""), "/source/session/begin/nccl/address"),
    (lambda: replace(GROUP, port=65536), "/source/session/begin/nccl/port"),
    (lambda: replace(GROUP, world_size=1), "/source/session/begin/nccl/world_size"),
    (lambda: replace(GROUP, rank_offset=3), "/source/session/begin/nccl/rank_offset"),
    (lambda: replace(GROUP, source_rank=-1), "/source/session/begin/nccl/source_rank"),
    (lambda: NcclChunk(tensors=()), "/source/session/chunk/nccl/tensors"),
    (lambda: NcclChunk(tensors=SPECS[:1] * 2), "/source/session/chunk/nccl/tensors"),
    (
        lambda: NcclChunk(tensors=SPECS, packed=True, packed_buffers=0),
        "/source/session/chunk/nccl/packed_buffers",
    ),
    (
        lambda: NcclChunk(tensors=SPECS, packed_buffer_bytes=8),
        "/source/session/chunk/nccl/packed_buffer_bytes",
    ),
    (lambda: IpcChunk((), HANDLES), "/source/session/chunk/ipc/tensors"),
    (lambda: IpcChunk(SPECS, ()), "/source/session/chunk/ipc/handles"),
    (lambda: IpcChunk(SPECS, HANDLES[:3]), "/source/session/chunk/ipc/handles"),
    (
        lambda: IpcChunk(SPECS, (HANDLES[0], IpcHandle("", b"", 0))),
        "/source/session/chunk/ipc/handles/1/handle",
    ),
    (lambda: DiskChunk(()), "/source/session/chunk/disk/files"),
    (lambda: DiskChunk(("a", "a")), "/source/session/chunk/disk/files"),
    (lambda: DiskChunk(("a", "/etc/passwd")), "/source/session/chunk/disk/files/1"),
    (lambda: DiskChunk(("../a",)), "/source/session/chunk/disk/files/0"),
    (lambda: DiskChunk(("a\0",)), "/source/session/chunk/disk/files/0"),
    (lambda: EnginePayloadTransfer("no format"), "/source/session/begin/engine_payload/format"),
    (lambda: EnginePayloadChunk(()), "/source/session/chunk/engine_payload/parts"),
    (
        lambda: EnginePayloadChunk((b"x",) * 4097),
        "/source/session/chunk/engine_payload/parts",
    ),
    (lambda: EnginePayloadChunk((b"x", b"")), "/source/session/chunk/engine_payload/parts/1"),
    (
        lambda: EnginePayloadChunk((b"x",), "two words"),
        "/source/session/chunk/engine_payload/load_format",
    ),
    (lambda: Chunk(-1, DiskChunk(("a",))), "/source/session/chunk/index"),
    (lambda: Chunk(MAX_CHUNKS, DiskChunk(("a",))), "/source/session/chunk/index"),
    (lambda: AbortSession("a\nb"), "/source/session/abort/reason"),
    (lambda: AbortSession("x" * 501), "/source/session/abort/reason"),
]


@pytest.mark.parametrize(("make", "pointer"), MALFORMED)
def test_what_makes_no_sense_cannot_be_made(make: Callable[[], object], pointer: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert [one.pointer for one in refused.value.faults] == [pointer]


def test_the_handles_of_a_tensor() -> None:
    chunk = IpcChunk(SPECS, HANDLES)
    assert [chunk.of_tensor(index) for index in (0, 1)] == [HANDLES[:2], HANDLES[2:]]


def _begin(source: SessionWeights) -> UpdateWeights:
    return UpdateWeights(
        source=source,
        weight_version="v2",
        cache_policy=CachePolicy.FLUSH,
        admission=PauseAround(PauseMode.DRAIN),
    )


def test_only_what_is_advertised_begins() -> None:
    for transfer in (GROUP, IpcTransfer(), DiskTransfer("/x"), OWN):
        command = _begin(SessionWeights("s", transfer))
        command.check_supported(CAN)
        others = CAN.weight_sessions - {transfer.kind}
        with pytest.raises(UnsupportedOperation):
            command.check_supported(replace(CAN, weight_sessions=others))
        with pytest.raises(UnsupportedOperation):
            command.check_supported(replace(CAN, weight_sources=frozenset()))


def test_a_payload_is_in_a_format_of_the_engine() -> None:
    command = _begin(SessionWeights("s", EnginePayloadTransfer("another")))
    with pytest.raises(UnsupportedOperation):
        command.check_supported(CAN)


def test_a_payload_goes_into_one_message() -> None:
    stage = SessionStage("s", Chunk(0, EnginePayloadChunk((b"x" * 1000,))))
    stage.check_supported(CAN)
    stage.check_supported(replace(CAN, limits=Limits(max_message_bytes=6000)))
    with pytest.raises(InvalidArgument):
        stage.check_supported(replace(CAN, limits=Limits(max_message_bytes=5000)))


def test_what_tells_payloads_apart_and_never_shows_one() -> None:
    chunk = EnginePayloadChunk((b"secret", b"bytes"))
    assert (chunk.size_bytes, len(chunk.sha256)) == (11, 64)
    assert chunk.sha256 == EnginePayloadChunk((b"secret", b"bytes"), "direct").sha256
    assert chunk.sha256 != EnginePayloadChunk((b"secretbytes",)).sha256
    assert "secret" not in repr(chunk)


def test_the_group_has_room_for_the_engine() -> None:
    for group in (replace(GROUP, rank_offset=2), replace(GROUP, source_rank=2)):
        with pytest.raises(InvalidArgument):
            _begin(SessionWeights("s", group)).check_supported(CAN)


def test_only_what_is_advertised_goes_on() -> None:
    chunk = SessionStage("s", Chunk(0, DiskChunk(("a",))))
    commit = SessionStage("s", CommitSession(1))
    for stage in (chunk, commit):
        stage.check_supported(CAN)
        for cannot in (
            replace(CAN, weight_sources=frozenset()),
            replace(CAN, operations=frozenset()),
        ):
            with pytest.raises(UnsupportedOperation):
                stage.check_supported(cannot)
    by_ipc = replace(CAN, weight_sessions=frozenset({"ipc"}))
    commit.check_supported(by_ipc)
    with pytest.raises(UnsupportedOperation):
        chunk.check_supported(by_ipc)


def test_a_chunk_travels_as_its_session_does() -> None:
    by_disk, by_ipc = SessionWeights("s", DiskTransfer("/x")), SessionWeights("s", IpcTransfer())
    chunk = SessionStage("s", Chunk(0, DiskChunk(("a",))))
    chunk.check_fits(by_disk)
    SessionStage("s", CommitSession(0)).check_fits(by_ipc)
    with pytest.raises(InvalidArgument) as refused:
        chunk.check_fits(by_ipc)
    assert refused.value.faults[0].pointer == "/source/session/chunk/disk"


def test_what_an_abort_says_in_the_ledger() -> None:
    stage = SessionStage("s", AbortSession("enough"))
    assert stage.document() == {"session_id": "s", "abort": {"reason": "enough"}}
