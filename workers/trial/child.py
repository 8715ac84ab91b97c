"""The trial itself: one process, one request, one answer."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from ...errors import Caught
from ...estimates import CheapestOptions, EstimateOptions, PredictOptions
from ...internals import lost
from ...measure import Measurement
from ...measure.checks.distill import build_teacher, distilled
from ...measure.checks.outputs import compare_outputs
from ...measure.checks.parity import rounded_losses, run_parity
from ...measure.checks.quality import keep_weights, measure_quality
from ...measure.device import check_device, inspect_device
from ...measure.inspect import inspect_task
from ...measure.memory import Base
from ...measure.others import take_card
from ...measure.profiling.profile import profile
from ...measure.run import as_in_a_plain_loop, measure
from ...measure.timing.compile_time import CompileTime
from ...ranks import own_gpu, this_rank
from ...task import Task
from ...task_file import load_task
from ...training.apply_plan import apply
from ...training.forward.inference import Inference
from ...training.training import Training
from ..outcome import Chosen, CutsJudged, Estimated, Exported, Inspected, Measured, Outcome, Predicted, Profiled
from ..request import (
    CompareRequest,
    ExportRequest,
    InspectRequest,
    JudgeRequest,
    MeasureRequest,
    PredictRequest,
    ProfileRequest,
    TrialRequest,
)
from .failure import outcome_of
from .folder import NO_FOLDER, FolderLost, TrialFolder
from .group import join_group, of_rank, run_group
from .resuming import is_short, resumed_task


def run_trial(folder: TrialFolder, spawned_s: float) -> NoReturn:
    """Answer the request in ``folder`` and end the process, whatever the task has left running in it.

    Args:
        folder: the trial's files.
        spawned_s: ``time.monotonic()`` when the process was started.
    """
    trial, output, said = os.getpid(), os.dup(2), ""
    streams = [sys.stdout, sys.stderr]
    try:
        folder = of_rank(folder)
        request = folder.read_request()
        sys.argv = [request.task]
        if _is_for_several(request):
            outcome = _answer(lambda: run_group(request, folder, spawned_s, run_trial), request.device)
        else:
            if this_rank().rank == 0:
                streams.append(folder.write_stacks())
            outcome = _answer(lambda: _run(request, folder, spawned_s), request.device)
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


def _is_for_several(request: TrialRequest) -> bool:
    """Whether this process is to start those that answer, and is none of them."""
    return request.applied.parallel.processes > 1 and this_rank().size == 1


def _answer(run: Callable[[], Outcome], device: str) -> Outcome:
    with Caught(FolderLost, of=BaseException, frames=True) as raised:  # a task may raise anything, sys.exit included
        return run()
    return outcome_of(raised.take(), device)


def _run(request: TrialRequest, folder: TrialFolder, spawned_s: float) -> Outcome:
    folder.write_phase("loading the task")
    uses_card = request.device == "cuda" and not isinstance(request, PredictRequest)
    if uses_card and isinstance(request, MeasureRequest):
        take_card(request.plan, request.options, own_gpu)
    elif uses_card:
        take_card(None, None, own_gpu)
    task = load_task(request.task, request.infers)
    load_s = time.monotonic() - spawned_s
    if uses_card:
        check_device()
    join_group(request, folder)
    match request:
        case InspectRequest():
            folder.write_phase("inspecting the task")
            return Inspected(facts=inspect_task(task, request.options, request.device))
        case MeasureRequest():
            return _measure(request, task, folder, load_s)
        case ProfileRequest():
            return _profile(request, task, folder)
        case JudgeRequest():
            return _judge(request, task, folder)
        case ExportRequest():
            return _export(request, task, folder)
        case PredictRequest():
            folder.write_phase("predicting")
            return _predict(request.options, task)
        case CompareRequest():
            raise AssertionError("each of its sides is a request of its own")


def _measure(request: MeasureRequest, task: Task, folder: TrialFolder, load_s: float) -> Measured:
    options = request.options
    if options.life is not None and request.fresh:
        life = options.life.model_copy(update={"state": str(folder.path / "state.pt")})
        options = options.model_copy(update={"life": life})
        request = request.model_copy(update={"options": options})
    _note_compiling(folder)
    if options.plain_loop:
        task = as_in_a_plain_loop(task)
    folder.write_phase("applying the plan")
    started_s = time.monotonic()
    base = Base() if request.device == "cpu" else None
    training = _applied(request, task if base is None else base.with_data(task), is_limited=options.enforce)
    if options.resumes_from is not None:
        training.load_state_dict(torch.load(options.resumes_from, weights_only=True))  # as the docs have it
    apply_s = time.monotonic() - started_s
    asked, applied = request.plan.settings.in_force(task.precision), training.settings
    folder.write_phase("training")
    held = [training]
    del training
    measurement = measure(held[0], task, options, base)
    is_wanted = options.parity_batch is not None and not options.is_out(measurement.stopped)
    if is_wanted and not measurement.parity.losses:
        held.clear()
        folder.write_measured()
        measurement = _with_parity(measurement, request, task)
    if options.plain_loop and options.parity_batch is not None:
        folder.write_measured()
        measurement = _with_rounded(measurement, request, task)
    if options.quality is not None:
        folder.write_measured()
        measurement = _with_quality(measurement, request, task)
    phases_s = {"load": load_s, "apply": apply_s, **measurement.phases_s}
    measurement = measurement.model_copy(update={"phases_s": phases_s})
    if options.life is not None and request.fresh and is_short(measurement, options.life.most_s):
        held.clear()
        folder.write_measured()
        _let_go()
        measurement = resumed_task(measurement, request, folder)
    device = inspect_device(request.device)
    return Measured(measurement=measurement, applied=applied if applied != asked else None, device=device)


def _note_compiling(folder: TrialFolder) -> None:
    """Compiling puts the trial's deadline off: of several processes, the first one's."""
    if this_rank().rank == 0:
        CompileTime(folder.write_compiling)


def _let_go() -> None:
    """Of the training that was measured: its memory, and that of CUDA graphs, which torch keeps for whoever replays
    them."""
    gc.collect()
    if "torch._inductor.cudagraph_trees" in sys.modules and lost("compiled modules") is None:
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def _applied(request: MeasureRequest | ProfileRequest, task: Task, is_limited: bool = False) -> Training:
    """As the job applies the plan; held to its budget, to the end, or to none."""
    budget = request.plan.budget if is_limited else request.plan.budget.model_copy(update={"limit": None})
    plan = request.plan.model_copy(update={"budget": budget})
    return apply(plan, task, seed=request.seed, enforce=True)


def _with_parity(measurement: Measurement, request: MeasureRequest, task: Task) -> Measurement:
    """Compare losses once the peak is known, from a training applied anew and without a budget."""
    began_s = time.monotonic()
    _let_go()
    training = _applied(request, task)
    check = compare_outputs(training, task, request.options) if isinstance(training, Inference) else None
    parity = check or run_parity(training, task, request.options)
    phases_s = {**measurement.phases_s, "parity": time.monotonic() - began_s}
    return measurement.model_copy(update={"parity": parity, "phases_s": phases_s})


def _with_rounded(measurement: Measurement, request: MeasureRequest, task: Task) -> Measurement:
    """Of the reference: what rounding comes to for this job."""
    began_s = time.monotonic()
    _let_go()
    rounded = rounded_losses(_applied(request, task), task, request.options)
    parity = measurement.parity.model_copy(update={"rounded": rounded})
    phases_s = {**measurement.phases_s, "rounded": time.monotonic() - began_s}
    return measurement.model_copy(update={"parity": parity, "phases_s": phases_s})


def _with_quality(measurement: Measurement, request: MeasureRequest, task: Task) -> Measurement:
    """Train a model applied anew, so that each configuration has had the same steps, and evaluate it."""
    options = request.options.quality
    assert options is not None, "the caller sees to it"
    began_s = time.monotonic()
    _let_go()
    teacher = build_teacher(task) if options.distill and request.plan.settings.affect("function") else None
    training = _applied(request, task)
    if teacher is not None:
        training = distilled(training, task, teacher)
    quality = measure_quality(training, task, options)
    warnings = (*measurement.warnings, *keep_weights(training, options))
    phases_s = {**measurement.phases_s, "quality": time.monotonic() - began_s}
    return measurement.model_copy(update={"quality": quality, "phases_s": phases_s, "warnings": warnings})


def _profile(request: ProfileRequest, task: Task, folder: TrialFolder) -> Profiled:
    folder.write_phase("applying the plan")
    _note_compiling(folder)
    training = _applied(request, task)
    folder.write_phase("profiling")
    return Profiled(profile=profile(training, task, request.options))


def _judge(request: JudgeRequest, task: Task, folder: TrialFolder) -> CutsJudged:
    from ...measure.cuts.judge import judge
    from ...measure.cuts.table import lines_of

    _note_compiling(folder)
    plan = request.plan.model_copy(update={"budget": request.plan.budget.model_copy(update={"limit": None})})

    def note(doing: str) -> None:
        with contextlib.suppress(FolderLost):  # it is told with the answer
            folder.write_phase(doing)

    found = judge(task, plan, request.options, note)
    print(*lines_of(found), sep="\n")
    return CutsJudged(found=found)


def _export(request: ExportRequest, task: Task, folder: TrialFolder) -> Exported:
    from ...measure.exports.program import export

    _note_compiling(folder)
    plan = request.plan.model_copy(update={"budget": request.plan.budget.model_copy(update={"limit": None})})
    options = request.options.model_copy(update={"folder": str(folder.path)})
    return Exported(file=export(task, plan, options, request.seed, folder.write_phase))


def _predict(options: PredictOptions | CheapestOptions | EstimateOptions, task: Task) -> Predicted | Chosen | Estimated:
    # What these import is not to be in the memory of trials that are measured.
    if isinstance(options, CheapestOptions):
        from ...estimates.cheapest import cheapest

        return Chosen(found=cheapest(task, options))
    if isinstance(options, EstimateOptions):
        from ...estimates.max_batch import estimate_each

        first, *others = estimate_each(task, options)
        return Estimated(estimate=first, others=tuple(others))
    from ...estimates.predict import predict

    found = predict(task, options)
    return Predicted(predictions=found.predictions, probed=found.probed, refused=found.refused)


if __name__ == "__main__":
    run_trial(TrialFolder(Path(sys.argv[1])), float(sys.argv[2]))
