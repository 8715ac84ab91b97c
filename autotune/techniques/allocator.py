"""Allocator: who hands out memory. Chosen before the process starts, so it lives in the environment."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import PlanError
from ..units import MIB
from .support.base import Effect, FileKind, Run, Stage, Technique
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
_THRESHOLD = MIB
"""Bytes from which on ``mmap`` gives a tensor pages of its own, where nothing else is said."""
_GROWN_THRESHOLD = 32 * MIB
"""Source: malloc.c of glibc, DEFAULT_MMAP_THRESHOLD_MAX."""
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Source: malloc.h of glibc."""
_NOT_GLIBC = "it sets a threshold of glibc's malloc, which this process does not have"
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
        "mmap": "Lets glibc give each large tensor pages of its own: less memory, and time for new pages.",
        "expandable_segments": "Lets the CUDA allocator grow its segments: less fragmentation.",
    }

    kind: Literal["system", "tcmalloc", "jemalloc", "mmap", "expandable_segments"] = "system"
    """``system`` is the C library's; ``tcmalloc`` and ``jemalloc`` are preloaded; ``mmap`` is glibc's, with a fixed
    threshold; ``expandable_segments`` is CUDA's."""

    from_mib: int = Field(_THRESHOLD // MIB, ge=1, le=_GROWN_THRESHOLD // MIB)
    """``mmap``: MiB from which on a tensor gets pages of its own, 1 to 32. The more, the fewer new pages, and the more
    is left on the heap."""

    @model_validator(mode="after")
    def _check_from(self) -> Allocator:
        if self.kind != "mmap" and self.from_mib * MIB != _THRESHOLD:
            raise ValueError(f"from_mib: kind {self.kind} maps by itself, but got {self.from_mib}. Use kind: mmap.")
        return self

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What is installed."""
        return {"allocators": installed_allocators()}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Allocator, ...]:
        """What is there, tcmalloc first: it repeats to the megabyte. So does mmap, which is slower: where nothing is
        installed."""
        offered = (cls(kind="tcmalloc"), cls(kind="jemalloc"), cls(kind="mmap"), cls(kind="expandable_segments"))
        found = tuple(choice for choice in offered if choice.unavailable(facts) is None)
        return (cls(), *(one for one in found if one.kind != "mmap" or "tcmalloc" not in facts.allocators))

    def prior_gain(self) -> tuple[float, float]:
        """tcmalloc was 1.08 to 1.19 times as fast at the medians of three trainings (benchmarks/replay/tables); a step
        with mmap took 1.25 and 1.36 times as long (benchmarks/results/allocators-cpu.jsonl)."""
        if self.kind == "mmap":
            return -0.25, 0.1
        return (0.1, 0.1) if self.kind in _LIBRARIES else (0.0, 0.0)

    @property
    def maps_from(self) -> int:
        """Bytes from which on a tensor on a CPU gets pages of its own, new ones each time."""
        return {"mmap": self.from_mib * MIB, "system": _GROWN_THRESHOLD}.get(self.kind, sys.maxsize)

    def describe(self, facts: Facts | None = None) -> str:
        """The kind, and the size from which on it maps."""
        return self.kind if self.from_mib * MIB == _THRESHOLD else f"{self.kind} (from {self.from_mib} MiB)"

    def unavailable(self, facts: Facts) -> str | None:
        """A C allocator is for CPU training and must be installed; expandable segments are CUDA's."""
        if self.kind == "expandable_segments":
            return None if facts.device.type == "cuda" else "expandable_segments is CUDA's allocator"
        if self.kind == "system":
            return None
        if facts.device.type == "cuda":
            return f"{self.kind} serves host memory, which is not what a CUDA budget is held against"
        if self.kind in facts.allocators:
            return None
        return f"{self.kind} is not installed: {INSTALLATION[self.kind]}" if self.kind in _LIBRARIES else _NOT_GLIBC

    def not_in_file(self, kind: FileKind) -> str | None:
        """A process has one."""
        return "the process that runs the file has its own"

    def environment(self) -> dict[str, str]:
        """``LD_PRELOAD`` of the library, or CUDA's allocator configuration.

        Raises:
            PlanError: the library is not installed on this machine.

        Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
        """
        if self.kind in ("system", "mmap"):
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
        if self.kind in ("system", "mmap"):
            return None
        if self.kind == "expandable_segments":
            in_force = _EXPANDABLE in os.environ.get(_CUDA_VARIABLE, os.environ.get(_CUDA_OLD_VARIABLE, ""))
            return None if in_force else f"the plan was measured with {_CUDA_VARIABLE}={_EXPANDABLE}, which is not set"
        if not sys.platform.startswith("linux") or _malloc_library().startswith(f"lib{self.kind}"):
            return None
        return f"the plan was measured with {self.kind} preloaded, which this process is not"

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """``mmap``: set glibc's thresholds, for the whole process. What is free on the heap by then is still taken
        first.

        Raises:
            PlanError: ``malloc`` is not glibc's here.

        Source: mallopt(3), M_MMAP_THRESHOLD: once it is set, it no longer grows with what is unmapped.
        """
        if self.kind == "mmap":
            if not _is_glibc():
                raise PlanError(f"settings.allocator.kind: mmap: {_NOT_GLIBC}. Use kind: system.")
            _mapping.plan(self.maps_from)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        """glibc's threshold is the largest that it comes to by itself."""
        _mapping.undo()
        return model


class _Mapping:
    """From how many bytes on glibc maps, as far as it was set here: for the whole process."""

    def __init__(self) -> None:
        self.planned: int | None = None
        """By a plan."""

    def set(self, threshold: int) -> None:
        """Set it, and give back what is free on the heap: that is taken before anything is mapped."""
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, threshold)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * threshold)
        library.malloc_trim(0)

    def plan(self, threshold: int) -> None:
        """For a plan, until another is applied."""
        self.set(threshold)
        self.planned = threshold

    def undo(self) -> None:
        """As it comes to be by itself, where a plan has set it."""
        if self.planned:
            self.set(_GROWN_THRESHOLD)
            self.planned = None


_mapping = _Mapping()


@contextmanager
def heap_kept_small() -> Iterator[None]:
    """Whatever is large and made within is not on glibc's heap, where it would leave holes that what a job allocates
    later is laid into. Plans that are applied within set nothing for good. Not where the user has set a threshold."""
    own = os.environ.get("MALLOC_MMAP_THRESHOLD_") or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if own or not _is_glibc():
        yield
        return
    planned, _mapping.planned = _mapping.planned, None
    _mapping.set(_THRESHOLD)
    try:
        yield
    finally:
        _mapping.set(planned or _GROWN_THRESHOLD)
        _mapping.planned = planned


def installed_allocators() -> tuple[str, ...]:
    """Of ``tcmalloc``, ``jemalloc`` and ``mmap``: what this machine has."""
    if not sys.platform.startswith("linux"):
        return ()
    return (*(kind for kind in _LIBRARIES if _find(kind)), *(["mmap"] if _is_glibc() else []))


def _is_glibc() -> bool:
    """Whether ``malloc`` is glibc's, and none that is preloaded."""
    is_there = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    return is_there and (_malloc_library() or "libc.so").startswith(("libc.", "libc-"))


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
