"""Queries for lists that may be long: each page costs the same, however long the history.

A page is read along an index that ends in the number the list goes by, from the last row of the
page before. For that each column that leads the index has to be one value. Of several values each
has a query of its own, as long as the page, and the page is made from the rows they found.

So an index also serves filters that leave out a column of few values: kind and state are spelled
out then, each of them, 40 queries at most. What is open is little, has indexes of its own, and is
looked at row by row.

A key stands for one operation of each caller, until it is forgotten. So few share one that they are
looked at row by row too, and by the index of keys alone.

Of the audit only one condition leads an index, and all others are looked at row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, Table, func, select, union_all

from app.domain.kinds import OperationKind, OperationState
from app.ledger.sights import Seen
from app.ledger.tables import audit, is_ended, is_open, operations
from app.ledger.values import AuditFilter, OperationFilter

SKEW = timedelta(hours=1)
"""How far the clocks of gateways may be apart, and how long an acceptance may take, for a list that
begins at a moment to be complete."""

_FIRST = datetime.min.replace(tzinfo=UTC)
_MOST_BRANCHES = 64
"""So many queries make one page at most; SQLite takes 500 in one."""


def page_of_operations(
    operation: Select[Any],
    wanted: OperationFilter,
    before: int | None,
    size: int,
    seen: Seen | None = None,
) -> Select[Any]:
    """Up to `size` + 1 operations with a number below `before`, newest first. `operation`: what is
    read of each. `seen`: of these engines alone, which are some."""
    if wanted.key is not None:
        branches = [[operations.c.idempotency_key == wanted.key, *_row_by_row(wanted, seen)]]
        return _newest(operation, operations.c.ordinal, branches, before, size)
    branches = _branches(wanted)
    if isinstance(seen, tuple):
        apart = [branch for one in seen for branch in _branches(replace(wanted, engine_id=one))]
        if len(apart) <= _MOST_BRANCHES:
            branches, seen = apart, None
    if seen is not None:
        branches = [[*branch, operations.c.engine_id.in_(seen)] for branch in branches]
    # For a list since a moment SQLite takes the smallest index that will do, and the one of all
    # columns only where numbers and times are all that is read.
    at_once = wanted.since is None
    return _newest(operation, operations.c.ordinal, branches, before, size, at_once=at_once)


def page_of_audit(
    wanted: AuditFilter, before: int | None, size: int, seen: Seen | None = None
) -> Select[Any]:
    """Up to `size` + 1 entries with a number below `before`, newest first; of `seen` as above."""
    conditions: list[ColumnElement[bool]] = []
    for name in ("engine_id", "operation_id", "subject", "action"):
        value = getattr(wanted, name)
        if value is not None:
            conditions.append(audit.c[name] == value)
    if wanted.since is not None:
        conditions += _since(audit, audit.c.id, audit.c.at, wanted.since)
    branches = [conditions]
    if isinstance(seen, tuple):
        branches = [[*conditions, audit.c.engine_id == one] for one in seen]
    elif seen is not None:
        branches = [[*conditions, audit.c.engine_id.in_(seen)]]
    return _newest(select(audit), audit.c.id, branches, before, size)


def _newest(
    row: Select[Any],
    number: Column[int],
    branches: Sequence[list[ColumnElement[bool]]],
    before: int | None,
    size: int,
    *,
    at_once: bool = True,
) -> Select[Any]:
    """`branches`: conditions of which one list has to hold; no row fits two of them. `at_once`: of
    a single one the rows may be read where their numbers are found."""
    if before is not None:
        branches = [[*branch, number < before] for branch in branches]
    if len(branches) == 1 and at_once:
        return row.where(*branches[0]).order_by(number.desc()).limit(size + 1)
    parts = [
        select(number).where(*branch).order_by(number.desc()).limit(size + 1).subquery()
        for branch in branches
    ]
    found = union_all(*(select(part.c[number.name]) for part in parts)).subquery()
    newest = select(found.c[number.name]).order_by(found.c[number.name].desc()).limit(size + 1)
    return row.where(number.in_(newest)).order_by(number.desc()).limit(size + 1)


def among_few(column: Column[str], value: str) -> ColumnElement[bool]:
    """A condition on the few that another one has found, such as what is open. Not by the column's
    own index, which leads through all of history, though SQLite may think better of it."""
    return column.concat("") == value


def _branches(wanted: OperationFilter) -> list[list[ColumnElement[bool]]]:
    """Conditions of which one list has to hold; no operation fits two of them."""
    kinds, states = sorted(wanted.kinds), sorted(wanted.states)
    if wanted.subject is not None and (wanted.engine_id is not None or kinds or states):
        # Their index has every other column before the number.
        kinds, states = kinds or list(OperationKind), states or list(OperationState)
    common = _of_all(wanted)
    of_kinds = [[*common, operations.c.kind == kind.value] for kind in kinds] or [common]
    if not states:
        return of_kinds
    branches = [
        [*branch, is_ended, operations.c.state == state.value]
        for branch in of_kinds
        for state in states
        if state.terminal
    ]
    still = [state.value for state in states if not state.terminal]
    if still:
        branches.append(_of_open(wanted, still))
    return branches


def _of_all(wanted: OperationFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [
        column == value
        for column, value in (
            (operations.c.engine_id, wanted.engine_id),
            (operations.c.subject, wanted.subject),
            (operations.c.engine_operation_id, wanted.engine_operation_id),
        )
        if value is not None
    ]
    if wanted.since is not None:
        number, time = operations.c.ordinal, operations.c.created_at
        conditions += _since(operations, number, time, wanted.since)
    return conditions


def _of_open(wanted: OperationFilter, states: list[str]) -> list[ColumnElement[bool]]:
    rest = replace(wanted, states=frozenset())
    return [is_open, operations.c.state.in_(states), *_row_by_row(rest)]


def _row_by_row(wanted: OperationFilter, seen: Seen | None = None) -> list[ColumnElement[bool]]:
    """All of it but the key, of few that were found by something else."""
    conditions = [
        among_few(column, value)
        for column, value in (
            (operations.c.engine_id, wanted.engine_id),
            (operations.c.subject, wanted.subject),
            (operations.c.engine_operation_id, wanted.engine_operation_id),
        )
        if value is not None
    ]
    for column, values in ((operations.c.kind, wanted.kinds), (operations.c.state, wanted.states)):
        if values:
            conditions.append(column.concat("").in_(sorted(value.value for value in values)))
    if seen is not None:
        conditions.append(operations.c.engine_id.concat("").in_(seen))
    if wanted.since is not None:
        conditions.append(operations.c.created_at >= wanted.since)
    return conditions


def _since(
    table: Table, number: Column[int], time: Column[datetime], since: datetime
) -> list[ColumnElement[bool]]:
    """Numbers rise with time but for the differences of clocks. So what is younger than a moment
    lies above what is clearly older, and what lies below need not be read."""
    if since - _FIRST < SKEW:
        return [time >= since]  # no calendar has a moment that is clearly older
    # By another name, or it would be part of the query around it.
    earlier = table.alias("earlier")
    older = (
        select(earlier.c[number.name])
        .where(earlier.c[time.name] < since - SKEW)
        .order_by(earlier.c[time.name].desc())
        .limit(1)
        .scalar_subquery()
    )
    return [number > func.coalesce(older, 0), time >= since]
