"""``offload: {kind: parameters, to: host, trained: true}`` on a card: its contract, what is there, and how long a step
takes by the card's clock."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from offloaded_jobs import Computes
from search_tables import facts
from stand_in import Card
from torch import nn

import autotune
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Device, Facts, Settings, Technique, offload
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers import optimizer_step
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.techniques.support.bits import kept_state
from autotune.techniques.support.disk import offloading
from autotune.techniques.support.disk.kept_on_host import most_host_bytes
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.testing.facts import facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.training.apply_plan import apply
from autotune.training.training import Training

TRAINED = Offload(kind="parameters", to="host", trained=True)
IN_BACKWARD = OptimizerStep(kind="in_backward")
CARD = Device(type="cuda", name="A card", memory_bytes=2**33, capability=(8, 0), bf16=True)
FEATURES, SAMPLES, BLOCKS = 128, 16, 8
WEIGHT_BYTES = 4 * FEATURES**2
"""64 KiB."""
pytestmark = pytest.mark.usefixtures("one_thread_only")


def on_card(task: Task) -> Facts:
    """Of a task of the zoo, whose job is a card's."""
    return facts_of(task).model_copy(update={"device": CARD})


@pytest.mark.medium
class TestOnACard(TechniqueContract):
    """On every model of the zoo, tensors of any size."""

    technique = Offload
    bitwise = True
    beside = (IN_BACKWARD,)
    keeps_gradients = False
    lacking = (TRAINED,)
    refuses = {
        "accumulation": "accumulation adds them up",
        "clipping": r"the norm of all gradients is to be clipped at 0\.1",
        "loss scaler": "before the loss scaler has seen all gradients",
    }
    test_a_pickle_is_a_model_of_its_own = None  # what is unpickled is not on the stand-in

    @pytest.fixture(autouse=True)
    def _everything(self, monkeypatch: pytest.MonkeyPatch, card: Card) -> Any:
        for module in (offload, offloading):
            monkeypatch.setattr(module, "_LEAST_BYTES", 1)
        for part in ("techniques", "in_use"):
            monkeypatch.setattr(f"autotune.testing.{part}.facts_of", on_card)
        yield
        assert not card.races

    def _choices(self, task: Task) -> tuple[Technique, ...]:
        """Nobody is offered it, since it takes ``optimizer_step``."""
        return tuple(one for one in (Offload(), TRAINED) if one.unavailable(on_card(task)) is None)


class Block(nn.Module):
    """Two weights of 64 KiB."""

    card: Card | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Computes.apply(self.first(x).tanh(), self.card, 0.01, 0.04))


def task() -> Task:
    return autotune.Task(
        build_model=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))),
        build_dataset=lambda: list(torch.randn(4 * SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: (model(batch) - batch).square().mean(),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        batch_size=SAMPLES,
    )


def of(setting: Offload = TRAINED, **others: Any) -> Settings:
    return Settings(offload=setting, batch=Batch(micro=SAMPLES), optimizer_step=IN_BACKWARD, **others)


def trained(setting: Offload = TRAINED, **others: Any) -> tuple[Training, list[torch.Tensor]]:
    """After four steps, with their losses."""
    training = apply(Plan(settings=of(setting, **others)), task())
    return training, [training.step(batch).loss for batch in training.loader]


@pytest.mark.parametrize("link_bytes_per_s", [float("inf"), 1e8, 1e6])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"precision": Precision(kind="bf16")},
        {"checkpointing": Checkpointing(kind="blocks")},
        {"optimizer_state": OptimizerState(kind="8bit")},
    ],
    ids=["alone", "bf16", "checkpointing", "8bit"],
)
def test_it_trains_as_without_it(card, others, link_bytes_per_s):
    """To the bit, however long copies take."""
    card.link_bytes_per_s, card.kernel_s = link_bytes_per_s, 1e-5
    (ours, found), (stock, wanted) = (trained(one, **others) for one in (TRAINED, Offload()))
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, ours.model.state_dict().values(), stock.model.state_dict().values()))
    assert not card.races


def test_weights_and_state_are_on_the_host(card):
    """AdamW has two averages of each of sixteen weights of 64 KiB. Three blocks' weights are on the card."""
    training, _ = trained()
    rows = training.optimizer.state
    for one in training.model.parameters():
        kept = [one, rows[one]["exp_avg"], rows[one]["exp_avg_sq"]]
        assert all(isinstance(tensor, OffloadedWeight) and tensor.is_cuda for tensor in kept)
    assert most_host_bytes(training.model) == 3 * 2 * BLOCKS * WEIGHT_BYTES
    training.model(torch.ones(1, FEATURES).to("cuda"))
    there = {
        number
        for number, one in enumerate(training.model)
        for weight in (one.first.weight, one.second.weight)
        for tensor in (weight, rows[weight]["exp_avg"])
        if tensor.content._there is not None
    }
    assert there == {5, 6, 7}
    assert not any(rows[one]["exp_avg"].content._there is not None for one in training.model.parameters())


def test_state_dicts_are_read_by_stocks_model_and_optimizer(card):
    """And go on to the same numbers."""
    ours, _ = trained()
    stock = apply(Plan(settings=Settings(batch=Batch(micro=SAMPLES))), task())
    state, rows = copy.deepcopy(ours.model.state_dict()), copy.deepcopy(ours.optimizer.state_dict())
    assert {type(one) for row in rows["state"].values() for one in row.values()} == {torch.Tensor}
    stock.model.load_state_dict(state)
    stock.optimizer.load_state_dict(rows)
    for batch in ours.loader:
        assert torch.equal(ours.step(batch).loss, stock.step(batch).loss)


