"""Each cell of the transition table, and what holds whatever is told in whatever order."""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from app.domain import transitions
from app.domain.events import TERMINAL_EVENTS, EventType
from app.domain.kinds import OperationKind, OperationState, Verification
from app.domain.operation import Operation, OperationError, OperationEvent, OperationWarning
from app.domain.operation import Progress as ProgressValue
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import (
    ALLOWED,
    Advanced,
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
    Refusal,
    Rejected,
    SentAgain,
    Settled,
    Started,
    Warned,
    accepted_event,
    advance,
)
from tests.domain.strategies import (
    NOON,
    facts,
    new_operation,
    news,
    operations,
    operations_in,
)

LATER = NOON + timedelta(seconds=5)
LOST = OperationError(code="INTERNAL", reason="RANK_LOST", message="rank 1 is gone", ranks=(1,))

# One fact of each type; the state it leads to is in the grid below.
SAMPLES: tuple[Fact, ...] = (
    Queued(position=3),
    Dispatched(instance_id="i-1"),
    Started(),
    EngineAccepted(engine_operation_id="e-1"),
    Progressed(progress=ProgressValue("draining", 1, 4, "requests")),
    Continued(progress=ProgressValue("chunk_taken", 0, 1, "chunks")),
    RankReported(report=RankReport(0, RankState.PREPARED)),
    Warned(warning=OperationWarning("SLOW_RANK", "rank 3 lags")),
    CancelRequested(),
    OutcomeUnknown(message="the connection broke"),
    Reattached(),
    SentAgain(),
    Completed(result={"changed": True}, revision=8),
    Failed(error=LOST, revision=8),
    Cancelled(message="as asked", revision=8),
    Settled(end=OperationState.FAILED, by="ada", reason="seen by eye"),
)

# Rows: facts. Columns: the state it is told in. A dot: out of order.
COLUMNS = "accepted queued running cancelling reconciling"
GRID = """
Queued           queued     .          .           .           .
Dispatched       running    running    .           .           .
Started          running    .          .           .           .
EngineAccepted   .          .          running     cancelling  .
Progressed       .          .          running     cancelling  .
Continued        accepted   queued     running     .           reconciling
RankReported     .          .          running     cancelling  .
Warned           .          .          running     cancelling  reconciling
CancelRequested  .          .          cancelling  .           .
OutcomeUnknown   .          .          reconciling reconciling .
Reattached       .          .          .           .           running
SentAgain        .          .          .           .           running
Completed        .          .          succeeded   succeeded   succeeded
Failed           failed     failed     failed      failed      failed
Cancelled        cancelled  cancelled  cancelled   cancelled   cancelled
Settled          .          .          .           .           failed
"""


def cells() -> list[tuple[Fact, OperationState, OperationState | None]]:
    by_name = {type(fact).__name__: fact for fact in SAMPLES}
    found: list[tuple[Fact, OperationState, OperationState | None]] = []
    for line in GRID.strip().splitlines():
        name, *ends = line.split()
        for state, end in zip(COLUMNS.split(), ends, strict=True):
            leads_to = None if end == "." else OperationState(end)
            found.append((by_name[name], OperationState(state), leads_to))
    return found


def in_state(state: OperationState) -> Operation:
    return replace(new_operation(), state=state)


def taken(op: Operation, fact: Fact) -> Advanced:
    outcome = advance(op, fact, LATER)
    assert isinstance(outcome, Advanced)
    return outcome


def event_of(op: Operation, fact: Fact) -> OperationEvent:
    event = taken(op, fact).event
    assert event is not None
    return event


class TestTheTable:
    @pytest.mark.parametrize(
        ("fact", "state", "leads_to"),
        cells(),
        ids=lambda value: type(value).__name__ if isinstance(value, Fact) else str(value),
    )
    def test_every_cell_is_as_written_down(
        self, fact: Fact, state: OperationState, leads_to: OperationState | None
    ) -> None:
        outcome = advance(in_state(state), fact, LATER)
        if leads_to is None:
            assert outcome == Rejected(Refusal.OUT_OF_ORDER)
        else:
            assert isinstance(outcome, Advanced)
            assert outcome.operation.state is leads_to

    def test_it_has_a_row_for_every_fact_there_is(self) -> None:
        known = {
            value
            for value in vars(transitions).values()
            if inspect.isclass(value) and issubclass(value, Fact) and value is not Fact
        }
        assert set(ALLOWED) == known == {type(fact) for fact in SAMPLES}

    def test_no_row_names_a_terminal_state(self) -> None:
        assert not any(state.terminal for states in ALLOWED.values() for state in states)

    @pytest.mark.parametrize("end", [s for s in OperationState if not s.terminal])
    def test_a_person_can_only_settle_with_an_end(self, end: OperationState) -> None:
        settled = Settled(end=end, by="ada", reason="")
        outcome = advance(in_state(OperationState.RECONCILING), settled, LATER)
        assert outcome == Rejected(Refusal.OUT_OF_ORDER)


