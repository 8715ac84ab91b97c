"""What is done in each block and with the whole, chosen together: beside every combination, traced."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.estimates.checkpointing import block_choice
from autotune.estimates.checkpointing.block_choice import BlockChoice
from autotune.estimates.checkpointing.block_peaks import stretch_peaks
from autotune.estimates.checkpointing.knapsack import Rules, cheapest, smallest
from autotune.estimates.checkpointing.variables import Variables
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer_step import OptimizerStep

MICRO, NUM_BLOCKS, WIDTH = 16, 2, 32
RECOMPUTED, SAVING, IN_BACKWARD = Checkpointing(kind="blocks"), Layers(kind="exact"), OptimizerStep(kind="in_backward")
CHOICES = (RECOMPUTED, SAVING, IN_BACKWARD)


class Attending(nn.Module):
    """A transformer's block."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm_too = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.drop(self.down(F.relu(self.up(self.norm_too(x)))))


class Convolving(nn.Module):
    """A CNN's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.norm_too = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        return x + F.relu(self.norm_too(self.second(F.relu(self.norm(self.first(x))))))


class Model(nn.Module):
    def __init__(self, block, stem, head):
        super().__init__()
        self.stem, self.head = stem, head
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def task_of(build, shape):
    return Task(
        build_model=build,
        build_dataset=lambda: list(torch.randn(4, *shape)),
        compute_loss=lambda model, batch: F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
        batch_size=MICRO,
    )


TASKS = {
    "transformer": task_of(lambda: Model(Attending, nn.Linear(8, WIDTH), nn.Linear(16 * WIDTH, 50)), (16, 8)),
    "cnn": task_of(lambda: Model(Convolving, nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 50)), (3, 8, 8)),
}
KINDS = {
    "as it is": (),
    "recomputed": (RECOMPUTED,),
    "saving": (SAVING,),
    "both": (RECOMPUTED, SAVING),
}


def combinations():
    """Every one, written out: a row for each block, layers outside, the step in backward."""
    for ways in product(KINDS.values(), repeat=NUM_BLOCKS):
        for outside, in_backward in product((False, True), repeat=2):
            saving = [number for number, way in enumerate(ways) if SAVING in way]
            if saving and not outside:
                continue
            recomputed = tuple(number for number, way in enumerate(ways) if RECOMPUTED in way)
            spared = tuple(number for number in range(NUM_BLOCKS) if number not in saving)
            yield Settings(
                checkpointing=Checkpointing.of(recomputed, NUM_BLOCKS),
                layers=Layers(kind="exact", spared=spared) if outside else Layers(),
                optimizer_step=IN_BACKWARD if in_backward else OptimizerStep(),
            )


EVERY = list(combinations())


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_choice_is_the_cheapest_of_all_combinations_that_fit(name):
    """Within 2 %, of all 40, at each of six limits; and its own trace is within the limit."""
    choice = BlockChoice.of(Plan(settings=Settings(), budget={"device": "cpu"}), TASKS[name], choices=CHOICES)
    peaks = {settings: choice.memory_model(settings).peak_bytes(MICRO) for settings in EVERY}
    costs = {settings: choice.cost(settings, MICRO) for settings in EVERY}
    low, high = min(peaks.values()), max(peaks.values())
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        limit = round(low + share * (high - low))
        chosen = choice.choose(MICRO, limit)
        assert peaks[chosen] <= limit
        assert costs[chosen] <= 1.02 * min(costs[settings] for settings in EVERY if peaks[settings] <= limit)


def test_unknowns_stand_for_every_combination_and_for_no_other():
    """Each block has three ways beside being as it is; layers are outside or not, the step is in backward or not."""
    variables = Variables(CHOICES, NUM_BLOCKS)
    assert len(variables.places) == NUM_BLOCKS * 3 + 1 + 1
    assert len(EVERY) == len(set(EVERY)) == 40
    for settings in EVERY:
        assert variables.settings(Settings(), variables.chosen(settings)) == settings


def test_rules_are_kept():
    """The first two exclude each other; the third, which the second needs, costs 5."""
    rules = Rules(one_of=((0, 1),), needs=((1, 2),))
    costs, changes = (9, 1, 5), ((-10, -20, -1),)
    assert cheapest(costs, changes, (-10,), rules=rules) == (1, 2)
    assert cheapest((4, 1, 5), changes, (-10,), rules=rules) == (0,)
    assert cheapest(costs, changes, (-22,), rules=rules) is None


def test_of_blocks_that_are_alike_the_first_are_chosen():
    """Six blocks, each as it is, recomputed (frees 10 and costs 3), or with layers (frees 4 and costs 1) where the last
    unknown is chosen. Whatever is needed, no later block does more than an earlier one."""
    rules = Rules(
        one_of=tuple((2 * block, 2 * block + 1) for block in range(6)),
        needs=tuple((2 * block + 1, 12) for block in range(6)),
    )
    for needed in range(1, 61):
        chosen = cheapest((3, 1) * 6 + (0.5,), ((-10, -4) * 6 + (0,),), (-needed,), rules=rules)
        assert chosen is not None
        ways = [next((2 - way for way in (0, 1) if 2 * block + way in chosen), 0) for block in range(6)]
        assert sum((0, 4, 10)[way] for way in ways) >= needed
        assert ways == sorted(ways, reverse=True)


def test_blocks_that_are_unlike_stay_as_the_program_has_them():
    """The first costs more, or frees less in the row that binds."""
    rules = Rules(one_of=((0,), (1,), (2,)))
    assert cheapest((2, 1, 1), ((-5, -5, -5),), (-5,), rules=rules) == (1,)
    assert cheapest((1, 1, 1), ((-5, -5, -5), (-1, -1, -4)), (-5, -4), rules=rules) == (2,)


def test_the_set_whose_largest_row_is_smallest():
    """Rows of 10 and 8: the first thing brings 3 and 9, the second 7 and 2, both 0 and 3."""
    assert smallest((10, 8), ((-7, -3), (1, -6))) == (0, 1)
    assert smallest((10, 8), ((-7, -3), (1, -6)), Rules(one_of=((0, 1),))) == (1,)


def test_layers_that_are_foreseen_to_save_too_much_are_chosen_anew(monkeypatch):
    """What the first choice misses is believed of that kind of layers wherever it is."""
    choice = BlockChoice.of(
        Plan(settings=Settings(), budget={"device": "cpu"}), TASKS["transformer"], choices=(SAVING,)
    )
    stock, every = (
        choice.memory_model(Settings(layers=one)).peak_bytes(MICRO) for one in (Layers(), Layers(kind="exact"))
    )

    def too_low(*args):
        found = stretch_peaks(*args)
        return replace(found, base_bytes=(found.base_bytes * 0.97).astype(int))

    monkeypatch.setattr(block_choice, "stretch_peaks", too_low)
    for share in (0.8, 0.6, 0.4, 0.2, 0.0):
        limit = round(every + share * (stock - every))
        assert choice.memory_model(choice.choose(MICRO, limit)).peak_bytes(MICRO) <= limit
