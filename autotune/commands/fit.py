"""``autotune fit``: a plan for the job's own batch that is predicted to fit a budget, and was not measured."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import NothingFits, PlanError, SpaceError, TaskError, UserError
from ..estimates import Cheapest, CheapestOptions, untried
from ..files import check_output
from ..fitting.choices import combinations_of, nearest_miss
from ..fitting.fitted import foreseen, left_out
from ..plan import Budget, Plan, TaskRef
from ..report.estimate import line
from ..report.printing import print_json, print_words, tell
from ..report.show import as_json, summary
from ..results import WhatToEstimate
from ..script.changes import Changes
from ..searches.requests import failure, reference_settings
from ..searches.time_budget import TimeBudget
from ..task_file import refuse_script, task_file
from ..techniques import Facts, Settings
from ..techniques.batch import Batch
from ..workers import Chosen, Executor, Failed
from .calibrate import predict_request
from .estimate import inspected_on, options_of, read_task
from .where import Where, trials


def fit(what: WhatToEstimate, output: Path, json: bool, verbose: bool) -> None:
    """Write a plan that is predicted to fit, and print it.

    Args:
        what: the task or script, and the device that is planned for.
        output: where the plan goes.
        json: print the plan as one JSON document.
        verbose: show what the job prints.

    Raises:
        PlanError: the plan cannot be written.
        UserError: as :func:`fit_job`.
    """
    is_script = what.command is not None
    if not is_script:
        refuse_script(what.task, "fit")
    check_output(output, {"the script" if is_script else "the task": task_file(what.task)}, PlanError)
    tell(f"running the script to its first steps: {what.task}" if is_script else f"reading the task: {what.task}")
    changes = Changes(Path.cwd(), output) if is_script else None
    where = Where("local", is_script=is_script, verbose=verbose)
    with trials(where, what.task, inspected_on(what)) as executor:
        plan = fit_job(what, executor, output)
    plan.save(output)
    if changes is not None and (said := changes.told()):
        tell(said)
    if json:
        print_json({"path": str(output), **as_json(plan)})
    else:
        print_words(sys.stdout, summary(plan, output))


def fit_job(what: WhatToEstimate, executor: Executor, output: Path) -> Plan:
    """Choose for the job's own batch: for a task in a process of its own, for a script in the script's.

    Args:
        what: the task or script, and the device that is planned for.
        executor: runs the children; stays the caller's to close.
        output: where the plan goes.

    Returns:
        The plan, with what is predicted of it.

    Raises:
        NothingFits: no choice does; with the smallest budget that one fits, and what binds.
        TaskError: the job cannot be run, or its step not be traced.
        SpaceError: an unknown technique, or one that is not fit's to change, or the script's to have.
    """
    time_budget = TimeBudget(0.0, None)
    facts = read_task(what, executor, time_budget)
    _check_is_one(what, facts)
    tell(line(facts))
    if what.is_here and (unsure := untried(facts.torch_version)):
        tell(f"note: {unsure}")
    budget = Budget(limit=what.limit_bytes or facts.device.memory_bytes, device=what.device)
    assert budget.limit is not None, "set above"
    own = reference_settings(facts)
    batch = own.batch or Batch.reference(facts)
    found = combinations_of(what.techniques, facts, may_free=what.command is None, batch=batch)
    combinations, choices = found if what.command is None else (tuple(_in_script(each, facts)) for each in found)
    asked = options_of(facts, int(budget.limit / budget.factor)).model_dump(exclude={"settings", "choose_blocks"})
    options = CheapestOptions(**asked, is_here=what.device == "cpu", combinations=combinations, choices=choices)
    outcome = executor.ask(predict_request("fit", what, time_budget, options))
    if not isinstance(outcome, Chosen):
        if isinstance(outcome, Failed) and not outcome.traceback:
            raise TaskError(outcome.message)
        raise TaskError(f"{what.task}: nothing can be predicted: {failure(outcome)}")
    chosen = outcome.found
    if chosen.chosen is None:
        raise NothingFits(f"{what.task}: {nearest_miss(chosen, options, budget, facts)}")
    settings = chosen.chosen.settings.having(batch) if own.batch or what.command is None else chosen.chosen.settings
    return Plan(
        task=TaskRef(source=what.task, fingerprint=facts.fingerprint, identity=facts.identity),
        budget=budget,
        settings=settings.in_force(facts.precision),
        exactness={one.name: one.exactness(facts) for one in chosen.chosen.settings.chosen()},
        notes=(*_notes(what, output, chosen, facts), *outcome.notes),
        predicted=foreseen(chosen),
    )


def _check_is_one(what: WhatToEstimate, facts: Facts) -> None:
    """Raises:
    UserError: the script trains in several processes.
    SpaceError: a technique is asked for that the script cannot have.
    """
    if facts.ranks > 1:
        raise UserError(
            f"{what.task}: the step of one process is traced, but the script trains in {facts.ranks}. Call "
            "`autotune.fit` in it, in each of them; or measure it: `autotune search`."
        )
    for name in what.techniques or ():
        if what.command is not None and name in facts.left_out:
            raise SpaceError(f"fit: techniques: {name} is not for this script: {facts.left_out[name]}. Leave it out.")


def _in_script(every: Iterable[Settings], facts: Facts) -> Iterator[Settings]:
    """Those that can be put on an unedited script."""
    for settings in every:
        if all(one.name not in facts.left_out and one.beyond_script() is None for one in settings.chosen()):
            yield settings


def _notes(what: WhatToEstimate, output: Path, found: Cheapest, facts: Facts) -> Iterator[str]:
    """What a reader must know."""
    yield "predicted, and not measured: `autotune verify` measures it, `autotune search --start` goes on from it"
    if what.command is not None:
        yield f"start the job by `autotune run {output} -- {shlex.join(what.command)}`"
    yield from left_out(found, facts)
    if found.how == "probed":
        at = "at small batches" if what.command is None else "of a copy of the model, at the script's own batch"
        yield f"by real steps {at}: {found.reason}"
    if what.command is not None and facts.batch_varies:
        yield "the script's batches vary: what is predicted is of the largest in its first steps"
    if facts.effective_batch_assumed:
        yield f"the task states no batch_size: {facts.effective_batch} is assumed"
