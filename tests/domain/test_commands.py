"""Orders: how they are refused, kept and read back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.capabilities import Capabilities, Limits
from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    Pause,
    Resume,
    Shutdown,
    check_revision,
    command_of,
)
from app.domain.errors import (
    ChadburnError,
    DrainRunning,
    FailedPrecondition,
    InvalidArgument,
    NotPaused,
    RequestsFrozen,
    ResourcesReleased,
    RevisionMismatch,
    StalePauseEpoch,
    UnsupportedOperation,
    WeightsNotValid,
)
from app.domain.facts import EngineFacts, PauseFact, WeightsFact
from app.domain.kinds import (
    Admission,
    CacheKind,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from tests.domain.strategies import (
    aborts,
    capabilities,
    commands,
    engine_facts,
    flushes,
    resumes,
)

FULL = Capabilities(
    operations=frozenset(OperationKind),
    cache_kinds=frozenset({CacheKind.PREFIX, CacheKind.ENCODER}),
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset(NewRequests),
    models=("tiny", "large"),
    limits=Limits(max_hold_limit_ms=60_000),
)


def paused(**changes: Any) -> EngineFacts:
    known: dict[str, Any] = {
        "instance_id": "i-1",
        "revision": 7,
        "admission": Admission.PAUSED,
        "pause_epoch": 3,
        "weights": WeightsFact("v7", WeightsState.VALID),
        "observed_at": datetime(2026, 3, 1, tzinfo=UTC),
    }
    return EngineFacts(**(known | changes))


class TestKeeping:
    @given(commands)
    def test_every_order_comes_back_from_its_document(self, command: Command) -> None:
        document = json.loads(json.dumps(dict(command.document())))
        assert command_of(command.kind, document) == command

    @given(commands, commands)
    def test_different_orders_have_different_documents(self, one: Command, other: Command) -> None:
        same = (one.kind, one.document()) == (other.kind, other.document())
        assert same is (one == other)

    @pytest.mark.parametrize(
        ("kind", "document"),
        [
            (OperationKind.PAUSE, {}),
            (OperationKind.PAUSE, {"mode": "sleep", "new_requests": "hold"}),
            (OperationKind.FLUSH_CACHES, {}),
            (OperationKind.FLUSH_CACHES, {"caches": ["attic"]}),
            (OperationKind.RESUME, {}),
            (OperationKind.RELEASE_RESOURCES, {"resources": ["attic"]}),
        ],
    )
    def test_what_was_not_written_by_an_order_is_not_read(
        self, kind: OperationKind, document: dict[str, Any]
    ) -> None:
        with pytest.raises((KeyError, ValueError)):
            command_of(kind, document)

    def test_an_end_of_the_engine_comes_back(self) -> None:
        ending = Shutdown(model="tiny")
        assert command_of(ending.kind, ending.document()) == ending


class TestShape:
    @pytest.mark.parametrize(
        ("make", "pointer"),
        [
            (lambda: FlushCaches(caches=()), "/caches"),
            (lambda: FlushCaches(caches=(CacheKind.PREFIX, CacheKind.PREFIX)), "/caches"),
            (lambda: Pause(mode=PauseMode.DRAIN, hold_limit_ms=0), "/hold_limit_ms"),
            (lambda: Pause(mode=PauseMode.DRAIN, hold_limit_ms=-1), "/hold_limit_ms"),
            (
                lambda: Pause(
                    mode=PauseMode.KEEP, new_requests=NewRequests.REFUSE, hold_limit_ms=5
                ),
                "/hold_limit_ms",
            ),
            (lambda: Resume(pause_epoch=0), "/pause_epoch"),
            (lambda: Resume(pause_epoch=-3), "/pause_epoch"),
            (lambda: AbortRequests(), "/request_ids"),
            (lambda: AbortRequests(request_ids=("a",), all=True), "/request_ids"),
            (lambda: AbortRequests(request_ids=("a", "b", "a")), "/request_ids"),
            (lambda: AbortRequests(request_ids=("a", "")), "/request_ids"),
        ],
    )
    def test_a_senseless_order_cannot_be_made(self, make: Any, pointer: str) -> None:
        with pytest.raises(InvalidArgument) as refused:
            make()
        assert [fault.pointer for fault in refused.value.faults] == [pointer]

    @given(aborts)
    def test_everything_is_aborted_only_when_said(self, command: AbortRequests) -> None:
        assert command.all is (command.request_ids == ())


class TestCapability:
    @pytest.mark.parametrize(
        ("command", "cannot"),
        [
            (Pause(mode=PauseMode.DRAIN), {"operations": frozenset({OperationKind.RESUME})}),
            (Pause(mode=PauseMode.KEEP), {"pause_modes": frozenset({PauseMode.DRAIN})}),
            (
                Pause(mode=PauseMode.DRAIN, new_requests=NewRequests.REFUSE),
                {"new_requests": frozenset({NewRequests.HOLD})},
            ),
            (FlushCaches(caches=(CacheKind.PREFIX, CacheKind.MULTIMODAL)), {}),
            (Resume(pause_epoch=1), {"operations": frozenset()}),
            (AbortRequests(all=True), {"operations": frozenset({OperationKind.PAUSE})}),
            (AbortRequests(all=True), {"abort_all": False}),
            (Shutdown(), {"operations": frozenset({OperationKind.PAUSE})}),
        ],
    )
    def test_what_is_not_advertised_is_refused(
        self, command: Command, cannot: dict[str, Any]
    ) -> None:
        fields = {name: getattr(FULL, name) for name in FULL.__slots__} | cannot
        with pytest.raises(UnsupportedOperation):
            command.check_supported(Capabilities(**fields))

    @pytest.mark.parametrize(
        "command",
        [
            FlushCaches(caches=(CacheKind.ENCODER, CacheKind.PREFIX)),
            Pause(mode=PauseMode.KEEP, hold_limit_ms=60_000),
            Pause(mode=PauseMode.ABORT, new_requests=NewRequests.REFUSE),
            Resume(pause_epoch=3, model="large"),
            AbortRequests(request_ids=("r-1",), model="tiny"),
        ],
    )
    def test_what_is_advertised_passes(self, command: Command) -> None:
        command.check_supported(FULL)

    def test_a_model_that_is_not_there_is_named_as_the_fault(self) -> None:
        with pytest.raises(InvalidArgument) as refused:
            Resume(pause_epoch=1, model="absent").check_supported(FULL)
        assert [fault.pointer for fault in refused.value.faults] == ["/model"]
        assert "absent" not in refused.value.message

    def test_a_hold_may_not_be_longer_than_the_engine_allows(self) -> None:
        with pytest.raises(InvalidArgument) as refused:
            Pause(mode=PauseMode.DRAIN, hold_limit_ms=60_001).check_supported(FULL)
        assert [fault.pointer for fault in refused.value.faults] == ["/hold_limit_ms"]

    def test_an_engine_that_tells_no_limit_has_none(self) -> None:
        fields = {name: getattr(FULL, name) for name in FULL.__slots__} | {"limits": Limits()}
        Pause(mode=PauseMode.DRAIN, hold_limit_ms=10**9).check_supported(Capabilities(**fields))

    @given(commands, capabilities)
    def test_it_passes_only_within_what_is_advertised(
        self, command: Command, can: Capabilities
    ) -> None:
        try:
            command.check_supported(can)
        except (UnsupportedOperation, InvalidArgument):
            return
        assert command.kind in can.operations
        assert command.model is None or command.model in can.models
        if isinstance(command, Pause):
            assert command.mode in can.pause_modes
            assert command.new_requests in can.new_requests
        if isinstance(command, FlushCaches):
            assert can.cache_kinds.issuperset(command.caches)


class TestState:
    @pytest.mark.parametrize(
        ("changes", "refusal"),
        [
            ({"pause_epoch": 4}, StalePauseEpoch),
            ({"pause_epoch": 2}, StalePauseEpoch),
            ({"admission": Admission.DRAINING}, DrainRunning),
            ({"admission": Admission.OPEN}, NotPaused),
            ({"released": frozenset({ResourceKind.KV_CACHE})}, ResourcesReleased),
            ({"weights": WeightsFact("v7", WeightsState.MISSING)}, WeightsNotValid),
            ({"weights": WeightsFact("v7", WeightsState.INCONSISTENT)}, WeightsNotValid),
            ({"weights": WeightsFact("v7", WeightsState.UPDATING)}, WeightsNotValid),
        ],
    )
    def test_resume_is_refused_where_it_could_not_serve(
        self, changes: dict[str, Any], refusal: type[ChadburnError]
    ) -> None:
        with pytest.raises(refusal):
            Resume(pause_epoch=3).check_state(paused(**changes))

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            (WeightsState.INCONSISTENT, "weights are inconsistent: a full update .* way back"),
            (WeightsState.MISSING, "weights are missing: a full update .* way back"),
            (WeightsState.UPDATING, "weights are updating: wait"),
        ],
    )
    def test_the_way_back_to_valid_weights_is_said(self, state: WeightsState, words: str) -> None:
        with pytest.raises(WeightsNotValid, match=words):
            Resume(pause_epoch=3).check_state(paused(weights=WeightsFact("v7", state)))

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"admission": Admission.UNKNOWN},
            {"weights": WeightsFact()},
        ],
    )
    def test_resume_of_the_latest_pause_passes(self, changes: dict[str, Any]) -> None:
        Resume(pause_epoch=3).check_state(paused(**changes))

    def test_a_stale_epoch_says_which_one_is_current(self) -> None:
        with pytest.raises(StalePauseEpoch) as refused:
            Resume(pause_epoch=2).check_state(paused())
        assert (refused.value.given, refused.value.current) == (2, 3)

    def test_all_that_is_released_is_named(self) -> None:
        released = frozenset({ResourceKind.WEIGHTS, ResourceKind.KV_CACHE})
        with pytest.raises(ResourcesReleased, match="kv_cache, weights"):
            Resume(pause_epoch=3).check_state(paused(released=released))

    @given(resumes, engine_facts)
    def test_no_resume_passes_that_the_facts_forbid(
        self, command: Resume, facts: EngineFacts
    ) -> None:
        try:
            command.check_state(facts)
        except FailedPrecondition:
            return
        assert command.pause_epoch == facts.pause_epoch
        assert facts.admission in {Admission.PAUSED, Admission.UNKNOWN}
        assert not facts.released

    @pytest.mark.parametrize(
        ("mode", "admission", "kept", "refused"),
        [
            (PauseMode.DRAIN, Admission.PAUSED, 2, True),
            (PauseMode.DRAIN, Admission.PAUSED, 0, False),
            (PauseMode.DRAIN, Admission.DRAINING, 2, False),
            (PauseMode.ABORT, Admission.PAUSED, 2, False),
            (PauseMode.KEEP, Admission.PAUSED, 2, False),
        ],
    )
    def test_a_drain_never_waits_for_what_is_frozen(
        self, mode: PauseMode, admission: Admission, kept: int, refused: bool
    ) -> None:
        keeping = PauseFact(mode=PauseMode.KEEP, epoch=3, by="op-1", since=None, requests_kept=kept)
        facts = paused(admission=admission, pause=keeping)
        if not refused:
            Pause(mode=mode).check_state(facts)
            return
        with pytest.raises(RequestsFrozen, match="2 requests"):
            Pause(mode=mode).check_state(facts)

    def test_a_paused_engine_with_nothing_frozen_may_be_drained(self) -> None:
        Pause(mode=PauseMode.DRAIN).check_state(paused(pause=None))

    @given(flushes | aborts, engine_facts)
    def test_the_others_are_good_in_any_state(self, command: Command, facts: EngineFacts) -> None:
        command.check_state(facts)


class TestRevision:
    @given(st.integers(min_value=0, max_value=9), engine_facts, st.booleans())
    def test_only_the_current_one_passes(
        self, expected: int, facts: EngineFacts, header: bool
    ) -> None:
        if expected == facts.revision:
            check_revision(expected, facts, from_header=header)
            return
        with pytest.raises(RevisionMismatch) as refused:
            check_revision(expected, facts, from_header=header)
        assert (refused.value.expected, refused.value.current) == (expected, facts.revision)
        assert refused.value.from_header is header

    def test_the_current_one_passes(self) -> None:
        check_revision(7, paused())

    def test_none_asks_for_nothing(self) -> None:
        check_revision(None, paused())
