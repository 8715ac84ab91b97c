"""``optimizer_state``: its contract, what is kept of a state, and state dicts that go from kind to kind."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle

import pytest
import torch
from line_task import line, training_of
from search_tables import facts
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers import optimizer_state
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.support.bits import kept_state
from autotune.techniques.support.bits.saved_state import STORES, empty
from autotune.techniques.support.bits.stores import Factors
from autotune.testing.facts import facts_of
from autotune.testing.techniques import TechniqueContract

KINDS = tuple(OptimizerState(kind=kind) for kind in ("8bit", "4bit", "bf16", "factored"))
IN_BITS = ("bf16", "8bit", "4bit")
SIZE = 2**13
pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated in several."""
    monkeypatch.setattr(kept_state, "LEAST_PIECE", 2**12)


class TestOptimizerState(TechniqueContract):
    technique = OptimizerState
    lacking = KINDS
    rounds_within = 0.02  # by 4 bits of momentum in the tied model; all others are within 0.0025, 8 bits within 0.001

    @pytest.fixture(autouse=True)
    def _every_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The zoo's are small."""
        monkeypatch.setattr(optimizer_state, "_LEAST_BYTES", 0)
        monkeypatch.setattr(kept_state, "LEAST", 1)
        monkeypatch.setattr(kept_state, "LEAST_PIECE", 256)

    def _choices(self, task):
        """Factors too, which are for who lists them."""
        facts, others = facts_of(task), super()._choices(task)
        return (*others, *(one for one in KINDS[-1:] if one.unavailable(facts) is None))


def plan(kind: str, **others) -> Plan:
    return Plan(settings=Settings(optimizer_state=OptimizerState(kind=kind), **others))


BUILDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW with amsgrad, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.0}]),
}


def weights() -> list[nn.Parameter]:
    """One in channels_last, one of no whole number of blocks, one too small to be kept otherwise."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn((32, 32, 3, 3), generator=generator).to(memory_format=torch.channels_last)
    return [nn.Parameter(one) for one in (image, torch.randn(SIZE + 3, generator=generator), torch.ones(5))]


def train(parameters, optimizer, steps: int, scheduler=None, first: int = 0) -> None:
    for step in range(first, first + steps):
        sum((p - p.detach().roll(1) * 0.5).square().sum() * (1 + step % 2) for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def trained(build, settings: Settings, steps: int = 8):
    """With a learning rate that falls at each step, by a scheduler that was there before the plan."""
    parameters = weights()
    optimizer = build(parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert autotune.apply_to_optimizer(Plan(settings=settings), optimizer) is optimizer
    train(parameters, optimizer, steps, scheduler)
    return parameters, optimizer


def off(ours, theirs) -> float:
    """Relative difference of what was moved."""
    pairs = [(a - start, b - start) for a, b, start in zip(ours, theirs, weights(), strict=True)]
    difference = sum((a - b).square().sum() for a, b in pairs)
    return float((difference / sum(b.square().sum() for _, b in pairs)).sqrt().detach())


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.004), ("8bit", 0.02), ("4bit", 0.18)])
@pytest.mark.parametrize("name", BUILDS)
def test_every_class_moves_as_it_does_with_its_state_in_full(name, kind, most):
    """A learning rate that is scheduled, groups, kernels and the options of a class are the optimizer's own."""
    ours, optimizer = trained(BUILDS[name], plan(kind).settings)
    theirs, stock = trained(BUILDS[name], Settings())
    assert 0 < off(ours, theirs) < most
    assert torch.equal(ours[2], theirs[2])
    assert optimizer.state_dict()["param_groups"] == stock.state_dict()["param_groups"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(("8bit", "4bit"), BUILDS), ("factored", "fused Adam"), ("factored", "two groups")],
)
def test_a_step_in_backward_is_the_same_to_the_bit(name, kind):
    ours, mine = trained(BUILDS[name], plan(kind, optimizer_step=OptimizerStep(kind="in_backward")).settings)
    theirs, other = trained(BUILDS[name], plan(kind).settings)
    assert all(map(torch.equal, ours, theirs))
    for number, row in mine.state_dict()["state"].items():
        for key, value in row.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()["state"][number][key])), key


