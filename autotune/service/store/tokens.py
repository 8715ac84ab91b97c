"""Bearer tokens: random, kept as their SHA-256 alone, each with a role and an end."""

from __future__ import annotations

import hashlib
import re
import secrets
from enum import IntEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, and_, func, insert, or_, select, update

from ...units import parse_duration
from ..problems import Problem
from .database import Database, now
from .tables import TOKENS

_PREFIX = "atn_"
"""Prefix of tokens, by which secret scanners find them."""
NAME = r"^[\w.@ -]+$"
"""Pattern of a token's name."""
LONGEST_NAME = 100
RoleName = Literal["read", "submit", "admin"]


class Role(IntEnum):
    """What a token may do; each may do what those before it may."""

    read = 1
    """See searches."""
    submit = 2
    """Submit searches, which run code as the service's user, and change one's own."""
    admin = 3
    """Change everybody's searches, make and revoke tokens."""


class Caller(BaseModel):
    """Who makes a request."""

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role
    token_id: str

    def owns(self, owner: str) -> bool:
        """Whether what this name has submitted is theirs; all is an admin's."""
        return self.role is Role.admin or self.name == owner


_OF_RUN = Caller(name="(local)", role=Role.admin, token_id="(local)")
"""Who has the token of :meth:`Tokens.make_for_run`, by a name that no other token can have."""


class TokenRow(BaseModel):
    """A token as it is listed: never itself."""

    id: str
    name: str
    role: RoleName
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class Tokens:
    """The tokens in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._of_run: str | None = None

    def make_for_run(self) -> str:
        """An admin's token that is kept nowhere, and is valid as long as this object."""
        secret = _new()
        self._of_run = _digest(secret)
        return secret

    def create(self, name: str, role: RoleName, expires_s: float | None) -> tuple[TokenRow, str]:
        """Make a token; it is shown only once.

        Raises:
            Problem: 422, the name is none; 409, a valid token has it.
        """
        if not re.fullmatch(NAME, name) or len(name) > LONGEST_NAME:
            raise Problem(422, f"name: 1 to {LONGEST_NAME} letters, digits, or any of '_.@ -' were expected: {name!a}.")
        secret = _new()
        token_id = secrets.token_hex(4)
        with self._database.writing() as connection:
            if not self._database.is_sqlite:  # where others may write meanwhile
                connection.exec_driver_sql("LOCK TABLE tokens IN SHARE ROW EXCLUSIVE MODE")
            taken = connection.scalar(select(TOKENS.c.id).where(TOKENS.c.name == name, _valid()))
            if taken is not None:
                raise Problem(
                    409,
                    f"name: token {taken} is {name}'s, and owns all searches of {name}. Choose another, or revoke it.",
                )
            connection.execute(
                insert(TOKENS).values(
                    id=token_id,
                    name=name,
                    role=role,
                    sha256=_digest(secret),
                    created_at=now(),
                    expires_at=None if expires_s is None else now() + expires_s,
                )
            )
        return next(row for row in self.all() if row.id == token_id), secret

    def all(self) -> list[TokenRow]:
        """All, the newest first."""
        with self._database.reading() as connection:
            rows = connection.execute(select(TOKENS).order_by(TOKENS.c.created_at.desc()))
            return [TokenRow.model_validate(row._asdict()) for row in rows]

    def revoke(self, token_id: str) -> None:
        """Revoke a token; a second call changes nothing.

        Raises:
            Problem: 404.
        """
        when = func.coalesce(TOKENS.c.revoked_at, now())
        with self._database.writing() as connection:
            changed = connection.execute(update(TOKENS).where(TOKENS.c.id == token_id).values(revoked_at=when))
        if not changed.rowcount:
            raise Problem(404, f"there is no token {token_id[:40]!r}.")

    def caller(self, secret: str) -> Caller | None:
        """The owner of this token; None if it is unknown, has expired, or was revoked.

        The look-up is by the hash: what its time could tell is of a hash, and of no use.
        """
        digest = _digest(secret)
        if digest == self._of_run:
            return _OF_RUN
        query = select(TOKENS.c.id, TOKENS.c.name, TOKENS.c.role).where(TOKENS.c.sha256 == digest, _valid())
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else Caller(name=row.name, role=Role[row.role], token_id=row.id)

    def submitters(self) -> list[str]:
        """Names of the valid tokens that may submit."""
        query = select(TOKENS.c.name).where(TOKENS.c.role != Role.read.name, _valid()).order_by(TOKENS.c.name)
        with self._database.reading() as connection:
            return [*connection.scalars(query)]

    def are_there(self) -> bool:
        """Whether any token is valid."""
        with self._database.reading() as connection:
            return connection.execute(select(TOKENS.c.id).where(_valid()).limit(1)).first() is not None


def expiry_s(text: str | None) -> float | None:
    """Seconds from ``30d``, ``12h``; None of None, or ``never``.

    Raises:
        Problem: 422, it is no such time.
    """
    if text is None or text == "never":
        return None
    try:
        if text.endswith("d"):
            return parse_duration(f"{float(text[:-1]) * 24:f}h")
        return parse_duration(text)
    except (ValueError, OverflowError):
        raise Problem(422, f"expires: 30d, 12h or never was expected, but got {text[:40]!r}.") from None


def _valid() -> ColumnElement[bool]:
    unexpired = or_(TOKENS.c.expires_at.is_(None), TOKENS.c.expires_at > now())
    return and_(TOKENS.c.revoked_at.is_(None), unexpired)


def _new() -> str:
    return f"{_PREFIX}{secrets.token_urlsafe(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
