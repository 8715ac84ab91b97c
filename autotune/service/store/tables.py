"""The tables, as the newest migration leaves them. Times are seconds since 1970, by the database's clock."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

METADATA = MetaData()

SEARCHES = Table(
    "searches",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("name", String(200), nullable=False),
    Column("spec", Text, nullable=False),
    Column("archive", String(64), ForeignKey("archives.sha256"), nullable=True),
    Column("owner", String(200), nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("message", Text, nullable=False, default=""),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("told_at", Float),
    Column("idempotency_key", String(300), unique=True),
    Column("request_sha256", String(64)),
    Column("cancel_mode", String(8)),
    Column("home", String(32)),
    Column("attempt", Integer, nullable=False, default=0),
    Column("failures", Integer, nullable=False, default=0),
    Column("retry_at", Float),
    Column("lease_token", String(32)),
    Column("lease_expires_at", Float),
    Column("pid", Integer),
    Column("pid_start", BigInteger),
    Column("progress_offset", BigInteger, nullable=False, default=0),
    Column("num_events", Integer, nullable=False, default=0),
    Column("summary", Text, nullable=False, default="{}"),
    Column("plan", Text),
    Column("report", Text),
    Column("plan_files", Text),
    Index("searches_by_state", "state", "priority", "number"),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("search_id", String(32), ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("data", Text, nullable=False),
)

TRIALS = Table(
    "trials",
    METADATA,
    Column("search_id", String(32), ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("outcome", String(40), nullable=False),
    Column("data", Text, nullable=False),
)

ARCHIVES = Table(
    "archives",
    METADATA,
    Column("sha256", String(64), primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_files", Integer, nullable=False),
    Column("unpacked_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("role", String(8), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    UniqueConstraint("sha256"),
)
