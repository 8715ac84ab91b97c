"""Faults of the disk: full, full under an upload, read-only."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from autotune.service.client import ServiceError

from .core import Fault
from .scene import Scene


def fill_disk(the: Scene) -> Path:
    fill = the.state / "fill"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    return fill


def _full(the: Scene) -> None:
    """No room on the state folder, then room again."""
    fill = fill_disk(the)
    time.sleep(0.7)
    fill.unlink()
    time.sleep(0.2)
    the.go()


def _full_under_upload(the: Scene) -> None:
    """An archive is larger than what is left: it is refused, and taken once there is room."""
    archives = the.state / "archives"
    with tempfile.TemporaryDirectory() as job:
        Path(job, "noise").write_bytes(os.urandom(2**20))
        fill, kept = fill_disk(the), sorted(archives.iterdir())
        with pytest.raises(ServiceError, match="cannot keep the archive: No space left"):
            the.server.client.put_folder(Path(job))
        assert sorted(archives.iterdir()) == kept, "something is left of it"
        fill.unlink()
        the.server.client.put_folder(Path(job))
    the.go()


def _read_only(the: Scene) -> None:
    """The search's folder is read-only, and then not: what failed of it says so, and is resumed."""
    watched = the.blocker or the.search_id
    folder, pid = str(the.path(watched)), the.pid()
    os.kill(pid, signal.SIGSTOP)
    the.go()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        os.kill(pid, signal.SIGCONT)
        the.until(lambda: the.row(watched)["ended_at"], "the end of the driver that could not write")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    if the.row(watched)["state"] == "ERROR":
        the.server.client.resume(watched)


def _remove_archive(the: Scene) -> None:
    """Somebody removes the archive of a search that waits: it says so, and is resumed once the archive is there."""
    archive = the.state / "archives" / the.row(the.search_id)["archive"]
    away = archive.rename(the.folder / "away")
    the.go()
    the.until(lambda: the.row(the.search_id)["ended_at"], "the end of the search without its files")
    row = the.row(the.search_id)
    assert (row["state"], "archive" in row["message"]) == ("ERROR", True), row["message"]
    away.rename(archive)
    the.server.client.resume(the.search_id)


FAULTS = (
    Fault("disk full", _full),
    Fault("disk full under an upload", _full_under_upload),
    Fault("search's folder read-only", _read_only),
    Fault("a waiting search's archive removed", _remove_archive, ("queued",)),
)
