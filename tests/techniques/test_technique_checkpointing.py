"""``checkpointing``: its contract, forwards counted, bytes kept counted, and which modules are blocks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from line_task import training_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing, find_blocks
from autotune.testing.facts import facts_of
from autotune.testing.models import Gpt, MlpBlock, ResidualBlock
from autotune.testing.runs import run_applied, run_by_hand
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import BATCH_SIZE, ZOO


class TestCheckpointing(TechniqueContract):
    technique = Checkpointing
    bitwise = True
    lacking = (
        Checkpointing(kind="blocks"),
        Checkpointing(kind="blocks", every=2),
        Checkpointing(kind="chosen", blocks=(0,)),
    )


def forwards_per_module(training) -> dict[str, int]:
    """Calls of each module's forward in one forward and backward; blocks are counted inside their own forward."""
    calls: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        for name, module in training.model.named_modules()
    ]
    training.step(next(iter(training.loader)))
    for hook in hooks:
        hook.remove()
    return dict(calls)


@pytest.mark.parametrize(("every", "twice"), [(1, {0, 1, 2, 3}), (2, {0, 2}), (3, {0, 3}), (4, {0})])
def test_the_chosen_blocks_run_twice_and_the_rest_once(every, twice):
    """Every k-th of the MLP's four blocks: the first of each k is recomputed; stem, head and the others are not."""
    calls = forwards_per_module(training_of(ZOO["mlp"], checkpointing=Checkpointing(kind="blocks", every=every)))
    inside = {name: count for name, count in calls.items() if name.endswith(".linear")}
    assert inside == {f"blocks.{index}.linear": 2 if index in twice else 1 for index in range(4)}
    assert {calls[name] for name in ("", "stem", "head")} == {1}


def test_blocks_that_are_named_run_twice_and_the_rest_once():
    """The first and the last of the MLP's four."""
    calls = forwards_per_module(training_of(ZOO["mlp"], checkpointing=Checkpointing(kind="chosen", blocks=(0, 3))))
    assert [calls[f"blocks.{index}.linear"] for index in range(4)] == [2, 1, 1, 2]


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "tied", "frozen"])
def test_blocks_that_are_named_leave_every_bit(name):
    """Losses, gradients and state of an epoch are those of a plain loop."""
    with one_thread():
        chosen = Settings(batch=Batch(micro=BATCH_SIZE), checkpointing=Checkpointing(kind="chosen", blocks=(1,)))
        assert run_applied(ZOO[name], chosen).equals(run_by_hand(ZOO[name]))


SELECTIVE = Checkpointing(kind="selective")


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "tied", "frozen"])
def test_what_keeps_products_leaves_every_bit(name):
    """Running statistics, dropout and all."""
    with one_thread():
        settings = Settings(batch=Batch(micro=BATCH_SIZE), checkpointing=SELECTIVE)
        assert run_applied(ZOO[name], settings).equals(run_by_hand(ZOO[name]))


