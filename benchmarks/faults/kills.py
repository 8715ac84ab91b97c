"""Signals to every process of a search at every moment: nothing is lost, nothing is left, ``--resume`` goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from . import processes, stored
from .checks import clean
from .core import Complaints, Executor, Fault
from .ended import LONG_S, NoEnd
from .place import Place
from .scene import MOMENTS, Disturbance, Held, Moment, begin, disturb, resume_and_check, set_up

_KIND = "kills"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = -signal.SIGKILL
_NUM_LOSSES = 3
_NEXT_S = 25.0
_START_S = 30.0
_RAYS_DRIVER = "workers.ray_pool"
"""In the command of the process that Ray lives in."""


def faults() -> Iterator[Fault]:
    """The driver, what runs trials, the trials, Ray's own processes; and Ray's start."""
    for executor in ("local", "ray"):
        yield from _of_driver(executor)
        yield from _of_servers(executor)
        yield from _of_trials(executor)
    yield from _of_ray()
    yield from _of_rays_start()


def _fault(name: str, executor: Executor, moment: Moment, what: Disturbance, expected: str) -> Fault:
    do = partial(disturb, executor=executor, moment=moment, what=what)
    return Fault(f"{name}, {moment}", _KIND, executor, expected, do)


def _of_driver(executor: Executor) -> Iterator[Fault]:
    is_local = executor == "local"
    killed = Disturbance(_kill_driver, codes=(_KILLED,), is_environments=False, interrupts=False, resumes=is_local)
    for moment in MOMENTS if is_local else ("inspection", "trial"):
        yield _fault("driver SIGKILL", executor, moment, killed, "nothing lost, nothing left, --resume goes on")
    every = [(moment, number) for moment in ("inspection", "trial") for number in _SIGNALS]
    every = [*every, ("reference", signal.SIGTERM), ("finalist", signal.SIGTERM)] if is_local else every[3:]
    for moment, number in every:
        once = Disturbance(partial(_tell_driver, number=number), codes=(130,), interrupts=False, resumes=is_local)
        yield _fault(f"driver {number.name}", executor, moment, once, "130, the best so far, --resume goes on")
    more = [(moment, signal.SIGTERM) for moment in ("inspection", "reference", "finalist")]
    for moment, number in [
        *(more if is_local else ()),
        *(("trial", number) for number in _SIGNALS[: 3 if is_local else 1]),
    ]:
        twice = Disturbance(partial(_tell_driver_twice, number=number), codes=(130,), interrupts=False, resumes=False)
        yield _fault(f"driver {number.name} twice", executor, moment, twice, "130 at once")


def _kill_driver(held: Held) -> None:
    held.running.send(signal.SIGKILL)
    held.running.finish(10)


def _tell_driver(held: Held, number: signal.Signals) -> None:
    held.running.send(number)


def _tell_driver_twice(held: Held, number: signal.Signals) -> None:
    """While the trial waits: it does not end by itself."""
    since = len(held.running.said())
    held.running.send(number)
    held.running.comes("again stops at once", 10, since)
    held.running.send(number)
    held.running.finish()


def _of_servers(executor: Executor) -> Iterator[Fault]:
    expected = "asked again, or not measured; never stored as a configuration's outcome"
    is_local = executor == "local"
    for moment in MOMENTS if is_local else MOMENTS[:3]:
        for times in (1, _NUM_LOSSES) if is_local or moment == "trial" else (_NUM_LOSSES,):
            harm = partial(_kill_server, times=times)
            what = Disturbance(harm, codes=(0, 130) if times == 1 else (0, 2, 130), resumes=is_local and times > 1)
            yield _fault(f"fork server SIGKILL, {times} times", executor, moment, what, expected)
    for number in (signal.SIGTERM, signal.SIGABRT) if is_local else ():
        what = Disturbance(partial(_kill_server, times=1, number=number), codes=(0, 130), resumes=False)
        yield _fault(f"fork server {number.name}", executor, "trial", what, expected)


def _kill_server(held: Held, times: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Each time a trial came to be held again, under the server that took the place of the one before."""
    for _ in range(times):
        os.kill(held.server(), number)
        if times > 1:
            try:
                held.trial = held.wait(held.trial, _NEXT_S)
            except NoEnd:
                return


