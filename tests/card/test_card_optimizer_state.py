"""``optimizer_state: host`` on a card: its state and its step are the host's, and the training is the job's own."""

from __future__ import annotations

import copy
import dataclasses
import io
from functools import partial

import pytest
import stand_in
import torch
from line_task import line
from search_tables import facts
from stand_in import Card
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Device, Facts, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers import optimizer_state, optimizer_step
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.support.bits import kept_state
from autotune.testing.facts import facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.training.apply_plan import apply

HOST = OptimizerState(kind="host")
CARD = Device(type="cuda", name="A card", memory_bytes=2**33, capability=(8, 0), bf16=True)
SIDE = 256
pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated in several."""
    monkeypatch.setattr(kept_state, "LEAST_PIECE", 2**12)


@pytest.mark.medium
class TestOnACard(TechniqueContract):
    """On every model of the zoo, each parameter's state on the host."""

    technique = OptimizerState
    lacking = (HOST,)

    @pytest.fixture(autouse=True)
    def _every_parameter(self, monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
        monkeypatch.setattr(optimizer_state, "_LEAST_BYTES", 0)
        monkeypatch.setattr(kept_state, "LEAST", 1)
        monkeypatch.setattr(kept_state, "LEAST_PIECE", 256)

        monkeypatch.setattr("autotune.testing.techniques.facts_of", on_card)

    def _choices(self, task: Task) -> tuple[OptimizerState, ...]:
        """Fewer bits are a CPU's contract."""
        found = OptimizerState.choices(on_card(task))
        assert (HOST in found) == (on_card(task).optimizer_states > 0)
        return tuple(one for one in found if one in (OptimizerState(), HOST))


def on_card(task: Task) -> Facts:
    """Of a task of the zoo, whose job is a card's."""
    return facts_of(task).model_copy(update={"device": CARD})


def plan(kind: str = "host", **others) -> Plan:
    """By one kernel for each operation, on the card as on the host."""
    own = {"optimizer": Optimizer(kind="for_loop")} | others
    return Plan(settings=Settings(optimizer_state=OptimizerState(kind=kind), **own))


def weights() -> list[nn.Parameter]:
    """One in channels_last, one of no whole number of pieces, one that is left to the card."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn((32, 32, 3, 3), generator=generator).to(memory_format=torch.channels_last)
    made = (image, torch.randn(2**13 + 3, generator=generator), torch.ones(5))
    return [nn.Parameter(one.to("cuda")) for one in made]


def train(parameters, optimizer, steps: int, scheduler=None) -> None:
    for step in range(steps):
        sum((p - p.detach().roll(1) * 0.5).square().sum() * (1 + step % 2) for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def trained(build, one: Plan, steps: int = 4):
    """With a learning rate that falls at each step, by a scheduler that was there before the plan."""
    parameters = weights()
    optimizer = build(parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert autotune.apply_to_optimizer(one, optimizer) is optimizer
    train(parameters, optimizer, steps, scheduler)
    return parameters, optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


BUILDS = {
    "AdamW": adamw,
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "centered RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.0}]),
}


@pytest.fixture
def _hooks_on_card(card, monkeypatch) -> None:
    """Hooks of a backward pass are not told by the stand-in where a tensor is: here they are."""
    update = optimizer_step._Update.__call__

    def told(self, parameter):
        with stand_in._Function(card):
            update(self, parameter)

    monkeypatch.setattr(optimizer_step._Update, "__call__", told)


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum"])
@pytest.mark.parametrize("kind", ["for_loop", "fused", "default"])
def test_half_precision_moves_as_by_one_kernel_for_each_operation_to_the_bit(card, name, kind, monkeypatch):
    """Also where one for all is asked for: a CPU's of SGD would leave most of it where it was."""
    monkeypatch.setitem(globals(), "weights", partial(halves, weights()))
    plans = plan("default"), plan("host", optimizer=Optimizer(kind=kind))
    ends = [trained(BUILDS[name], one)[0][:2] for one in plans]  # the last is left to the card
    assert all(map(torch.equal, *ends))


def halves(wholes):
    return [nn.Parameter(one.detach().bfloat16()) for one in wholes]


@pytest.mark.usefixtures("_hooks_on_card")
@pytest.mark.parametrize("name", BUILDS)
def test_every_class_moves_as_it_does_on_the_card_to_the_bit(card, name):
    """A learning rate that is scheduled, groups and options of a class are the optimizer's own; a step in backward
    does the same."""
    theirs, stock = trained(BUILDS[name], plan("default"))
    for others in ({}, {"optimizer_step": OptimizerStep(kind="in_backward")}):
        ours, optimizer = trained(BUILDS[name], plan(**others))
        assert all(map(torch.equal, ours, theirs))
        assert optimizer.state_dict()["param_groups"] == stock.state_dict()["param_groups"]
        assert not any(card.holds(one) for p in ours[:2] for one in optimizer.state[p].values() if one.dim())
        assert all(p.grad is None for p in ours)


def test_the_host_makes_the_step_by_one_kernel_unless_it_is_told_another(card):
    """The class's own fused one, which a CPU has; the result is that of the card up to rounding."""
    ours, _ = trained(adamw, Plan(settings=Settings(optimizer_state=HOST)))
    theirs, _ = trained(adamw, plan("default"))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize("then", ["default", "host", "8bit"])
@pytest.mark.parametrize("before", ["default", "host", "8bit"])
def test_a_state_dict_goes_from_kind_to_kind(card, before, then):
    """Through a file that is read by weights alone, before a plan is applied and after; on the host it is torch's
    own."""
    parameters, optimizer = trained(adamw, plan(before))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for is_applied in (True, False) if before != "8bit" else (True,):
        file.seek(0)
        ours = [nn.Parameter(p.detach().clone()) for p in parameters]
        other = adamw(ours)
        if is_applied:
            autotune.apply_to_optimizer(plan(then), other)
        other.load_state_dict(torch.load(file, weights_only=True))
        autotune.apply_to_optimizer(plan(then), other)
        kept = other.state[ours[1]]
        assert all(card.holds(one) == (then != "host") for name, one in kept.items() if "exp_avg" in name)
        theirs = [nn.Parameter(p.detach().clone()) for p in parameters]
        going_on = autotune.apply_to_optimizer(plan(before), adamw(theirs))
        going_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(theirs, going_on, 2)
        train(ours, other, 2)
        if "8bit" in (before, then):
            assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(ours, theirs, strict=True))
        if "8bit" not in (before, then) or before == then:
            assert all(map(torch.equal, ours, theirs))
    if before == "host":
        names = {*optimizer.state_dict()["state"][0]}
        assert names == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("then", ["default", "8bit"])
