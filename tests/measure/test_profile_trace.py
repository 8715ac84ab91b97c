"""The tracer and the clock: every allocation of a step, whose it is, and that watching changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from kept_bytes import kept_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from autotune.layers import convert
from autotune.measure.profiling.allocations import OUTSIDE, Allocation, Span, Trace
from autotune.measure.profiling.clock import Clock
from autotune.measure.profiling.profile import profile
from autotune.measure.profiling.tracer import Tracer
from autotune.measure.profiling.types import ProfileOptions
from autotune.measure.profiling.watch import Watch, WatchedSteps
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.precision import Precision
from autotune.testing.models import Gpt, InputImage, Lstm, Mlp, ResNet, Tied
from autotune.training.apply_plan import apply

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread_only")


def sgd(model, **options):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, **options)


def run_step(watch, model, optimizer, batch, loss_of):
    with watch:
        watch.batch(batch)
        with watch.phase("forward"):
            loss = loss_of(model, batch)
        with watch.phase("backward", loss):
            loss.backward()
        with watch.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()


def traced(model, batch, loss_of, optimizer=None, steps=2):
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        tracer = Tracer(model, optimizer, CPU)
        run_step(tracer, model, optimizer, batch, loss_of)
    return tracer.trace()


def mean_square(model, batch):
    return model(batch).square().mean()


def next_token(model, text):
    return F.cross_entropy(model(text).flatten(0, 1), text.flatten())


def by(trace, field, moment):
    found = Counter()
    for one in trace.alive_at(moment):
        found[getattr(one, field)] += one.num_bytes
    return found


def kept_by_module(trace):
    found = Counter()
    for one in trace.kept():
        found[one.module] += one.num_bytes
    return found


# Replaying events


def allocation(id, num_bytes, born, died, **changes):
    fields = {"module": "a", "phase": "forward", "kind": "temporary", **changes}
    return Allocation(id, num_bytes, born, died, **fields)


def test_live_bytes_add_up_and_the_first_of_equal_peaks_counts():
    trace = Trace(
        (allocation(0, 10, 0, None), allocation(1, 5, 1, 2), allocation(2, 5, 3, 4)), (Span("forward", 0),), 5
    )
    assert trace.live_bytes() == [10, 15, 10, 15, 10]
    assert (trace.peak_moment(), trace.peak_bytes()) == (1, 15)
    assert [one.id for one in trace.alive_at(1)] == [0, 1]
    assert (trace.maker_at(1).id, trace.maker_at(2)) == (1, None)


# By hand


def test_an_mlp_by_hand_arithmetic():
    """Batch 8, 4 to 16 to 2, without biases, plain SGD: parameters, what is kept, gradients, the peak, its moment."""
    model = nn.Sequential(nn.Linear(4, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False))
    trace = traced(model, torch.ones(8, 4), lambda model, batch: model(batch).sum())
    batch, first, second, hidden = 8 * 4 * 4, 4 * 16 * 4, 16 * 2 * 4, 8 * 16 * 4
    assert by(trace, "kind", 0) == {"parameter": first + second}
    # The batch, for the first weight's gradient, and tanh's output, for its own backward and the second weight's.
    assert kept_by_module(trace) == {OUTSIDE: batch, "1": hidden}
    gradients = {one.module: one.num_bytes for one in trace.allocations if one.kind == "gradient"}
    assert gradients == {"0": first, "2": second}
    assert all(one.phase == "backward" for one in trace.allocations if one.kind == "gradient")
    # Tanh's backward: gradients of its output and its input; the second weight's gradient; loss and its gradient.
    at_peak = by(trace, "kind", trace.peak_moment())
    assert at_peak == {
        "parameter": first + second,
        "batch": batch,
        "activation": hidden,
        "gradient": second,
        "temporary": 2 * hidden + 8,
    }
    made = trace.maker_at(trace.peak_moment())
    assert (made.module, made.phase) == ("1", "backward")


def test_optimizer_state_is_made_by_the_first_step_and_there_in_the_second():
    """AdamW: two moments as large as the parameter, owned by its module, and a step count."""
    model = nn.Sequential(nn.Linear(4, 16, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda model, batch: model(batch).sum()  # noqa: E731
    state = 2 * 4 * 16 * 4 + 4
    first = traced(model, torch.ones(8, 4), loss, optimizer, steps=1)
    assert by(first, "kind", 0)["optimizer_state"] == 0
    made = [one for one in first.allocations if one.kind == "optimizer_state"]
    assert sum(one.num_bytes for one in made) == state
    assert {(one.module, one.phase, one.died) for one in made} == {("0", "optimizer", None)}
    steady = traced(model, torch.ones(8, 4), loss, optimizer, steps=1)
    assert by(steady, "kind", 0)["optimizer_state"] == state


MODELS = {
    "mlp": (Mlp, torch.randn(5, 6), mean_square),
    "resnet": (ResNet, torch.randn(4, 3, 16, 16), mean_square),
    "gpt": (Gpt, torch.randint(11, (4, 8)), next_token),
    "lstm": (Lstm, torch.randint(11, (4, 8)), mean_square),
    "tied": (Tied, torch.randint(11, (4, 8)), next_token),
    "input": (InputImage, torch.randn(2, 3, 8, 8), mean_square),
    "converted": (lambda: convert(ResNet()), torch.randn(4, 3, 16, 16), mean_square),
}


@pytest.mark.parametrize("name", MODELS)
def test_kept_bytes_are_those_of_the_house_measure(name):
    build, batch, loss_of = MODELS[name]
    model = build()
    kept, _ = kept_bytes(lambda: loss_of(model, batch), model)
    assert sum(kept_by_module(traced(model, batch, loss_of)).values()) == kept


# Against torch's own profiler


def profiler_peak(step):
    """Most bytes above where the step began, by torch's own memory events."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


