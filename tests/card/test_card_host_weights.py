"""``offload: {kind: parameters, to: host}`` on a card: which weights are there, when they come, and how long a step
takes by the card's clock."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from offloaded_jobs import Computes, trains_as_without
from search_tables import facts
from stand_in import Card, in_use, seen_by
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Inference, Plan
from autotune.task import Task
from autotune.techniques import Device, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.techniques.support.disk.kept_on_host import HostContent, most_host_bytes
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.training.apply_plan import apply
from autotune.units import MIB

ON_HOST = Offload(kind="parameters", to="host")
CARD = Device(type="cuda", name="A card", memory_bytes=2**33, capability=(8, 0), bf16=True)
FEATURES, SAMPLES, BLOCKS = 128, 16, 8
WEIGHT_BYTES = 4 * FEATURES**2
"""64 KiB."""
pytestmark = pytest.mark.usefixtures("one_thread_only")


class Block(nn.Module):
    """Two frozen weights of 64 KiB, and a scale that trains."""

    card: Card | None = None

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(FEATURES, FEATURES).requires_grad_(False) for _ in range(2))
        self.scale, self.dropout = nn.Parameter(torch.ones(FEATURES)), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Computes.apply(self.first(x).tanh(), self.card, 0.01, 0.02)
        return self.dropout(self.second(x) * self.scale)


def stock_of(number: int = BLOCKS, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(number)))


def of(
    model: nn.Module, setting: Offload = ON_HOST, inference: bool = False, device: str | None = "cuda", **others: Any
):
    """The same model, with the plan on it."""
    plan = Plan(settings=Settings(offload=setting, **others), inference=Inference(tolerance=0.0) if inference else None)
    return autotune.apply_to_model(plan, model, device=device)


def inputs() -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).to("cuda").requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The loss, and gradients of the input and of what trains."""
    torch.manual_seed(2)
    x = inputs() if x is None else x
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(one.grad for one in model.parameters() if one.requires_grad)]  # type: ignore[list-item]


def away(blocks: nn.Module) -> list[bool]:
    """Whether the two weights of each block are offloaded."""
    weights = (weight for one in blocks for weight in (one.first.weight, one.second.weight))
    return [isinstance(one, OffloadedWeight) for one in weights]


def there(model: nn.Module) -> list[int]:
    """Blocks, by their number, whose weights are on the card or on their way."""
    return [number for number, one in enumerate(model) if content_of(one.first.weight)._there is not None]


def content_of(weight: Any) -> HostContent:
    found: HostContent = weight.content
    return found


@pytest.mark.parametrize("link_bytes_per_s", [float("inf"), 1e9, 1e6])
@pytest.mark.parametrize(
    "others",
    [{}, {"checkpointing": Checkpointing(kind="blocks", every=2)}, {"layers": Layers(kind="exact")}],
    ids=["alone", "checkpointing", "layers"],
)
def test_values_gradients_and_dropout_are_the_stock_models(card, others, link_bytes_per_s):
    """However long copies take: nothing is read before it has come, no memory is used again before a copy has left it,
    and the host waits for none."""
    card.link_bytes_per_s, card.kernel_s = link_bytes_per_s, 1e-5
    ours, theirs = of(stock_of(dropout=0.5), **others), of(stock_of(dropout=0.5), Offload(), **others)
    for _ in range(3):
        x, other = inputs(), inputs()
        card.waits.clear()
        found = gradients(ours, x)
        assert not card.waits
        assert all(map(torch.equal, found, gradients(theirs, other)))
    assert not card.races


