"""Cuts and their records: of each kind of model, what stays, what is put right, and what is refused."""

from __future__ import annotations

import copy
import functools
import os
import sys

import pytest
import torch
import torch_pruning
from pruning_models import MODELS, Depthwise, UNet, image_loss
from torch import nn
from torch.nn import functional as F

from autotune.errors import PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.pruning import How, Record, cut, rebuild
from autotune.pruning.rebuild import tensors_of
from autotune.testing.models import ResNet


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@functools.cache
def _case(name: str) -> tuple[nn.Module, Record]:
    build, run = MODELS[name]
    torch.manual_seed(0)
    model = build()
    return model, cut(model, run, How(0.25))


@pytest.fixture(params=MODELS)
def case(request):
    """A model's name, a copy of it, and the record of a quarter of its widths going."""
    model, record = _case(request.param)
    return request.param, copy.deepcopy(model), record


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def pruned(name: str) -> nn.Module:
    model, record = _case(name)
    model = copy.deepcopy(model)
    rebuild(model, record)
    return model


def test_finding_a_cut_leaves_the_model_alone(case):
    """The same tensors, modes, hooks and attributes as one that was never looked at."""
    name, model, _ = case
    torch.manual_seed(0)
    fresh = MODELS[name][0]()
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_rebuilt_model_is_what_is_kept_of_its_weights_without_torch_pruning(case, monkeypatch):
    """Bit for bit, of whatever weights, from the record as it was written down; ties and names stay."""
    _, model, record = case
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    ours = copy.deepcopy(model)
    rebuild(ours, Record.unpacked(record.packed(), record.hash))
    before, after = tensors_of(model), tensors_of(ours)
    assert before.keys() == after.keys()
    for name, value in before.items():
        for dim, number in enumerate(record.tensors[name].sets if name in record.tensors else ()):
            if number is not None:
                value = value[(slice(None),) * dim + (list(record.sets[number]),)]
        assert torch.equal(value, after[name]), name
    ties = [[id(values[name]) for name in values] for values in (before, after)]
    assert len(set(ties[0])) == len(set(ties[1]))


def test_a_rebuilt_model_trains_and_is_smaller(case):
    name, model, record = case
    whole = num_parameters(model)
    rebuild(model, record)
    assert num_parameters(model) < 0.95 * whole
    loss = MODELS[name][1](model)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "head"),
    [(ResNet, "head"), (UNet, "head"), (Depthwise, "head")],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_convolutions_are_cut_as_torch_pruning_cuts_them(build, head):
    """The stock library on a copy, told of the output layer by hand, gives the very same tensors."""
    torch.manual_seed(0)
    model = build()
    ours, stock = copy.deepcopy(model), copy.deepcopy(model).eval()
    rebuild(ours, cut(model, image_loss, How(0.25)))
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    example = torch.randn(2, 3, 16, 16)
    torch_pruning.pruner.BasePruner(
        stock, example, importance, pruning_ratio=0.25, ignored_layers=[stock.get_submodule(head)]
    ).step()
    expected = stock.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


def test_attributes_of_modules_are_put_right():
    depthwise = pruned("depthwise").blocks[0][3]
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (24, 24, 24)
    bert = pruned("bert").bert.encoder.layer[0].attention.self
    assert (bert.num_attention_heads, bert.all_head_size, bert.query.out_features) == (3, 24, 24)
    gpt2 = pruned("gpt2").transformer.h[0].attn
    assert (gpt2.num_heads, gpt2.split_size, gpt2.head_dim) == (3, 24, 8)
    assert (gpt2.c_attn.nf, tuple(gpt2.c_attn.weight.shape)) == (72, (32, 72))
    assert pruned("vit").vit.layers[0].attention.num_attention_heads == 3