class Wide(nn.Module):
    """Convolutions over images with channels last, which oneDNN does not reorder: that scratch no dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(self.norm(self.second(F.relu(self.first(x))))).mean((2, 3))


def wide():
    return Wide().to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("build", "batch", "loss_of", "within"),
    [
        (lambda: Gpt(width=64, max_length=64), torch.randint(11, (8, 64)), next_token, 0.01),
        (lambda: Mlp(64, 256, 10), torch.randn(256, 64), mean_square, 0.01),
        (wide, torch.randn(8, 16, 64, 64).to(memory_format=torch.channels_last), mean_square, 0.03),
    ],
    ids=["gpt", "mlp", "cnn"],
)
def test_the_peak_is_that_of_torchs_own_memory_events(build, batch, loss_of, within):
    """Kernels' scratch aside."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    trace = traced(model, batch, loss_of, optimizer)
    theirs = profiler_peak(lambda: run_step(Watch(), model, optimizer, batch, loss_of))
    ours = max(trace.live_bytes()) - trace.live_bytes()[0] - batch.untyped_storage().nbytes()
    assert ours == pytest.approx(theirs, rel=within)


# Whose it is


def test_every_forward_allocation_belongs_to_the_module_at_work():
    trace = traced(Mlp(), torch.randn(5, 6), mean_square)
    made = {one.module for one in trace.allocations if one.phase == "forward" and one.kind != "batch"}
    assert made == {
        "stem",
        *(f"blocks.{n}" for n in range(4)),
        *(f"blocks.{n}.linear" for n in range(4)),
        "head",
        OUTSIDE,
    }


def test_backward_belongs_to_the_module_whose_forward_made_the_node():
    trace = traced(Mlp(), torch.randn(5, 6), mean_square)
    order = list(dict.fromkeys(one.module for one in trace.allocations if one.phase == "backward"))
    inner = [name for n in (3, 2, 1, 0) for name in (f"blocks.{n}", f"blocks.{n}.linear")]
    assert order == [OUTSIDE, "head", *inner, "stem"]


