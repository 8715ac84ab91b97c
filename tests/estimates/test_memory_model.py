"""The memory model: peaks at any batch from steps over fake tensors."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.estimates.memory_model import BATCHES, MemoryModel, Sizes, fit_memory_model
from autotune.estimates.tracing.fake_ops import answers
from autotune.estimates.tracing.fake_step import FakeTraining, TracedStep, Unlike, Untraceable
from autotune.measure.profiling.allocations import Allocation, Span, Trace
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO


class Attends(nn.Module):
    """Four heads of attention with dropout among the numbers of a sample, each of them a place."""

    def __init__(self):
        super().__init__()
        self.widened = nn.Linear(1, 24)

    def forward(self, x):
        query, key, value = self.widened(x[..., None]).unflatten(-1, (4, 6)).transpose(1, 2).split(2, -1)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


class TwoLayers(nn.Module):
    """4 numbers to 8 to 2, without biases; a tanh between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def total(model, batch):
    return model(batch).sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, foreach=False)


def task_of(build=TwoLayers, loss=total, **pieces):
    pieces = {"build_optimizer": sgd, "batch_size": 8, **pieces}
    return Task(build_model=build, build_dataset=lambda: list(torch.randn(5, 4)), compute_loss=loss, **pieces)


def plan(**settings):
    return Plan(settings=Settings(**settings), budget={"device": "cpu"})


def memory_model_of(task=None, accumulates=False, **settings):
    return fit_memory_model(plan(**settings), task or task_of(), accumulates)


def traced(memory_model, batch):
    return memory_model.trace_step(batch).trace


@pytest.mark.parametrize("length", [15, 16])
def test_attention_allocates_alike_at_any_batch(length):
    """15 x 15 weights of four heads do not fill their last byte: 4 samples' would, 3 samples' would not."""
    task = replace(task_of(Attends), build_dataset=lambda: list(torch.randn(5, length)))
    memory_model = memory_model_of(task, layers=Layers(kind="exact"))
    assert memory_model.batches == BATCHES
    assert [memory_model.peak_bytes(batch) for batch in (3, 4, 40)] == [
        traced(memory_model, batch).peak_bytes() for batch in (3, 4, 40)
    ]


# Sizes


@pytest.mark.parametrize(
    ("three", "expected"),
    [
        ((40, 60, 60 + 20 * 253), 140),  # a line
        ((40, 60, 100), 100),  # capped: the line would say 140
        ((40, 60, 5120), 140),  # a line, but for rounding
        ((4, 9, 256 * 256), 49),  # the square of the batch
        ((7, 7, 7), 7),
    ],
)
def test_a_size_at_batch_7_from_three_batches(three, expected):
    assert Sizes(BATCHES, np.array([three]).T).at(7).tolist() == [expected]


def steps_of(*sizes):
    """Each allocated one after the other, and all freed together."""
    made = (
        Allocation(number, size, number + 1, len(sizes) + 1, "a", "forward", "temporary")
        for number, size in enumerate(sizes)
    )
    return TracedStep(Trace(tuple(made), (Span("forward", 0),), len(sizes) + 2), {})


def test_the_peak_moves_from_what_is_fixed_to_what_grows():
    """A fixed 100 alone first; then 10 a sample, twice: 20 * b, beside it."""
    memory_model = MemoryModel(tuple(steps_of(100, 10 * b, 10 * b) for b in BATCHES), steps_of)
    assert [memory_model.peak_bytes(b) for b in (2, 7, 100)] == [140, 240, 2100]
    assert memory_model.at(7).peak_bytes() == 240
    assert (
        memory_model.largest_batch(240, 99),
        memory_model.largest_batch(239, 99),
        memory_model.largest_batch(9999, 12),
    ) == (7, 6, 12)


@pytest.mark.parametrize(("target", "high"), [("cpu", 1050), ("cuda", 1030)])
def test_an_interval_is_wider_on_a_cpu_where_a_kernel_has_a_workspace(target, high):
    """Of which only a part is known there."""
    made = Allocation(0, 1000, 1, 2, "a", "forward", "temporary", is_scratch=True)
    step = TracedStep(Trace((made,), (Span("forward", 0),), 3), {})
    assert MemoryModel((), lambda batch: step, (), target).interval(7).high == high


