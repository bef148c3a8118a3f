"""What every combination of a list's filters needs: indexes, built while others write."""

import sqlalchemy as sa
from alembic import op

from app.ledger.building import build_indexes

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

compatible_from = "0005"

TABLE = "operations"
ENDED = "state IN ('cancelled', 'failed', 'succeeded')"
INDEXES = {
    "ix_operations_kind_end": ["kind", "state", "ordinal"],
    "ix_operations_engine_kind_end": ["engine_id", "kind", "state", "ordinal"],
    "ix_operations_subject_end": ["subject", "kind", "state", "ordinal"],
    # With the time, or SQLite takes a smaller one for a list that also begins at a moment.
    "ix_operations_engine_subject_end": [
        "engine_id",
        "subject",
        "kind",
        "state",
        "ordinal",
        "created_at",
    ],
}


def upgrade() -> None:
    build_indexes(op.get_context(), TABLE, INDEXES, where=sa.text(ENDED))


def downgrade() -> None:
    for name in INDEXES:
        op.drop_index(name, TABLE)
