"""What gateways keep of engines that keep no revision, no epochs and no record of orders."""

from __future__ import annotations

from sqlalchemy import and_, not_, select, update

from app.domain.errors import UnknownEngine
from app.domain.kept_state import KeptState
from app.ledger.database import Database, Statements, Write
from app.ledger.documents import json_object
from app.ledger.tables import engines, is_open, kept_states, operations


class KeptStates:
    """One row for each engine. It is replaced only by who has read the version before: that fences
    a gateway which stood still while another one took its engine over, whatever leases say."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, engine_id: str) -> KeptState | None:
        """None: nothing was ever kept."""
        open_one = select(operations.c.id).where(
            operations.c.id == kept_states.c.operation_id, is_open
        )
        query = select(
            kept_states,
            and_(kept_states.c.operation_id.is_not(None), not_(open_one.exists())).label(
                "abandoned"
            ),
        ).where(kept_states.c.engine_id == engine_id)

        async def look(connection: Statements) -> KeptState | None:
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                return None
            return KeptState(
                number=row.number,
                revision=row.revision,
                pause_epoch=row.pause_epoch,
                release_epoch=row.release_epoch,
                operation_id=row.operation_id,
                abandoned=bool(row.abandoned),
                document=row.document,
            )

        return await self._database.read(look)

    async def put(self, engine_id: str, state: KeptState) -> bool:
        """Whether it was written: in the place of the version whose number is one lower, and with
        no counter lower than there. Raises UnknownEngine."""
        values = {
            "number": state.number,
            "revision": state.revision,
            "pause_epoch": state.pause_epoch,
            "release_epoch": state.release_epoch,
            "operation_id": state.operation_id,
            "document": json_object(state.document),
        }

        async def work(write: Write) -> bool:
            if state.number > 1:
                replace = update(kept_states).where(
                    kept_states.c.engine_id == engine_id,
                    kept_states.c.number == state.number - 1,
                    kept_states.c.revision <= state.revision,
                    kept_states.c.pause_epoch <= state.pause_epoch,
                    kept_states.c.release_epoch <= state.release_epoch,
                )
                return bool((await write.connection.execute(replace.values(values))).rowcount)
            known = select(engines.c.id).where(engines.c.id == engine_id)
            if (await write.connection.execute(known)).one_or_none() is None:
                raise UnknownEngine("there is no such engine")
            first = (
                write.upsert(kept_states)
                .values(engine_id=engine_id, **values)
                .on_conflict_do_nothing(index_elements=[kept_states.c.engine_id])
                .returning(kept_states.c.number)
            )
            return (await write.connection.execute(first)).scalar_one_or_none() is not None

        return await self._database.write(work)
