"""Requests and results of an estimate: plain data, which the driver reads without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..internals import TRIED
from ..measure.profiling.allocations import Kind
from ..techniques import Settings, Technique
from ..techniques.allocator import Allocator
from ..techniques.checkpointing import Checkpointing
from ..techniques.offload import Offload
from ..units import MIB

Largest = PositiveInt | tuple[NonNegativeInt, ...]
"""Samples of which the largest is looked at: the first so many, or those with these indices."""
WORKER_BYTES = 36 * MIB
"""What a loader worker takes, where nothing is known of it: at the median of the table of ``unet_denoise``."""


def untried(torch_version: str) -> str | None:
    """A warning that predictions were not tried with this version of torch; None where they were."""
    if ".".join(torch_version.split(".")[:2]) == TRIED["torch"]:
        return None
    return (
        f"memory is predicted by parts of torch that may change from version to version: tried with torch "
        f"{TRIED['torch']}, and this is {torch_version}. Predictions may be further off; trials are not."
    )


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Interval(_Frozen):
    """A prediction in bytes, with an interval."""

    low: int
    """Lower end, bytes; not a calibrated quantile."""
    value: int
    """The most likely value, bytes."""
    high: int
    """Upper end, bytes: at most one in twenty measured peaks is to be above."""

    @classmethod
    def around(cls, value: int, error: float) -> Self:
        """A value with a relative error either way."""
        return cls(low=round(value * (1 - error)), value=value, high=round(value * (1 + error)))

    def plus(self, num_bytes: int) -> Interval:
        """The interval with known bytes added."""
        return Interval(low=self.low + num_bytes, value=self.value + num_bytes, high=self.high + num_bytes)

    def with_part(self, part: Interval) -> Interval:
        """The interval with another one added: at the ends, both are at theirs."""
        return Interval(low=self.low + part.low, value=self.value + part.value, high=self.high + part.high)


CONTEXT = Interval(low=300 * MIB, value=512 * MIB, high=768 * MIB)
"""What a CUDA context takes with torch's kernels loaded, on a card of which no more is known: 300 to 500 MiB are seen,
by card and driver, and kernels that are loaded later come on top."""


class Calibration(_Frozen):
    """Correction of predictions of the process, learned from measured trials."""

    constant_bytes: float
    """Added to each prediction, such as for libraries that the task imports late."""
    share: float
    """Share of each prediction that is added besides."""
    widened: PositiveFloat
    """Factor, at least 1, by which measured peaks vary more than the intervals say."""
    num_trials: PositiveInt

    def of(self, found: Interval) -> Interval:
        """A prediction, corrected."""
        value = found.value + self.constant_bytes + self.share * found.value
        below, above = (self.widened * (end - found.value) for end in (found.low, found.high))
        return Interval(low=round(value + below), value=round(value), high=round(value + above))


class _Options(_Frozen):
    target: Literal["cpu", "cuda"] = "cpu"
    """The device that is planned for; it need not be here."""
    capability: tuple[int, int] | None = None
    """Of a CUDA device; None where any is thought of."""
    context: Interval = CONTEXT
    """What a CUDA device charges the process beside what its allocator reserves."""
    workspaces: tuple[float, float] = (0.0, 0.0)
    """What a library of kernels keeps of the device beside what is traced, as shares of it: likely, and at most."""
    limit_bytes: PositiveInt | None = None
    """What the device may charge the process; None chooses nothing by it."""
    largest_of: Largest | None = None
    """Batch shapes vary: every batch is one of the largest of these samples."""


class Room(_Frozen):
    """A card of the same compute capability as another."""

    limit_bytes: PositiveInt
    """What it may charge the process."""
    context: Interval
    """What it charges the process beside what its allocator reserves."""


class EstimateOptions(_Options):
    """The combination of techniques to estimate, and the batches of interest. Within a limit a CUDA device charges what
    its allocator does with: it gives cached segments back before it fails."""

    settings: Settings = Settings()
    """The combination; its batch does not matter."""
    reference_batch: PositiveInt = 1
    """Samples in an optimizer step of the job as it stands."""
    reference_micro: PositiveInt | None = None
    """Samples in one forward pass of it; None is all of them."""
    is_held: bool = False
    """Whether the optimizer step is so whatever the micro-batch: smaller ones are accumulated."""
    most: PositiveInt = 2**16
    """The largest micro-batch to consider."""
    choose_blocks: bool = False
    """Whether to say which blocks to recompute where the job's own batch does not fit."""
    calibration: Calibration | None = None
    """Of what the process is charged."""
    others: tuple[Room, ...] = ()
    """Other cards of this capability, for which the same traces are to answer."""

    @property
    def own_micro(self) -> int:
        """The micro-batch of the job as it stands, at most ``most``."""
        return min(self.reference_micro or self.reference_batch, self.most)