@pytest.mark.parametrize(("kind", "num_bytes"), [("bf16", 2), ("8bit", 1 + 4 / 256), ("4bit", 1 / 2 + 4 / 128)])
def test_what_is_kept_takes_as_many_bytes(kind, num_bytes):
    """Of each element of the two averages; codes are there of whole blocks."""
    (image, odd, small), optimizer = trained(torch.optim.AdamW, plan(kind).settings, 1)
    for parameter, num in ((image, image.numel()), (odd, SIZE + {"bf16": 3, "8bit": 256, "4bit": 128}[kind])):
        tensors = [one for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor) and one.dim()]
        assert sum(one.nbytes for one in tensors) == 2 * num * num_bytes
    assert {one.dtype for one in optimizer.state[small].values()} == {torch.float32}


@pytest.mark.parametrize("then", ["default", *STORES])
@pytest.mark.parametrize("before", ["default", *STORES])
def test_a_state_dict_goes_from_kind_to_kind(before, then):
    """Through a file that is read by weights alone; to the same kind to the bit."""
    parameters, optimizer = trained(BUILDS["AdamW"], plan(before).settings)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = autotune.apply_to_optimizer(plan(then), BUILDS["AdamW"](ours))
    other.load_state_dict(torch.load(file, weights_only=True))
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    if before == then:
        assert all(map(torch.equal, ours, parameters))
    names = {*other.state[ours[0]]}
    assert names == {*trained(BUILDS["AdamW"], plan(then).settings, 1)[1].state_dict()["state"][0]}
    assert off(ours, parameters) < (0.1 if {"4bit", "factored"} & {before, then} else 0.01)


@pytest.mark.parametrize(("kind", "most"), [("8bit", 0.01), ("4bit", 0.1)])
def test_state_of_another_memory_format_keeps_its_elements(kind, most):
    """Codes are in the order of the elements in memory, which is another here."""
    parameters, optimizer = trained(BUILDS["AdamW"], plan(kind).settings)
    ours = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in parameters]
    other = autotune.apply_to_optimizer(plan(kind), BUILDS["AdamW"](ours))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    assert ours[0].stride() != parameters[0].stride()
    assert off(ours, parameters) < most


@pytest.mark.parametrize(
    ("before", "then"),
    [("8bit", "8bit"), ("8bit", "default"), ("4bit", "4bit"), ("4bit", "8bit"), ("factored", "factored")],
)
def test_what_was_loaded_before_a_plan_is_gone_on_with(before, then):
    """A script loads its checkpoint, and then the plan comes to its optimizer."""
    parameters, optimizer = trained(BUILDS["AdamW"], plan(before).settings)
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = BUILDS["AdamW"](ours)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    autotune.apply_to_optimizer(plan(then), other)
    autotune.apply_to_optimizer(plan(then), optimizer)
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    assert all(map(torch.equal, ours, parameters))


@pytest.mark.parametrize("kind", ["8bit", "4bit", "factored"])
def test_a_second_plan_takes_the_state_with_it(kind):
    """From codes to the class's own, which then trains as if nothing had been there."""
    parameters, optimizer = trained(BUILDS["AdamW"], plan(kind).settings)
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = BUILDS["AdamW"](ours)
    autotune.apply_to_optimizer(Plan(settings=Settings()), optimizer)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {*optimizer.state[parameters[0]]} == {"step", "exp_avg", "exp_avg_sq"}
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    assert all(map(torch.equal, ours, parameters))


@pytest.mark.parametrize("kind", IN_BITS)
def test_an_average_falls_as_slowly_as_it_is_told(kind):
    """By a thousandth at each of 2,000 steps, which is less than half a step of any code; it is never 0."""
    store, like = STORES[kind], nn.Parameter(torch.zeros(4096))
    kept, saved = kept_state.KeptState(torch.optim.SGD([like])), empty("exp_avg_sq", store, like)
    values = torch.linspace(1e-6, 1.0, 4096)
    saved.write(0, values, kept._noise_of(("first",), values))
    for step in range(2000):
        now = saved.read(0, 4096) * 0.999
        saved.write(0, now, kept._noise_of((step,), now))
    found = saved.read(0, 4096)
    assert found.mean() / values.mean() == pytest.approx(0.999**2000, rel=0.1)
    assert found.min() > 0


