"""From how a trial's process ended to what it means."""

from __future__ import annotations

import os
import signal

from ...units import MIB
from ..outcome import KILLED, Crashed, Failed, Lost, Outcome, OutOfMemory, TimedOut, host_ran_out
from ..request import TrialRequest
from .folder import NO_FOLDER, TrialFolder, check_working_folder
from .supervise import Ending
from .traces import INNERMOST, without_our_frames

_KILLED_WORKER = ("killed by signal: Killed", "exited unexpectedly")


def verdict(request: TrialRequest, folder: TrialFolder, ending: Ending) -> Outcome:
    """The trial's own answer where it gave a whole one, else what its end says."""
    answer = folder.read_outcome()
    if answer is None:
        answer = _of_ending(request, folder, ending)
    elif isinstance(answer, Failed) and ending.oom_killed and any(text in answer.message for text in _KILLED_WORKER):
        why = f"the kernel killed a loader worker for memory: {answer.message}"
        if request.device == "cuda":
            answer = Failed(message=host_ran_out(why))
        else:
            answer = OutOfMemory(peak_bytes=ending.peak_bytes, message=why)
    if isinstance(answer, Failed | Crashed):
        answer = check_working_folder() or answer
    return answer.model_copy(update={"output": ending.output, "seconds": ending.seconds})


def _of_ending(request: TrialRequest, folder: TrialFolder, ending: Ending) -> Outcome:
    code = os.waitstatus_to_exitcode(ending.status)
    if code == NO_FOLDER:
        return Lost(message=_last_said(ending))
    if not folder.is_there():
        return Lost(message=f"{folder.path}: the trial's files were removed while it ran.")
    doing = f"while {folder.read_phase()}"
    stack = "\n".join(("", *_frames(folder.read_stack())))
    if ending.ended_for == "memory":
        limit = request.memory_limit_bytes or 0
        message = (
            f"ended {doing}: the process was charged {ending.peak_bytes / MIB:.0f} MiB, "
            f"over the watchdog's limit of {limit / MIB:.0f} MiB (the budget and a quarter)"
        )
        return OutOfMemory(peak_bytes=ending.peak_bytes, message=message, of_host=request.device == "cuda")
    if ending.ended_for == "stopped":
        return Lost(message=f"a trial was stopped (SIGSTOP) {doing}, and nobody continued it")
    if ending.ended_for == "deadline":
        where = f", at{INNERMOST}{stack}" if stack else "; its Python stack could not be had"
        put_off = f", put off by {ending.put_off_s:.0f} s for compiling," if ending.put_off_s else ""
        return TimedOut(deadline_s=request.deadline_s + ending.put_off_s, message=f"ended{put_off} {doing}{where}")
    if code > 0 and not folder.has_begun():
        return Lost(
            message=f"a trial's process ended with code {code} before it came to the task: {_last_said(ending)}"
        )
    if code >= 0:
        return Crashed(message=f"exited with code {code} and without an answer {doing}")
    if -code == signal.SIGKILL and ending.oom_killed:
        if request.device == "cuda":
            return Crashed(message=host_ran_out(f"ended {doing} by the kernel"))
        return OutOfMemory(peak_bytes=ending.peak_bytes, message=f"ended {doing} by the kernel, for memory")
    name = KILLED if -code == signal.SIGKILL else _name(-code)
    return Crashed(message=f"{name} {doing}{stack}")


def _last_said(ending: Ending) -> str:
    return (ending.output.strip().splitlines() or ["it said nothing"])[-1]


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    return f"{signal.strsignal(number)} ({name})"


def _frames(dump: str) -> list[str]:
    """The frames of a faulthandler dump, innermost first, without ours."""
    return [line for line in without_our_frames(dump).splitlines() if line.startswith('  File "')]
