"""An environment that fails under a search: folders that fill up or go, limits, machines that pause."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from . import processes, stored
from .checks import clean
from .core import Complaints, Executor, Fault
from .ended import LONG_S
from .place import Place
from .scene import MOMENTS, SEARCH, Disturbance, Held, Moment, begin, disturb, set_up, task_text

_KIND = "environment"
_EXPECTED = "waits, tries again, or ends with 2 and --resume; nothing of it is a configuration's outcome"
_SMALL = "24m"
_BRIEF_S = 20.0
"""At most: until the trial in flight has ended."""
_PAUSE_S = 6.0


def faults() -> Iterator[Fault]:
    """Temporary folders, studies, working folders, outputs, limits, pauses."""
    for name, executor, moment, what in _disturbances():
        do = partial(disturb, executor=executor, moment=moment, what=what)
        yield Fault(f"{name}, {moment}", _KIND, executor, _EXPECTED, do, needs_mounts=what.prepare is not _nothing)
    for executor in ("local", "ray"):
        for moment in ("reference", "trial"):
            for who, pause in _PAUSED.items():
                do = partial(_paused, executor=executor, moment=moment, pause=pause)
                expected = "discarded or repeated: no speed of it is stored"
                if executor == "local" or moment == "trial":
                    yield Fault(f"{who} is stopped a while, {moment}", _KIND, executor, expected, do)
    for name, prepare in _LIMITS.items():
        for executor in ("local", "ray") if name == "64 open files" else ("local",):
            expected = "a plan, or exit 2 that says what is short"
            do = partial(_limited, executor=executor, prepare=prepare)
            yield Fault(f"a limit: {name}", _KIND, executor, expected, do)
    for name, environment in _VARIABLES.items():
        do = partial(_variables, environment=environment)
        yield Fault(f"the environment: {name}", _KIND, "local", "a plan, or exit 2 that says why", do)
    for name, reason in _NOT_TRIED.items():
        yield Fault(name, _KIND, "none", _EXPECTED, _never, undefended=f"not tried: {reason}")


def _nothing(place: Place) -> None:
    """Nothing to be prepared."""


def _never(place: Place) -> Complaints:
    raise AssertionError("it is told as not tried")


_NOT_TRIED = {
    "the process limit is reached": "no limit on processes binds root",
    "the clock jumps": "only a library in front of every process could do so without changing the machine's",
    "the power fails": "it takes a machine",
    "the study lies on NFS": "it takes a server",
}


# What is done


def _fill(folder: Path) -> None:
    """To the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65536):
                pass
        except OSError:
            return


def _empty(folder: Path) -> None:
    (folder / "filler").unlink(missing_ok=True)


def _small(folder: str) -> Callable[[Place], None]:
    """A disk of its own at one of the place's folders, with what was there."""

    def prepare(place: Place) -> None:
        path: Path = place.root / folder
        kept = place.root / "kept"
        shutil.copytree(path, kept, dirs_exist_ok=True)
        place.mount(path, _SMALL)
        shutil.copytree(kept, path, dirs_exist_ok=True)
        path.chmod(0o1777)

    return prepare


def _full(name: str, is_brief: bool, resumes: bool = True) -> Disturbance:
    return Disturbance(
        resumes=resumes,
        harm=lambda held: _fill(held.place.root / name),
        mend=lambda held: _empty(held.place.root / name),
        mend_after_s=_BRIEF_S if is_brief else None,
        prepare=_small(name),
    )


def _sweep(held: Held) -> None:
    """What a cleaner of temporary folders does."""
    for path in held.place.tmp.glob("autotune-*"):
        shutil.rmtree(path, ignore_errors=True)


def _read_only(held: Held, folder: str) -> None:
    """In the search's own mounts, as a disk with errors becomes."""
    path = str(held.place.work / folder)
    script = f"mount --bind {path} {path} && mount -o remount,bind,ro {path}"
    command = ["nsenter", "--mount", "--target", str(held.running.pid), "sh", "-c", script]
    subprocess.run(command, check=True, capture_output=True, cwd="/")


def _remove(held: Held, name: str) -> None:
    shutil.rmtree(held.place.work / name) if name else shutil.rmtree(held.place.work)


def _restore(held: Held) -> None:
    held.place.work.mkdir(exist_ok=True)
    shutil.copytree(held.place.template, held.place.work, dirs_exist_ok=True)
    held.place.expected |= {path.name for path in held.place.work.iterdir()}


def _disturbances() -> Iterator[tuple[str, Executor, Moment, Disturbance]]:
    gone = Disturbance(partial(_remove, name=".autotune"), mend=_restore, keeps_rows=False, resumes=False)
    nowhere = Disturbance(
        partial(_remove, name=""), mend=_restore, keeps_rows=False, resumes=False, words=("work",), codes=(2, 130)
    )
    for executor in ("local", "ray"):
        is_local = executor == "local"
        for moment in MOMENTS if is_local else ("trial",):
            resumes = is_local and moment == "trial"
            yield "TMPDIR full for a moment", executor, moment, _full("tmp", True, resumes)
            yield "TMPDIR's autotune-* deleted", executor, moment, Disturbance(_sweep, resumes=resumes)
        yield "TMPDIR full for ever", executor, "trial", _full("tmp", False, is_local)
        yield "the study's disk is full", executor, "trial", _full("work", False, is_local)
        locked = Disturbance(partial(_read_only, folder=".autotune"), resumes=is_local)
        yield ".autotune deleted", executor, "trial", gone
        yield "the working folder deleted", executor, "trial", nowhere
        yield ".autotune read-only", executor, "trial", locked
    yield "TMPDIR full for ever", "local", "inspection", _full("tmp", False)
    yield "the study's disk is full", "local", "inspection", _full("work", False)
    yield "the study's disk is full for a moment", "local", "trial", _full("work", True)
    yield ".autotune deleted", "local", "reference", gone
    yield ".autotune deleted", "local", "finalist", gone
    yield "the working folder deleted", "local", "finalist", nowhere
    yield "the working folder deleted", "local", "inspection", nowhere
    renamed = Disturbance(
        lambda held: (held.place.work / ".autotune").rename(held.place.root / "elsewhere"),
        mend=_restore, keeps_rows=False, resumes=False,
    )  # fmt: skip
    yield ".autotune renamed", "local", "trial", renamed
    other = Disturbance(_another_study, keeps_rows=False, resumes=False)
    yield "the study replaced by another", "local", "trial", other
    for name, harm in _OUTPUTS.items():
        what = Disturbance(harm, options=("-o", "out/plan.yaml"), prepare=_with_output, resumes=False)
        yield f"the output {name}", "local", "trial", what


