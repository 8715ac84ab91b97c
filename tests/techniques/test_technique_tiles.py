"""``tiles``: its contract on the zoo, and what it keeps and draws. What is a feed-forward part is another test's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.fitting.choices import DEFAULT
from autotune.plan import Budget, Plan
from autotune.search_spaces import load_space
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
from autotune.techniques.tiles import Tiles
from autotune.testing.facts import facts_of
from autotune.testing.runs import relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

IN_TILES = Tiles(kind="feed_forward", number=4)
FEATURES, HIDDEN, POSITIONS = 8, 64, 32


class TestTiles(TechniqueContract):
    technique = Tiles
    lacking = (Tiles(kind="feed_forward"),)


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES), nn.Dropout(p))

    def forward(self, x):
        return x + self.mlp(x)


def task(p: float = 0.0) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: nn.Sequential(Block(p), Block(p)),
        build_dataset=lambda: list(torch.randn(64, POSITIONS, FEATURES, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=8,
    )


def of(model: nn.Module, **settings) -> nn.Module:
    return autotune.apply_to_model(Plan(settings=Settings(**settings)), model)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = model(x).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks")}, {"layers": Layers(kind="exact")}]
)
def test_values_gradients_and_dropout_are_the_stock_models(others):
    """The last dropout draws once for all tiles, what it draws for the whole."""
    torch.manual_seed(0)
    stock = nn.Sequential(Block(0.5), Block(0.5))
    tiled = of(copy.deepcopy(stock), tiles=IN_TILES, **others)
    x = torch.randn(3, POSITIONS + 1, FEATURES, requires_grad=True)  # tiles are of 24 or 25 positions
    for ours, theirs in zip(gradients(tiled, x), gradients(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_tile_at_a_time_is_all_that_is_kept_of_the_inside():
    """A forward keeps what is given and, of the dropout behind, a mask: nothing of 64 features."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.shape
        return tensor

    model, x = of(nn.Sequential(Block(0.1), Block(0.1)), tiles=IN_TILES), torch.randn(2, POSITIONS, FEATURES)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x.requires_grad_())
    assert kept
    assert all(shape[-1] == FEATURES for shape in kept.values())


def test_predicted_is_a_tile_of_what_is_inside_by_hand():
    """Stock, backward begins with what both blocks keep: of 64 features, what GELU is given and gives, 8 samples of 32
    positions in fp32: 64 KiB each. In 4 tiles one of these is 16 KiB, and at most one block's are there."""
    peaks = [
        fit_memory_model(Plan(settings=Settings(tiles=one), budget=Budget(device="cpu")), task()).peak_bytes(8)
        for one in (Tiles(), IN_TILES)
    ]
    kept = 2 * 2 * 8 * POSITIONS * HIDDEN * 4
    assert peaks[0] > kept
    assert peaks[1] < peaks[0] - kept // 2


def test_a_step_trains_as_the_stock_model_does_with_accumulation_and_autocast():
    for precision in ("fp32", "bf16"):
        both = Settings(precision=Precision(kind=precision), batch=Batch(micro=4, accumulate=2))
        stock, ours = (run_applied(task(), both.having(one)) for one in (Tiles(), IN_TILES))
        assert relative_difference(ours.state, stock.state) < (1e-2 if precision == "bf16" else 1e-6)


def test_few_positions_and_inputs_without_any_are_computed_at_once():
    calls = []
    model = nn.Sequential(Block(0.0))
    model[0].mlp[1].register_forward_hook(lambda *args: calls.append(args[2].shape[0]))
    applied = of(copy.deepcopy(model), tiles=Tiles())
    with pytest.raises(PlanError, match="no module of the model is known to compute each position by itself"):
        of(model, tiles=IN_TILES)  # what has hooks is left as it is
    tiled = of(nn.Sequential(Block(0.0)), tiles=IN_TILES)
    tiled[0].mlp[1].register_forward_hook(lambda *args: calls.append(args[2].shape[0]))
    for shape in ((1, 7, FEATURES), (64, FEATURES), (1, 8, FEATURES)):
        tiled(torch.randn(shape))
    assert calls == [1, 64, 2, 2, 2, 2]
    assert "forward" not in vars(applied[0].mlp)


def test_a_part_is_called_by_name_too():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)

        def forward(self, hidden, unused=None):
            return self.down(self.up(hidden).relu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Named()

        def forward(self, x):
            return self.part(hidden=x) + self.part(x, None)

    stock, x = Model(), torch.randn(2, POSITIONS, FEATURES, requires_grad=True)
    for ours, theirs in zip(gradients(of(copy.deepcopy(stock), tiles=IN_TILES), x), gradients(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_else_decides_what_is_kept_is_refused():
    tiled = Settings(tiles=IN_TILES)
    assert "tiles: a compiled program" in tiled.having(Compile(kind="model")).conflict()
    assert "tiles: selective checkpointing" in tiled.having(Checkpointing(kind="selective")).conflict()
    assert tiled.having(Checkpointing(kind="blocks")).conflict() is None


def test_a_model_without_such_parts_is_refused():
    with pytest.raises(PlanError, match=r"settings.tiles.kind: no module .* Use kind: none"):
        autotune.apply(Plan(settings=Settings(tiles=IN_TILES)), ZOO["mlp"])


def test_it_is_said():
    assert IN_TILES.describe() == "feed-forward parts in 4 tiles"


def test_presets_and_fit_leave_it_out_until_it_is_listed():
    """For a card, four blocks keep 1 GiB of what is inside; one tile of one block 32 MiB."""
    known = facts_of(ZOO["gpt"])
    for name in ("default", "exact", "lossy"):
        assert load_space(name).choices(known)["tiles"] == (Tiles(),)
    assert "tiles" not in DEFAULT
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)) for _ in range(4)))
    asked = {"loss": lambda model, x: model(x).square().mean(), "device": "cuda", "dry_run": True}
    fitted = autotune.fit(nn.Sequential(wide), torch.ones(8, 2048, 64), "1200MiB", techniques=["tiles"], **asked)
    assert fitted.plan.settings.tiles == Tiles(kind="feed_forward")
