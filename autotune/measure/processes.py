"""Memory and descendants of processes, as the kernel tells them: Linux's ``/proc``, elsewhere ``getrusage``."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_STATUS = Path("/proc/self/status")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARED_MEMORY = "/dev/shm"
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are
_PROBE_BYTES = 2**20
"""Too large for Python's own arenas: glibc counts it, if it is the allocator."""

_earlier_peak_bytes = 0
"""The largest resident set before the kernel was told to count anew."""
_server_pid: int | None = None
"""Process that this one was forked from, whose file pages count; None in a fresh interpreter."""


def count_files_of(pid: int) -> None:
    """Set the process that this one was forked from, so that it is charged like a fresh interpreter."""
    global _server_pid
    _server_pid = pid


def unmapped_files_bytes() -> int:
    """File pages (of torch's libraries, mostly) that the server has mapped and this fork of it has not touched yet.

    A fork inherits anonymous pages, but maps file pages only as it touches them: on small models it is charged 10 to
    20 % less than the interpreter that a job is started in. 0 in an interpreter of its own.
    """
    if _server_pid is None:
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        with (
            Path(f"/proc/{_server_pid}/pagemap").open("rb") as theirs,
            Path("/proc/self/pagemap").open("rb") as own,
            Path(f"/proc/{_server_pid}/maps").open() as maps,
        ):
            return page * sum(_num_only_in(theirs, own, *_page_range(line, page)) for line in maps if " /" in line)
    except OSError:
        return 0