class Operations(TorchDispatchMode):
    """Counts what is computed, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_products_are_kept_and_the_rest_is_computed_again():
    """Of a GPT's step: the GELU and the two norms of each of three blocks run twice, the last norm once; products as
    often as stock, which recompute too where all of a block is computed again."""
    names, counted = ("gelu", "native_layer_norm"), {}
    for choice in (Checkpointing(), SELECTIVE, Checkpointing(kind="blocks")):
        training = training_of(ZOO["gpt"], checkpointing=choice)
        with Operations() as seen:
            training.step(next(iter(training.loader)))
        products = sum(seen.calls[name] for name in ("mm", "addmm", "bmm"))
        counted[choice.kind] = (*(seen.calls[name] for name in names), products)
    stock = counted["none"][2]
    assert counted["none"][:2] == (3, 7)
    assert counted["selective"] == (6, 13, stock)
    assert counted["blocks"][2] > stock


def test_what_keeps_products_is_said_and_survives_yaml():
    """Every second, too."""
    plan = Plan(settings=Settings(checkpointing=Checkpointing(kind="selective", every=2)))
    assert "  checkpointing: {kind: selective, every: 2}\n" in plan.to_yaml()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert SELECTIVE.describe(facts_of(ZOO["gpt"])) == "checkpoint all 3 blocks, but for their products"
    assert plan.settings.checkpointing.describe() == "checkpoint every 2nd of the blocks, but for their products"
    assert plan.settings.checkpointing.numbers(5) == (0, 2, 4)


def test_on_a_card_products_may_be_kept():
    """Where there are blocks; on a CPU it is not offered."""
    known = facts_of(ZOO["gpt"])
    cuda = known.model_copy(update={"device": known.device.model_copy(update={"type": "cuda"})})
    assert Checkpointing.choices(cuda) == (*Checkpointing.choices(known), SELECTIVE)
    assert Checkpointing.choices(cuda.model_copy(update={"num_blocks": 0})) == (Checkpointing(),)
    assert SELECTIVE.unavailable(known) is None


def test_named_blocks_survive_yaml():
    plan = Plan(settings=Settings(checkpointing=Checkpointing(kind="chosen", blocks=(0, 2, 3))))
    assert "  checkpointing: {kind: chosen, blocks: [0, 2, 3]}\n" in plan.to_yaml()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.settings.canonical() == '{"checkpointing": {"blocks": [0, 2, 3], "kind": "chosen"}}'


NOT_NAMED = [
    ("{kind: chosen}", "blocks: kind chosen needs the number of at least one block, but got none. Use .*"),
    ("{kind: chosen, blocks: [2, 0]}", r"blocks: must ascend, each once, but got \[2, 0\]. Use \[0, 2\]."),
    ("{kind: chosen, blocks: [1, 1]}", r"blocks: must ascend, each once, but got \[1, 1\]. Use \[1\]."),
    ("{kind: blocks, blocks: [1]}", r"blocks: kind blocks names no blocks, but got \[1\]. Use kind: chosen."),
    ("{blocks: [1]}", r"blocks: kind none names no blocks, but got \[1\]. Use kind: chosen."),
    ("{kind: chosen, blocks: [1], every: 2}", "every: kind chosen names its blocks, but got every: 2. Use kind: b"),
    ("{kind: chosen, blocks: [-1]}", "blocks.0: .*greater than or equal to 0, but got -1"),
    ("{kind: chosen, blocks: [1.0]}", "blocks.0: .*valid integer, but got 1.0"),
    ("{kind: chosen, blocks: [true]}", "blocks.0: .*valid integer, but got True"),
    ("{kind: chosen, blocks: 2}", "blocks: a list was expected, but got 2"),
]


@pytest.mark.parametrize(("row", "message"), NOT_NAMED)
def test_a_mistake_in_naming_blocks_is_answered_with_what_is_valid(row, message):
    with pytest.raises(PlanError, match=f"here.yaml: settings.checkpointing.{message}|checkpointing: {message}"):
        Plan.from_yaml(f"schema: autotune/plan@1\nsettings: {{checkpointing: {row}}}\n", "here.yaml")


def test_a_number_beyond_the_models_blocks_is_an_error_with_the_range():
    setting = Checkpointing(kind="chosen", blocks=(1, 4, 7))
    with pytest.raises(PlanError) as error:
        training_of(ZOO["mlp"], checkpointing=setting)
    assert str(error.value) == (
        "settings.checkpointing.blocks: must be numbers of the model's 4 blocks, but got 4, 7. "
        "Use 0 to 3, or kind: none."
    )
    assert setting.unavailable(facts_of(ZOO["mlp"])) == "the model has 4 blocks, numbered from 0, and no 4, 7"
    assert Checkpointing(kind="chosen", blocks=(0, 3)).unavailable(facts_of(ZOO["mlp"])) is None


def test_nested_blocks_are_found_through_their_stages():
    """The ResNet-like's four residual blocks, and not its two stages, run twice."""
    calls = forwards_per_module(training_of(ZOO["resnet"], checkpointing=Checkpointing(kind="blocks")))
    assert {calls[f"stages.{stage}.{block}.body.0"] for stage in (0, 1) for block in (0, 1)} == {2}
    assert {calls[name] for name in ("stem", "head", "stages.0", "stages.1")} == {1}


def test_without_repeated_blocks_the_roots_children_are_recomputed(monkeypatch):
    """Embedding, LSTM and head; seen from outside each is called once, so the functions inside are counted."""
    model = ZOO["lstm"].build_model()
    assert find_blocks(model) == [model.embedding, model.lstm, model.head]
    calls = []
    run = torch._VF.lstm
    monkeypatch.setattr(torch._VF, "lstm", lambda *args: calls.append(1) or run(*args), raising=False)
    training = training_of(ZOO["lstm"], checkpointing=Checkpointing(kind="blocks"))
    training.step(next(iter(training.loader)))
    assert len(calls) == 2


def test_the_task_may_name_the_blocks():
    """Paths of blocks, or of a container for its children; only these run twice."""
    task = autotune.Task(**{**vars(ZOO["mlp"]), "blocks": ("stem", "blocks.2")})
    training = training_of(task, checkpointing=Checkpointing(kind="blocks"))
    calls = forwards_per_module(training)
    assert [calls[f"blocks.{index}.linear"] for index in range(4)] == [1, 1, 2, 1]
    model = ZOO["mlp"].build_model()
    assert find_blocks(model, ("blocks",)) == list(model.blocks)
    assert find_blocks(model, ("head", "head")) == [model.head]


