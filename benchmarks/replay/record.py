"""Measure every configuration of a space several times, for replays: `python -m benchmarks.replay.record --help`.

A table is JSON lines, one for each configuration: `settings`, `predicted` (before any measurement),
`samples_per_s` and `peak_bytes` (each repeat), `seconds` (of the last repeat's trial), or `outcome`, what came back
instead. Every repeat goes through all configurations in an order of its own, so that a machine's slow minutes are
shared out. What a table has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.estimates import Prediction
from autotune.plan import Budget
from autotune.search_spaces import load_space
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, failure, inspect, reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.workers import Executor, Measured, Outcome, Predicted

_DEADLINE_S = 300.0
_PREDICT_DEADLINE_S = 3600.0


def main() -> None:
    """Go on with a table until it is whole, or the time is used up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="model.py")
    parser.add_argument("--space", required=True, help="a search space that lists every choice")
    parser.add_argument("--table", type=Path, required=True, help="JSON lines; what is there stays")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trial-time", type=float, default=1.0, help="seconds of timed windows")
    parser.add_argument("--max-time", type=float, default=float("inf"), help="seconds; stops between two trials")
    arguments = parser.parse_args()
    ends_s = time.monotonic() + arguments.max_time
    table = _Table(arguments.table)
    with Where("local").open(arguments.task, arguments.device) as executor:
        recorder = _Recorder(executor, arguments.task, arguments.space, arguments.device, arguments.trial_time)
        recorder.predict(table)
        left = [*recorder.left(table, arguments.repeats)]
        for done, settings in enumerate(left, 1):
            if time.monotonic() > ends_s:
                sys.exit(f"{len(left) - done + 1} measurements are left")
            table.add(settings, recorder.measure(settings))
            print(f"{done} of {len(left)}: {table.line(settings)}", flush=True)


class _Table:
    """Rows by settings, written anew after each measurement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self._rows: dict[str, dict[str, Any]] = {Settings(**row["settings"]).canonical(): row for row in rows}

    def num_repeats(self, settings: Settings) -> int:
        """How often a configuration has been measured; without end where it failed."""
        row = self._rows.get(settings.canonical(), {"samples_per_s": []})
        return sys.maxsize if "outcome" in row else len(row["samples_per_s"])

    def line(self, settings: Settings) -> str:
        """A configuration's row."""
        return json.dumps(self._rows[settings.canonical()])

    def is_predicted(self, settings: Settings) -> bool:
        """Whether anything was predicted of a configuration."""
        return "predicted" in self._row(settings)

    def predict(self, settings: Settings, prediction: Prediction) -> None:
        """Note what was predicted; it is written with the next measurement, or by :meth:`save`."""
        self._row(settings)["predicted"] = prediction.model_dump(mode="json")

    def add(self, settings: Settings, found: Outcome) -> None:
        """Note a repeat's speed and peak, or another outcome."""
        row = self._row(settings)
        if isinstance(found, Measured):
            row["samples_per_s"].append(found.measurement.samples_per_s.value)
            row["peak_bytes"].append(found.measurement.peak.process)
            row["seconds"] = round(found.seconds, 2)
        else:
            row["outcome"] = found.model_dump(mode="json", exclude={"output", "traceback"})
        self.save()

    def save(self) -> None:
        """Write the rows."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".part")
        beside.write_text("".join(json.dumps(row) + "\n" for row in self._rows.values()), encoding="utf-8")
        os.replace(beside, self._path)

    def _row(self, settings: Settings) -> dict[str, Any]:
        empty = {"settings": settings.model_dump(mode="json", exclude_defaults=True)}
        return self._rows.setdefault(settings.canonical(), {**empty, "samples_per_s": [], "peak_bytes": []})


class _Recorder:
    """Measures a task's configurations without a limit on their memory."""

    def __init__(self, executor: Executor, task: str, space: str, device: Any, trial_time_s: float) -> None:
        facts = inspect(SearchOptions(task=task, device=device, allow_split=True), executor, TimeBudget(1.0, None))
        self._executor, self._trial_time_s = executor, trial_time_s
        facts = facts.model_copy(update={"effective_batch_held": False})  # any batch: a table holds no optimization
        self._inquiry = Requests(task, 0, Budget(limit=None, device=device), facts)
        self._space = ConfigurationSpace(load_space(space).choices(facts), reference_settings(facts), facts.num_blocks)
        if self._space.is_open:
            sys.exit(
                f"{space}: checkpointing: a table is replayed at several budgets, and which blocks {{kind: chosen}} "
                "recomputes depends on the budget. Name them: {kind: chosen, blocks: [0]}."
            )

    def predict(self, table: _Table) -> None:
        """What the memory models say of each configuration, where the table does not have it yet."""
        missing = [settings for settings in self._space.shuffled("") if not table.is_predicted(settings)]
        if not missing:
            return
        outcome = self._executor.ask(self._inquiry.predict_request(missing, None, _PREDICT_DEADLINE_S))
        if not isinstance(outcome, Predicted):
            sys.exit(f"nothing could be predicted: {failure(outcome)}")
        for settings, prediction in zip(missing, outcome.predictions, strict=True):
            if prediction is not None:
                table.predict(settings, prediction)
        table.save()

    def left(self, table: _Table, repeats: int) -> Iterator[Settings]:
        """What remains to be measured, repeat by repeat."""
        for repeat in range(repeats):
            rows = [settings for settings in self._space.shuffled("") if table.num_repeats(settings) <= repeat]
            yield from random.Random(repeat).sample(rows, len(rows))

    def measure(self, settings: Settings) -> Outcome:
        """One repeat."""
        options = self._inquiry.measure_options(settings, self._trial_time_s, None, enforce=False)
        outcome = self._executor.submit(self._inquiry.request("record", settings, options, _DEADLINE_S)).result()
        if not isinstance(outcome, Measured):
            print(failure(outcome), file=sys.stderr)
        return outcome


if __name__ == "__main__":
    main()