@pytest.mark.parametrize("kind", IN_BITS)
def test_what_is_0_or_next_to_nothing_is_kept_so(kind):
    """A block of zeros, and one of which the largest is 1e-37."""
    store, like = STORES[kind], torch.empty(512)
    values = torch.cat((torch.zeros(256), torch.full((256,), 1e-37)))
    for signed in (True, False):
        fields = store.empty(like)
        store.write(fields, 0, values, signed, torch.full((512,), 0.999))
        assert torch.allclose(store.read(fields, 0, 512, signed), values, rtol=0.01, atol=0.0)


def test_4_bits_are_the_number_on_average():
    """Wherever it lies between two codes, of either sign; the largest of a block is kept as it is, and a half of noise
    rounds to the nearest code. The last block is no whole one."""
    store, like = STORES["4bit"], torch.empty(128 * 3 + 5)
    values = torch.linspace(0.05, 1.0, like.numel())
    for signed, signs in ((True, torch.ones_like(like).cumsum(0) % 2 * 2 - 1), (False, torch.ones_like(like))):
        fields = store.empty(like)
        found = torch.zeros_like(like)
        for step in range(200):
            store.write(fields, 0, values * signs, signed, torch.full_like(like, (step + 0.5) / 200))
            found += store.read(fields, 0, like.numel(), signed) / 200
        assert torch.allclose(found, values * signs, atol=0.002)
        assert float(found[-1]) == pytest.approx(float(signs[-1]), rel=1e-6)
        store.write(fields, 0, values * signs, signed, torch.full_like(like, 0.5))
        once = store.read(fields, 0, like.numel(), signed)
        levels = torch.arange(8) ** 2 / 49 if signed else torch.arange(1, 16) ** 4 / 15**4
        largest = torch.stack([part.max() for part in values.split(128)]).repeat_interleave(128)[: like.numel()]
        nearest = (levels - (values / largest)[:, None]).abs().amin(1)
        assert torch.allclose((once - values * signs).abs() / largest, nearest, atol=1e-5)


@pytest.mark.parametrize(
    ("like", "num_rows", "num_columns"),
    [
        (torch.ones(64, 128), 64, 128),
        (torch.ones(64, 128).t(), 64, 128),
        (torch.ones(1, 48, 160), 48, 160),
        (torch.ones(8, 48, 160), 8 * 48, 160),
        (torch.ones(32, 64, 3, 3), 32, 64 * 9),
        (torch.ones(32, 32, 3, 3).to(memory_format=torch.channels_last), 32 * 3, 32 * 3),
        (torch.ones(2, 5000), 2, 5000),
        (torch.ones(5000), 5000, 1),
    ],
)
def test_factors_are_of_the_matrix_with_fewest_rows_and_columns(like, num_rows, num_columns):
    """In the order of memory, whatever the shape; written in pieces, a matrix of rank 1 is read as it was."""
    store = Factors()
    fields = store.empty(like)
    assert {name: one.numel() for name, one in fields.items()} == {"rows": num_rows, "columns": num_columns}
    rows, columns = torch.linspace(1e-12, 1.0, num_rows), torch.linspace(2.0, 1e-9, num_columns)
    values = (rows[:, None] * columns).view(-1)
    for start in range(0, like.numel(), 2048):
        store.write(fields, start, values[start : start + 2048], False, values)
    found = [
        store.read(fields, start, min(start + 2048, like.numel()), False) for start in range(0, like.numel(), 2048)
    ]
    assert torch.allclose(torch.cat(found), values, rtol=1e-5, atol=0.0)


def test_factors_of_nothing_are_nothing():
    """A table of which two rows were used: no other has an average, and none is no number."""
    store, values = Factors(), torch.zeros(64, 128)
    fields = store.empty(values)
    values[3:5] = torch.linspace(1e-12, 1e-9, 128)
    store.write(fields, 0, values.view(-1), False, values)
    assert torch.allclose(store.read(fields, 0, values.numel(), False), values.view(-1), rtol=1e-5, atol=0.0)
    nothing = store.empty(values)
    assert torch.equal(store.read(nothing, 0, values.numel(), False), torch.zeros(values.numel()))


