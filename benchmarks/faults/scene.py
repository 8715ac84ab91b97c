"""A search that is held at a moment, disturbed there, let go, ended by Ctrl-C, and resumed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from . import stored
from .checks import clean
from .core import Complaints, Executor
from .ended import LONG_S, Ended, NoEnd, Running
from .place import Place, place_of

Moment = Literal["inspection", "reference", "trial", "finalist"]
MOMENTS: tuple[Moment, ...] = ("inspection", "reference", "trial", "finalist")
SEARCH = (
    *("search", "model.py", "--device", "cpu", "--space", "space.yaml", "--sampler", "random"),
    *("--trials", "3", "--trial-time", "0.2s"),
)
SPACE = "schema: autotune/space@1\nbatch: auto\n"
_STARTS = {
    "reference": r"\] reference( \(.*?\))? starts",
    "trial": r"\] trial \d+ starts",
    "finalist": r"again, round 1,? starts",
}
_ENDED = r"\] (trial \d+|reference)(: | again, round \d+ of)"
_HOLD_S = LONG_S
_SETTLE_S = 40.0
_END_S = LONG_S
_ADVICE = ("--resume", "with -o", "with --storage")
_NOT_OF_ENVIRONMENT = ("crashed", "failed", "timed_out", "out_of_memory", "non_finite")

TASK = '''\
"""A small task that waits wherever it is while ``gate`` stands in its folder of signals."""
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 32
_GATE = Path(os.environ.get("FAULT_TOLD", "/nonexistent")) / "gate"
LOADER_OPTIONS


def wait():
    while _GATE.exists():
        held = _GATE.with_name(f"held.{os.getpid()}")
        held.write_text(str(os.getpid()))
        held.rename(_GATE.with_name("held"))
        time.sleep(0.02)


def build_model():
    wait()
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def build_dataset():
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def compute_loss(model, batch):
    wait()
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
'''


def task_text(loader_options: str = "") -> str:
    """The task's file; ``loader_options`` is a dict's text."""
    return TASK.replace("LOADER_OPTIONS", f"loader_options = {loader_options}" if loader_options else "")


def set_up(place: Place, moment: Moment, loader_options: str = "") -> None:
    """Task and space; with two trials stored where the moment comes after those."""
    if moment in ("trial", "finalist") and not loader_options:
        place.take_template()
    else:
        place.write("model.py", task_text(loader_options))
        place.write("space.yaml", SPACE)


def begin(place: Place, executor: Executor, *options: str, **started: object) -> Running:
    """A search, that goes on where there is something to go on with."""
    resume = ("--resume",) if (place.work / ".autotune").exists() else ()
    return place.start(*SEARCH, "--executor", executor, *resume, *options, **started)


class Held:
    """A search whose trial waits."""

    def __init__(self, place: Place, running: Running, moment: Moment | None) -> None:
        """Hold it as soon as ``moment`` is told of; at its inspection, or where that is None, now."""
        self.place, self.running = place, running
        self._gate, self._held = place.told / "gate", place.told / "held"
        if moment is not None and moment != "inspection":
            running.wait_for(_STARTS[moment], _HOLD_S)
        self._gate.touch()
        self.trial = self.wait()

    def wait(self, other_than: int = 0, timeout_s: float = _HOLD_S) -> int:
        """The pid of a trial that waits.

        Raises:
            NoEnd: none came.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and not self.running.has_ended():
            with contextlib.suppress(OSError, ValueError):
                pid = int(self._held.read_text())
                if pid != other_than:
                    return pid
            time.sleep(0.01)
        state = f"it ended with {self.running.process.returncode}" if self.running.has_ended() else "it goes on"
        raise NoEnd(f"no trial came to be held ({state}): {self.running.said().strip().splitlines()[-1:]}")

    def server(self) -> int:
        """The pid of the fork server: the trial's parent."""
        return int(Path(f"/proc/{self.trial}/stat").read_text().rpartition(")")[2].split()[1])

    def release(self) -> None:
        """Let trials go on."""
        self._gate.unlink(missing_ok=True)


@dataclass(frozen=True)
class Disturbance:
    """What is done to a held search, and what may come of it."""

    harm: Callable[[Held], None]
    mend: Callable[[Held], None] = lambda held: None
    mend_after_s: float | None = None
    """None: only before the search is resumed."""
    codes: Collection[int] = (0, 2, 130)
    is_environments: bool = True
    """Whether no outcome may be stored but measurements."""
    keeps_rows: bool = True
    """Whether what was stored is still there to be read."""
    resumes: bool = True
    interrupts: bool = True
    """Ctrl-C once a trial has ended; else the harm itself ends the search."""
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    loader_options: str = ""
    started: dict[str, object] = field(default_factory=dict)
    prepare: Callable[[Place], None] = lambda place: None


