"""``reversible``: its contract on jobs that declare reversible blocks, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gloo_pair import found_by_two, needs_two, run_as_two
from kept_bytes import kept_bytes
from torch import Tensor, nn

import autotune
from autotune.errors import PlanError, TaskError
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions
from autotune.plan import Budget, Plan
from autotune.search_spaces import load_space
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.models.variant import Variant
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.reversible import Reversible
from autotune.techniques.support.forwards import has_forward
from autotune.techniques.support.reversible.coupling import coupled
from autotune.techniques.support.reversible.pair import declare
from autotune.techniques.tiles import Tiles
from autotune.testing.facts import facts_of
from autotune.testing.runs import relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import BATCH_SIZE, NUM_SAMPLES, ZOO

REVERSIBLE = Reversible(kind="blocks")
NAMED = Reversible(kind="blocks", paths=("blocks",))
FEATURES, POSITIONS, DEPTH = 8, 5, 4


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 3 * FEATURES)
        self.out, self.drop = nn.Linear(FEATURES, FEATURES), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(found.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, p: float = 0.0, wide: int = 2 * FEATURES) -> None:
        super().__init__()
        self.f = Attention(p)
        self.g = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, wide), nn.GELU(), nn.Linear(wide, FEATURES), nn.Dropout(p)
        )

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class Normalized(Block):
    """With running statistics."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(p)
        self.f = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(POSITIONS), nn.Tanh(), nn.Dropout(p))


