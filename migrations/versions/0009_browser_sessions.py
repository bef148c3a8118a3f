"""Sessions of people who logged in with a browser, with their tokens sealed."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0010"
branch_labels = None
depends_on = None

compatible_from = "0006"

WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
TIME = sa.DateTime(timezone=True).with_variant(sa.String(32), "sqlite")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "browser_sessions",
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("issuer", WORDS, nullable=False),
        sa.Column("subject", WORDS, nullable=False),
        sa.Column("client_id", WORDS, nullable=False),
        sa.Column("login_subject", WORDS, nullable=False),
        sa.Column("provider_session", WORDS, nullable=True),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("access_ends_at", TIME, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("over_at", TIME, nullable=False),
        sa.Column("ends_at", TIME, nullable=False),
        sa.Column("refresher", WORDS, nullable=True),
        sa.Column("refreshing_until", TIME, nullable=True),
        sa.CheckConstraint("version >= 1", name=op.f("ck_browser_sessions_version")),
        sa.PrimaryKeyConstraint("digest", name="pk_browser_sessions"),
    )
    op.create_index(
        "ix_browser_sessions_issuer_login_subject", "browser_sessions", ["issuer", "login_subject"]
    )
    op.create_index("ix_browser_sessions_over_at", "browser_sessions", ["over_at"])


def downgrade() -> None:
    op.drop_table("browser_sessions")
