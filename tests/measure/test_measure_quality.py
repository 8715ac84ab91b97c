"""Quality: what ``evaluate`` says after so much training, and the weights that the training starts from."""

from __future__ import annotations

import dataclasses
import math
import statistics
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from line_task import Line, floats, line, training_of
from torch import nn

from autotune.errors import TaskError
from autotune.measure.checks.blind import check_sees
from autotune.measure.checks.quality import evaluate, measure_quality
from autotune.measure.checks.scores import Judged, judged_by, unpack
from autotune.measure.measurement import Quality, QualityOptions
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
    assert evaluate(line(floats(2), evaluate=lambda model: (0.5, 0.01)), Line())[:2] == (0.5, 0.01)


@pytest.mark.parametrize("said", [7, Fraction(1, 2), numpy.float32(0.5), numpy.float64(-2.0), -3.5, 1e300])
def test_any_real_number_is_a_quality(said):
    assert evaluate(line(floats(2), evaluate=lambda model: said), Line()) == Judged(float(said))


def test_an_evaluation_may_ask_for_gradients():
    """Of what the model returns, by its input: the weight. The model has none afterwards."""
    assert evaluate(line(floats(2), evaluate=_slope), Line()).value == 1.0


@pytest.mark.parametrize(
    "said",
    [
        [1, 0, 1, 1],
        torch.tensor([1.0, 0.0, 1.0, 1.0]),
        torch.tensor([True, False, True, True]),
        numpy.array([1.0, 0.0, 1.0, 1.0], dtype="float32"),
        [torch.tensor(1), torch.tensor(False), numpy.bool_(True), 1.0],
    ],
)
def test_scores_of_examples_are_their_mean_and_its_standard_error(said):
    """Three of four are right: the mean is 0.75, and the sum of squares about it 3 / 4, over 4 * 3."""
    found = evaluate(line(floats(2), evaluate=lambda model: said), Line())
    assert (found.value, found.error, found.num_examples) == (0.75, pytest.approx(0.25), 4)
    assert unpack(found.scores).tolist() == [0.25, -0.75, 0.25, 0.25]


@pytest.mark.parametrize(("num_examples", "num_characters"), [(10_000, 3_000), (100_000, 20_000)])
def test_scores_of_many_examples_are_kept_small(num_examples, num_characters):
    """One in forty is wrong. Of more than are kept, the means of groups have the same standard error of their mean,
    within what is drawn by chance."""
    scores = [float(index % 40 > 0) for index in range(num_examples)]
    found = judged_by(scores)
    assert len(found.scores) < num_characters
    kept = unpack(found.scores)
    assert (found.value, found.error) == (0.975, pytest.approx((0.975 * 0.025 / num_examples) ** 0.5, rel=1e-4))
    assert statistics.stdev(kept) / len(kept) ** 0.5 == pytest.approx(found.error, rel=0.05)
    assert statistics.fmean(kept) == pytest.approx(0.0, abs=1e-4)


def test_a_quality_has_the_scores_of_its_examples_and_does_not_print_them():
    """The study keeps them as text; a line that shows a quality has no use for them."""
    task = line(floats(16), batch_size=1, evaluate=lambda model: [model.weight.item(), 0.0])
    found = measure_quality(training_of(task), task, QualityOptions(num_samples=16))
    assert (found.early, found.value, found.num_examples) == (-4.125 / 2, -41.5 / 2, 2)
    assert unpack(found.scores).tolist() == [-41.5 / 2, 41.5 / 2]
    assert found.scores not in repr(found)
    assert Quality.model_validate_json(found.model_dump_json()) == found


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


def _wants_gradients(model: nn.Module) -> float:
    model(torch.ones(())).backward()
    return 0.0


@torch.enable_grad()
def _leaves_gradients(model: nn.Module) -> float:
    model(torch.ones(())).backward()
    return 0.0


