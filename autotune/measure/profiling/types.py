"""Requests and results of a profile: plain data, which the driver reads without importing torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ...plan import Peak
from ...techniques.support.facts import Lengths
from .allocations import Kind, Phase


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ProfileOptions(_Frozen):
    """What to look at beside memory."""

    num_timed_steps: NonNegativeInt = 5
    """Optimizer steps whose time is taken, by module; 0 leaves times out."""
    trace: str | None = None
    """Absolute path of a Chrome trace to write; None writes none."""
    largest_of: PositiveInt | None = None
    """Batch shapes vary: every micro-batch is the largest of so many."""
    lengths: Lengths | None = None
    """Batch shapes vary, and lengths are known: every micro-batch is the largest that samples can make."""


class ModuleRow(_Frozen):
    """A module with all within it; the row of the model itself is called ``""``."""

    name: str
    """Qualified, as in ``named_modules``; the first where a module has several; OUTSIDE for what no module made."""
    type: str
    """Its class; empty for OUTSIDE."""
    num_parameters: int
    """Numbers in its parameters, those that an earlier module holds too left out."""
    kept_bytes: int
    """Of what its forward makes in one micro-batch, what autograd saves for backward, whoever's backward needs it."""
    peak_bytes: int
    """Of what is alive at the peak, what it made; its parameters, their gradients and optimizer state too."""
    forward_s: float | None = None
    """Seconds in its forward, of the one step that modules are timed in."""
    backward_s: float | None = None
    """The same step's seconds in its backward, recomputation included."""


class PeakMoment(_Frozen):
    """When most bytes are alive within a step, and what they are."""

    num_bytes: int
    """All tensors that are alive then."""
    phase: Phase
    """Phase of the allocation that reached the peak."""
    module: str
    """Module whose forward or backward made that allocation."""
    position: float = Field(ge=0, le=1)
    """How far through that phase's allocations and frees."""
    by_kind: dict[Kind, int]
    """The bytes by what they serve."""


class Area(_Frozen):
    """One area of the chart: a group of modules, or a kind of memory that is alive all along."""

    name: str
    kind: Literal["parameter", "optimizer_state", "gradient", "block", "rest"]
    live_bytes: tuple[int, ...]
    """At each of the timeline's moments."""


class Timeline(_Frozen):
    """Memory over one optimizer step."""

    moments: tuple[int, ...]
    """Some of the step's moments, the peak's among them."""
    num_moments: int
    """Number of all moments of the step."""
    spans: tuple[tuple[Phase, int], ...]
    """Each phase with the moment at which it begins, micro-batch by micro-batch."""
    areas: tuple[Area, ...]
    """From the bottom up; together they are all that is alive."""


class Profile(_Frozen):
    """One optimizer step of a training, by module."""

    modules: tuple[ModuleRow, ...]
    """In forward order, each before those within it; OUTSIDE last."""
    peak: PeakMoment
    """Of a steady step: one whose optimizer state is there when it begins."""
    first_step_peak_bytes: int
    """Most bytes alive within the first step."""
    sees_saves: bool = True
    """Whether what autograd saves could be watched; else all that a forward leaves behind counts as kept."""
    process: Peak
    """What the device charges the process: the figure that a budget holds."""
    micro_batch: PositiveInt
    """Samples in one forward pass."""
    accumulate: PositiveInt
    """Forward passes in one optimizer step."""
    step_s: float | None = None
    """Median seconds of an optimizer step as it is; None where times were left out."""
    timed_step_s: float | None = None
    """The step that modules are timed in, the median of those with the hooks that tell them apart."""
    phases_s: dict[Phase, float] = {}
    """That step's seconds in each phase; ``before`` is waiting for data."""
    timeline: Timeline