class Model(nn.Module):
    """A classifier; its streams are in fp32 also within autocast."""

    streams = torch.float32

    def __init__(self, block: Callable[[], nn.Module] = Block, frozen: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 2 * FEATURES)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(2 * FEATURES, 3)
        self.blocks[:frozen].requires_grad_(False)
        self.stem.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.stem(x).to(self.streams).chunk(2, -1)
        for block in self.blocks:
            pair = block(*pair)
        return self.head(torch.cat(pair, -1).mean(1))


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, POSITIONS, FEATURES, generator=generator)
    return list(zip(x, x[:, 0, :3].argmax(1), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task(block: Callable[[], nn.Module] = Block, **rest) -> autotune.Task:
    build = partial(Model, block, rest.pop("frozen", 0))
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    given = {"reversible_blocks": ["blocks"], "batch_size": BATCH_SIZE, "build_optimizer": sgd, **rest}
    return autotune.Task(build, samples, loss_of, **given)


JOBS = {
    "transformer": task(partial(Block, 0.1)),
    "statistics": task(partial(Normalized, 0.1)),
    "frozen": task(partial(Block, 0.1), frozen=2),
    "not declared": ZOO["mlp"],
}


class TestReversible(TechniqueContract):
    technique = Reversible
    lacking = (REVERSIBLE,)
    rounds_within = 1e-5
    tasks = JOBS


BOTH = (None, Settings())


def model_of(block: Callable[[], nn.Module] = Block, settings: Settings | None = None, **rest) -> nn.Module:
    torch.manual_seed(0)
    model = task(block, **rest).build_model()
    return autotune.apply_to_model(Plan(settings=settings or Settings(reversible=REVERSIBLE)), model)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(x).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def inputs() -> Tensor:
    return torch.randn(3, POSITIONS, FEATURES, generator=torch.Generator().manual_seed(2), requires_grad=True)


@pytest.mark.parametrize("settings", BOTH)
def test_a_hook_of_a_parameter_is_called_once(settings):
    model, calls = model_of(settings=settings), []
    weight = model.blocks[1].g[1].weight
    plain = gradients(model, inputs())
    model.zero_grad()
    weight.register_hook(lambda gradient: calls.append(1) or 2 * gradient)
    weight.register_hook(lambda gradient: 3 * gradient)
    number = next(number for number, one in enumerate(model.parameters()) if one is weight)
    found = gradients(model, inputs())
    torch.testing.assert_close(
        found[-len([*model.parameters()]) :][number], 6 * plain[-len([*model.parameters()]) :][number]
    )
    assert len(calls) == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_are_the_stock_models_but_for_rounding(is_shared):
    """Values to the bit: forward adds the same numbers, with the same dropout; also of one block, run four times."""
    block = functools.cache(lambda seed: Block(0.3)) if is_shared else lambda seed: Block(0.3)
    ours, theirs = (gradients(model_of(partial(block, number), one), inputs()) for number, one in enumerate(BOTH))
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_of_a_row_of_blocks_the_last_ones_outputs_are_kept():
    """Autograd saves what stem and head do, and nothing of four blocks but samples of their inputs,
    here all of them; one of these holds its two outputs."""
    model, x = model_of(), inputs()
    model(x).sum().backward()  # the first call compares
    kept, loss = kept_bytes(lambda: model(x).square().mean(), model)
    others, alone = kept_bytes(lambda: model.head(model.stem(x).mean(1)).square().mean(), model)
    assert kept == others + DEPTH * 2 * 3 * POSITIONS * FEATURES * 4
    held = [node.kept._outputs for node in nodes_of(loss) if hasattr(node, "kept")]
    assert sorted(map(len, held)) == [0, 0, 0, 2]
    alone.backward()
    loss.backward()
    assert not any(node.kept._outputs for node in nodes_of(loss) if hasattr(node, "kept"))


def nodes_of(output: Tensor) -> set:
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


@pytest.mark.medium
def test_predicted_is_one_blocks_inside_by_hand():
    """A feed-forward part 512 wide keeps what GELU is given and gives: 8 samples of 5 positions in fp32, 160 KiB in
    each of four blocks; the rest of a block is ten tensors of 8 features. Reversibly, those of one block are there at a
    time: at last those of the first, beside the gradients of the other three."""
    job = task(partial(Block, 0.0, 512))
    stock, ours = (
        fit_memory_model(Plan(settings=Settings(reversible=one), budget=Budget(device="cpu")), job).peak_bytes(8)
        for one in (Reversible(), REVERSIBLE)
    )
    kept = 8 * POSITIONS * (2 * 512 + 10 * FEATURES) * 4
    gradients = sum(p.numel() for p in Block(0.0, 512).parameters()) * 4
    assert stock - ours == pytest.approx((DEPTH - 1) * (kept - gradients), rel=0.05)


@pytest.mark.parametrize(
    "others",
    [
        {"batch": Batch(micro=4, accumulate=2)},
        {"precision": Precision(kind="bf16")},
        {"precision": Precision(kind="fp16")},
        {"layers": Layers(kind="exact")},
        {"layers": Layers(kind="recompute")},
        {"tiles": Tiles(kind="feed_forward", number=2)},
        {"optimizer_step": OptimizerStep(kind="in_backward")},
        {"optimizer_state": OptimizerState(kind="8bit")},
    ],
    ids=str,
)
def test_a_step_trains_as_without_it(others):
    settings = Settings(**{"batch": Batch(micro=BATCH_SIZE), **others})
    job = task(partial(Block, 0.1), max_grad_norm=None if "optimizer_step" in others else 0.5)
    stock, ours = (run_applied(job, settings.having(one)) for one in (Reversible(), REVERSIBLE))
    assert relative_difference(ours.state, stock.state) < (2e-3 if "precision" in others else 1e-5)


def test_backward_computes_in_the_precision_of_forward():
    """Though it runs outside of autocast."""
    dtypes = []
    model = model_of()
    model.blocks[1].g[1].register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs()).float().square().mean()
    loss.backward()
    assert dtypes == 4 * [
        torch.bfloat16
    ]  # its own forward and the same by parts, that are compared; then forward, again


def test_a_random_state_is_as_after_the_stock_step():
    after = []
    for settings in (None, Settings()):
        model = model_of(partial(Block, 0.5), settings)
        torch.manual_seed(3)
        model(inputs()).sum().backward()
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_outputs_between_blocks_may_be_read_and_changed():
    """A block whose outputs go elsewhere too, or are changed before the next, keeps gradients right."""

    class Read(Model):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.stem(x).chunk(2, -1)
            first = self.blocks[0](a, b)
            a, b = self.blocks[1](*first)
            a, b = self.blocks[2](b, a)  # the other way round
            a, b = self.blocks[3](a + 1, b)
            return self.head(torch.cat([a, b * 0], -1).mean(1)) + first[1].mean()

    torch.manual_seed(0)
    stock = Read(partial(Block, 0.2))
    ours = copy.deepcopy(stock)
    declare(ours, ["blocks"])
    autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), ours)
    for one, other in zip(gradients(ours, inputs()), gradients(stock, inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_last_stream_that_nobody_reads_is_found_again_all_the_same():
    class First(Model):
        def forward(self, x: Tensor) -> Tensor:
            pair = self.stem(x).chunk(2, -1)
            for block in self.blocks:
                pair = block(*pair)
            return pair[0].mean((1, 2))

    torch.manual_seed(0)
    stock = First()
    ours = copy.deepcopy(stock)
    declare(ours, ["blocks"])
    autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), ours)
    ours(inputs()).square().mean().backward()
    stock(inputs()).square().mean().backward()
    for one, other in zip(ours.blocks.parameters(), stock.blocks.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)  # of the last g, so that no optimizer decays it
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_an_output_that_is_changed_in_place_is_told():
    """As autograd does of what it saved."""
    model = model_of()
    pair = model.stem(inputs()).chunk(2, -1)
    y1, y2 = model.blocks[0](*pair)
    loss = y1.mean() + y2.mean()
    with torch.no_grad():
        y1.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_an_output_that_is_changed_in_place_between_blocks_is_told():
    """Found again would be what it was changed to."""

    class Clamped(Model):
        def forward(self, x: Tensor) -> Tensor:
            y1, y2 = self.blocks[0](*self.stem(x).chunk(2, -1))
            with torch.no_grad():
                y2.clamp_(-0.1, 0.1)
            return torch.cat(self.blocks[1](y1, y2), -1)

    loss = planned(Clamped())(inputs()).sum()
    with pytest.raises(RuntimeError, match=r"changed in place.*leave reversible out"):
        loss.backward()


