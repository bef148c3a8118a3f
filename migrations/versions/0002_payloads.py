"""What goes with an order and is no part of it: inline tensors, until their operation ends."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "payloads",
        sa.Column("operation_id", WORDS, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", name="pk_payloads"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_payloads_operation_id"
        ),
    )


def downgrade() -> None:
    op.drop_table("payloads")