class Recomputed(nn.Module):
    """Two blocks; the first is recomputed with its forward bypassed, the second by its own call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(8, 32), nn.GELU()),
            nn.Sequential(nn.Linear(32, 32), nn.GELU()),
        )

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def test_recomputation_belongs_to_what_is_recomputed():
    model = Recomputed()
    trace = traced(model, torch.randn(16, 8), mean_square)
    again = Counter(one.module for one in trace.allocations if one.phase == "backward" and one.num_bytes == 16 * 32 * 4)
    assert again["second.0"] >= 2  # its output once more, and the gradient of its input
    assert {one.module for one in trace.allocations if one.phase == "backward"} <= {
        OUTSIDE, "first.0", "first.1", "second.0", "second.1"
    }  # fmt: skip
    assert "second.0" not in kept_by_module(trace)


def task_of(build, data, loss_of, **pieces):
    return Task(build_model=build, build_dataset=lambda: list(data), compute_loss=loss_of, **pieces)


MLP_TASK = task_of(Mlp, torch.randn(32, 6), mean_square, batch_size=8)


def profiled(task=MLP_TASK, num_timed_steps=0, **settings):
    chosen = Settings(**settings)
    return profile(apply(Plan(settings=chosen), task), task, ProfileOptions(num_timed_steps=num_timed_steps))


def traced_training(task=MLP_TASK, **settings):
    training = apply(Plan(settings=Settings(**settings)), task)
    steps = WatchedSteps(training, task)
    steps.step(Watch())
    return steps.whole_step(lambda: Tracer(training.model, training.optimizer, CPU)).trace()


class Between(nn.Module):
    """An operation of its own between two children."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_checkpointed_blocks_own_operations_are_its_own_again():
    """The technique bypasses the block's call, so that no hook says who recomputes the tanh."""
    task = task_of(lambda: nn.Sequential(Between(), Between()), torch.randn(32, 6), mean_square, batch_size=8)
    plain, recomputed = (traced_training(task, checkpointing=Checkpointing(kind=kind)) for kind in ("none", "blocks"))
    made = [
        Counter(one.module for one in trace.allocations if one.phase == "backward" and one.num_bytes == 8 * 6 * 4)
        for trace in (plain, recomputed)
    ]
    assert made[1] - made[0] == {"0": 1, "0.first": 1, "1": 1, "1.first": 1}
    assert [kept_by_module(trace)["0"] for trace in (plain, recomputed)] == [8 * 6 * 4, 0]


def test_a_shared_module_goes_by_its_first_name():
    trace = traced(Tied(), torch.randint(11, (4, 8)), next_token)
    names = {one.module for one in trace.allocations}
    assert "blocks.0.linear" in names
    assert not any(name.startswith("blocks.2") for name in names)


def test_frozen_parts_have_no_gradients_and_keep_less():
    model = Mlp()
    model.stem.requires_grad_(False)
    trace = traced(model, torch.randn(5, 6), mean_square)
    assert "stem" not in {one.module for one in trace.allocations if one.kind in ("gradient", "optimizer_state")}
    assert OUTSIDE not in {one.module for one in trace.kept() if one.kind == "batch"}


class Structured(nn.Module):
    """Takes and returns a dict, works in place, and calls a module that is not its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(6, 8), nn.ReLU(inplace=True)

    def forward(self, inputs):
        return {"scores": nn.Tanh()(self.relu(self.linear(inputs["x"]))), "none": None}


def test_dicts_in_place_operations_and_foreign_modules():
    trace = traced(Structured(), {"x": torch.randn(5, 6)}, lambda model, batch: model(batch)["scores"].sum())
    made = {one.module for one in trace.allocations if one.phase == "backward"}
    assert made == {OUTSIDE, "", "relu", "linear"}


def test_rows_add_up_to_the_peak_and_so_do_the_charts_areas():
    found = profiled(checkpointing=Checkpointing(kind="blocks", every=2))
    rows = {row.name: row for row in found.modules}
    assert rows[""].peak_bytes + rows[OUTSIDE].peak_bytes == found.peak.num_bytes
    assert sum(rows[name].peak_bytes for name in ("stem", "blocks", "head")) == rows[""].peak_bytes
    live = [sum(column) for column in zip(*(area.live_bytes for area in found.timeline.areas), strict=True)]
    assert max(live) == found.peak.num_bytes


def test_a_chart_has_at_most_twelve_groups_of_blocks_and_the_rest():
    class Deep(nn.Sequential):
        def __init__(self):
            super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(30)))

    found = profiled(task_of(Deep, torch.randn(16, 6), mean_square, batch_size=8))
    blocks = [area.name for area in found.timeline.areas if area.kind == "block"]
    assert blocks[:2] == ["0 … 2", "3 … 5"]
    assert len(blocks) == 10


def test_micro_batches_keep_what_one_does_and_add_gradients_once():
    whole, split = (profiled(batch=Batch.of(8, micro)) for micro in (8, 4))
    assert (split.micro_batch, split.accumulate) == (4, 2)
    assert split.modules[0].kept_bytes * 2 == whole.modules[0].kept_bytes
    assert [phase for phase, _ in split.timeline.spans] == ["forward", "backward"] * 2 + ["optimizer"]


def test_mixed_precision_keeps_casts_by_hand_arithmetic():
    """A linear's output for the GELU behind it; under autocast in half the bytes, beside a copy of its weight."""
    full, half = (profiled(precision=Precision(kind=kind)) for kind in ("fp32", "bf16"))
    kept = [{row.name: row.kept_bytes for row in one.modules}["blocks.0.linear"] for one in (full, half)]
    assert kept == [8 * 16 * 4, 8 * 16 * 2 + 16 * 16 * 2]


