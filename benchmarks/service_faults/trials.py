"""Faults of trials of a real search on this machine: killed, short of memory, with far too much to say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from autotune.measure.processes import descendants
from autotune.service.store.states import State

from .core import Fault
from .memory import MemoryLimit
from .searching import Searching

MIB = 2**20
LIMIT_MIB, TAKEN_MIB, _PRINTED_MIB = 1024, 4096, 1024
_MOST_KEPT, _MOST_GROWTH, _MOST_LOG = 16 * MIB, 64 * MIB, 256 * 2**10
_LONGEST_READ_S = 5.0


class Measuring(Searching):
    """One of two trials is measured: the job as it stands, and another configuration."""

    num_trials, trial_time = 2, "1s"


def _kill(the: Measuring) -> None:
    """SIGKILL of a trial: nobody can tell why, so it is that configuration's end, and no more."""
    the.outcomes.add("crashed")
    the.pass_reference()
    os.kill(the.held, signal.SIGKILL)
    the.go()


def _run_out_of_memory(the: Measuring) -> None:
    """The driver, and all that comes of it, may have so much memory, and a trial takes more: the kernel kills it."""
    the.outcomes.add("out_of_memory")
    the.pass_reference()
    driver = the.pid()
    with MemoryLimit(LIMIT_MIB * MIB) as limit:
        limit.add(driver, *descendants(driver))
        the.misbehave("takes", TAKEN_MIB)
        the.go()
        the.until(limit.num_kills, "the kernel to kill the trial")
        the.check(State.SUCCEEDED)
    assert "out_of_memory" in {each["outcome"] for each in the.server.client.trials(the.search_id)}


def _print(the: Measuring) -> None:
    """A trial prints 1 GiB: little of it is kept, the server does not grow, and others are answered meanwhile."""
    before, slowest_s = the.server.resident_bytes(), 0.0
    the.misbehave("prints", _PRINTED_MIB)
    the.go()
    until = time.monotonic() + the.bound_s
    while not [*the.server.client.trials(the.search_id)]:
        began = time.monotonic()
        assert began < until, f"waited {the.bound_s:.0f} s for the end of the trial that prints"
        assert len(the.server.client.text(the.search_id, "log")) <= _MOST_LOG
        slowest_s = max(slowest_s, time.monotonic() - began)
        time.sleep(0.1)
    assert the.has_misbehaved("prints"), "nothing was printed"
    assert slowest_s < _LONGEST_READ_S, f"others waited {slowest_s:.1f} s"
    the.check(State.SUCCEEDED)
    grown, kept = the.server.resident_bytes() - before, the.kept_bytes()
    assert grown < _MOST_GROWTH, f"the server took {grown / MIB:.0f} MiB more"
    assert kept < _MOST_KEPT, f"{kept / MIB:.0f} MiB of files are kept"


def _fault(name: str, do: Callable[[Measuring], None], *, with_limit: bool = False) -> Fault:
    return Fault(name, do, ("trial",), scene=Measuring, with_limit=with_limit)  # type: ignore[arg-type]


FAULTS = (
    _fault("trial killed", _kill),
    _fault("trial killed by the kernel, for memory", _run_out_of_memory, with_limit=True),
    _fault("trial prints 1 GiB", _print),
)
