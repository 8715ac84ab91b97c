"""Attention: what torch has no fused kernel for keeps what a fused kernel keeps, and a bit for each weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from layer_runs import assert_same, run, twins
from torch import Tensor, nn
from torch.nn import functional as F

from autotune.layers import attention
from autotune.layers.sites import Site

BATCH, LENGTH, WIDTH, HEADS = 4, 16, 32, 4
SHAPE = (BATCH, LENGTH, WIDTH)
WEIGHTS = BATCH * HEADS * LENGTH * LENGTH
"""Attention weights: twice as many as elements in the input."""


class Attention(nn.Module):
    """Queries, keys and values from one linear layer, or keys and values from another with fewer heads."""

    def __init__(self, mask: str = "none", dropout: float = 0.1, groups: int = 1) -> None:
        super().__init__()
        self.dropout, self.causal, self.groups = dropout, mask == "causal", groups
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // groups)
        self.mask = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH)) if mask == "trained" else None
        if mask == "bool":
            self.mask = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.3
            self.mask[..., 0] = True

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (HEADS // self.groups, -1)).transpose(1, 2) for part in self.both(x).chunk(2, -1)
        )
        options = {"is_causal": self.causal, "enable_gqa": self.groups > 1}
        return F.scaled_dot_product_attention(query, key, value, self.mask, self.dropout, **options)


class WrittenOut(nn.Module):
    """As people wrote it before torch had a function, by these three calls."""

    def __init__(self, softmax: Callable[..., Tensor], matmul: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.softmax, self.matmul = nn.Linear(WIDTH, 3 * WIDTH), softmax, matmul

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1)
        )
        weights = self.softmax(query @ key.mT / 3.0, -1)
        return self.matmul(F.dropout(weights, 0.1, self.training), value)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "trained"])
@pytest.mark.parametrize("trains", [True, False])
def test_with_dropout_queries_keys_values_and_a_bit_a_weight_are_kept(mask: str, trains: bool):
    stock, ours = twins(lambda: Attention(mask), trains)
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    own = 3 * x.nbytes + x.nbytes * trains  # the linear layers keep their input while they train
    masks = BATCH * LENGTH * LENGTH if mask == "bool" else 0
    assert found.kept == own + WEIGHTS // 8 + masks
    assert wanted.kept > own + 8 * WEIGHTS


@pytest.mark.parametrize("length", [16, 15])
@pytest.mark.parametrize("together", [1, 3, 4])
def test_a_few_samples_are_computed_again_together(length: int, together: int, monkeypatch: pytest.MonkeyPatch):
    """Where each has its flags in bytes of its own: 4 heads of 15 x 15 weights do not fill theirs."""
    weights = HEADS * length * length
    monkeypatch.setattr(attention, "_TOGETHER", together * max(weights, 4 * length * WIDTH) + 1)
    stock, ours = twins(lambda: Attention("causal"))
    x = torch.randn(BATCH, length, WIDTH)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert found.kept == 4 * x.nbytes + BATCH * -(-weights // 8)


def test_inputs_without_a_batch_are_stocks():
    """Three dimensions are heads, length and width: grouped keys, and values with a batch, are not cut by samples."""
    query, key = torch.randn(4, 256, 8), torch.randn(2, 256, 8)
    for parts, grouped in (((query, key, key), True), ((query, query, torch.randn(2, 4, 256, 8)), False)):
        found = []
        for function in (F.scaled_dot_product_attention, partial(attention.scaled_dot_product_attention, Site())):
            torch.manual_seed(0)
            inputs = [part.detach().requires_grad_() for part in parts]
            function(*inputs, dropout_p=0.5, enable_gqa=grouped).sum().backward()
            found.append([one.grad for one in inputs])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("trains", [True, False])
def test_grouped_queries_and_no_dropout(trains: bool):
    """Where several queries share keys; a mask that trains has no fused kernel either."""
    x = torch.randn(SHAPE)
    for build in (lambda: Attention(groups=2), lambda: Attention("trained", dropout=0.0)):
        stock, ours = twins(build, trains)
        wanted, found = run(stock, x), run(ours, x)
        assert_same(found, wanted)
        assert found.kept <= wanted.kept


def test_with_a_fused_kernel_attention_is_stocks():
    stock, ours = twins(lambda: Attention("causal", dropout=0.0))
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted, 0.0)
    assert found.kept == wanted.kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype):
    stock, ours = (model.to(dtype) for model in twins(lambda: Attention("causal")))
    x = torch.randn(SHAPE, dtype=dtype)
    assert_same(run(ours, x), run(stock, x), 1e-9 if dtype == torch.float64 else 2e-2)


def test_under_autocast():
    stock, ours = twins(lambda: Attention("trained"))
    x = torch.randn(SHAPE)
    wanted, found = (run(model, x, dtype=torch.bfloat16) for model in (stock, ours))
    assert_same(found, wanted, 2e-2)
    assert found.kept < wanted.kept / 2


def test_backward_does_not_warn_of_what_it_does_inside():
    _, ours = twins(Attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(ours, torch.randn(SHAPE))


@pytest.mark.parametrize("softmax", [F.softmax, torch.softmax, Tensor.softmax])
@pytest.mark.parametrize("matmul", [torch.matmul, torch.bmm, Tensor.__matmul__])
def test_written_out_the_weights_are_kept_once(softmax: Callable[..., Tensor], matmul: Callable[..., Tensor]):
    """Stock keeps them behind the softmax, dropout's mask, and them behind dropout."""
    stock, ours = twins(lambda: WrittenOut(softmax, matmul))
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert wanted.kept - found.kept == 2 * 4 * WEIGHTS - WEIGHTS // 8


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("trains", [True, False])
def test_the_calls_within_multihead_attention_are_answered(trains: bool):
    """Of 13 inputs 5 and some bits are left: the input, queries, keys and values, and what attention returns."""
    stock, ours = twins(lambda: SelfAttention(need_weights=False), trains)
    x = torch.randn(SHAPE)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert wanted.kept == (11 + 2 * trains) * x.nbytes
    assert found.kept == (3 + 2 * trains) * x.nbytes + WEIGHTS // 8
    stock, ours = twins(lambda: SelfAttention(need_weights=True), trains)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert wanted.kept - found.kept == 2 * 4 * WEIGHTS - WEIGHTS // 8


def test_an_encoder_layer_of_torchs_own():
    """The 30 inputs that it keeps in training become 15, and of the 23 of a frozen one 6."""
    for trains, most in ((True, 16), (False, 6)):
        build = lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True)  # noqa: E731
        stock, ours = twins(build, trains)
        x = torch.randn(SHAPE)
        wanted, found = run(stock, x), run(ours, x)
        assert_same(found, wanted)
        assert found.kept < most * x.nbytes < wanted.kept
