"""Requests and results of an export: plain data, which the driver reads without importing torch."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from ...plan import TOLERANCE, Plan
from ...techniques import FileKind

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What ONNX needs beside torch."""


def missing_for_onnx() -> list[str]:
    """Of these, what cannot be imported here."""
    return [name for name in ONNX_PACKAGES if find_spec(name) is None]


_FROM_PLAN = 0.01
"""Files were 0.5 % from a compiled ResNet in bf16, and nothing from BERT and ResNet that were not compiled."""


def most_from_plan(plan: Plan) -> float:
    """How far a file's outputs may be from those of the plan's own model, as a share of their norm.

    In int8 as far as the plan's from the job: a rounding that falls the other way is as large as the first. BERT in
    onnxruntime was 1.6 % from the plan, and the plan 1.8 % from the job.
    """
    own = plan.inference.tolerance if plan.inference is not None else None
    most = TOLERANCE if own is None else own
    return most if plan.settings.quantization.kind == "int8" else min(most, _FROM_PLAN)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExportOptions(_Frozen):
    """What is written, and where."""

    to: FileKind
    """The file's format."""
    file: str
    """Absolute path, which may have any name."""
    folder: str | None = None
    """Where batches are kept for the process that reads the file back; None is the system's for what is temporary."""


class RunOfFile(_Frozen):
    """What came of one batch that the file was run on."""

    num_samples: PositiveInt
    """In it."""
    shapes: tuple[tuple[NonNegativeInt, ...], ...]
    """Of its tensors."""
    refused: str | None = None
    """Why it did not run, in words; None where it did."""
    from_plan: NonNegativeFloat = 0.0
    """The largest distance of a sample's outputs from those of the plan's own model, as a share of their norm."""
    from_reference: NonNegativeFloat = 0.0
    """The same from those of the job as it stands."""
    unlike: str | None = None
    """What of them is beyond the plan's tolerance, or otherwise built; None where all is within it."""


class Dimension(_Frozen):
    """Which sizes of one dimension of an input the trace is right for."""

    least: NonNegativeInt = 1
    """The smallest."""
    most: NonNegativeInt | None = None
    """The largest; None where it has no bound."""


class ExportedFile(_Frozen):
    """A file, as it was when it had been read back."""

    num_bytes: PositiveInt
    """Its size."""
    inputs: tuple[str, ...]
    """Names of its inputs, in the order of a batch's tensors."""
    outputs: tuple[str, ...]
    """Names of its outputs, in the order of ``infer``'s."""
    shapes: tuple[tuple[Dimension, ...], ...]
    """Of each input."""
    conditions: tuple[str, ...]
    """On sizes, that the trace is right under and the file holds to: ``batch.shape[1] % 2 == 0``."""
    given: str
    """A batch by the names of its tensors, as the traced ``infer`` takes it: ``{'x': x}``."""
    runs: tuple[RunOfFile, ...]
    """Of each batch that it was tried on, the first of them whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of batches that it ran on; descending."""
        return tuple(sorted({run.num_samples for run in self.runs if run.refused is None}, reverse=True))

    @property
    def refused(self) -> tuple[RunOfFile, ...]:
        """Runs on batches that it does not take."""
        return tuple(run for run in self.runs if run.refused is not None)
