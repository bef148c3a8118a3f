"""Finding an operation by the idempotency key it was ordered under; built while others write."""

from alembic import op

from app.ledger.building import build_indexes

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

compatible_from = "0006"

TABLE = "operations"
INDEXES = {"ix_operations_idempotency_key_ordinal": ["idempotency_key", "ordinal"]}


def upgrade() -> None:
    build_indexes(op.get_context(), TABLE, INDEXES)


def downgrade() -> None:
    for name in INDEXES:
        op.drop_index(name, TABLE)
