"""Further calls of an operation that several calls order: the pieces of a weight session."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "stages",
        sa.Column("operation_id", WORDS, nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("name", WORDS, nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("expected_revision", BIG),
        sa.PrimaryKeyConstraint("operation_id", "number", name="pk_stages"),
        sa.ForeignKeyConstraint(["operation_id"], ["operations.id"], name="fk_stages_operation_id"),
        sa.CheckConstraint("number >= 1", name=op.f("ck_stages_number")),
    )


def downgrade() -> None:
    op.drop_table("stages")
