"""An engine's open operations by an index of their own: who waits for it, and in which order."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OPEN = "NOT (state IN ('cancelled', 'failed', 'succeeded'))"


def upgrade() -> None:
    condition = sa.text(OPEN)
    op.create_index(
        "ix_operations_engine_open",
        "operations",
        ["engine_id", "ordinal"],
        sqlite_where=condition,
        postgresql_where=condition,
    )


def downgrade() -> None:
    op.drop_index("ix_operations_engine_open", "operations")
