"""Which blocks to recompute: the knapsack, the peaks that it is held to, and the choice beside all others."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.estimates.checkpointing import block_choice
from autotune.estimates.checkpointing.block_choice import BlockChoice, Slower
from autotune.estimates.checkpointing.block_peaks import holders_of, modules_holders, stretch_peaks
from autotune.estimates.checkpointing.knapsack import cheapest
from autotune.estimates.tracing.fake_step import FakeTraining
from autotune.estimates.types import COUNTED
from autotune.measure.profiling.allocations import Allocation, Span, Trace
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing, find_blocks
from autotune.testing.zoo import ZOO

# The knapsack

COSTS, FREED = (3, 4, 5), ((-10, -20, -30),)


@pytest.mark.parametrize(
    ("needed", "chosen"),
    [
        (0, ()),
        (30, (2,)),  # 5, and not 3 + 4
        (31, (0, 2)),  # 8, and not 4 + 5
        (45, (1, 2)),
        (60, (0, 1, 2)),
        (61, None),
    ],
)
def test_the_cheapest_that_frees_enough(needed, chosen):
    assert cheapest(COSTS, FREED, (-needed,)) == chosen


def test_every_row_is_held():
    """The third alone frees 30 of the first row for 5, but adds 9 to the second, which has room for 8."""
    assert cheapest(COSTS, (*FREED, (0, 0, 9)), (-30, 8)) == (0, 1)
    assert cheapest(COSTS, (*FREED, (0, 0, 9)), (-30, 9)) == (2,)


def test_what_is_excluded_is_not_chosen():
    assert cheapest(COSTS, FREED, (-30,), excluded=[(2,)]) == (0, 1)
    assert cheapest(COSTS, FREED, (0,), excluded=[()]) == (0,)
    assert cheapest(COSTS, FREED, (-60,), excluded=[(0, 1, 2)]) is None


def test_of_equals_the_first_are_chosen_and_none_for_nothing():
    assert cheapest((7,) * 12, ((-1,) * 12,), (-5,)) == (0, 1, 2, 3, 4)
    assert cheapest((0, 0, 0), ((-1, -1, -1),), (-1,)) == (0,)


def test_bytes_of_a_large_card_are_no_trouble():
    """96 alike blocks of 1 GB each, of which 40 GB must go, a byte more than 39 blocks free."""
    changes = ((-(10**9),) * 96,)
    assert cheapest((1e12,) * 96, changes, (-40 * 10**9,)) == tuple(range(40))


# Peaks


def trace(*made):
    """From (module, phase, bytes, born, died)."""
    allocations = (
        Allocation(number, num_bytes, born, died, module, phase, "activation")
        for number, (module, phase, num_bytes, born, died) in enumerate(made)
    )
    last = max(died for *_, died in made)
    return Trace(tuple(allocations), (Span("forward", 0),), last + 1)


STOCK = trace(
    ("a", "forward", 10, 1, 10),
    ("a.b", "forward", 90, 2, 9),
    ("c", "forward", 4, 3, 6),
    ("c", "forward", 36, 4, 7),
    ("c", "backward", 5, 5, 11),
    ("a", "backward", 7, 8, 12),
)
RECOMPUTED = trace(
    ("a", "forward", 10, 1, 14),
    ("a.b", "forward", 90, 2, 3),
    ("c", "forward", 4, 4, 10),
    ("c", "forward", 36, 5, 6),
    ("c", "backward", 36, 7, 9),
    ("c", "backward", 5, 8, 15),
    ("a.b", "backward", 90, 11, 13),
    ("a", "backward", 7, 12, 16),
)
"""Two blocks: ``a`` keeps 100 or 10, ``c`` 40 or 4."""


def rows(stock, recomputed):
    """(stretch, none + blocks): bytes as it stands, and what recomputing each adds."""
    peaks = stretch_peaks(stock, [recomputed], {"a": (0,), "a.b": (0,), "c": (1,)}, 2)
    return [(int(base), *map(int, row[:2])) for base, row in zip(peaks.base_bytes, peaks.changes[0], strict=True)]


def test_peaks_of_stretches_by_hand():
    """Stock: 100 in a's forward, 140 in c's, 145 with a gradient of 5 in c's backward, 112 in a's. Recomputing a frees
    90 while c runs. c's 36 come back in its own backward, where the peak is: nothing is won."""
    found = rows(STOCK, RECOMPUTED)
    assert found == [
        (0, 0, 0),
        (100, 0, 0),
        (140, -90, 0),
        (145, -90, 0),
        (112, 0, 0),
    ]
    peaks = [max(row[0] + sum(row[1 + block] for block in blocks) for row in found) for blocks in SOME]
    assert peaks == [145, 112, 145, 112]


