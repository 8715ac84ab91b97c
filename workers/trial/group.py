"""A trial of several processes: started by the trial's own, which trains nothing, and one outcome made of theirs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch

from ...device_memory.context import open_context
from ...errors import PlanError
from ...measure.device import check_device
from ...measure.processes import end_with
from ...ranks import Ranks, own_gpu, this_rank
from ...techniques.support.facts import num_processors
from ..outcome import Crashed, Measured, Outcome
from ..process import fork, send_signal
from ..request import MeasureRequest, TrialRequest
from .folder import TrialFolder

_GRACE_S = 2.0
"""How long the others may take to end by themselves once one has failed: what they come to tells who was first."""


def of_rank(folder: TrialFolder) -> TrialFolder:
    """Where this process answers: as one of several, beside the others."""
    ranks = this_rank()
    return folder.of_rank(ranks.rank) if ranks.size > 1 else folder


def join_group(request: TrialRequest, folder: TrialFolder) -> None:
    """Meet the others of a trial of several processes, through a file; alone, do nothing."""
    ranks = this_rank()
    if ranks.size == 1:
        return
    import torch.distributed as dist

    if request.device == "cuda":
        open_context(own_gpu())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if request.device == "cuda" else "gloo",
        f"file://{folder.path.absolute()}/ranks",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=request.latest_s),
    )


def run_group(
    request: TrialRequest, folder: TrialFolder, spawned_s: float, run: Callable[[TrialFolder, float], NoReturn]
) -> Outcome:
    """Start the trial's processes, wait for all of them, and end those that one's failure leaves behind.

    Args:
        request: whose settings say how many.
        folder: the trial's.
        spawned_s: as :func:`run_trial` has it.
        run: what answers the request in a fork of this process, with its own place in the environment.

    Returns:
        What they measured together; what the first that failed came to.

    Raises:
        PlanError: they are more than the machine has devices, or are asked for what one process alone answers.
    """
    if not isinstance(request, MeasureRequest):
        raise PlanError("settings.parallel: a profile is of one process. Leave the row out of the plan for it.")
    size = request.applied.parallel.processes
    there = torch.cuda.device_count() if request.device == "cuda" else num_processors()
    if there == 0:
        check_device()  # not before: what has used CUDA cannot be forked
    if size > there:
        what = "CUDA devices" if request.device == "cuda" else "processors"
        raise PlanError(f"settings.parallel.processes: {size} were asked for, but a trial has {there} {what} here.")

    def begin() -> NoReturn:
        if request.fresh:
            folder.answer_anew(spawned_s)
        run(folder, spawned_s)

    running = {_start(Ranks(rank, size), begin): rank for rank in range(size)}
    first = min(running, key=lambda pid: running[pid])
    signal.signal(signal.SIGUSR1, lambda *_: send_signal([first], signal.SIGUSR1))  # its stack is the trial's
    ended = _wait(running, folder)
    found = {rank: folder.of_rank(rank).read_outcome() for rank in ended}
    if len(found) == size and all(isinstance(one, Measured) for one in found.values()):
        every = [one for _, one in sorted(found.items()) if isinstance(one, Measured)]
        peaks = [one.measurement.peak for one in every]
        return every[0].at_peak_of(
            peaks, [one.measurement.evaluations for one in every]
        )  # it counts the samples of all
    for rank, status in ended.items():
        if found[rank] is None:
            _end_like(status, rank)
    failed = [rank for rank in ended if not isinstance(found[rank], Measured)]
    cause = min(failed, key=lambda rank: folder.of_rank(rank).answered_ns(), default=0)
    return found.get(cause) or Crashed(message="the trial's processes ended without an answer")


def _start(ranks: Ranks, begin: Callable[[], NoReturn]) -> int:
    """Process id of another process, which knows its place as torchrun tells it, and ends with this one."""
    parent = os.getpid()
    pid = fork()
    if pid:
        return pid
    try:
        end_with(parent)
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(ranks.rank)))
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks.size)))
        begin()
    finally:
        os._exit(1)


def _wait(running: dict[int, int], folder: TrialFolder) -> dict[int, int]:
    """Wait statuses by rank, of those that ended by themselves; once one has failed, the others have a moment."""
    ended: dict[int, int] = {}
    until_s: float | None = None
    while running:
        pid, status = os.waitpid(-1, 0 if until_s is None else os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            ended[rank] = status
            if until_s is None and not isinstance(folder.of_rank(rank).read_outcome(), Measured):
                until_s = time.monotonic() + _GRACE_S
        elif until_s is not None and time.monotonic() > until_s:
            send_signal(running)
            for pid in running:
                os.waitpid(pid, 0)
            break
        elif pid == 0:
            time.sleep(0.01)
    return ended


def _end_like(status: int, rank: int) -> NoReturn:
    """End as that process did, so that the supervisor tells it as it tells any trial's end."""
    print(f"process {rank} of the trial ended without an answer", file=sys.stderr, flush=True)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.waitstatus_to_exitcode(status))
