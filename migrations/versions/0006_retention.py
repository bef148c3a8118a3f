"""What pruning and long lists need: indexes; and which older releases may use this schema."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

compatible_from = "0005"

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
ENDED = sa.text("state IN ('cancelled', 'failed', 'succeeded')")

PLAIN = {
    "ix_operations_created_at": ("operations", ["created_at"]),
    "ix_operations_engine_id_kind_ordinal": ("operations", ["engine_id", "kind", "ordinal"]),
    "ix_operations_kind_ordinal": ("operations", ["kind", "ordinal"]),
    "ix_audit_action_id": ("audit", ["action", "id"]),
    "ix_audit_at": ("audit", ["at"]),
}
OF_ENDED = {
    "ix_operations_end": ["state", "ordinal"],
    "ix_operations_engine_end": ["engine_id", "state", "ordinal"],
    "ix_operations_ended_at": ["ended_at", "ordinal"],
}


def upgrade() -> None:
    op.add_column("ledger", sa.Column("compatible_from", WORDS))
    for name, (table, columns) in PLAIN.items():
        op.create_index(name, table, columns)
    for name, columns in OF_ENDED.items():
        op.create_index(name, "operations", columns, sqlite_where=ENDED, postgresql_where=ENDED)


def downgrade() -> None:
    for name in OF_ENDED:
        op.drop_index(name, "operations")
    for name, (table, _) in PLAIN.items():
        op.drop_index(name, table)
    op.drop_column("ledger", "compatible_from")
