"""``find_coupled``: which channels can only go together, read off Torch-Pruning's graph of what depends on what.

The library ranks the channels of one layer and follows what depends on those that go, which may be others of the same
layer: where two halves are multiplied, or four neighbours compared, more goes than was asked for. So what goes together
is found first, and ranked then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


@dataclass(frozen=True)
class Side:
    """What a layer gives, or what it takes; or a parameter that is no layer's."""

    path: str
    cut: Any
    """A bound method of the library: takes channels of a layer away, or returns a parameter without them."""
    is_output: bool
    width: int
    dim: int
    """Of a parameter, which is cut."""

    def apply(self, model: nn.Module, channels: Iterable[int]) -> None:
        """Cut these channels in a copy of the model that was traced."""
        self.cut.__self__.pruning_dim = self.dim
        owner, _, leaf = self.path.rpartition(".")
        parent = model.get_submodule(owner)
        found = getattr(parent, leaf)
        cut = self.cut(found, sorted(channels))
        if isinstance(found, nn.Parameter):
            setattr(parent, leaf, cut)


@dataclass(frozen=True)
class Block:
    """Units of channels that can only go together, all of the same layers and with as many channels of each."""

    places: dict[Side, Tensor]
    """(units, channels of a unit)."""

    @property
    def num_units(self) -> int:
        """How many there are."""
        return len(next(iter(self.places.values())))

    @property
    def most_channels(self) -> int:
        """That a unit has of one layer's outputs."""
        return max(places.shape[1] for side, places in self.places.items() if side.is_output)


@dataclass(frozen=True)
class Coupled:
    """Layers whose outputs are cut by one ratio, since some of them can only go together, and what depends on them."""

    first: Side
    """Outputs of the first layer, in the model's order."""
    blocks: tuple[Block, ...]
    obstacle: str | None
    """Why none of them can go, in words."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all layers and parameters that become smaller, the first layer's first."""
        return tuple(dict.fromkeys([self.first.path, *(side.path for one in self.blocks for side in one.places)]))


class _Place(NamedTuple):
    """A channel on its way through the graph; the library's mappings of indices go by these names."""

    idx: int
    root_idx: int
    """The unit that it belongs to."""


