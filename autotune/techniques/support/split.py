"""Which of a model's layers several processes split between them, and how: tensor parallelism."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.hooks import RemovableHandle

from ...errors import PlanError
from .feed_forward import Pair, find_pairs


def _added_up(gradient: Tensor) -> Tensor:
    """Of a module that is whole in each process and works on its own heads."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total


_PARTIAL = "replicated_with_grad_allreduce"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""By transformers' names (its distributed/tensor_parallel.py)."""
_BY_ITSELF = ("colwise_gather_output", "embedding_rowwise")
"""What is given, and gives, whole tensors: it may stay whole."""
_ROUNDING = 1e-2
"""Relative: bfloat16's, of sums in another order."""
_HEADS = ("num_attention_heads", "num_key_value_heads")


def split(model: nn.Module, processes: int) -> None:
    """Split a model's layers in place: by its own plan (transformers' ``_tp_plan``), else the pairs of linear layers of
    its feed-forward parts. What stays whole gets the values of rank 0; every rank has to come here.

    Args:
        model: on its device, the same in every rank.
        processes: of the default group.

    Raises:
        PlanError: nothing can be split, or not into so many equal parts, or the model's own plan is beyond this.
    """
    plan = _own_plan(model, processes)
    styles = _of_pairs(model, processes) if plan is None else plan
    if not styles:
        raise PlanError(
            "settings.parallel.kind: tensor splits layers by the model's own plan (transformers' _tp_plan), or linear "
            f"layers of feed-forward parts whose inner width {processes} divides, and {type(model).__name__} has none "
            "of them. Use ddp or fsdp."
        )
    mesh = init_device_mesh(next(p.device.type for p in model.parameters()), (processes,))
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in styles.items() if style != _PARTIAL})
    for name in (name for name, style in styles.items() if style == _PARTIAL):
        for parameter in model.get_submodule(name).parameters():
            if parameter.requires_grad:
                parameter.register_hook(_added_up)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for whole in (*model.parameters(), *model.buffers()):
            if not isinstance(whole, DTensor):
                dist.broadcast(whole, 0)
    for name, whole in model.named_parameters():
        if whole.requires_grad and not isinstance(whole, DTensor):
            _check_gradient(name, whole)


def _check_gradient(name: str, whole: nn.Parameter) -> None:
    """Have the first gradient of a parameter that is whole in each process compared between them: a plan may leave out
    what works on a part alone, whose gradients would have to add up."""

    def compare(parameter: Tensor) -> None:
        """
        Raises:
            PlanError: they differ by more than rounding.
        """
        handle.remove()
        assert parameter.grad is not None, "it was accumulated"
        own = parameter.grad.norm().float()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        norms = [float(one) for one in found]
        if max(norms) - min(norms) > _ROUNDING * max(norms):
            raise PlanError(
                f"settings.parallel.kind: tensor leaves {name} whole, but its gradients differ between the processes "
                f"(norms {', '.join(f'{one:.4g}' for one in norms)}), since the model's own plan splits what it works "
                "on. Use ddp or fsdp."
            )

    handle = whole.register_post_accumulate_grad_hook(compare)  # type: ignore[no-untyped-call]


def _check_calls(pair: Pair) -> None:
    """Have the first call of a pair's layers checked to come from their part: another caller may do with what lies
    between them what takes all of it."""
    inside: list[nn.Module] = []
    handles: list[RemovableHandle] = []

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        for one in handles:
            one.remove()

    handles += [
        pair.part.register_forward_pre_hook(lambda module, args: inside.append(module)),
        pair.part.register_forward_hook(leave),
    ]
    for layer in (*pair.wide, pair.narrow):
        handles.append(layer.register_forward_pre_hook(lambda layer, args: _expect(inside, layer)))