@pytest.mark.parametrize(("target", "copies"), [("cuda", 9), ("cpu", 0)])
def test_what_a_kernel_may_take_grows_with_the_batch(target, copies):
    """Of a convolution in two groups of 3 by 3, on a card: nine copies of its input of 4 by 10 by 10 numbers, at
    batches that were traced and others."""
    images = replace(task_of(lambda: nn.Conv2d(4, 4, 3, groups=2)), build_dataset=lambda: [torch.ones(4, 10, 10)] * 8)
    memory_model = fit_memory_model(Plan(settings=Settings()), images, target=target)
    assert [memory_model.possible_bytes(b) for b in (2, 7, 256)] == [copies * 4 * 400 * b for b in (2, 7, 256)]


def test_allocations_that_do_not_correspond_are_traced_at_each_batch():
    asked = []
    memory_model = MemoryModel(
        (steps_of(1), steps_of(1, 1), steps_of(1)), lambda batch: asked.append(batch) or steps_of(batch)
    )
    assert memory_model.is_traced_at_each_batch
    assert (memory_model.peak_bytes(5), asked) == (5, [5])


def test_where_few_batches_are_asked_for_each_is_traced_and_says_what_the_memory_model_says():
    memory_model, few = memory_model_of(), fit_memory_model(plan(), task_of(), few=7)
    assert few.is_traced_at_each_batch
    for batch in (7, 40):
        assert few.at(batch) == memory_model.at(batch) == traced(memory_model, batch)
        assert (few.peak_bytes(batch), few.work(batch)) == (memory_model.peak_bytes(batch), memory_model.work(batch))


def test_a_batch_that_cannot_run_is_known_at_once_where_few_are_asked_for():
    with pytest.raises(Untraceable, match="more than 1 value"):
        fit_memory_model(plan(), task_of(lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))), few=1)


# By hand


def test_an_mlps_peak_at_batch_7_by_hand_arithmetic():
    """In tanh's backward, in floats. Of a sample: 4 of the batch, 8 that tanh keeps, 8 of the gradient of its output, 8
    of that of its input. Besides: 48 of parameters, 16 of the second weight's gradient, the loss and two scales of its
    gradient."""
    memory_model = memory_model_of()
    assert not memory_model.is_traced_at_each_batch
    assert memory_model.peak_bytes(7) == 4 * (7 * (4 + 8 + 8 + 8) + 48 + 16 + 3)
    assert memory_model.peak_bytes(1000) == 4 * (1000 * (4 + 8 + 8 + 8) + 48 + 16 + 3)
    assert memory_model.at(7).peak_bytes() == memory_model.peak_bytes(7)


def at_peak(found, kind):
    moment = found.peak_moment()
    return sum(one.num_bytes for one in found.alive_at(moment) if one.kind == kind)


def test_parameters_and_two_averages_of_adamw_are_there_at_the_peak():
    """48 floats of parameters; of each, two averages, and 4 bytes of a count for each of the two."""
    found = memory_model_of(task_of(build_optimizer=lambda p: torch.optim.AdamW(p, foreach=False))).at(7)
    assert at_peak(found, "parameter") == 48 * 4
    assert at_peak(found, "optimizer_state") == 2 * 48 * 4 + 2 * 4


def test_a_frozen_model_has_gradients_of_its_head_alone():
    def build():
        model = TwoLayers()
        model.first.requires_grad_(False)
        return model

    found = memory_model_of(task_of(build)).at(7)
    made = [one.num_bytes for one in found.allocations if one.kind == "gradient"]
    assert made == [8 * 2 * 4]


def test_with_accumulation_gradients_are_there_when_the_second_micro_batch_begins():
    once, twice = (memory_model_of(accumulates=accumulates).at(64) for accumulates in (False, True))
    assert [span.phase for span in twice.spans] == ["forward", "backward", "forward", "backward", "optimizer"]
    second = twice.spans[2].start + 1
    assert sum(one.num_bytes for one in twice.alive_at(second) if one.kind == "gradient") == 48 * 4
    assert twice.peak_bytes() > once.peak_bytes()


class Contrast(nn.Module):
    """Scores of each sample against each other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y @ y.T


def test_scores_of_pairs_grow_with_the_batchs_square():
    memory_model = memory_model_of(task_of(Contrast))
    assert 50 * 50 * 4 in {one.num_bytes for one in memory_model.at(50).allocations}
    assert memory_model.peak_bytes(50) == traced(memory_model, 50).peak_bytes()


class Sparse(nn.Module):
    """A loop over the samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.stack([self.linear(sample) for sample in x])


@pytest.mark.medium
def test_a_loop_over_the_batch_is_traced_where_it_is_asked():
    memory_model = memory_model_of(task_of(Sparse))
    assert memory_model.is_traced_at_each_batch
    assert memory_model.peak_bytes(7) > memory_model.peak_bytes(6)


