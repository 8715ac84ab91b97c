"""An evaluation in two processes that wait for each other in each of its calls: both stop at the same one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import run_as_two
from torch import nn

import autotune
from autotune.errors import TaskError
from autotune.measure.evaluation import measure_evaluations
from autotune.measure.measurement import EvaluationOptions, MeasureOptions
from autotune.measure.memory import Charge
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel

SLOW_S, MOST_S = 5.0, 0.5
"""One process is late with its third call, and only then beyond the time that an evaluation has, which is eight times
``MOST_S`` where fewer than eight batches do not tell whether something piles up. The clocks stand still but for that:
nothing else takes time."""


CASES = {"first": ("fsdp", 0, False), "second": ("fsdp", 1, False), "averages": ("ddp", 0, True)}
"""How they wait for each other, who is late, and whether each call's result is averaged."""


def task_of(evaluate: Any) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        build_dataset=lambda: list(torch.ones(16, 4)),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=8,
        evaluate=evaluate,
    )


def evaluated(kind: Any, late: int, averages: bool) -> list[Any]:
    """The calls that this process made, and whether that was all."""
    passed_s = 0.0

    def evaluate(model: nn.Module) -> float:
        nonlocal passed_s
        is_late = dist.get_rank() == late
        for number in range(50):
            passed_s += SLOW_S * (number == 2 and is_late)
            said = model(torch.ones(2, 4)).mean()
            if averages:
                dist.all_reduce(said)
            passed_s += SLOW_S * (number == 2 and not is_late)  # it has waited there
        return 0.0

    task = task_of(evaluate)
    training = autotune.apply(plan_of(kind), task)
    asked = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=MOST_S))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.measure.evaluation.perf_counter", lambda: passed_s)
        (found,) = measure_evaluations(training, task, asked, Charge(training.device))
    return [found.num_samples // 2, found.is_whole]


def plan_of(kind: Any) -> Plan:
    return Plan(settings=Settings(batch=Batch(micro=2, accumulate=4), parallel=Parallel(kind=kind, processes=2)))


def changed() -> str:
    def evaluate(model: nn.Module) -> float:
        for parameter in model.parameters():
            parameter.add_(1.0)
        return 0.0

    task = task_of(evaluate)
    training = autotune.apply(plan_of("fsdp"), task)
    asked = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=MOST_S))
    try:
        measure_evaluations(training, task, asked, Charge(training.device))
    except TaskError as error:
        return str(error)
    return ""


def found_by(rank: int) -> dict[str, Any]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = evaluated(*case)
    found["changed"] = changed()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "averages"])
def test_both_stop_one_call_after_the_first_has_seen_enough(pair, name):
    """It is late with its third, which it makes still."""
    assert [one[name] for one in pair] == [[3, False], [3, False]]


@pytest.mark.slow
def test_both_go_on_until_the_first_has_seen_enough(pair):
    """The second is late with its third; the first waits for it there, and says at its fourth that this is the last."""
    assert [one["second"] for one in pair] == [[4, False], [4, False]]


@pytest.mark.slow
def test_a_sharded_model_that_is_changed_is_the_users_error(pair):
    assert all("evaluate(model) changed the model: 0.weight and" in one["changed"] for one in pair)


if __name__ == "__main__":
    run_as_two(found_by)
