"""Whether the audit is what was sealed: read from one end to the other, changing nothing.

A gateway may run meanwhile, and seal and prune. A seal is one statement and its rows another, so
what does not fit is looked at once more before it is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ledger.schema import Standing, looking
from app.ledger.sealing import head_of, rows_of, seal_of
from app.ledger.seals import FORM, GENESIS, differing, sealed
from app.ledger.tables import audit, audit_seals
from app.ledger.values import Seal

SEALS_AT_ONCE = 100
ROWS_IN_A_SEAL = 10_000
"""No release makes a seal of more."""
NAMED = 20
"""Of the rows of a seal that does not hold: so many are named."""
BREAKS = 20
_LOWEST = -(2**63)
"""No gateway gives an id below 1; who writes to the database may."""


@dataclass(frozen=True, slots=True)
class Break:
    """A seal that does not hold, and why. `number` 0: not one of those that are there.
    `entries`: some rows that are not what was sealed, by id: `changed`, `removed`, `put in`."""

    number: int
    from_id: int
    to_id: int
    message: str
    entries: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tail:
    """Rows that no seal covers yet. The times are those of the first and the last of them."""

    rows: int
    from_id: int | None
    to_id: int | None
    oldest_at: datetime | None
    newest_at: datetime | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rows` and `seals`: how many hold. `breaks`: those that do not, up to `BREAKS`, after which
    no further one is looked at. `pruned`: what the chain hangs from, if its beginning is kept no
    longer. `head`: the last seal that was looked at; one that came meanwhile was not."""

    schema: Standing
    rows: int
    seals: int
    pruned: Seal | None
    head: Seal | None
    breaks: tuple[Break, ...]
    unsealed: Tail

    @property
    def broken(self) -> Break | None:
        """The first."""
        return self.breaks[0] if self.breaks else None


async def verify(url: str, from_seal: str | None = None) -> Verdict:
    """`from_seal`: a digest that was kept elsewhere. It must be one of this chain, and what lies
    before it is not looked at.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable.
    """
    async with looking(url) as (connection, schema):
        reader = _Reader(connection)
        try:
            await reader.read(from_seal)
            head = await head_of(connection)
        except _Unreadable:
            head = reader.last
        last = _LOWEST if head is None else head.to_id
        return Verdict(
            schema,
            reader.rows,
            reader.seals,
            reader.pruned,
            reader.last or head,
            tuple(reader.breaks),
            await _tail(connection, last),
        )


class _Unreadable(Exception):
    """In a seal stands something that is no value of its column. It was said as a break."""


