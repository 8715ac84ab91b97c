"""Batch curves of real cards, replayed as searches: is the batch that the search takes the fastest that fits?

A curve is one job of milabench on one card: samples per second and MiB at some ten batches. The search may take the
largest batch that fits and its parts, as in a training whose effective batch is held; between measured batches the
curve is straight over the logarithm of the batch. What fits is known exactly, so that only the choice is judged.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.estimates import Prediction
from autotune.techniques import Device, Settings
from autotune.techniques.batch import Batch
from autotune.testing.facts import BARE
from autotune.units import MIB

from ..replay.competitors import COMPETITORS
from ..replay.play import play
from ..replay.table import MARGIN, Entry, Table
from ..rows import save_rows
from .known import FULL, total_mib

Row = dict[str, Any]
_CARD = Device(type="cuda", name="a card", memory_bytes=2**36, bf16=True)
_SEARCHES = {"search": "gain", "TPE": "tpe, raw space"}
_NUM_TRIALS, _NUM_SEEDS = 5, 5
_SLOW, _SHARE = 0.03, 0.9


@dataclass(frozen=True)
class Curve(Table):
    """The batches that a search may take of one job on one card."""

    limit: int = 0
    best: float = 0.0
    """Samples per second of the fastest measured batch that fits."""

    def limit_bytes(self, budget: str) -> int:
        """What the largest batch takes, whatever the budget's name."""
        return self.limit

    def slow(self, speed: float) -> float:
        """How much slower than the best measured, as a share."""
        return max(0.0, 1 - speed / self.best)


def curves(path: Path) -> Iterator[Curve]:
    """All with three batches or more that leave a twentieth of the card free, by job and card."""
    found: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["mib"]) <= FULL * total_mib(row["card"]):
                found[row["job"], row["card"]][int(row["batch"])].append(
                    (float(row["samples_per_s"]), float(row["mib"]))
                )
    for (job, card), points in found.items():
        if len(points) >= 3:
            yield _curve(f"{job} on {card}", points)


def _curve(name: str, points: dict[int, list[tuple[float, float]]]) -> Curve:
    """One of a job on a card: the median speed and the highest peak at each batch."""
    batches = sorted(points)
    speeds = [statistics.median(speed for speed, _ in points[batch]) for batch in batches]
    mib = [max(peak for _, peak in points[batch]) for batch in batches]
    entries = []
    held = {"effective_batch": batches[-1], "allow_split": True, "dataset_kind": "map"}
    facts = BARE.model_copy(update={"device": _CARD, **held})
    for batch in Batch.choices(facts):
        if batch.micro >= batches[0]:
            speed = float(np.interp(math.log(batch.micro), np.log(batches), speeds))
            peak = round(float(np.interp(batch.micro, batches, mib)) * MIB)
            entries.append(Entry(Settings(batch=batch), (speed,), (peak,), Prediction(peak_bytes=peak)))
    limit = math.ceil(max(mib) * MIB * (1 + MARGIN))
    return Curve(name, tuple(entries), "cuda", limit, max(speeds))


def print_speeds(path: Path, keep: bool) -> None:
    """Print what each rule's batch loses against the fastest, over all curves."""
    rows = [_row(curve) for curve in curves(path)]
    for row in rows:
        told = ", ".join(f"{rule} {row[rule]:.1%}" for rule in _rules())
        if max(row[rule] for rule in _rules()) >= _SLOW:
            print(f"{row['curve']}: slower than the fastest by: {told}")
    for rule in _rules():
        slow = sorted(row[rule] for row in rows)
        share = sum(loss <= _SLOW for loss in slow) / len(slow)
        bar = f": {'within' if share >= _SHARE else 'OVER'} the bar of {_SHARE:.0%}" if rule == "search" else ""
        print(f"{rule}: at most {_SLOW:.0%} slow on {share:.0%} of {len(slow)} curves, {slow[-1]:.0%} at worst{bar}")
    if keep:
        print(save_rows("cards-speed", "cpu", rows))


def _rules() -> Sequence[str]:
    return *_SEARCHES, "largest that fits", "best of the candidates"


def _row(curve: Curve) -> Row:
    """What each rule loses; of a search, the mean over seeds."""
    speeds = {entry.settings.batch.micro: entry.samples_per_s[0] for entry in curve.entries if entry.settings.batch}
    ceiling = max(speeds.values())
    row: Row = {"curve": curve.name, "num_candidates": len(speeds)}
    for rule, competitor in _SEARCHES.items():
        found = (play(curve, "", COMPETITORS[competitor], seed, _NUM_TRIALS) for seed in range(_NUM_SEEDS))
        row[rule] = statistics.fmean(curve.slow(ceiling * (1 - one.regret_after(_NUM_TRIALS))) for one in found)
    return row | {"largest that fits": curve.slow(speeds[max(speeds)]), "best of the candidates": curve.slow(ceiling)}
