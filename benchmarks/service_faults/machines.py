"""Faults of the machine while a real search measures on it: a full disk, a database that has gone, is another, is
locked or read-only, a job as it stands that is killed. Each is the machine's, and the search goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from autotune.measure.processes import descendants
from autotune.workers.process import identify
from tests.full_disk import read_only

from .core import Fault
from .databases import lock_database
from .disks import fill_disk
from .memory import MemoryLimit
from .scene import LEASE_S
from .trials import LIMIT_MIB, MIB, TAKEN_MIB, Measuring

_LONGEST_END_S = 30.0
"""For a driver that cannot write."""


def _is_ready(the: Measuring) -> bool:
    return httpx.get(f"{the.server.url}/readyz", timeout=30.0).status_code == 200


@contextmanager
def _not_ready(the: Measuring) -> Iterator[None]:
    """Meanwhile ``/readyz`` says so; then it is ready again."""
    the.until(lambda: not _is_ready(the), "/readyz to say so")
    yield
    assert not _is_ready(the), "/readyz says that all is well"


def _fill(the: Measuring) -> None:
    """No room, until the driver has ended or for a while; then room again."""
    the.pass_reference()
    driver, until = the.pid(), time.monotonic() + _LONGEST_END_S
    fill = fill_disk(the)
    with _not_ready(the):
        the.go()
        while identify(driver) and time.monotonic() < until:
            time.sleep(0.1)
    fill.unlink()
    the.most_lost = 2
    the.until(lambda: _is_ready(the), "/readyz")


def _move(the: Measuring, *, leaves_another: bool) -> None:
    """The database's files are elsewhere past the lease, and come back."""
    the.pass_reference()
    away, names = the.folder / "away", [path.name for path in the.state.glob("service.db*") if path.suffix != ".lock"]
    away.mkdir()
    for name in names:
        (the.state / name).rename(away / name)
    if leaves_another:
        shutil.copy(the.template.folder / "service.db", the.state)
    with _not_ready(the):
        the.go()
        time.sleep(LEASE_S + 1)
    for name in names:
        (the.state / name).unlink(missing_ok=True)
        (away / name).rename(the.state / name)
    the.most_lost = 2
    the.until(lambda: _is_ready(the), "/readyz")


def _lock(the: Measuring) -> None:
    """SQLite's write lock is held past the lease."""
    the.pass_reference()
    the.most_lost = 2
    lock_database(the)


def _read_only(the: Measuring) -> None:
    """The database and its folder are read-only past the lease, for all that is opened meanwhile."""
    the.pass_reference()
    with read_only(the.state), _not_ready(the):
        the.go()
        time.sleep(LEASE_S + 1)
    the.most_lost = 2
    the.until(lambda: _is_ready(the), "/readyz")


def _kill_reference(the: Measuring) -> None:
    """SIGKILL of the job as it stands, as the kernel ends it for a neighbour's memory: it is measured again."""
    the.told_again, the.most_lost = (0,), 1
    os.kill(the.held, signal.SIGKILL)
    the.go()


def _kill_reference_for_memory(the: Measuring) -> None:
    """The kernel kills the job as it stands, for what it takes beyond a limit of the machine's: that is told of it, and
    the search goes on with what takes less."""
    the.outcomes.add("out_of_memory")
    driver = the.pid()
    with MemoryLimit(LIMIT_MIB * MIB) as limit:
        limit.add(driver, *descendants(driver))
        the.misbehave("takes", TAKEN_MIB)
        the.go()
        the.until(limit.num_kills, "the kernel to kill it")


def _fault(name: str, do: Callable[[Measuring], None], *, with_limit: bool = False) -> Fault:
    return Fault(name, do, ("trial",), scene=Measuring, with_limit=with_limit)  # type: ignore[arg-type]


def _removed(the: Measuring) -> None:
    _move(the, leaves_another=False)


def _replaced(the: Measuring) -> None:
    _move(the, leaves_another=True)


FAULTS = (
    _fault("disk full, a real search", _fill),
    _fault("database removed, a real search", _removed),
    _fault("database replaced, a real search", _replaced),
    _fault("database locked, a real search", _lock),
    _fault("database read-only, a real search", _read_only),
    _fault("reference killed", _kill_reference),
    _fault("reference killed by the kernel, for memory", _kill_reference_for_memory, with_limit=True),
)
