"""Learning rates of a recovery: the job's own schedule where it has one, else a fall to 0; and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from line_task import floats, line, training_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from autotune.errors import TaskError
from autotune.measure.checks.quality import measure_quality
from autotune.measure.measurement import Quality, QualityOptions
from autotune.task import Task
from autotune.techniques.precision import Precision


def weight(model: nn.Module) -> float:
    return model.weight.item()


def recovered(task: Task, num_samples: int, lr_factor: float = 1.0, **settings: Any) -> Quality:
    return measure_quality(
        training_of(task, **settings), task, QualityOptions(num_samples=num_samples, lr_factor=lr_factor)
    )


def stepping(change: Any) -> Task:
    """Samples 0, 1, 2, … one by one, and an ``after_step`` that changes the learning rate of 1."""
    made: list[Any] = []

    def build(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=1.0))
        made.append(change(made[0]))
        return made[0]

    return line(floats(16), batch_size=1, evaluate=weight, build_optimizer=build, after_step=lambda model: made[1]())


def halving(optimizer: torch.optim.Optimizer) -> Any:
    def halve() -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2

    return halve


@pytest.mark.parametrize(("lr_factor", "value"), [(1.0, -5.0), (0.5, -2.0)])
def test_recovery_goes_by_the_tasks_schedule(lr_factor, value):
    """A rate of 1 for samples 0 to 3, then of 0: 1 - 6, or half of it."""
    asked = []

    def build_scheduler(optimizer, num_steps):
        asked.append(num_steps)
        return LambdaLR(optimizer, lambda step: float(step < 4))

    found = recovered(line(floats(16), batch_size=1, evaluate=weight, build_scheduler=build_scheduler), 16, lr_factor)
    assert found.value == value
    assert asked == [16]


@pytest.mark.parametrize(("lr_factor", "value"), [(1.0, 1 - 1.375), (0.5, 1 - 1.375 / 2)])
def test_recovery_goes_by_what_after_step_does_to_the_rates(lr_factor, value):
    """1, a half, a quarter and an eighth, for samples 0 to 3: 0.5 + 0.5 + 0.375."""
    found = recovered(stepping(halving), 4, lr_factor)
    assert found.value == value
    assert found.recovered.startswith("4 steps, learning rate by the job's own schedule")


def test_an_after_step_that_leaves_the_rates_alone_is_no_schedule():
    """A weight average, say: as without it."""
    found = recovered(line(floats(16), batch_size=1, evaluate=weight, after_step=lambda model: None), 16)
    assert (found.value, found.recovered) == (-41.5, "16 steps, learning rate falling to 0")


def test_a_schedule_by_epochs_is_part_of_the_fall():
    """A tenth from the third step on, of a fall over four: 1, 0.75, 0.05 and 0.025 for samples 0 to 3."""
    found = recovered(stepping(lambda optimizer: StepLR(optimizer, 2).step), 4)
    assert found.value == pytest.approx(1 - 0.75 - 0.1 - 0.075)
    assert found.recovered == "4 steps, learning rate falling to 0"


def test_a_schedule_ends_before_an_epochs_short_batch_makes_a_step_too_many():
    """Steps of two, two and one samples: six for ten samples, of which five were to be expected. One more would be an
    error of torch's."""

    def build_scheduler(optimizer, num_steps):
        return OneCycleLR(optimizer, 1.0, total_steps=num_steps, cycle_momentum=False)

    found = recovered(line(floats(5), batch_size=2, evaluate=weight, build_scheduler=build_scheduler), 10)
    assert found.recovered == "6 steps, learning rate by the job's own schedule"


def test_a_step_that_a_loss_scaler_skips_is_none_of_the_schedule():
    """Its gradient is infinite once it is scaled. The next has the rate of the first, 1; the others have 0."""
    samples = [torch.tensor(1e35), *floats(4)[1:]]
    task = line(
        samples,
        batch_size=1,
        evaluate=weight,
        build_scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: float(step < 1)),
    )
    assert recovered(task, 4, precision=Precision(kind="fp16")).value == 0.0


@pytest.mark.parametrize(
    ("pieces", "lr_factor", "said"),
    [
        ({}, 1.0, "1 step, learning rate falling to 0"),
        ({}, 0.3, "1 step, learning rate falling from 0.3 times the job's to 0"),
        ({"build_scheduler": lambda optimizer, num_steps: None}, 1.0, "1 step, learning rate falling to 0"),
        (
            {"build_scheduler": lambda optimizer, num_steps: StepLR(optimizer, 2)},
            0.3,
            "1 step, learning rate by the job's own schedule times 0.3",
        ),
    ],
)
def test_how_a_model_recovered_is_said(pieces, lr_factor, said):
    assert recovered(line(floats(1), batch_size=1, evaluate=weight, **pieces), 1, lr_factor).recovered == said


@pytest.mark.parametrize("made", [lambda optimizer: optimizer, ReduceLROnPlateau])
def test_what_is_no_schedule_is_refused(made):
    task = line(floats(1), evaluate=weight, build_scheduler=lambda optimizer, num_steps: made(optimizer))
    with pytest.raises(TaskError, match=r"build_scheduler returned \w+\. Wanted: def build_scheduler\(optimizer, num_"):
        recovered(task, 1)