def test_means_are_those_of_adam_s_own_averages():
    """Of each row and column, after 20 steps of gradients that are no product; Adafactor keeps the same two."""
    ours, theirs = (nn.Parameter(torch.zeros(96, 128)) for _ in range(2))
    kept = autotune.apply_to_optimizer(plan("factored"), torch.optim.AdamW([ours], betas=(0.9, 0.95)))
    stock = torch.optim.AdamW([theirs], betas=(0.9, 0.95))
    for _ in range(20):
        ours.grad = theirs.grad = torch.randn(96, 128)
        kept.step()
        stock.step()
    (row,), full = kept.state_dict()["state"].values(), stock.state[theirs]["exp_avg_sq"]
    assert torch.allclose(row["exp_avg_sq.rows"], full.mean(1), rtol=1e-4)
    assert torch.allclose(row["exp_avg_sq.columns"], full.mean(0), rtol=1e-4)
    before = row["exp_avg_sq.rows"]
    autotune.apply_to_optimizer(plan("default"), kept)
    assert torch.allclose(kept.state[ours]["exp_avg_sq"], full.mean(1, True) * full.mean(0) / full.mean(), rtol=1e-4)
    assert before.numel() == 96


@pytest.mark.parametrize("share", [1e-2, 1e-4, 1e-6])
def test_steps_of_small_columns_stay_small(share):
    """One column of 128 has gradients of 1, all others of a share of that; Adam's own step is the learning rate at
    most. A code is at most 4 times what it stands for."""
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = autotune.apply_to_optimizer(plan("factored"), torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0))
    generator, sizes = torch.Generator().manual_seed(0), torch.where(torch.arange(128) > 0, share, 1.0)
    for _ in range(100):
        before = weight.detach().clone()
        weight.grad = sizes * torch.randn((64, 128), generator=generator).sign()
        optimizer.step()
        assert (weight - before).abs().max() < 8


def test_factors_take_an_eighth():
    """Of a matrix of 256 by 512: a byte and a scale for each of the first averages, and 4 for a row or column."""
    weight = nn.Parameter(torch.zeros(256, 512))
    optimizer = autotune.apply_to_optimizer(plan("factored"), torch.optim.AdamW([weight]))
    train([weight], optimizer, 1)
    tensors = [one for one in optimizer.state[weight].values() if isinstance(one, torch.Tensor) and one.dim()]
    assert sum(one.nbytes for one in tensors) == weight.numel() * (1 + 4 / 256) + 4 * (256 + 512)


def test_factors_change_what_is_trained_and_fewer_bits_do_not():
    """Quality is judged of the one, losses are compared of the others; the class as such is any of them."""
    assert [OptimizerState(kind=kind).changes_function for kind in ("default", *STORES)] == [False] * 4 + [True]
    assert "function" not in OptimizerState.affects
    assert Settings(optimizer_state=KINDS[-1]).affect("function")
    assert KINDS[-1].exactness(facts()) == "lossy"


@pytest.mark.parametrize("kind", ["8bit", "4bit", "factored"])
def test_a_loss_scaler_skips_its_step(kind):
    """A fused kernel that is told of an infinite gradient leaves weights and averages as they are."""
    parameters = weights()
    optimizer = autotune.apply_to_optimizer(plan(kind), BUILDS["fused Adam"](parameters))
    train(parameters, optimizer, 2)
    before = [p.detach().clone() for p in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in parameters) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, parameters, before))
    scaler.scale(sum(p.sum() for p in parameters)).backward()
    optimizer.zero_grad()


def test_hooks_of_the_user_are_called_once_a_step():
    """Before it, with all gradients as they are; after it; and with a closure."""
    parameters, seen = weights(), []
    optimizer = autotune.apply_to_optimizer(plan("8bit"), BUILDS["AdamW"](parameters))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    start = parameters[1].detach().clone()

    def closure():
        seen.append("closure")
        loss = sum(p.square().sum() for p in parameters)
        loss.backward()
        return loss

    assert optimizer.step(closure) == sum(p.square().sum() for p in weights())
    assert seen == ["before", "closure", "after"]
    assert not torch.equal(parameters[1], start)


