"""What torch's own calls, and a job's owner, do to a model that is built: each in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from autotune.techniques.support.reversible.pair import declare

from ..layer_models import LoRA, freeze

Edit = Callable[[nn.Module], Any]
_ADAPTED = ("qkv", "c_attn", "q_proj", "v_proj")
"""Attention's, of the three transformers."""


def in_place(model: nn.Module) -> None:
    """ReLU and dropout write over their input."""
    for module in model.modules():
        if isinstance(module, nn.ReLU | nn.Dropout):
            module.inplace = True


def share_blocks(model: nn.Module) -> None:
    """All blocks are the first one."""
    blocks = _blocks(model)
    for number in range(1, len(blocks)):
        blocks[number] = blocks[0]


def mask_weights(model: nn.Module) -> None:
    """The smaller half of each layer's weights is masked."""
    for module in [*model.modules()]:
        if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D":
            prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


def keep_outputs(model: nn.Module) -> None:
    """The loop's variable holds a step's outputs until the next one's."""
    kept: dict[str, Any] = {}
    model.register_forward_hook(lambda module, inputs, output: kept.update(output=output))


def train_norms(model: nn.Module) -> None:
    """All else is frozen."""
    freeze(model, "norms")


def train_adapters(model: nn.Module) -> None:
    """Attention's projections have adapters, and all else is frozen."""
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, base in [*module.named_children()]:
            if name in _ADAPTED:
                if not isinstance(base, nn.Linear):  # Conv1D, whose weight is transposed
                    base.in_features, base.out_features = base.weight.shape  # type: ignore[union-attr, assignment, misc]
                setattr(module, name, LoRA(base))  # type: ignore[arg-type]


def untie(model: nn.Module) -> None:
    """GPT-2's head has a weight of its own; other models are as they are."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())


def make_reversible(model: nn.Module) -> None:
    """Attention and feed-forward parts of the blocks become halves of reversible ones, which are declared."""
    blocks = _blocks(model)
    row = _Row(_Pair(*_halves(block)) for block in blocks)
    del blocks[:]
    blocks.append(row)
    declare(model, [f"{name}.pairs" for name, module in model.named_modules() if module is row])


class _Pair(nn.Module):
    """Gomez et al. 2017, arXiv:1707.04585."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class _Row(nn.Module):
    """All of a model's blocks as one; masks and the like, which its caller passes on, are none here."""

    def __init__(self, pairs: Any) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(pairs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pair = (x, x)
        for one in self.pairs:
            pair = one(*pair)
        return pair[0] + pair[1]


class _First(nn.Module):
    """Of what transformers' attention returns, the output."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x)[0]
        return output


class _Attention(nn.Module):
    """The character GPT's."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads = block.qkv, block.out, 6

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


def _halves(block: Any) -> tuple[nn.Module, nn.Module]:
    """Of a block, what its residual sums add."""
    if hasattr(block, "ln_1"):
        return nn.Sequential(block.ln_1, _First(block.attn)), nn.Sequential(block.ln_2, block.mlp)
    if hasattr(block, "layernorm_before"):
        attention = nn.Sequential(block.layernorm_before, _First(block.attention), block.dropout)
        return attention, nn.Sequential(block.layernorm_after, block.mlp, block.dropout)
    attention = nn.Sequential(block.norm_1, _Attention(block), block.dropout)
    return attention, nn.Sequential(block.norm_2, block.mlp, block.dropout)


def _blocks(model: nn.Module) -> nn.ModuleList:
    return max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len)
