"""The memory model from real steps, for trainings that read values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.estimates.max_batch import estimate
from autotune.estimates.memory_model import MemoryModel, fit_memory_model
from autotune.estimates.tracing.real_step import PROBES, ProbedModel, fit_probed_model
from autotune.estimates.types import EstimateOptions
from autotune.measure.profiling.allocations import Allocation, Span, Trace
from autotune.plan import Plan
from autotune.task import Task
from autotune.testing.zoo import ZOO
from autotune.units import MIB

PLAN = Plan(budget={"device": "cpu"}, settings={})


class Reads(nn.Module):
    """Asks for a value, and goes one way or another by it."""

    def __init__(self, loops=False):
        super().__init__()
        self.loops = loops
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 1)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        if self.loops:
            return torch.stack([self.second(row) for row in y])
        return self.second(y) if x.abs().sum().item() > 0 else y


def task(**options):
    return Task(
        build_model=lambda: Reads(**options),
        build_dataset=lambda: list(torch.randn(5, 64)),
        compute_loss=lambda model, batch: model(batch).mean() * bool(batch.sum().item()),
        batch_size=8,
    )


def test_real_steps_that_correspond_give_the_memory_model_of_the_same_model_without_the_question():
    """tanh's output, the batch and the gradients grow: by each allocation, as if it had been traced."""
    memory_model = fit_probed_model(PLAN, task())
    assert isinstance(memory_model, MemoryModel)
    plain = Task(
        build_model=lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)),
        build_dataset=lambda: list(torch.randn(5, 64)),
        compute_loss=lambda model, batch: model(batch).mean(),
        batch_size=8,
    )
    assert memory_model.peak_bytes(500) == pytest.approx(fit_memory_model(PLAN, plain).peak_bytes(500), rel=0.001)


def test_steps_that_do_not_correspond_are_extended_by_their_peaks():
    memory_model = fit_probed_model(PLAN, task(loops=True))
    assert isinstance(memory_model, ProbedModel)
    assert [step.peak_bytes() for step in memory_model.steps] == [memory_model.peak_bytes(batch) for batch in PROBES]
    assert memory_model.interval(100).low < memory_model.peak_bytes(100) < memory_model.interval(100).high


def step(fixed, grows):
    """A forward whose peak grows, and an optimizer's step that takes the same at each batch."""
    made = (
        Allocation(0, grows, 1, 2, "a", "forward", "activation"),
        Allocation(1, fixed, 3, 4, "a", "optimizer", "temporary"),
    )
    return Trace(made, (Span("forward", 0), Span("optimizer", 2)), 5)


def test_the_peak_moves_from_the_optimizer_to_the_activations():
    """100 in the optimizer; 10 a sample in forward: 200 at a batch of 20, though all probes say 100."""
    memory_model = ProbedModel(PROBES, tuple(step(100, 10 * batch) for batch in PROBES))
    assert [memory_model.peak_bytes(batch) for batch in (2, 6, 10, 20)] == [100, 100, 100, 200]


def test_an_estimate_says_that_it_was_probed_and_why():
    found = estimate(task(), EstimateOptions(limit_bytes=8 * 2**30, most=100))
    assert found.how == "probed"
    assert "_local_scalar_dense" in found.reason
    assert found.largest.micro == 100


def test_steps_that_are_real_have_real_values():
    """A model whose values were never drawn would not get so far."""

    class Checks(nn.Linear):
        def forward(self, x):
            if not 0.01 < self.weight.std().item() < 1:
                raise ValueError("undrawn")
            return super().forward(x)

    checks = Task(
        build_model=lambda: Checks(512, 512),
        build_dataset=lambda: [torch.ones(512)] * 8,
        compute_loss=lambda model, batch: model(batch).sum(),
    )
    assert estimate(checks, EstimateOptions()).how == "probed"


def test_what_the_users_code_raises_is_raised():
    """Tracing fails, and so does the step itself."""

    def loss(model, batch):
        raise ValueError("not like this")

    wrong = Task(build_model=lambda: nn.Linear(1, 1), build_dataset=lambda: [torch.ones(1)], compute_loss=loss)
    with pytest.raises(ValueError, match="not like this"):
        estimate(wrong, EstimateOptions())


@pytest.fixture
def bare(monkeypatch):
    """A process that takes nothing beside tensors."""
    monkeypatch.setattr("autotune.estimates.predictor.resident_bytes", lambda settings: 0)


@pytest.mark.medium
@pytest.mark.parametrize(("held", "expected"), [(True, (7, 2)), (False, (7, 1))])
def test_below_a_held_batch_micro_batches_are_accumulated(held, expected, bare):
    """Of 8 that are held, 7 in a forward leave one for a second; else a step sees 7."""
    wide = Task(
        build_model=lambda: nn.Sequential(nn.Linear(4, 2**14), *[nn.Tanh() for _ in range(50)]),
        build_dataset=lambda: list(torch.randn(22, 4)),
        compute_loss=lambda model, batch: model(batch).mean(),
        batch_size=8,
    )
    whole = estimate(wide, EstimateOptions(limit_bytes=2**40, reference_batch=8, is_held=held, most=22))
    assert (whole.largest.micro, whole.largest.accumulate) == (22, 1)
    tight = EstimateOptions(limit_bytes=whole.reference.process.value - 1, reference_batch=8, is_held=held, most=22)
    found = estimate(wide, tight)
    assert (found.largest.micro, found.largest.accumulate) == expected
    assert found.surely < found.largest.micro


def test_where_nothing_fits_the_smallest_is_told(bare):
    found = estimate(ZOO["mlp"], EstimateOptions(limit_bytes=1, most=22))
    assert (found.largest, found.surely, found.smallest.micro) == (None, None, 1)


def test_a_card_is_planned_for_without_one():
    """A context of 512 MiB, cuBLAS's workspaces of 64, one segment of 2 for all that is small; at least 300, 20 and 2,
    less by what a trace may be off."""
    found = estimate(ZOO["mlp"], EstimateOptions(target="cuda", limit_bytes=2**30, most=22))
    assert found.base_bytes == 512 * MIB
    assert found.largest.process.value == (512 + 64 + 2) * MIB
    assert 300 * MIB < found.largest.process.low < (300 + 20 + 2) * MIB
    assert {fill.kind for fill in found.fills}.isdisjoint({"scratch"})
