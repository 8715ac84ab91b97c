"""Requests and results of the quality process: plain data, which the driver reads without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from ...techniques import Settings
from ..measurement import Quality, QualityOptions

RUNGS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the recovery after which candidates are compared."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class JudgeOptions(_Frozen):
    """What is judged, from which seeds, and after which training."""

    recovery: QualityOptions
    """The training before each judgement. Its ``keep`` is for the first candidate's weights, from the first seed."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """From each of which the reference is judged, and what comes to the end."""
    candidates: tuple[Settings, ...]
    """That change what the model computes."""
    reference: tuple[Quality, ...] = ()
    """Of the job as it stands, from the first seeds, where an earlier process has judged it."""
    allowed: PositiveFloat | None = None
    """Drop in quality that is allowed, in units of it or, with ``is_share``, of the reference's; candidates that are
    the worse by it end before the others. None takes all of them to the end."""
    is_share: bool = False
    """Whether ``allowed`` is a share of the reference's quality."""
    by_bytes: bool = False
    """Whether ratios and candidates are chosen by the peak of a step's tensors, and not by its time."""
    targets: tuple[PositiveFloat, ...] = ()
    """Shares of a step's time, or of its peak, descending, for each of which a cut is found too whose ratios differ by
    group; empty finds none."""
    most: PositiveInt = 3
    """Of the candidates, how many come to the end."""
    most_s: PositiveFloat | None = None
    """Seconds after which nothing more is begun; None is no limit."""
    keep: str | None = None
    """The file that keeps what was found so far, so that another process goes on from it; None keeps nothing."""


class JudgedCut(_Frozen):
    """What came of one candidate."""

    settings: Settings
    """As they were applied: with the record of what is kept."""
    step: PositiveFloat | None = None
    """Time of an optimizer step over the reference's, measured in turn; None where it was not measured."""
    peak: PositiveFloat | None = None
    """Bytes of tensors at the peak of a step over the reference's; None where candidates are not chosen by it."""
    rungs: tuple[float, ...] = ()
    """Qualities after parts of the recovery, from the first seed: as many of :data:`RUNGS` as it came to."""
    qualities: tuple[Quality, ...] = ()
    """From each seed, as far as it came to the end."""
    ended: str | None = None
    """Why it did not come to the end, in words; None where it did."""

    @property
    def cost(self) -> float:
        """What it is chosen by: its peak or its step's time, over the reference's."""
        return self.peak or self.step or 1.0


class GroupRow(_Frozen):
    """What is known of a group of channels that are cut by one ratio."""

    first: str
    """Path of the first layer."""
    width: int
    """Its channels; of attention, heads."""
    rises: tuple[float, ...]
    """What the loss changes by where a quarter, a half and three quarters of it are cut, without training."""
    seconds: float
    """Of a step, what the layers take that become smaller."""
    num_bytes: int
    """What these layers keep for backward, and their parameters with gradients and optimizer states."""


class Cuts(_Frozen):
    """What the process found."""

    reference: JudgedCut
    """The job as it stands, with the same further training."""
    cuts: tuple[JudgedCut, ...] = ()
    """Of the candidates, in their order; then of those that were found."""
    groups: tuple[GroupRow, ...] = ()
    """Of the model, as far as they were looked at."""
    is_scanned: bool = False
    """Whether ``cuts`` has those that were found."""
    num_halved: int = 0
    """Rungs after which it is settled who goes on."""
    notes: tuple[str, ...] = ()
    """What the user should hear."""
