"""``benchmarks.gpu``: which cards and ways its checks have, and the report that is kept of the stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autotune.task_file import load_task
from autotune.workers.devices import Gpu
from benchmarks.gpu.__main__ import CHECKS
from benchmarks.gpu.place import Place, task
from benchmarks.gpu.speed import ways
from benchmarks.rows import HERE


def test_the_report_that_is_kept_is_of_todays_checks() -> None:
    """None failed, and those that were skipped say why: triton is not there."""
    rows = json.loads((HERE / "results" / "gpu" / "stand-in.json").read_text())["checks"].values()
    assert [(row["check"], row["bar"]) for row in rows] == [(check.name, check.bar) for check in CHECKS]
    assert {row["check"] for row in rows if row["verdict"] in ("FAILED", "skipped")} == {"compile"}


def test_all_checks_but_one_see_the_first_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a trial runs on one while the other is watched."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    place = Place(tmp_path, True, (Gpu("GPU-1", "A card", 2**33), Gpu("GPU-2", "A card", 2**33)))
    seen = [os.environ["CUDA_VISIBLE_DEVICES"]]
    with place.all_cards():
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert [*seen, os.environ["CUDA_VISIBLE_DEVICES"]] == ["GPU-1", "GPU-1,GPU-2", "GPU-1"]


def test_no_batch_that_the_host_makes_is_asked_to_lie_on_the_card() -> None:
    """Such a plan is refused, so that the check of speeds failed on any card."""
    names = [name for name, way in ways(is_quick=False) if way == "on the card"]
    assert [(name, load_task(task(name)).collate) for name in names] == [("launch_bound", None), ("short_steps", None)]
