"""The trial itself: one process, one request, one answer."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, NoReturn

from ..apply_plan import apply
from ..measure import Measurement
from ..measure.inspect import inspect_task
from ..measure.memory import enforce_budget, lift_budget
from ..measure.parity import run_parity
from ..measure.plain_loop import as_in_a_plain_loop
from ..measure.profile import profile
from ..measure.run import measure
from ..plan import Plan
from ..task import Task, load_task
from ._base import TrialRequest
from .failure import outcome_of
from .folder import NO_FOLDER, FolderLost, TrialFolder
from .outcome import Estimated, Inspected, Measured, Outcome, Predicted, Profiled

__all__ = ["run_trial"]


def run_trial(folder: TrialFolder, spawned_s: float) -> NoReturn:
    """Answer the request in ``folder`` and end the process, whatever the task has left running in it.

    Args:
        folder: the trial's files.
        spawned_s: ``time.monotonic()`` when the process was started.
    """
    trial, output, said = os.getpid(), os.dup(2), ""
    streams = [sys.stdout, sys.stderr]
    try:
        streams.append(_write_stacks_to(folder))
        request = folder.read_request()
        sys.argv = [request.task]
        outcome = _answer(request, folder, spawned_s)
        if os.getpid() == trial:  # else the task has forked, and its child came back here
            folder.write_outcome(outcome)
    except FolderLost as lost:
        said = f"{lost}\n"
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(output, said.encode(errors="replace"))
    os._exit(NO_FOLDER if said else 0)


def _write_stacks_to(folder: TrialFolder) -> IO[str]:
    """Have the Python stack written when the process crashes, and when its supervisor asks for it."""
    stack = folder.open_stack()
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed before a crash is not lost
    return stack


def _answer(request: TrialRequest, folder: TrialFolder, spawned_s: float) -> Outcome:
    try:
        return _run(request, folder, spawned_s)
    except FolderLost:
        raise
    except BaseException as error:  # noqa: BLE001 - a task may raise anything, sys.exit included; an outcome is data
        return outcome_of(error, request.device)


def _run(request: TrialRequest, folder: TrialFolder, spawned_s: float) -> Outcome:
    folder.write_phase("loading the task")
    task = load_task(request.task)
    load_s = time.monotonic() - spawned_s
    if request.kind == "inspect":
        folder.write_phase("inspecting the task")
        return Inspected(facts=inspect_task(task, request.inspect, request.device))
    if request.kind == "predict":
        return _predict(request, task, folder)
    assert request.plan is not None, "a measure, profile or estimate request carries a plan"
    if request.kind == "profile":
        return _profile(request, request.plan, task, folder)
    if request.kind == "estimate":
        return _estimate(request, request.plan, task, folder)
    assert request.measure is not None, "a measure request carries its options"
    if request.measure.plain_loop:
        task = as_in_a_plain_loop(task)
    folder.write_phase("applying the plan")
    started_s = time.monotonic()
    if request.device == "cuda":
        enforce_budget(request.plan.budget.limit if request.measure.enforce else None)
    training = apply(request.plan, task, seed=request.seed)
    apply_s = time.monotonic() - started_s
    folder.write_phase("training")
    measurement = measure(training, task, request.measure)
    if request.measure.parity_batch is not None and request.measure.parity_last:
        del training
        folder.write_measured()
        measurement = _with_parity(measurement, request.plan, task, request)
    phases_s = {"load": load_s, "apply": apply_s, **measurement.phases_s}
    return Measured(measurement=measurement.model_copy(update={"phases_s": phases_s}))


def _profile(request: TrialRequest, plan: Plan, task: Task, folder: TrialFolder) -> Profiled:
    folder.write_phase("applying the plan")
    if request.device == "cuda":
        enforce_budget(None)
    training = apply(plan, task, seed=request.seed)
    folder.write_phase("profiling")
    return Profiled(profile=profile(training, task, request.profile))


def _estimate(request: TrialRequest, plan: Plan, task: Task, folder: TrialFolder) -> Estimated:
    from ..estimate.answer import estimate  # what it imports is not to be in the memory of trials that are measured

    folder.write_phase("estimating")
    return Estimated(estimate=estimate(plan, task, request.estimate))


def _predict(request: TrialRequest, task: Task, folder: TrialFolder) -> Predicted:
    from ..estimate.predict import predict  # as above

    folder.write_phase("predicting")
    found = predict(task, request.predict)
    return Predicted(predictions=found.predictions, probed=found.probed)


def _with_parity(measurement: Measurement, plan: Plan, task: Task, request: TrialRequest) -> Measurement:
    """Compare losses once the peak is known, from a training applied anew and with no budget in force."""
    assert request.measure is not None, "a measure request carries its options"
    began_s = time.monotonic()
    gc.collect()
    lift_budget()
    parity = run_parity(apply(plan, task, seed=request.seed), task, request.measure)
    phases_s = {**measurement.phases_s, "parity": time.monotonic() - began_s}
    return measurement.model_copy(update={"parity": parity, "phases_s": phases_s})


if __name__ == "__main__":
    run_trial(TrialFolder(Path(sys.argv[1])), float(sys.argv[2]))