class StepLaw(_Frozen):
    """Seconds that the optimizer's step takes more with some settings."""

    settings: Settings
    """Of one technique."""
    parameter_s: NonNegativeFloat
    """For a parameter, whatever its size."""
    element_s: NonNegativeFloat
    """For an element."""
    least: NonNegativeInt = 0
    """Elements from which a parameter is stepped otherwise."""

    def seconds(self, trained: Iterable[int]) -> float:
        """Of a step.

        Args:
            trained: elements of each parameter.
        """
        return sum(self.parameter_s + self.element_s * elements for elements in trained if elements >= self.least)


class TimeLaw(_Frozen):
    """Seconds that counted work takes. Unless it was measured, they are an A100's in fp32 (about 20e12 operations and
    2e12 bytes a second): it is their ratio that matters, and a CPU's is of that order."""

    flop_s: PositiveFloat = 0.5e-13
    """For a floating-point operation."""
    byte_s: PositiveFloat = 5e-13
    """For a byte that is read or written."""
    new_byte_s: NonNegativeFloat = 0.0
    """For a byte of a page that the process did not have."""
    write_byte_s: NonNegativeFloat = 0.0
    """For a byte that offload writes to its file."""
    read_byte_s: NonNegativeFloat = 0.0
    """For one that it reads; 0 where that is not measured."""
    steps: tuple[StepLaw, ...] = ()
    """Of settings that change the optimizer's step, those that were measured."""
    is_measured: bool = False

    def step(self, technique: Technique) -> StepLaw | None:
        """Of a setting; None where nothing was measured."""
        return next((one for one in self.steps if one.settings == Settings().having(technique)), None)

    def counts(self, technique: Technique) -> bool:
        """Whether what a setting takes is known by counting, so that nothing is left to believe."""
        if isinstance(technique, Allocator):
            return self.new_byte_s > 0
        if isinstance(technique, Offload):
            return technique.to == "disk" and not technique.trained and self.read_byte_s > 0
        return isinstance(technique, Checkpointing) or self.step(technique) is not None

    def said(self, settings: Settings) -> str:
        """The speeds that settings go by, in words."""
        words = [f"{_PER_S / self.flop_s:.3g} GFLOP/s", f"{_PER_S / self.byte_s:.2g} GB/s"]
        if self.new_byte_s:
            words.append(f"new pages at {_PER_S / self.new_byte_s:.2g} GB/s")
        for one in settings.chosen():
            if isinstance(one, Offload) and self.counts(one):
                words.append(f"a file at {_PER_S / self.write_byte_s:.2g} and {_PER_S / self.read_byte_s:.2g} GB/s")
            if (step := self.step(one)) is not None:
                each = f"{step.element_s / _PER_S:.2g} ns an element and {step.parameter_s * 1e6:.0f} µs a parameter"
                words.append(f"{one.describe()} for {each} more")
        return ", ".join(words)


_PER_S = 1e-9
COUNTED = TimeLaw()
"""Where no speed is measured."""


class CheapestOptions(EstimateOptions):
    """Which of several combinations of techniques is the cheapest that fits?"""

    is_here: bool = False
    """Whether the device that is planned for is this process's, so that its speeds can be measured."""

    combinations: tuple[Settings, ...]
    """To choose from, the job as it stands first."""
    choices: tuple[Settings, ...] = ()
    """What is chosen for each of them, block by block and for the whole: of techniques that add up one setting each, as
    it is everywhere."""
    limit_bytes: PositiveInt
    """What the device may charge the process."""


