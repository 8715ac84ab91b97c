"""``autotune fit``: a plan for the job's own batch that is predicted to fit a budget, and was not measured."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import NothingFits, PlanError, TaskError
from ..estimates import Cheapest, CheapestOptions, untried
from ..files import check_output
from ..fitting.choices import combinations_of, nearest_miss
from ..fitting.fitted import foreseen, left_out
from ..plan import Budget, Plan, TaskRef
from ..report.estimate import line
from ..report.printing import print_json, print_words, tell
from ..report.show import as_json, summary
from ..results import WhatToEstimate
from ..searches.requests import failure
from ..searches.time_budget import TimeBudget
from ..task_file import task_file
from ..techniques import Facts
from ..techniques.batch import Batch
from ..workers import Chosen, Executor, Failed
from .calibrate import predict_request
from .estimate import inspected_on, options_of, read_task
from .where import Where, trials


def fit(what: WhatToEstimate, output: Path, json: bool, verbose: bool) -> None:
    """Write a plan that is predicted to fit, and print it.

    Args:
        what: the task, and the device that is planned for.
        output: where the plan goes.
        json: print the plan as one JSON document.
        verbose: show what the task prints.

    Raises:
        PlanError: the plan cannot be written.
        UserError: as :func:`fit_task`.
    """
    check_output(output, {"the task": task_file(what.task)}, PlanError)
    tell(f"reading the task: {what.task}")
    with trials(Where("local", verbose=verbose), what.task, inspected_on(what)) as executor:
        plan = fit_task(what, executor)
    plan.save(output)
    if json:
        print_json({"path": str(output), **as_json(plan)})
    else:
        print_words(sys.stdout, summary(plan, output))


def fit_task(what: WhatToEstimate, executor: Executor) -> Plan:
    """Choose for the job's own batch, in a process of its own.

    Args:
        what: the task, and the device that is planned for.
        executor: runs the children on a CPU; stays the caller's to close.

    Returns:
        The plan, with what is predicted of it.

    Raises:
        NothingFits: no choice does; with the smallest budget that one fits, and what binds.
        TaskError: the task cannot be loaded, or its step raises.
    """
    time_budget = TimeBudget(0.0, None)
    facts = read_task(what, executor, time_budget)
    tell(line(facts))
    if what.is_here and (unsure := untried(facts.torch_version)):
        tell(f"note: {unsure}")
    budget = Budget(limit=what.limit_bytes or facts.device.memory_bytes, device=what.device)
    assert budget.limit is not None, "set above"
    batch = Batch.reference(facts)
    combinations, choices = combinations_of(None, facts, may_free=True, batch=batch)
    asked = options_of(facts, int(budget.limit / budget.factor)).model_dump(exclude={"settings", "choose_blocks"})
    options = CheapestOptions(**asked, is_here=what.device == "cpu", combinations=combinations, choices=choices)
    outcome = executor.ask(predict_request("fit", what, time_budget, options))
    if not isinstance(outcome, Chosen):
        if isinstance(outcome, Failed) and not outcome.traceback:
            raise TaskError(outcome.message)
        raise TaskError(f"{what.task}: nothing can be predicted: {failure(outcome)}")
    found = outcome.found
    if found.chosen is None:
        raise NothingFits(f"{what.task}: {nearest_miss(found, options, budget, facts)}")
    return Plan(
        task=TaskRef(source=what.task, fingerprint=facts.fingerprint, identity=facts.identity),
        budget=budget,
        settings=found.chosen.settings.having(batch).in_force(facts.precision),
        exactness={one.name: one.exactness(facts) for one in found.chosen.settings.chosen()},
        notes=tuple(_notes(found, facts)),
        predicted=foreseen(found),
    )


def _notes(found: Cheapest, facts: Facts) -> list[str]:
    """What a reader must know."""
    notes = ["predicted, and not measured: `autotune verify` measures it, `autotune search --start` goes on from it"]
    notes += left_out(found, facts)
    if found.how == "probed":
        notes.append(f"by real steps at small batches: {found.reason}")
    if facts.effective_batch_assumed:
        notes.append(f"the task states no batch_size: {facts.effective_batch} is assumed")
    return notes
