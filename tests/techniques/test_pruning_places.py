"""Models that are easily cut in the wrong places: each is cut right, or a group is left whole by name."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch_pruning  # noqa: F401 - cuts are found in forks, which find it loaded
from torch import nn

from autotune.errors import PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.pruning import How, Record, cut, cut_each, groups, rebuild
from autotune.pruning.check import disagreement
from autotune.pruning.rebuild import signature
from autotune.pruning.record import Kept
from benchmarks.pruning import __main__ as benchmark
from benchmarks.pruning.__main__ import MODELS, built, inputs_of


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def case(name: str):
    """A model and what runs it."""
    build, takes = MODELS[name]
    x = inputs_of(takes, 2)
    return built(build), lambda model: sum(one.square().mean() for one in benchmark.outputs(model, x))


def cut_quietly(name: str, ratio: float = 0.5, **how) -> tuple[nn.Module, Record]:
    model, run = case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is left, which the record says too
        record = cut(model, run, How(ratio, **how))
    smaller = copy.deepcopy(model)
    rebuild(smaller, record)
    return smaller, record


SILENT = ["flattened, channels last", "text CNN, flattened", "channel shuffle", "maxout of four", "maxout"]
LATER = ["layer in eval mode alone", "buffer in eval mode alone"]


@pytest.mark.medium
@pytest.mark.parametrize("name", [*SILENT, *LATER, "SwiGLU by chunk", "DenseNet", "ConvNeXt"])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_dead_part_is_what_is_cut_and_nothing_changes(name, ratio):
    """Zeros beforehand in the place of what goes together; the cut model computes the same in both modes."""
    build, takes = MODELS[name]
    outcome, said, kept = benchmark.checked(built(build), inputs_of(takes, 2), ratio)
    assert outcome in ("right", "left whole"), said
    assert kept < 1


def test_four_neighbours_that_are_compared_go_together():
    """Of 32 outputs in fours half of the fours go: 16 stay, not the one that is in no four with any that goes."""
    smaller, record = cut_quietly("maxout of four")
    (first,) = (record.sets[number] for number in record.tensors["first.weight"].sets if number is not None)
    assert (len(first), smaller.second.in_features) == (16, 4)
    assert {place // 4 for place in first} == {first[0] // 4, first[4] // 4, first[8] // 4, first[12] // 4}


def test_two_halves_that_are_multiplied_go_together():
    """Of 64 outputs of SwiGLU 32 stay, at the same places of both halves."""
    smaller, record = cut_quietly("SwiGLU by chunk")
    up = record.sets[record.tensors["up.weight"].sets[0]]
    assert (len(up), smaller.down.in_features) == (32, 16)
    assert [place + 32 for place in up[:16]] == list(up[16:])


def test_a_layer_of_which_no_such_share_can_go_is_left_whole_with_the_way_out():
    """Sixteen channels in two groups of a convolution of eight groups go eight at a time."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )
    model(torch.ones(1, 3, 4, 4))
    with pytest.raises(
        PlanError, match=r"0 keeps its channels, since ratio 0.25 cannot be had of 16 that go 8 at a ti"
    ):
        cut(model, lambda one: one(torch.ones(2, 3, 4, 4)).sum(), How(0.25))
    record = cut(model, lambda one: one(torch.ones(2, 3, 4, 4)).sum(), How(0.5))
    assert len(record.sets[record.tensors["0.weight"].sets[0]]) == 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight norm", "first keeps its channels, since the weight of first is computed from others"),
        ("weight norm, the old one", "the weight of second is computed from others"),
        ("spectral norm", "the weight of second is computed from others"),
        ("layer in eval mode alone", "second keeps its channels, since calibrate would .* in eval mode"),
        ("buffer in eval mode alone", "second keeps its channels, since .* in eval mode"),
        ("channel shuffle", "first keeps its channels, since second would take in something else"),
    ],
)
def test_what_cannot_be_cut_is_left_whole_and_named_and_the_rest_is_cut(name, said):
    model, run = case(name)
    (found,) = cut_each(model, run, [How(0.5)])
    text = "; ".join(found.left) if isinstance(found, Record) else str(found)
    assert re.search(said, text)
    assert "Error" not in text


def test_a_record_that_is_wrong_is_seen_at_the_layer_that_would_take_in_something_else():
    """Channels 0 and 1 of two stay in front; behind the permutation their places alternate, and a record that takes the
    first half there is wrong. It agrees where the places are right."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(1, 2, 1), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.first(x).permute(0, 2, 3, 1).reshape(len(x), -1))

    model, x = Last(), torch.randn(2, 1, 2, 2)

    def record(places: tuple[int, ...]) -> Record:
        return Record(
            signature(model),
            ((0,), places),
            {
                "first.weight": Kept((2, 1, 1, 1), (0, None, None, None)),
                "first.bias": Kept((2,), (0,)),
                "head.weight": Kept((2, 8), (None, 1)),
            },
            {"first": {"out_channels": (2, 1)}, "head": {"in_features": (8, 4)}},
        )

    assert disagreement(model, lambda one: one(x).sum(), record((0, 2, 4, 6))) is None
    found = disagreement(model, lambda one: one(x).sum(), record((0, 1, 2, 3)))
    assert found is not None
    assert found.path == "head"
    assert found.words == "head would take in something else than what is left of its inputs"


def test_random_layers_do_not_hide_what_is_right():
    """Dropout draws other numbers for fewer channels."""
    _, record = cut_quietly("dropout")
    assert record.left == ()


def test_groups_are_told_with_their_layers_and_cut_by_ratios_of_their_own():
    """Two hidden layers: the first keeps all of 32, the second 8."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def run(one: nn.Module) -> torch.Tensor:
        return one(torch.ones(2, 4)).sum()

    found = groups(model, run)
    assert [(one.first, one.layers, one.width) for one in found] == [("0", ("0", "2"), 32), ("2", ("2", "4"), 32)]
    record, wrong = cut_each(model, run, [How(0.5, ratios={"0": 0.0, "2": 0.75}), How(0.5, ratios={"1": 0.5})])
    assert isinstance(record, Record)
    rebuild(model, record)
    assert [(one.in_features, one.out_features) for one in model if isinstance(one, nn.Linear)] == [
        (4, 32),
        (32, 8),
        (8, 2),
    ]
    assert isinstance(wrong, PlanError)
    assert "ratios: 1 begins no group" in str(wrong)


def test_three_quarters_of_grouped_heads_go_where_a_whole_group_is_half():
    """Of two groups of four queries one goes, and half of the other: two heads of four stay, with one key."""
    smaller, _ = cut_quietly("Llama", 0.75)
    attention = smaller.model.layers[0].self_attn
    assert [len(one.weight) for one in (attention.q_proj, attention.k_proj)] == [2 * 4, 4]