def test_a_second_plan_takes_the_state_with_it(card, then):
    """From the card to the host and back, in the middle of a training by a kernel that counts steps on the card."""

    def build(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)

    own = {"optimizer": Optimizer()}
    stock, theirs = trained(build, plan("default", **own), 2)
    ours, optimizer = trained(build, plan("default", **own), 2)
    for kind in ("host", then):
        autotune.apply_to_optimizer(plan(kind, **own), optimizer)
        train(ours, optimizer, 2)
        train(stock, theirs, 2)
    assert all(torch.allclose(a, b, atol=1e-6 if then == "default" else 0.05) for a, b in zip(ours, stock, strict=True))
    assert all(card.holds(optimizer.state[p]["step"]) for p in ours)


def test_a_training_that_accumulates_and_clips_is_the_card_s_own(card):
    """Two micro-batches a step, norms at most 0.1; and it goes on from a saved state in the middle of an epoch."""
    task = line_of(max_grad_norm=0.1)
    batch = Batch(micro=2, accumulate=2)
    stock, first, second = (apply(plan(kind, batch=batch), task) for kind in ("default", "host", "host"))
    assert first.device.type == "cuda"
    for one in stock.loader:
        stock.step(one)
    for number, one in enumerate(first.loader):
        first.step(one)
        if number == 4:  # the fifth micro-batch: the first of a step
            second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one in second.loader:
        second.step(one)
    for one in (first, second):
        assert torch.equal(one.model.weight, stock.model.weight)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_loss_scaler_skips_its_step(card, is_fused):
    """A kernel that is told of an infinite gradient, and unscales gradients, does on the host what it does on the
    card."""
    ours, theirs = weights(), weights()
    for parameters, kind in ((ours, "host"), (theirs, "default")):
        optimizer = torch.optim.Adam(parameters, lr=0.1, fused=is_fused)
        autotune.apply_to_optimizer(plan(kind, optimizer=Optimizer()), optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        for factor in (1.0, float("inf"), 2.0):
            before = [p.detach().clone() for p in parameters]
            scaler.scale(sum((p * p).sum() for p in parameters) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert all(map(torch.equal, parameters, before)) == (factor == float("inf"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_a_cpu_s_job_has_its_state_on_the_host_already():
    """It is refused in words, and no search offers it."""
    words = "the state is on the host already, as all of a CPU's job is"
    enough = {"num_trainable": 2**22, "optimizer_states": 2}
    assert HOST.unavailable(facts(**enough)) == words
    assert HOST not in OptimizerState.choices(facts(**enough))
    on_a_card = OptimizerState.choices(facts(**enough, device=CARD))
    assert on_a_card[-1] == HOST
    assert OptimizerState.extremes(on_a_card) == (OptimizerState(), HOST)
    with pytest.raises(PlanError, match=f"optimizer_state.kind: host: {words}. Use kind: default"):
        autotune.apply_to_optimizer(plan(), adamw([nn.Parameter(torch.ones(2**13))]))


def test_what_it_takes_of_the_host_is_known():
    """Two averages of 4 bytes, and a piece of weights and gradients."""
    known = facts(num_trainable=2**22, optimizer_states=2, device=CARD)
    assert HOST.host_cached_bytes(known) == 2**22 * 2 * 4 + 2 * 4 * kept_state.piece_of(2**22)
    assert OptimizerState(kind="8bit").host_cached_bytes(known) == 0
    assert HOST.host_cached_bytes(facts(num_trainable=2**22, optimizer_states=2)) == 0


@pytest.mark.parametrize("fit", [fit_memory_model, fit_probed_model])
def test_the_memory_model_knows_that_the_card_keeps_none(fit):
    """Eight weights of 256 KiB and their gradients, as a step on a card takes it; its own state would be twice that."""
    task = dataclasses.replace(
        line_of(samples=[torch.ones(SIDE)] * 24, batch_size=8),
        build_model=lambda: nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(8))),
    )
    batch = Batch(micro=8)
    for kind, each in (("default", 4), ("host", 2)):
        predicted = fit(plan(kind, batch=batch), task, target="cuda").peak_bytes(8) / 2**18
        assert 8 * each <= predicted < 8 * each + 4
        with Card().in_place():
            training = apply(plan(kind, batch=batch), task)
            for one in training.loader:
                training.step(one)
            measured = torch.cuda.max_memory_allocated() / 2**18
            del training, one
        assert measured == pytest.approx(predicted, rel=0.03)


def line_of(samples=None, **pieces) -> Task:
    """A linear layer whose outputs are averaged."""
    made = samples or [*torch.randn((16, 64), generator=torch.Generator().manual_seed(0))]
    task = line(made, batch_size=4, build_optimizer=torch.optim.AdamW)
    return dataclasses.replace(task, **{"build_model": lambda: nn.Linear(64, 128), **pieces})
