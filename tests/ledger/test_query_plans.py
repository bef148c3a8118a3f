"""What is asked all the time is answered by an index, however long the history.

On SQLite, whose plans do not depend on how much there is; it is also the stricter of the two
about using a partial index.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine.interfaces import ExecutionContext

from app.domain.engine import Observed
from app.domain.errors import EngineBusy
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Operation
from app.domain.selectors import Selector, Sight
from app.domain.transitions import Dispatched
from app.ledger import Ledger
from app.ledger.pruning import Place
from app.ledger.values import AuditFilter, EngineFilter, EventFilter, OperationFilter
from tests.ledger.samples import (
    ALICE,
    IN_ANY_CASE,
    START,
    SetClock,
    accept,
    claim,
    order,
    record,
    with_engine,
)

pytestmark = pytest.mark.anyio


def kinds(*names: str) -> frozenset[OperationKind]:
    return frozenset(map(OperationKind, names))


@pytest.fixture
async def ledger(tmp_path: Path, clock: SetClock) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock, migrate=True)
    try:
        await with_engine(opened)
        yield opened
    finally:
        await opened.close()


async def plans_of(ledger: Ledger, call: Callable[[], Awaitable[object]]) -> list[str]:
    """The plan of every statement that the call executed."""
    executed: list[tuple[str, Any]] = []
    engine = ledger.events._database._engine

    def note(
        _connection: object,
        _cursor: object,
        statement: str,
        parameters: Any,
        _context: ExecutionContext,
        _many: bool,
    ) -> None:
        executed.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        await call()
    finally:
        event.remove(engine, "before_cursor_execute", note)

    plans: list[str] = []
    with engine.connect() as connection:
        for statement, parameters in executed:
            if statement.split()[0] in ("SELECT", "UPDATE", "DELETE"):
                rows = connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", tuple(parameters)
                )
                plans += [f"{row[-1]}   <- {' '.join(statement.split())}" for row in rows]
    assert plans
    return plans


async def test_no_hot_path_reads_a_whole_table(ledger: Ledger) -> None:
    first = await accept(ledger, order(), key=claim())
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: ledger.operations.get(first.id),
        "replay": lambda: ledger.operations.replay(ALICE, "k1", "f1"),
        "open ones": lambda: ledger.operations.open_ones(),
        "open ones of one": lambda: ledger.operations.open_ones("e1"),
        "open marks": ledger.operations.open_marks,
        "several": lambda: ledger.operations.several([first.id]),
        "line": lambda: ledger.operations.line("e1"),
        "page": lambda: ledger.operations.page(OperationFilter(), 99),
        "page of one": lambda: ledger.operations.page(OperationFilter(engine_id="e1"), 99),
        "record": lambda: record(ledger, first, Dispatched()),
        "accept": lambda: refused(ledger, order()),
        "engine": lambda: ledger.engines.get("e1"),
        "engines": lambda: ledger.engines.page(EngineFilter(), "a"),
        "observe": lambda: ledger.engines.observe("e1", Observed()),
        "after": lambda: ledger.events.after(1, EventFilter()),
        "of one operation": lambda: ledger.events.after(1, EventFilter(operation_id=first.id)),
        "operation's events": lambda: ledger.events.of_operation(first.id, 1),
        "audit": lambda: ledger.audit.page(AuditFilter(), 99),
        "lease": lambda: ledger.leases.acquire("e1", "a", 1),
        "keys": lambda: ledger.pruning.keys(),
        "prune": lambda: ledger.pruning.operations(START, Place(START, 1)),
        "prune the audit": lambda: ledger.pruning.audit(START),
    }
    # One row, and no more.
    allowed = "SCAN ledger"
    for name, call in calls.items():
        scans = [
            plan
            for plan in await plans_of(ledger, call)
            if plan.startswith("SCAN ") and " USING " not in plan.split("   <-")[0]
        ]
        assert [plan for plan in scans if not plan.startswith(allowed)] == [], name


async def test_the_slot_and_what_is_open_are_found_by_their_own_indexes(ledger: Ledger) -> None:
    await accept(ledger, order())
    plans = await plans_of(ledger, ledger.operations.open_ones)
    assert "ix_operations_open" in plans[0]
    plans = await plans_of(ledger, lambda: ledger.engines.get("e1"))
    assert any("uq_operations_engine_slot" in plan for plan in plans), plans


@pytest.mark.parametrize("behind", [None, Place(START, 1)])
async def test_what_is_to_be_pruned_is_found_in_the_order_of_ends(
    ledger: Ledger, behind: Place | None
) -> None:
    await accept(ledger, order())
    plans = await plans_of(ledger, lambda: ledger.pruning.operations(START, behind))
    assert any("ix_operations_ended_at" in plan for plan in plans), plans
    assert not any("TEMP B-TREE" in plan for plan in plans), plans


async def test_who_waits_for_an_engine_is_found_among_its_open_ones(ledger: Ledger) -> None:
    await accept(ledger, order())
    waiting = await accept(ledger, order(), queueing=IN_ANY_CASE)
    for call in (
        lambda: ledger.operations.line("e1"),
        lambda: ledger.operations.get(waiting.id),
        lambda: refused(ledger, order()),
    ):
        plans = await plans_of(ledger, call)
        assert any("ix_operations_engine_open" in plan for plan in plans), plans


ENDED = OperationState.FAILED, OperationState.CANCELLED
LISTS = [
    (OperationFilter(kinds=kinds("pause")), ["ix_operations_kind_ordinal"]),
    (OperationFilter(kinds=kinds("pause", "resume")), ["ix_operations_kind_ordinal"] * 2),
    (OperationFilter(states=frozenset(ENDED[:1])), ["ix_operations_end"]),
    (OperationFilter(states=frozenset(ENDED)), ["ix_operations_end"] * 2),
    (OperationFilter(states=frozenset({OperationState.RUNNING})), ["ix_operations_open"]),
    (
        OperationFilter(states=frozenset({OperationState.RUNNING, ENDED[0]})),
        ["ix_operations_open", "ix_operations_end"],
    ),
    (OperationFilter(engine_id="e1"), ["ix_operations_engine_id_ordinal"]),
    (
        OperationFilter(engine_id="e1", kinds=kinds("pause")),
        ["ix_operations_engine_id_kind_ordinal"],
    ),
    (OperationFilter(engine_id="e1", states=frozenset(ENDED[:1])), ["ix_operations_engine_end"]),
    (
        OperationFilter(engine_id="e1", states=frozenset({OperationState.RUNNING})),
        ["ix_operations_open"],
    ),
    (OperationFilter(subject="alice"), ["ix_operations_subject_ordinal"]),
    (OperationFilter(since=START), ["ix_operations_created_at", "INTEGER PRIMARY KEY"]),
]


def some_of_each() -> list[OperationFilter]:
    """Every combination of filters, with one value of each."""
    choices = itertools.product(
        (None, "e1"), (kinds(), kinds("pause")), (frozenset(), frozenset(ENDED[:1])),
        (None, "alice"), (None, START),
    )  # fmt: skip
    return [
        OperationFilter(engine_id=engine, kinds=of, states=states, subject=who, since=since)
        for engine, of, states, who, since in choices
    ]


async def test_no_combination_of_filters_reads_what_it_does_not_show(ledger: Ledger) -> None:
    """Each column that is asked for leads the index, and what follows them all is the number.
    Only what is open is looked through, and that by its own index."""
    for wanted, before in itertools.product(some_of_each(), (None, 99)):
        plans = await plans_of(ledger, lambda: page(ledger, wanted, before))  # noqa: B023 (now)
        steps = [plan.split("   <-")[0] for plan in plans]
        asked = {
            "engine_id": wanted.engine_id, "kind": wanted.kinds, "state": wanted.states,
            "subject": wanted.subject,
        }  # fmt: skip
        led = [f"{column}=?" for column, value in asked.items() if value]
        found = [step for step in steps if " operations " in step and "_open" not in step]
        # The rows of the page, by the numbers that the branches have found.
        read = [step for step in found if not step.endswith("(rowid=?)")]
        assert read or not (led or before), (wanted, steps)
        for step in read:
            assert all(column in step for column in led), (wanted, step)
            assert not before or "ordinal<?" in step or "rowid<?" in step, (wanted, step)


async def test_a_key_leads_whatever_else_is_asked(ledger: Ledger) -> None:
    """Few share one, so nothing beside it may lead through history."""
    await with_engine(ledger, "e2")
    sight = Sight((Selector(ids=frozenset({"e1"})), Selector(ids=frozenset({"e2"}))))
    some = [replace(one, key="k1") for one in some_of_each()]
    for wanted, before in itertools.product(
        [*some, OperationFilter(key="k1", sight=sight)], (None, 99)
    ):
        plans = await plans_of(ledger, lambda: page(ledger, wanted, before))  # noqa: B023 (now)
        steps = [plan.split("   <-")[0] for plan in plans]
        found = [step for step in steps if " operations " in step]
        led = "idempotency_key=?" + (" AND ordinal<?" if before else "")
        assert [led in step for step in found] == [True], (wanted, steps)
        assert not any("TEMP B-TREE" in step for step in steps), (wanted, steps)


def page(ledger: Ledger, wanted: OperationFilter, before: int | None) -> Awaitable[object]:
    return ledger.operations.page(wanted, before)


@pytest.mark.parametrize(("wanted", "expected"), LISTS)
@pytest.mark.parametrize("before", [None, 99])
async def test_each_list_is_read_along_its_index(
    ledger: Ledger, wanted: OperationFilter, expected: list[str], before: int | None
) -> None:
    plans = await plans_of(ledger, lambda: ledger.operations.page(wanted, before))
    steps = [plan.split("   <-")[0] for plan in plans]
    for index in set(expected):
        assert sum(index in step for step in steps) >= expected.count(index), steps
    if len(expected) == 1:
        assert not any("TEMP B-TREE" in step for step in steps), steps


async def test_the_audit_is_read_along_its_indexes(ledger: Ledger) -> None:
    for wanted, expected in (
        (AuditFilter(action="pause"), "ix_audit_action_id"),
        (AuditFilter(since=START), "ix_audit_at"),
        (AuditFilter(engine_id="e1"), "ix_audit_engine_id_id"),
    ):
        plans = await plans_of(ledger, lambda wanted=wanted: ledger.audit.page(wanted))  # type: ignore[misc]
        assert any(expected in plan for plan in plans), plans
        assert not any("TEMP B-TREE" in plan for plan in plans), plans


async def test_what_is_open_at_an_engine_is_not_looked_for_in_its_history(ledger: Ledger) -> None:
    await accept(ledger, order())
    plans = await plans_of(ledger, lambda: ledger.operations.open_ones("e1"))
    assert any("ix_operations_engine_open" in plan for plan in plans), plans


async def refused(ledger: Ledger, operation: Operation) -> None:
    with pytest.raises(EngineBusy):
        await accept(ledger, operation, key=claim("other"))