class PredictOptions(_Options):
    """Configurations whose memory and work are to be predicted."""

    settings: tuple[Settings, ...]
    """Each with its batch."""
    to_choose: tuple[Settings, ...] = ()
    """Others, for each of which ``choices`` are chosen for the limit, whatever it has of their techniques."""
    choices: tuple[Settings, ...] = (Settings(checkpointing=Checkpointing(kind="blocks")),)
    """What is chosen for those, block by block and for the whole: of techniques that add up one setting each, as it is
    everywhere."""
    model_bytes: NonNegativeInt = 0
    """Bytes of the parameters: as many processes are started as there is memory for."""
    most_s: PositiveFloat | None = None
    """Seconds after which no further combination is begun; None bounds nothing."""


class Prediction(_Frozen):
    """What is known of a configuration before it is measured."""

    peak_bytes: int
    """What the device charges the process at its peak."""
    high_bytes: int | None = None
    """Upper end of the interval: at most one in twenty measured peaks is to be above."""
    step_bytes: int = 0
    """Of the tensors at their peak, what a step makes; 0 where that is not known."""
    tensor_bytes: int = 0
    """The tensors at their peak; 0 where that is not known."""
    host_bytes: int = 0
    """What a step on a card keeps in the host's memory at a time."""
    beside_bytes: int = 0
    """The most that is alive of them at once beside parameters, gradients and optimizer state; 0 where that is not
    known."""
    flops_per_sample: float | None = None
    """Floating-point operations of a training step."""
    bytes_per_sample: float | None = None
    """Bytes that a training step reads and writes."""
    chosen: Settings | None = None
    """Where something was to be chosen, that alone, and nothing else of the configuration: each choice everywhere where
    even that is not enough, of a technique the last. None where it could not be chosen, and the prediction is for
    that."""


class Fill(_Frozen):
    """Bytes alive at the peak, by what they are."""

    kind: Kind | Literal["scratch"]
    """What they serve; ``scratch`` is workspace that a kernel allocates for itself."""
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
    """Memory of one combination of techniques, without running it."""

    how: Literal["traced", "probed"]
    """``traced`` over fake tensors; ``probed`` by real steps at small batches, extended to larger ones."""
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
    """The phase in which the peak of ``fills`` is."""
    module: str
    """The module whose forward or backward makes the allocation at the peak."""
    fills: tuple[Fill, ...]
    """What fills the peak, the largest first: of the largest batch, else of the smallest."""
    seconds: float
    """Time that the estimate took."""


class Foretold(_Frozen):
    """What is predicted of an optimizer step with some settings."""

    settings: Settings
    """Without a batch."""
    process: Interval
    """What the device charges the process."""
    step_s: float
    """Seconds that it takes by a :class:`TimeLaw`, with what is believed of all that counting leaves out: to be
    compared with those of other settings."""


class Cheapest(_Frozen):
    """The settings with the fastest step that are predicted to fit."""

    chosen: Foretold | None
    """None where nothing fits."""
    stock: Foretold
    """The job as it stands."""
    least: Foretold
    """Of all that was looked at, what takes least memory."""
    how: Literal["traced", "probed"]
    """``traced`` over fake tensors; ``probed`` by real steps."""
    reason: str | None = None
    """Why it could not be traced."""
    phase: str
    """The phase in which the peak of ``chosen`` is, or of ``least`` where nothing fits."""
    module: str
    """The module whose forward or backward makes the allocation at that peak."""
    fills: tuple[Fill, ...]
    """What fills that peak, the largest first."""
    refused: tuple[tuple[Settings, str], ...] = ()
    """What could not be looked at, and why."""
    law: TimeLaw
    """By which steps are compared."""
    seconds: float
    """Time that the choice took."""

    @property
    def shown(self) -> Foretold:
        """What ``phase``, ``module`` and ``fills`` are of."""
        return self.chosen or self.least

    @property
    def times_step(self) -> float:
        """The time of a step with what was chosen, over that of the job as it stands."""
        return self.shown.step_s / self.stock.step_s if self.stock.step_s else 1.0
