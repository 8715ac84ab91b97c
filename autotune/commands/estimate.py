"""``autotune estimate``: for each combination of techniques the largest micro-batch that fits, without a device."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

from ..errors import NothingFits, TaskError, UserError
from ..estimates import EstimateOptions
from ..estimates.cards import on_device
from ..report.estimate import WIDTH, as_json, explain, line
from ..report.printing import print_json, print_words, tell
from ..results import Combination, Estimation, WhatToEstimate
from ..search_spaces import load_space
from ..searches.options import ANY_DROP, SearchOptions
from ..searches.requests import LARGEST_OF, failure, inspect
from ..searches.time_budget import TimeBudget
from ..techniques import TECHNIQUES, Device, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..techniques.precision import refused
from ..units import ceil_mib, format_bytes
from ..workers import Estimated, Executor, Failed, Outcome
from .calibrate import Uncalibrated, calibrate, predict_request
from .where import Where, trials

_MOST_MICRO = 2**16


def estimate(what: WhatToEstimate, json: bool, verbose: bool) -> None:
    """Estimate a task's memory, and print the largest micro-batches.

    Args:
        what: the task, and the device that is planned for.
        json: print one JSON document.
        verbose: show what the task prints.

    Raises:
        UserError: ``--device-memory`` with ``--device cpu``, or a CUDA device is planned for and its memory not said;
            or as :func:`estimate_task`.
    """
    check(what)
    tell(f"reading the task: {what.task}")
    told: list[Facts] = []

    def observe(event: Facts | Combination) -> None:
        tell(line(event, *told))
        told.extend([event] if isinstance(event, Facts) else [])

    with trials(Where("local", verbose=verbose), what.task, "cpu") as executor:
        found = estimate_task(what, executor, observe)
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found), WIDTH)


def check(what: WhatToEstimate) -> None:
    """Refuse, before anything runs, what cannot be planned for.

    Raises:
        UserError: a CUDA device's memory for a CPU, or none for a CUDA device.
    """
    if what.device == "cpu" and what.device_memory_bytes is not None:
        raise UserError("--device-memory is of a CUDA device, but --device is cpu. Leave one of them out.")
    if what.device == "cuda" and what.limit_bytes is None:
        raise UserError("--device cuda: how much may be taken? Give --budget or --device-memory, such as 24GiB.")


def estimate_task(
    what: WhatToEstimate, executor: Executor, observe: Callable[[Facts | Combination], None]
) -> Estimation:
    """Ask for each combination in a process of its own.

    Args:
        what: the task and the device that is planned for.
        executor: runs the children on a CPU; stays the caller's to close.
        observe: is told the facts, and each combination as it is known.

    Raises:
        TaskError: the task cannot be loaded, or its step raises.
        SpaceError: an unknown technique or value in the space.
        NothingFits: no combination fits at a micro-batch of 1.
        StudyError: the storage that the user named cannot be read, or has no study of the task.
    """
    time_budget = TimeBudget(0.0, None)
    space = load_space(what.space)
    options = SearchOptions(
        task=what.task, device="cpu", effective_batch=what.effective_batch, max_quality_drop=ANY_DROP
    )
    facts = _planned_for(what, inspect(options, executor, time_budget, runs_model=False))
    observe(facts)
    limit_bytes = what.limit_bytes or facts.device.memory_bytes
    try:
        study, calibration, uncalibrated = *calibrate(what, facts, executor, time_budget), None
    except Uncalibrated as reason:
        study, calibration, uncalibrated = None, None, str(reason)
    asked = _options(what, facts, limit_bytes).model_copy(update={"calibration": calibration})
    found: list[Combination] = []
    choices = space.choices(facts)
    may_choose = any(choice != Checkpointing() for choice in choices.get(Checkpointing.name, ()))
    for settings in _combinations(choices, facts):
        wanted = asked.model_copy(update={"settings": settings, "choose_blocks": may_choose and not found})
        request = predict_request(f"estimate-{len(found) + 1}", what, time_budget, wanted)
        one = Combination(settings, executor.ask(request))
        if not found:
            _check_base(one.outcome, what)
        found.append(one)
        observe(one)
    estimation = Estimation(what, facts, limit_bytes, tuple(found), calibration, study, uncalibrated or None)
    if not any(one.micro for one in found):
        raise NothingFits(_nearest_miss(estimation))
    return estimation


def _planned_for(what: WhatToEstimate, facts: Facts) -> Facts:
    if what.device == "cpu":
        if (reason := refused(facts.precision, facts.device)) is not None:
            raise TaskError(f"{what.task}: {reason}")
        return facts
    size = what.device_memory_bytes or what.budget_bytes or 0
    name = f"a CUDA device of {format_bytes(size)}" if size else "a CUDA device"
    card = Device(type="cuda", name=name, memory_bytes=size, bf16=True)
    return facts.model_copy(update={"device": card})


def _options(what: WhatToEstimate, facts: Facts, limit_bytes: int) -> EstimateOptions:
    return EstimateOptions(
        **on_device(facts.device, bool(facts.conv_dims)),
        limit_bytes=limit_bytes,
        reference_batch=facts.effective_batch,
        reference_micro=facts.micro_batch,
        is_held=facts.effective_batch_held,
        most=max(facts.effective_batch, min(facts.dataset_length or _MOST_MICRO, _MOST_MICRO)),
        largest_of=LARGEST_OF if facts.shapes_vary else None,
    )


def _combinations(choices: dict[str, tuple[Technique, ...]], facts: Facts) -> Iterator[Settings]:
    """The job as it stands, then each technique alone, then together: of those that change a step's tensors, since the
    others move a peak little, or not at all. What changes the function, and is not in the space, is looked at alone, at
    its mildest: it shows what ``--max-quality-drop`` would free."""
    techniques = (technique for technique in TECHNIQUES.values() if "tensors" in technique.affects)
    rows = [technique.extremes(choices.get(technique.name, ())) for technique in techniques]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*filter(None, rows)))
    own = {"batch": Batch.reference(facts)}
    goes = (one for one in together if one.in_force(facts.precision).model_copy(update=own).conflict() is None)
    lossy = (one.choices(facts)[1:2] for one in TECHNIQUES.values() if "function" in one.affects)
    alone = (Settings(**{one.name: one}) for row in lossy for one in row if one.name not in choices)
    yield from sorted(
        dict.fromkeys([Settings(), *goes, *alone]), key=lambda one: len(one.model_dump(exclude_defaults=True))
    )


def _check_base(outcome: Outcome, what: WhatToEstimate) -> None:
    """The job as it stands has to be known: a task that is wrong is wrong in every combination."""
    if isinstance(outcome, Estimated):
        return
    if isinstance(outcome, Failed) and not outcome.traceback:
        raise TaskError(outcome.message)
    raise TaskError(f"{what.task}: its memory cannot be estimated: {failure(outcome)}")


def _nearest_miss(found: Estimation) -> str:
    known = [(one.estimate, one.estimate.smallest, one.settings) for one in found.combinations if one.estimate]
    least, fit, settings = min(
        ((whole, fit, settings) for whole, fit, settings in known if fit is not None),
        key=lambda row: row[1].process.value,
    )
    changed = settings.model_dump(exclude_defaults=True)
    how = ", ".join(f"{name}: {row['kind']}" for name, row in changed.items()) or "the job as it stands"
    return (
        f"{found.what.task}: nothing fits within {format_bytes(found.limit_bytes)}, not even a micro-batch of "
        f"{fit.micro}. The nearest takes about {format_bytes(ceil_mib(fit.process.value))} ({how}), of which "
        f"{format_bytes(ceil_mib(least.base_bytes))} are no tensors. Allow that much, or a smaller model."
    )
