"""``python -m benchmarks.gpu`` over the stand-in, across processes: it does not fail for its own sake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXACT = (
    "surroundings",
    "context",
    "allocator's rules",
    "budget",
    "kinds of out of memory",
    "killed trial",
    "precision",
    "checkpointing",
    "split check",
)
"""Whose figures do not hang on this machine's processors."""


@pytest.mark.slow
def test_twenty_checks_run_over_the_stand_in(tmp_path: Path) -> None:
    """Each has a row with a verdict; speeds are this machine's, and are not looked at."""
    report, folder = tmp_path / "gpu-report.json", tmp_path / "card"
    folder.mkdir()
    path = os.pathsep.join(map(str, (Path(__file__).parent / "processes", ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "CARD_FOLDER": str(folder)}
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--report", str(report)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    text = report.read_text()
    rows = json.loads(text)["checks"]
    assert [int(number) for number in rows] == list(range(20))
    assert [row for row in rows.values() if row["verdict"] == "FAILED"] == []
    assert [row for row in rows.values() if row["check"] in EXACT and row["verdict"] != "within"] == []
    assert rows["19"]["figures"]["DDP's losses"] <= 1e-3
    assert rows["19"]["figures"]["torchrun's processes"] <= 0.03
    assert str(tmp_path) not in text
    assert str(ROOT) not in text


def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    """Exit code 2, and no report."""
    report = tmp_path / "gpu-report.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--report", str(report)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr
    assert not report.exists()
