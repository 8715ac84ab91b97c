"""Every allocation of one optimizer step, as data, and what follows from it: live bytes, the peak, and what fills it.

Nothing here knows whether the tensors were real or fake, so that predictions replay the same events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from itertools import accumulate, pairwise
from typing import Final, Literal

OUTSIDE: Final = "(outside)"
"""Made by no module of the model: by the loss, the optimizer, or the loader."""


class Phase(StrEnum):
    """Of an optimizer step: after ``before``, which is before it, they come in order, once for each micro-batch."""

    BEFORE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()


Kind = Literal["parameter", "optimizer_state", "gradient", "activation", "temporary", "batch", "other"]
"""What a storage serves. ``parameter`` includes buffers; ``activation`` is what autograd saved for backward;
``temporary`` is all else that the step made; ``other`` was there before it, and no one said what it is."""


@dataclass(frozen=True)
class Allocation:
    """One storage. Moments count allocations and frees; moment 0 is before the step."""

    id: int
    """In order of birth, from 0; the same step traced again numbers alike."""
    num_bytes: int
    """Bytes asked of the allocator, without its rounding."""
    born: int
    """The moment from which it is alive; 0 for what was there before."""
    died: int | None
    """The moment from which it is gone; None where it outlives the step. A moment before its birth is the next step's,
    and up to then the last step's is there."""
    module: str
    """Qualified name of the module whose forward or backward made it, or that owns the parameter; or OUTSIDE."""
    phase: Phase
    """When it was made."""
    kind: Kind
    """What it serves in the end."""
    kept_by: str | None = None
    """The module that first saved it for backward; None where none did."""
    is_scratch: bool = False
    """Whether it is a kernel's workspace, which is computed and not observed."""

    def is_alive_at(self, moment: int) -> bool:
        """Whether its bytes are taken at this moment."""
        if self.died is not None and self.died < self.born:
            return moment < self.died or moment >= self.born
        return self.born <= moment and (self.died is None or moment < self.died)


@dataclass(frozen=True)
class Span:
    """A phase of one micro-batch."""

    phase: Phase
    start: int
    """The moment at which it began; it ends where the next one starts."""


@dataclass(frozen=True)
class Trace:
    """One optimizer step."""

    allocations: tuple[Allocation, ...]
    """In order of birth."""
    spans: tuple[Span, ...]
    """In order."""
    num_moments: int
    """One more than the step's allocations and frees."""

    def live_bytes(self) -> list[int]:
        """Bytes alive at each moment, ``num_moments`` of them."""
        changes = [0] * self.num_moments
        for one in self.allocations:
            changes[one.born] += one.num_bytes
            if one.died is not None:
                changes[one.died] -= one.num_bytes
                changes[0] += one.num_bytes if one.died < one.born else 0
        return list(accumulate(changes))

    def peak_moment(self) -> int:
        """The first moment with the most bytes alive."""
        live = self.live_bytes()
        return live.index(max(live))

    def peak_bytes(self) -> int:
        """Most bytes that are alive at once."""
        return max(self.live_bytes())

    def peak_beside(self, *kinds: Kind) -> int:
        """Most bytes that are alive at once of what is of none of these kinds."""
        rest = (one for one in self.allocations if one.kind not in kinds)
        return replace(self, allocations=tuple(rest)).peak_bytes()

    def alive_at(self, moment: int) -> Iterator[Allocation]:
        """What is alive at a moment, in order of birth."""
        return (one for one in self.allocations if one.is_alive_at(moment))

    def maker_at(self, moment: int) -> Allocation | None:
        """The allocation made at a moment; None at a free, and at moment 0."""
        return next((one for one in self.allocations if one.born == moment and moment > 0), None)

    def kept(self) -> Iterator[Allocation]:
        """Allocations that the first micro-batch's forward keeps for backward, without parameters and buffers."""
        ends = (after.start for span, after in pairwise(self.spans) if span.phase == Phase.FORWARD)
        end = next(ends, self.num_moments - 1)
        alive = (one for one in self.alive_at(end) if one.kept_by is not None)
        return (one for one in alive if one.kind not in ("parameter", "optimizer_state"))
