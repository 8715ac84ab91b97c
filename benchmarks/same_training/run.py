"""Runs a script, without and with a plan, in processes of their own, and tells whether it trained the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rows import HERE
from .compare import differences
from .plans import Pair
from .styles import Style
from .trial import refused_in_trial

RECORDER = Path(__file__).with_name("recorder")
"""What PYTHONPATH begins with, for a process to be recorded."""
_LIMIT_S = 300
_FIRST_STEPS = 10
"""Optimizer steps within which a job may still be refused: one that names the wrong optimizer is told then."""

_MOST_TOLD = 3


@dataclass(frozen=True)
class Trained:
    """How a script's process ended."""

    returncode: int
    said: str
    """Its standard error."""
    record: dict[str, Any]
    """Of the recorder, see there."""


def train(style: Style, plan: Mapping[str, Any] | None, cache: Path) -> Trained:
    """Run a script to its end, in an empty folder.

    Args:
        style: the script.
        plan: sections of the plan to run it with; None runs it as it stands.
        cache: where compiled programs are kept.
    """
    command = [sys.executable, *style.words]
    with tempfile.TemporaryDirectory(prefix="autotune-same-") as name:
        folder, records = Path(name, "job"), Path(name, "records")
        folder.mkdir()
        records.mkdir()
        if plan is not None:
            path = Path(name, "plan.yaml")
            path.write_text(json.dumps({"schema": "autotune/plan@1", **plan}), encoding="utf-8")
            command = [sys.executable, "-m", "autotune", "run", str(path), "--", *command]
        job = ended(command, folder, _environment(records, cache), _LIMIT_S)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in records.iterdir()]
    record = max(found, key=lambda one: len(one["steps"]), default={"steps": [], "epochs": []})
    return Trained(job.returncode, job.stderr.replace(f"{name}/", "").replace(f"{HERE.parent}/", ""), record)


def _environment(records: Path, cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{RECORDER}{os.pathsep}{HERE.parent}",
        "SAME_TRAINING_RECORD": str(records),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def ended(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """A command's end, and what it printed; all that it started ends with it, and it ends at the limit."""
    job = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, said = job.communicate()
        said += f"\nno end within {limit_s:.0f} s"
    return subprocess.CompletedProcess(command, job.returncode, out, said)


def told(said: str) -> list[str]:
    """autotune's own lines of a standard error."""
    return re.findall(r"^autotune: (.*)", said, re.MULTILINE)


def attempt(pair: Pair, plain: Trained, task: Mapping[str, Any] | None, cache: Path) -> str:
    """Try a pair. What a plan by hand has nothing to hold against, a trial of a search may see: an undivided loss, or
    an optimizer that rounding leads elsewhere.

    Args:
        pair: a script, and a plan's settings.
        plain: the script's training without a plan.
        task: of the plan; None, as in one by hand.
        cache: where compiled programs are kept.

    Returns:
        ``agrees``, ``refused: why``, or ``FAILED: what differs``.
    """
    told = {} if task is None else {"task": task}
    found = _outcome(pair, plain, train(pair.style, {**told, "settings": pair.settings}, cache))
    if found.startswith("FAILED") and pair.style.longer:
        reason = refused_in_trial(pair.style, pair.settings)
        return f"refused: by a trial: {reason}" if reason is not None else found
    return found


def _outcome(pair: Pair, plain: Trained, planned: Trained) -> str:
    lines, num_steps = told(planned.said), len(planned.record["steps"])
    if planned.returncode == 2 and lines and num_steps <= _FIRST_STEPS:
        return f"refused: {lines[-1]}"
    found = list(_faults(pair, plain, planned, lines, num_steps))
    return f"FAILED: {'; '.join(found[:_MOST_TOLD])}" if found else "agrees"


def _faults(pair: Pair, plain: Trained, planned: Trained, lines: Sequence[str], num_steps: int) -> Iterator[str]:
    if planned.returncode != 0:
        last = lines[-1] if lines else next(iter(planned.said.strip().splitlines()[-1:]), "nothing was said")
        yield f"ended with {planned.returncode} after {num_steps} of {len(plain.record['steps'])} steps ({last})"
    elif not any(line.startswith("applied") for line in lines):
        yield "nothing is said of what is applied"
    if num_steps:
        yield from differences(plain.record, planned.record, pair)
