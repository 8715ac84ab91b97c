"""``autotune estimate``: for each combination of techniques the largest micro-batch that fits, without a device."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ..errors import NothingFits, TaskError, UserError
from ..estimates import EstimateOptions
from ..estimates.cards import find_cards, on_device
from ..report.estimate import WIDTH, as_json, explain, line
from ..report.printing import print_json, print_words, tell
from ..results import Combination, Estimation, WhatToEstimate
from ..search_spaces import load_space
from ..searches.options import ANY_DROP, SearchOptions
from ..searches.requests import failure, inspect, largest_of
from ..searches.time_budget import TimeBudget
from ..techniques import TECHNIQUES, Device, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..techniques.precision import refused
from ..units import ceil_mib, format_bytes
from ..workers import Estimated, Executor, Failed, Outcome
from .calibrate import Uncalibrated, calibrate, predict_request
from .where import Where, default_device, trials

_MOST_MICRO = 2**16


def estimate(what: WhatToEstimate, json: bool, verbose: bool) -> None:
    """Estimate a task's memory, and print the largest micro-batches.

    Args:
        what: the task, and the device that is planned for.
        json: print one JSON document.
        verbose: show what the task prints.

    Raises:
        UserError: as :func:`estimate_task`.
    """
    tell(f"reading the task: {what.task}")
    told: list[Facts] = []

    def observe(event: Facts | Combination) -> None:
        tell(line(event, *told))
        told.extend([event] if isinstance(event, Facts) else [])

    with trials(Where("local", verbose=verbose), what.task, inspected_on(what)) as executor:
        found = estimate_task(what, executor, observe)
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found), WIDTH)


def what_to_estimate(
    task: str,
    device: Literal["cpu", "cuda"] | None = None,
    device_memory_bytes: int | None = None,
    card: str | None = None,
    **options: Any,
) -> WhatToEstimate:
    """What is asked for, once it is clear which device is planned for.

    Args:
        task: ``model.py`` or ``model.py:name``.
        device: its type; None is what the others say, and this machine's without them.
        device_memory_bytes: of a CUDA device, which need not be here.
        card: names of cards that need not be here, with commas between them, or ``all``.
        **options: other fields.

    Raises:
        UserError: a CUDA device's memory, or a card, for a CPU; both together; none for a CUDA device that is not here;
            an unknown card.
    """
    given = {"--device-memory": device_memory_bytes, "--card": card}
    said = [name for name, value in given.items() if value is not None]
    if len(said) > 1:
        raise UserError("--card has its own memory, and --device-memory is another card's. Leave one of them out.")
    if device == "cpu" and said:
        raise UserError(f"{said[0]} is of a CUDA device, but --device is cpu. Leave one of them out.")
    here = default_device()
    target: Literal["cpu", "cuda"] = device or ("cuda" if said else here)
    cards = find_cards(card) if card is not None else ()
    is_here = target == here == "cuda" and not said
    what = WhatToEstimate(
        task, device=target, device_memory_bytes=device_memory_bytes, cards=cards, is_here=is_here, **options
    )
    if target == "cuda" and not is_here and not cards and what.limit_bytes is None:
        raise UserError(
            "--device cuda: how much may be taken? Give --budget or --device-memory, such as 24GiB, or --card."
        )
    return what


def inspected_on(what: WhatToEstimate) -> Literal["cpu", "cuda"]:
    """The device type that the task is read on: that of this machine's own card, where that is planned for."""
    return "cuda" if what.is_here else "cpu"


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
    facts = read_task(what, executor, time_budget)
    observe(facts)
    limit_bytes = what.limit_bytes or facts.device.memory_bytes
    try:
        study, calibration, uncalibrated = *calibrate(what, facts, executor, time_budget), None
    except Uncalibrated as reason:
        study, calibration, uncalibrated = None, None, str(reason)
    asked = options_of(facts, limit_bytes).model_copy(update={"calibration": calibration})
    found: list[Combination] = []
    choices = space.choices(facts)
    may_choose = any(choice != Checkpointing() for choice in choices.get(Checkpointing.name, ()))
    for settings in _combinations(choices, facts):
        wanted = asked.model_copy(update={"settings": settings, "choose_blocks": may_choose and not found})
        request = predict_request(f"estimate-{len(found) + 1}", what, time_budget, wanted)
        one = Combination(settings, executor.ask(request))
        if not found:
            estimated(one.outcome, what)
        found.append(one)
        observe(one)
    estimation = Estimation(what, facts, limit_bytes, tuple(found), calibration, study, uncalibrated or None)
    if not any(one.micro for one in found):
        raise NothingFits(_nearest_miss(estimation))
    return estimation