class TestAnyFactInAnyState:
    @given(operations, facts)
    def test_it_is_total_and_never_changes_its_input(self, op: Operation, fact: Fact) -> None:
        before = replace(op)
        outcome = advance(op, fact, LATER)
        assert isinstance(outcome, Advanced | Rejected)
        assert op == before

    @given(operations_in(st.sampled_from([s for s in OperationState if s.terminal])), facts)
    def test_an_ended_operation_takes_nothing(self, op: Operation, fact: Fact) -> None:
        assert op.done
        assert advance(op, fact, LATER) == Rejected(Refusal.ENDED)

    @given(operations, facts)
    def test_each_event_has_the_next_number_and_belongs_to_the_operation(
        self, op: Operation, fact: Fact
    ) -> None:
        outcome = advance(op, fact, LATER)
        if isinstance(outcome, Rejected):
            return
        event = outcome.event
        if event is None:
            assert outcome.operation.sequence == op.sequence
            return
        assert event.sequence == outcome.operation.sequence == op.sequence + 1
        assert (event.operation_id, event.engine_id) == (op.id, op.engine_id)
        assert event.time == LATER
        assert event.engine_sequence == fact.engine_sequence

    @given(operations, facts)
    def test_the_end_and_the_terminal_event_come_together(self, op: Operation, fact: Fact) -> None:
        outcome = advance(op, fact, LATER)
        if isinstance(outcome, Rejected):
            return
        terminal = outcome.event is not None and EventType(outcome.event.type).terminal
        assert outcome.operation.done is terminal
        assert (outcome.operation.ended_at == LATER) is terminal

    @given(operations, facts)
    def test_an_event_of_the_engine_is_taken_once(self, op: Operation, fact: Fact) -> None:
        outcome = advance(op, fact, LATER)
        if isinstance(outcome, Rejected):
            return
        after = outcome.operation
        if fact.engine_sequence is None:
            assert after.engine_sequence == op.engine_sequence
            return
        assert after.engine_sequence == fact.engine_sequence > op.engine_sequence
        assert isinstance(advance(after, fact, LATER), Rejected)

    @given(operations, facts)
    def test_who_ordered_what_never_changes(self, op: Operation, fact: Fact) -> None:
        outcome = advance(op, fact, LATER)
        if isinstance(outcome, Rejected):
            return
        for name in ("id", "engine_id", "kind", "request", "actor", "created_at"):
            assert getattr(outcome.operation, name) == getattr(op, name)


class TestReplay:
    @pytest.mark.parametrize("number", [1, 4, 5])
    def test_what_the_engine_said_before_is_seen(self, number: int) -> None:
        op = replace(in_state(OperationState.RUNNING), engine_sequence=5)
        again = Progressed(engine_sequence=number, progress=ProgressValue("draining"))
        assert advance(op, again, LATER) == Rejected(Refusal.SEEN)

    def test_what_it_had_not_said_yet_is_news(self) -> None:
        op = replace(in_state(OperationState.RUNNING), engine_sequence=5)
        news = Progressed(engine_sequence=6, progress=ProgressValue("draining"))
        assert taken(op, news).operation.engine_sequence == 6

    @given(st.lists(facts, max_size=12), st.integers(min_value=0, max_value=12))
    def test_hearing_a_part_again_changes_nothing(self, told: list[Fact], start: int) -> None:
        """A stream that is attached again replays from the engine's first event."""
        numbered = [
            replace(fact, engine_sequence=number)
            for number, fact in enumerate(told, start=1)
            if not isinstance(fact, Queued | Dispatched | Started)
        ]
        op = replace(new_operation(), state=OperationState.RUNNING)
        for fact in numbered:
            outcome = advance(op, fact, LATER)
            if isinstance(outcome, Advanced):
                op = outcome.operation
        for fact in numbered[:start]:
            number = fact.engine_sequence
            assert number is not None
            if number <= op.engine_sequence:
                assert isinstance(advance(op, fact, LATER), Rejected)


