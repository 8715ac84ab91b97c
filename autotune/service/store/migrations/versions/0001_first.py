"""The first schema: searches, their events and trials, archives, tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "archives",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_files", sa.Integer, nullable=False),
        sa.Column("unpacked_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(8), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_table(
        "searches",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("archive", sa.String(64), sa.ForeignKey("archives.sha256")),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("idempotency_key", sa.String(300), unique=True),
        sa.Column("request_sha256", sa.String(64)),
        sa.Column("cancel_mode", sa.String(8)),
        sa.Column("home", sa.String(32)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("lease_token", sa.String(32)),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("pid", sa.Integer),
        sa.Column("pid_start", sa.BigInteger),
        sa.Column("progress_offset", sa.BigInteger, nullable=False),
        sa.Column("num_events", sa.Integer, nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("plan", sa.Text),
        sa.Column("report", sa.Text),
        sa.Column("plan_files", sa.Text),
    )
    op.create_index("searches_by_state", "searches", ["state", "priority", "number"])
    op.create_table(
        "events",
        sa.Column("search_id", sa.String(32), sa.ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_table(
        "trials",
        sa.Column("search_id", sa.String(32), sa.ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("outcome", sa.String(40), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
    )
