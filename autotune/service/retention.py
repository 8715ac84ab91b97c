"""Deletes old searches that have ended, with their files, and archives that no search needs."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy import delete, or_, select

from .problems import Problem
from .service import Service
from .store.database import now
from .store.states import TERMINAL
from .store.tables import ARCHIVES, SEARCHES

EVERY_S = 3600.0
_LOG = logging.getLogger("autotune.service")


def forget_old(service: Service, keep_s: float) -> tuple[int, int]:
    """Forget what ended, or was last put, more than ``keep_s`` seconds ago.

    Returns:
        Searches and archives that were forgotten.
    """
    here = or_(SEARCHES.c.home.is_(None), SEARCHES.c.home == service.home)  # another server has the others' files
    old = select(SEARCHES.c.id).where(SEARCHES.c.state.in_(TERMINAL), SEARCHES.c.ended_at < now() - keep_s, here)
    with service.database.reading() as connection:
        searches = [row.id for row in connection.execute(old)]
    for search_id in searches:
        with suppress(Problem):  # somebody resumed or deleted it
            service.delete(search_id)
    needed = select(SEARCHES.c.archive).where(SEARCHES.c.archive.is_not(None))
    unused = delete(ARCHIVES).where(ARCHIVES.c.created_at < now() - keep_s, ARCHIVES.c.sha256.not_in(needed))
    with service.database.writing() as connection:
        connection.execute(unused)
        known = {row.sha256 for row in connection.execute(select(ARCHIVES.c.sha256))}
    files = (path for path in service.places.archives.iterdir() if not path.name.startswith("."))
    old_files = [path for path in files if path.name not in known and _age_s(path) > keep_s]
    for path in old_files:  # another server may have deleted the row
        path.unlink(missing_ok=True)
    if searches or old_files:
        _LOG.info("forgotten: %d searches, %d archives", len(searches), len(old_files))
    return len(searches), len(old_files)


def _age_s(path: Path) -> float:
    """Seconds since a file was written; 0 where it has gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