def planned(model: nn.Module) -> nn.Module:
    declare(model, ["blocks"])
    return autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), model)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_parameter_that_is_changed_before_backward_is_told(change):
    model = model_of()
    loss = model(inputs()).sum()
    layer = model.blocks[1].g[1]
    with torch.no_grad():
        if change == "in place":
            layer.weight.mul_(1.5)
        else:
            layer.weight = nn.Parameter(layer.weight.clone())
    with pytest.raises(RuntimeError, match=r"a parameter of f or g was changed in place or replaced after forward"):
        loss.backward()


def test_a_second_backward_is_told():
    loss = model_of()(inputs()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second time \(retain_graph\).*Leave reversible out"):
        loss.backward()


def test_gradients_of_gradients_are_refused():
    x = inputs()
    with pytest.raises(RuntimeError, match=r"create_graph.*Leave reversible out"):
        torch.autograd.grad(model_of()(x).sum(), x, create_graph=True)


def test_blocks_without_gradients_run_as_they_are():
    model = model_of()
    with torch.no_grad():
        assert model(inputs().detach()).grad_fn is None
    model.requires_grad_(False)
    assert model(inputs().detach()).grad_fn is None


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.scale * self.f(x2)
        return y1, x2 + self.g(y1)


class Frozen(Scaled):
    """A scale of 1, that may change or train later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


OUTSIDE = nn.Parameter(torch.ones(()))


class Outside(Block):
    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + OUTSIDE * self.f(x2)
        return y1, x2 + self.g(y1)


class Aside(nn.Linear):
    """Leaves an auxiliary loss on itself, which saves nothing for backward."""

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = [x.mean()]
        return super().forward(x)


class Auxiliary(Block):
    def __init__(self) -> None:
        super().__init__()
        self.g = Aside(FEATURES, FEATURES)


class Mean(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1, keepdim=True))


class Pooled(Block):
    """Its g gives less than it is given, and is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.g = Mean(FEATURES, FEATURES)


class Other(Block):
    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return x1 + self.f(x2), x2 + self.g(x1)


class Whole(Block):
    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return super().forward(x1, x2)[0]


class Broad(Block):
    """Its g gives more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Unflatten(0, (-1, 1))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Scaled, r"Scaled has parameters that are neither its f's nor its g's \(scale\)"),
        (Frozen, r"Frozen has parameters that are neither its f's nor its g's \(scale\)"),
        (Outside, r"Outside reads a tensor with a gradient that is no parameter of its f and g"),
        (Auxiliary, r"Auxiliary computes a tensor on the way that Aside holds .*gradient would be lost"),
        (Pooled, r"Pooled adds what g returns to \(3, 5, 8\), but that is \(3, 1, 8\)"),
        (Other, r"Other was to return \(x1 \+ f\(x2\), x2 \+ g\(y1\)\)"),
        (Whole, r"Whole was to return"),
        (Broad, r"Broad adds what g returns to \(3, 5, 8\), but that is \(3, 1, 5, 8\)"),
    ],
)
def test_what_is_no_reversible_block_is_refused_at_its_first_call(block, words):
    with pytest.raises(PlanError, match=rf"settings.reversible.kind: {words}.*Leave reversible out"):
        model_of(block)(inputs())


def test_inputs_that_come_back_too_far_off_are_refused():
    """Of f and g that are steep, rounding grows through the blocks; the last one's come back all the same."""
    model = model_of()
    with torch.no_grad():
        for block in model.blocks:
            block.f.out.weight *= 1e4
            block.g[3].weight *= 1e4
    with pytest.raises(PlanError, match=r"within 0.001 \(relative\), but .* rounding grows .* leave reversible"):
        model(inputs()).sum().backward()


@pytest.mark.parametrize("first", ["backward", "forward alone"])
def test_inputs_are_compared_in_each_backward(first):
    """Weights that training makes steep are refused when they are."""
    model = model_of()
    loss = model(inputs()).sum()
    if first == "backward":
        loss.backward()
    with torch.no_grad():
        for block in model.blocks:
            block.f.out.weight *= 1e4
            block.g[3].weight *= 1e4
    with pytest.raises(PlanError, match="rounding grows"):
        model(inputs()).sum().backward()


def test_what_differs_each_time_is_refused():
    """Random numbers of Python are drawn anew in backward."""
    drawn = iter([1, 1, 1, 1, 1, 0])  # compared (2), forward, backward; forward, backward

    class Random(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(drawn)

    class Drawing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = self.blocks[:1]
            self.blocks[0].f = Random(FEATURES, FEATURES)

    torch.manual_seed(0)
    model = planned(Drawing())
    model(inputs()).sum().backward()
    loss = model(inputs()).sum()
    with pytest.raises(PlanError, match="f or g computes something else each time"):
        loss.backward()


def test_evaluation_is_checked_beside_training():
    class Both(Block):
        def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            y1, y2 = super().forward(x1, x2)
            return (y1, y2) if self.training else (2 * y1, y2)

    model = model_of(Both)
    model(inputs()).sum().backward()
    model.eval()
    with pytest.raises(PlanError, match="Both was to return"):
        model(inputs())


def test_a_blocks_own_forward_is_compared_but_for_rounding():
    """Kernels that add in no fixed order differ in the last bits."""

    class Close(Block):
        def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            y1, y2 = super().forward(x1, x2)
            return y1 * (1 + 1e-6), y2

    model_of(Close)(inputs()).sum().backward()


def test_what_f_leaves_aside_is_told_in_backward():
    """A loss of weights alone: of what it would save, nothing is there."""

    class Penalized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.weight.square().sum()
            return super().forward(x)

    model = model_of()
    model.blocks[0].g = Penalized(FEATURES, FEATURES)
    with pytest.raises(RuntimeError, match=r"did not return \(an auxiliary loss\?\), of which nothing is saved"):
        (model(inputs()).sum() + model.blocks[0].g.penalty).backward()


def test_what_is_called_otherwise_is_refused():
    class Packed(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x1=x, x2=x)[0]

    model = Packed()
    declare(model, ["blocks"])
    autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), model)
    with pytest.raises(PlanError, match=r"is called with two tensors, block\(x1, x2\)"):
        model(inputs())


