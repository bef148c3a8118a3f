"""Freeze windows of engines, and which orders are exempt from them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
TIME = sa.DateTime(timezone=True).with_variant(sa.String(32), "sqlite")


def upgrade() -> None:
    op.create_table(
        "freezes",
        sa.Column("engine_id", WORDS, nullable=False),
        sa.Column("reason", WORDS, nullable=False),
        sa.Column("since", TIME, nullable=False),
        sa.Column("until", TIME, nullable=False),
        sa.Column("issuer", WORDS, nullable=False),
        sa.Column("subject", WORDS, nullable=False),
        sa.Column("client_id", WORDS, nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name="pk_freezes"),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name="fk_freezes_engine_id"),
    )
    # With a default, so that a gateway of the release before this one can go on accepting orders.
    op.add_column(
        "operations",
        sa.Column("override_freeze", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    op.drop_column("operations", "override_freeze")
    op.drop_table("freezes")