@pytest.mark.parametrize("moved_first", [False, True])
def test_weights_lie_in_pinned_memory_wherever_the_model_was_built(card, moved_first):
    """All but biases and what trains, of (128,) each, are off the card."""
    stock = stock_of()
    stock = stock.to("cuda") if moved_first else stock
    before = torch.cuda.memory_allocated()
    model = of(stock, device=None if moved_first else "cuda")
    gc.collect()
    small = BLOCKS * 3 * 4 * FEATURES
    assert torch.cuda.memory_allocated() == small
    assert before == (small + BLOCKS * 2 * WEIGHT_BYTES if moved_first else 0)
    weight: Any = model[0].first.weight
    assert weight.device.type == "cuda"
    assert weight.is_leaf
    assert [card.is_pinned(one) for one in content_of(weight)._rooms] == [True]
    assert most_host_bytes(model) == BLOCKS * 2 * WEIGHT_BYTES
    assert not isinstance(model[0].first.bias, OffloadedWeight)


def test_a_weight_takes_hardly_more_of_the_hosts_memory(card):
    """Of 22 MiB, torch would take 32: it is in pieces of 16, 4 and 2. Of 0.75 MiB it takes 1."""
    for rows, sizes, takes in ((5632, [16, 4, 2], 22), (192, [0.75], 1)):
        frozen = nn.Sequential(nn.Linear(1024, rows, bias=False).requires_grad_(False), nn.Linear(rows, 1))
        x, stock = torch.ones(2, 1024).to("cuda"), copy.deepcopy(frozen).to("cuda")
        plan = Plan(settings=Settings(offload=ON_HOST))
        model = autotune.apply_to_model(plan, frozen, blocks=["0"], device="cuda")
        assert [len(one) / MIB for one in content_of(model[0].weight)._rooms] == sizes
        assert most_host_bytes(model) == takes * MIB
        assert torch.equal(model(x), stock(x))
        assert torch.equal(model.state_dict()["0.weight"], stock[0].weight)
    assert not card.races


def test_a_block_and_the_two_that_come_next_are_on_the_card(card):
    """Forward, and back; the first three are there when the next step begins."""
    model, seen = of(stock_of()), []
    for number, one in enumerate(model):
        one.first.register_forward_hook(lambda *_, number=number: seen.append((number, there(model))))
        one.scale.register_post_accumulate_grad_hook(lambda _, number=number: seen.append((number, there(model))))
    for _ in range(2):
        seen.clear()
        gradients(model)
        forward, backward = seen[:BLOCKS], seen[BLOCKS:]
        assert forward == [(number, [min(number, 5) + more for more in range(3)]) for number in range(BLOCKS)]
        at = [min(number + 1, 7) for number in reversed(range(BLOCKS))]  # that is read when a scale has its gradient
        assert [blocks for _, blocks in backward] == [[max(one, 2) - less for less in (2, 1, 0)] for one in at]
        assert there(model) == [0, 1, 2]


def seconds_of(card: Card, model: nn.Module, block_s: float, goes_back: bool = True) -> float:
    """Of a step after two, where copying a block's weights takes so long. A block takes 10 ms in forward, 20 in
    backward."""
    card.link_bytes_per_s, x = 2 * WEIGHT_BYTES / block_s, inputs()
    for one in model:
        one.card = card
    for _ in range(3):
        torch.cuda.synchronize()
        began_s = card.now_s
        with torch.set_grad_enabled(goes_back):
            gradients(model, x) if goes_back else model(x)
    torch.cuda.synchronize()
    return card.now_s - began_s


@pytest.mark.parametrize("inference", [False, True])
def test_copies_hide_behind_what_is_computed(card, inference):
    """Where a block's weights take 9 ms to come, a step takes what it takes with all of them on the card. Where they
    take 40 ms, it takes what the copies do: of a step, five blocks come in forward and five in backward; of inference,
    eight."""
    stock, model = (of(stock_of(), one, inference) for one in (Offload(), ON_HOST))
    stock_s = seconds_of(card, stock, 0.009, not inference)
    assert stock_s == pytest.approx(0.08 if inference else 0.24, rel=0.02)
    assert seconds_of(card, model, 0.009, not inference) <= 1.05 * stock_s
    copies_s = (8 if inference else 10) * 0.04
    assert seconds_of(card, model, 0.04, not inference) == pytest.approx(copies_s, rel=0.15)
    assert not card.races