def test_a_path_that_names_no_module_is_an_error():
    with pytest.raises(TaskError, match=r"blocks: the model has no module layers\.9, tower"):
        find_blocks(ZOO["mlp"].build_model(), ("stem", "layers.9", "tower"))


def test_named_blocks_inside_one_another_are_an_error():
    """Each would be recomputed within the other's recomputation."""
    with pytest.raises(TaskError, match=r"blocks: blocks\.1\.linear lies inside blocks\.1"):
        find_blocks(ZOO["mlp"].build_model(), ("blocks.1", "blocks.1.linear"))


def test_more_than_the_models_blocks_is_an_error_with_the_range():
    with pytest.raises(PlanError) as error:
        training_of(ZOO["mlp"], checkpointing=Checkpointing(kind="blocks", every=5))
    assert str(error.value) == (
        "settings.checkpointing.every: must divide into the model's 4 blocks at least once, but got 5. "
        "Use 1 to 4, or kind: none."
    )


def test_a_model_of_one_layer_has_nothing_to_recompute():
    with pytest.raises(PlanError, match="the model has no modules to recompute"):
        Checkpointing(kind="blocks").on_model(nn.Linear(2, 2), find_blocks(nn.Linear(2, 2)))


def test_running_statistics_are_updated_once():
    """After one step BatchNorm has seen one batch, with the very running mean of a stock step."""
    stock, training = (
        training_of(ZOO["resnet"], checkpointing=checkpointing)
        for checkpointing in (Checkpointing(), Checkpointing(kind="blocks"))
    )
    for each in (stock, training):
        each.step(next(iter(each.loader)))
    norms = [module for module in training.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.num_batches_tracked.item() for norm in norms} == {1}
    for ours, theirs in zip(training.model.buffers(), stock.model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_any_buffer_that_a_forward_changes_is_changed_once():
    """A spectral norm takes a power iteration a forward: recomputation repeats it, and does not take another."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x):
            return torch.tanh(self.linear(x)) * self.mask

    found = []
    for checkpointing in (Checkpointing(), Checkpointing(kind="blocks")):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        checkpointing.on_model(model, find_blocks(model))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        found.append([*model.buffers(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_dropout_is_recomputed_with_the_same_mask():
    """With dropout at one half, recomputed gradients are the stock ones bit for bit; another mask would show."""
    x = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (Checkpointing(), Checkpointing(kind="blocks")):
        torch.manual_seed(0)
        model = Gpt(dropout=0.5)
        checkpointing.on_model(model, find_blocks(model))
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_what_is_kept_is_each_blocks_input_alone():
    """Four blocks of width 16 on 8 samples, fp32. Stock keeps for each block the input of its linear layer and of its
    GELU: 8 tensors of 8 × 16 × 4 = 512 bytes. Checkpointed: the 4 inputs."""
    kept = {}
    for kind in ("none", "blocks"):
        model = nn.Sequential(*(MlpBlock(16) for _ in range(4)))
        Checkpointing(kind=kind).on_model(model, find_blocks(model))
        x = torch.randn(8, 16, requires_grad=True)
        weights = {p.data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor, saved=saved, weights=weights):
            if tensor.data_ptr() not in weights and tensor.numel():
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(x)
        kept[kind] = sum(saved.values())
        output.sum().backward()
    assert kept == {"none": 8 * 512, "blocks": 4 * 512}


class Hungry(nn.Module):
    """Takes keywords and returns a tuple, as Hugging Face's blocks do; keeps state in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden, mask=None, *, scale=1.0, cache=None):
        return self.linear(hidden) * scale + mask["bias"], {"hidden": hidden}, cache


def test_blocks_may_take_keywords_and_return_tuples():
    """Gradients of weights, inputs and of a tensor inside a keyword's dict are the stock ones."""
    gradients = []
    for kind in ("none", "blocks"):
        torch.manual_seed(0)
        model = nn.ModuleList([Hungry(), Hungry()])
        Checkpointing(kind=kind).on_model(model, find_blocks(model))
        hidden, bias = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        out, rest, cache = model[0](hidden, mask={"bias": bias}, scale=2.0)
        out = model[1](out, {"bias": bias})[0] + rest["hidden"]
        out.square().sum().backward()
        gradients.append([hidden.grad, bias.grad, *(p.grad for p in model.parameters())])
        assert cache is None
    assert all(map(torch.equal, *gradients))


def test_a_tensor_that_is_given_as_several_is_one_when_it_is_computed_again():
    """Attention multiplies it by all its weights at once; hooks on what is saved would have made three of it."""
    model = nn.ModuleDict({"attend": nn.MultiheadAttention(8, 2, batch_first=True), "head": nn.Linear(8, 1)})
    Checkpointing(kind="blocks").on_model(model, [model["attend"]])
    x = torch.randn(2, 3, 8, requires_grad=True)

    def gradient():
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            loss = model["head"](model["attend"](x * 1, y := x * 2, y, need_weights=False)[0]).sum()
            loss = loss + model["head"](model["attend"](y, key=y, value=y, need_weights=False)[0]).sum()
        return torch.autograd.grad(loss, x)[0]

    recomputed = gradient()
    Checkpointing().undo(model)
    assert torch.equal(recomputed, gradient())


class Noting(nn.Module):
    """Adds two tensors, and notes what it has seen with the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, other, *, notes, weigh=1.0):
        y = self.linear(x) + weigh * other
        notes.append(y.square().mean())
        return y


def test_a_block_that_is_given_a_tensor_twice_still_writes_to_what_it_is_given():
    block = Noting()
    Checkpointing(kind="blocks").on_model(block, [block])
    notes: list[torch.Tensor] = []
    x = torch.randn(2, 4)
    block(x, x, notes=notes, weigh=2.0)
    assert len(notes) == 1
    assert notes[0] == (block.linear(x) + 2 * x).square().mean()


def test_nothing_is_recomputed_where_no_gradient_is_wanted():
    training = training_of(ZOO["mlp"], checkpointing=Checkpointing(kind="blocks"))
    x = next(iter(training.loader))[0]
    with torch.no_grad():
        assert not training.model(x).requires_grad


def test_a_users_hooks_run_once():
    """Forward hooks on a chosen block see one forward and one output, as in stock."""
    model = ZOO["mlp"].build_model()
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    Checkpointing(kind="blocks").on_model(model, find_blocks(model))
    model(torch.randn(2, 6)).sum().backward()
    assert seen == [torch.Size([2, 16])]


def test_a_block_that_changes_its_input_in_place_fails_aloud():
    """Its input cannot be had back: torch refuses, and no wrong gradient comes out."""

    class InPlace(nn.Sequential):
        def forward(self, x):
            return super().forward(F.relu_(x))

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(InPlace(nn.Linear(4, 4)) for _ in range(2))))
    Checkpointing(kind="blocks").on_model(model, find_blocks(model))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 4)).sum().backward()


def test_a_second_plan_replaces_the_first():
    """Applied twice to one model, blocks are not recomputed within recomputation; and none is after kind: none."""
    model, dataset = ZOO["mlp"].build_model(), ZOO["mlp"].build_dataset()
    for every in (1, 2):
        plan = Plan(settings=Settings(checkpointing=Checkpointing(kind="blocks", every=every)))
        training = autotune.apply(plan, model=model, dataset=dataset, loss=ZOO["mlp"].compute_loss, batch_size=8)
    calls = forwards_per_module(training)
    assert [calls[f"blocks.{index}.linear"] for index in range(4)] == [2, 1, 2, 1]
    Checkpointing().undo(model)
    assert "forward" not in vars(model.blocks[0])


def names_of(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in find_blocks(model)]


class Experts(nn.Module):
    """A block most of whose parameters are in alike members of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(2))

    def forward(self, x):
        return sum(expert(x) * gate for expert, gate in zip(self.experts, self.gate(x).unbind(-1), strict=True))


