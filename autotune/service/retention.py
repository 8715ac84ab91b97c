"""Deletes old searches that have ended, with their files, and archives that no search needs."""

from __future__ import annotations

import logging
from contextlib import suppress

from sqlalchemy import delete, select

from .problems import Problem
from .service import Service
from .store.database import now
from .store.states import TERMINAL
from .store.tables import ARCHIVES, SEARCHES

__all__ = ["EVERY_S", "forget_old"]

EVERY_S = 3600.0
_LOG = logging.getLogger("autotune.service")


def forget_old(service: Service, keep_s: float) -> tuple[int, int]:
    """Forget what ended, or was last put, more than ``keep_s`` seconds ago.

    Returns:
        Searches and archives that were forgotten.
    """
    old = select(SEARCHES.c.id).where(SEARCHES.c.state.in_(TERMINAL), SEARCHES.c.ended_at < now() - keep_s)
    with service.database.reading() as connection:
        searches = [row.id for row in connection.execute(old)]
    for search_id in searches:
        with suppress(Problem):  # somebody resumed or deleted it
            service.delete(search_id)
    needed = select(SEARCHES.c.archive).where(SEARCHES.c.archive.is_not(None))
    unused = delete(ARCHIVES).where(ARCHIVES.c.created_at < now() - keep_s, ARCHIVES.c.sha256.not_in(needed))
    with service.database.writing() as connection:
        archives = [row.sha256 for row in connection.execute(unused.returning(ARCHIVES.c.sha256))]
    for sha256 in archives:
        (service.places.archives / sha256).unlink(missing_ok=True)
    if searches or archives:
        _LOG.info("forgotten: %d searches, %d archives", len(searches), len(archives))
    return len(searches), len(archives)