def test_it_is_taken_off_and_applied_again_and_copied_and_pickled():
    model = model_of(partial(Block, 0.2))
    for _ in range(2):
        autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), model)
    assert all(not has_forward(block.forward.args[0].__self__.f, coupled) for block in model.blocks)
    found = gradients(model, inputs())
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert all(map(torch.equal, gradients(twin, inputs()), found))
        assert has_forward(twin.blocks[0], coupled)
        assert vars(twin.blocks[0])["forward"].args[1]._block is twin.blocks[0]
    autotune.apply_to_model(Plan(settings=Settings()), model)
    assert not any("forward" in vars(block) for block in model.blocks)


def test_blocks_are_named_by_path():
    job = task(reversible_blocks=["blocks.1", "blocks.2"])
    assert facts_of(job).reversible_blocks == ("blocks.1", "blocks.2")
    assert [has_forward(block, coupled) for block in autotune.apply(
        Plan(settings=Settings(reversible=REVERSIBLE, batch=Batch(micro=BATCH_SIZE))), job
    ).model.blocks] == [False, True, True, False]  # fmt: skip
    with pytest.raises(TaskError, match="reversible_blocks: the model has no module layers"):
        task(reversible_blocks=["layers"]).build_model()
    with pytest.raises(TaskError, match=r"has modules f and g, but Linear has not both. It takes \(x1, x2\)"):
        task(reversible_blocks=["head"]).build_model()
    with pytest.raises(TaskError, match="reversible_blocks must be a list of module paths, but got 'blocks'"):
        task(reversible_blocks="blocks")