def test_state_in_a_pickle_is_known_as_such(card):
    """So that it comes in backward alone."""
    training, _ = trained()
    weight = training.model[0].first.weight
    kept: Any = (weight, training.optimizer.state[weight]["exp_avg"])
    for read in (pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        assert [one.content.is_state for one in read] == [False, True]
        assert [one.content.block for one in read] == [0, 0]
        assert read[0].store is read[1].store
        assert read[0].store._has_state


def test_a_state_dict_of_the_optimizer_is_the_hosts(card):
    """All of it may have no room on the card."""
    training, _ = trained()
    before = torch.cuda.memory_allocated()
    rows = training.optimizer.state_dict()["state"].values()
    assert torch.cuda.memory_allocated() == before
    assert not any(card.holds(row[name]) for row in rows for name in ("exp_avg", "exp_avg_sq"))


def test_loading_has_one_weights_state_on_the_card(card):
    """At a time: two averages of 64 KiB, and what one is made of. They train on to the same numbers."""
    before, _ = trained()
    made = apply(Plan(settings=of()), task())
    made.model.load_state_dict(before.model.state_dict())
    rows, at_first = copy.deepcopy(before.optimizer.state_dict()), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.optimizer.load_state_dict(rows)
    assert torch.cuda.memory_allocated() == at_first
    assert torch.cuda.max_memory_allocated() - at_first <= 4 * WEIGHT_BYTES
    for batch in before.loader:
        assert torch.equal(before.step(batch).loss, made.step(batch).loss)
    assert not card.races


def test_state_of_another_shape_than_its_weight_is_loaded(card, monkeypatch):
    """Adafactor's averages over rows and columns."""
    monkeypatch.setattr(kept_state, "LEAST", 1)
    build = lambda parameters: torch.optim.Adafactor([{"params": parameters, "capturable": False}])  # noqa: E731
    one = dataclasses.replace(task(), build_optimizer=build)
    before, made = (apply(Plan(settings=of()), one) for _ in range(2))
    batches = list(before.loader)
    before.step(batches[0])
    made.model.load_state_dict(before.model.state_dict())
    made.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    row = next(iter(made.optimizer.state.values()))
    assert [row[name].shape for name in ("row_var", "col_var")] == [(FEATURES, 1), (1, FEATURES)]
    for batch in batches:
        assert torch.equal(before.step(batch).loss, made.step(batch).loss)


def test_weights_are_updated_on_another_stream_than_forwards(card, monkeypatch):
    """Their memory is that one's, and is used again once what was updated has left it."""
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5
    side, update, found = torch.cuda.Stream(), optimizer_step._Update.__call__, []

    def on_side(own: Any, parameter: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        parameter.grad.record_stream(side)  # type: ignore[union-attr]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            update(own, parameter)
        current.wait_stream(side)

    monkeypatch.setattr(optimizer_step._Update, "__call__", on_side)
    for setting in (Offload(), TRAINED):
        training = apply(Plan(settings=of(setting)), task())
        found.append([training.step(batch).loss for _ in range(2) for batch in training.loader])
        assert not card.races
    assert all(map(torch.equal, *found))


def test_copies_hide_behind_what_is_computed(card):
    """A block's weights take 3 ms to come, and with two averages 9 ms, and as long to go: 18 ms of 40 in backward."""
    seconds = {}
    for setting in (Offload(), TRAINED):
        card.link_bytes_per_s = 2 * WEIGHT_BYTES / 0.003
        training = apply(Plan(settings=of(setting)), task())
        for one in training.model:
            one.card = card
        batch = next(iter(training.loader))
        for _ in range(3):
            torch.cuda.synchronize()
            began_s = card.now_s
            training.step(batch)
        torch.cuda.synchronize()
        seconds[setting.kind] = card.now_s - began_s
    assert seconds["none"] == pytest.approx(0.4, rel=0.02)
    assert seconds["parameters"] <= 1.05 * seconds["none"]
    assert not card.races


@pytest.mark.parametrize("fit", [fit_memory_model, fit_probed_model])
def test_memory_is_predicted_before_a_trial(fit):
    predicted, measured = {}, {}
    for setting in (Offload(), TRAINED):
        one = Plan(settings=of(setting))
        known = fit(one, task(), target="cuda")
        predicted[setting.kind] = known.peak_bytes(SAMPLES)
        on_host = 3 * 2 * BLOCKS * WEIGHT_BYTES if setting == TRAINED else 0
        assert known.host_bytes(SAMPLES) == on_host
        with Card().in_place():
            training = apply(one, task())
            for batch in training.loader:
                training.step(batch)
            measured[setting.kind] = torch.cuda.max_memory_allocated()
            assert most_host_bytes(training.model) == on_host
            del training, batch
        assert measured[setting.kind] == pytest.approx(predicted[setting.kind], rel=0.03)
    assert predicted["none"] - predicted["parameters"] >= 0.9 * 3 * 2 * (BLOCKS - 4) * WEIGHT_BYTES


def test_it_is_refused_where_it_cannot_be():
    of_a_card = facts(num_blocks=3, device=CARD, num_parameters=10**9, num_trainable=10**9)
    assert TRAINED.unavailable(of_a_card) is None
    assert TRAINED not in Offload.choices(of_a_card)
    assert TRAINED.describe() == "weights and optimizer state on the host"
    both = of(optimizer_state=OptimizerState(kind="host"))
    assert "optimizer_state keeps the same state on the host" in (both.conflict() or "")
