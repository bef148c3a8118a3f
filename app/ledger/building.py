"""Building indexes of tables that are being written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import TextClause, text

_HALF_BUILT = text(
    "SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
    " WHERE relname = :name AND NOT indisvalid AND pg_table_is_visible(indrelid)"
)


def build_indexes(
    context: MigrationContext,
    table: str,
    indexes: Mapping[str, Sequence[str]],
    *,
    where: TextClause | None = None,
) -> None:
    """For a migration that does nothing else. `indexes`: columns by name. `where`: of all of them.

    On PostgreSQL nobody who writes waits for it. That takes several transactions, so the migration
    is not whole or nothing there: broken off, it leaves some of its indexes, and one that is of no
    use and has to be made again. Run again, it goes on from there. On SQLite nobody else has the
    file, and the migration stays whole.
    """
    build = Operations(context)
    if context.dialect.name != "postgresql":
        for name, columns in indexes.items():
            build.create_index(name, table, list(columns), sqlite_where=where)
        return
    with context.autocommit_block():
        for name, columns in indexes.items():
            assert context.connection is not None
            if context.connection.execute(_HALF_BUILT, {"name": name}).first() is not None:
                build.drop_index(name, table, postgresql_concurrently=True)
            build.create_index(
                name,
                table,
                list(columns),
                if_not_exists=True,
                postgresql_concurrently=True,
                postgresql_where=where,
            )
