"""Sessions of people who logged in with a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, insert, or_, select, update

from app.clock import Clock
from app.domain.operation import Actor
from app.ledger.audit import write_entry
from app.ledger.database import Database, Statements, Write
from app.ledger.proofs import claim_proof
from app.ledger.tables import browser_sessions as table
from app.ledger.values import AuditEntry

_AT_ONCE = 1_000
SESSION_REPLACED = "SESSION_REPLACED"
"""A login in the same browser took its place."""
SESSIONS_TOO_MANY = "SESSIONS_TOO_MANY"
"""Its person has newer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """`digest`: SHA-256 of the session's id, which nobody but the browser has. `sealed`: its
    tokens, encrypted by whoever stores them. All times UTC.

    `actor`: the caller that its access token describes; `login_subject` and `provider_session`:
    what its issuer calls the person and the session there (`sub` and `sid` of the ID token).
    `version` rises with each refresh. `over_at`: unless it is seen again; never past `ends_at`.
    `refresher` has the refresh to itself until `refreshing_until`; without one it is a pause.
    """

    digest: str
    actor: Actor
    login_subject: str
    provider_session: str | None
    sealed: bytes = field(repr=False)
    access_ends_at: datetime
    started_at: datetime
    seen_at: datetime
    over_at: datetime
    ends_at: datetime
    version: int = 1
    refresher: str | None = None
    refreshing_until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderLogout:
    """What an issuer says has ended: its session `provider_session`, else all of `login_subject`.
    `once`: the digest of this very word, which counts once; it is remembered up to `until`."""

    issuer: str
    login_subject: str | None
    provider_session: str | None
    once: str
    until: datetime


