"""Quality: what ``evaluate`` says after so much training, and the weights that the training starts from."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from line_task import Line, floats, line, training_of
from torch import nn

from autotune.errors import TaskError
from autotune.measure.checks.quality import evaluate, measure_quality
from autotune.measure.measurement import QualityOptions
from autotune.task_file import load_task
from autotune.training.apply_plan import build_model


def weight(model: nn.Module) -> float:
    return model.weight.item()


def test_quality_is_evaluated_after_a_quarter_of_the_samples_and_after_all():
    """Samples 0 to 15 one by one, SGD at a rate that falls from 1 by a sixteenth at each step: the weight, 1 at first,
    falls by n (1 - n / 16) at sample n. After four of sixteen it is 1 - (6 - 14 / 16), in the end 1 - (120 - 77.5)."""
    task = line(floats(16), batch_size=1, evaluate=weight)
    found = measure_quality(training_of(task), task, QualityOptions(num_samples=16))
    assert (found.early, found.value, found.error, found.is_whole) == (-4.125, -41.5, 0.0, True)


def test_what_a_quarter_rules_out_trains_no_further():
    """The weight after four samples is -4.125."""
    task = line(floats(16), batch_size=1, evaluate=weight)
    found = measure_quality(training_of(task), task, QualityOptions(num_samples=16, least_early=-4.0))
    assert (found.value, found.is_whole) == (-4.125, False)
    kept = measure_quality(training_of(task), task, QualityOptions(num_samples=16, least_early=-5.0))
    assert kept.is_whole


def test_the_learning_rate_of_recovery_is_a_share_of_the_tasks():
    """A quarter of it: the weight falls by a quarter of what it did, 1 - 42.5 / 4."""
    task = line(floats(16), batch_size=1, evaluate=weight)
    found = measure_quality(training_of(task), task, QualityOptions(num_samples=16, lr_factor=0.25))
    assert found.value == 1 - 42.5 / 4


def test_the_statistics_of_batch_norm_are_measured_anew_before_recovery():
    """They are of another model, far off; the mean of samples 0 to 3 is 1.5. Four optimizer steps at a momentum of a
    tenth would leave two thirds of what they were."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.BatchNorm1d(1), nn.Parameter(torch.ones(()))
            self.norm.running_mean.fill_(1000.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * self.norm(x[:, None])

    task = line(floats(4), batch_size=4, evaluate=lambda model: model.norm.running_mean.item())
    task = dataclasses.replace(task, build_model=Normed)
    found = measure_quality(training_of(task), task, QualityOptions(num_samples=16))
    assert found.value == pytest.approx(1.5)


def test_a_standard_error_is_taken_as_it_is_told():
    assert evaluate(line(floats(2), evaluate=lambda model: (0.5, 0.01)), Line()) == (0.5, 0.01)


def test_modes_and_random_numbers_stay():
    """What evaluate sets and draws is put back."""

    def judge(model: nn.Module) -> float:
        model.eval()
        return torch.rand(()).item()

    model = Line().train()
    torch.manual_seed(3)
    evaluate(line(floats(2), evaluate=judge), model)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(()))
    assert model.training


def _changes(model: nn.Module) -> float:
    model.weight.data += 1
    return 0.0


def _raises(model: nn.Module) -> float:
    raise KeyError("label")


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (lambda model: math.nan, r"returned nan\. Wanted: a finite number"),
        (lambda model: torch.ones(()), r"returned Tensor\. Wanted: a number, or .* Use \.item\(\)\."),
        (lambda model: (1.0, 2.0, 3.0), r"returned a tuple of 3\. Wanted: a number"),
        (lambda model: (1.0, -0.1), "its standard error at least 0"),
        (lambda model: None, r"returned NoneType\. Wanted: a number"),
        (lambda model: True, r"returned bool\. Wanted: a number"),
        (_changes, r"changed the model: weight\. A BatchNorm in train mode does: call model\.eval\(\) first"),
        (_raises, r"evaluate\(model\) raised KeyError: 'label'\."),
        (None, r"evaluate is missing\. Wanted: def evaluate\(model\) -> float"),
    ],
)
def test_what_is_no_quality_is_refused_in_words(judge, said):
    with pytest.raises(TaskError, match=said):
        evaluate(line(floats(2), evaluate=judge), Line())


def test_a_batch_norm_that_is_evaluated_in_train_mode_is_found():
    """Its statistics move."""
    task = line(floats(2), evaluate=lambda model: model(torch.randn(4, 2)).mean().item())
    with pytest.raises(TaskError, match="changed the model: running_mean and 2 more"):
        evaluate(task, nn.BatchNorm1d(2).train())


def test_weights_are_loaded_beside_the_tasks_file_and_by_a_function(tmp_path):
    """A file relative to the task's; the model is built, then they are loaded."""
    torch.save({"weight": torch.tensor(7.0)}, tmp_path / "trained.pt")
    (tmp_path / "from_file.py").write_text(
        "from line_task import Line, floats, mean_loss\n"
        "build_model, compute_loss = Line, mean_loss\n"
        "weights = 'trained.pt'\n"
        "def build_dataset(): return floats(4)\n"
    )
    assert weight(build_model(load_task(str(tmp_path / "from_file.py")))) == 7.0
    assert weight(build_model(line(floats(2), weights=lambda: {"weight": torch.tensor(5.0)}))) == 5.0


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "they are another model's: weight is missing"),
        ({"weight": torch.ones(2)}, r"weight is \(2,\), but the model's is \(\)"),
        ({"weight": torch.ones(()), "bias": torch.ones(())}, "bias is not in the model"),
        ({"model": {}}, "a state dict .* was wanted, but got a mapping whose 'model' is dict"),
        (None, "but got NoneType"),
    ],
)
def test_weights_of_another_model_are_refused(state, said):
    with pytest.raises(TaskError, match=said):
        build_model(line(floats(2), weights=lambda: state))


def test_a_file_that_is_missing_or_none_is_said(tmp_path):
    with pytest.raises(TaskError, match=r"no-such\.pt: no such file\. Name one that torch\.save"):
        build_model(line(floats(2), weights=tmp_path / "no-such.pt"))
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(TaskError, match=r"text\.pt: cannot be read as a state dict"):
        build_model(line(floats(2), weights=tmp_path / "text.pt"))
    with pytest.raises(TaskError, match="weights must be the path of a state dict's file"):
        line(floats(2), weights=3)
