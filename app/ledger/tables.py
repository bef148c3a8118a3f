"""The tables as the newest migration leaves them.

Invariants stand here as constraints, each with a name of its own; `constraints` says what a
violation of each means. Names follow one convention, without which SQLite's tables could not be
altered later.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    false,
    literal_column,
    text,
)

from app.domain.engine import HealthState
from app.domain.events import TERMINAL_EVENTS, EventType
from app.domain.kinds import TERMINAL_STATES, OperationState, Verification
from app.ledger.column_types import BIG, JSON_DOCUMENT, UtcTime, Words

MAX_POSITION = 2**48 - 1
"""An advisory lock spells a position in 48 bits; see `positions`."""

SLOT_STATES = tuple(
    state for state in OperationState if not state.terminal and state is not OperationState.QUEUED
)
"""In these an exclusive operation has the engine's one slot; `reconciling` is among them, because
an order whose outcome is unknown may still be at work."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _one_of(column: str, values: Iterable[StrEnum]) -> str:
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


def _sorted(values: frozenset[EventType] | frozenset[OperationState]) -> list[StrEnum]:
    return sorted(values)


# Conditions of partial indexes. A query has to repeat them word for word, without parameters, or
# SQLite will not see that the index serves it.
_HOLDS_SLOT = f"takes_slot AND {_one_of('state', SLOT_STATES)}"
_ENDED = _one_of("state", _sorted(TERMINAL_STATES))
_OPEN = f"NOT ({_ENDED})"

ledger = Table(
    "ledger",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("identity", Words, nullable=False),
    Column("pruned_to", BIG, nullable=False),
    # The oldest revision whose releases may use this schema; see `schema`.
    Column("compatible_from", Words),
    CheckConstraint("id = 1", name="single"),
)

