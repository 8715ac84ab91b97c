"""What kind of process a job and a trial are: ``process_job.py`` as a job, and the same file measured as a task."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.measure import MeasureOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.workers import Executor, Measured, MeasureRequest
from autotune.workers.trial.environment import own_thread_variables

INTENDED: Mapping[str, str] = {
    "oom_score_adj": "the trial is the first to go where memory runs out",
    "session leader": "the terminal's signals are for the driver",
    "terminal": "as above",
    "stdin": "a trial that reads would wait for ever",
    "safe path": "the driver's folder is not to hide a library",
    "objects left to gc": "a fork shares what its server has imported",
    "$AUTOTUNE_SERVER": "finds what outlives its server",
    "$TORCHINDUCTOR_CACHE_DIR": "torch sets it with its compiler, which a job imports at its first optimizer step",
}
"""Facts in which a trial may differ from a job, and why. Nothing of these bears on speed or memory."""

_TASK = Path(__file__).with_name("process_job.py")
_DEADLINE_S = 300.0


def job_facts(folder: Path) -> dict[str, Any]:
    """What a job that is started here is told by the system, its file being in ``folder``."""
    shutil.copy(_TASK, folder)
    command = [sys.executable, str(folder / _TASK.name)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    facts: dict[str, Any] = json.loads(ended.stdout)
    return facts


def trial_facts(executor: Executor, folder: Path, fresh: bool) -> dict[str, Any]:
    """What a trial of the same file is told.

    Raises:
        RuntimeError: it did not run.
    """
    shutil.copy(_TASK, folder)
    request = MeasureRequest(
        id="process",
        task=str(folder / _TASK.name),
        device="cpu",
        plan=Plan(settings=Settings()),
        options=MeasureOptions(trial_time_s=0.1, parity_batch=8),
        deadline_s=_DEADLINE_S,
        fresh=fresh,
        environment=own_thread_variables(),
    )
    outcome = executor.ask(request)
    if not isinstance(outcome, Measured):
        raise RuntimeError(f"the trial did not run: {outcome}")
    facts: dict[str, Any] = json.loads((folder / "about.json").read_text())
    return facts


def differences(job: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts that are not the same, or not there: the job's and the trial's."""
    names = sorted({*job, *trial})
    return {name: (job.get(name), trial.get(name)) for name in names if job.get(name) != trial.get(name)}
