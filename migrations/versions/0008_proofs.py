"""Proofs of possession that were shown, so that none counts twice."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

compatible_from = "0005"

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
TIME = sa.DateTime(timezone=True).with_variant(sa.String(32), "sqlite")


def upgrade() -> None:
    op.create_table(
        "proofs",
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_proofs"),
    )
    op.create_index("ix_proofs_expires_at", "proofs", ["expires_at"])


def downgrade() -> None:
    op.drop_table("proofs")
