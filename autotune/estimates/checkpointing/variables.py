"""What a program chooses from: for each block one of several ways; outside them, and for the whole, yes or no."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...techniques import Settings, Technique
from .knapsack import Rules

Way = tuple[Technique, ...]
"""Settings that a block may have together, none of them the stock one."""


@dataclass(frozen=True)
class Variables:
    """The unknowns, each chosen or not, in this order: the ways of the first block, of the second, …; settings outside
    all blocks; settings of the whole."""

    choices: tuple[Technique, ...]
    """Of techniques that add up, the settings to choose from beside the stock ones."""
    num_blocks: int

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Of a block: each combination of settings that it may have, but for none at all."""
        rows = _by_technique(one for one in self.choices if one.adds_up == "blocks")
        together = itertools.product(*((None, *row) for row in rows))
        return tuple(filter(None, (tuple(filter(None, way)) for way in together)))

    @cached_property
    def outside(self) -> tuple[Technique, ...]:
        """Settings that do something outside the blocks, too."""
        own = (one for one in self.choices if one.adds_up == "blocks")
        return tuple(one for one in own if one.in_blocks((), self.num_blocks) != type(one)())

    @cached_property
    def of_whole(self) -> tuple[Technique, ...]:
        """Settings that no block has by itself."""
        return tuple(one for one in self.choices if one.adds_up == "whole")

    @property
    def steps(self) -> tuple[Way, ...]:
        """What is traced, everywhere at once, to tell what each unknown does."""
        return (*self.ways, *((one,) for one in self.of_whole))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each unknown the number of its step, and its block; the number of blocks stands for what is outside, and
        -1 for the whole."""
        in_blocks = itertools.product(range(self.num_blocks), range(len(self.ways)))
        alone = [self.ways.index((one,)) for one in self.outside]
        return (
            *((way, block) for block, way in in_blocks),
            *((way, self.num_blocks) for way in alone),
            *((len(self.ways) + number, -1) for number in range(len(self.of_whole))),
        )

    def is_outside(self, number: int) -> bool:
        """Whether an unknown is a setting outside all blocks, which stands for that setting anywhere."""
        return self.places[number][1] == self.num_blocks

    @cached_property
    def rules(self) -> Rules:
        """A block has one way. A setting is outside where any block has it, and is one of its technique's there."""
        first = self.num_blocks * len(self.ways)
        of_blocks = (tuple(range(at, at + len(self.ways))) for at in range(0, first, len(self.ways) or 1))
        outside = {one: first + number for number, one in enumerate(self.outside)}
        whole = {one: first + len(outside) + number for number, one in enumerate(self.of_whole)}
        groups = (tuple(places[one] for one in row) for places in (outside, whole) for row in _by_technique(places))
        needs = (
            (number, outside[one])
            for number in range(first)
            for one in self.ways[number % len(self.ways)]
            if one in outside
        )
        return Rules((*of_blocks, *groups), tuple(needs))

    def settings(self, plain: Settings, chosen: Sequence[int]) -> Settings:
        """What a set of unknowns stands for, on top of other settings."""
        blocks: dict[Technique, list[int]] = {}
        found: list[Technique] = []
        for step, block in (self.places[number] for number in chosen):
            if block == -1:
                found += self.steps[step]
                continue
            for one in self.steps[step]:
                numbers = blocks.setdefault(one, [])
                numbers += [block] if block < self.num_blocks else []
        return plain.having(*found, *(one.in_blocks(row, self.num_blocks) for one, row in blocks.items()))

    def chosen(self, settings: Settings) -> tuple[int, ...]:
        """The set of unknowns that settings stand for."""
        every = range(self.num_blocks)
        held = {one for one in self.of_whole if getattr(settings, one.name) == one}
        blocks: list[set[Technique]] = [set() for _ in every]
        for one in (one for one in self.choices if one.adds_up == "blocks"):
            own = getattr(settings, one.name)
            if own != type(one)() and own.in_blocks(every, self.num_blocks) == one:
                held |= {one} & {*self.outside}
                for number in own.numbers(self.num_blocks):
                    blocks[number].add(one)

        def is_chosen(step: int, block: int) -> bool:
            way = {*self.steps[step]}
            return way == blocks[block] if 0 <= block < self.num_blocks else way <= held

        return tuple(number for number, place in enumerate(self.places) if is_chosen(*place))

    def everywhere(self, plain: Settings) -> Iterator[Settings]:
        """Each combination of settings that hold everywhere, the stock ones first."""
        rows = _by_technique(self.choices)
        for way in itertools.product(*((None, *row) for row in rows)):
            settings = plain.having(*filter(None, way))
            if settings.conflict() is None:
                yield settings


def _by_technique(settings: Iterator[Technique] | Sequence[Technique] | dict[Technique, int]) -> list[list[Technique]]:
    found: dict[str, list[Technique]] = {}
    for one in settings:
        found.setdefault(one.name, []).append(one)
    return list(found.values())
