"""A disk of a test's own, that it can fill; and a folder that is read-only for a while."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Path]:
    """A folder on a disk of 48 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root alone")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on it; the file that takes it."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return disk / "ballast"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """For whatever is opened in the folder meanwhile, root's, too."""
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode
    ):
        pytest.skip("a folder can be mounted by root alone")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
