"""``offload: {kind: activations, to: host}`` on a card: what is moved, when, and how long it takes by the card's
clock."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from offloaded_jobs import Computes, trains_as_without
from search_tables import facts
from stand_in import Card, seen_by
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Budget, Plan
from autotune.task import Task
from autotune.techniques import Device, Facts, Settings, offload
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.techniques.support.disk import offloading, saved_elsewhere
from autotune.techniques.support.disk.saved_to_host import Host, most_host_bytes
from autotune.testing.facts import facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.training.apply_plan import apply

ON_HOST = Offload(kind="activations", to="host")
CARD = Device(type="cuda", name="A card", memory_bytes=2**33, capability=(8, 0), bf16=True)
FEATURES, SAMPLES, BLOCKS = 128, 256, 12
TENSOR_BYTES = 4 * FEATURES * SAMPLES
"""Of (samples, features): 128 KiB."""
pytestmark = pytest.mark.usefixtures("one_thread_only")


def on_card(task: Task) -> Facts:
    """Of a task of the zoo, whose job is a card's."""
    return facts_of(task).model_copy(update={"device": CARD})


@pytest.mark.medium
class TestOnACard(TechniqueContract):
    """On every model of the zoo, tensors of any size."""

    technique = Offload
    bitwise = True
    lacking = tuple(Offload(kind=kind, to=to) for kind in ("activations", "parameters") for to in ("disk", "host"))
    test_a_pickle_is_a_model_of_its_own = None  # what is unpickled is not on the stand-in

    @pytest.fixture(autouse=True)
    def _everything(self, monkeypatch: pytest.MonkeyPatch, card: Card) -> Any:
        for module in (offload, offloading, saved_elsewhere):
            monkeypatch.setattr(module, "_LEAST_BYTES", 1)
        for part in ("techniques", "in_use"):
            monkeypatch.setattr(f"autotune.testing.{part}.facts_of", on_card)
        yield
        assert not card.races


class Block(nn.Module):
    """Keeps what it is given, and what the tanh returns: 256 KiB; and a dropout's mask in training."""

    card: Card | None = None
    seconds = 0.01

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(
            self.second(Computes.apply(self.first(x).tanh(), self.card, self.seconds, 2 * self.seconds))
        )


def model_of(*, number: int = BLOCKS, dropout: float = 0.0, device: str = "cuda", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(number)))
    return autotune.apply_to_model(Plan(settings=Settings(**settings)), model, device=device)


def inputs() -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).to("cuda").requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = inputs() if x is None else x
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(one.grad for one in model.parameters())]  # type: ignore[list-item]


def host_of(model: nn.Module) -> Host:
    """Where its first block saves."""
    found: Host = vars(model[0])["forward"].args[1]
    return found


def rooms(model: nn.Module) -> int:
    """Tensors that the host's memory has room for, while none is in use."""
    copies = host_of(model)._copies
    return 0 if copies is None else len(copies._free)


@pytest.mark.parametrize("link_bytes_per_s", [float("inf"), 1e9, 1e6])
@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks", every=2)}, {"layers": Layers(kind="exact")}], ids=str
)
def test_values_gradients_and_dropout_are_the_stock_models(card, others, link_bytes_per_s):
    """However long copies take: nothing is read before it has come, or given back before it has left, and the host
    waits for none."""
    card.link_bytes_per_s, card.kernel_s = link_bytes_per_s, 1e-5
    ours, theirs = model_of(dropout=0.5, offload=ON_HOST, **others), model_of(dropout=0.5, **others)
    for _ in range(2):
        x, other = inputs(), inputs()
        card.waits.clear()
        found = gradients(ours, x)
        assert not card.waits
        assert all(map(torch.equal, found, gradients(theirs, other)))
    assert not card.races
    assert rooms(ours) > 0


def test_what_blocks_save_leaves_the_card_but_for_two_of_them(card):
    """Of each of these, what it was given and what the tanh returns; and the model's output."""
    kept = {}
    for setting in (Offload(), ON_HOST):
        model, x = model_of(offload=setting), inputs()
        before = torch.cuda.memory_allocated()
        out = model(x)
        kept[setting.kind] = torch.cuda.memory_allocated() - before
        del out, model
    assert kept["none"] // TENSOR_BYTES == 2 * BLOCKS
    assert kept["activations"] // TENSOR_BYTES == 2 * 2 + 1


def test_in_backward_what_two_blocks_before_saved_is_there_already(card, monkeypatch):
    """Peak: the same in steps one after the other, whatever the host is ahead by."""
    model, peaks = model_of(offload=ON_HOST), []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        gradients(model)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] == peaks[2]
    assert rooms(model) == 2 * BLOCKS


