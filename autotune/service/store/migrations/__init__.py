"""Alembic's migrations: each adds to the one before; none is changed once released."""