def test_memory_that_was_there_before_counts_from_the_start():
    """A teacher that no parameter names."""
    teacher = torch.randn(6, 16)
    trace = traced(Mlp(), torch.randn(5, 6), lambda model, batch: model(batch).sum() + (batch @ teacher).sum())
    assert by(trace, "kind", 0)["other"] == 6 * 16 * 4


class WithGradientInside(nn.Module):
    """Whose forward takes a gradient by torch.func, which forbids to watch what is saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.func.grad(lambda y: self.linear(y).square().sum())(x)


def test_where_saves_cannot_be_watched_what_a_forward_leaves_is_kept():
    found = profiled(task_of(WithGradientInside, torch.randn(32, 6), mean_square, batch_size=8))
    assert not found.sees_saves
    assert {row.name: row.kept_bytes for row in found.modules}["linear"] >= 8 * 6 * 4


# Watching changes nothing


@pytest.mark.parametrize(
    "watch_of", [lambda m, o: Tracer(m, o, CPU), lambda m, o: Clock(m, CPU)], ids=["tracer", "clock"]
)
@pytest.mark.parametrize("name", MODELS)
def test_no_loss_and_no_parameter_changes(name, watch_of):
    build, batch, loss_of = MODELS[name]
    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = sgd(model, momentum=0.9)
        watches = (watch_of(model, optimizer) if watched else Watch() for _ in range(3))
        losses = [run_step(watch, model, optimizer, batch, loss_of) for watch in watches]
        runs.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *runs))


def test_pieces_are_what_step_is():
    """The profile's steps train as ``Training.step`` does."""
    by_step, by_piece = (apply(Plan(settings=Settings(batch=Batch.of(8, 4))), MLP_TASK) for _ in range(2))
    steps = WatchedSteps(by_piece, MLP_TASK)
    for number, batch in enumerate(by_step.loader):
        by_step.step(batch)
        if number % 2:
            steps.step(Watch())
    assert all(map(torch.equal, by_step.model.state_dict().values(), by_piece.model.state_dict().values()))


def test_the_clock_tells_modules_and_phases_apart():
    found = profiled(num_timed_steps=1)
    rows = {row.name: row for row in found.modules}
    assert (
        rows[""].forward_s
        >= rows["blocks"].forward_s
        >= rows["blocks.0"].forward_s
        >= rows["blocks.0.linear"].forward_s
        > 0
    )
    assert rows[""].backward_s >= rows["blocks.0"].backward_s > 0
    assert set(found.phases_s) == {"before", "forward", "backward", "optimizer"}


def test_times_are_of_one_step_so_that_they_add_up():
    """Medians taken module by module would miss by what the steps differ."""
    found = profiled(num_timed_steps=5)
    whole, outside = found.modules[0], found.modules[-1]
    assert whole.forward_s + outside.forward_s == pytest.approx(found.phases_s["forward"])
    assert whole.backward_s + outside.backward_s == pytest.approx(found.phases_s["backward"])
    assert sum(found.phases_s.values()) <= found.timed_step_s


# Over fake tensors


def test_fake_tensors_give_the_same_events():
    """What an estimator replays: every allocation of a real step, in order, with its size and its place."""
    real = traced(Mlp(), torch.randn(5, 6), mean_square, steps=2)
    with FakeTensorMode():
        fake = traced(Mlp(), torch.randn(5, 6), mean_square, steps=2)
    assert fake == real


def test_the_same_step_numbers_its_allocations_alike_at_another_batch():
    """The memory model from which the peak at any batch follows: each size is a + b * batch."""
    small, large, other = (traced(Mlp(), torch.randn(size, 6), mean_square) for size in (2, 4, 10))
    for a, b, c in zip(small.allocations, large.allocations, other.allocations, strict=True):
        assert (a.born, a.died, a.module, a.kind) == (c.born, c.died, c.module, c.kind)
        assert a.num_bytes + (b.num_bytes - a.num_bytes) // 2 * 8 == c.num_bytes
