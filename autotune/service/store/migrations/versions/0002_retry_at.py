"""When a search whose driver failed is tried again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; empty, as of every search so far, it says at once."""
    op.add_column("searches", sa.Column("retry_at", sa.Float))
