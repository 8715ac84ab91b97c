"""``autotune.fit``: what it chooses for a budget, what it does to a model, and what it leaves alone.

Most are planned for a CUDA device, whose predictions do not depend on what else this process holds.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from fresh_process import in_fresh_process
from tanh_block import TanhBlock
from torch import nn
from torch.utils._pytree import tree_flatten

import autotune
from autotune.errors import NothingFits, SpaceError, TaskError, UserError
from autotune.estimates import memory_model_cache
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.processes import own_peak_bytes, resident_bytes
from autotune.randomness import alike, random_state
from autotune.techniques import Settings
from autotune.techniques.support.recomputed import is_recomputed
from autotune.units import MIB, parse_bytes

NUM_BLOCKS, WIDTH = 6, 64


class Model(nn.Module):
    """Returns its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock(WIDTH) for _ in range(NUM_BLOCKS))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": (x * self.scale).square().mean()}


class Reads(Model):
    """Goes by a value of its batch."""

    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e30 else -x)


def batch(rows: int = 2**16) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(1, WIDTH).expand(rows, WIDTH)}


def planned(model: nn.Module, budget: str | int = "64GiB", rows: int = 2**16, **options):
    return autotune.fit(model, batch(rows), budget, device="cuda", **options)


@cache
def stock_bytes() -> int:
    """The least budget of the training as it stands."""
    return round(planned(Model(), dry_run=True).stock_peak.high * 1.031)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[object, ...]:
    """What fit might change: classes and own attributes of modules, values, gradients, hooks, the optimizer."""
    modules = [(type(module), sorted(vars(module))) for module in model.modules()]
    held = [model.state_dict(), [p.grad for p in model.parameters()], optimizer and optimizer.state_dict()]
    leaves, spec = tree_flatten(copy.deepcopy(held))
    return modules, leaves, spec


def same(one, other) -> bool:
    return (one[0], one[2]) == (other[0], other[2]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one[1], other[1], strict=True)
    )


def recomputed(model: nn.Module) -> list[int]:
    return [number for number, block in enumerate(model.blocks) if is_recomputed(block)]


def test_where_the_training_fits_as_it_stands_nothing_is_changed():
    model = Model()
    before = state_of(model)
    fitted = planned(model)
    assert fitted.settings == Settings()
    assert fitted.model is model
    assert fitted.peak == fitted.stock_peak
    assert same(before, state_of(model))


def test_it_recomputes_no_more_blocks_than_it_takes_and_what_it_chose_is_on_the_model():
    """A block keeps its hidden layer, (65536, 256) in fp32: 64 MiB. To lack 100 MiB takes two blocks, and 180 three."""
    enough = stock_bytes()
    for lacking, num_blocks in ((100, 2), (180, 3)):
        model = Model()
        fitted = planned(model, enough - lacking * MIB, techniques=("checkpointing",))
        assert len(recomputed(model)) == num_blocks
        assert recomputed(model) == list(fitted.settings.checkpointing.numbers(NUM_BLOCKS))
        assert fitted.peak.high * 1.03 <= enough - lacking * MIB


def test_gradients_are_those_of_the_stock_model_to_the_bit():
    torch.manual_seed(0)
    stock = Model()
    model = copy.deepcopy(stock)
    fitted = planned(model, stock_bytes() - 300 * MIB)
    x = torch.randn(8, WIDTH)
    for one in (stock, model):
        one(x)["loss"].backward()
    assert recomputed(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert fitted.loss(model, {"x": x}).item() == stock(x)["loss"].item()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_a_dry_run_chooses_the_same_and_leaves_model_optimizer_and_randomness_alone():
    model, budget = Model(), stock_bytes() - 300 * MIB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH))["loss"].backward()
    optimizer.step()
    before, drawn = state_of(model, optimizer), random_state()
    fitted = planned(model, budget, optimizer=optimizer, dry_run=True)
    assert not fitted.applied
    assert same(before, state_of(model, optimizer))
    assert alike(drawn, random_state())
    assert planned(model, budget, optimizer=optimizer).settings == fitted.settings


def test_a_budget_that_nothing_fits_names_the_smallest_that_works():
    """Within that it does, and not within 1 MiB less than its interval allows."""
    model = Model()
    before = state_of(model)
    with pytest.raises(NothingFits, match=r"smallest budget that works is (\d+) MiB.*what binds there is") as raised:
        planned(model, "600MiB")
    assert raised.value.exit_code == 3
    assert same(before, state_of(model))
    words = str(raised.value).partition("works is ")[2].split(" (")[0]
    assert planned(model, words).peak.high * 1.03 <= parse_bytes(words)


