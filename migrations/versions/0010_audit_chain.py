"""Which scopes a call took; the seals of the audit; and duties that one replica has at a time."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0008"
branch_labels = None
depends_on = None

compatible_from = "0006"

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.String(32), "sqlite")


def upgrade() -> None:
    op.add_column("audit", sa.Column("scopes", WORDS))
    op.create_table(
        "audit_seals",
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("from_id", BIG, nullable=False),
        sa.Column("to_id", BIG, nullable=False),
        sa.Column("row_count", BIG, nullable=False),
        sa.Column("form", BIG, nullable=False),
        sa.Column("previous", WORDS, nullable=False),
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("sealed_at", TIME, nullable=False),
        sa.Column("fence", BIG, nullable=False),
        sa.Column("pruned_at", TIME),
        sa.Column("marks", WORDS, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit_seals"),
        sa.UniqueConstraint("previous", name="uq_audit_seals_previous"),
        sa.UniqueConstraint("digest", name="uq_audit_seals_digest"),
        sa.CheckConstraint("number >= 1 AND from_id <= to_id AND row_count >= 1", name="extent"),
    )
    op.create_table(
        "duties",
        sa.Column("name", WORDS, nullable=False),
        sa.Column("owner", WORDS, nullable=False),
        sa.Column("fence", BIG, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_duties"),
        sa.CheckConstraint("fence >= 1", name="fence"),
    )


def downgrade() -> None:
    op.drop_table("duties")
    op.drop_table("audit_seals")
    op.drop_column("audit", "scopes")
