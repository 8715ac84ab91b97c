"""``find_cut``: what stays of a model, found on copies of it with Torch-Pruning. To be run in a process of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Caught, PlanError
from ..nested import tensors_in
from .heads import Chosen, choose_heads, computes_the_rest, cut_heads
from .how import How
from .observe import Attention, Seen, observe, width
from .rebuild import rebuild
from .record import Record
from .twin import Twin

Run = Callable[[nn.Module], Any]


def find_cut(model: nn.Module, run: Run, how: How, untouchable: frozenset[nn.Module], trains: bool = True) -> Record:
    """Find what is kept, and try the model that comes of it.

    Args:
        model: is left alone.
        run: its forward and loss on a few samples.
        how: what is asked.
        untouchable: modules that keep every tensor.
        trains: try a backward pass too.

    Raises:
        PlanError: the model cannot be traced or cut so, or cannot run or train once it is cut.
    """
    torch.manual_seed(0)
    twin = Twin(model)
    names = {module: name for name, module in model.named_modules()}
    kept_whole = frozenset(m for n, m in twin.model.named_modules() if model.get_submodule(n) in untouchable)
    with _refused("it cannot be traced for what depends on what"):
        seen = observe(twin.model, run)
        pruner = _pruner(twin, seen, run, how, kept_whole)
    twin.tag()
    with _refused("it cannot be cut"):
        for group in pruner.step(interactive=True):
            group.prune()
        chosen, left = _heads(model, twin, seen, run, how, {names[module] for module in untouchable})
        cut_heads(twin.model, chosen)
        record = twin.record(left)
    if not record.tensors:
        raise PlanError(
            f"settings.pruning: ratio {how.ratio:g} cuts nothing of this model"
            f"{f', rounded to multiples of {how.round_to}' if how.round_to > 1 else ''}"
            f"{f'; {left[0]}' if left else ''}. Use a larger ratio, or kind: none."
        )
    _try(model, run, record, trains)
    return record


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Whatever is raised within, by a library or by the user's model: it cannot be had."""
    with Caught(PlanError, frames=True) as raised:
        yield
    if raised.error is not None:
        said = str(raised.error).strip().splitlines()
        raise PlanError(
            f"settings.pruning: {what}: {type(raised.error).__name__}: {said[0] if said else ''}. Name the modules "
            "that this comes from in untouchable, or use kind: none."
        ) from raised.take()


