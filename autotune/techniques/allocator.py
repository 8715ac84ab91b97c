"""Allocator: who hands out memory. Chosen before the process starts, so it lives in the environment."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PlanError
from .support.base import Effect, Stage, Technique
from .support.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

_LIBRARIES = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
INSTALLATION = {
    "tcmalloc": "apt-get install libtcmalloc-minimal4, or without root conda install -c conda-forge gperftools",
    "jemalloc": "apt-get install libjemalloc2, or without root conda install -c conda-forge jemalloc",
}
"""How to get each (Debian, Ubuntu; conda)."""
_CUDA_VARIABLE, _EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_CUDA_OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


class Allocator(Technique):
    """The C allocator of the process, or the CUDA caching allocator's segments."""

    name: ClassVar[str] = "allocator"
    stage: ClassVar[Stage] = Stage.PROCESS
    affects: ClassVar[frozenset[Effect]] = frozenset({"process"})
    purposes: ClassVar[Mapping[str, str]] = {
        "tcmalloc": "Preloads tcmalloc for malloc: less memory, the same peak each time.",
        "jemalloc": "Preloads jemalloc for malloc: less memory.",
        "expandable_segments": "Lets the CUDA allocator grow its segments: less fragmentation.",
    }

    kind: Literal["system", "tcmalloc", "jemalloc", "expandable_segments"] = "system"
    """``system`` is the C library's; ``tcmalloc`` and ``jemalloc`` are preloaded; ``expandable_segments`` is CUDA's."""

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What is installed."""
        return {"allocators": installed_allocators()}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Allocator, ...]:
        """What is installed, tcmalloc first: it repeats to the megabyte."""
        offered = (cls(kind="tcmalloc"), cls(kind="jemalloc"), cls(kind="expandable_segments"))
        return (cls(), *(choice for choice in offered if choice.unavailable(facts) is None))

    def prior_gain(self) -> tuple[float, float]:
        """tcmalloc was 1.08 to 1.19 times as fast at the medians of three trainings (benchmarks/replay/tables)."""
        return (0.1, 0.1) if self.kind in _LIBRARIES else (0.0, 0.0)

    def unavailable(self, facts: Facts) -> str | None:
        """A C allocator is for CPU training and must be installed; expandable segments are CUDA's."""
        if self.kind == "expandable_segments":
            return None if facts.device.type == "cuda" else "expandable_segments is CUDA's allocator"
        if self.kind == "system":
            return None
        if facts.device.type == "cuda":
            return f"{self.kind} serves host memory, which is not what a CUDA budget is held against"
        if self.kind not in facts.allocators:
            return f"{self.kind} is not installed: {INSTALLATION[self.kind]}"
        return None

    def environment(self) -> dict[str, str]:
        """``LD_PRELOAD`` of the library, or CUDA's allocator configuration.

        Raises:
            PlanError: the library is not installed on this machine.

        Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
        """
        if self.kind == "system":
            return {}
        if self.kind == "expandable_segments":
            return {_CUDA_VARIABLE: _EXPANDABLE}
        library = _find(self.kind)
        if library is None:
            raise PlanError(
                f"settings.allocator.kind: {self.kind} is not installed here. "
                f"Install it ({INSTALLATION[self.kind]}), or use kind: system."
            )
        return {"LD_PRELOAD": library}

    def not_in_force(self) -> str | None:
        """Whether the process's ``malloc`` is the library's, or the variable is set."""
        if self.kind == "system":
            return None
        if self.kind == "expandable_segments":
            in_force = _EXPANDABLE in os.environ.get(_CUDA_VARIABLE, os.environ.get(_CUDA_OLD_VARIABLE, ""))
            return None if in_force else f"the plan was measured with {_CUDA_VARIABLE}={_EXPANDABLE}, which is not set"
        if not sys.platform.startswith("linux") or _malloc_library().startswith(f"lib{self.kind}"):
            return None
        return f"the plan was measured with {self.kind} preloaded, which this process is not"


def installed_allocators() -> tuple[str, ...]:
    """Of ``tcmalloc`` and ``jemalloc``: what this machine has."""
    return tuple(kind for kind in _LIBRARIES if sys.platform.startswith("linux") and _find(kind))


def _find(kind: str) -> str | None:
    """What to preload."""
    return next(filter(None, map(find_library, _LIBRARIES[kind])), None)


def _malloc_library() -> str:
    """The file name of the library whose ``malloc`` this process calls; empty where it is in none. An interpreter that
    is not position-independent (Debian's) answers with its own jump to it: then the preloaded library is what is
    mapped."""
    malloc = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value or 0
    mapped, found = set[str](), ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, file = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        mapped.add(Path(file).name)
        if int(start, 16) <= malloc < int(end, 16):
            found = Path(file).name
    if found != Path("/proc/self/exe").resolve().name:
        return found
    return next((name for name in mapped if name.startswith(tuple(f"lib{kind}" for kind in _LIBRARIES))), "")


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
