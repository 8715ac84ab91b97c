"""One search for each SQLite file: an advisory lock beside it, which the system releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from ...errors import StudyError


class Lock:
    """A lock on the file's resolved name, so that a link to it is the same study."""

    def __init__(self, path: Path | None) -> None:
        """Take the lock, or say who has it.

        Args:
            path: the study's file; None is a server's study, which any number of drivers may use.

        Raises:
            StudyError: another driver holds it, or it cannot be written (a full disk).
        """
        self._file: IO[str] | None = None
        self._path = None if path is None else Path(os.path.abspath(path))  # the working folder may be removed
        self._made = False
        self.hold()

    def hold(self) -> None:
        """Take the lock again if somebody removed its file, since another search would not find it.

        Raises:
            StudyError: as above.
        """
        while self._path is not None and not self._is_found():
            self.close()
            self._take(self._path)

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """Release the lock and remove its file, if it was not there before: there is no study to protect."""
        if self._file is not None and self._made:
            os.unlink(self._file.name)
        self.close()

    def _is_found(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._file.name))
        except OSError:
            return False

    def _take(self, path: Path) -> None:
        unwritable = f"{path}: cannot be written: {{}}. Choose another with --storage."
        try:
            name = f"{path.resolve()}.lock"
            self._made = not os.path.lexists(name)
            self._file = file = open(name, "a+", encoding="utf-8")  # noqa: SIM115 - until closed
        except (OSError, RuntimeError) as reason:  # a loop of links is the latter
            raise StudyError(unwritable.format(getattr(reason, "strerror", None) or reason)) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            self.close()
            raise StudyError(
                f"{path}: another search is using this study (process {holder}). "
                "Wait for it to end, or choose another file with --storage."
            ) from None
        try:
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())  # unbuffered: closing must not try again
        except OSError as reason:
            self.close()
            raise StudyError(unwritable.format(reason.strerror)) from None