class Noting(nn.Sequential):
    """Keeps each output, as a LightningModule's step keeps losses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(super().forward(x))
        return self.seen[-1]


def test_what_a_model_notes_as_it_runs_is_no_part_of_its_record():
    model = Noting()
    record = cut(model, lambda one: one(torch.ones(2, 8)).sum(), How(0.5))
    rebuild(model, record)
    assert (model[0].out_features, model.seen) == (16, [])


def test_grouped_queries_lose_one_of_each_group_or_whole_groups():
    """Two groups of four keep three queries each; of eight groups of one, two go with key and value."""
    grouped = pruned("llama").model.layers[0].self_attn
    assert grouped.num_key_value_groups == 3
    assert [len(one.weight) for one in (grouped.q_proj, grouped.k_proj)] == [24, 8]
    single = pruned("llama, a group for each head").model.layers[0].self_attn
    assert single.num_key_value_groups == 1
    assert [len(one.weight) for one in (single.q_proj, single.k_proj)] == [24, 24]


def test_tied_weights_stay_tied():
    model = pruned("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight


class Attention(nn.Module):
    """Fused projections; ``layout`` says how the heads lie in them."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.num_heads, self.head_dim = layout, 4, 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        x = F.pad(x, (0, 13))
        lies = (3, self.num_heads) if self.layout == "whole" else (self.num_heads, 3)
        found = self.qkv(x).view(*x.shape[:2], *lies, self.head_dim)
        q, k, v = found.unbind(2 if self.layout == "whole" else 3)
        scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
        mixed = (scores @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return self.head((x + self.mlp(x)).mean(1))


def test_heads_are_cut_only_where_the_rest_is_computed_as_before():
    """Queries first in the fused projection; where heads lie otherwise they stay, with a word, and the MLP is cut."""
    torch.manual_seed(0)
    model = Attention("whole")
    rebuild(model, cut(model, image_loss, How(0.25)))
    assert (model.num_heads, model.qkv.out_features, model.mlp[0].out_features) == (3, 36, 48)
    model = Attention("by head")
    with pytest.warns(UserWarning, match="qkv keeps its heads, since out would take in something else"):
        rebuild(model, cut(model, image_loss, How(0.25)))
    assert (model.num_heads, model.qkv.out_features, model.mlp[0].out_features) == (4, 48, 48)


def test_heads_stay_where_they_are_not_asked_for():
    model = Attention("whole")
    rebuild(model, cut(model, image_loss, How(0.25, heads=False)))
    assert (model.num_heads, model.mlp[0].out_features) == (4, 48)


@pytest.mark.medium
@pytest.mark.parametrize("criterion", ["l1", "lamp", "random"])
@pytest.mark.parametrize("scope", ["global", "isomorphic"])
def test_criteria_and_scopes_cut_and_are_repeated_the_same(criterion, scope):
    torch.manual_seed(0)
    model = UNet(16)
    first, second = (cut(model, image_loss, How(0.2, criterion=criterion, scope=scope)) for _ in range(2))
    assert first == second
    assert first.tensors


def test_the_smallest_norms_go():
    """Of a hidden layer whose first half is nearly nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[1].weight[:4] *= 1e-3
        model[3].weight[:, :4] *= 1e-3
    record = cut(model, image_loss, How(0.5))
    assert record.sets == ((4, 5, 6, 7),)


def test_widths_are_rounded_down():
    model = UNet(16)
    rebuild(model, cut(model, image_loss, How(0.25, round_to=8)))
    assert [model.down_1[0].out_channels, model.down_2[0].out_channels, model.bottom[0].out_channels] == [8, 24, 48]


def test_what_is_untouchable_keeps_every_tensor():
    """Also its inputs: what feeds it is not cut either."""
    torch.manual_seed(0)
    model = UNet()
    record = cut(model, image_loss, How(0.25, untouchable=("bottom",)))
    assert record.tensors
    assert not any(name.startswith("bottom") for name in record.tensors)
    assert "down_2.3.weight" not in record.tensors or record.tensors["down_2.3.weight"].sets[0] is None


def test_an_untouchable_name_that_matches_nothing_is_answered_with_those_that_are_near():
    with pytest.raises(PlanError, match=r"untouchable: the model has no module botom\. .* such as bottom"):
        cut(UNet(), image_loss, How(0.25, untouchable=("botom",)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(11, 8), nn.LSTM(8, 8), nn.Linear(8, 11)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Tagger, r"recurrent layers \(LSTM\)"),
        (lambda: nn.Sequential(nn.GRUCell(4, 4)), r"recurrent layers \(GRUCell\)"),
        (lambda: nn.Sequential(nn.BatchNorm2d(3)), "neither linear layers nor convolutions"),
    ],
)
def test_what_cannot_be_pruned_is_refused_before_it_is_run(build, said):
    with pytest.raises(PlanError, match=rf"^settings\.pruning: .*{said}.*Use kind: none"):
        cut(build(), None, How(0.25))


def endless(model):
    while True:
        image_loss(model)


def raising(model):
    raise ZeroDivisionError("of the user's")


def leaving(model):
    os._exit(3)


class Fixed(nn.Module):
    """Its width is written into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x.mean((2, 3))).view(-1, 2, 4).sum(1))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "run", "said"),
    [
        (UNet(), endless, r"given up \(exit code -\d+\)"),
        (UNet(), leaving, r"given up \(exit code 3\)"),
        (UNet(), raising, "cannot be traced .*: ZeroDivisionError: of the user's"),
        (Fixed(), image_loss, "cuts nothing of this model: first keeps its channels, since .*Use another ratio"),
    ],
    ids=["endless", "leaving", "raising", "fixed"],
)
def test_what_fails_or_hangs_does_so_in_a_child(monkeypatch, model, run, said):
    monkeypatch.setattr("autotune.pruning.child._CPU_S", 1)
    with pytest.raises(PlanError, match=said):
        cut(model, run, How(0.25))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["resnet", "depthwise", "bert", "gpt2"])
def test_a_pruned_model_is_exported(name):
    model = pruned(name).eval()
    x = torch.randn(2, 3, 16, 16) if name in ("resnet", "depthwise") else torch.randint(0, 11, (2, 8))
    if name == "gpt2":
        model.config.use_cache = False
    program = torch.export.export(model, (x,))
    ours, exported = model(x), program.module()(x)
    assert torch.allclose(getattr(ours, "logits", ours), getattr(exported, "logits", exported), atol=1e-5)


def test_a_pruned_model_is_exported_to_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnx")
    model = pruned("resnet").eval()
    torch.onnx.export(model, (torch.randn(2, 3, 16, 16),), str(tmp_path / "model.onnx"), dynamo=True)
    assert (tmp_path / "model.onnx").stat().st_size


def test_a_pruned_model_is_saved_as_a_whole(tmp_path):
    torch.save(pruned("resnet"), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert num_parameters(loaded) == num_parameters(pruned("resnet"))


def test_a_record_says_of_which_model_it_is():
    """Another tie, and another attribute, of the same shapes."""
    model, record = _case("gpt2")
    other = copy.deepcopy(model)
    other.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone())
    with pytest.raises(PlanError, match="other names, shapes or ties"):
        rebuild(other, record)
    other = copy.deepcopy(model)
    other.transformer.h[0].attn.num_heads = 2
    with pytest.raises(PlanError, match=r"h\.0\.attn\.num_heads: 4 was expected, but got 2"):
        rebuild(other, record)