def seconds_of(card: Card, setting: Offload, link_bytes_per_s: float) -> float:
    """Of a step: 12 blocks of 10 ms forward and 20 ms backward."""
    card.link_bytes_per_s = link_bytes_per_s
    model, x = model_of(offload=setting), inputs()
    for one in model:
        one.card = card
    gradients(model, x)
    torch.cuda.synchronize()
    began_s = card.now_s
    gradients(model, x)
    torch.cuda.synchronize()
    return card.now_s - began_s


def test_copies_hide_behind_what_is_computed(card):
    """Where a block's 256 KiB take 9 ms, a step takes what it takes in memory; where they take 40 ms, what the copies
    take. Launches are the rest."""
    stock_s = seconds_of(card, Offload(), 1e9)
    assert stock_s == pytest.approx(0.36, rel=0.02)
    assert seconds_of(card, ON_HOST, 2 * TENSOR_BYTES / 0.009) <= 1.05 * stock_s
    copies_s = 2 * BLOCKS * 0.04
    assert seconds_of(card, ON_HOST, 2 * TENSOR_BYTES / 0.04) == pytest.approx(copies_s, rel=0.15)
    assert not card.races


class Masked(nn.Module):
    """Multiplies with a tensor that all blocks are given, with a weight, and with eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SAMPLES, FEATURES))
        self.register_buffer("table", torch.ones(SAMPLES, FEATURES))
        self.few = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask * self.weight * self.table * self.few


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = one(x, mask)
        return x


def test_weights_what_is_small_and_what_all_blocks_share_stay(card):
    """Of each of six blocks leave x, whose product with the mask needs it not, x · mask and x · mask · weight · table;
    and once the mask, before it is known to be shared. It stays from the third block on."""
    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_HOST)), Model(), device="cuda")
    stock = Model().to("cuda")
    mask = torch.rand(SAMPLES, FEATURES).to("cuda")
    for one in (stock, model):
        x = inputs()
        card.calls.clear()
        loss = one(x, mask).square().sum()
        num_out = card.calls.count("copy_")
        loss.backward()
    assert num_out == 6 * 2 + 1
    assert card.calls.count("copy_") - num_out <= num_out - 2 * 2
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert not card.races


def test_what_was_changed_before_it_left_is_told_as_torch_tells_it(card):
    """A copy that is on its way may have either value."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).tanh()
            y.sin().mul_(2)
            return y.mul_(2)

    model = autotune.apply_to_model(
        Plan(settings=Settings(offload=ON_HOST)), nn.Sequential(*(InPlace() for _ in range(4))), device="cuda"
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(inputs()).sum().backward()


def test_a_graph_that_backward_never_comes_to_gives_all_back(card):
    """Also while its copies are on their way, and between two backward passes through another."""
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5
    model, before = model_of(offload=ON_HOST), None
    gc.disable()
    try:
        for _ in range(3):
            model(inputs())
            loss = model(inputs()).sum()
            loss.backward(retain_graph=True)
            first = [one.grad.clone() for one in model.parameters()]
            model.zero_grad()
            loss.backward()
            assert all(map(torch.equal, first, [one.grad for one in model.parameters()]))
            del loss
            model.zero_grad()
            found = torch.cuda.memory_allocated(), rooms(model)
            assert before in (None, found)
            before = found
    finally:
        gc.enable()
    assert not card.races


def test_a_graph_that_is_gone_while_another_stream_is_current_keeps_its_memory_until_it_has_left(card):
    """Garbage is collected anywhere: what was to be copied out is the computing stream's memory, and so is what was
    fetched."""
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5
    model, other = model_of(offload=ON_HOST), torch.cuda.Stream()
    for _ in range(2):
        loss = model(inputs()).sum()
        with torch.cuda.stream(other):
            other_free_at_s = other.free_at_s
            del loss
            assert other.free_at_s == other_free_at_s
    assert not card.races


def test_the_hosts_memory_is_that_of_the_largest_step_whatever_lengths_come(card):
    """Sixteen tensors of 4,000 rows, 2 MB each, take 2 MiB of pinned memory each; of 1,000 rows, 0.5 MiB."""
    model, had = model_of(number=8, offload=ON_HOST), []
    for rows in (1000, 4000, 2000, 500, 3000, 1500, 260):
        model(torch.randn(rows, FEATURES).to("cuda").requires_grad_()).sum().backward()
        model.zero_grad()
        copies = host_of(model)._copies
        assert copies is not None
        had.append(copies.most_bytes >> 10)
        assert sum(map(len, copies._free)) == copies._had_bytes
    assert had == [16 * 512, *[16 * 2048] * 6]


@pytest.mark.parametrize("link_bytes_per_s", [float("inf"), 1e6])
def test_a_model_that_recomputes_blocks_by_itself_with_reentrant_checkpoints(card, link_bytes_per_s):
    """They run again within backward, one graph in another."""
    card.link_bytes_per_s, card.kernel_s = link_bytes_per_s, 1e-5

    class Recomputes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self:
                x = checkpoint(seen_by(card, one), x, use_reentrant=True)
            return x

    found = []
    for setting in (Offload(), ON_HOST):
        torch.manual_seed(0)
        model = Recomputes(*(Block(dropout=0.5) for _ in range(4)))
        model = autotune.apply_to_model(Plan(settings=Settings(offload=setting)), model, device="cuda")
        found.append([*gradients(model), *gradients(model)])
    assert all(map(torch.equal, *found))
    assert rooms(model) > 0
    assert not card.races


def test_a_copy_has_memory_of_its_own_and_survives_a_pickle(card):
    model = model_of(offload=ON_HOST, number=3)
    gradients(model)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model_of(offload=ON_HOST, number=3, device="cpu")))):
        assert host_of(one) is not host_of(model)
        assert vars(one[0])["forward"].args[2] is one[0]