def test_fitting_again_for_a_larger_budget_takes_off_what_was_put_on():
    model = Model()
    planned(model, stock_bytes() - 300 * MIB)
    planned(model, "64GiB")
    assert recomputed(model) == []


@pytest.mark.parametrize("part", ["parameters", "buffer"])
def test_a_model_on_two_devices_is_refused(part):
    model = Model()
    if part == "parameters":
        model.blocks[0].to("meta")
    else:
        model.register_buffer("mask", torch.ones(WIDTH, device="meta"))
    with pytest.raises(UserError, match="lie on cpu and meta, and a budget is of one device"):
        planned(model)


@pytest.mark.parametrize("wrong", [{"y": torch.zeros(8, WIDTH)}, {"x": torch.zeros(8, WIDTH + 1)}])
def test_a_batch_that_the_model_does_not_take_is_told_and_the_model_is_as_it_was(wrong):
    model = Model()
    before = state_of(model)
    with pytest.raises(TaskError, match=r"does not take this batch: (TypeError|RuntimeError): "):
        autotune.fit(model, wrong, "8GiB", device="cuda")
    assert same(before, state_of(model))


def test_a_model_that_returns_no_loss_needs_one():
    with pytest.raises(TaskError, match=r"returned Tensor of shape \(\d, 4\), and no loss. Give loss="):
        autotune.fit(nn.Linear(WIDTH, 4), torch.zeros(8, WIDTH), "8GiB", device="cuda")


def test_a_loss_of_ones_own_and_an_optimizer_that_is_built_from_a_function():
    model = nn.Linear(WIDTH, 4)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    labels = torch.zeros(8, dtype=torch.long)
    fitted = autotune.fit(
        model, (torch.zeros(8, WIDTH), labels), "8GiB", loss=loss, optimizer=torch.optim.SGD, device="cuda"
    )
    assert isinstance(fitted.optimizer, torch.optim.SGD)
    assert fitted.optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_model_that_reads_values_takes_real_steps_says_so_and_is_as_it_was():
    model, rows = Reads(), 64
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    fitted = planned(model, rows=rows, optimizer=optimizer, dry_run=True)
    assert fitted.found.how == "probed"
    assert "by real steps of a copy of the model" in fitted.notes[0]
    assert same(before, state_of(model, optimizer))
    assert fitted.peak.value == planned(Model(), rows=rows, optimizer=optimizer_of, dry_run=True).peak.value


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters)


class OfOneDtype(Reads):
    """Raises under autocast: what is indexed and what is put there are of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = torch.zeros_like(x)
        out[torch.arange(len(x))] = self.first(x)
        return super().forward(out)


def test_of_real_steps_what_raises_is_left_out_and_told():
    fitted = planned(OfOneDtype(), techniques={"precision": [{"kind": "default"}, {"kind": "bf16"}]}, dry_run=True)
    assert (fitted.found.how, fitted.settings) == ("probed", Settings())
    (refused,) = fitted.found.refused
    assert refused[0].precision.kind == "bf16"
    assert "RuntimeError" in refused[1]


def test_buffers_of_a_model_without_values_may_have_some():
    """As accelerate's ``init_empty_weights`` leaves them."""
    with torch.device("meta"):
        model = Model()
    model.register_buffer("mask", torch.ones(WIDTH))
    assert planned(model, dry_run=True).settings == Settings()


def test_a_loss_that_trains_another_model_than_its_argument_is_told_and_undone():
    model = Model()
    with pytest.raises(TaskError, match="trained this model itself"):
        planned(model, loss=lambda _, batch: model(**batch)["loss"])
    assert all(p.grad is None for p in model.parameters())


def test_precision_changes_only_if_it_is_asked_for():
    """Autocast halves what the blocks keep."""
    budget = stock_bytes() - 300 * MIB
    assert planned(Model(), budget).settings.precision == Settings().precision


@pytest.mark.parametrize("kind", [Model, Reads])
def test_what_is_asked_for_is_looked_at_however_the_step_is(kind):
    asked = planned(kind(), stock_bytes() - 300 * MIB, techniques={"precision": [{"kind": "bf16"}]})
    assert asked.settings.precision.kind == "bf16"
    assert asked.needs_context


