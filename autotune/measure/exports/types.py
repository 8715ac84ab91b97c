"""Requests and results of an export: plain data, which the driver reads without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from ...techniques import FileKind

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What ONNX needs beside torch."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExportOptions(_Frozen):
    """What is written, and where."""

    to: FileKind
    """The file's format."""
    file: str
    """Absolute path, which may have any name."""


class RunOfFile(_Frozen):
    """What came of one batch that the file was run on."""

    num_samples: PositiveInt
    """In it."""
    refused: str | None = None
    """Why it did not run, in words; None where it did."""
    from_plan: NonNegativeFloat = 0.0
    """The largest distance of a sample's outputs from those of the plan's own model, as a share of their norm."""
    from_reference: NonNegativeFloat = 0.0
    """The same from those of the job as it stands."""
    unlike: str | None = None
    """What of them is beyond the plan's tolerance, or otherwise built; None where all is within it."""


class ExportedFile(_Frozen):
    """A file, as it was when it had been read back."""

    num_bytes: PositiveInt
    """Its size."""
    inputs: tuple[str, ...]
    """Names of its inputs, in the order of a batch's tensors."""
    outputs: tuple[str, ...]
    """Names of its outputs, in the order of ``infer``'s."""
    runs: tuple[RunOfFile, ...]
    """Of each batch that it was tried on, the first of them whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of batches that it takes, of those that were tried; descending."""
        return tuple(sorted({run.num_samples for run in self.runs if run.refused is None}, reverse=True))

    @property
    def refused(self) -> tuple[int, ...]:
        """The same of those that it does not take."""
        return tuple(sorted({run.num_samples for run in self.runs} - {*self.sizes}, reverse=True))
