"""What the violation of each constraint means. The one place that knows their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import PrimaryKeyConstraint, UniqueConstraint
from sqlalchemy.exc import IntegrityError

from app.domain.errors import EngineExists
from app.ledger.database import Raced
from app.ledger.errors import Superseded
from app.ledger.tables import metadata

_UNIQUE_ON_SQLITE = re.compile(r"UNIQUE constraint failed: (.+)")


def _meaning(constraint: str | None) -> Exception | None:
    match constraint:
        case "pk_engines":
            return EngineExists("an engine of that id is or was registered; ids are not reused")
        case "uq_operations_engine_slot" | "pk_idempotency_keys":
            # Somebody else has just taken the engine's slot, or used the key. Who it was, and so
            # which refusal or which operation is the answer, a new transaction can tell.
            return Raced()
        case "uq_events_operation_id_sequence" | "uq_events_operation_end" | "pk_stages":
            return Superseded("the operation has gone on in the meantime")
    return None


@contextmanager
def violations() -> Iterator[None]:
    """A violation becomes what it means; one that has no meaning is a fault and stays as it is."""
    try:
        yield
    except IntegrityError as error:
        meaning = _meaning(violated(error))
        if meaning is None:
            raise
        raise meaning from None


def violated(error: IntegrityError) -> str | None:
    """The name of the constraint, or None where the database does not tell."""
    diagnosis = getattr(error.orig, "diag", None)
    if diagnosis is not None:
        name: str | None = diagnosis.constraint_name
        return name
    # SQLite names the columns, and only of unique constraints.
    found = _UNIQUE_ON_SQLITE.search(str(error.orig))
    return None if found is None else _unique_by_columns().get(found[1])


def _unique_by_columns() -> dict[str, str]:
    """`"table.column, table.column"` to the constraint or index that makes them unique."""
    named: dict[str, str] = {}
    for table in metadata.tables.values():
        keys = [
            rule
            for rule in table.constraints
            if isinstance(rule, PrimaryKeyConstraint | UniqueConstraint)
        ]
        unique = [*keys, *(index for index in table.indexes if index.unique)]
        for rule in unique:
            columns = ", ".join(f"{table.name}.{column.name}" for column in rule.columns)
            named[columns] = str(rule.name)
    return named
