"""What a search takes over of earlier searches of its job, after a canary has shown that the device still gives the
same results; and what it keeps for later ones."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..distribution import VERSION
from ..task_file import split_source, task_file
from ..techniques import Device, Facts, Settings
from ..units import format_percent
from ..workers import Measured, Outcome, OutOfMemory
from .budget import asked
from .event_base import Event
from .events import BudgetKnown, FinalistEnded, TaskRead, TrialEnded
from .options import QUALITY, SearchOptions
from .requests import reference_settings
from .session import Session
from .store.measurements import TRIAL, Kept, Key, Results
from .time_budget import LEAST_SHARE_S
from .verdict import is_spoiled

_NOISE = 0.05
"""Relative difference between two processes of one configuration, beside the intervals within them: as between
finalists."""
_LOOKS = 2
"""Times that a canary is measured before it counts as changed."""


def key_of(facts: Facts, options: SearchOptions, code: str) -> Key:
    """Key of the measurements that a job may reuse.

    Args:
        facts: of its inspection, read in the worker.
        options: the job's.
        code: hash of its code.
    """
    stated = {
        "fingerprint": facts.fingerprint,
        "code": code,
        "name": None if options.command else split_source(options.task)[1],
        "command": options.command,
        "seed": options.seed,
        "effective_batch": facts.effective_batch,
        "micro_batch": facts.micro_batch,
        "precision": facts.precision,
        "max_grad_norm": facts.max_grad_norm,
    }
    if options.inference:
        stated["inference"] = options.tolerance if options.max_quality_drop is None else str(options.max_quality_drop)
    if options.max_quality_drop is not None:  # a quality is that after this recovery
        stated |= {name: getattr(options, name) for name in sorted(QUALITY)}
    return Key(
        task=hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest(),
        device=device_text(facts.device),
        threads=facts.num_threads,
        torch=facts.torch_version,
        autotune=VERSION,
    )


def code_of(options: SearchOptions) -> str:
    """Hash of a job's code. Of a command whose script is not found, one that nothing else has: nothing is shared."""
    path = task_file(options.task) if options.command is None else Path(options.task)
    if not path.is_file() and options.command is not None:
        path = Path(*options.task.split(".")).with_suffix(".py")
    try:
        return code_hash(path)
    except OSError:
        return uuid.uuid4().hex


def device_text(device: Device) -> str:
    """A device's type, name, memory, driver and capability."""
    return device.model_dump_json(exclude_none=True)


def keep(results: Results, key: Key, series: int, one: Kept, run: str) -> None:
    """Store what was measured.

    Args:
        results: the store.
        key: of what was asked for: in a cluster, another device may have run it, which then stands in its place.
        series: the key's.
        one: what was measured.
        run: which of the runs of these settings.
    """
    device = one.outcome.device if isinstance(one.outcome, Measured) else None
    own = key if device is None else replace(key, device=device_text(device))
    results.keep(own, series if own == key else results.series(own), one, run)


class Reuse:
    """One search's side of the store, as :class:`autotune.searches.session.Known` has it."""

    def __init__(
        self,
        open_results: Callable[[], Results],
        options: SearchOptions,
        run: str = "",
        checked: set[Key] | None = None,
    ) -> None:
        """
        Args:
            open_results: opens the store, once the task was inspected: a search that is refused before leaves nothing.
            options: the search's.
            run: names this run of a batch, whose jobs share finalists' first rounds, too; empty is a search by itself.
            checked: whose measurements a canary of this run has judged; more are added.
        """
        self._open, self._options = open_results, options
        self.shares_rounds = bool(run)
        self._run, self._checked = run or uuid.uuid4().hex[:12], set[Key]() if checked is None else checked
        self._limit = asked(options).of_device
        self._reference = Settings()
        self._results: Results | None = None
        self._key: Key | None = None
        self._series = 0
        self._is_trusted: bool | None = None

    def observe(self, event: Event) -> None:
        """Store what was measured.

        Raises:
            StudyError: the store cannot be read or written.
        """
        match event:
            case TaskRead(facts):
                key, self._reference = key_of(facts, self._options, code_of(self._options)), reference_settings(facts)
                self._results = self._open()
                self._series = self._results.series(key)
                self._key = key
            case BudgetKnown(budget):
                self._limit = budget.of_device
            case TrialEnded(is_known=False):
                self._keep(event.settings, event.outcome, TRIAL)
            case FinalistEnded() if self.shares_rounds:
                self._keep(event.settings, event.outcome, str(event.round))

    def close(self) -> None:
        """Take nothing over, and keep nothing, from here on: the store is out of reach."""
        self._results = None

    def reference(self, session: Session) -> Outcome | None:
        """The reference's outcome, once a canary agreed."""
        kept = self._kept().get(self._reference.canonical())
        return kept.outcome if kept is not None and _tells(kept, session) and self._agrees(session) else None

    def others(self, session: Session) -> Iterable[tuple[Settings, Outcome]]:
        """Everything else that says something within this budget."""
        new = (kept for key, kept in self._kept().items() if key not in session.study.by_settings)
        found = [kept for kept in new if kept.settings != self._reference and _tells(kept, session)]
        return [(kept.settings, kept.outcome) for kept in found] if found and self._agrees(session) else []

    def again(self, session: Session, settings: Settings, finalist_round: int) -> Outcome | None:
        """Another job's run in the finalists' first round; runs that a plan reports are always measured anew."""
        if finalist_round or not self._is_trusted or not self.shares_rounds:
            return None
        kept = self._kept(str(finalist_round)).get(settings.canonical())
        return kept.outcome if kept is not None and kept.source != self._source and _tells(kept, session) else None

    @property
    def _source(self) -> str:
        return f"{self._run}/{self._options.name}"

    def _kept(self, run: str = TRIAL) -> Mapping[str, Kept]:
        if self._results is None or self._key is None or self._options.fresh:
            return {}
        return self._results.known(self._key, self._series, run)

    def _keep(self, settings: Settings, outcome: Outcome, run: str, source: str = "") -> None:
        if not isinstance(outcome, Measured | OutOfMemory) or is_spoiled(outcome):
            return
        assert self._results is not None, "the task is inspected first"
        assert self._key is not None, "likewise"
        limit = None if settings == self._reference else self._limit
        keep(self._results, self._key, self._series, Kept(settings, outcome, limit, source or self._source), run)

    def _is_checked(self) -> bool:
        """Whether a job of this run of the batch has measured a canary of this task, or all that is known."""
        return self._key in self._checked or all(kept.source.startswith(self._run) for kept in self._kept().values())

    def _agrees(self, session: Session) -> bool:
        """Whether one of the configurations is today as it was; found out once, at the first call.

        It was the fastest of several, which flatters it: where it differs, it is measured a second time. Where it
        still does, what is stored is left alone, and what this search measures begins another series.
        """
        if self._is_trusted is None and self._is_checked():
            self._is_trusted = True
        if self._is_trusted is None:
            then = _canary(self._kept().values(), session)
            if then is None:
                return False
            difference = None
            for _ in range(_LOOKS):
                share_s = session.time_budget.trial_share_s(session.options.trials) or LEAST_SHARE_S
                now = session.executor.ask(session.request("canary", then.settings, share_s, finalist_round=0))
                if session.was_cut_off(now):
                    return False
                difference = _difference(then.outcome, now)
                if difference is None:
                    break
            self._is_trusted = difference is None
            assert self._key is not None, "the task is inspected first"
            self._checked.add(self._key)
            if difference is not None:
                session.warn(
                    f"{len(self._kept())} earlier measurements of this task are left alone: the one that was measured "
                    f"again {difference}. Everything is measured anew."
                )
                self._series += 1
            self._keep(then.settings, now, "0", f"{self._source} (canary)")
        return self._is_trusted


