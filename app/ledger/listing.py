"""Queries for lists that may be long: each page costs the same, however long the history.

A page is read along an index that ends in the number the list goes by, from the last row of the
page before. For that a filter has to be one value. Of several values each has a query of its own,
as long as the page, and the page is made from the rows they found.

Conditions beside the one that leads the index are looked at row by row: engine with kind, and
engine with state, have an index; other pairs, and three at a time, have none.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Column, ColumnElement, Select, Table, func, select, union_all

from app.ledger.tables import audit, is_ended, is_open, operations
from app.ledger.values import AuditFilter, OperationFilter

SKEW = timedelta(hours=1)
"""How far the clocks of gateways may be apart, and how long an acceptance may take, for a list that
begins at a moment to be complete."""

_FIRST = datetime.min.replace(tzinfo=UTC)


def page_of_operations(
    operation: Select[Any], wanted: OperationFilter, before: int | None, size: int
) -> Select[Any]:
    """Up to `size` + 1 operations with a number below `before`, newest first. `operation`: what is
    read of each."""
    branches = _branches(wanted)
    if before is not None:
        branches = [[*branch, operations.c.ordinal < before] for branch in branches]
    newest_first = operations.c.ordinal.desc()
    if len(branches) == 1:
        query = operation.where(*branches[0])
        return query.order_by(newest_first).limit(size + 1)
    parts = [
        select(operations.c.ordinal)
        .where(*branch)
        .order_by(newest_first)
        .limit(size + 1)
        .subquery()
        for branch in branches
    ]
    found = union_all(*(select(part.c.ordinal) for part in parts))
    query = operation.where(operations.c.ordinal.in_(found))
    return query.order_by(newest_first).limit(size + 1)


def page_of_audit(wanted: AuditFilter, before: int | None, size: int) -> Select[Any]:
    """Up to `size` + 1 entries with a number below `before`, newest first."""
    query = select(audit)
    for name in ("engine_id", "operation_id", "subject", "action"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(audit.c[name] == value)
    if wanted.since is not None:
        query = query.where(*_since(audit, audit.c.id, audit.c.at, wanted.since))
    if before is not None:
        query = query.where(audit.c.id < before)
    return query.order_by(audit.c.id.desc()).limit(size + 1)


def among_open(column: Column[str], value: str) -> ColumnElement[bool]:
    """A condition on what is open. Not by the column's own index, which leads through all of
    history, though SQLite thinks better of it than of the one of the few that are open."""
    return column.concat("") == value


def _branches(wanted: OperationFilter) -> list[list[ColumnElement[bool]]]:
    """Conditions of which one list has to hold; no operation fits two of them."""
    kinds = sorted(wanted.kinds)
    if not wanted.states:
        common = _of_all(wanted)
        return [[*common, operations.c.kind == kind.value] for kind in kinds] or [common]
    # Ended states lead an index. What is open is little, and has one of its own.
    ended = sorted(state.value for state in wanted.states if state.terminal)
    still = sorted(state.value for state in wanted.states if not state.terminal)
    branches = [[*_of_all(wanted), is_ended, operations.c.state == state] for state in ended]
    if still:
        branches.append([*_of_all(wanted, "open"), is_open, operations.c.state.in_(still)])
    if kinds:
        among = operations.c.kind.in_([kind.value for kind in kinds])
        branches = [[*branch, among] for branch in branches]
    return branches


def _of_all(
    wanted: OperationFilter, which: Literal["any", "open"] = "any"
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for column, value in (
        (operations.c.engine_id, wanted.engine_id),
        (operations.c.subject, wanted.subject),
        (operations.c.engine_operation_id, wanted.engine_operation_id),
    ):
        if value is None:
            continue
        # An engine's open ones have an index.
        apart = which == "open" and column is not operations.c.engine_id
        conditions.append(among_open(column, value) if apart else column == value)
    if wanted.since is not None:
        number, time = operations.c.ordinal, operations.c.created_at
        conditions += _since(operations, number, time, wanted.since)
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
