"""What an estimate is asked for, and what it says. Plain data: the driver reads it without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from ..measure.allocations import Kind
from ..techniques import Settings

__all__ = [
    "Calibration",
    "Estimate",
    "EstimateOptions",
    "Fill",
    "Fit",
    "Interval",
    "PredictOptions",
    "Prediction",
    "untried",
]


_TRIED_WITH = ("2.13",)
"""Versions of torch whose privates the fake steps were held against (``python -m benchmarks.estimate``)."""


def untried(torch_version: str) -> str | None:
    """That predictions were not tried with this torch, in words; None where they were."""
    if ".".join(torch_version.split(".")[:2]) in _TRIED_WITH:
        return None
    return (
        f"memory is predicted by parts of torch that may change from version to version: tried with torch "
        f"{', '.join(_TRIED_WITH)}, and this is {torch_version}. Predictions may be further off; trials are not."
    )


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Interval(_Frozen):
    """A prediction in bytes, and between what it lies."""

    low: int
    """Seldom less."""
    value: int
    """Most likely."""
    high: int
    """At most one in twenty is above."""

    @classmethod
    def around(cls, value: int, error: float) -> Self:
        """A value that may be off by a share of itself, either way."""
        return cls(low=round(value * (1 - error)), value=value, high=round(value * (1 + error)))

    def plus(self, num_bytes: int) -> Interval:
        """With something on top that is known."""
        return Interval(low=self.low + num_bytes, value=self.value + num_bytes, high=self.high + num_bytes)


class Calibration(_Frozen):
    """What measured trials have shown of how far off predictions of the process are."""

    constant_bytes: float
    """To be added to each, such as for libraries that the task imports late."""
    share: float
    """Of each, to be added besides."""
    widened: PositiveFloat
    """By how much more the measured ones vary than their intervals say, as a factor; at least 1."""
    num_trials: PositiveInt

    def of(self, found: Interval) -> Interval:
        """A prediction, by what was learned."""
        value = found.value + self.constant_bytes + self.share * found.value
        below, above = (self.widened * (end - found.value) for end in (found.low, found.high))
        return Interval(low=round(value + below), value=round(value), high=round(value + above))


class _Options(_Frozen):
    target: Literal["cpu", "cuda"] = "cpu"
    """The device that is planned for; it need not be here."""
    capability: tuple[int, int] | None = None
    """Of a CUDA device; None where any is thought of."""
    limit_bytes: PositiveInt | None = None
    """What the device may charge the process; None chooses nothing by it."""
    largest_of: PositiveInt | None = None
    """Batch shapes vary: every batch is one of the largest of so many samples."""


class EstimateOptions(_Options):
    """Of which combination of techniques the batches that fit are asked for, and how large a one is worth an answer."""

    settings: Settings = Settings()
    """The combination; its batch does not matter."""
    reference_batch: PositiveInt = 1
    """Samples in an optimizer step of the job as it stands."""
    reference_micro: PositiveInt | None = None
    """Samples in one forward pass of it; None is all of them."""
    is_held: bool = False
    """Whether the optimizer step is so whatever the micro-batch: smaller ones are accumulated."""
    most: PositiveInt = 2**16
    """The largest micro-batch to think of."""
    choose_blocks: bool = False
    """Whether to say which blocks to recompute where the job's own batch does not fit."""
    calibration: Calibration | None = None
    """Of what the process is charged."""

    @property
    def own_micro(self) -> int:
        """The micro-batch of the job as it stands, as far as it is thought of."""
        return min(self.reference_micro or self.reference_batch, self.most)


class PredictOptions(_Options):
    """Of which configurations something is to be said before they are measured."""

    settings: tuple[Settings, ...]
    """Each with its batch."""
    to_choose: tuple[Settings, ...] = ()
    """Others, for each of which the blocks to recompute are chosen for the limit, whatever its own checkpointing."""
    model_bytes: NonNegativeInt = 0
    """Of the parameters: so many processes are started as have room for theirs."""
    most_s: PositiveFloat | None = None
    """Seconds after which no further combination is begun; None is all of them."""


class Prediction(_Frozen):
    """What is known of a configuration before it is measured."""

    peak_bytes: int
    """What the device charges the process at its peak."""
    high_bytes: int | None = None
    """At most one in twenty is above."""
    flops_per_sample: float | None = None
    """Floating-point operations of a training step."""
    bytes_per_sample: float | None = None
    """Bytes that it reads and writes."""
    blocks: tuple[int, ...] | None = None
    """Where the blocks to recompute were to be chosen, their numbers: all where even those are not enough. None where
    they could not be chosen, and the prediction is for all."""


class Fill(_Frozen):
    """Bytes that are there at the peak, and what they are."""

    kind: Kind | Literal["scratch"]
    """What they serve; ``scratch`` is what a kernel takes for itself."""
    module: str
    """Of activations, the module or the group of modules that made them; else empty."""
    num_bytes: int


class Fit(_Frozen):
    """A micro-batch, and what it takes."""

    micro: int
    """Samples in one forward pass."""
    accumulate: int
    """Forward passes in one optimizer step."""
    tensors: Interval
    """The tensors' peak."""
    process: Interval
    """What the device charges the process."""


class Estimate(_Frozen):
    """What one combination of techniques takes, without having run."""

    how: Literal["traced", "probed"]
    """``traced`` over tensors without values; ``probed`` by real steps at small batches, extended to larger ones."""
    reason: str | None = None
    """Why it could not be traced."""
    base_bytes: int
    """What the process is charged without the tensors: interpreter, torch, data; or context and library workspaces."""
    largest: Fit | None
    """The largest micro-batch that is likely to fit; None where not even 1 is."""
    smallest: Fit | None
    """The smallest micro-batch, where none fits."""
    surely: int | None
    """The largest that fits at the upper end of its interval."""
    reference: Fit
    """The job's own micro-batch."""
    blocks: tuple[int, ...] | None = None
    """Numbers of the blocks to recompute, at the least cost, for that batch to be likely to fit. None where it does
    without, or where not even all are enough, or where it was not asked."""
    phase: str
    """In which the peak of ``fills`` is."""
    module: str
    """Whose forward or backward makes the allocation that reaches it."""
    fills: tuple[Fill, ...]
    """What fills the peak, the largest first: of the largest batch, else of the smallest."""
    seconds: float
    """That it took to find out."""
