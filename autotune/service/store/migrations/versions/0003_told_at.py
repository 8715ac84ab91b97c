"""Which end of a search the webhook's address was told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column: that end's ``ended_at``; empty, none was told."""
    op.add_column("searches", sa.Column("told_at", sa.Float))