def test_a_model_without_such_blocks_is_refused():
    with pytest.raises(PlanError, match=r"nothing says which blocks .*reversible_blocks = \[.*use kind: none"):
        autotune.apply(Plan(settings=Settings(reversible=REVERSIBLE)), ZOO["mlp"])


def test_what_else_decides_what_is_kept_is_refused():
    settings = Settings(reversible=REVERSIBLE)
    for other, words in {
        Checkpointing(kind="blocks"): "checkpointing computes the same blocks again",
        Offload(kind="activations"): "nothing of the blocks is left to offload",
        Compile(kind="blocks"): "a compiled program",
        Parallel(kind="fsdp", processes=2): "use ddp",
    }.items():
        assert (
            settings.having(other).conflict() == f"reversible: {settings.reversible.conflicts(settings.having(other))}"
        )
        assert words in settings.having(other).conflict()
    assert settings.having(Parallel(kind="ddp", processes=2)).conflict() is None


def test_it_is_said_and_found_in_presets_where_it_is_declared():
    """With its paths, so that a plan alone says which they are."""
    assert REVERSIBLE.describe() == "blocks of reversible_blocks run reversibly"
    assert NAMED.describe() == "blocks of blocks run reversibly"
    assert load_space("default").choices(facts_of(JOBS["transformer"]))["reversible"] == (Reversible(), NAMED)
    assert load_space("default").choices(facts_of(ZOO["gpt"]))["reversible"] == (Reversible(),)
    assert REVERSIBLE.or_default(facts_of(JOBS["transformer"])) == NAMED


def test_a_plan_with_paths_is_enough_in_a_loop_of_ones_own():
    torch.manual_seed(0)
    model = autotune.apply_to_model(Plan(settings=Settings(reversible=NAMED)), Model())
    assert all(has_forward(block, coupled) for block in model.blocks)
    one, other = gradients(model, inputs()), gradients(model_of(), inputs())
    assert all(map(torch.equal, one, other))
    with pytest.raises(TaskError, match=r"settings.reversible.paths: the model has no module layers"):
        autotune.apply_to_model(Plan(settings=Settings(reversible=Reversible(kind="blocks", paths=("layers",)))), model)
    with pytest.raises(PlanError, match=r"paths: \[encoder.blocks\]"):
        autotune.apply_to_model(Plan(settings=Settings(reversible=REVERSIBLE)), Model())
    with pytest.raises(ValueError, match="kind none names no blocks"):
        Reversible(paths=("blocks",))


def test_a_variant_has_none():
    job = task(variants={"small": ZOO["mlp"].build_model}, evaluate=lambda model: 1.0)
    options = InspectOptions(runs_model=False, allow_lossy=True)
    found = inspect_task(job, options, "cpu")
    assert set(found.variants) == {"small"}
    assert found.reversible_blocks == ("blocks",)
    both = Settings(reversible=NAMED, variant=Variant(kind="small"))
    assert "a variant's blocks are not those" in both.conflict()


def test_a_task_that_names_none_any_more_has_none():
    assert facts_of(dataclasses.replace(task(), reversible_blocks=[])).reversible_blocks == ()


@pytest.mark.slow
@needs_two
def test_ddp_gives_the_gradients_of_one_process(tmp_path):
    """Averaged, each parameter's once: two ranks with other halves of a batch."""
    one, other = found_by_two(__file__, tmp_path)
    assert one == other
    model = model_of(settings=Settings())
    loss_of(model, torch.utils.data.default_collate(samples()[:8])).backward()
    expected = [p.grad.norm().item() for p in model.parameters()]
    assert one == pytest.approx(expected, rel=1e-4)


def found_by(rank: int) -> list[float]:
    model = nn.parallel.DistributedDataParallel(model_of())
    batch = torch.utils.data.default_collate(samples()[4 * rank : 4 * rank + 4])
    for _ in range(2):  # the second with buckets in the order of the first
        model.zero_grad()
        loss_of(model, batch).backward()
    return [p.grad.norm().item() for p in model.parameters()]


if __name__ == "__main__":
    run_as_two(found_by)
