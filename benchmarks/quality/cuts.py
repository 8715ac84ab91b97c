"""Models made smaller by hand: with torch-pruning alone, and by singular values."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch_pruning
from torch import nn

from .jobs import Job

HIDDEN = {"char_gpt": r"blocks\.\d+\.mlp\.0", "vit": r".*\.mlp\.fc1"}
"""Layers whose widths are cut, where they are not all but the last: what blocks pass on keeps its width. Of attention,
whole heads go where the model does not state their number in its own code."""
LEAST_FEATURES = 64
"""Of a layer that becomes two."""


@dataclass(frozen=True)
class Cut:
    """How much goes."""

    ratio: float = 0.0
    """Of each width."""
    rank: float | None = None
    """That is left, of a linear layer's smaller side; None leaves layers whole."""

    def __str__(self) -> str:
        said = [f"{self.ratio:.0%} cut"] if self.ratio else []
        said += [f"rank {self.rank:g}"] if self.rank is not None else []
        return ", ".join(said) or "as it stands"

    @property
    def row(self) -> dict[str, float | None]:
        """As it is kept."""
        return asdict(self)


RATIOS = (0.25, 0.5, 0.75, 0.9)
RANKS = (Cut(0.0, 0.25), Cut(0.0, 0.125), Cut(0.5, 0.25), Cut(0.5, 0.125))
WITH_RANKS = ("mlp", "mlp_narrow", "char_gpt", "vit")


def cuts(job: str) -> tuple[Cut, ...]:
    """Those of a job's table, first the job as it stands."""
    return (Cut(), *(Cut(ratio) for ratio in RATIOS), *(RANKS if job in WITH_RANKS else ()))


def cut_model(job: Job, cut: Cut) -> nn.Module:
    """The job's trained model, cut."""
    model = job.trained()
    if cut.ratio:
        prune(job, model, cut.ratio)
        for module in model.modules():
            if hasattr(module, "q_proj"):
                prune_heads(module, cut.ratio)
    if cut.rank is not None:
        lower_ranks(model, cut.rank)
    return model


def prune(job: Job, model: nn.Module, ratio: float) -> None:
    """Cut the channels and hidden units of the smallest norms."""
    layers = {name: one for name, one in model.named_modules() if isinstance(one, (nn.Linear, nn.Conv1d, nn.Conv2d))}
    hidden = HIDDEN.get(job.name)
    last = next(reversed(layers))
    stay = [one for name, one in layers.items() if (not re.fullmatch(hidden, name) if hidden else name == last)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are no layer's: they stay
        pruner = torch_pruning.pruner.BasePruner(
            model,
            next(job.batches(0)),
            torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=stay,
            in_channel_groups={},
            out_channel_groups={},
            num_heads={},
            forward_fn=outputs,
        )
        pruner.step()


def outputs(model: nn.Module, batch: Any) -> Any:
    """Of a batch, without its loss."""
    inputs = batch[0] if isinstance(batch, list) else batch[:, :-1]
    said = model(inputs)
    return said if isinstance(said, torch.Tensor) else said.logits


def prune_heads(attention: Any, ratio: float) -> None:
    """Cut the heads of the smallest norms: of transformers' attention, which goes by the width of a head."""
    inputs, output = [attention.q_proj, attention.k_proj, attention.v_proj], attention.o_proj
    with torch.no_grad():
        sizes = sum(one.weight.pow(2).sum(1) for one in inputs) + output.weight.pow(2).sum(0)
    heads = torch.arange(len(sizes)).view(-1, attention.head_dim)
    smallest = sizes.view(heads.shape).sum(1).argsort()[: int(ratio * len(heads))]
    gone = heads[smallest].flatten().tolist()
    for one in inputs:
        torch_pruning.prune_linear_out_channels(one, gone)
    torch_pruning.prune_linear_in_channels(output, gone)


def lower_ranks(model: nn.Module, ratio: float) -> None:
    """Make two of each linear layer that becomes smaller so, the last one excepted."""
    layers = [name for name, one in model.named_modules() if type(one) is nn.Linear]
    for name in layers[:-1]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        side = min(layer.weight.shape)
        rank = max(1, int(ratio * side))
        if side >= LEAST_FEATURES and rank * sum(layer.weight.shape) < layer.weight.numel():
            model.set_submodule(name, of_rank(layer, rank))


def of_rank(layer: nn.Linear, rank: int) -> nn.Sequential:
    """The two layers that compute what it does, as nearly as this rank can."""
    left, values, right = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    down = nn.Linear(layer.in_features, rank, bias=False)
    up = copy.deepcopy(layer)
    up.in_features = rank
    up.weight = nn.Parameter(left[:, :rank] * values[:rank].sqrt())
    down.weight = nn.Parameter(values[:rank].sqrt()[:, None] * right[:rank])
    return nn.Sequential(down, up)


def num_parameters(model: nn.Module) -> int:
    """Of all layers."""
    return sum(one.numel() for one in model.parameters())
