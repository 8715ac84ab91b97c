"""Activation checkpointing: keep a block's input, recompute its inside during backward."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ..errors import PlanError, TaskError
from .support.base import Effect, Program, Run, Stage, Technique
from .support.facts import Facts, ScriptFacts
from .support.forwards import take_off
from .support.recomputed import Buffers, recomputed

if TYPE_CHECKING:
    from torch import nn

_COVERAGE = 0.8
"""Share of the outer blocks' parameters that inner blocks must hold to be chosen instead: the blocks of a stage do,
the heads of an attention layer do not."""


class BlocksToChoose(Technique):
    """In a search space: the search chooses which blocks are recomputed, for each batch."""

    name: ClassVar[str] = "checkpointing"
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True

    kind: Literal["chosen"]

    def describe(self, facts: Facts | None = None) -> str:
        """Of how many blocks."""
        return f"checkpoint as many of {f'{facts.num_blocks}' if facts else 'the'} blocks as it takes"

    def unavailable(self, facts: Facts) -> str | None:
        """There must be blocks."""
        return Checkpointing(kind="blocks").unavailable(facts)


class Checkpointing(Technique):
    """Recompute some of the model's repeated blocks, non-reentrant: every k-th, or those that are named.

    Source: Chen et al. 2016, arXiv:1604.06174; https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    name: ClassVar[str] = "checkpointing"
    not_in_inference: ClassVar[str] = "it saves what backward needs"
    goes_by: ClassVar[str | None] = "recomputed blocks"
    stage: ClassVar[Stage] = Stage.CHECKPOINTING
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code"})
    trades_time: ClassVar[bool] = True
    adds_up: ClassVar[Literal["blocks"]] = "blocks"
    directive: ClassVar[Technique] = BlocksToChoose(kind="chosen")
    rewrites: ClassVar[bool] = True
    purposes: ClassVar[Mapping[str, str]] = {
        "blocks": "Keeps only these blocks' inputs and computes their inside again in backward.",
        "selective": "Keeps these blocks' inputs and what products in them give, and computes the rest again.",
        "chosen": "Keeps only these blocks' inputs and computes their inside again in backward.",
    }

    kind: Literal["none", "blocks", "selective", "chosen"] = "none"
    """``none`` keeps everything, as stock; ``blocks`` recomputes every k-th block, ``chosen`` those in ``blocks``.
    ``selective`` recomputes every k-th block but for matrix products, convolutions and attention, whose results it
    keeps."""
    every: PositiveInt = 1
    """Of kind ``blocks`` or ``selective``: recompute the first of each ``every`` blocks; 1 is all of them."""
    blocks: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Of kind ``chosen``: numbers of the blocks to recompute, from 0 in the model's order; ascending, each once."""

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
        if self.kind == "chosen" and not numbers:
            raise ValueError(
                "blocks: kind chosen needs the number of at least one block, but got none. Use {kind: chosen, "
                "blocks: [0]} for the first, or kind: none; `- {kind: chosen}` in a search space has them chosen."
            )
        if self.kind != "chosen" and numbers:
            raise ValueError(f"blocks: kind {self.kind} names no blocks, but got {numbers}. Use kind: chosen.")
        if any(after <= before for before, after in itertools.pairwise(numbers)):
            raise ValueError(f"blocks: must ascend, each once, but got {numbers}. Use {sorted(set(numbers))}.")
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """Which of the blocks."""
        if self.kind == "none":
            return super().describe(facts)
        blocks = f"{facts.num_blocks} blocks" if facts else "blocks"
        if self.kind == "chosen":
            *before, last = map(str, self.blocks)
            named = f"blocks {', '.join(before)} and {last}" if before else f"block {last}"
            return f"checkpoint {named}{f' of {facts.num_blocks}' if facts else ''}"
        but = ", but for their products" if self.kind == "selective" else ""
        if self.every == 1:
            return f"checkpoint all {blocks}{but}"
        suffix = {2: "nd", 3: "rd"}.get(self.every, "th")
        return f"checkpoint every {self.every}{suffix} of {blocks if facts else 'the blocks'}{but}"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Checkpointing, ...]:
        """None, all, every second, every third and every fourth of the blocks there are; on a card all but for their
        products, too, which are little beside what is kept there of short operations."""
        steps = [every for every in (1, 2, 3, 4) if every <= facts.num_blocks]
        found = (cls(), *(cls(kind="blocks", every=every) for every in steps))
        return (*found, cls(kind="selective")) if facts.device.type == "cuda" and steps else found

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """None and all blocks: whatever recomputes some lies between."""
        every = cls(kind="blocks")
        some = [one if isinstance(one, cls) else every for one in choices if one != cls()]
        return (*(one for one in choices if one == cls()), *some[:1])

    @classmethod
    def of(cls, blocks: tuple[int, ...], num_blocks: int) -> Checkpointing:
        """The setting that recomputes these of so many blocks, ascending."""
        if not blocks:
            return cls()
        return cls(kind="blocks") if len(blocks) == num_blocks else cls(kind="chosen", blocks=blocks)

    def in_blocks(self, numbers: Sequence[int], num_blocks: int) -> Checkpointing:
        """As :meth:`of`: outside its blocks it does nothing."""
        return self.of(tuple(numbers), num_blocks)

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """Which of so many blocks are recomputed."""
        return self.blocks if self.kind in ("none", "chosen") else tuple(range(num_blocks))[:: self.every]

    def unavailable(self, facts: Facts) -> str | None:
        """There must be enough blocks."""
        if self.kind != "none" and self.every > facts.num_blocks:
            return f"the model has {facts.num_blocks} blocks"
        if beyond := self._beyond(facts.num_blocks):
            return f"the model has {facts.num_blocks} blocks, numbered from 0, and no {beyond}"
        return None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """As flags, every k-th block; a Trainer's own, and a compiler, are off beside it."""
        if self.kind != "none" and program == "Trainer":
            return {"activation_checkpointing": False, "torch_compile": False}
        if self.kind == "blocks" and program == "TrainingArguments":
            every = {"every_n_layers": self.every}
            return {"activation_checkpointing": True, "activation_checkpointing_kwargs": every}
        return {"grad-checkpointing": True} if self == Checkpointing(kind="blocks") and program == "timm" else {}

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """What is recomputed already is not recomputed twice."""
        recomputes = "the script turns gradient checkpointing on itself" if script.recomputes else None
        return super().left_to(script) or recomputes

    def undo(self, model: nn.Module) -> nn.Module:
        """Blocks with their own forward."""
        take_off(model, recomputed)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Give the chosen blocks a forward that checkpoints; parameters, hooks and ``state_dict`` keys stay.

        Raises:
            PlanError: ``every`` exceeds the number of blocks, one of ``blocks`` is beyond them, or it has none.
        """
        for block in self._recomputed(blocks):
            # On the instance, so that hooks run once, outside; a bound method, so that deepcopy rebinds it.
            buffers = Buffers(block, keeps_products=self.kind == "selective")
            block.forward = functools.partial(recomputed, block.forward, buffers)
        return model

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
        return [blocks[number] for number in self.numbers(len(blocks))]

    def _beyond(self, num_blocks: int) -> str:
        """Numbers that no block has, for people."""
        return ", ".join(str(number) for number in self.blocks if number >= num_blocks)


def find_blocks(model: nn.Module, paths: Sequence[str] = (), name: str = "blocks") -> list[nn.Module]:
    """The model's repeated blocks, in registration order, none inside another.

    A block is a module of a class that occurs at least twice in one ``ModuleList`` or ``Sequential``, and more than a
    single layer. Where blocks nest, the inner ones are taken if the outer ones are stages of blocks, and not blocks of
    heads or experts. Without repeated blocks: the root's children.

    Args:
        model: before any technique.
        paths: module paths of blocks, or of containers whose children are blocks; these are taken instead.
        name: what the task calls the paths.

    Returns:
        The blocks, each once.

    Raises:
        TaskError: a path names no module.
    """
    if paths:
        return _named_blocks(model, paths, name)
    kinds = _repeated_kinds(model)
    blocks = _blocks_in(model, kinds)
    while inner := {block: _blocks_in(block, kinds) for block in blocks}:
        if not _are_stages(inner):
            break
        blocks = _distinct([block for found in inner.values() for block in found])
    return blocks or _distinct(_callable_children(model))


def _named_blocks(model: nn.Module, paths: Sequence[str], name: str) -> list[nn.Module]:
    known = dict(model.named_modules())
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise TaskError(f"{name}: the model has no module {', '.join(unknown)}. Use paths of model.named_modules().")
    for inner, outer in itertools.permutations(paths, 2):
        if inner.startswith(f"{outer}."):
            raise TaskError(f"{name}: {inner} lies inside {outer}, and would be recomputed twice. Name one of them.")
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
