"""Dropout off, everywhere, and back as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.techniques.support.comparable import without_dropout


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, True) + F.alpha_dropout(x, p=0.5, training=True) + F.dropout(x)


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) + F.scaled_dot_product_attention(
            x, x, x, None, 0.5
        )


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)

    def forward(self, x):
        return self.attention(x, x, x)[0]


MODELS = {
    "modules": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)),
    "functions": FunctionalDropout,
    "attention": Attention,
    "multihead": SelfAttention,
    "lstm": lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.5),
}


def _output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_dropped_within_and_everything_is_after(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(6, 5, 8)
    with without_dropout(model):
        assert torch.equal(_output(model, x), _output(model, x))
    assert not torch.equal(_output(model, x), _output(model, x))


def test_it_computes_what_eval_mode_computes():
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(3, 8)
    with without_dropout(model):
        trained = model(x)
    assert torch.equal(trained, model.eval()(x))


def test_modes_stay_as_they_are():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.1).eval())
    with without_dropout(model):
        assert [module.training for module in model] == [True, False]


def test_an_error_within_restores_everything():
    model, function = nn.Sequential(nn.Dropout(0.25), nn.LSTM(2, 2, num_layers=2, dropout=0.5)), F.dropout
    with pytest.raises(KeyError), without_dropout(model):
        raise KeyError
    assert (model[0].p, model[1].dropout, F.dropout) == (0.25, 0.5, function)
