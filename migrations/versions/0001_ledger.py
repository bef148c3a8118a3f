"""The ledger: engines, operations, events, idempotency keys, audit, leases."""

import secrets

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A migration spells out its own types: what the program means by them may change later.
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True).with_variant(sa.String(32), "sqlite")
WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

ENDED = "state IN ('cancelled', 'failed', 'succeeded')"
SLOT_TAKEN = "takes_slot AND state IN ('accepted', 'running', 'cancelling', 'reconciling')"


def needed(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def check(name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(name))


def partial_index(
    name: str, table: str, columns: list[str], where: str, *, unique: bool = False
) -> None:
    condition = sa.text(where)
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=condition,
        postgresql_where=condition,
    )


def upgrade() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        needed("identity", WORDS),
        needed("pruned_to", BIG),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
        check("ck_ledger_single", "id = 1"),
    )
    op.execute(
        sa.text("INSERT INTO ledger (id, identity, pruned_to) VALUES (1, :identity, 0)").bindparams(
            identity=secrets.token_hex(4)
        )
    )

    op.create_table(
        "engines",
        needed("id", WORDS),
        needed("dialect", WORDS),
        needed("members", DOCUMENT),
        needed("tls", DOCUMENT),
        needed("labels", DOCUMENT),
        needed("generation", BIG),
        needed("created_at", TIME),
        needed("updated_at", TIME),
        sa.Column("removed_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_engines"),
        check("ck_engines_generation", "generation >= 1"),
    )

    op.create_table(
        "observations",
        needed("engine_id", WORDS),
        needed("health", WORDS),
        sa.Column("observed_at", TIME),
        sa.Column("role", WORDS),
        sa.Column("weight_version", WORDS),
        needed("document", DOCUMENT),
        sa.PrimaryKeyConstraint("engine_id", name="pk_observations"),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name="fk_observations_engine_id"),
        check(
            "ck_observations_health",
            "health IN ('serving', 'degraded', 'unreachable', 'unknown')",
        ),
    )

    op.create_table(
        "operations",
        sa.Column("ordinal", BIG, sa.Identity(always=False), nullable=False),
        needed("id", WORDS),
        needed("engine_id", WORDS),
        needed("kind", WORDS),
        needed("takes_slot", sa.Boolean),
        needed("state", WORDS),
        needed("request", DOCUMENT),
        needed("issuer", WORDS),
        needed("subject", WORDS),
        needed("client_id", WORDS),
        needed("created_at", TIME),
        needed("sequence", BIG),
        needed("engine_sequence", BIG),
        sa.Column("engine_operation_id", WORDS),
        sa.Column("engine_instance_id", WORDS),
        sa.Column("idempotency_key", WORDS),
        sa.Column("reason", WORDS),
        sa.Column("expected_revision", BIG),
        sa.Column("revision", BIG),
        sa.Column("deadline_at", TIME),
        sa.Column("started_at", TIME),
        sa.Column("ended_at", TIME),
        needed("cancel_requested", sa.Boolean),
        sa.Column("result", DOCUMENT),
        sa.Column("error", DOCUMENT),
        sa.Column("verification", WORDS),
        needed("warnings", DOCUMENT),
        needed("ranks", DOCUMENT),
        sa.Column("progress", DOCUMENT),
        sa.Column("trace_id", WORDS),
        sa.PrimaryKeyConstraint("ordinal", name="pk_operations"),
        sa.UniqueConstraint("id", name="uq_operations_id"),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name="fk_operations_engine_id"),
        check(
            "ck_operations_state",
            "state IN ('accepted', 'queued', 'running', 'cancelling', 'reconciling', "
            "'succeeded', 'failed', 'cancelled')",
        ),
        check(
            "ck_operations_verification",
            "verification IS NULL OR verification IN ('verified', 'unverified', 'settled')",
        ),
        check("ck_operations_ended", f"({ENDED}) = (ended_at IS NOT NULL)"),
        check("ck_operations_sequences", "sequence >= 1 AND engine_sequence >= 0"),
        sqlite_autoincrement=True,
    )
    partial_index("uq_operations_engine_slot", "operations", ["engine_id"], SLOT_TAKEN, unique=True)
    partial_index("ix_operations_open", "operations", ["ordinal"], f"NOT ({ENDED})")
    op.create_index("ix_operations_engine_id_ordinal", "operations", ["engine_id", "ordinal"])
    op.create_index("ix_operations_subject_ordinal", "operations", ["subject", "ordinal"])

    op.create_table(
        "events",
        sa.Column(
            "position",
            BIG,
            sa.Identity(always=False, maxvalue=2**48 - 1, cache=1),
            nullable=False,
        ),
        needed("operation_id", WORDS),
        needed("engine_id", WORDS),
        needed("kind", WORDS),
        needed("sequence", BIG),
        sa.Column("engine_sequence", BIG),
        needed("type", WORDS),
        needed("terminal", sa.Boolean),
        needed("time", TIME),
        needed("data", DOCUMENT),
        sa.PrimaryKeyConstraint("position", name="pk_events"),
        sa.UniqueConstraint("operation_id", "sequence", name="uq_events_operation_id_sequence"),
        sa.ForeignKeyConstraint(["operation_id"], ["operations.id"], name="fk_events_operation_id"),
        check(
            "ck_events_type",
            "type IN ('accepted', 'queued', 'dispatched', 'progress', 'rank', 'warning', "
            "'reconciling', 'completed', 'failed', 'cancelled', 'settled')",
        ),
        check(
            "ck_events_terminal",
            "terminal = (type IN ('cancelled', 'completed', 'failed', 'settled'))",
        ),
        check("ck_events_sequence", "sequence >= 1"),
        sqlite_autoincrement=True,
    )
    partial_index("uq_events_operation_end", "events", ["operation_id"], "terminal", unique=True)
    op.create_index("ix_events_engine_id_position", "events", ["engine_id", "position"])

    op.create_table(
        "idempotency_keys",
        needed("issuer", WORDS),
        needed("subject", WORDS),
        needed("client_id", WORDS),
        needed("key", WORDS),
        needed("fingerprint", WORDS),
        needed("operation_id", WORDS),
        needed("expires_at", TIME),
        sa.PrimaryKeyConstraint(
            "issuer", "subject", "client_id", "key", name="pk_idempotency_keys"
        ),
        sa.ForeignKeyConstraint(
            ["operation_id"],
            ["operations.id"],
            name="fk_idempotency_keys_operation_id",
            deferrable=True,
            initially="DEFERRED",
        ),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])
    op.create_index("ix_idempotency_keys_operation_id", "idempotency_keys", ["operation_id"])

    op.create_table(
        "audit",
        sa.Column("id", BIG, sa.Identity(always=False), nullable=False),
        needed("at", TIME),
        needed("action", WORDS),
        needed("outcome", WORDS),
        sa.Column("issuer", WORDS),
        sa.Column("subject", WORDS),
        sa.Column("client_id", WORDS),
        sa.Column("engine_id", WORDS),
        sa.Column("operation_id", WORDS),
        sa.Column("reason", WORDS),
        sa.Column("note", WORDS),
        sa.Column("request_id", WORDS),
        sa.Column("trace_id", WORDS),
        sa.Column("source", WORDS),
        needed("detail", DOCUMENT),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        check(
            "ck_audit_actor",
            "(issuer IS NULL) = (subject IS NULL) AND (issuer IS NULL) = (client_id IS NULL)",
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_engine_id_id", "audit", ["engine_id", "id"])
    op.create_index("ix_audit_operation_id_id", "audit", ["operation_id", "id"])
    op.create_index("ix_audit_subject_id", "audit", ["subject", "id"])

    op.create_table(
        "leases",
        needed("engine_id", WORDS),
        needed("owner", WORDS),
        needed("fence", BIG),
        needed("expires_at", TIME),
        sa.PrimaryKeyConstraint("engine_id", name="pk_leases"),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name="fk_leases_engine_id"),
        check("ck_leases_fence", "fence >= 1"),
    )


def downgrade() -> None:
    for table in (
        "leases",
        "audit",
        "idempotency_keys",
        "events",
        "operations",
        "observations",
        "engines",
        "ledger",
    ):
        op.drop_table(table)