class TwoStreams(nn.Module):
    """Reads a weight on the current stream, and later on another, for which the former waits at the end, or at once."""

    def __init__(self, card: Card, side: Any, waits: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.card, self.side, self.waits = card, side, waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current, out = torch.cuda.current_stream(), torch.empty_like(x)
        self.side.wait_stream(current)
        y = self.first(x)
        with torch.cuda.stream(self.side):
            self.card.work(0.01 if self.waits else 1.0)
            torch.mm(x, self.first.weight, out=out)
        x.record_stream(self.side)
        if self.waits:
            current.wait_stream(self.side)
            return y + out
        out.record_stream(self.side)
        return y


@pytest.mark.parametrize("waits", [True, False])
def test_a_weight_is_read_on_two_streams(card, waits):
    """On either once it has arrived; and its memory is used again once both have read it."""
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5
    side, found = torch.cuda.Stream(), []
    for setting in (Offload(), ON_HOST):
        torch.manual_seed(0)
        model = of(nn.Sequential(*(TwoStreams(card, side, waits) for _ in range(6))), setting)
        with torch.no_grad():
            found += [model(inputs().detach()) for _ in range(2)]
        torch.cuda.synchronize()
        assert not card.races
    assert torch.equal(found[0], found[2])


class Pairs(nn.Sequential):
    """Recomputes two blocks at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self[::2].children(), self[1::2].children(), strict=True):
            x = checkpoint(seen_by(in_use(), nn.Sequential(first, second)), x, use_reentrant=False)
        return x


def test_an_order_of_the_models_own_is_known_once_it_was_gone_through(card):
    """Backward through two recomputed blocks, and the forwards of an evaluation: each begins with the first."""
    stock, model = (of(Pairs(*stock_of()), one) for one in (Offload(), ON_HOST))
    for goes_back, takes_s in ((True, 0.32), (False, 0.08)):
        assert seconds_of(card, stock, 0.009, goes_back) == pytest.approx(takes_s, rel=0.02)
        assert seconds_of(card, model, 0.009, goes_back) <= 1.05 * takes_s
    assert not card.races


class Shared(nn.Module):
    """Blocks of which two share a weight, and one shares one with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = stock_of(4), nn.Linear(FEATURES, FEATURES, bias=False).requires_grad_(False)
        self.blocks[1].first.weight = self.blocks[0].first.weight
        self.head.weight = self.blocks[3].second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def test_a_weight_that_is_used_all_along_stays(card):
    model, stock = of(Shared()), Shared().to("cuda")
    away = [
        isinstance(weight, OffloadedWeight) for one in model.blocks for weight in (one.first.weight, one.second.weight)
    ]
    assert away == [False, True, False, True, True, True, True, False]
    assert all(map(torch.equal, gradients(model), gradients(stock)))


def test_blocks_that_are_not_named_keep_theirs_and_those_that_train_too(card):
    stock = stock_of(4)
    stock[1].second.weight.requires_grad_()
    model, wanted = of(copy.deepcopy(stock), Offload(kind="parameters", to="host", blocks=(1, 3))), stock.to("cuda")
    assert away(model) == [False, False, True, False, False, False, True, True]
    assert all(map(torch.equal, gradients(model), gradients(wanted)))


def test_in_inference_weights_that_train_leave_too_and_train_again_without_the_plan(card):
    model, stock = of(stock_of().requires_grad_(), inference=True), stock_of().requires_grad_().to("cuda")
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(inputs()), stock(inputs()))
    assert sum(isinstance(one, OffloadedWeight) for one in model.parameters()) == 2 * BLOCKS
    assert there(model) == [0, 1, 7]
    model = of(model, Offload())
    assert all(type(one) is nn.Parameter and one.requires_grad for one in model.parameters())
    assert all(map(torch.equal, gradients(model), gradients(stock)))
    assert not card.races