class _Sets:
    """Numbers that turn out to be of one set are joined."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def new(self) -> int:
        """One more."""
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def of(self, number: int) -> int:
        """Which set it is of: the least number in it."""
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        """From here on they are of one."""
        one, other = sorted((self.of(one), self.of(other)))
        self._parents[other] = one


_End = tuple[Any, Any]
"""A node of the graph, and the method that cuts one side of it."""


def find_coupled(
    model: nn.Module, graph: Any, flattened: Mapping[Any, torch.Size], ends: Iterable[nn.Module]
) -> list[Coupled]:
    """In the order of their first layers.

    Args:
        model: that was traced.
        graph: ``torch_pruning.DependencyGraph`` of it, nothing of which was cut.
        flattened: by gradient function, the shape of what was flattened there.
        ends: layers whose outputs keep their width, and with them all whose outputs are coupled with theirs.
    """
    _put_channels_last(graph, flattened)
    walk = _Walk(graph, model)
    ends = {*ends}
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)) and module in graph.module2node and module not in ends:
            walk.start(module)
    walk.join_parts()
    return [*walk.coupled(ends)]


def _put_channels_last(graph: Any, flattened: Mapping[Any, torch.Size]) -> None:
    """The library takes channels for the first of what is flattened; where they are the last, each is at every so
    many places of it."""
    for node in graph.module2node.values():
        before = flattened.get(node.grad_fn, torch.Size())
        for source in node.inputs if before else ():
            there, back = (
                [arrow for arrow in one.dependencies if arrow.target is other and arrow.index_mapping[0] is not None]
                for one, other in ((source, node), (node, source))
            )
            places = len(there[0].index_mapping[0]([_Place(0, 0)])) if there else 1
            width = before[1:].numel() // places
            if places > 1 and before[-1] == width != before[1]:
                for arrow in there:
                    arrow.index_mapping[0] = _spread(width, places)
                for arrow in back:
                    arrow.index_mapping[0] = _gathered(width)


def _spread(width: int, places: int) -> Callable[[list[_Place]], list[_Place]]:
    return lambda found: [_Place(one.idx + n * width, one.root_idx) for one in found for n in range(places)]


def _gathered(width: int) -> Callable[[list[_Place]], list[_Place]]:
    return lambda found: [_Place(one.idx % width, one.root_idx) for one in found]


class _Walk:
    """Channels are followed from the layers that make them to all that depends on them, each once."""

    def __init__(self, graph: Any, model: nn.Module) -> None:
        self._graph = graph
        self._paths: dict[Any, str] = {module: name for name, module in model.named_modules()}
        self._paths.update((parameter, name) for name, parameter in model.named_parameters())
        self._sets = _Sets()
        self._found: dict[_End, dict[int, int]] = {}
        """At each end the channels that were met, with their units."""
        self._sides: dict[_End, Side | None] = {}
        self._obstacles: dict[int, str] = {}
        """Of units, in words."""

    def start(self, module: nn.Module) -> None:
        """Follow those outputs of a layer that were not met yet."""
        end = self._graph.module2node[module], self._graph.get_pruner_of_module(module).prune_out_channels
        known, side = self._found.get(end, {}), self._side(end)
        if side is None or side.width < 2:
            return
        ahead = [(end, [_Place(n, self._sets.new()) for n in range(side.width) if n not in known])]
        while ahead:
            end, places = ahead.pop()
            if new := self._meet(end, places):
                ahead += self._depending(end, new)

    def _meet(self, end: _End, places: list[_Place]) -> list[_Place]:
        """Those that were not here before; the others' units are joined with the ones that were."""
        side, known, new = self._side(end), self._found.setdefault(end, {}), []
        if side is not None and side.width == 1:
            return []  # it is spread over all of them
        for place in places:
            if side is not None and not 0 <= place.idx < side.width:
                self._obstacles[place.root_idx] = f"how they come to {side.path} cannot be followed"
            elif place.idx in known:
                self._sets.join(known[place.idx], place.root_idx)
            else:
                known[place.idx] = place.root_idx
                new.append(place)
        return new

    def _depending(self, end: _End, places: list[_Place]) -> Iterator[tuple[_End, list[_Place]]]:
        node, cut = end
        for arrow in node.dependencies:
            if arrow.is_triggered_by(cut):
                moved = places
                try:
                    for mapping in arrow.index_mapping:
                        if mapping is not None:
                            moved = mapping(moved)
                except IndexError:  # of a split whose parts the library has counted otherwise
                    words = "how they are split up cannot be followed"
                    self._obstacles.update((one.root_idx, words) for one in places)
                    continue
                if moved:
                    yield (arrow.target, arrow.handler), [_Place(one.idx, one.root_idx) for one in moved]

    def _side(self, end: _End) -> Side | None:
        """None of whatever is no layer and no parameter with channels."""
        if end not in self._sides:
            (node, cut), self._sides[end] = end, None
            if (path := self._paths.get(node.module)) is not None:
                is_output = cut == self._graph.get_pruner_of_module(node.module).prune_out_channels
                width = (self._graph.get_out_channels if is_output else self._graph.get_in_channels)(node)
                if width is not None:
                    self._sides[end] = Side(path, cut, is_output, width, node.pruning_dim)
        return self._sides[end]

    def join_parts(self) -> None:
        """Grouped convolutions and GroupNorm want as many channels in each part: the nth of each can only go with the
        nth of all others."""
        for end, known in self._found.items():
            side, module = self._side(end), end[0].module
            is_depthwise = isinstance(module, _ConvNd) and module.groups == module.out_channels
            parts = self._graph.get_pruner_of_module(module).get_out_channel_groups(module)
            if side is None or is_depthwise or parts < 2:
                continue
            size = side.width // parts
            for number in range(size):
                units = [known[place] for place in range(number, side.width, size) if place in known]
                for unit in units:
                    self._sets.join(units[0], unit)
                    if len(units) < parts:
                        self._obstacles[unit] = f"{side.path} takes others beside them, in groups"

    def coupled(self, ends: set[nn.Module]) -> Iterator[Coupled]:
        """All but those of which a layer keeps its width."""
        units: dict[int, dict[Side, list[int]]] = {}
        makers: dict[Side, int] = {}
        layers, order = _Sets(), {path: number for number, path in enumerate(self._paths.values())}
        kept: set[Side] = set()
        for end, known in self._found.items():
            if (side := self._side(end)) is None:
                continue
            if side.is_output and isinstance(end[0].module, (nn.Linear, _ConvNd)):
                makers[side] = layers.new()
            if side.is_output and end[0].module in ends:
                kept.add(side)
            if _is_computed(end[0].module):
                words = f"the weight of {side.path} is computed from others at each forward"
                self._obstacles.update((unit, words) for unit in known.values())
            for place, unit in known.items():
                units.setdefault(self._sets.of(unit), {}).setdefault(side, []).append(place)
        obstacles = {self._sets.of(unit): words for unit, words in self._obstacles.items()}
        for sides in units.values():
            first, *others = (makers[side] for side in sides if side in makers)
            for one in others:
                layers.join(first, one)
        of_layers: dict[int, list[int]] = {}
        for unit, sides in units.items():
            of_layers.setdefault(layers.of(next(makers[one] for one in sides if one in makers)), []).append(unit)
        found = []
        for members in of_layers.values():
            touched = {side for unit in members for side in units[unit]}
            if kept.isdisjoint(touched):
                earliest = min((one for one in touched if one in makers), key=lambda one: order[one.path])
                obstacle = next((obstacles[unit] for unit in members if unit in obstacles), None)
                found.append(Coupled(earliest, tuple(_blocks([units[unit] for unit in members])), obstacle))
        yield from sorted(found, key=lambda one: order[one.first.path])


def _blocks(units: list[dict[Side, list[int]]]) -> Iterator[Block]:
    """Units that are alike together."""
    alike: dict[frozenset[tuple[Side, int]], list[dict[Side, list[int]]]] = {}
    for unit in units:
        alike.setdefault(frozenset((side, len(places)) for side, places in unit.items()), []).append(unit)
    for members in alike.values():
        yield Block({side: torch.tensor([sorted(one[side]) for one in members]) for side in members[0]})


def _is_computed(module: Any) -> bool:
    """Whether a layer's weight is no parameter of its own, as under weight norm or spectral norm."""
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "weight", None), Tensor):
        return False
    return "weight" not in {name for name, _ in module.named_parameters(recurse=False)}
