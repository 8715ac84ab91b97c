"""GELU and SiLU with their derivative in a byte an element: where that pays, and how far it is off."""

from __future__ import annotations

import pytest
import torch
from layer_runs import TOKENS, assert_same, run, twins
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {
    "gelu": nn.GELU,
    "tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "silu, in place": lambda: nn.Sequential(nn.Identity(), nn.SiLU(inplace=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_byte_an_element_is_kept_and_each_derivative_is_half_a_step_off_at_most(name: str, dtype: torch.dtype):
    stock, ours = twins(ACTIVATIONS[name], rounding=True)
    x = torch.linspace(-9, 9, 3001, dtype=dtype)
    wanted, found = run(stock, x), run(ours, x)
    assert torch.equal(found.output, wanted.output)
    assert found.kept == x.numel()
    torch.manual_seed(2)
    grad = torch.randn_like(wanted.output)
    off = ((found.gradients[0] - wanted.gradients[0]) / grad).abs().max()  # type: ignore[operator]
    assert off <= 0.5 / 201 + 2 * torch.finfo(dtype).eps


def test_derivatives_of_0_and_1_are_exact():
    _, ours = twins(nn.GELU, rounding=True)
    x = torch.tensor([-50.0, 50.0], requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("layout", ["channels_last", "strided"])
def test_any_layout(layout: str):
    x = torch.randn(2, 3, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x[:, :, ::2]
    stock, ours = twins(nn.SiLU, rounding=True)
    assert_same(run(ours, x), run(stock, x), 0.01)


def test_where_the_output_is_kept_its_input_alone_is():
    """Both follow from the input: a byte more would be one too many."""
    build = lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))  # noqa: E731
    x = torch.randn(TOKENS)
    stock, ours = twins(build, rounding=True)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert found.kept == x.nbytes + 4 * x.nbytes
    stock, ours = twins(build, trains=False, rounding=True)
    assert run(ours, x).kept == x.nbytes  # four times as wide, a quarter of the bytes
    assert run(stock, x).kept == 4 * x.nbytes


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_gate_that_a_product_keeps_is_exact_once_a_run_has_shown_it():
    """The structure of a frozen model does not show that a product keeps the gate: a byte more is kept for it."""
    x = torch.randn(TOKENS)
    stock, exact = twins(SwiGLU, False, x)
    _, traced = twins(SwiGLU, False, x, rounding=True)
    _, guessed = twins(SwiGLU, False, rounding=True)
    assert run(exact, x).kept == run(traced, x).kept == 4 * x.nbytes
    assert run(guessed, x).kept == 4 * x.nbytes + 2 * x.numel() < run(stock, x).kept


class Block(nn.Module):
    """GPT-2's, with dropout behind attention and behind the MLP."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.qkv, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (1, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.project(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def test_a_frozen_gpt_block_keeps_6_inputs_besides_its_own():
    """Stock 11: queries, keys, values, attention, the second norm's input, GELU's (4), two masks.

    Here GELU's is 1 and the masks are 1 / 16; the first norm's input is the block's own, and not counted.
    """
    x = torch.randn(2, 64, 64)
    stock, ours = twins(Block, False, x, rounding=True)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted, 0.02)
    assert 11 <= wanted.kept / x.nbytes - 1 < 11.1
    assert 6 <= found.kept / x.nbytes - 1 < 6.2