class TestWhatAFactLeavesBehind:
    def test_accepted_is_event_number_one(self) -> None:
        event = accepted_event(new_operation())
        assert (event.sequence, event.type, event.time) == (1, "accepted", NOON)
        assert event.data == {"kind": "pause"}
        assert event.engine_sequence is None

    def test_dispatched_names_the_process_that_may_have_it(self) -> None:
        after = taken(new_operation(), Dispatched(instance_id="i-1")).operation
        assert (after.started_at, after.engine_instance_id) == (LATER, "i-1")

    def test_started_is_not_told_to_observers(self) -> None:
        outcome = taken(new_operation(), Started())
        assert (outcome.event, outcome.operation.started_at) == (None, LATER)

    @pytest.mark.parametrize(
        ("known", "said", "kept"),
        [("i-1", None, "i-1"), ("i-1", "i-2", "i-2"), (None, "i-2", "i-2"), (None, None, None)],
    )
    def test_the_engine_names_itself_or_leaves_what_was_known(
        self, known: str | None, said: str | None, kept: str | None
    ) -> None:
        op = replace(in_state(OperationState.RUNNING), engine_instance_id=known)
        fact = EngineAccepted(engine_operation_id="e-1", instance_id=said)
        after = taken(op, fact).operation
        assert (after.engine_operation_id, after.engine_instance_id) == ("e-1", kept)

    def test_progress_says_how_far(self) -> None:
        fact = Progressed(progress=ProgressValue("draining", 1, 4, "requests"))
        data = event_of(in_state(OperationState.RUNNING), fact).data
        assert data == {"phase": "draining", "done": 1, "total": 4, "unit": "requests"}

    def test_a_rank_speaks_for_itself_and_the_last_word_counts(self) -> None:
        op = in_state(OperationState.RUNNING)
        for state in (RankState.PREPARED, RankState.COMMITTED):
            op = taken(op, RankReported(report=RankReport(1, state, "ok"))).operation
        after = taken(op, RankReported(report=RankReport(0, RankState.FAILED))).operation
        assert after.ranks == (
            RankReport(0, RankState.FAILED),
            RankReport(1, RankState.COMMITTED, "ok"),
        )

    def test_warnings_add_up(self) -> None:
        op = in_state(OperationState.RUNNING)
        first, second = OperationWarning("A", "a"), OperationWarning("B", "b")
        op = taken(op, Warned(warning=first)).operation
        outcome = taken(op, Warned(warning=second))
        assert outcome.operation.warnings == (first, second)
        assert outcome.event is not None
        assert outcome.event.data == {"reason": "B", "message": "b"}

    def test_a_cancellation_that_was_asked_for_survives_a_lost_connection(self) -> None:
        op = in_state(OperationState.RUNNING)
        facts = (CancelRequested(), OutcomeUnknown(message="gone"), Reattached())
        for fact in facts:
            op = taken(op, fact).operation
        assert op.state is OperationState.CANCELLING
        assert op.cancel_requested

    @pytest.mark.parametrize(
        ("asked", "goes_on"),
        [(False, OperationState.RUNNING), (True, OperationState.CANCELLING)],
    )
    def test_sent_again_is_told_and_keeps_the_first_start(
        self, asked: bool, goes_on: OperationState
    ) -> None:
        op = replace(in_state(OperationState.RECONCILING), started_at=NOON, cancel_requested=asked)
        outcome = taken(op, SentAgain())
        assert (outcome.operation.state, outcome.operation.started_at) == (goes_on, NOON)
        assert outcome.event is not None
        assert (outcome.event.type, outcome.event.data) == ("dispatched", {"again": True})

    def test_success_has_a_result_and_how_sure_it_is(self) -> None:
        fact = Completed(
            result={"pause_epoch": 3}, revision=8, verification=Verification.UNVERIFIED
        )
        outcome = taken(in_state(OperationState.RECONCILING), fact)
        after = outcome.operation
        assert (after.result, after.revision) == ({"pause_epoch": 3}, 8)
        assert after.verification is Verification.UNVERIFIED
        assert outcome.event is not None
        assert outcome.event.data == {
            "result": {"pause_epoch": 3},
            "revision": 8,
            "verification": "unverified",
        }

    def test_failure_says_why_and_what_is_left_behind(self) -> None:
        outcome = taken(in_state(OperationState.RUNNING), Failed(error=LOST, revision=9))
        assert (outcome.operation.error, outcome.operation.revision) == (LOST, 9)
        assert outcome.operation.result is None
        assert outcome.event is not None
        assert outcome.event.data == {
            "error": {
                "code": "INTERNAL",
                "reason": "RANK_LOST",
                "message": "rank 1 is gone",
                "retryable": False,
                "ranks": [1],
                "effect": "unknown",
            },
            "revision": 9,
        }

    def test_a_cancelled_operation_has_neither_result_nor_error(self) -> None:
        fact = Cancelled(message="as asked", revision=None)
        outcome = taken(in_state(OperationState.CANCELLING), fact)
        assert (outcome.operation.result, outcome.operation.error) == (None, None)
        assert outcome.event is not None
        assert outcome.event.data == {"message": "as asked", "revision": None}

    @pytest.mark.parametrize("end", [s for s in OperationState if s.terminal])
    def test_a_settled_end_is_marked_as_a_persons_word(self, end: OperationState) -> None:
        fact = Settled(end=end, by="ada", reason="seen by eye")
        outcome = taken(in_state(OperationState.RECONCILING), fact)
        after = outcome.operation
        assert (after.state, after.verification) == (end, Verification.SETTLED)
        assert (after.error is not None) is (end is OperationState.FAILED)
        assert outcome.event is not None
        assert outcome.event.type == "settled"
        told = {"state": end.value, "by": "ada", "reason": "seen by eye", "message": ""}
        assert outcome.event.data == told

    def test_a_settled_failure_says_what_was_stated_of_it(self) -> None:
        for message, said in (("", "seen by eye"), ("the rank is gone", "the rank is gone")):
            fact = Settled(
                end=OperationState.FAILED, by="ada", reason="seen by eye", message=message
            )
            error = taken(in_state(OperationState.RECONCILING), fact).operation.error
            assert error == OperationError("UNKNOWN", "SETTLED", said)


