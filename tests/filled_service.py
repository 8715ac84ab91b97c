"""A state folder of a service with searches in each state, one of them with many trials."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from autotune.plan import Budget, Evidence, Gain, Peak, Plan, Speed
from autotune.service.findings import Documents, Summary, result_of
from autotune.service.service import open_database
from autotune.service.spec import SearchSpec
from autotune.service.store.leases import Lease, Leases
from autotune.service.store.searches import Searches
from autotune.service.store.states import State
from autotune.techniques import Settings
from autotune.techniques.precision import Precision

LIMIT = 8 * 2**30
TRACEBACK = "\n".join(["model.py: no function build() was found", *(f"  frame {number}" for number in range(12))])


def evidence(speed: float, gib: float, *, fits: bool = True) -> Evidence:
    """A configuration's speed, known to 2 %, and its peak."""
    peak = Peak(process=int(gib * 1024) * 2**20)
    return Evidence(
        samples_per_s=Speed(value=speed, low=0.99 * speed, high=1.01 * speed, repeats=3), peak=peak, fits=fits
    )


PLAN = Plan(
    settings=Settings(precision=Precision(kind="bf16")),
    budget=Budget(limit=LIMIT),
    measured=evidence(41.2, 7.5),
    reference=evidence(21.2, 9.25, fits=False),
    gain=Gain(speed=1.94, low=1.9, high=1.98, rounds=3, memory=0.81),
)
"""Of a job that does not fit as it stands."""


def fill(state: Path, num_trials: int) -> str:
    """A state folder with one search of so many trials, one of each other end, one that runs, and one that waits after
    a failure; the first's id."""
    database, _ = open_database(state, None, alone=False)
    searches, leases = Searches(database), Leases(database, "elsewhere", 3600.0)
    ends = {
        State.NOTHING_FITS: "nothing fits into 1 GiB: the smallest takes 1.4 GiB",
        State.ERROR: "its driver was lost",
    }
    for state_, words in {**ends, State.FAILED: TRACEBACK}.items():
        searches.submit(SearchSpec(task="model.py", folder="/jobs", name=f"train {len(words)}"), "bob", None)
        if lease := leases.claim():
            leases.begin(lease, 1, 1)
            leases.finish(lease, state_, words)
    spec = SearchSpec(task="train.py:gpt2", folder="/jobs", name="gpt2-medium on one card", budget="8GiB")
    search_id = searches.submit(spec, "ann", None)[0].id
    lease = leases.claim()
    assert lease is not None
    summary = _record(leases, lease, _events(num_trials))
    report = "\n".join(["gpt2-medium: 41.2 samples/s, 7.61 GiB", *(f"  line {n} of the report" for n in range(8))])
    found = Documents(PLAN.to_yaml(), report, result=result_of(PLAN))
    leases.finish(lease, State.SUCCEEDED, "", found, {**summary, "result": found.result})
    searches.submit(SearchSpec(task="vit.py", folder="/jobs", name="a ViT that runs", budget="90%"), "ann", None)
    if lease := leases.claim():
        running = _events(7)
        running[1]["num_trials"] = 24
        _record(leases, lease, running)
    searches.submit(SearchSpec(task="model.py", folder="/jobs", name="train later"), "bob", None)
    if lease := leases.claim():
        leases.give_back(lease, "the Ray cluster at head:6379 has died.", is_failure=True)
    database.close()
    return search_id


_OWN = {0: (21.2, int(9.25 * 2**30)), 5: (41.0, int(7.5 * 2**30))}
"""Speed and peak of the job as it stands, and of what becomes the plan."""


def _record(leases: Leases, lease: Lease, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Store what a driver says; the summary of it."""
    summary = Summary()
    summary.begin(rows[0]["time"] - 8.0)
    leases.begin(lease, 1, 1, summary.as_json())
    for first in range(0, len(rows), 500):
        part = rows[first : first + 500]
        for row in part:
            summary.take(row)
        leases.record(lease, part, first + 1, summary.as_json())
    return summary.as_json()


def _events(num_trials: int) -> list[dict[str, Any]]:
    random_ = random.Random(0)
    started = {"event": "search_started", "study": "s-1", "num_trials": num_trials, "limit_bytes": LIMIT, "resumed": []}
    read = {"event": "inspected", "words": "354 M parameters, 24 blocks of Block"}
    rows: list[dict[str, Any]] = [read, started]
    best = 0.0
    for number in range(num_trials):
        batch = 2 ** random_.randrange(7)
        peak = int(2**30 * (1.2 + 0.16 * batch * random_.uniform(0.6, 1.1)))
        speed = 45 * batch / (batch + 6) * random_.uniform(0.7, 1.0)
        speed, peak = _OWN.get(number, (speed, peak))
        fits, failed = peak <= LIMIT, number not in _OWN and random_.random() < 0.05
        is_best = fits and not failed and speed > best
        best = speed if is_best else best
        words = f"{speed:.1f} samples/s, {peak / 2**30:.2f} GiB" + ("" if fits else ", over the budget")
        row = {
            "event": "trial_ended",
            "number": number,
            "settings": f"batch {batch}, checkpoint every {1 + number % 4}, bf16, fused AdamW, channels last",
            "outcome": "crashed" if failed else "measured",
            "fits": fits and not failed,
            "is_best": is_best,
            "words": "crashed: CUDA error: an illegal memory access was encountered" if failed else words,
            "seconds": 4.0,
        }
        rows.append(row if failed else {**row, "samples_per_s": speed, "peak_bytes": peak})
    if num_trials > 10:
        rows += _finals()
    return [{**row, "time": time.time() - len(rows) + place} for place, row in enumerate(rows)]


def _finals() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"event": "stopped", "words": "all trials were measured"}]
    for number in range(1, 4):
        run = {"number": 5, "round": number, "num_rounds": 3, "settings": "bf16"}
        rows += [{"event": "trial_started", **run}, {"event": "finalist_ended", **run}]
    bought = {None: {"samples_per_s": 41.2}, "precision": {"samples_per_s": 20.6}, "batch": {"words": "out of memory"}}
    rows += [{"event": "ablation_ended", "without": name, "round": 1, **said} for name, said in bought.items()]
    return rows