def _expect(inside: list[nn.Module], layer: nn.Module) -> None:
    """
    Raises:
        PlanError: nothing is.
    """
    if not inside:
        raise PlanError(
            f"settings.parallel.kind: tensor splits {layer} with the layer behind it, as their module calls them, but "
            "the model calls them itself. Use ddp or fsdp."
        )


def is_split(model: nn.Module) -> bool:
    """Whether any of its parameters is a part of one."""
    return any(isinstance(one, DTensor) for one in model.parameters())


def _of_pairs(model: nn.Module, processes: int) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    tied = _tied(model)
    styles: dict[str, str] = {}
    for pair in find_pairs(model):
        if pair.narrow.in_features % processes == 0 and not tied & {*pair.wide, pair.narrow}:
            styles |= {**{names[one]: "colwise" for one in pair.wide}, names[pair.narrow]: "rowwise"}
            _check_calls(pair)
    return styles


def _own_plan(model: nn.Module, processes: int) -> dict[str, str] | None:
    """The style of each module that the model's own plan names, by its path; None where it has no plan.

    Raises:
        PlanError: a style is none of torch's, or a size does not divide.
    """
    owner = next(((path, one) for path, one in model.named_modules() if getattr(one, "_tp_plan", None)), None)
    if owner is None:
        return None
    path, planned = owner
    prefix, tied, rules = f"{path}." if path else "", _tied(model), _rules(planned)
    if any("attn" in name or "attention" in name for name in rules):
        _check_heads(planned.config, processes)
    styles = {}
    for name, style in rules.items():
        module = planned.get_submodule(name)
        if style in _BY_ITSELF and (module in tied or not _divides(module, style, processes)):
            continue
        if module in tied or not _divides(module, style, processes):
            why = "shares its weight with another module" if module in tied else f"has {tuple(module.weight.shape)}"
            raise PlanError(
                f"settings.parallel: {prefix}{name} is to be split into {processes} equal parts ({style}), but {why}. "
                "Use a number of processes that divides it, or ddp or fsdp."
            )
        styles[prefix + name] = style
    return styles


def _rules(planned: Any) -> dict[str, str]:
    """The plan, whose names have ``*`` for a number, for each module or parameter that there is.

    Raises:
        PlanError: it has a style that torch's ``parallelize_module`` has none for.
    """
    plan: Mapping[str, str] = planned._tp_plan
    named = {**dict(planned.named_parameters()), **dict(planned.named_modules())}
    styles = {name: plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), "replicate") for name in named}
    found = {name: style for name, style in styles.items() if style != "replicate"}
    for name, style in found.items():
        is_layer = style == _PARTIAL or isinstance(named[name], nn.Linear | nn.Embedding)
        if style not in (*_STYLES, _PARTIAL) or not is_layer:
            raise PlanError(
                f"settings.parallel: the plan of {type(planned).__name__} splits {name} ({type(named[name]).__name__}) "
                f"as {style}, which torch's parallelize_module does not do. Use ddp or fsdp."
            )
    return found


def _check_heads(config: Any, processes: int) -> None:
    """
    Raises:
        PlanError: the heads cannot be shared out.
    """
    config = config.get_text_config()
    for name in _HEADS:
        number = getattr(config, name, None)
        if isinstance(number, int) and number % processes:
            raise PlanError(
                f"settings.parallel.processes: {processes} processes cannot share {name} = {number} in equal "
                "parts. Use a number that divides them, or ddp or fsdp."
            )


def _divides(module: nn.Module, style: str, processes: int) -> bool:
    if style == _PARTIAL:
        return True
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.shape[1 if style.startswith("rowwise") else 0] % processes == 0


def _tied(model: nn.Module) -> set[nn.Module]:
    """Modules that share a parameter with another, which would no longer be one."""
    own = {module: [*module.parameters(recurse=False)] for module in model.modules()}
    owners = Counter(one for row in own.values() for one in row)
    return {module for module, row in own.items() if any(owners[one] > 1 for one in row)}