class Stage(nn.Module):
    """A module of blocks, as hierarchical transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(2))
        self.grow = nn.Linear(width, 1)


class Swish(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


BLOCKS = {
    "blocks of experts are blocks": (nn.ModuleList(Experts() for _ in range(2)), ["0", "1"]),
    "modules that are stages of blocks give their blocks": (
        nn.Sequential(Stage(16), Stage(32)),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
    ),
    "alike Sequentials of blocks give their blocks": (
        nn.Sequential(*(nn.Sequential(MlpBlock(8), MlpBlock(8)) for _ in range(2))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "lists within lists": (
        nn.ModuleList([nn.ModuleList([MlpBlock(8), MlpBlock(8)]), nn.ModuleList([MlpBlock(8)])]),
        ["0.0", "0.1", "1.0"],
    ),
    "layers in a block are no blocks, though they repeat": (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()) for _ in range(2))),
        ["0", "1"],
    ),
    "a user's activation is a layer": (
        nn.Sequential(nn.Linear(8, 8), Swish(), nn.Linear(8, 8), Swish()),
        ["0", "1", "2", "3"],
    ),
    "a stage of one block counts with its kind": (
        nn.Sequential(
            nn.Sequential(*(ResidualBlock(4, 4, 1) for _ in range(2))), nn.Sequential(ResidualBlock(4, 8, 2))
        ),
        ["0.0", "0.1", "1.0"],
    ),
    "torch's transformer layers": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "a block that stands twice is one": (ZOO["tied"].build_model(), ["blocks.0", "blocks.1"]),
}


@pytest.mark.parametrize("fact", BLOCKS)
def test_blocks(fact):
    """Which modules are a model's blocks."""
    model, names = BLOCKS[fact]
    assert names_of(model) == names
