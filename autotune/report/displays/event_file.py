"""``--progress``: one JSON object on a line of a file for each event of a search, for programs that watch it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ...errors import UserError
from ...searches.event_base import Event
from ...searches.options import SearchOptions
from .progress import Progress


class EventFile:
    """Appends what happens, each line at once: what follows the file sees whole lines, whatever becomes of the search.

    An object has ``event`` (its kind), ``time`` (seconds since 1970) and what the kind has; sizes are bytes.
    """

    def __init__(self, path: Path, options: SearchOptions) -> None:
        """Open it.

        Raises:
            UserError: it cannot be written.
        """
        self._progress = Progress(options)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as reason:
            raise UserError(
                f"--progress {path}: it cannot be written: {reason.strerror}. Choose another file."
            ) from None

    def observe(self, event: Event) -> None:
        """Append an event. A full disk ends no search: the line is lost."""
        self._progress.observe(event)
        row = {"event": event.kind, "time": time.time(), **event.row(self._progress)}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError:
            pass