def task_of(**settings: Any) -> Task:
    """Linear layers that keep what they are given, and the tanh's."""
    return autotune.Task(
        build_model=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))),
        build_dataset=lambda: list(torch.randn(16, SAMPLES, FEATURES)),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=4,
        **settings,
    )


@pytest.mark.parametrize(
    "others",
    [
        {"precision": Precision(kind="bf16")},
        {"batch": Batch(micro=2, accumulate=2)},
        {"optimizer_step": OptimizerStep(kind="in_backward")},
    ],
    ids=str,
)
def test_a_training_is_the_one_without(card, others):
    assert trains_as_without(ON_HOST, task_of(), others)
    assert not card.races


@pytest.mark.parametrize("fit", [fit_memory_model, fit_probed_model])
def test_memory_is_predicted_before_a_trial(fit):
    """As a step on a card takes it, with what is on its way in forward and in backward."""
    predicted, measured = {}, {}
    for setting in (Offload(), ON_HOST):
        one = Plan(settings=Settings(offload=setting, batch=Batch(micro=4)))
        known = fit(one, task_of(), target="cuda")
        predicted[setting.kind] = known.peak_bytes(4)
        on_host = 2 * BLOCKS * 4 * TENSOR_BYTES if setting.kind == "activations" else 0
        off = 1 / 3 if fit is fit_probed_model else 0  # by a step of 6 samples, whose 768 KiB take 1 MiB
        assert known.host_bytes(4) == pytest.approx(on_host, rel=off, abs=0)
        with Card().in_place():
            training = apply(one, task_of())
            for batch in training.loader:
                training.step(batch)
            measured[setting.kind] = torch.cuda.max_memory_allocated()
            assert most_host_bytes(training.model) == on_host
            del training, batch
        assert measured[setting.kind] == pytest.approx(predicted[setting.kind], rel=0.03)
    saved = (2 * BLOCKS - 2 * 3) * 4 * TENSOR_BYTES
    assert predicted["none"] - predicted["activations"] >= 0.8 * saved


def test_each_device_has_its_place_and_another_is_refused_in_words():
    of_a_card = facts(num_blocks=3, device=CARD)
    assert Offload.choices(of_a_card) == (Offload(), ON_HOST)
    assert ON_HOST not in Offload.choices(facts(num_blocks=3))
    assert ON_HOST.unavailable(facts(num_blocks=3)) == "a CPU's activations are on the host already"
    words = Offload(kind="activations").unavailable(of_a_card)
    assert words == "a card's activations are not written to a file: use to: host"
    assert ON_HOST.describe() == "activations on the host"
    assert ON_HOST.in_blocks([1], 3) == Offload(kind="activations", to="host", blocks=(1,))
    with pytest.raises(ValueError, match="kind none moves nothing, but got host"):
        Offload(to="host")


def test_a_model_that_is_not_on_the_card_is_refused_in_words(card):
    model = model_of(offload=ON_HOST, number=2, device="cpu")
    with pytest.raises(PlanError, match=r"offload\.to: host is where a card's activations go.*Use to: disk"):
        model(torch.ones(2, FEATURES))


def test_a_plan_of_before_writes_to_a_file():
    plan = Plan.from_yaml(Plan(settings=Settings(offload=Offload(kind="activations"))).to_yaml())
    assert plan.settings.offload.to == "disk"
    assert "to:" not in plan.to_yaml()
    assert Plan(budget=Budget(device="cuda"), settings=Settings(offload=ON_HOST)).settings.written()["offload"] == {
        "kind": "activations",
        "to": "host",
    }
