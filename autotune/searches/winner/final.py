"""The result of the finalists' runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...measure import Measurement
from ...measure.measurement import Quality
from ..store.tried import Tried
from .evidence import Pair, undisturbed


@dataclass(frozen=True)
class Final:
    """The result of the finalists' runs."""

    winner: Tried | None
    """None when nothing fits."""
    rounds: tuple[Pair, ...] = ()
    """The winner's fresh measurements, each with the reference's; empty when there was no time for any."""

    proven: tuple[tuple[Quality, Quality], ...] = ()
    """The winner's quality and the reference's from one seed each, where one process judged both."""

    @property
    def pairs(self) -> list[Pair]:
        """The rounds that count: the undisturbed ones, or all where too few are."""
        return undisturbed(self.rounds)

    @property
    def by_turns(self) -> bool:
        """Whether the winner and the reference took turns in every round that counts."""
        return bool(self.rounds) and all(pair.turns for pair in self.pairs)

    @property
    def qualities(self) -> list[tuple[Quality, Quality]]:
        """The winner's and the reference's, from one seed each."""
        return [*self.proven] or qualities(self.rounds)

    @property
    def repeats(self) -> list[Measurement]:
        """The winner's measurements in the rounds that count."""
        return [pair.winner for pair in self.pairs]

    @property
    def reference(self) -> list[Measurement]:
        """The reference's measurements in the rounds that count."""
        return [pair.reference for pair in self.pairs if pair.reference is not None]


def qualities(rounds: Sequence[Pair]) -> list[tuple[Quality, Quality]]:
    """Quality of both, of the rounds in which both were judged."""
    both = ((pair.winner.quality, pair.reference.quality) for pair in rounds if pair.reference is not None)
    return [(one, other) for one, other in both if one is not None and other is not None]


def run_name(row: Tried, number: int) -> str:
    """Id of the request that measures a configuration again, in this round."""
    return f"finalist-{row.number:03d}-round-{number}"
