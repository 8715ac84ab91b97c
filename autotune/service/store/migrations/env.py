"""How Alembic runs here: within the connection, and the transaction, that it is given; or as SQL alone."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes.get("connection")
if connection is None:
    context.configure(dialect_name=context.get_x_argument(as_dictionary=True).get("dialect", "postgresql"))
    with context.begin_transaction():
        context.run_migrations()
else:
    context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite")
    context.run_migrations()
