"""Heads of attention, cut by surgery of our own: Torch-Pruning does not know fused projections and grouped queries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Caught
from .observe import Attention

Chosen = Mapping[Attention, Tensor]
"""Of each attention, the query heads that stay, ascending."""
_WHOLE_WIDTHS = frozenset(["all_head_size", "split_size", "inner_dim", "embed_dim", "attn_dim"])
"""Attributes of attention modules that hold the width of all heads together."""
_TOLERANCE = 1e-3


def choose_heads(attentions: Iterable[Attention], ratio: float, score: Callable[[Attention], Tensor]) -> Chosen:
    """Which heads stay: whole groups of queries with their key and value where the ratio takes one, else as many
    queries of each group.

    Args:
        attentions: to choose in.
        ratio: of heads that go, rounded down.
        score: importance of each query head of an attention.
    """
    chosen = {}
    for attention in attentions:
        groups = attention.num_groups
        scores = score(attention).reshape(groups, -1)
        per_group = scores.shape[1]
        numbers = torch.arange(scores.numel()).reshape(groups, per_group)
        if num_removed := int(groups * ratio):
            best = scores.mean(1).topk(groups - num_removed).indices
            chosen[attention] = numbers[best].flatten().sort().values
        elif num_removed := int(per_group * ratio):
            best = scores.topk(per_group - num_removed, dim=1).indices
            chosen[attention] = numbers.gather(1, best).flatten().sort().values
    return chosen


def cut_heads(model: nn.Module, chosen: Chosen) -> None:
    """Leave the chosen heads alone in the projections, and put the attributes of their modules right."""
    for attention, heads in chosen.items():
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


def computes_the_rest(model: nn.Module, run: Callable[[nn.Module], Any], chosen: Chosen) -> str | None:
    """Why a model without the other heads does not compute what it does with zeros in their place, in words; None
    where it does."""
    whole, cut = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    with torch.no_grad():
        for attention, heads in chosen.items():
            gone = torch.ones(attention.num_heads * attention.head_dim, dtype=torch.bool)
            gone[_rows(heads, attention.head_dim)] = False
            weight = whole.get_submodule(attention.output).weight
            assert isinstance(weight, Tensor)
            weight[:, gone] = 0
        cut_heads(cut, chosen)
        with Caught() as raised:  # a forward that goes by another width may raise anything
            pairs = zip(_outputs(whole, run, chosen), _outputs(cut, run, chosen), strict=True)
        if (error := raised.error) is not None:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    same = all(a.shape == b.shape and torch.dist(a, b) <= _TOLERANCE * a.norm() for a, b in pairs)
    return None if same else "the other heads' outputs changed"


def _outputs(model: nn.Module, run: Callable[[nn.Module], Any], chosen: Chosen) -> list[Tensor]:
    """What each attention's output projection makes, in the order of calls."""
    found: list[Tensor] = []
    for attention in chosen:
        model.get_submodule(attention.output).register_forward_hook(lambda *said: found.append(said[2].detach()))
    torch.manual_seed(0)
    run(model)
    return found


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