def _another_study(held: Held) -> None:
    """A copy takes its place: another file, of the same name."""
    database = held.place.work / ".autotune" / "model.db"
    shutil.copy(held.place.template / ".autotune" / "model.db", f"{database}.new")
    os.replace(f"{database}.new", database)


def _with_output(place: Place) -> None:
    (place.work / "out").mkdir()
    place.expected.add("out")


def _vanish(held: Held) -> None:
    shutil.rmtree(held.place.work / "out")


def _become_file(held: Held) -> None:
    _vanish(held)
    (held.place.work / "out").write_text("a file")


def _become_folder(held: Held) -> None:
    (held.place.work / "out" / "plan.yaml").mkdir()


_OUTPUTS: dict[str, Callable[[Held], None]] = {
    "folder vanishes": _vanish,
    "folder becomes a file": _become_file,
    "becomes a folder": _become_folder,
    "folder becomes read-only": partial(_read_only, folder="out"),
}


# Pauses


def _stop_trial(held: Held) -> list[int]:
    return [held.trial]


def _stop_server(held: Held) -> list[int]:
    return [held.server()]


def _stop_all(held: Held) -> list[int]:
    return [held.running.pid, *(process.pid for process in processes.below(held.running.pid))]


_PAUSED: dict[str, Callable[[Held], list[int]]] = {
    "the trial": _stop_trial,
    "the fork server": _stop_server,
    "every process": _stop_all,
}


def _paused(place: Place, executor: Executor, moment: Moment, pause: Callable[[Held], list[int]]) -> Complaints:
    """Stopped for some seconds while it trains, as a paused machine is."""
    set_up(place, moment)
    running = begin(place, executor)
    held = Held(place, running, moment)
    stopped, since = pause(held), len(running.said())
    held.release()
    time.sleep(0.3)  # into the timed steps, or near: a pause has no better place
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            _send(pid, number)
        time.sleep(_PAUSE_S if number == signal.SIGSTOP else 0.0)
    running.comes(r"\] (trial \d+|reference)(: | again)", LONG_S, since)
    running.send(signal.SIGINT)
    ended = running.finish()
    return clean(ended, (0, 130)) + _spoilt(stored.read(place.work / ".autotune" / "model.db"))


def _spoilt(after: stored.Stored) -> Complaints:
    return [f"a speed of ±{spread:.0%} is stored" for spread in after.spreads() if spread > 1]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# Limits and variables


def _limit(what: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (value, value))


_LIMITS: dict[str, Callable[[], None]] = {
    "16 open files": _limit(resource.RLIMIT_NOFILE, 16),
    "64 open files": _limit(resource.RLIMIT_NOFILE, 64),
    "files of 64 KiB": _limit(resource.RLIMIT_FSIZE, 65536),
    "1 GiB of address space": _limit(resource.RLIMIT_AS, 2**30),
    "10 s of CPU time": _limit(resource.RLIMIT_CPU, 10),
}
_VARIABLES: dict[str, dict[str, str]] = {
    "TMPDIR is missing": {"TMPDIR": "/no/such/folder"},
    "TMPDIR is a file": {"TMPDIR": "/etc/passwd"},
    "TMPDIR is /dev/null": {"TMPDIR": "/dev/null"},
    "TMPDIR is read-only": {"TMPDIR": "/proc"},
    "no PATH": {"PATH": ""},
    "no HOME": {"HOME": "/no/such/home"},
    "an ASCII locale": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "a preload that is missing": {"LD_PRELOAD": "/no/such/library.so"},
    "threads that are no number": {"OMP_NUM_THREADS": "many"},
    "optimized Python": {"PYTHONOPTIMIZE": "2"},
}


def _limited(place: Place, executor: Executor, prepare: Callable[[], None]) -> Complaints:
    """From its start under a limit."""
    place.write("model.py", task_text())
    place.write("space.yaml", "schema: autotune/space@1\nbatch: auto\n")
    running = place.start(*SEARCH, "--executor", executor, prepare=prepare)
    running.comes(r"\] reference: ", LONG_S)
    running.send(signal.SIGINT)
    ended = running.finish()
    own_end = (-signal.SIGXCPU, -signal.SIGKILL) if ended.code < 0 else ()
    return clean(ended, (0, 2, 130, *own_end))


def _variables(place: Place, environment: dict[str, str]) -> Complaints:
    place.write("model.py", task_text())
    place.write("space.yaml", "schema: autotune/space@1\nbatch: auto\n")
    assignments = [f"{name}={value}" for name, value in environment.items()]  # not of what mounts and starts it
    program = ("/usr/bin/env", *assignments, sys.executable, "-m", "autotune")
    running = place.start(*SEARCH, "--executor", "local", program=program)
    running.comes(r"\] reference: ", LONG_S)
    running.send(signal.SIGINT)
    return clean(running.finish(), (0, 2, 130))
