"""One search for each SQLite file: an advisory lock beside it, which the system releases when its holder dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import StudyError
from ...files import lock

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Lock:
    """A lock on the file's resolved name, so that a link to it is the same study."""

    def __init__(self, path: Path | None) -> None:
        """Take the lock, or say who has it.

        Args:
            path: the study's file; None is a server's study, which any number of drivers may use.

        Raises:
            StudyError: another driver holds it, or it cannot be written (a full disk).
        """
        self._lock: BaseFileLock | None = None
        self._found: os.stat_result
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
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Release the lock and remove its file, if it was not there before: there is no study to protect."""
        if self._lock is not None and self._made:
            os.unlink(self._lock.lock_file)
        self.close()

    def _is_found(self) -> bool:
        try:
            return self._lock is not None and os.path.samestat(self._found, os.stat(self._lock.lock_file))
        except OSError:
            return False

    def _take(self, path: Path) -> None:
        try:
            file = Path(f"{path.resolve()}.lock")
            self._made = not os.path.lexists(file)
            self._lock = lock(file, self._sign)
        except TimeoutError:
            raise StudyError(
                f"{path}: another search is using this study (process {_text(file) or 'unknown'}). "
                "Wait for it to end, or choose another file with --storage."
            ) from None
        except (OSError, RuntimeError) as reason:  # a loop of links is the latter
            said = getattr(reason, "strerror", None) or reason
            raise StudyError(f"{path}: cannot be written: {said}. Choose another with --storage.") from None

    def _sign(self, handle: int) -> None:
        """Write into the file who holds it."""
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._found = os.fstat(handle)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