def _page_range(line: str, page: int) -> tuple[int, int]:
    """First page and number of pages of a line of ``/proc/<pid>/maps``."""
    start, end = (int(address, 16) // page for address in line.split(maxsplit=1)[0].split("-"))
    return start, end - start


def _num_only_in(theirs: BinaryIO, own: BinaryIO, start: int, count: int) -> int:
    """Pages of a range that are present in one page map and absent in the other.

    Source: https://docs.kernel.org/admin-guide/mm/pagemap.html: 8 bytes a page, the highest bit is "present".
    """
    present = []
    for pagemap in (theirs, own):
        pagemap.seek(8 * start)
        present.append(int.from_bytes(pagemap.read(8 * count)[7::8], "little"))
    return (present[0] & ~present[1] & int.from_bytes(b"\x80" * count, "little")).bit_count()


def end_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent``, which forked it, ends; end now if it already has."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prctl(option: int, value: int) -> bool:
    """Linux's call of that name; False where the system cannot."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return call is not None and call(option, value, 0, 0, 0) == 0


def own_peak_bytes() -> int:
    """The largest resident set of this process so far (VmHWM): anonymous, file and shared pages."""
    fields = kib_fields(_STATUS)
    if "VmHWM" in fields:
        return max(fields["VmHWM"], _earlier_peak_bytes)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def count_anew() -> int | None:
    """Let the kernel count the largest resident set from here on; :func:`own_peak_bytes` goes on as if it did not.

    Returns:
        What is resident now; None where the kernel does not do so.

    Source: https://docs.kernel.org/filesystems/proc.html, clear_refs
    """
    global _earlier_peak_bytes
    before = own_peak_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    _earlier_peak_bytes = before
    return resident_bytes()


def resident_bytes() -> int:
    """What is resident of this process now; 0 where the system does not tell."""
    return kib_fields(_STATUS).get("VmRSS", 0)


def peak_since_bytes() -> int:
    """The largest resident set since :func:`count_anew`; since the process began, where the kernel does not count
    anew."""
    return kib_fields(_STATUS).get("VmHWM") or own_peak_bytes()


def own_live_bytes() -> int | None:
    """Resident anonymous and shared memory of this process; None where the kernel does not tell."""
    fields = kib_fields(_STATUS)
    return fields["RssAnon"] + fields["RssShmem"] if "RssAnon" in fields else None


def beside_bytes(pid: int | None = None, server_pid: int | None = None) -> int:
    """What the processes below ``pid`` (this process) take of the host's memory beside what is resident of that one.

    A page that several of them map counts once, by its proportional sizes (PSS), and not at all where ``pid`` maps it
    too: workers start with all of its pages. Shared memory that is held open and that nobody maps counts too, such as
    batches that lie ready. The bytes of a file on disk do not, unless a single process maps them: the kernel takes them
    back when it needs to.

    Args:
        pid: the process beside which.
        server_pid: what ``pid`` was forked from, whose pages it shares; None is this process's own.

    Source: https://docs.kernel.org/filesystems/proc.html, smaps_rollup
    """
    own_pid, below = pid or os.getpid(), [*descendants(pid)]
    rows = [fields for one in below if (fields := _rollup(one))]
    if not rows:
        return 0
    alone = sum(row["Private_Clean"] + row["Private_Dirty"] for row in rows)
    own, status = _rollup(own_pid), kib_fields(Path(f"/proc/{own_pid}/status"))
    if "Pss_Anon" not in own or "RssAnon" not in status:  # an older kernel
        return alone
    server = _rollup(_server_pid if server_pid is None else server_pid)
    of_server = max(server.get("Pss_Anon", 0) - server.get("Private_Dirty", 0), 0)
    in_others = status["RssAnon"] + status["RssShmem"] - own["Pss_Anon"] - own["Pss_Shmem"]
    theirs = sum(row["Pss_Anon"] + row["Pss_Shmem"] + row["Private_Clean"] for row in rows)
    mapped = sum(row["Pss_Shmem"] for row in (own, *rows))
    return max(theirs + of_server - in_others, alone) + max(_held_open_bytes((own_pid, *below)) - mapped, 0)


def _rollup(pid: int | None) -> dict[str, int]:
    return kib_fields(Path(f"/proc/{pid}/smaps_rollup")) if pid is not None else {}


def _held_open_bytes(pids: Iterable[int]) -> int:
    """Of shared memory without a name that any of these has open, such as torch's loader workers make for batches."""
    try:
        shared = os.stat(_SHARED_MEMORY).st_dev
    except OSError:
        return 0
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as every:
            for one in every:
                with suppress(OSError):
                    status = os.stat(one.path)
                    if status.st_dev == shared and not status.st_nlink:
                        found[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return sum(found.values())


class _MallocInfo(ctypes.Structure):
    """Source: malloc.h of glibc 2.33, ``struct mallinfo2``."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@functools.cache
def _malloc_info() -> Callable[[], _MallocInfo] | None:
    """glibc's count; None where another allocator is there, of which it knows nothing."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return None
    info.restype = _MallocInfo
    before = info()
    probe = bytearray(_PROBE_BYTES)
    after = info()
    counted = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    del probe
    return info if counted >= _PROBE_BYTES else None


def allocated_bytes() -> int | None:
    """Memory that this process has asked glibc for and not given back, to the byte, whatever that keeps for later; None
    with another allocator. Takes some microseconds."""
    info = _malloc_info()
    if info is None:
        return None
    found = info()
    return int(found.uordblks + found.hblkhd)


def give_back() -> None:
    """Have glibc return what it keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def descendants(pid: int | None = None) -> Iterator[int]:
    """Process ids below ``pid`` (this process), parents before children."""
    for child in children(pid or os.getpid()):
        yield child
        yield from descendants(child)


def children(pid: int) -> Iterator[int]:
    """Process ids of those that ``pid`` has started, or adopted."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for thread in threads:
        yield from map(int, read(thread / "children").split())


def read(path: Path) -> str:
    """A file of ``/proc``; empty where its process has gone, it may not be read, or the system has no such file."""
    try:
        return path.read_text(errors="replace")  # a process may call itself anything
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """What ``/proc/<pid>/stat`` has behind the name, which may hold blanks and parentheses: the state, the parent, the
    process group, and so on; empty where there is no such process."""
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def kib_fields(path: Path) -> dict[str, int]:
    """The lines ``Name:  123 kB`` of a file, in bytes; empty where it cannot be read."""
    rows = (line.split() for line in read(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