def _canary(kept: Iterable[Kept], session: Session) -> Kept | None:
    """The canary: the fastest measurement that fits, which may become a finalist; else the one of least memory."""
    measured = [(one, one.outcome.measurement) for one in kept if isinstance(one.outcome, Measured)]
    fitting = [(one, found) for one, found in measured if session.budget.over(found.peak) is None]
    if fitting:
        return max(fitting, key=lambda pair: pair[1].samples_per_s.value)[0]
    return min(measured, key=lambda pair: pair[1].peak.process)[0] if measured else None


def _difference(then: Outcome, now: Outcome) -> str | None:
    """How the canary's new measurement differs from the stored one, in words; None if they agree within noise."""
    assert isinstance(then, Measured)
    if not isinstance(now, Measured):
        return f"did not run: {getattr(now, 'message', now.kind)}"
    before, after = then.measurement.samples_per_s, now.measurement.samples_per_s
    if after.high * (1 + _NOISE) < before.low * (1 - _NOISE) or after.low * (1 - _NOISE) > before.high * (1 + _NOISE):
        return f"is at {after.value:.4g} samples/s, and was at {before.value:.4g}"
    ratio = now.measurement.peak.process / then.measurement.peak.process
    if abs(math.log(ratio)) > _NOISE:
        return f"takes {format_percent(ratio)} of the memory that it took"
    return None


def _tells(kept: Kept, session: Session) -> bool:
    """Whether a measurement says within this search's budget what a trial of it would.

    Where memory ran out, at least so much is needed. On an accelerator, a cache that was not held to the budget may
    have grown over it, and one that was held to a smaller may have cost time.
    """
    budget = session.budget
    if isinstance(kept.outcome, OutOfMemory):
        least, limit = kept.outcome.peak_bytes * (1 + budget.margin), budget.of_device
        if kept.outcome.of_host:
            return budget.host is not None and least > budget.host
        return kept.limit_bytes is None if limit is None else least > limit
    if session.facts.device.type == "cpu":
        return True
    peak = kept.outcome.measurement.peak
    if budget.holds(peak.process):
        was_held = kept.limit_bytes is not None and (budget.limit is None or kept.limit_bytes < budget.limit)
        return not (was_held and peak.allocator_retries)
    return not budget.holds(peak.allocated or peak.process)


def code_hash(path: Path) -> str:
    """Hash of a file and of the modules in its folder that it imports, directly or through each other.

    Imports are read from the source, inside functions too; what is imported by a name made at run time is not seen.

    Raises:
        OSError: the file cannot be read.
    """
    folder = path.resolve().parent
    found: dict[Path, bytes] = {}
    left = [path.resolve()]
    while left:
        file = left.pop()
        if file not in found:
            found[file] = file.read_bytes()
            left += _imported(file, found[file], folder)
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(f"{file.relative_to(folder)}\0{len(found[file])}\0".encode())
        digest.update(found[file])
    return digest.hexdigest()


def _imported(file: Path, source: bytes, folder: Path) -> Iterator[Path]:
    """Files of the folder that a file imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # the trial says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else file.parents[node.level - 1]
            if base.is_relative_to(folder):
                for alias in node.names:
                    yield from _files(base, ".".join(filter(None, (node.module, alias.name))))


def _files(base: Path, name: str) -> Iterator[Path]:
    """What ``import name`` reads below a folder: each package on the way, and the module; a last part may be a name in
    a module."""
    place = base
    for part in name.split("."):
        place = place / part
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                yield file.resolve()
