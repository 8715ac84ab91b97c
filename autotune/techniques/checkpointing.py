"""Activation checkpointing: keep a block's input, recompute its inside during backward."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ..errors import PlanError, TaskError
from ._base import Run, Technique
from .facts import Facts

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["OPEN", "Checkpointing", "find_blocks"]

OPEN = (
    "checkpointing: blocks: kind chosen needs the number of at least one block, but got none. "
    "Use {kind: chosen, blocks: [0]} for the first, or kind: none; only in a search space are they left out."
)
"""Why a setting whose blocks are left to a search cannot be applied."""
_COVERAGE = 0.8
"""Share of the outer blocks' parameters that inner blocks must hold to be chosen instead: the blocks of a stage do,
the heads of an attention layer do not."""


class Checkpointing(Technique):
    """Recompute some of the model's repeated blocks, non-reentrant: every k-th, or those that are named or chosen.

    Source: Chen et al. 2016, arXiv:1604.06174; https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    name: ClassVar[str] = "checkpointing"
    trades_time: ClassVar[bool] = True

    kind: Literal["none", "blocks", "chosen"] = "none"
    """``none`` keeps everything, as stock; ``blocks`` recomputes every k-th block, ``chosen`` those in ``blocks``."""
    every: PositiveInt = 1
    """Of kind ``blocks``: recompute the first of each ``every`` blocks; 1 is all of them."""
    blocks: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Of kind ``chosen``: numbers of the blocks to recompute, from 0 in the model's order; ascending, each once. A
    search space may leave them out: the search then chooses them for each batch."""

    @model_validator(mode="after")
    def _check_every(self) -> Checkpointing:
        if self.kind == "none" and self.every != 1:
            raise ValueError(f"every: kind none recomputes nothing, but got every: {self.every}. Use kind: blocks.")
        if self.kind == "chosen" and self.every != 1:
            raise ValueError(f"every: kind chosen names its blocks, but got every: {self.every}. Use kind: blocks.")
        return self

    @model_validator(mode="after")
    def _check_blocks(self) -> Checkpointing:
        numbers = list(self.blocks)
        if self.kind != "chosen" and numbers:
            raise ValueError(f"blocks: kind {self.kind} names no blocks, but got {numbers}. Use kind: chosen.")
        if any(after <= before for before, after in itertools.pairwise(numbers)):
            raise ValueError(f"blocks: must ascend, each once, but got {numbers}. Use {sorted(set(numbers))}.")
        return self

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Checkpointing, ...]:
        """None, all, every second, every third and every fourth of the blocks there are."""
        steps = [every for every in (1, 2, 3, 4) if every <= facts.num_blocks]
        return (cls(), *(cls(kind="blocks", every=every) for every in steps))

    @property
    def is_open(self) -> bool:
        """Whether a search is to choose the blocks; such a setting cannot be applied."""
        return self.kind == "chosen" and not self.blocks

    @classmethod
    def of(cls, blocks: tuple[int, ...], num_blocks: int) -> Checkpointing:
        """The setting that recomputes these of so many blocks, ascending."""
        if not blocks:
            return cls()
        return cls(kind="blocks") if len(blocks) == num_blocks else cls(kind="chosen", blocks=blocks)

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """Which of so many blocks are recomputed."""
        return tuple(range(num_blocks))[:: self.every] if self.kind == "blocks" else self.blocks

    def unavailable(self, facts: Facts) -> str | None:
        """There must be enough blocks."""
        if self.kind != "none" and self.every > facts.num_blocks:
            return f"the model has {facts.num_blocks} blocks"
        if beyond := self._beyond(facts.num_blocks):
            return f"the model has {facts.num_blocks} blocks, numbered from 0, and no {beyond}"
        return None

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> None:
        """Give the chosen blocks a forward that checkpoints; parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: ``every`` exceeds the number of blocks, one of ``blocks`` is beyond them, or it has none.
        """
        _keep_everything(model)
        for block in self._recomputed(blocks):
            # On the instance, so that hooks run once, outside; a bound method, so that deepcopy rebinds it.
            block.forward = functools.partial(_checkpointed, block.forward, _Buffers(block))

    def _recomputed(self, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        if self.kind == "none":
            return ()
        if not blocks:
            raise PlanError("settings.checkpointing.kind: the model has no modules to recompute. Use kind: none.")
        if self.every > len(blocks):
            raise PlanError(
                f"settings.checkpointing.every: must divide into the model's {len(blocks)} blocks at least once, "
                f"but got {self.every}. Use 1 to {len(blocks)}, or kind: none."
            )
        if beyond := self._beyond(len(blocks)):
            raise PlanError(
                f"settings.checkpointing.blocks: must be numbers of the model's {len(blocks)} blocks, "
                f"but got {beyond}. Use 0 to {len(blocks) - 1}, or kind: none."
            )
        if self.is_open:
            raise PlanError(f"settings: {OPEN}")
        return [blocks[number] for number in self.numbers(len(blocks))]

    def _beyond(self, num_blocks: int) -> str:
        """Numbers that no block has, for people."""
        return ", ".join(str(number) for number in self.blocks if number >= num_blocks)


def _keep_everything(model: nn.Module) -> None:
    """Take off what an earlier plan put on: a notebook applies several to one model."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _checkpointed:
            del module.forward
            if module.forward != forward.args[0]:
                module.forward = forward.args[0]