class LifeOfAnOperation(RuleBasedStateMachine):
    """Whatever is told, by the engine, the runner or a person, in whatever order and how often.

    Keeps the log as a ledger would, and holds the promises of a stream against it.
    """

    @initialize(kind=st.sampled_from(OperationKind))
    def accept(self, kind: OperationKind) -> None:
        self.operation = new_operation(kind)
        self.log = [accepted_event(self.operation)]
        self.states = [self.operation.state]

    @rule(fact=news)
    def hear_news(self, fact: Fact) -> None:
        """Ends are one fact in four: without this rule few lives would be long."""
        self.hear(fact, 1)

    @rule(fact=facts, seconds=st.integers(min_value=-5, max_value=3600))
    def hear(self, fact: Fact, seconds: int) -> None:
        outcome = advance(self.operation, fact, NOON + timedelta(seconds=seconds))
        if isinstance(outcome, Rejected):
            return
        self.operation = outcome.operation
        self.states.append(outcome.operation.state)
        if outcome.event is not None:
            self.log.append(outcome.event)

    @rule()
    def hear_it_all_again(self) -> None:
        """A re-attached stream: nothing that bears a number seen before may count."""
        seen = self.operation.engine_sequence
        for number in range(1, seen + 1):
            again = Progressed(engine_sequence=number, progress=ProgressValue("draining"))
            assert isinstance(advance(self.operation, again, LATER), Rejected)

    @invariant()
    def numbers_have_no_gap(self) -> None:
        assert [event.sequence for event in self.log] == list(range(1, len(self.log) + 1))
        assert self.operation.sequence == len(self.log)

    @invariant()
    def at_most_one_end_and_nothing_after_it(self) -> None:
        ends = [e for e in self.log if EventType(e.type) in TERMINAL_EVENTS]
        assert len(ends) == (1 if self.operation.done else 0)
        assert not ends or ends[0] is self.log[-1]

    @invariant()
    def a_terminal_state_is_the_last_one(self) -> None:
        assert not any(state.terminal for state in self.states[:-1])

    @invariant()
    def the_engines_numbers_only_rise(self) -> None:
        told = [e.engine_sequence for e in self.log if e.engine_sequence is not None]
        assert told == sorted(set(told))

    @invariant()
    def success_needs_to_have_been_sent(self) -> None:
        if self.operation.state is OperationState.SUCCEEDED:
            assert self.operation.started_at is not None

    @invariant()
    def only_what_waits_has_a_place(self) -> None:
        op = self.operation
        assert (op.queue_position is not None) is (op.state is OperationState.QUEUED)

    @invariant()
    def a_result_or_an_error_belongs_to_the_end(self) -> None:
        op = self.operation
        assert op.result is None or op.state is OperationState.SUCCEEDED
        assert op.error is None or op.state is OperationState.FAILED
        assert (op.ended_at is not None) is op.done


def test_the_life_of_an_operation() -> None:
    run_state_machine_as_test(LifeOfAnOperation)