def read_task(what: WhatToEstimate, executor: Executor, time_budget: TimeBudget) -> Facts:
    """The task's facts on the device that is planned for; the first card of several.

    Raises:
        TaskError: it cannot be loaded, or states a precision that this machine does not have.
    """
    options = SearchOptions(
        task=what.task,
        command=what.command,
        scratch=what.scratch,
        device=inspected_on(what),
        effective_batch=what.effective_batch,
        max_quality_drop=ANY_DROP,
    )
    facts = inspect(options, executor, time_budget, runs_model=False)
    if what.device == "cpu" and (reason := refused(facts.precision, facts.device)) is not None:
        raise TaskError(f"{what.task}: {reason}")
    if what.device == "cpu" or what.is_here:
        return facts
    if what.cards:
        own = {} if len(what.cards) == 1 else {"name": f"{len(what.cards)} cards"}
        return facts.model_copy(update={"device": what.cards[0].device.model_copy(update=own)})
    size = what.device_memory_bytes or what.limit_bytes or 0
    name = f"a CUDA device of {format_bytes(size)}"
    return facts.model_copy(update={"device": Device(type="cuda", name=name, memory_bytes=size, bf16=True)})


def options_of(facts: Facts, limit_bytes: int) -> EstimateOptions:
    """What is asked of the job as it stands."""
    return EstimateOptions(
        **on_device(facts.device, bool(facts.conv_dims), facts.tries_kernels),
        limit_bytes=limit_bytes,
        reference_batch=facts.effective_batch,
        reference_micro=facts.micro_batch,
        is_held=facts.effective_batch_held,
        most=max(facts.effective_batch, min(facts.dataset_length or _MOST_MICRO, _MOST_MICRO)),
        largest_of=largest_of(facts),
    )


def _combinations(choices: dict[str, tuple[Technique, ...]], facts: Facts) -> Iterator[Settings]:
    """The job as it stands, then each technique alone, then together: of those that change a step's tensors, since the
    others move a peak little, or not at all. What changes the function, and is not in the space, is looked at alone, at
    its mildest: it shows what ``--max-quality-drop`` would free."""
    techniques = (technique for technique in TECHNIQUES.values() if "tensors" in technique.affects)
    rows = [
        tuple(dict.fromkeys(one.as_predicted(facts) for one in technique.extremes(choices.get(technique.name, ()))))
        for technique in techniques
    ]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*filter(None, rows)))
    own = {"batch": Batch.reference(facts)}
    goes = (one for one in together if one.in_force(facts.precision).model_copy(update=own).conflict() is None)
    lossy = (one.choices(facts)[1:2] for one in TECHNIQUES.values() if "function" in one.affects)
    alone = (Settings(**{one.name: one}) for row in lossy for one in row if one.name not in choices)
    yield from sorted(
        dict.fromkeys([Settings(), *goes, *alone]), key=lambda one: len(one.model_dump(exclude_defaults=True))
    )


def estimated(outcome: Outcome, what: WhatToEstimate) -> Estimated:
    """The job as it stands has to be known: a task that is wrong is wrong in every combination.

    Raises:
        TaskError: it is not.
    """
    if isinstance(outcome, Estimated):
        return outcome
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