def _checkpointed(forward: Any, buffers: _Buffers, /, *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    forward, args, kwargs = _each_once(forward, args, kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=buffers.contexts, **kwargs)


def _each_once(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same call where no tensor is given twice. What is given as query, key and value at once is one tensor to an
    attention, and is to be one when it is computed again, which hooks on saved tensors would make three."""
    from torch import Tensor
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten((args, kwargs))
    once = {id(one): one for one in leaves if isinstance(one, Tensor)}
    if len(once) == sum(isinstance(one, Tensor) for one in leaves):
        return forward, args, kwargs
    places = [list(once).index(id(one)) if isinstance(one, Tensor) else None for one in leaves]
    others = [None if isinstance(one, Tensor) else one for one in leaves]

    def call(*tensors: Tensor) -> Any:
        given = [other if place is None else tensors[place] for place, other in zip(places, others, strict=True)]
        args, kwargs = tree_unflatten(given, spec)
        return forward(*args, **kwargs)

    return call, tuple(once.values()), {}


class _Buffers:
    """The buffers of a block that its forward changes (running statistics, a spectral norm's vectors).

    Recomputation starts from copies of what the first forward started from, and leaves the block's own alone: that
    forward has changed them. Copies and not None, so that as many tensors are saved as the first time.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changes: dict[tuple[nn.Module, str], bool] = {}
        """Whether a forward in training changed it, the first time: masks and the like are not copied again."""

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the first forward and for its recomputation."""
        before: dict[tuple[nn.Module, str], Tensor] = {}
        return self._note(before), self._replay(before)

    @contextmanager
    def _note(self, before: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        versions: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}
        for key, buffer in self._variable():
            before[key] = buffer.clone()
            versions[key] = buffer, buffer._version
        yield
        for key in [key for key in before if key not in self._changes]:
            module, name = key
            after = module._buffers.get(name)
            is_same = _is_untouched(*versions[key], after) if _is_fake(before[key]) else _same(before[key], after)
            self._changes[key] = _is_normalization(module) or not is_same
            if not self._changes[key]:
                del before[key]

    @contextmanager
    def _replay(self, before: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        kept = {(module, name): module._buffers[name] for module, name in before}
        for (module, name), buffer in before.items():
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for (module, name), own in kept.items():
                module._buffers[name] = own

    def _variable(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        for module in self._block.modules():
            for name, buffer in module._buffers.items() if module.training else ():
                if buffer is not None and self._changes.get((module, name), True):
                    yield (module, name), buffer


def _is_normalization(module: nn.Module) -> bool:
    """Whether its buffers are running statistics, which a batch may leave as they were by chance."""
    from torch.nn.modules.batchnorm import _NormBase

    return isinstance(module, _NormBase)


def _same(before: Tensor, after: Tensor | None) -> bool:
    """By value: batch_norm changes its statistics without a trace in their version."""
    return after is not None and after.shape == before.shape and bool((after == before).all())


def _is_fake(tensor: Tensor) -> bool:
    """Whether it has no values that could be compared."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _is_untouched(before: Tensor, version: int, after: Tensor | None) -> bool:
    """By version: what is left to tell tensors without values by."""
    return after is before and after._version == version


def find_blocks(model: nn.Module, paths: Sequence[str] = ()) -> list[nn.Module]:
    """The model's repeated blocks, in registration order, none inside another.

    A block is a module of a class that occurs at least twice in one ``ModuleList`` or ``Sequential``, and more than a
    single layer. Where blocks nest, the inner ones are taken if the outer ones are stages of blocks, and not blocks of
    heads or experts. Without repeated blocks: the root's children.

    Args:
        model: before any technique.
        paths: module paths of blocks, or of containers whose children are blocks; these are taken instead.

    Returns:
        The blocks, each once.

    Raises:
        TaskError: a path names no module.
    """
    if paths:
        return _named_blocks(model, paths)
    kinds = _repeated_kinds(model)
    blocks = _blocks_in(model, kinds)
    while inner := {block: _blocks_in(block, kinds) for block in blocks}:
        if not _are_stages(inner):
            break
        blocks = _distinct([block for found in inner.values() for block in found])
    return blocks or _distinct(_callable_children(model))


def _named_blocks(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    known = dict(model.named_modules())
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise TaskError(f"blocks: the model has no module {', '.join(unknown)}. Use paths of model.named_modules().")
    for inner, outer in itertools.permutations(paths, 2):
        if inner.startswith(f"{outer}."):
            raise TaskError(f"blocks: {inner} lies inside {outer}, and would be recomputed twice. Name one of them.")
    chosen = (known[path] for path in paths)
    return _distinct([block for module in chosen for block in (module.children() if _holds(module) else (module,))])


def _repeated_kinds(model: nn.Module) -> set[type[nn.Module]]:
    """Classes that occur at least twice in one container."""
    counts = (Counter(map(type, module.children())) for module in model.modules() if _holds(module))
    return {kind for count in counts for kind, number in count.items() if number >= 2}


def _blocks_in(root: nn.Module, kinds: set[type[nn.Module]]) -> list[nn.Module]:
    """The outermost members of containers below ``root`` that are blocks of one of the kinds."""
    found: list[nn.Module] = []
    for child in root.children():
        is_member = _holds(root) and type(child) in kinds and _is_block(child)
        found += [child] if is_member else _blocks_in(child, kinds)
    return _distinct(found)


def _are_stages(inner: Mapping[nn.Module, Sequence[nn.Module]]) -> bool:
    """Whether modules consist of their inner blocks, some of them twins; modules of one's own that are all alike are
    blocks, whatever is in them."""
    outer, blocks = list(inner), _distinct([block for found in inner.values() for block in found])
    if not blocks or _num_parameters(blocks) < _COVERAGE * _num_parameters(outer):
        return False
    if len(outer) > 1 and _num_shapes(outer) == 1 and not all(_holds(module) for module in outer):
        return False
    return any(_num_shapes(twins) < len(twins) for twins in inner.values())


def _num_shapes(modules: Sequence[nn.Module]) -> int:
    return len({tuple(p.shape for p in module.parameters()) for module in modules})


def _holds(module: nn.Module) -> bool:
    """Whether the module is a container of others."""
    from torch import nn

    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_block(module: nn.Module) -> bool:
    """Whether recomputing the module is worth the name: it can be called, and is more than one layer."""
    from torch import nn

    if isinstance(module, nn.ModuleList):
        return False
    if any(True for _ in module.children()):
        return True
    # A user's activation or normalisation is a layer as torch's are; a module of raw weight matrices may be a block.
    return not type(module).__module__.startswith("torch.nn.") and any(p.ndim > 1 for p in module.parameters())


def _callable_children(model: nn.Module) -> list[nn.Module]:
    from torch import nn

    return [
        inner
        for child in model.children()
        for inner in (child.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else (child,))
    ]


def _distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _num_parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})
