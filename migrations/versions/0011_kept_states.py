"""What is kept of engines that keep no revision, no epochs and no record of orders themselves."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0009"
branch_labels = None
depends_on = None

compatible_from = "0006"

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "kept_states",
        sa.Column("engine_id", WORDS, nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("revision", BIG, nullable=False),
        sa.Column("pause_epoch", BIG, nullable=False),
        sa.Column("release_epoch", BIG, nullable=False),
        sa.Column("operation_id", WORDS, nullable=True),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name="pk_kept_states"),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name="fk_kept_states_engine_id"),
        sa.CheckConstraint(
            "number >= 1 AND revision >= 0 AND pause_epoch >= 0 AND release_epoch >= 0",
            name="counters",
        ),
    )


def downgrade() -> None:
    op.drop_table("kept_states")