class _Reader:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self.rows = 0
        self.seals = 0
        self.pruned: Seal | None = None
        self.breaks: list[Break] = []
        self.last: Seal | None = None

    async def read(self, from_seal: str | None) -> None:
        number = 0
        if from_seal is not None:
            known = select(audit_seals.c.number).where(audit_seals.c.digest == from_seal)
            found = (await self._connection.execute(known)).scalar_one_or_none()
            if found is None:
                message = (
                    "no seal has the given digest: the chain was written anew, the database was "
                    "restored from an earlier backup, or that seal is kept no longer"
                )
                self.breaks.append(Break(0, 0, 0, message))
                return
            number = found - 1
        before: Seal | None = None
        while seals := await self._behind(number):
            for seal in seals:
                self.last = seal
                wrong = await self._judge(seal, before, begins=from_seal is not None)
                if wrong is not None:
                    since = await self._pruned_meanwhile(seal)
                    if since is not None:
                        # Its rows went while they were being read. What follows is judged as ever.
                        before = self.pruned = replace(seal, pruned_at=since)
                        continue
                    self.breaks.append(wrong)
                    if len(self.breaks) == BREAKS:
                        return
                before = seal
            number = seals[-1].number

    async def _behind(self, number: int, most: int = SEALS_AT_ONCE) -> list[Seal]:
        """Raises _Unreadable for one that follows at once."""
        following = (
            select(audit_seals)
            .where(audit_seals.c.number > number)
            .order_by(audit_seals.c.number)
            .limit(most)
        )
        try:
            found = (await self._connection.execute(following)).mappings().all()
            return [_readable(seal_of(row)) for row in found]
        except (ValueError, TypeError):
            if most > 1:  # up to the one
                return await self._behind(number, 1)
            message = f"the seal that follows seal {number} cannot be read"
            self.breaks.append(Break(0, 0, 0, message if number else "no seal can be read"))
            raise _Unreadable from None
        finally:
            # Or a reader of SQLite keeps the side file from shrinking.
            await self._connection.rollback()

    async def _judge(self, seal: Seal, before: Seal | None, *, begins: bool) -> Break | None:
        """What is wrong with it; None: nothing, and it was counted."""

        def broken(message: str, entries: dict[int, str] | None = None) -> Break:
            return Break(seal.number, seal.from_id, seal.to_id, message, entries or {})

        wrong = _misplaced(seal, before, begins=begins)
        if wrong is not None:
            return broken(wrong)
        # Below the first one nothing has a right to be.
        first = _LOWEST if before is None and not begins else seal.from_id
        if seal.pruned_at is not None:
            self.pruned = seal
            left = await self._count(seal.from_id if begins else _LOWEST, seal.to_id)
            return broken(f"{left} entries stand where all were pruned") if left else None
        if seal.form != FORM:
            return broken(f"it is of a form that this release does not know: {seal.form}")
        most = min(seal.row_count, ROWS_IN_A_SEAL) + NAMED + 1
        try:
            rows = await rows_of(self._connection, first, seal.to_id, most)
            again = sealed(replace(seal, digest=""), rows)
        except (ValueError, TypeError):
            entries = await self._unreadable(seal, first)
            return broken(_words_for(entries), entries)
        finally:
            await self._connection.rollback()
        if (again.digest, again.marks) == (seal.digest, seal.marks):
            self.rows += seal.row_count
            self.seals += 1
            return None
        seen_to = rows[-1]["id"] if len(rows) == most else seal.to_id
        entries = {one: how for one, how in differing(seal, again).items() if one <= seen_to}
        if not entries or again.digest == seal.digest:
            return broken("what it says itself is not what was sealed")
        return broken(_words_for(entries), dict(list(entries.items())[:NAMED]))

    async def _unreadable(self, seal: Seal, first: int) -> dict[int, str]:
        """The first entry in which something stands that is no value of its column."""
        ids = select(audit.c.id).where(audit.c.id.between(first, seal.to_id))
        for one in (await self._connection.execute(ids.order_by(audit.c.id))).scalars().all():
            try:
                sealed(seal, await rows_of(self._connection, one, one, 1))
            except (ValueError, TypeError):
                return {one: "changed"}
        return {}

    async def _count(self, first: int, last: int) -> int:
        query = select(func.count()).where(audit.c.id >= first, audit.c.id <= last)
        found = int((await self._connection.execute(query)).scalar_one())
        await self._connection.rollback()
        return found

    async def _pruned_meanwhile(self, seal: Seal) -> datetime | None:
        if seal.pruned_at is not None:
            return None
        query = select(audit_seals.c.pruned_at, audit_seals.c.digest)
        query = query.where(audit_seals.c.number == seal.number)
        now = (await self._connection.execute(query)).one_or_none()
        if now is not None:
            await self._connection.rollback()
            return now.pruned_at if now.digest == seal.digest else None
        first = select(audit_seals).order_by(audit_seals.c.number).limit(1)
        row = (await self._connection.execute(first)).mappings().one_or_none()
        await self._connection.rollback()
        if row is None or row["number"] <= seal.number:
            return None
        since: datetime | None = row["pruned_at"]
        return since


def _readable(seal: Seal) -> Seal:
    """SQLite keeps in a column whatever is written there. Raises TypeError."""
    numbers = (seal.number, seal.from_id, seal.to_id, seal.row_count, seal.form, seal.fence)
    texts = (seal.previous, seal.digest, seal.marks)
    if not all(isinstance(one, int) for one in numbers):
        raise TypeError("a number is none")
    if not all(isinstance(one, str) for one in texts):
        raise TypeError("a text is none")
    return seal


def _words_for(entries: dict[int, str]) -> str:
    if not entries:
        return "an entry could not be read"
    first, how = next(iter(entries.items()))
    more = "" if len(entries) == 1 else f", and {len(entries) - 1} more are not what was sealed"
    return f"entry {first} was {how}{more}"


def _misplaced(seal: Seal, before: Seal | None, *, begins: bool) -> str | None:
    """What is wrong with its place in the chain."""
    if before is None:
        if begins or seal.pruned_at is not None:
            return None  # its digest was given, or what it hangs from is kept no longer
        if (seal.number, seal.from_id, seal.previous) != (1, 1, GENESIS):
            return "the seals before it are missing"
        return None
    if seal.pruned_at is not None and before.pruned_at is not None:
        return None  # pruned while this was being read: the chain hangs from the later one
    if seal.number != before.number + 1:
        return f"the seals from {before.number + 1} on before it are missing"
    if seal.previous != before.digest:
        return "it does not follow from the seal before it"
    if seal.from_id != before.to_id + 1:
        return "it does not begin where the seal before it ends"
    if seal.pruned_at is not None and before.pruned_at is None:
        return "it is marked as pruned behind one that is not"
    if seal.fence < before.fence:
        return "it was made under an older duty than the seal before it"
    return None


async def _tail(connection: AsyncConnection, behind: int) -> Tail:
    query = select(func.count(), func.min(audit.c.id), func.max(audit.c.id))
    count, first, last = (await connection.execute(query.where(audit.c.id > behind))).one()
    times = select(func.min(audit.c.at), func.max(audit.c.at)).where(audit.c.id > behind)
    try:
        oldest, newest = (await connection.execute(times)).one()
    except ValueError:  # a time that is none: nobody has vouched for these rows yet
        oldest = newest = None
    return Tail(count, first, last, oldest, newest)
