"""Idempotency keys: which call each was used for, and the operation that it stands for."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import bindparam, delete, or_, select

from app.domain.idempotency import KeyRecord
from app.domain.operation import Actor
from app.ledger.database import Statements, Write
from app.ledger.rows import actor_values
from app.ledger.tables import idempotency_keys, is_ended, is_open, operations
from app.ledger.values import KeyClaim

MIN_KEY_RETENTION = timedelta(hours=24)

_SCOPE = tuple(
    idempotency_keys.c[name] == bindparam(f"of_{name}")
    for name in ("issuer", "subject", "client_id", "key")
)
# Made once: to build and to compare a statement costs SQLAlchemy more than to run it.
_KNOWN = (
    select(idempotency_keys.c.fingerprint, idempotency_keys.c.operation_id)
    .join(operations, operations.c.id == idempotency_keys.c.operation_id)
    .where(*_SCOPE, or_(idempotency_keys.c.expires_at > bindparam("now"), is_open))
)
_DROP_EXPIRED = delete(idempotency_keys).where(
    *_SCOPE, idempotency_keys.c.expires_at <= bindparam("now")
)
_CLAIM = idempotency_keys.insert()


async def known(connection: Statements, actor: Actor, key: str, now: datetime) -> KeyRecord | None:
    """The record of a key. One whose operation is open does not expire."""
    row = (await connection.execute(_KNOWN, _scope(actor, key) | {"now": now})).one_or_none()
    return None if row is None else KeyRecord(row.fingerprint, row.operation_id)


async def claim(
    write: Write, actor: Actor, key: KeyClaim, operation_id: str, now: datetime
) -> None:
    """For a key that is not known, or has expired."""
    await write.connection.execute(_DROP_EXPIRED, _scope(actor, key.key) | {"now": now})
    values = actor_values(actor) | {
        "key": key.key,
        "fingerprint": key.fingerprint,
        "operation_id": operation_id,
        "expires_at": max(key.expires_at, now + MIN_KEY_RETENTION),
    }
    await write.connection.execute(_CLAIM, values)


def _scope(actor: Actor, key: str) -> dict[str, object]:
    values = actor_values(actor) | {"key": key}
    return {f"of_{name}": value for name, value in values.items()}


async def forget_expired(write: Write, now: datetime, limit: int) -> int:
    """Delete keys whose retention is over and whose operation has ended; how many."""
    expired = (
        select(idempotency_keys.c.operation_id)
        .join(operations, operations.c.id == idempotency_keys.c.operation_id)
        .where(idempotency_keys.c.expires_at <= now, is_ended)
        .order_by(idempotency_keys.c.expires_at)
        .limit(limit)
    )
    # An operation that several calls ordered has a key for each, and they expire one by one.
    # Whoever renews one of them at this moment writes a row of another operation, which stays.
    gone = delete(idempotency_keys).where(
        idempotency_keys.c.operation_id.in_(expired), idempotency_keys.c.expires_at <= now
    )
    return (await write.connection.execute(gone)).rowcount
