"""A trial's job resumed in a process of its own: what was saved is loaded beside what is there."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ...measure import Measurement
from ...plan import PhasePeak
from ...training.launched import TRIAL_VARIABLE
from ..outcome import Measured, Outcome, OutOfMemory
from ..request import MeasureRequest
from .folder import TrialFolder

_SHARE_S = 0.1
"""Timed windows of it: they have to be there, and tell nothing."""
_STARTS = 2.0
"""Times what the trial took to come to its training that the process may take for that."""
_STEPS = 12
"""Optimizer steps that it takes at least."""
_LATE_S = 30.0
"""Beyond what is expected, after which it is ended."""
_POLL_S = 0.05


def is_short(measurement: Measurement, most_s: float) -> bool:
    """Whether a process that resumes is likely to be done in time: it starts as this one did, and loads as it saved."""
    known = measurement.phases_s
    starts_s = known["load"] + known.get("apply", 0.0) + known.get("saving", 0.0)
    return _STARTS * starts_s + _STEPS * known.get("timed", math.inf) / measurement.num_steps <= most_s


def resumed_task(measurement: Measurement, request: MeasureRequest, folder: TrialFolder) -> Measurement:
    """The measurement, with the peak of a process that goes on from the state that this one has saved.

    Args:
        measurement: the trial's own.
        request: what the trial was asked.
        folder: the trial's, for what passes between the two.
    """
    state = request.options.life.state if request.options.life is not None else None
    if state is None or not Path(state).exists():
        return measurement
    found = _with_resuming(measurement, request, folder, state)
    os.unlink(state)
    return found


def resumed_script(measurement: Measurement, request: MeasureRequest, folder: TrialFolder, within: Path) -> Measurement:
    """The measurement, with the peak of the same command where the script finds the checkpoint that it has saved, if it
    goes on from that.

    Args:
        measurement: the trial's own.
        request: what the trial was asked.
        folder: the trial's.
        within: the folder that the script ran in.
    """
    asked = folder.path / "request.json"  # what it saved is newer
    return _with_resuming(measurement, request.model_copy(update={"scratch": "off"}), folder, str(asked), within)


def _with_resuming(
    measurement: Measurement, request: MeasureRequest, folder: TrialFolder, state: str, within: Path | None = None
) -> Measurement:
    life = request.options.life
    assert life is not None, "the caller sees to it"
    began_s, inner = time.monotonic(), TrialFolder(folder.path / "resuming")
    inner.make()
    inner.write_request(_resumed(request, state))
    outcome = _outcome(inner, request.command, within, life.most_s + _LATE_S)
    phases_s = {**measurement.phases_s, "resuming": time.monotonic() - began_s}
    row = _row(outcome, is_script=within is not None)
    if row is None:
        why = getattr(outcome, "message", "") or f"it did not end within {life.most_s + _LATE_S:.0f} s"
        said = () if within is not None else (f"the job was not seen to resume: {why}",)
        return measurement.model_copy(update={"warnings": (*measurement.warnings, *said), "phases_s": phases_s})
    peak = measurement.peak.with_phases({**measurement.peak.phases, "resuming": row})
    return measurement.model_copy(update={"peak": peak, "phases_s": phases_s})


def _outcome(inner: TrialFolder, command: Sequence[str] | None, within: Path | None, most_s: float) -> Outcome | None:
    """What the process came to; None where it did not end in time."""
    until_s = time.monotonic() + most_s
    environment = {**os.environ, TRIAL_VARIABLE: str(inner.path)} if command else None
    process = subprocess.Popen(
        command or inner.anew(time.monotonic()), stdin=subprocess.DEVNULL, env=environment, cwd=within
    )
    while process.poll() is None and inner.read_outcome() is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    process.kill()
    process.wait()
    return inner.read_outcome()


def _row(outcome: Outcome | None, is_script: bool) -> PhasePeak | None:
    """Of a script, only where it loaded something before it trained."""
    if isinstance(outcome, Measured):
        found = outcome.measurement.peak
        if is_script:
            return found.phases.get("resuming")
        return PhasePeak(process=found.process, host=found.host)
    return PhasePeak(process=outcome.peak_bytes) if isinstance(outcome, OutOfMemory) else None


def _resumed(request: MeasureRequest, state: str) -> MeasureRequest:
    update = {
        "trial_time_s": _SHARE_S,
        "enforce": False,
        "parity_batch": None,
        "evaluation": None,
        "life": None,
        "turns": None,
        "quality": None,
        "to_beat": None,
        "resumes_from": state,
    }
    options = request.options.model_copy(update=update)
    return request.model_copy(update={"id": f"{request.id}-resumed", "options": options})