def _pruner(twin: Twin, seen: Seen, run: Run, how: How, kept_whole: frozenset[nn.Module]) -> Any:
    import torch_pruning

    importance = {
        "l1": lambda: torch_pruning.importance.GroupMagnitudeImportance(p=1),
        "l2": lambda: torch_pruning.importance.GroupMagnitudeImportance(p=2),
        "lamp": torch_pruning.importance.LAMPImportance,
        "random": torch_pruning.importance.RandomImportance,
    }[how.criterion]()

    def important(group: Any) -> Any:
        with twin.valued({dep.layer for dep, _ in group if isinstance(dep.layer, nn.Module)}):
            return importance(group)

    def forward(model: nn.Module, _: Any) -> list[Tensor]:
        twin.set_modes()  # the library has set eval mode
        return list(observe(model, run, parted=True).outputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are no layer's: it cuts their last dimension
        pruner = torch_pruning.pruner.BasePruner(
            twin.model,
            None,
            important,
            global_pruning=how.scope != "layer",
            isomorphic=how.scope == "isomorphic",
            pruning_ratio=how.ratio,
            round_to=how.round_to if how.round_to > 1 else None,
            ignored_layers=[*_ends(twin.model, seen)],
            in_channel_groups={},
            out_channel_groups={},
            num_heads={},
            forward_fn=forward,
        )
    names = {module: name for name, module in twin.model.named_modules()}
    all_groups, leaves_some = pruner.DG.get_all_groups, pruner.DG.check_pruning_group

    def groups(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return (one for one in all_groups(*args, **kwargs) if kept_whole.isdisjoint(dep.layer for dep, _ in one))

    def check(group: Any) -> bool:
        if not leaves_some(group):
            raise PlanError(
                f"settings.pruning: ratio {how.ratio:g} leaves nothing of {names[group[0].dep.layer]}"
                f"{f', rounded to multiples of {how.round_to}' if how.round_to > 1 else ''}. Use a smaller ratio or "
                "round_to, scope: layer, or name the module in untouchable."
            )
        return True

    pruner.DG.get_all_groups, pruner.DG.check_pruning_group = groups, check
    return pruner


def _ends(model: nn.Module, seen: Seen) -> Iterator[nn.Module]:
    """Layers whose outputs keep their width: the model's own, what attention stands between, and in a model with
    attention whatever has the width that is passed on from block to block."""
    own = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    widths = seen.widths | {one.embed_dim for one in own}
    yield from (*seen.last, *seen.mixing, *own)
    yield from (module for module in model.modules() if width(module) in widths)


def _heads(
    model: nn.Module, twin: Twin, seen: Seen, run: Run, how: How, untouchable: set[str]
) -> tuple[Chosen, list[str]]:
    """The heads that stay where some can be cut, and what is left as it was, in words."""
    touchable = [one for one in seen.attentions if untouchable.isdisjoint([*one.inputs, one.output])]
    if not how.heads or not touchable:
        return {}, []

    def score(attention: Attention) -> Tensor:
        return _head_scores(twin, attention, how)

    chosen = choose_heads(touchable, how.ratio, score)
    if not chosen:
        return {}, [f"attention has too few heads for ratio {how.ratio:g}, and keeps them"]
    reason = computes_the_rest(Twin(model).model, run, chosen)
    return (
        ({}, [f"attention keeps its heads, since it does not go by their number: {reason}"]) if reason else (chosen, [])
    )


def _head_scores(twin: Twin, attention: Attention, how: How) -> Tensor:
    """Of each query head: the norm of its part of the queries' and of the output's projection."""
    if how.criterion == "random":
        return torch.rand(attention.num_heads)
    power = 1 if how.criterion == "l1" else 2
    first, output = (twin.model.get_submodule(path) for path in (attention.inputs[0], attention.output))
    with twin.valued([first, output]):
        assert isinstance(first.weight, Tensor)
        assert isinstance(output.weight, Tensor)
        queries = first.weight.detach()[: attention.num_heads * attention.head_dim]
        sizes = [one.abs().pow(power).sum(1) for one in (queries, output.weight.detach().T)]
    return sum((one.reshape(attention.num_heads, -1).sum(1) for one in sizes), torch.zeros(()))


def _try(model: nn.Module, run: Run, record: Record, trains: bool) -> None:
    """Run the cut model as the whole one."""
    shapes = _shapes(copy.deepcopy(model), run, trains)
    cut = copy.deepcopy(model)
    rebuild(cut, record)
    with _refused("the cut model does not run"):
        found = _shapes(cut, run, trains)
    if found != shapes:
        raise PlanError(
            f"settings.pruning: the cut model returns {_words(found)}, but {_words(shapes)} were expected. Name the "
            "layers that make its output in untouchable."
        )


def _shapes(model: nn.Module, run: Run, trains: bool) -> list[tuple[int, ...]]:
    """Of what the model returns, after a step's forward and backward."""
    returned: list[Any] = []
    handle = model.register_forward_hook(lambda *said: returned.append(said[2]))
    loss = run(model)
    handle.remove()
    losses = [one for one in tensors_in(loss) if one.grad_fn is not None]
    if trains and losses:
        losses[0].sum().backward()  # type: ignore[no-untyped-call]
    return [tuple(one.shape) for one in tensors_in(returned)]


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(one)) for one in shapes) or "no tensors"