def test_a_state_dict_is_the_hosts_and_goes_both_ways(card):
    """All of them may have no room on the card."""
    model, stock = of(stock_of()), stock_of().to("cuda")
    gradients(model)
    state, wanted = model.state_dict(), stock.state_dict()
    assert [*state] == [*wanted]
    assert all(type(one) is torch.Tensor and torch.equal(one, wanted[name]) for name, one in state.items())
    assert not card.holds(state["0.first.weight"])
    before = torch.cuda.memory_allocated()
    doubled = {name: value * 2 for name, value in state.items()}
    for one in (model, stock):
        one.load_state_dict(doubled)
    assert torch.cuda.memory_allocated() <= before
    assert all(map(torch.equal, gradients(model), gradients(stock)))
    assert not card.races


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight[3].zero_(),
        lambda weight: weight.view(-1)[:7].copy_(torch.arange(7.0).to("cuda")),
        lambda weight: weight.t().mul_(0.5).add_(1),
        lambda weight: torch._foreach_lerp_([weight], [torch.ones_like(weight)], 0.25),
    ],
)
def test_what_is_written_to_it_is_kept(card, write):
    """Also while its block is on the card."""
    model, stock = of(stock_of()), stock_of().to("cuda")
    for _ in range(2):
        with torch.no_grad():
            for one in (model, stock):
                write(one[1].first.weight)
        assert all(map(torch.equal, gradients(model), gradients(stock)))
    assert not card.races


def test_a_copy_of_a_weight_on_the_cpu_is_read_there(card):
    """Whose numbers a log or an average has; the model is on the card."""
    weight, wanted = of(stock_of())[0].first.weight, stock_of()[0].first.weight.detach()
    assert torch.equal(weight.detach().cpu(), wanted)
    assert torch.equal(weight.detach().t().to("cpu", torch.float64), wanted.t().double())
    assert torch.zeros_like(wanted).copy_(weight.detach().cpu()).equal(wanted)
    assert weight.detach().cpu().tolist() == wanted.tolist()


def test_a_copy_has_memory_of_its_own_and_survives_a_pickle(card):
    model = of(stock_of())
    wanted = gradients(model)
    read = pickle.loads(pickle.dumps(of(stock_of(), device=None)))
    for one in (copy.deepcopy(model), read.to("cuda")):
        assert all(map(torch.equal, gradients(one), wanted))
        assert content_of(one[0].first.weight).store is not content_of(model[0].first.weight).store
        assert there(one) == [0, 1, 2]
        with torch.no_grad():
            one[0].first.weight.zero_()
        assert all(map(torch.equal, gradients(model), wanted))
    assert not card.races


def test_a_saved_model_is_read_where_there_is_no_card():
    """By torch's map_location, and without the plan it computes there."""
    with Card().in_place():
        torch.save(of(stock_of()), file := io.BytesIO())
    file.seek(0)
    read = torch.load(file, map_location="cpu", weights_only=False)
    assert read[0].first.weight.device.type == "cpu"
    wanted = stock_of()
    assert all(map(torch.equal, read.state_dict().values(), wanted.state_dict().values()))
    x = torch.ones(2, FEATURES)
    assert torch.equal(of(read, Offload(), device="cpu")(x), wanted(x))


def test_applied_twice_moved_and_undone(card):
    model, stock = of(of(stock_of())), stock_of().to("cuda")
    assert all(map(torch.equal, gradients(model), gradients(stock)))
    model.to("cpu")
    assert not content_of(model[0].first.weight)._rooms
    model.to("cuda").to(torch.bfloat16)
    stock.to(torch.bfloat16)
    half = inputs().detach().to(torch.bfloat16)
    assert torch.equal(model(half), stock(half))
    assert most_host_bytes(model) == BLOCKS * WEIGHT_BYTES
    plain = of(model, Offload())
    assert all(type(one) is nn.Parameter for one in plain.parameters())
    assert torch.equal(plain(half), stock(half))
    assert not card.races


def test_a_model_that_recomputes_blocks_by_itself_with_reentrant_checkpoints(card):
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5

    class Recomputes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self:
                x = checkpoint(seen_by(card, one), x, use_reentrant=True)
            return x

    found = []
    for setting in (Offload(), ON_HOST):
        model = of(Recomputes(*stock_of(dropout=0.5)), setting)
        found.append([*gradients(model), *gradients(model)])
    assert all(map(torch.equal, *found))
    assert not card.races


