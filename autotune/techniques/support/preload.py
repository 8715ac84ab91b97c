"""Libraries that can be preloaded: in the folders that a user without root may fill, then the system's."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def find_library(name: str) -> str | None:
    """What to write into ``LD_PRELOAD`` for a library, ``tcmalloc`` for ``libtcmalloc.so.4``; None where there is none.

    Looked for in the folders of ``LD_LIBRARY_PATH`` and in those of Python's own environment (conda's packages lie
    there, with a C++ library that may be newer than the system's), where it is named by its full path; then where the
    dynamic linker looks by itself.
    """
    for folder in _folders():
        for path in sorted(folder.glob(f"lib{name}.so*")):
            if _is_loadable(path):
                return str(path)
    return _of_system(name)


def _folders() -> Iterator[Path]:
    """In the linker's order. A list of libraries cannot name those with a colon or a blank in their paths."""
    listed = [folder for folder in re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", "")) if folder]
    for folder in (*listed, f"{sys.prefix}/lib", f"{sys.base_prefix}/lib"):
        path = Path(folder).absolute()
        if path.is_dir() and not re.search(r"[:\s]", str(path)):
            yield path


def _is_loadable(path: Path) -> bool:
    """Whether it is a library for this processor: a development package has a text file under that name, too.

    Source: elf(5): magic number, class and byte order are the first six bytes; the machine is in the two from 18 on.
    """
    return _kind(path) == _kind(Path("/proc/self/exe"))


def _kind(path: Path) -> tuple[bytes, bytes] | None:
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return None
    return (header[:6], header[18:]) if header.startswith(b"\x7fELF") else None


@cache
def _of_system(name: str) -> str | None:
    """By its name alone, which the linker finds. Its cache may still name a library whose file is gone."""
    found = ctypes.util.find_library(name)
    return found if found and _loads(found) else None


def _loads(library: str) -> bool:
    """Whether the linker preloads it. Where it cannot, it says so on standard error and goes on without it."""
    environment = {**os.environ, "LD_PRELOAD": library}
    process = subprocess.run([sys.executable, "-S", "-c", ""], env=environment, capture_output=True, check=False)
    return process.returncode == 0 and b"LD_PRELOAD" not in process.stderr
