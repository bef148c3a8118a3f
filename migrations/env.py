"""How migrations run: on a connection that the program hands over, or for the command line."""

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from app.ledger.schema import alone, note_compatibility
from app.ledger.tables import metadata


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite alters most things only by making the table again.
        render_as_batch=True,
        # True of SQLite too, when BEGIN is sent by us: a migration is whole or has not been.
        transactional_ddl=True,
        # After each, not once at the end: one that builds indexes commits what was before it, and
        # may be broken off.
        on_version_apply=lambda **_: note_compatibility(connection),
    )
    with context.begin_transaction():
        context.run_migrations()
        if connection.dialect.name == "sqlite":
            # Foreign keys are off while tables are made again; here they are made good.
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            if broken:
                raise RuntimeError(f"the migration would break foreign keys: {broken}")


async def run_for_command_line() -> None:
    url = context.get_x_argument(as_dictionary=True).get("url")
    url = url or os.environ.get("CHADBURN_DATABASE_URL")
    if not url:
        raise SystemExit("name the database: CHADBURN_DATABASE_URL=… or alembic -x url=…")
    async with alone(url) as connection:
        await connection.run_sync(run)


if context.is_offline_mode():
    raise SystemExit("migrations need the database itself; there is no --sql")
given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_for_command_line())
