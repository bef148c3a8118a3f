"""Kinds, states, scopes, errors, ranks and facts: the words everything else is said in."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import errors, kinds
from app.domain.engine import Dialect, Engine, Member, Registration
from app.domain.errors import ChadburnError, EngineBusy, FieldFault, RevisionMismatch
from app.domain.events import TERMINAL_EVENTS, EventType
from app.domain.facts import EngineFacts
from app.domain.kinds import Admission, OperationKind, OperationState, WeightsState
from app.domain.ranks import RankReport, with_report
from app.domain.scopes import Scope, admin_scopes
from tests.domain.strategies import NOON, engine_facts, reports

SCOPE_NAMES = [scope.value for scope in Scope]


class TestScopes:
    @given(st.lists(st.sampled_from(SCOPE_NAMES) | st.text(max_size=20)))
    def test_only_what_is_named_is_granted(self, names: list[str]) -> None:
        granted = admin_scopes(names)
        assert {scope.value for scope in granted} == set(names) & set(SCOPE_NAMES)

    @given(st.sampled_from(SCOPE_NAMES), st.text(min_size=1, max_size=4))
    def test_nothing_near_a_name_is_that_name(self, name: str, extra: str) -> None:
        near = [name + extra, extra + name, name[:-1], name.upper(), name.replace(":", ".")]
        assert admin_scopes(set(near) - set(SCOPE_NAMES)) == frozenset()

    @pytest.mark.parametrize(
        "name",
        ["*", "admin", "admin:", "admin:*", "admin:**", "admin:r*", "", " admin:read", "inference"],
    )
    def test_there_are_no_wildcards_and_no_prefixes(self, name: str) -> None:
        assert admin_scopes([name]) == frozenset()

    def test_a_string_instead_of_a_list_grants_nothing(self) -> None:
        assert admin_scopes("admin:read") == frozenset()

    def test_unsafe_weights_are_a_permission_of_their_own(self) -> None:
        assert admin_scopes(["admin:weights"]) == {Scope.WEIGHTS}


class TestKinds:
    def test_who_may_order_what(self) -> None:
        assert {kind.value: kind.scope.value for kind in OperationKind} == {
            "flush_caches": "admin:cache",
            "pause": "admin:pause",
            "resume": "admin:pause",
            "release_resources": "admin:resources",
            "restore_resources": "admin:resources",
            "update_weights": "admin:weights",
            "set_weight_version": "admin:weights",
            "profile": "admin:profile",
            "reconfigure_serving": "admin:reconfigure",
            "load_lora": "admin:adapters",
            "unload_lora": "admin:adapters",
            "abort_requests": "admin:abort",
            "shutdown": "admin:shutdown",
        }

    def test_what_may_run_beside_others(self) -> None:
        beside = {kind for kind in OperationKind if not kind.exclusive}
        assert beside == {OperationKind.ABORT_REQUESTS, OperationKind.PROFILE}

    def test_which_states_are_ends(self) -> None:
        ends = {state.value for state in OperationState if state.terminal}
        assert ends == {"succeeded", "failed", "cancelled"}

    def test_which_events_are_ends(self) -> None:
        ends = {event.value for event in EventType if event.terminal}
        assert ends == {"completed", "failed", "cancelled", "settled"}
        assert frozenset(EventType(name) for name in ends) == TERMINAL_EVENTS

    def test_values_are_the_lower_snake_of_their_names(self) -> None:
        enums = [
            value
            for _, value in inspect.getmembers(kinds, inspect.isclass)
            if issubclass(value, StrEnum) and value.__module__ == kinds.__name__
        ]
        assert enums
        for enum in enums:
            assert [member.value for member in enum] == [member.name.lower() for member in enum]


def leaves() -> list[type[ChadburnError]]:
    return [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, ChadburnError)
    ]


class TestErrors:
    def test_a_reason_names_one_error(self) -> None:
        reasons = [leaf.reason for leaf in leaves()]
        assert len(reasons) == len(set(reasons))
        assert all(reason.replace("_", "").isupper() for reason in reasons)

    def test_an_error_carries_what_an_edge_needs(self) -> None:
        fault = FieldFault("/mode", "unknown")
        error = errors.InvalidArgument("look", faults=(fault,), operation_id="op", retry_after_s=3)
        assert (str(error), error.message, error.faults) == ("look", "look", (fault,))
        assert (error.operation_id, error.retry_after_s, error.retryable) == ("op", 3, False)

    def test_busy_names_the_operation_and_may_be_tried_again(self) -> None:
        error = EngineBusy(operation_id="op-9")
        assert (error.operation_id, error.retryable, error.retry_after_s) == ("op-9", True, 1)

    def test_a_mismatch_says_both_numbers(self) -> None:
        assert str(RevisionMismatch(expected=3, current=5)) == (
            "expected revision 3, the current revision is 5"
        )


class TestRanks:
    @given(st.lists(reports, max_size=20))
    def test_each_rank_has_its_last_word_in_rank_order(self, told: list[RankReport]) -> None:
        known: tuple[RankReport, ...] = ()
        for report in told:
            known = with_report(known, report)
        assert [report.rank for report in known] == sorted({report.rank for report in told})
        for report in known:
            assert report == [said for said in told if said.rank == report.rank][-1]


class TestEngine:
    @given(engine_facts)
    def test_it_serves_only_when_nothing_stands_against_it(self, facts: EngineFacts) -> None:
        assert facts.serving is (
            facts.admission is Admission.OPEN
            and facts.released == frozenset()
            and facts.weights.state is WeightsState.VALID
        )

    def test_it_is_called_what_it_was_registered_as(self) -> None:
        fields: dict[str, Any] = {"created_at": NOON, "updated_at": NOON}
        member = Member(0, "127.0.0.1:1", "127.0.0.1:2")
        registration = Registration(
            id="torch-0", dialect=Dialect.OPENENGINE, members=(member,), **fields
        )
        engine = Engine(registration)
        assert (engine.id, engine.observed.facts, engine.running_operation) == (
            "torch-0",
            None,
            None,
        )
