"""Streams that are closed, full, narrow, gone, or a terminal that dies."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Literal

from . import stored
from .checks import clean
from .core import Complaints, Executor, Fault
from .ended import LONG_S, Running
from .place import ROOT, Place
from .scene import SEARCH, Held, begin, resume_and_check, set_up

_KIND = "streams"
_PLAN = (ROOT / "tests" / "golden" / "plan.yaml").read_text()
_SHOW = "show plan.yaml"
_Moment = Literal["trial", "finalist"]

_SHELL: dict[str, tuple[str, tuple[int, ...]]] = {
    "show, stdout closed": (f"{_SHOW} >&-", (0, 2)),
    "show, stderr closed": (f"{_SHOW} 2>&-", (0,)),
    "show, all closed": (f"{_SHOW} <&- >&- 2>&-", (0, 2)),
    "show, stdout full": (f"{_SHOW} >/dev/full", (2,)),
    "show, stderr full": (f"{_SHOW} 2>/dev/full", (0,)),
    "show, both full": (f"{_SHOW} >/dev/full 2>/dev/full", (2,)),
    "show --json, stdout full": (f"{_SHOW} --json >/dev/full", (2,)),
    "show, a reader that goes": (f"{_SHOW} | head -n 1", (0,)),
    "show, a reader that reads nothing": (f"{_SHOW} | true", (0,)),
    "show --json, a reader that goes": (f"{_SHOW} --json | head -c 1", (0,)),
    "show of nothing, stderr full": ("show nothing.yaml 2>/dev/full", (2,)),
    "show of nothing, all closed": ("show nothing.yaml <&- >&- 2>&-", (2,)),
    "doctor, stdout full": ("doctor >/dev/full", (2,)),
    "doctor, a reader that goes": ("doctor | head -n 1", (0,)),
    "--help, stdout full": ("--help >/dev/full", (0, 2)),
    "--help, a reader that goes": ("search --help | head -n 1", (0,)),
    "--version, stdout full": ("--version >/dev/full", (0, 2)),
    "init, stdout full": ("init new.py >/dev/full", (0, 2)),
    "a usage error, stderr full": ("search --warp 2>/dev/full", (2,)),
    "run, stdout closed": ("run plain.yaml -- true >&-", (0,)),
}
_SEARCHES = {
    "all closed": "<&- >&- 2>&-",
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "stdout full": ">/dev/full",
    "stderr full": "2>/dev/full",
    "both full": ">/dev/full 2>/dev/full",
    "a reader that goes": "2>&1 | head -n 2",
    "stdin endless": "</dev/zero",
}


def faults() -> Iterator[Fault]:
    """Shell redirections, and pseudo-terminals that go."""
    for name, (command, codes) in _SHELL.items():
        expected = f"exit {' or '.join(map(str, codes))}, no traceback"
        yield Fault(name, _KIND, "none", expected, partial(_shell, command=command, codes=codes))
    for name, redirection in _SEARCHES.items():
        for executor in ("local", "ray") if name in ("all closed", "stderr full") else ("local",):
            do = partial(_search, redirection=redirection, executor=executor)
            yield Fault(f"search, {name}", _KIND, executor, "the plan is written", do)
    for executor in ("local", "ray"):
        for moment in ("trial", "finalist") if executor == "local" else ("trial",):
            for hangs_up in (True, False):
                how = "that dies" if hangs_up else "that dies, SIGHUP ignored"
                do = partial(_terminal, moment=moment, hangs_up=hangs_up, executor=executor)
                expected = "130, the best so far; where SIGHUP is ignored it goes on"
                yield Fault(f"a terminal {how}, {moment}", _KIND, executor, expected, do)
    yield Fault("a terminal of one column", _KIND, "none", "exit 0", partial(_narrow, columns="1"))
    yield Fault("a terminal of no columns", _KIND, "none", "exit 0", partial(_narrow, columns="0"))
    yield Fault("a terminal of no width at all", _KIND, "none", "exit 0", partial(_narrow, columns="wide"))


def _shell(place: Place, command: str, codes: tuple[int, ...]) -> Complaints:
    place.write("plan.yaml", _PLAN)
    place.write("plain.yaml", "schema: autotune/plan@1\nsettings: {}\n")
    place.expected.add("new.py")
    line = f"{sys.executable} -m autotune {command}"
    return clean(place.start(program=("bash", "-o", "pipefail", "-c", line)).finish(), codes)


def _search(place: Place, redirection: str, executor: Executor) -> Complaints:
    """Nobody can hear it: Ctrl-C comes once its study has two trials."""
    set_up(place, "reference")
    line = f"{sys.executable} -m autotune {' '.join(SEARCH)} --executor {executor} {redirection}"
    running = place.start(program=("bash", "-o", "pipefail", "-c", line))
    path = place.work / ".autotune" / "model.db"
    until_s = time.monotonic() + LONG_S
    while len(stored.read(path).outcomes) < 2 and time.monotonic() < until_s and not running.has_ended():
        time.sleep(0.3)
    _interrupt_python(running)
    ended = running.finish()
    found = clean(ended, (0, 2, 130) if "full" in redirection else (0, 130))
    return found + ([] if (place.work / "plan.yaml").exists() else ["no plan was written"])


def _interrupt_python(running: Running) -> None:
    """Ctrl-C goes to the terminal's whole foreground; here to what has autotune in its words."""
    from . import processes

    for process in processes.below(os.getpid()):
        said = processes.words(process)
        if " -m autotune search" in said and "bash" not in said:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)


def _terminal(place: Place, moment: _Moment, hangs_up: bool, executor: Executor) -> Complaints:
    """A pseudo-terminal as stdin, stdout and stderr, closed at the other end in a trial."""
    set_up(place, moment)
    ours, theirs = pty.openpty()
    with _Watched(ours) as screen:
        terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        running = begin(place, executor, prepare=_own_terminal if hangs_up else _nohup, **terminal)
        os.close(theirs)
        found = screen.until(b"again" if moment == "finalist" else b"trial 2", LONG_S)
        if not found:
            running.send(signal.SIGKILL)
            return [f"the terminal never showed {moment}: {screen.text[-200:]!r}"]
        (place.told / "gate").touch()
        held = Held(place, running, None)
        screen.drain()
    path = place.work / ".autotune" / "model.db"
    before = stored.read(path)
    time.sleep(0.5)
    held.release()
    if not hangs_up:
        time.sleep(4)
        running.send(signal.SIGINT)
    ended = running.finish()
    found_ = clean(ended, (130,) if hangs_up else (0, 130)) + stored.same_or_more(before, stored.read(path))
    if not (place.work / "plan.yaml").exists():
        found_.append("no plan was written")
    return found_ + resume_and_check(place, stored.read(path))


class _Watched:
    """Our end of a terminal; closing it is the terminal's death."""

    def __init__(self, number: int) -> None:
        self._number, self.text = number, b""

    def until(self, words: bytes, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while words not in self.text and time.monotonic() < until_s:
            self.drain()
        return words in self.text

    def drain(self) -> None:
        ready, _, _ = select.select([self._number], [], [], 0.1)
        if ready:
            with contextlib.suppress(OSError):
                self.text += os.read(self._number, 65536)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._number)


def _own_terminal() -> None:
    """stdin becomes the session's controlling terminal: its death is SIGHUP."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _nohup() -> None:
    _own_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _narrow(place: Place, columns: str) -> Complaints:
    place.write("plan.yaml", _PLAN)
    return clean(place.run("show", "plan.yaml", environment={"COLUMNS": columns}), (0,))
