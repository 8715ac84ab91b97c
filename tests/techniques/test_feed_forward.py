"""Which modules are feed-forward parts: shown by their operations, and left out where that is not certain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.layers import convert
from autotune.techniques.support.feed_forward import find_feed_forwards


def mlp(*inner: nn.Module, last: tuple[nn.Module, ...] = ()) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), *(inner or (nn.GELU(),)), nn.Linear(32, 8), *last)


class Gated(nn.Module):
    """As LLaMA has it, with both gates from one product."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.first, self.last, self.dim = nn.Linear(8, 64), nn.Linear(32, 8), dim
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        gate, up = self.first(x).chunk(2, dim=self.dim)
        return self.last(F.silu(gate) * up) * self.scale


class Written(nn.Module):
    """A feed-forward part with another forward."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.first, self.last, self.written = nn.Linear(8, 32), nn.Linear(32, 8), forward

    def forward(self, x):
        return self.written(self, x)


def in_model(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 8), part, nn.Linear(8, 2))


@pytest.mark.parametrize(
    "part",
    [
        mlp(),
        mlp(nn.LayerNorm(32), nn.ReLU()),
        mlp(nn.ReLU(inplace=True), nn.Dropout(0.0)),
        Gated(),
        Written(lambda self, x: x + self.last(torch.tanh(self.first(x)).pow(2))),
    ],
)
def test_operations_on_features_alone_are_one(part):
    (found,) = find_feed_forwards(in_model(part))
    assert (found.module, found.dropout) == (part, None)


@pytest.mark.parametrize(
    "part",
    [
        nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)),  # nothing is wider
        nn.Sequential(nn.Linear(8, 32)),
        mlp(nn.Softmax(dim=1)),
        mlp(nn.LayerNorm((3, 32))),
        mlp(nn.ReLU(), nn.Dropout(0.1)),  # what it draws would be another
        mlp(nn.BatchNorm1d(32)),
        Gated(dim=1),
        Written(lambda self, x: self.last(F.dropout(self.first(x), 0.1))),
        Written(lambda self, x: self.last(self.first(x) / self.first(x).sum())),
        Written(lambda self, x: self.last(self.first(x).cumsum(1))),
        Written(lambda self, x: self.last(self.first(x)[:, :1])),
        Written(lambda self, x: self.last(self.first(x.transpose(0, 1)))),
        Written(lambda self, x: self.last(self.first(x)) if x.sum() > 0 else x),
        Written(lambda self, x: self.last(self.first(x).view(x.shape[0], -1, 32))),
        Written(lambda self, x: [x.add_(1), self.last(self.first(x))][1]),
        Written(lambda self, x: self.last(F.relu(self.first(x), inplace=True))),
        nn.Sequential(nn.LeakyReLU(inplace=True), *mlp()),
        nn.TransformerEncoderLayer(8, 2, 32),
    ],
)
def test_what_may_be_more_is_none(part):
    assert find_feed_forwards(in_model(part)) == []


def test_the_last_dropout_is_told():
    dropout = nn.Dropout(0.1)
    (found,) = find_feed_forwards(in_model(mlp(last=(dropout,))))
    assert found.dropout is dropout


def test_a_part_with_hooks_is_left_as_it_is():
    """They would be called for each tile."""
    part = mlp()
    part[0].register_forward_hook(lambda *args: None)
    assert find_feed_forwards(in_model(part)) == []


def test_the_outermost_is_taken_and_each_once():
    inner = mlp()
    outer = nn.Sequential(nn.LayerNorm(8), inner)
    model = nn.ModuleList([in_model(outer), in_model(outer)])
    assert [found.module for found in find_feed_forwards(model)] == [outer]


def test_memory_saving_layers_hide_none():
    model = in_model(mlp(last=(nn.Dropout(0.1),)))
    convert(model)
    assert [found.module for found in find_feed_forwards(model)] == [model[1]]


def test_parts_of_models_of_transformers():
    """GPT-2's ends in a dropout; BERT's lies in two modules, the second of which adds what the first was given."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, **tokens))
    llama = transformers.LlamaModel(transformers.LlamaConfig(**small, **tokens))
    bert = transformers.BertModel(transformers.BertConfig(**small))
    assert [found.dropout for found in find_feed_forwards(gpt2)] == [block.mlp.dropout for block in gpt2.h]
    assert [found.module for found in find_feed_forwards(llama)] == [layer.mlp for layer in llama.layers]
    assert find_feed_forwards(bert) == []
