"""What `benchmarks.advice` does to a model is what its row says, and its peak is that of all tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune.techniques import TECHNIQUES
from autotune.techniques.support.reversible.pair import declared
from benchmarks.advice.edits import (
    Edit,
    in_place,
    keep_outputs,
    make_reversible,
    mask_weights,
    share_blocks,
    train_adapters,
    untie,
)  # fmt: skip
from benchmarks.advice.jobs import JOBS
from benchmarks.advice.known import ADVICE, ALL
from benchmarks.advice.page import verdict
from benchmarks.steps import dynamic_peak_bytes


class Blocks(nn.Module):
    """Three blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout()) for _ in range(3))


def test_advice_is_measured_on_three_models():
    assert [key for key, one in ADVICE.items() if len(one.models) < 3] == []
    assert {model for one in ADVICE.values() for model in one.models} == {*ALL}


def test_each_technique_has_a_row():
    """Of the step's; a batch is a field of its own, processes have their own rows, and allocators change no tensors."""
    rows = {name for one in ADVICE.values() for name in one.settings}
    assert {*TECHNIQUES} - rows == {"batch", "parallel", "allocator"}


def test_blocks_that_share_are_one():
    model = Blocks()
    share_blocks(model)
    assert sum(one.numel() for one in model.parameters()) == 4 * 4 + 4


def test_reversible_blocks_have_the_jobs_weights_and_return_what_a_pair_returns():
    model = JOBS["char GPT"]().build_model()
    before = {id(one) for one in model.parameters()}
    make_reversible(model)
    assert {id(one) for one in model.parameters()} == before
    assert declared(model) == ("blocks.0.pairs",)
    pair: Any = model.get_submodule("blocks.0.pairs.0")
    pair.f = pair.g = nn.Identity()
    assert [one.item() for one in pair(torch.ones(1), torch.full((1,), 2.0))] == [3, 5]


def test_adapters_alone_train():
    """Four of rank 8, from 192 features to queries, keys and values of 192."""
    model = JOBS["char GPT"]().build_model()
    train_adapters(model)
    assert sum(one.numel() for one in model.parameters() if one.requires_grad) == 4 * 8 * (192 + 3 * 192)


def test_a_head_that_is_untied_has_the_same_weight_of_its_own():
    model: Any = nn.Module()
    model.words, model.lm_head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    model.lm_head.weight = model.words.weight
    untie(model)
    assert model.lm_head.weight is not model.words.weight
    assert torch.equal(model.lm_head.weight, model.words.weight)


def test_half_of_the_weights_are_masked():
    model = Blocks()
    mask_weights(model)
    assert [int((layer[0].weight == 0).sum()) for layer in model.blocks] == [8, 8, 8]


def test_in_place_layers_write_over_their_input():
    model = Blocks()
    in_place(model)
    x = torch.tensor([-1.0])
    model.blocks[0][1](x)
    assert x.item() == 0
    assert model.blocks[0][2].inplace


@pytest.mark.parametrize(("edit", "peak"), [(lambda model: None, 4_000_000), (keep_outputs, 8_000_000)])
def test_outputs_are_kept_until_the_next_ones_are_there(edit: Edit, peak: int):
    model, x = nn.Linear(1000, 1000), torch.ones(1000, 1000)
    edit(model)
    with torch.no_grad():
        assert dynamic_peak_bytes(lambda: model(x), lambda: model(x)) == peak


def test_a_peak_has_what_was_left_before_and_not_what_was_freed_before():
    kept: list[Any] = []

    def prepare() -> None:
        torch.ones(5_000_000)
        kept.append(torch.ones(1_000_000))

    assert dynamic_peak_bytes(lambda: torch.ones(2_000_000), prepare) == 4 * 3_000_000


@pytest.mark.parametrize(
    ("peak", "time", "word"),
    [
        (0.8, 1.0, "helps"),
        (0.8, 1.2, "costs time"),
        (1.2, 0.8, "costs memory"),
        (1.2, 1.0, "worse"),
        (1.0, 1.2, "worse"),
        (1.0, 0.8, "faster"),
        (1.02, 0.98, "no effect"),
    ],
)
def test_a_verdict_is_of_the_median_peak_and_of_what_most_rounds_took(peak: float, time: float, word: str):
    """Where the third job's rounds say nothing of time."""
    rounds = {"time_ratio": time, "time_spread": [time - 0.05, time + 0.05]}
    jobs = [(0.1, rounds), (peak, rounds), (9.0, {"time_ratio": time, "time_spread": [0.5, 1.5]})]
    assert verdict([{"peak_ratio": one, **row} for one, row in jobs]) == word


@pytest.mark.parametrize(("peak", "word"), [(0.8, "less memory, time depends"), (1.0, "depends")])
def test_where_jobs_disagree_it_depends(peak: float, word: str):
    spreads = ([0.81, 0.84], [1.07, 1.16], [0.99, 1.0])
    assert verdict([{"peak_ratio": peak, "time_ratio": sum(s) / 2, "time_spread": s} for s in spreads]) == word
