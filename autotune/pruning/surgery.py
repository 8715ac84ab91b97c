"""``Finder``: what stays of a model, found on copies of it with Torch-Pruning. To be run in a process of its own."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Caught, PlanError
from .channels import Block, Coupled, Side, find_coupled
from .check import Disagreement, disagreement, words_of
from .heads import choose_heads, cut_heads
from .how import Group, How
from .importance import importance
from .observe import Attention, Seen, observe, width
from .record import Record
from .twin import Twin

Run = Callable[[nn.Module], Any]

_MOST_OFF = 0.1
"""Of the channels, by which what goes of a layer may differ from what was asked for, where channels go several at a
time."""
_MOST_NAMED = 5


@dataclass(frozen=True)
class _Part:
    """What is cut of one group."""

    group: Group
    channels: Mapping[Side, Tensor] = field(default_factory=dict)
    """That go."""
    heads: tuple[Attention, Tensor] | None = None
    """That stay."""


class Finder:
    """Looks at a model once, and finds what stays of it at any ratio."""

    def __init__(self, model: nn.Module, run: Run, trains: bool = True) -> None:
        """
        Args:
            model: is left alone.
            run: its forward and loss on a few samples.
            trains: try a backward pass of what is cut too.

        Raises:
            PlanError: the model cannot be traced.
        """
        self._model, self._run, self._trains = model, run, trains
        twin = Twin(model)
        with _refused("it cannot be traced for what depends on what"):
            seen = observe(twin.model, run)
            self._coupled = find_coupled(twin.model, *_graph(twin, run), _ends(twin.model, seen))
        self._attentions = seen.attentions
        self._idle = [path for path, module in model.named_modules() if width(module) and path not in seen.called]
        self._whole = twin.model.float()

    def groups(self) -> tuple[Group, ...]:
        """All that can be cut by a ratio of their own, as far as is known before it is tried."""
        of_channels = (_group_of(one) for one in self._coupled if one.obstacle is None)
        return (*of_channels, *map(_group_of_heads, self._attentions))

    def tried(self, how: How, untouchable: frozenset[str]) -> Record | PlanError:
        """As :meth:`record`, or why there is none."""
        with Caught(of=PlanError) as raised:
            return self.record(how, untouchable)
        error = raised.take()
        assert isinstance(error, PlanError)
        return error

    def record(self, how: How, untouchable: frozenset[str]) -> Record:
        """What is kept. A group that cannot be cut, or whose cut model computes something else, is left whole.

        Args:
            how: what is asked.
            untouchable: paths of modules that keep every tensor.

        Raises:
            PlanError: nothing can be cut.
        """
        torch.manual_seed(0)
        self._check_ratios(how)
        left: list[str] = []
        parts = [*self._channels(how, untouchable, left), *self._heads(how, untouchable, left)]
        admitted: list[_Part] = []
        self._admit(parts, admitted, left)
        if not admitted:
            left += [f"{path} keeps its channels, since it is not called as a layer" for path in self._idle if not left]
            raise PlanError(_nothing(how, left))
        return replace(self._cut(admitted), left=tuple(left))

    def _check_ratios(self, how: How) -> None:
        ratios, known = how.ratios or {}, [one.first for one in self.groups()]
        if unknown := next((name for name in ratios if name not in known), None):
            near = difflib.get_close_matches(unknown, known, cutoff=0.4) or known
            raise PlanError(
                f"settings.pruning.ratios: {unknown} begins no group of layers that can be cut. Use the first layer of "
                f"one, such as {', '.join(near[:_MOST_NAMED])}."
            )
        if wrong := next((name for name, ratio in ratios.items() if not 0 <= ratio < 1), None):
            raise PlanError(
                f"settings.pruning.ratios: {wrong}: a share of at least 0 and below 1 was expected, but got "
                f"{ratios[wrong]:g}."
            )

    def _channels(self, how: How, untouchable: frozenset[str], left: list[str]) -> Iterator[_Part]:
        """Of each group the least important units of channels."""
        asked = {one.first: _ratio(how, one.first.path) for one in self._coupled}
        touchable = [one for one in self._coupled if asked[one.first] and untouchable.isdisjoint(_owners(one.paths))]
        scores = {id(block): importance(self._whole, block, how.criterion) for one in touchable for block in one.blocks}
        least = _thresholds(how, [(one, block, scores[id(block)]) for one in touchable for block in one.blocks])
        for one in touchable:
            channels: dict[Side, list[Tensor]] = {}
            reason = one.obstacle
            for block in one.blocks if reason is None else ():
                number = _num_going(block, asked[one.first], how, scores[id(block)], least.get(id(block)))
                reason = reason or _out_of_reach(block, number, asked[one.first], how)
                going = scores[id(block)].topk(number, largest=False).indices
                for side, places in block.places.items():
                    channels.setdefault(side, []).append(places[going].flatten())
            if reason is not None:
                left.append(f"{one.first.path} keeps its channels, since {reason}")
            elif any(len(each) for each in (torch.cat(found) for found in channels.values())):
                yield _Part(_group_of(one), {side: torch.cat(found) for side, found in channels.items()})

    def _heads(self, how: How, untouchable: frozenset[str], left: list[str]) -> Iterator[_Part]:
        """Of each attention the most important heads."""
        touchable = [one for one in self._attentions if untouchable.isdisjoint([*one.inputs, one.output])]
        for attention in touchable if how.heads else ():
            ratio = _ratio(how, attention.inputs[0])
            heads = choose_heads(self._whole, attention, ratio, how.criterion)
            if heads is not None:
                yield _Part(_group_of_heads(attention), heads=(attention, heads))
            elif ratio:
                few = f"{attention.num_heads} are too few for ratio {ratio:g}"
                left.append(f"{attention.inputs[0]} keeps its heads, since {few}")

    def _admit(self, parts: list[_Part], admitted: list[_Part], left: list[str]) -> None:
        """Add those whose cut models compute what is left of the whole one: all at once where that is so, else those
        that have nothing to do with the place where it is not, then the others, by halves."""
        if not parts or (found := self._disagreement([*admitted, *parts])) is None:
            admitted += parts
            return
        if len(parts) == 1:
            (part,) = parts
            left.append(f"{part.group.first} keeps its {part.group.kind}, since {found.words}")
            return
        near = [one for one in parts if found.path in one.group.layers]
        far = [one for one in parts if one not in near]
        halves = (far, near) if near and far else (parts[: len(parts) // 2], parts[len(parts) // 2 :])
        for half in halves:
            self._admit(half, admitted, left)

    def _disagreement(self, parts: list[_Part]) -> Disagreement | None:
        with Caught() as raised:
            record = self._cut(parts)
        if raised.error is not None:  # the library's, of layers that it takes for others
            return Disagreement(None, f"they cannot be cut: {words_of(raised.error)}")
        return disagreement(self._model, self._run, record, self._trains)

    def _cut(self, parts: list[_Part]) -> Record:
        twin = Twin(self._model)
        twin.tag()
        channels: dict[Side, set[int]] = {}
        for part in parts:
            for side, places in part.channels.items():
                channels.setdefault(side, set()).update(places.tolist())
        with torch.no_grad():
            for side, going in channels.items():
                side.apply(twin.model, going)
            for part in parts:
                if part.heads is not None:
                    cut_heads(twin.model, *part.heads)
        return twin.record()


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


def _graph(twin: Twin, run: Run) -> tuple[Any, Mapping[Any, torch.Size]]:
    """What depends on what, and what is flattened there."""
    import torch_pruning

    flattened: dict[Any, torch.Size] = {}

    def forward(model: nn.Module, _: Any) -> list[Tensor]:
        twin.set_modes()  # the library has set eval mode
        seen = observe(model, run, parted=True)
        flattened.update(seen.flattened)
        return list(seen.outputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are no layer's: it cuts their last dimension
        graph = torch_pruning.DependencyGraph().build_dependency(twin.model, None, forward_fn=forward, verbose=False)
    return graph, flattened


def _ends(model: nn.Module, seen: Seen) -> Iterator[nn.Module]:
    """Layers whose outputs keep their width: the model's own, what attention stands between, and in a model with
    attention whatever has the width that is passed on from block to block."""
    own = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    widths = seen.widths | {one.embed_dim for one in own}
    yield from (*seen.last, *seen.mixing, *own)
    yield from (module for module in model.modules() if width(module) in widths)


def _group_of(one: Coupled) -> Group:
    return Group(one.first.path, one.paths, one.first.width, "channels")


def _group_of_heads(one: Attention) -> Group:
    return Group(one.inputs[0], (*one.inputs, one.output), one.num_heads, "heads")


def _owners(paths: tuple[str, ...]) -> set[str]:
    """With the modules that parameters are of."""
    return {*paths, *(path.rpartition(".")[0] for path in paths)}


def _ratio(how: How, first: str) -> float:
    return how.ratio if how.ratios is None else how.ratios.get(first, how.ratio)


def _thresholds(how: How, blocks: list[tuple[Coupled, Block, Tensor]]) -> dict[int, float]:
    """Of each block that is ranked with others, the score up to which units go."""
    scopes: dict[Any, list[tuple[Block, Tensor]]] = {}
    for one, block, scores in blocks:
        is_own = how.scope == "layer" or (how.ratios is not None and one.first.path in how.ratios)
        if one.obstacle is None and not is_own:
            kinds = sorted(
                (side.cut.__qualname__, side.is_output, len(places[0])) for side, places in block.places.items()
            )
            scopes.setdefault(tuple(kinds) if how.scope == "isomorphic" else None, []).append((block, scores))
    found: dict[int, float] = {}
    for members in scopes.values():
        together = torch.cat([scores for _, scores in members])
        number = _rounded_up(len(together), how.ratio)
        found.update((id(block), together.sort().values[number - 1].item()) for block, _ in members if number)
    return found


def _num_going(block: Block, ratio: float, how: How, scores: Tensor, least: float | None) -> int:
    """Units that go. Of whole layers as many as stay are rounded down, unless several channels go at a time."""
    if least is not None:
        number = int((scores <= least).sum())
    elif block.most_channels > 1:
        number = int(block.num_units * ratio + 0.5)
    else:
        number = _rounded_up(block.num_units, ratio)
    while number and number < block.num_units and (block.num_units - number) * block.most_channels % how.round_to:
        number += 1
    return number


def _rounded_up(size: int, ratio: float) -> int:
    return size - int(size * (1 - ratio) + 1e-9)


def _out_of_reach(block: Block, number: int, ratio: float, how: How) -> str | None:
    """Why a layer would keep another share than was asked for, in words."""
    size, num_units = block.most_channels, block.num_units
    if number == num_units:
        rounded = f", rounded to multiples of {how.round_to}" if how.round_to > 1 else ""
        return f"ratio {ratio:g} leaves nothing of them{rounded}: use a smaller ratio or round_to, or scope: layer"
    off = abs(number / num_units - ratio)
    if how.scope == "layer" and how.round_to == 1 and off * num_units * size >= 1 and off > _MOST_OFF:
        return (
            f"ratio {ratio:g} cannot be had of {num_units * size} that go {size} at a time: use a multiple of "
            f"1/{num_units}"
        )
    return None


def _nothing(how: How, left: list[str]) -> str:
    rounded = f", rounded to multiples of {how.round_to}" if how.round_to > 1 else ""
    more = [f"and {len(left) - _MOST_NAMED} more"] if len(left) > _MOST_NAMED else []
    reasons = f": {'; '.join([*left[:_MOST_NAMED], *more])}" if left else ""
    return (
        f"settings.pruning: ratio {how.ratio:g} cuts nothing of this model{rounded}{reasons}. Use another ratio, or "
        "kind: none."
    )
