"""What a caller may see, as conditions of queries. Removed engines keep their labels, and so their
history its readers."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Select, and_, false, func, not_, or_, select, true
from sqlalchemy.dialects.postgresql import JSONB

from app.domain.selectors import Selector, Sight
from app.ledger.database import Statements
from app.ledger.tables import engines

APART = 16
"""So many engines are read one by one, each along its index, and more of them together."""

Seen = tuple[str, ...] | Select[tuple[str]]
"""The ids of a few engines, or the query that gives those of many."""


def within(sight: Sight, *, postgres: bool) -> ColumnElement[bool]:
    """Of a row of `engines`."""
    if sight.selectors is None:
        return true()
    return or_(false(), *(_takes(selector, postgres) for selector in sight.selectors))


def ids_within(sight: Sight, *, postgres: bool) -> Select[tuple[str]]:
    return select(engines.c.id).where(within(sight, postgres=postgres))


async def seen_ids(
    connection: Statements, sight: Sight, engine_id: str | None, *, postgres: bool
) -> Seen | None:
    """Those of the sight; where `engine_id` is given, that one or none. None: no limit."""
    if sight.unlimited:
        return None
    query = ids_within(sight, postgres=postgres)
    if engine_id is not None:
        query = query.where(engines.c.id == engine_id)
    few = (await connection.execute(query.order_by(engines.c.id).limit(APART + 1))).all()
    return tuple(row.id for row in few) if len(few) <= APART else query


def has_label(name: str, values: Iterable[str], *, postgres: bool) -> ColumnElement[bool]:
    """Whether a row of `engines` has the label, with one of the values. Never NULL."""
    wanted = sorted(values)
    if postgres:
        value = engines.c.labels.cast(JSONB)[name].astext
        return func.coalesce(value.in_(wanted), false())
    # By rows and not by path, which would make the quotes in a label's name matter.
    pairs = func.json_each(engines.c.labels).table_valued("key", "value")
    return select(pairs.c.key).where(pairs.c.key == name, pairs.c.value.in_(wanted)).exists()


def _takes(selector: Selector, postgres: bool) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = []
    if selector.ids is not None:
        conditions.append(engines.c.id.in_(sorted(selector.ids)))
    for name, values in sorted(selector.labels.items()):
        conditions.append(has_label(name, values, postgres=postgres))
    for name, values in sorted(selector.without.items()):
        conditions.append(not_(has_label(name, values, postgres=postgres)))
    return and_(true(), *conditions)