class BrowserSessions:
    """Written by all gateways on the ledger. Expiry goes by their clocks, as that of leases."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def begin(
        self,
        session: StoredSession,
        *,
        audit: AuditEntry,
        ended: Callable[[Actor, str], AuditEntry],
        instead_of: Sequence[str] = (),
        most: int,
    ) -> tuple[StoredSession, ...]:
        """Gives those that end with it. `instead_of`: digests of sessions that do. Of its person's
        sessions the `most` newest stay. `ended`: the entry for each that ends before its time, of
        whom and for what reason."""

        async def end(
            write: Write, reason: str, *which: ColumnElement[bool]
        ) -> list[StoredSession]:
            found = await _delete(write, *which)
            for one in found:
                if one.over_at > session.started_at:
                    await write_entry(write, ended(one.actor, reason))
            return found

        async def work(write: Write) -> tuple[StoredSession, ...]:
            gone: list[StoredSession] = []
            if instead_of:
                gone += await end(write, SESSION_REPLACED, table.c.digest.in_(instead_of))
            await write.connection.execute(insert(table).values(_values(session)))
            newest = (
                select(table.c.digest)
                .where(*_same_person(session))
                .order_by(table.c.started_at.desc(), table.c.digest)
                .limit(most)
            )
            kept = [row.digest for row in await write.connection.execute(newest)]
            kept = [session.digest, *(one for one in kept if one != session.digest)][:most]
            surplus = table.c.digest.not_in(kept)
            gone += await end(write, SESSIONS_TOO_MANY, *_same_person(session), surplus)
            await write_entry(write, audit)
            return tuple(gone)

        return await self._database.write(work)

    async def get(self, digest: str) -> StoredSession | None:
        """Also one whose time is up and that nobody has cleared away yet."""

        async def look(connection: Statements) -> StoredSession | None:
            row = (await connection.execute(select(table).where(table.c.digest == digest))).first()
            return None if row is None else _of(row)

        return await self._database.read(look)

    async def seen(self, digest: str, over_at: datetime) -> None:
        """It is in use now, and is over at `over_at` if that was the last time. One that has ended
        stays so."""
        now = self._clock.now()
        touch = (
            update(table)
            .where(table.c.digest == digest, table.c.seen_at < now)
            .values(seen_at=now, over_at=over_at)
        )

        async def work(write: Write) -> None:
            await write.connection.execute(touch)

        await self._database.write(work)

    async def claim_refresh(
        self, digest: str, version: int, refresher: str, until: datetime
    ) -> bool:
        """Whether nobody else refreshes this version of its tokens: then `refresher` alone may, up
        to `until`."""
        claim = (
            update(table)
            .where(
                table.c.digest == digest,
                table.c.version == version,
                or_(
                    table.c.refreshing_until.is_(None),
                    table.c.refreshing_until <= self._clock.now(),
                ),
            )
            .values(refresher=refresher, refreshing_until=until)
        )

        async def work(write: Write) -> bool:
            return (await write.connection.execute(claim)).rowcount > 0

        return await self._database.write(work)

    async def give_up_refresh(self, digest: str, refresher: str, pause_until: datetime) -> None:
        """The tokens stay as they are, and nobody tries again before `pause_until`."""
        release = (
            update(table)
            .where(table.c.digest == digest, table.c.refresher == refresher)
            .values(refresher=None, refreshing_until=pause_until)
        )

        async def work(write: Write) -> None:
            await write.connection.execute(release)

        await self._database.write(work)

    async def refreshed(
        self,
        digest: str,
        version: int,
        refresher: str,
        *,
        sealed: bytes,
        access_ends_at: datetime,
    ) -> StoredSession | None:
        """New tokens in the place of that version's. None: the session has ended meanwhile, or
        somebody else has refreshed it since the time of `refresher` was up. Written twice it is
        written once."""
        store = (
            update(table)
            .where(
                table.c.digest == digest,
                table.c.version == version,
                table.c.refresher == refresher,
            )
            .values(
                sealed=sealed,
                access_ends_at=access_ends_at,
                version=version + 1,
                refresher=None,
                refreshing_until=None,
            )
        )

        async def work(write: Write) -> StoredSession | None:
            await write.connection.execute(store)
            stored = select(table).where(table.c.digest == digest)
            row = (await write.connection.execute(stored)).first()
            # A first attempt may have been committed although its answer was lost.
            return None if row is None or row.sealed != sealed else _of(row)

        return await self._database.write(work)

    async def end(self, digest: str, audit: AuditEntry) -> bool:
        """Whether it was there. The entry is written only then."""

        async def work(write: Write) -> bool:
            gone = delete(table).where(table.c.digest == digest)
            if not (await write.connection.execute(gone)).rowcount:
                return False
            await write_entry(write, audit)
            return True

        return await self._database.write(work)

    async def end_by_provider(
        self, logout: ProviderLogout, audit: Callable[[Actor], AuditEntry]
    ) -> int | None:
        """How many ended; None: that word has been heard before. An entry for each."""
        named = _named(logout)

        async def work(write: Write) -> int | None:
            if not await claim_proof(write, logout.once, logout.until):
                return None
            ended = await _delete(write, *named)
            for one in ended:
                await write_entry(write, audit(one.actor))
            return len(ended)

        return await self._database.write(work)

    async def forget_over(self) -> bool:
        """Delete a portion of those whose time is up. True: there are more."""
        now = self._clock.now()

        async def work(write: Write) -> bool:
            over = (
                select(table.c.digest)
                .where(table.c.over_at <= now)
                .order_by(table.c.over_at)
                .limit(_AT_ONCE)
                .with_for_update(skip_locked=True)
            )
            gone = delete(table).where(table.c.digest.in_(over))
            return (await write.connection.execute(gone)).rowcount >= _AT_ONCE

        return await self._database.write(work)


async def _delete(write: Write, *which: ColumnElement[bool]) -> list[StoredSession]:
    gone = delete(table).where(*which).returning(table)
    return [_of(row) for row in await write.connection.execute(gone)]


def _same_person(session: StoredSession) -> tuple[ColumnElement[bool], ...]:
    return (
        table.c.issuer == session.actor.issuer,
        table.c.login_subject == session.login_subject,
    )


def _named(logout: ProviderLogout) -> list[ColumnElement[bool]]:
    named = [table.c.issuer == logout.issuer]
    if logout.login_subject is not None:
        named.append(table.c.login_subject == logout.login_subject)
    if logout.provider_session is not None:
        named.append(table.c.provider_session == logout.provider_session)
    if len(named) == 1:
        raise ValueError("a logout names a person or a session")
    return named


def _values(session: StoredSession) -> dict[str, Any]:
    return {
        "digest": session.digest,
        "issuer": session.actor.issuer,
        "subject": session.actor.subject,
        "client_id": session.actor.client_id,
        "login_subject": session.login_subject,
        "provider_session": session.provider_session,
        "sealed": session.sealed,
        "version": session.version,
        "access_ends_at": session.access_ends_at,
        "started_at": session.started_at,
        "seen_at": session.seen_at,
        "over_at": session.over_at,
        "ends_at": session.ends_at,
    }


def _of(row: Row[Any]) -> StoredSession:
    return StoredSession(
        digest=row.digest,
        actor=Actor(row.issuer, row.subject, row.client_id),
        login_subject=row.login_subject,
        provider_session=row.provider_session,
        sealed=row.sealed,
        access_ends_at=row.access_ends_at,
        started_at=row.started_at,
        seen_at=row.seen_at,
        over_at=row.over_at,
        ends_at=row.ends_at,
        version=row.version,
        refresher=row.refresher,
        refreshing_until=row.refreshing_until,
    )
