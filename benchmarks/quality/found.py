"""What a search finds of a job, beside the best by hand and the best exact plan."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import autotune
from autotune.commands.where import Where
from autotune.measure.checks.quality import measure_quality
from autotune.measure.measurement import QualityOptions
from autotune.measure.timing.turns import trimmed_mean
from autotune.plan import Budget, Plan
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.workers import Executor

from ..pairs import compared, taking_turns
from .cuts import Cut
from .hand import ALLOWED, DROP, best, best_proven, known
from .jobs import Job

OF_HAND, OF_EXACT, OF_TIME = 0.9, 1.0, 2.0
"""Bars: the plan over the best by hand, over the exact plan; seconds of its search over the exact one's."""
EXACT, LOSSY = "exact", "lossy"
BY_HAND, BY_HAND_PROVEN = "by hand", "by hand, proven"
"""The fastest cut that loses no more than allowed, at the mean of its seeds; and that is proven to, as a plan's is."""
_REST = ("else as the exact plan", "alone")
_DEADLINE_S = 600.0
_CHOICES = {
    "bf16": Precision(kind="bf16"),
    "fused": Optimizer(kind="fused"),
    "channels_last": MemoryFormat(kind="channels_last"),
}


def compare(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """A job's row.

    Raises:
        SystemExit: there is no table by hand to compare with.
    """
    rows = known(job)
    if not any(row["what"] == "speed" for row in rows):
        raise SystemExit(f"{job.name}: there is no table by hand. Run --part hand --job {job.name} first.")
    hand, proven = best(rows, job.name), best_proven(rows, job)
    os.environ["QUALITY_WEIGHTS"] = str(job.weights.resolve())
    task = autotune.load_task(str(job.path))
    folder = job.cache.resolve() / f"searches-{job.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        found = {name: searched(job, name, arguments) for name in (EXACT, LOSSY)}
    with Where("local").open(str(job.path), "cpu") as executor:
        runs = Runs(job, executor, arguments)
        picked = {name: one["plan"].settings if one["plan"] else runs.reference for name, one in found.items()}
        picked |= by_hand(BY_HAND, hand, picked[EXACT], runs.reference)
        picked |= by_hand(BY_HAND_PROVEN, proven, picked[EXACT], runs.reference)
        picked = {name: as_applied(task, settings) for name, settings in picked.items()}
        ratios: dict[str, list[float]] = {}
        for name, settings in picked.items():
            same = next((other for other in ratios if picked[other] == settings), None)
            ratios[name] = ratios[same] if same else runs.ratios(picked[LOSSY], settings)
    held_out = judged(job, task, {**picked, "as it stands": runs.reference}, arguments.seeds)
    by_cut = {which: _fastest(ratios, which) for which in (BY_HAND, BY_HAND_PROVEN)}
    return {
        "job": job.name,
        "version": job.version,
        "budget": arguments.budget,
        "drop": ALLOWED,
        "by_hand": {**hand["cut"].row, "with": hand["fastest"], "by_table": round(hand["fastest_speed"], 3)},
        "by_hand_proven": {
            **proven["cut"].row,
            "with": proven["fastest"],
            "by_table": round(proven["fastest_speed"], 3),
        },
        "best_by_hand": by_cut[BY_HAND],
        "over_hand": _mean(ratios[by_cut[BY_HAND]]),
        "best_by_hand_proven": by_cut[BY_HAND_PROVEN],
        "over_hand_proven": _mean(ratios[by_cut[BY_HAND_PROVEN]]),
        "over_exact": _mean(ratios[EXACT]),
        "seconds_over_exact": round(found[LOSSY]["seconds"] / found[EXACT]["seconds"], 2),
        "lost": {name: shares for name, shares in held_out.items() if name != "as it stands"},
        "held_out": held_out["as it stands"],
        "ratios": ratios,
        "settings": {name: settings.written() for name, settings in picked.items()},
        "searches": {name: of_search(one) for name, one in found.items()},
    }


def _row_of(cut: Mapping[str, Any]) -> dict[str, Any]:
    return {**cut["cut"].row, "with": cut["fastest"], "by_table": round(cut["fastest_speed"], 3)}


def searched(job: Job, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one search comes to; its plan is None where it finds none. Its log and its study stay in this folder."""
    asked = {
        "budget": arguments.budget,
        "trials": arguments.trials,
        "trial-time": f"{arguments.trial_time}s",
        "device": "cpu",
        "output": f"{name}.yaml",
        "progress": f"{name}.jsonl",
    }
    if arguments.max_time is not None:
        asked["max-time"] = f"{arguments.max_time}s"
    if name == LOSSY:
        asked |= {"max-quality-drop": f"{ALLOWED:.0%}", "recovery-steps": job.recovery_steps}
    command = [sys.executable, "-m", "autotune", "search", str(job.path), "--fresh"]
    command += [word for option, value in asked.items() for word in (f"--{option}", str(value))]
    began_s = time.monotonic()
    with Path(f"{name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - began_s
    said = Path(f"{name}.log").read_text(encoding="utf-8")
    rows = Path(f"{name}.jsonl").read_text(encoding="utf-8") if Path(f"{name}.jsonl").exists() else ""
    events = [json.loads(line) for line in rows.splitlines()]
    return {
        "plan": autotune.load_plan(f"{name}.yaml") if code == 0 else None,
        "error": said.strip()[-2000:] if code else None,
        "seconds": seconds,
        "runs": [event for event in events if "outcome" in event],
    }


def of_search(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of it."""
    plan = found["plan"]
    return {
        "seconds": round(found["seconds"], 1),
        "error": found["error"],
        "gain": plan and plan.gain and plan.gain.model_dump(mode="json"),
        "quality": plan and plan.quality and plan.quality.model_dump(mode="json"),
        "notes": list(plan.notes) if plan else [],
        "runs": found["runs"],
    }


def by_hand(name: str, row: Mapping[str, Any], exact: Settings, reference: Settings) -> dict[str, Settings]:
    """The cut with everything else as in the exact plan, and with what was chosen for it by hand."""
    cut: Cut = row["cut"]
    smaller = (
        Pruning(kind="structured", ratio=cut.ratio) if cut.ratio else Pruning(),
        LowRank(kind="svd", rank_ratio=cut.rank) if cut.rank is not None else LowRank(),
    )
    others = (_CHOICES[one] for one in row["fastest"].split("+") if one != "plain")
    found = (exact.having(*smaller), reference.having(*smaller, *others))
    return {f"{name}, {rest}": settings for rest, settings in zip(_REST, found, strict=True)}


def _fastest(ratios: Mapping[str, list[float]], which: str) -> str:
    """Of the cut by hand with either of the rest."""
    return min((f"{which}, {rest}" for rest in _REST), key=lambda name: statistics.geometric_mean(ratios[name]))


def as_applied(task: autotune.Task, settings: Settings) -> Settings:
    """With the record of its cut, so that no process has to find it anew."""
    return _applied(task, settings, 0).settings


def _applied(task: autotune.Task, settings: Settings, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autotune.apply(Plan(settings=settings), task, seed=seed)


class Runs:
    """Pairs of processes that take turns."""

    def __init__(self, job: Job, executor: Executor, arguments: argparse.Namespace) -> None:
        options = SearchOptions(task=str(job.path), device="cpu", max_quality_drop=DROP)
        facts = inspect(options, executor, TimeBudget(_DEADLINE_S, None))
        self.reference = reference_settings(facts)
        self._requests = Requests(options.task, 0, Budget(device="cpu"), facts)
        self._executor, self._arguments = executor, arguments

    def ratios(self, one: Settings, other: Settings) -> list[float]:
        """How many times as fast ``one`` is, by each pair; nothing is run of two that are the same."""
        if one == other:
            return [1.0]
        asked = taking_turns(self._requests, one, other, self._arguments.trial_time)
        pairs = [compared(self._executor, asked) for _ in range(self._arguments.pairs)]
        return [round(math.exp(trimmed_mean([turn.log_ratio for turn in pair.turns])[0]), 4) for pair in pairs]


def judged(
    job: Job, task: autotune.Task, picked: Mapping[str, Settings], seeds: int
) -> dict[str, list[dict[str, float]]]:
    """By name and seed: the quality on held-out examples, what was lost of the job as it stands as a share of that,
    and the standard error of this over examples."""
    torch.set_num_threads(1)
    scores: dict[tuple[str, int], torch.Tensor] = {}
    for name, settings in picked.items():
        for seed in range(1, seeds + 1):
            training = _applied(task, settings, seed)
            assert task.batch_size is not None, "each job states it"
            measure_quality(training, task, QualityOptions(num_samples=job.recovery_steps * task.batch_size))
            scores[name, seed] = job.parts["scores"](training.model, job.parts["HELD_OUT"])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in picked}
    for (name, seed), own in scores.items():
        whole = scores["as it stands", seed]
        lost = (whole - own) / whole.mean().abs()
        error = lost.std() / len(lost) ** 0.5
        values = {"quality": own.mean(), "lost": lost.mean(), "error": error}
        found[name].append({what: round(value.item(), 6) for what, value in values.items()})
    return found


def _mean(ratios: list[float]) -> float:
    return round(statistics.geometric_mean(ratios), 3)


def told(row: Mapping[str, Any]) -> str:
    """A row in words."""
    lost = statistics.fmean(one["lost"] for one in row["lost"][LOSSY])
    error = statistics.fmean(one["error"] for one in row["lost"][LOSSY])
    bars = (
        (f"{row['over_hand']:.2f} of the best by hand ({row['best_by_hand']})", row["over_hand"] >= OF_HAND, OF_HAND),
        (
            f"{row['over_hand_proven']:.2f} of the best that is proven as a plan is ({row['best_by_hand_proven']})",
            row["over_hand_proven"] >= OF_HAND,
            OF_HAND,
        ),
        (f"{row['over_exact']:.2f} of the exact plan", row["over_exact"] >= OF_EXACT, OF_EXACT),
        (
            f"its search took {row['seconds_over_exact']:.1f} times as long",
            row["seconds_over_exact"] <= OF_TIME,
            OF_TIME,
        ),
        (f"held out, {lost:+.2%} lost (error {error:.2%})", lost <= ALLOWED, ALLOWED),
    )
    lines = [f"{row['job']}: {row['settings'][LOSSY] or 'the job as it stands'}"]
    lines += [f"  {said}: {'within' if holds else 'MISSES'} the bar of {bar:g}" for said, holds, bar in bars]
    lines += [f"  no {name} plan: {one['error']}" for name, one in row["searches"].items() if one["error"]]
    return "\n".join(lines)