@torch.enable_grad()
def _slope(model: nn.Module) -> float:
    x = torch.ones((), requires_grad=True)
    (found,) = torch.autograd.grad(model(x), x)
    return found.item()


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (lambda model: math.nan, r"returned nan\. Wanted: a finite number"),
        (lambda model: torch.ones(()), r"returned Tensor\. Wanted: a finite number, or .* Use \.item\(\)\."),
        (lambda model: (1.0, 2.0, 3.0), r"returned a tuple of 3\. Wanted: a finite number"),
        (lambda model: (1.0, -0.1), "its standard error at least 0"),
        (lambda model: None, r"returned None\. Wanted: a finite number"),
        (lambda model: "0.9", r"returned str\. Wanted: a finite number"),
        (lambda model: {"accuracy": 0.9}, r"returned dict\. Wanted: a finite number"),
        (lambda model: Decimal("0.9"), r"returned Decimal\. Wanted: a finite number"),
        (lambda model: math.inf, "returned infinity, or beyond the largest float"),
        (lambda model: (math.inf, 0.1), "but its number is infinity"),
        (lambda model: True, r"returned bool\. Wanted: a finite number"),
        (lambda model: (0.5, None), r"\(number, standard error\), but its standard error is None"),
        (lambda model: (0.5, math.nan), "but its standard error is nan"),
        (lambda model: 10**400, "returned infinity, or beyond the largest float"),
        (lambda model: (-(10**400), 0.1), "but its number is -infinity, or beyond"),
        (lambda model: [0.5, math.nan, 1.0, math.inf], "that at index 1 is nan, and 1 more are no finite numbers"),
        (lambda model: [0.5, None], "that at index 1 is None"),
        (lambda model: ["right", 1.0], "that at index 0 is str"),
        (lambda model: [1.0, 10**400], "that at index 1 is infinity, or beyond"),
        (lambda model: torch.ones(2, 3), r"returned Tensor of shape \(2, 3\)"),
        (lambda model: [], "scores of 0 examples, too few to tell their error"),
        (lambda model: torch.ones(1), "scores of 1 examples, too few"),
        (lambda model: [-2e38, 4e38, 1e300], r"more than 3e\+38 apart"),
        (_changes, r"changed the model: weight\. A BatchNorm in train mode does: call model\.eval\(\) first"),
        (_raises, r"evaluate\(model\) raised KeyError: 'label'\."),
        (
            _wants_gradients,
            r"have a grad_fn\. It is called without gradients .*: put what needs them under `with torch\.en",
        ),
        (
            _leaves_gradients,
            r"left gradients in the model: weight\.grad\. The job's next step would add to them: call mod",
        ),
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


OTHER = Line()
"""A model of the file's own."""
LOOKS = QualityOptions(num_samples=16, looks=True)


def below() -> nn.Module:
    """Whose weights are all -1."""
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, -1.0)
    return model


def looked_at(judge: Any) -> Quality:
    task = dataclasses.replace(line(floats(16), batch_size=1, evaluate=judge), build_model=below)
    task = dataclasses.replace(task, compute_loss=lambda model, x: model(x[:, None].expand(-1, 4) / 100).mean())
    return measure_quality(training_of(task), task, LOOKS)


@pytest.mark.parametrize(
    "judge",
    [
        lambda model: OTHER.weight.item(),
        lambda model: [OTHER.weight.item(), 0.5],
        lambda model: OTHER.weight.item() + torch.rand(()).item(),
    ],
)
def test_an_evaluation_that_does_not_see_the_model_is_refused(judge):
    """It judges another, of all examples at once or of each; or draws random numbers meanwhile."""
    with pytest.raises(TaskError, match="it does not see the model that it is given"):
        looked_at(judge)


def test_an_evaluation_that_sees_the_model_is_not_refused():
    """Though recovery changed nothing of what it says: all are right. Turned upside down, none is."""
    assert looked_at(lambda model: float(model.weight.sum() < 0)).noise == 0.0


def test_a_model_that_is_looked_at_has_its_weights_back():
    """The bits are those of before, whatever the damage."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(5, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    with pytest.raises(TaskError, match="does not see"):
        check_sees(model, lambda: seen.append(model[1].weight.clone()) or Judged(1.0), "evaluate")
    assert len(seen) == 3
    assert not any(torch.equal(one, seen[0]) for one in seen[1:])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_an_evaluation_draws_shows():
    """Twice, with two seeds of torch."""

    def judge(model: nn.Module) -> float:
        return model.weight.sum().item() + torch.rand(()).item()

    drawn = [torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in (1, 2)]
    assert looked_at(judge).noise == pytest.approx(abs(drawn[0] - drawn[1]), abs=1e-5)