def test_a_step_that_allocates_otherwise_is_given_up_before_its_backward():
    """A forward allocates five: the batch, two products, tanh and sum."""
    backwards = []

    def loss(model, batch):
        found = total(model, batch)
        found.register_hook(backwards.append)
        return found

    fake_training = FakeTraining(plan(), task_of(loss=loss))
    with pytest.raises(Unlike):
        fake_training.step(2, num_forward=4)
    assert not backwards
    assert fake_training.step(2, num_forward=5) == fake_training.step(2)
    assert len(backwards) == 2


def test_what_an_optimizer_does_in_place_is_told_by_shapes_alone():
    """A product with a number wants no memory; one with another type does, and torch is asked."""
    with FakeTensorMode() as fakes, answers("cpu", fakes, is_optimizer=True):
        x, other = torch.ones(3), torch.ones(3, dtype=torch.float64)
        assert x.mul_(2).add_(x, alpha=-1) is x
        assert x.add_(other).dtype == torch.float32
        with pytest.raises(RuntimeError):
            x.add_(torch.ones(2, 3))


def test_a_model_that_reads_values_says_so():
    def loss(model, batch):
        return total(model, batch) if batch.sum().item() > 0 else 2 * total(model, batch)

    with pytest.raises(Untraceable, match=r"values.*: DataDependentOutputException: aten\._local_scalar_dense"):
        memory_model_of(task_of(loss=loss))


# The zoo, and techniques


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("lstm",)])
def test_the_memory_model_is_the_trace_at_another_batch(name):
    memory_model = fit_memory_model(plan(), ZOO[name], largest_of=22)
    assert memory_model.peak_bytes(11) == pytest.approx(traced(memory_model, 11).peak_bytes(), rel=0.002)


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings",
    [
        {"layers": Layers(kind="exact")},
        {"layers": Layers(kind="rounding"), "precision": Precision(kind="bf16")},
        {"checkpointing": Checkpointing(kind="blocks")},
        {"precision": Precision(kind="fp16")},
    ],
    ids=["layers", "rounding-bf16", "checkpointing", "fp16"],
)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_memory_model_holds_under_techniques(name, settings):
    memory_model = fit_memory_model(plan(**settings), ZOO[name])
    assert memory_model.peak_bytes(11) == pytest.approx(traced(memory_model, 11).peak_bytes(), rel=0.01)


def test_layers_loops_run_once_over_tensors_without_values():
    """2**20 elements are two pieces; sizes of one piece, and as many allocations at each batch."""
    task = Task(
        build_model=lambda: nn.Sequential(nn.Linear(4, 2**18), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2**18, 1)),
        build_dataset=lambda: list(torch.randn(4, 4)),
        compute_loss=total,
        build_optimizer=sgd,
        batch_size=4,
    )
    memory_model = fit_memory_model(plan(layers=Layers(kind="exact")), task)
    assert not memory_model.is_traced_at_each_batch
    assert memory_model.peak_bytes(64) == pytest.approx(traced(memory_model, 64).peak_bytes(), rel=0.001)


def test_nothing_of_the_model_or_its_data_is_changed():
    model = TwoLayers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fake_training = FakeTraining(plan(), task_of(lambda: model))
    fake_training.step(3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_rehearsal_lets_go_of_the_model_that_it_copied():
    built = weakref.WeakSet()

    def build():
        model = TwoLayers()
        built.add(model)
        return model

    fake_training = FakeTraining(plan(), task_of(build))
    assert not built
    assert fake_training.step(2).trace.peak_bytes() > 0


def test_a_loss_over_tokens_uses_the_largest_sample():
    """The longest of the first 22 sentences has 8 tokens."""
    memory_model = fit_memory_model(plan(), ZOO["token_loss"], largest_of=22)
    batch = next(one for one in traced(memory_model, 3).allocations if one.kind == "batch")
    assert batch.num_bytes == 3 * 8 * 8


def test_buffers_that_a_checkpoint_changes_are_told_over_tensors_without_values():
    """A BatchNorm's statistics are copied for the recomputation, a mask is not."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(1000))
            self.register_buffer("count", torch.zeros(500))

        def forward(self, x):
            if self.training:
                self.count += 1
            return F.relu(self.linear(x) * self.mask[0])

    task = task_of(lambda: nn.Sequential(Block(), Block()))
    memory_model = fit_memory_model(plan(checkpointing=Checkpointing(kind="blocks")), task)
    sizes = [one.num_bytes for one in traced(memory_model, 4).allocations if one.phase != "before"]
    assert 500 * 4 in sizes
    assert 1000 * 4 not in sizes