class Once(TanhBlock):
    """Runs once a step, and raises if it is recomputed."""

    ran = False

    def forward(self, x):
        assert not self.ran, "a second run"
        self.ran = True
        return super().forward(x)


class OfOnce(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Once(WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            block.ran = False
        return super().forward(x)


def test_what_cannot_be_looked_at_is_told():
    said = "not looked at: checkpoint all 6 blocks, since its step reads values.*a second run"
    with pytest.raises(NothingFits, match=said):
        planned(OfOnce(), stock_bytes() - 300 * MIB, techniques=("checkpointing",))


def test_what_the_loop_runs_in_today_is_predicted_and_is_no_choice():
    """Autocast keeps a hidden layer of 64 MiB in half of that."""
    stock, half = (planned(Model(), precision=kind, dry_run=True) for kind in (None, "bf16"))
    assert half.settings == Settings()
    assert stock.peak.value - half.peak.value > NUM_BLOCKS * 16 * MIB


@pytest.mark.parametrize(
    ("techniques", "said"),
    [
        (("pruning",), "got pruning. Use some of: .*checkpointing"),
        (("batch",), "got batch"),
        (("checkpoints",), "checkpoints"),
        ({"layers": [{"kind": "some"}]}, "layers"),
        ({"offload": [{"kind": "activations", "to": "host"}]}, "memory alone is held, but got activations on the host"),
        (("checkpointing", "offload"), "offload: the device's memory alone is held"),
        (
            {"optimizer_state": [{"kind": "default"}, {"kind": "factored"}]},
            "stays as it is, but got optimizer state fac",
        ),
    ],
)
def test_a_technique_that_is_not_for_it_is_refused(techniques, said):
    with pytest.raises(SpaceError, match=said):
        planned(Model(), techniques=techniques)


def test_the_step_is_in_backward_only_where_it_is_asked_for_and_the_optimizer_given():
    """The loop may clip or accumulate gradients, which would be gone."""
    wide = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    def fit(budget, **options):
        return autotune.fit(
            wide, torch.zeros(4, 2048), budget, loss=lambda model, x: model(x).mean(), device="cuda", **options
        )

    def build(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    optimizer = build(wide.parameters())
    with pytest.raises(NothingFits, match=r"or allow optimizer_step\.") as raised:
        fit("700MiB", optimizer=optimizer)
    least = str(raised.value).partition("works is ")[2].split(" (")[0]
    asked = {"techniques": ("checkpointing", "layers", "optimizer_step"), "optimizer": optimizer}
    with pytest.raises(NothingFits) as raised:
        fit("700MiB", **asked)
    less = str(raised.value).partition("works is ")[2].split(" (")[0]
    assert parse_bytes(least) - parse_bytes(less) >= 16 * MIB
    fitted = fit(less, **asked)
    assert fitted.settings.optimizer_step.kind == "in_backward"
    wide(torch.ones(4, 2048)).mean().backward()
    assert all(p.grad is None for p in wide.parameters())
    with pytest.raises(NothingFits):
        fit(less, accumulate=2, **asked)


@pytest.mark.medium
def test_state_in_fewer_bits_is_chosen_where_it_is_named_and_there_is_an_optimizer():
    """It rounds: 256 MiB of averages become 34. Of a loop's own optimizer nothing is known."""
    wide = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    optimizer = torch.optim.AdamW(wide.parameters())

    def least(**options):
        with pytest.raises(NothingFits) as raised:
            autotune.fit(wide, torch.zeros(4, 2048), "600MiB", loss=mean, device="cuda", **options)
        return parse_bytes(str(raised.value).partition("works is ")[2].split(" (")[0])

    def mean(model, x):
        return model(x).mean()

    named = {"techniques": "optimizer_state"}
    stock, without, less = least(optimizer=optimizer), least(**named), least(optimizer=optimizer, **named)
    assert stock - less >= 192 * MIB
    assert abs(stock - without) <= 4 * MIB
    fitted = autotune.fit(wide, torch.zeros(4, 2048), less, loss=mean, device="cuda", optimizer=optimizer, **named)
    assert fitted.settings.optimizer_state.kind == "4bit"
    mean(wide, torch.ones(4, 2048)).backward()
    optimizer.step()
    assert "exp_avg.codes4" in optimizer.state[wide[0].weight]


def test_ranks_without_a_group_are_told_to_make_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="init_process_group"):
        planned(Model())


def test_a_model_without_values_is_planned_for_a_card_that_is_not_here():
    with torch.device("meta"):
        model = Model()
    budget = stock_bytes() - 300 * MIB
    assert planned(model, budget, dry_run=True).settings == planned(Model(), budget, dry_run=True).settings


def test_on_a_cpu_the_process_as_it_is_counts():
    """6 blocks over 65536 rows keep 384 MiB and more; what the process holds beside it comes on top."""
    fitted = autotune.fit(Model(), batch(), "64GiB", dry_run=True)
    kept = NUM_BLOCKS * 2**16 * 4 * WIDTH * 4
    own = resident_bytes()
    assert fitted.peak.value > own + 0.9 * kept
    assert "predicted peak" in str(fitted)
    assert fitted.binds.startswith(("backward", "forward"))


@pytest.mark.medium
def test_the_smallest_budget_works_when_it_is_asked_for_in_the_same_process():
    model = Model()
    with pytest.raises(NothingFits) as raised:
        autotune.fit(model, batch(), "1MiB")
    words = str(raised.value).partition("works is ")[2].split(" (")[0]
    assert autotune.fit(model, batch(), words).peak.high * 1.03 <= parse_bytes(words)


@pytest.mark.parametrize("kind", ["tcmalloc", "expandable_segments"])
def test_an_allocator_that_is_set_before_a_process_starts_is_none_for_one_that_runs(kind):
    with pytest.raises(SpaceError, match=f"{kind} is set before a process starts"):
        autotune.fit(Model(), batch(), "64GiB", techniques={"allocator": [{"kind": "system"}, {"kind": kind}]})


def _fitted_below_what_is_predicted() -> tuple[str, int, int, int]:
    """The allocator for a budget that glibc's heap may go over, that budget, and what two steps of SGD took."""
    model, rows = Model(), {"x": torch.ones(2**14, WIDTH)}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    stock = autotune.fit(model, rows, "64GiB", optimizer=sgd, dry_run=True).peak
    budget = (stock.value + stock.high) // 2
    fitted = autotune.fit(model, rows, budget, optimizer=sgd, techniques=["allocator"])
    for _ in range(2):
        fitted.loss(model, rows).backward()
        sgd.step()
        sgd.zero_grad()
    return fitted.settings.allocator.kind, budget, fitted.peak.high, own_peak_bytes()


@pytest.mark.medium
def test_where_glibcs_heap_may_not_fit_large_tensors_get_pages_of_their_own():
    kind, budget, high, took = in_fresh_process(_fitted_below_what_is_predicted)
    assert kind == "mmap"
    assert took <= high <= budget


def test_what_differs_by_the_allocator_alone_is_traced_once(monkeypatch):
    """As it stands, and with all blocks recomputed."""
    traced = []

    def counted(plan, *arguments):
        traced.append(plan.settings.model_copy(update={"allocator": Settings().allocator}))
        return fit_memory_model(plan, *arguments)

    monkeypatch.setattr(memory_model_cache, "fit_memory_model", counted)
    with pytest.raises(NothingFits):
        autotune.fit(Model(), {"x": torch.ones(2, WIDTH)}, "1MiB", techniques=["allocator", "checkpointing"])
    assert len(traced) == len({*traced}) == 2


def test_the_optimizer_must_be_the_models():
    other = torch.optim.AdamW(Model().parameters())
    with pytest.raises(TaskError, match="none of the model's parameters"):
        planned(Model(), optimizer=other)


@pytest.mark.parametrize("budget", ["much", 0, "-1GiB"])
def test_a_budget_is_bytes_above_zero(budget):
    with pytest.raises(UserError, match="budget"):
        planned(Model(), budget)


@pytest.mark.parametrize("accumulate", [0, 1.5])
def test_batches_are_accumulated_in_whole_numbers(accumulate):
    with pytest.raises(UserError, match="accumulate: a whole number of batches from 1 on"):
        planned(Model(), accumulate=accumulate)


def test_a_model_that_is_frozen_is_refused():
    with pytest.raises(TaskError, match="are frozen"):
        planned(Model().requires_grad_(False))


@pytest.mark.parametrize("wrong", [(one for one in batch().values()), {"x": torch.zeros(8, WIDTH, device="meta")}])
def test_a_batch_that_cannot_be_copied_is_told(wrong):
    with pytest.raises(TaskError, match="batch: it cannot be copied to the CPU"):
        autotune.fit(Model(), wrong, "8GiB", device="cuda")


def test_a_budget_of_a_byte_is_one_that_nothing_fits():
    with pytest.raises(NothingFits):
        planned(Model(), 1)