SOME = ((), (0,), (1,), (0, 1))


def test_a_stretch_that_one_trace_lacks_counts_to_that_before_it():
    """Where c allocates nothing in its stock backward, its recomputation still counts."""
    stock = trace(("a", "forward", 100, 1, 4), ("c", "forward", 40, 2, 3))
    assert max(map(sum, rows(stock, RECOMPUTED))) == RECOMPUTED.peak_bytes()


class Shares(nn.Module):
    """Two blocks, each with a layer of its own and one that both call."""

    class Block(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.own = shared, nn.Linear(32, 32)

        def forward(self, x):
            return x + torch.tanh(self.shared(F.gelu(self.own(x))))

    def __init__(self):
        super().__init__()
        shared = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(self.Block(shared) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_stands_in_every_block_that_holds_it():
    model = Shares()
    holders = modules_holders(model, find_blocks(model))
    assert holders["blocks.0.shared"] == (0, 1, 2, 3)
    assert holders["blocks.2.own"] == (2,)
    assert holders_of("blocks.2.own.put_there_later", holders) == (2,)
    assert holders_of("head", holders) == ()


# The choice

MICRO = 8


class Stage(nn.Module):
    """Two convolutions of one width."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1)
        self.second = nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x):
        return F.gelu(self.second(F.gelu(self.first(x))))


class Stages(nn.Module):
    """Five unlike stages, of 1024 places, then 256, then 64: the later keep less and compute more."""

    def __init__(self):
        super().__init__()
        sides = ((3, 8, 1), (8, 6, 1), (6, 16, 2), (16, 24, 1), (24, 64, 2))
        self.stages = nn.Sequential(*(Stage(*side) for side in sides))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, foreach=False)


def task_of(build, shape):
    return Task(
        build_model=build,
        build_dataset=lambda: list(torch.randn(4, *shape)),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        build_optimizer=sgd,
        batch_size=MICRO,
    )


def plan(**settings):
    return Plan(settings=Settings(**settings), budget={"device": "cpu"})


STAGES = task_of(Stages, (3, 32, 32))
NUM_STAGES = 5
SUBSETS = [blocks for size in range(NUM_STAGES + 1) for blocks in combinations(range(NUM_STAGES), size)]


@pytest.fixture(scope="module")
def choice():
    return BlockChoice.of(plan(), STAGES)


@pytest.fixture(scope="module")
def peaks():
    """Of every subset, traced."""
    return {
        blocks: FakeTraining(plan(checkpointing=of(blocks)), STAGES).step(MICRO).trace.peak_bytes()
        for blocks in SUBSETS
    }


def of(blocks):
    return Checkpointing.of(blocks, NUM_STAGES)


def having(blocks, num_blocks=NUM_STAGES):
    return Settings(checkpointing=Checkpointing.of(blocks, num_blocks))


def chosen_by(choice, limit, micro=MICRO):
    """Numbers of the blocks, or None."""
    settings = choice.choose(micro, limit)
    return settings and settings.checkpointing.numbers(choice.variables.num_blocks)


def limits(peaks, shares=(0.95, 0.8, 0.65, 0.5, 0.3, 0.1, 0.01)):
    low, high = min(peaks.values()), max(peaks.values())
    return [round(low + share * (high - low)) for share in shares]


@pytest.mark.slow
def test_the_choice_is_the_cheapest_of_all_that_fit(choice, peaks):
    """Within 2 %, of all 32 subsets, at each of seven limits; and the very choice, traced, is within it."""
    for limit in limits(peaks):
        chosen = choice.choose(MICRO, limit)
        least = min(choice.cost(having(blocks), MICRO) for blocks, peak in peaks.items() if peak <= limit)
        assert choice.memory_model(chosen).peak_bytes(MICRO) <= limit
        assert choice.cost(chosen, MICRO) <= 1.02 * least


@pytest.mark.medium
def test_the_choice_costs_no_more_than_every_kth_and_somewhere_less(choice, peaks):
    saved = []
    for limit in limits(peaks):
        steps = [tuple(range(NUM_STAGES))[::every] for every in (1, 2, 3, 4)]
        costs = [choice.cost(having(blocks), MICRO) for blocks in steps if peaks[blocks] <= limit]
        if costs:
            saved.append(1 - choice.cost(choice.choose(MICRO, limit), MICRO) / min(costs))
    assert min(saved) >= 0
    assert max(saved) > 0.25


def test_nothing_is_recomputed_where_all_fits_and_there_is_no_choice_where_nothing_does(choice, peaks):
    assert chosen_by(choice, choice.memory_model(having(())).peak_bytes(MICRO)) == ()
    assert chosen_by(choice, round(0.99 * peaks[()])) not in ((), None)
    assert choice.choose(MICRO, round(0.99 * min(peaks.values()))) is None


def test_the_plans_own_checkpointing_is_replaced(choice, peaks):
    other = BlockChoice.of(plan(checkpointing=Checkpointing(kind="blocks")), STAGES)
    assert other.choose(MICRO, 2**40) == choice.choose(MICRO, 2**40) == Settings()


def test_a_choice_above_the_limit_is_not_returned(choice, peaks, monkeypatch):
    """Where peaks are foreseen a tenth too low, the next choice makes up for it; where they are far too low, all blocks
    are the last resort."""
    limit = limits(peaks)[2]
    for share in (0.9, 0.01):

        def too_low(*args, share=share):
            found = stretch_peaks(*args)
            return replace(found, base_bytes=found.base_bytes * share)

        monkeypatch.setattr(block_choice, "stretch_peaks", too_low)
        assert peaks[chosen_by(choice, limit)] <= limit


def test_the_cost_of_a_block_is_its_forward_by_hand():
    """Two blocks of Linear(32, 32) and GELU, each on 8 samples; recomputation stops when all that is kept is there: the
    Linear runs again, GELU does not. 2 · 8 · 32 · 32 operations; its input, weight, bias and output are moved."""

    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))

    found = BlockChoice.of(plan(), task_of(build, (32,)))
    moved = 4 * (8 * 32 + 32 * 32 + 32 + 8 * 32)
    one, two, both = (found.cost(having(blocks, 2), MICRO) for blocks in ((0,), (1,), (0, 1)))
    assert one == pytest.approx(2 * 8 * 32 * 32 * COUNTED.flop_s + moved * COUNTED.byte_s, rel=0.01)
    assert both == pytest.approx(2 * two)


def test_what_would_take_too_long_is_not_looked_at():
    found = BlockChoice.of(plan(), STAGES)
    limit_bytes = found.memory_model(found.everywhere[0]).peak_bytes(MICRO) - 1
    chosen = found.choose(MICRO, limit_bytes)
    assert chosen is not None
    cost_s = found.cost(chosen, MICRO)
    assert found.choose(MICRO, limit_bytes, 1.01 * cost_s) == chosen
    with pytest.raises(Slower):
        found.choose(MICRO, limit_bytes, cost_s)


@pytest.mark.medium
@pytest.mark.parametrize(("name", "accumulates"), [("tied", False), ("gpt", True), ("resnet", False)])
def test_the_choice_fits_in_the_zoo(name, accumulates):
    """A block that stands twice, two micro-batches to a step, BatchNorm's statistics."""
    found = BlockChoice.of(plan(), ZOO[name], accumulates)
    stock = found.memory_model(Settings()).peak_bytes(11)
    chosen = found.choose(11, stock - 1)
    assert chosen not in (None, Settings())
    assert found.memory_model(chosen).peak_bytes(11) < stock


def test_the_choice_fits_where_blocks_share_a_module():
    found = BlockChoice.of(plan(), task_of(Shares, (32,)))
    stock = found.memory_model(Settings()).peak_bytes(64)
    chosen = found.choose(64, round(0.8 * stock))
    assert chosen not in (None, Settings())
    assert found.memory_model(chosen).peak_bytes(64) <= round(0.8 * stock)


def test_a_model_without_blocks_fits_or_does_not():
    found = BlockChoice.of(plan(), task_of(lambda: nn.Linear(4, 2), (4,)))
    stock = found.memory_model(Settings()).peak_bytes(MICRO)
    assert (found.choose(MICRO, stock), found.choose(MICRO, stock - 1)) == (Settings(), None)