def test_what_it_is_not_for_is_refused():
    """Another class, one without state, a difference under a root, a class of one's own."""

    class Mine(torch.optim.AdamW):
        pass

    (weight,) = weights()[1:2]
    for one in (torch.optim.AdamW([weight], amsgrad=True), torch.optim.RMSprop([weight])):
        with pytest.raises(PlanError, match="kind: factored: factored takes Adam or AdamW without amsgrad"):
            autotune.apply_to_optimizer(plan("factored"), one)
    for optimizer, reason in (
        (torch.optim.Adafactor([weight]), "but got Adafactor"),
        (torch.optim.SGD([weight]), "SGD as it stands keeps no state"),
        (torch.optim.RMSprop([weight], centered=True), "centered"),
        (Mine([weight]), "but got Mine"),
    ):
        with pytest.raises(PlanError, match=f"optimizer_state.kind: 8bit: .*{reason}.* Use kind: default"):
            autotune.apply_to_optimizer(plan("8bit"), optimizer)
    with pytest.raises(PlanError, match="fsdp and tensor share out"):
        Plan.from_yaml(
            "schema: autotune/plan@1\nsettings: {optimizer_state: {kind: 8bit}, parallel: {kind: fsdp, processes: 2}}\n"
        )


def test_it_is_offered_where_there_is_state_of_32_mib():
    enough = {"num_trainable": 2**22, "optimizer_states": 2}
    assert OptimizerState.choices(facts(**enough)) == (OptimizerState(), *KINDS[:-1])
    assert KINDS[-1].unavailable(facts(**enough)) is None
    assert OptimizerState.extremes((OptimizerState(), *KINDS)) == (OptimizerState(), KINDS[-1])
    assert "--max-quality-drop" in KINDS[-1].unavailable(facts(**enough, allow_lossy=False))
    assert OptimizerState.extremes(KINDS[:-1]) == (OptimizerState(kind="4bit"),)
    for changed in ({"optimizer": "LBFGS"}, {"optimizer_states": 1}, {"shared_by": "fsdp"}):
        assert OptimizerState.choices(facts(**enough | changed)) == (OptimizerState(),)


@pytest.mark.parametrize(("kind", "state"), [("default", 8), ("bf16", 4), ("8bit", 2), ("4bit", 1), ("factored", 1.05)])
def test_the_memory_model_knows_what_is_kept(kind, state):
    """Eight weights of 256 KiB: their own bytes, the gradients', and the state's; as real steps take it."""
    samples = [torch.ones(256)] * 64
    task = dataclasses.replace(
        line(samples, batch_size=8, build_optimizer=torch.optim.AdamW),
        build_model=lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))),
    )
    traced = fit_memory_model(plan(kind), task).peak_bytes(8) / 2**16
    assert 8 * (8 + state) <= traced < 8 * (8 + state) + 50
    assert fit_probed_model(plan(kind), task).peak_bytes(8) / 2**16 == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize("kind", STORES)
def test_a_training_that_accumulates_and_clips_goes_on_from_a_pickle(kind):
    """Two micro-batches a step, norms at most 0.1; a plan that is applied twice is the plan applied once."""
    batch = Batch(micro=2, accumulate=2)
    samples = torch.randn((16, 64), generator=torch.Generator().manual_seed(0))
    task = dataclasses.replace(
        line([*samples], batch_size=4, build_optimizer=torch.optim.AdamW),
        build_model=lambda: nn.Linear(64, 128),
        max_grad_norm=0.1,
    )
    stock, first, second = (
        training_of(task, batch=batch, optimizer_state=OptimizerState(kind=one)) for one in ("default", kind, kind)
    )
    autotune.apply_to_optimizer(plan(kind), second.optimizer)
    start = stock.model.weight.detach().clone()
    for number, batches in enumerate(zip(*(one.loader for one in (stock, first, second)), strict=True)):
        if number == 4:
            second.optimizer.load_state_dict(pickle.loads(pickle.dumps(second.optimizer.state_dict())))
        for training, one in zip((stock, first, second), batches, strict=True):
            training.step(one)
    assert torch.equal(first.model.weight, second.model.weight)
    difference = (first.model.weight - stock.model.weight).norm() / (stock.model.weight - start).norm()
    assert 0 < difference < {"bf16": 0.01, "8bit": 0.02, "4bit": 0.2, "factored": 0.3}[kind]