engines = Table(
    "engines",
    metadata,
    Column("id", Words, primary_key=True),
    Column("dialect", Words, nullable=False),
    Column("members", JSON_DOCUMENT, nullable=False),
    Column("tls", JSON_DOCUMENT, nullable=False),
    Column("labels", JSON_DOCUMENT, nullable=False),
    Column("generation", BIG, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("removed_at", UtcTime),
    CheckConstraint("generation >= 1", name="generation"),
)

# Apart from the register: readings are written every few seconds, and must neither wait for nor
# delay the orders that lock an engine's registration.
observations = Table(
    "observations",
    metadata,
    Column("engine_id", Words, ForeignKey("engines.id"), primary_key=True),
    Column("health", Words, nullable=False),
    Column("observed_at", UtcTime),
    Column("role", Words),
    Column("weight_version", Words),
    Column("document", JSON_DOCUMENT, nullable=False),
    CheckConstraint(_one_of("health", HealthState), name="health"),
)

# Apart from the register too: a freeze is no change of the registration.
freezes = Table(
    "freezes",
    metadata,
    Column("engine_id", Words, ForeignKey("engines.id"), primary_key=True),
    Column("reason", Words, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime, nullable=False),
    Column("issuer", Words, nullable=False),
    Column("subject", Words, nullable=False),
    Column("client_id", Words, nullable=False),
)

operations = Table(
    "operations",
    metadata,
    Column("ordinal", BIG, Identity(always=False), primary_key=True),
    Column("id", Words, nullable=False),
    Column("engine_id", Words, ForeignKey("engines.id"), nullable=False),
    Column("kind", Words, nullable=False),
    Column("takes_slot", Boolean, nullable=False),
    Column("state", Words, nullable=False),
    Column("request", JSON_DOCUMENT, nullable=False),
    Column("issuer", Words, nullable=False),
    Column("subject", Words, nullable=False),
    Column("client_id", Words, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("sequence", BIG, nullable=False),
    Column("engine_sequence", BIG, nullable=False),
    Column("engine_operation_id", Words),
    Column("engine_instance_id", Words),
    Column("idempotency_key", Words),
    Column("reason", Words),
    Column("expected_revision", BIG),
    Column("revision", BIG),
    Column("deadline_at", UtcTime),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("cancel_requested", Boolean, nullable=False),
    Column("result", JSON_DOCUMENT),
    Column("error", JSON_DOCUMENT),
    Column("verification", Words),
    Column("warnings", JSON_DOCUMENT, nullable=False),
    Column("ranks", JSON_DOCUMENT, nullable=False),
    Column("progress", JSON_DOCUMENT),
    Column("trace_id", Words),
    Column("override_freeze", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("id"),
    CheckConstraint(_one_of("state", OperationState), name="state"),
    CheckConstraint(
        f"verification IS NULL OR {_one_of('verification', Verification)}", name="verification"
    ),
    CheckConstraint(f"({_ENDED}) = (ended_at IS NOT NULL)", name="ended"),
    CheckConstraint("sequence >= 1 AND engine_sequence >= 0", name="sequences"),
    Index(
        "uq_operations_engine_slot",
        "engine_id",
        unique=True,
        sqlite_where=text(_HOLDS_SLOT),
        postgresql_where=text(_HOLDS_SLOT),
    ),
    Index(
        "ix_operations_open",
        "ordinal",
        sqlite_where=text(_OPEN),
        postgresql_where=text(_OPEN),
    ),
    Index(
        "ix_operations_engine_open",
        "engine_id",
        "ordinal",
        sqlite_where=text(_OPEN),
        postgresql_where=text(_OPEN),
    ),
    # For lists, so that every combination of filters has one whose columns are all given or have
    # few values (see `listing`), and for pruning. Those on a state hold what has ended only: it is
    # written into them once, and what is open is found above.
    Index(None, "engine_id", "ordinal"),
    Index(None, "engine_id", "kind", "ordinal"),
    Index(None, "kind", "ordinal"),
    Index(None, "subject", "ordinal"),
    Index(None, "idempotency_key", "ordinal"),
    Index(None, "created_at"),
    *(
        Index(name, *columns, sqlite_where=text(_ENDED), postgresql_where=text(_ENDED))
        for name, columns in (
            ("ix_operations_end", ("state", "ordinal")),
            ("ix_operations_engine_end", ("engine_id", "state", "ordinal")),
            ("ix_operations_kind_end", ("kind", "state", "ordinal")),
            ("ix_operations_engine_kind_end", ("engine_id", "kind", "state", "ordinal")),
            ("ix_operations_subject_end", ("subject", "kind", "state", "ordinal")),
            (
                "ix_operations_engine_subject_end",
                ("engine_id", "subject", "kind", "state", "ordinal", "created_at"),
            ),
            ("ix_operations_ended_at", ("ended_at", "ordinal")),
        )
    ),
    # Without it SQLite would give the number of a deleted last row out again.
    sqlite_autoincrement=True,
)

# Without a type: SQLAlchemy would compare what it takes for a truth value of SQLite with 1.
holds_slot: ColumnElement[bool] = literal_column(f"({_HOLDS_SLOT})")
is_open: ColumnElement[bool] = literal_column(f"({_OPEN})")
is_ended: ColumnElement[bool] = literal_column(f"({_ENDED})")

# Of those that wait for the same engine, how many are not behind it: NULL unless it waits.
queue_position: ColumnElement[int | None] = literal_column(
    f"""CASE WHEN operations.state = 'queued' THEN (
      SELECT count(*) FROM operations AS before
      WHERE before.engine_id = operations.engine_id AND before.ordinal <= operations.ordinal
        AND before.takes_slot AND before.state = 'queued'
        AND NOT (before.{_ENDED})
    ) END""",  # noqa: S608 (constants of this module)
    Integer,
)

events = Table(
    "events",
    metadata,
    # Numbers are taken one by one: a session that keeps some in store would use them later,
    # behind what has been read.
    Column(
        "position",
        BIG,
        Identity(always=False, maxvalue=MAX_POSITION, cache=1),
        primary_key=True,
    ),
    Column("operation_id", Words, ForeignKey("operations.id"), nullable=False),
    Column("engine_id", Words, nullable=False),
    Column("kind", Words, nullable=False),
    Column("sequence", BIG, nullable=False),
    Column("engine_sequence", BIG),
    Column("type", Words, nullable=False),
    Column("terminal", Boolean, nullable=False),
    Column("time", UtcTime, nullable=False),
    Column("data", JSON_DOCUMENT, nullable=False),
    UniqueConstraint("operation_id", "sequence"),
    CheckConstraint(_one_of("type", EventType), name="type"),
    CheckConstraint(f"terminal = ({_one_of('type', _sorted(TERMINAL_EVENTS))})", name="terminal"),
    CheckConstraint("sequence >= 1", name="sequence"),
    Index(
        "uq_events_operation_end",
        "operation_id",
        unique=True,
        sqlite_where=text("terminal"),
        postgresql_where=text("terminal"),
    ),
    Index(None, "engine_id", "position"),
    sqlite_autoincrement=True,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("issuer", Words, primary_key=True),
    Column("subject", Words, primary_key=True),
    Column("client_id", Words, primary_key=True),
    Column("key", Words, primary_key=True),
    Column("fingerprint", Words, nullable=False),
    # The key is claimed before its operation is written, so that of two equal requests the
    # second waits here, and does not trip over the engine's slot that the first one holds.
    Column(
        "operation_id",
        Words,
        ForeignKey("operations.id", deferrable=True, initially="DEFERRED"),
        nullable=False,
    ),
    Column("expires_at", UtcTime, nullable=False),
    Index(None, "expires_at"),
    Index(None, "operation_id"),
)

# Apart from the operations: nothing that is read to be shown comes by it.
payloads = Table(
    "payloads",
    metadata,
    Column("operation_id", Words, ForeignKey("operations.id"), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

stages = Table(
    "stages",
    metadata,
    Column("operation_id", Words, ForeignKey("operations.id"), primary_key=True),
    Column("number", BIG, primary_key=True, autoincrement=False),
    Column("name", Words, nullable=False),
    Column("document", JSON_DOCUMENT, nullable=False),
    Column("expected_revision", BIG),
    CheckConstraint("number >= 1", name="number"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BIG, Identity(always=False), primary_key=True),
    Column("at", UtcTime, nullable=False),
    Column("action", Words, nullable=False),
    Column("outcome", Words, nullable=False),
    Column("issuer", Words),
    Column("subject", Words),
    Column("client_id", Words),
    # No foreign keys: a refused order may name what does not exist.
    Column("engine_id", Words),
    Column("operation_id", Words),
    Column("reason", Words),
    Column("note", Words),
    Column("request_id", Words),
    Column("trace_id", Words),
    Column("source", Words),
    Column("detail", JSON_DOCUMENT, nullable=False),
    Column("scopes", Words),
    CheckConstraint(
        "(issuer IS NULL) = (subject IS NULL) AND (issuer IS NULL) = (client_id IS NULL)",
        name="actor",
    ),
    Index(None, "engine_id", "id"),
    Index(None, "operation_id", "id"),
    Index(None, "subject", "id"),
    Index(None, "action", "id"),
    Index(None, "at"),
    sqlite_autoincrement=True,
)

# Of callers who hold a key, those that could be shown again.
proofs = Table(
    "proofs",
    metadata,
    Column("digest", Words, primary_key=True),
    Column("expires_at", UtcTime, nullable=False),
    Index(None, "expires_at"),
)

# Whoever has a copy of these rows has no session: `digest` is of the id that the browser holds, and
# `sealed` the tokens, under a key that is not kept here.
browser_sessions = Table(
    "browser_sessions",
    metadata,
    Column("digest", Words, primary_key=True),
    Column("issuer", Words, nullable=False),
    Column("subject", Words, nullable=False),
    Column("client_id", Words, nullable=False),
    Column("login_subject", Words, nullable=False),
    Column("provider_session", Words),
    Column("sealed", LargeBinary, nullable=False),
    Column("version", BIG, nullable=False),
    Column("access_ends_at", UtcTime, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("over_at", UtcTime, nullable=False),
    Column("ends_at", UtcTime, nullable=False),
    Column("refresher", Words),
    Column("refreshing_until", UtcTime),
    CheckConstraint("version >= 1", name="version"),
    Index(None, "issuer", "login_subject"),
    Index(None, "over_at"),
)

leases = Table(
    "leases",
    metadata,
    Column("engine_id", Words, ForeignKey("engines.id"), primary_key=True),
    Column("owner", Words, nullable=False),
    Column("fence", BIG, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    CheckConstraint("fence >= 1", name="fence"),
)

# One row for each engine that keeps no revision and no record of orders itself.
kept_states = Table(
    "kept_states",
    metadata,
    Column("engine_id", Words, ForeignKey("engines.id"), primary_key=True),
    Column("number", BIG, nullable=False),
    Column("revision", BIG, nullable=False),
    Column("pause_epoch", BIG, nullable=False),
    Column("release_epoch", BIG, nullable=False),
    # Without a foreign key: what is kept outlives operations that are no longer kept.
    Column("operation_id", Words),
    Column("document", JSON_DOCUMENT, nullable=False),
    CheckConstraint(
        "number >= 1 AND revision >= 0 AND pause_epoch >= 0 AND release_epoch >= 0",
        name="counters",
    ),
)

# A chain: each seal names the digest of the one before, which no two can.
audit_seals = Table(
    "audit_seals",
    metadata,
    Column("number", BIG, primary_key=True, autoincrement=False),
    Column("from_id", BIG, nullable=False),
    Column("to_id", BIG, nullable=False),
    Column("row_count", BIG, nullable=False),
    Column("form", BIG, nullable=False),
    Column("previous", Words, nullable=False),
    Column("digest", Words, nullable=False),
    Column("sealed_at", UtcTime, nullable=False),
    Column("fence", BIG, nullable=False),
    Column("pruned_at", UtcTime),
    Column("marks", Words, nullable=False),
    UniqueConstraint("previous"),
    UniqueConstraint("digest"),
    CheckConstraint("number >= 1 AND from_id <= to_id AND row_count >= 1", name="extent"),
)

duties = Table(
    "duties",
    metadata,
    Column("name", Words, primary_key=True),
    Column("owner", Words, nullable=False),
    Column("fence", BIG, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    CheckConstraint("fence >= 1", name="fence"),
)