def disturb(place: Place, executor: Executor, moment: Moment, what: Disturbance) -> Complaints:
    """Hold a search at a moment, do the harm, let it go on or end, look at what is stored, resume."""
    set_up(place, moment, what.loader_options)
    what.prepare(place)
    if moment == "inspection":
        (place.told / "gate").touch()
    running = begin(place, executor, *what.options, **what.started)
    held = Held(place, running, moment)
    database = place.work / ".autotune" / "model.db"
    before, since = stored.read(database), len(running.said())
    what.harm(held)
    held.release()
    if what.mend_after_s is not None:
        running.comes(_ENDED, what.mend_after_s, since)
        what.mend(held)
    ended = _interrupted(running, since) if what.interrupts else running.finish(_END_S)
    after = stored.read(database)
    found = _after(ended, before, after, what) + plan_is_measured(place, ended)
    if what.mend_after_s is None:
        what.mend(held)
    if what.resumes:
        found += resume_and_check(place, stored.read(database))
    return found


def _interrupted(running: Running, since: int) -> Ended:
    """Its end by Ctrl-C, once a trial has ended or some time has gone."""
    running.comes(_ENDED, _SETTLE_S, since)
    running.send(signal.SIGINT)
    try:
        return running.finish(_END_S)
    except NoEnd as reason:
        raise NoEnd(f"after Ctrl-C, {reason}") from None


def _after(ended: Ended, before: stored.Stored, after: stored.Stored, what: Disturbance) -> Complaints:
    found = clean(ended, what.codes, *what.words)
    if what.keeps_rows:
        found += stored.same_or_more(before, after)
    elif ended.code != 2 and not after.outcomes:
        found.append("what was measured is stored nowhere")
    if what.is_environments:
        found += [f"stored as {kind}" for kind in after.kinds() if kind in _NOT_OF_ENVIRONMENT]
        if "the job as it stands fails" in ended.err:
            found.append("told as the job's own failure")
    if ended.code == 2 and what.is_environments and not any(word in ended.err for word in _ADVICE):
        found.append(f"exit 2 without what to do next: {ended.last}")
    return found


def plan_is_measured(place: Place, ended: Ended) -> Complaints:
    """A plan was written exactly where the exit code says so, and with what it was measured at."""
    plan = place.work / "plan.yaml"
    text = plan.read_text() if plan.is_file() else ""
    if text and "measured:" not in text:
        return ["a plan of nothing measured"]
    if bool(text) != (ended.code == 0 or ended.out.strip() == "plan.yaml"):
        return [f"exit {ended.code}, and {'a' if text else 'no'} plan was written"]
    return []


def resume_and_check(place: Place, before: stored.Stored, codes: Collection[int] = (0, 130)) -> Complaints:
    """Go on where it was left: nothing is lost, nothing that was measured is measured again."""
    (place.told / "gate").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (place.work / "plan.yaml").unlink()
    running = place.start(*SEARCH, "--executor", "local", "--resume")
    if running.comes(r" starts", _HOLD_S):
        running.send(signal.SIGINT)
    ended = running.finish(_END_S)
    after = stored.read(place.work / ".autotune" / "model.db")
    found = clean(ended, codes) + stored.same_or_more(before, after) + stored.measured_again(before, ended.err)
    if before.outcomes and "there is no study" in ended.err:
        found.append("--resume found no study")
    return [f"resumed: {one}" for one in found]


def make_template(folder: Path) -> None:
    """A study of two measured trials, its task and its space, made by a search that Ctrl-C ended.

    Raises:
        NoEnd: the search does not work at all.
    """
    with place_of(folder) as place:
        set_up(place, "reference")
        running = begin(place, "local")
        running.wait_for(r"\] trial 1 starts", _HOLD_S)
        running.send(signal.SIGINT)
        ended = running.finish(_END_S)
        found = stored.read(place.work / ".autotune" / "model.db")
        if ended.code != 130 or found.numbers() != {0, 1}:
            raise NoEnd(f"a search of two trials ended with {ended.code}, {found.numbers()}: {ended.err}")
        (place.work / "plan.yaml").rename(place.work / "found.yaml")
        for path in place.work.rglob("*.lock"):
            path.unlink()
        shutil.copytree(place.work, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