def test_a_model_that_is_gone_while_copies_are_on_their_way(card):
    """What is computed waits for them before the memory is its own again."""
    card.link_bytes_per_s, card.kernel_s = 1e6, 1e-5
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model = of(stock_of())
        with torch.no_grad():
            model(inputs())
        del model
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert not card.races


def task_of(**settings: Any) -> Task:
    return autotune.Task(
        build_model=stock_of,
        build_dataset=lambda: list(torch.randn(16, SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))),
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
@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks")}], ids=["alone", "checkpointing"]
)
def test_memory_is_predicted_before_a_trial(fit, others):
    """As a step on a card takes it, with the blocks that come next; of the host's, whatever the batch."""
    predicted, measured = {}, {}
    for setting in (Offload(), ON_HOST):
        one = Plan(settings=Settings(offload=setting, batch=Batch(micro=4), **others))
        known = fit(one, task_of(), target="cuda")
        predicted[setting.kind] = known.peak_bytes(4)
        on_host = 2 * BLOCKS * WEIGHT_BYTES if setting == ON_HOST else 0
        assert known.host_bytes(4) == known.host_bytes(2) == on_host
        with Card().in_place():
            training = apply(one, task_of())
            for batch in training.loader:
                training.step(batch)
            measured[setting.kind] = torch.cuda.max_memory_allocated()
            assert most_host_bytes(training.model) == on_host
            del training, batch
        assert measured[setting.kind] == pytest.approx(predicted[setting.kind], rel=0.03)
    assert predicted["none"] - predicted["parameters"] >= 0.95 * 2 * (BLOCKS - 3) * WEIGHT_BYTES


def test_it_is_refused_where_it_cannot_be():
    of_a_card = facts(num_blocks=3, device=CARD, frozen_bytes=2**21)
    assert Offload.choices(of_a_card) == (Offload(), Offload(kind="activations", to="host"), ON_HOST)
    assert ON_HOST not in Offload.choices(facts(num_blocks=3, frozen_bytes=2**21))
    assert ON_HOST.unavailable(facts(num_blocks=3)) == "a CPU's parameters are on the host already"
    words = Offload(kind="parameters").unavailable(of_a_card)
    assert words == "a card's parameters are not written to a file: use to: host"
    in_inference = of_a_card.model_copy(update={"inference": True, "frozen_bytes": 0, "num_parameters": 2**20})
    assert Offload.choices(in_inference) == (Offload(), ON_HOST)
    assert ON_HOST.exactness(in_inference) == "exact"
    assert ON_HOST.describe() == "parameters on the host"
    assert ON_HOST.in_blocks([1], 3) == Offload(kind="parameters", to="host", blocks=(1,))
    plan = Plan(settings=Settings(offload=ON_HOST))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert ON_HOST.fills_host(of_a_card)


def test_a_model_that_is_not_on_the_card_is_not_computed(card):
    """It is moved there, or its weights are read as they are."""
    model = of(stock_of(), device=None)
    with pytest.raises(PlanError, match=r"offload\.to: host is where a card's weights lie .* Use to: disk"):
        model(torch.ones(2, FEATURES))
    assert torch.equal(model.state_dict()["0.first.weight"], stock_of()[0].first.weight)
    with pytest.raises(PlanError, match=r"these blocks have no weight .* on the CPU or a card and in no other block"):
        of(stock_of().requires_grad_(), device=None)


@pytest.mark.parametrize("kind", ["parameters", "activations"])
def test_without_a_card_a_plan_is_refused_before_a_forward(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = r"settings\.offload\.to: host is the memory of a card's host, and no card is here: .* Use to: disk"
    setting = Offload(kind=kind, to="host")
    for inference in {False, kind == "parameters"}:
        with pytest.raises(PlanError, match=words):
            of(stock_of(), setting, inference, device=None)
    with pytest.raises(PlanError, match=words):
        apply(Plan(settings=Settings(offload=setting)), task_of())
