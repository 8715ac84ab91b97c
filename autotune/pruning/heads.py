"""Heads of attention, cut by surgery of our own: Torch-Pruning does not know fused projections and grouped queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .how import Criterion
from .observe import Attention

_WHOLE_WIDTHS = frozenset(["all_head_size", "split_size", "inner_dim", "embed_dim", "attn_dim"])
"""Attributes of attention modules that hold the width of all heads together."""


def choose_heads(model: nn.Module, attention: Attention, ratio: float, criterion: Criterion) -> Tensor | None:
    """Which query heads stay, ascending: whole groups of queries with their key and value where the ratio takes one,
    and of those that stay, or else of all, as many queries of each group; None where it takes neither.

    Args:
        model: that has the attention, whole.
        attention: to choose in.
        ratio: of heads that go, rounded down.
        criterion: what a head's norms are, or chance.
    """
    groups = attention.num_groups
    scores = _scores(model, attention, criterion).reshape(groups, -1)
    per_group = scores.shape[1]
    numbers = torch.arange(scores.numel()).reshape(groups, per_group)
    if num_removed := int(groups * ratio):
        best = scores.mean(1).topk(groups - num_removed).indices
        num_kept = math.ceil(attention.num_heads * (1 - ratio) / len(best) - 1e-9)
        inner = scores[best].topk(max(1, num_kept), dim=1).indices
        return numbers[best].gather(1, inner).flatten().sort().values
    if num_removed := int(per_group * ratio):
        best = scores.topk(per_group - num_removed, dim=1).indices
        return numbers.gather(1, best).flatten().sort().values
    return None


def _scores(model: nn.Module, attention: Attention, criterion: Criterion) -> Tensor:
    """Of each query head: the norm of its part of the queries' and of the output's projection."""
    if criterion == "random":
        return torch.rand(attention.num_heads)
    power = 1 if criterion == "l1" else 2
    queries, output = (model.get_submodule(path).weight for path in (attention.inputs[0], attention.output))
    assert isinstance(queries, Tensor)
    assert isinstance(output, Tensor)
    rows = [queries.detach().float()[: attention.num_heads * attention.head_dim], output.detach().float().T]
    sizes = [one.abs().pow(power).sum(1).reshape(attention.num_heads, -1).sum(1) for one in rows]
    return sizes[0] + sizes[1]


def cut_heads(model: nn.Module, attention: Attention, heads: Tensor) -> None:
    """Leave these heads alone in the projections, and put the attributes of their modules right."""
    queries = _rows(heads, attention.head_dim)
    per_group = attention.num_heads // attention.num_groups
    groups = torch.unique(heads // per_group)
    keys = _rows(groups, attention.head_dim)
    kept = [queries, keys, keys]
    if len(attention.inputs) == 1:
        starts = (0, attention.num_heads, attention.num_heads + attention.num_groups)
        kept = [torch.cat([one + at * attention.head_dim for one, at in zip(kept, starts, strict=True)])]
    for path, rows in zip(attention.inputs, kept, strict=True):
        _keep(model.get_submodule(path), 0, rows)
    _keep(model.get_submodule(attention.output), 1, queries)
    _put_right(model.get_submodule(attention.owner), attention, len(heads), len(groups))


def _rows(numbers: Tensor, head_dim: int) -> Tensor:
    """Places of these heads in a projection."""
    return (numbers[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _keep(module: nn.Module, dim: int, places: Tensor) -> None:
    assert isinstance(module, nn.Linear)
    module.weight = nn.Parameter(module.weight.detach().index_select(dim, places))
    if dim == 1:
        module.in_features = len(places)
        return
    module.out_features = len(places)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[places])


def _put_right(owner: nn.Module, attention: Attention, num_heads: int, num_groups: int) -> None:
    before = attention.num_heads // attention.num_groups
    for module in owner.modules():
        for key, value in list(vars(module).items()):
            if type(value) is not int:
                continue
            if key in _WHOLE_WIDTHS and value == attention.num_heads * attention.head_dim:
                setattr(module, key, num_heads * attention.head_dim)
            elif "groups" in key and value == before:
                setattr(module, key, num_heads // num_groups)
            elif "head" in key and "dim" not in key and "size" not in key:
                is_kv = "kv" in key or "key_value" in key
                if value == (attention.num_groups if is_kv else attention.num_heads):
                    setattr(module, key, num_groups if is_kv else num_heads)