def _of_trials(executor: Executor) -> Iterator[Fault]:
    """Nobody can tell who killed a trial: it is the configuration's end, and no more than that."""
    for moment in MOMENTS if executor == "local" else MOMENTS[2:3]:
        is_late = moment in ("trial", "finalist")
        codes = (0, 130) if is_late else (2,)
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)[
            : 3 if moment == "trial" and executor == "local" else 1
        ]:
            what = Disturbance(
                partial(_kill_trial, number=number),
                codes=codes,
                is_environments=False,
                interrupts=is_late,
                resumes=False,
            )
            yield _fault(
                f"trial {number.name}", executor, moment, what, "this trial alone is out; 2 for the job itself"
            )
    worker = Disturbance(
        _kill_worker, codes=(0, 2, 130), is_environments=False, loader_options='{"num_workers": 1}', resumes=False
    )
    for moment in ("reference", "trial")[0 if executor == "local" else 1 :]:
        yield _fault("loader worker SIGKILL", executor, moment, worker, "this trial alone is out; 2 for the job itself")


def _kill_trial(held: Held, number: signal.Signals) -> None:
    os.kill(held.trial, number)


def _kill_worker(held: Held) -> None:
    for process in processes.below(held.trial):
        os.kill(process.pid, signal.SIGKILL)


def _of_ray() -> Iterator[Fault]:
    expected = "exit 2 that names --resume, or it goes on; no outcome of it, nothing left"
    for moment in MOMENTS[:3]:
        for part in ("raylet", "gcs_server"):
            what = Disturbance(partial(_kill_part, part=part), codes=(0, 2, 130), resumes=moment == "trial")
            yield _fault(f"{part} SIGKILL", "ray", moment, what, expected)
    for moment in ("inspection", "trial"):
        what = Disturbance(partial(_kill_part, part="TrialActor"), codes=(0, 130), resumes=False)
        yield _fault("actor's worker SIGKILL", "ray", moment, what, "asked again: 0 or 130")
    what = Disturbance(partial(_kill_part, part=_RAYS_DRIVER), codes=(0, 2, 130), resumes=True)
    yield _fault("Ray's driver SIGKILL", "ray", "trial", what, expected)
    for part in ("log_monitor", "runtime_env"):
        what = Disturbance(partial(_kill_part, part=part), codes=(0, 2, 130), resumes=False)
        yield _fault(f"{part} SIGKILL", "ray", "trial", what, expected)
    both = Disturbance(_kill_driver_and_rays, codes=(_KILLED,), is_environments=False, interrupts=False)
    reason = "with the search and Ray's driver killed at once nobody is left to remove Ray's folder"
    do = partial(disturb, executor="ray", moment="trial", what=both)
    yield Fault("search and Ray's driver SIGKILL, trial", _KIND, "ray", "nothing left", do, undefended=reason)


def _kill_part(held: Held, part: str) -> None:
    found = [process for process in processes.below(held.running.pid) if part in processes.words(process)]
    if not found:
        raise NoEnd(f"there is no {part} to kill")
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _kill_driver_and_rays(held: Held) -> None:
    _kill_part(held, _RAYS_DRIVER)
    _kill_driver(held)


def _of_rays_start() -> Iterator[Fault]:
    for part in ("gcs_server", "raylet"):
        for number in _SIGNALS:
            do = partial(_at_rays_start, part=part, harm=partial(os.kill), number=number)
            yield Fault(f"driver {number.name} at {part}'s start", _KIND, "ray", "130, nothing left", do)
        do = partial(_at_rays_start, part=part, harm=partial(os.kill), number=signal.SIGKILL)
        yield Fault(f"driver SIGKILL at {part}'s start", _KIND, "ray", "nothing left", do)
        do = partial(_part_at_rays_start, part=part)
        expected = "exit 2 that names --executor local, or another try; nothing left"
        yield Fault(f"{part} SIGKILL at its start", _KIND, "ray", expected, do)


def _at_rays_start(place: Place, part: str, harm: Callable[[int, int], None], number: signal.Signals) -> Complaints:
    """A signal to the driver as soon as a part of Ray is there."""
    set_up(place, "reference")
    running = begin(place, "ray")
    _await_part(running.pid, part)
    harm(running.pid, number)
    ended = running.finish()
    found = clean(ended, (_KILLED,) if number == signal.SIGKILL else (130,))
    return found + (["a plan was written"] if (place.work / "plan.yaml").exists() else [])


def _part_at_rays_start(place: Place, part: str) -> Complaints:
    set_up(place, "reference")
    running = begin(place, "ray")
    os.kill(_await_part(running.pid, part), signal.SIGKILL)
    if running.comes(r"\] trial 1 starts", LONG_S):
        running.send(signal.SIGINT)
    ended = running.finish()
    found = clean(ended, (2, 130), *(["--executor local"] if ended.code == 2 else []))
    if ended.code == 130:
        return found + resume_and_check(place, stored.read(place.work / ".autotune" / "model.db"))
    return found


def _await_part(pid: int, part: str) -> int:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        for process in processes.below(pid):
            if f"/{part} " in f"{processes.words(process)} ":
                return process.pid
        time.sleep(0.005)
    raise NoEnd(f"{part} was never started")
