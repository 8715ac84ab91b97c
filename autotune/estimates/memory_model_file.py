"""``StoredModel``: the traced steps of a memory model, as JSON and back."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..measure.profiling.allocations import Allocation, Span, Trace
from .tracing.fake_step import TracedStep
from .tracing.work import Work
from .workspace.cpu_kernels import scratch_named
from .workspace.kernel import Kernel, Like


@dataclass(frozen=True)
class StoredModel:
    """A memory model as it is kept on disk."""

    batches: tuple[int, ...]
    """Fitted batch sizes; empty if every batch is traced."""
    steps: dict[int, TracedStep | str]
    """Traced steps by batch, fitted ones and others; or the reason why there can be none."""
    sources: dict[str, str]
    """The user's source files that were loaded after tracing, each with a hash of its content."""


def packed(key: str, memory_model: StoredModel) -> bytes:
    """A memory model under its key, as text.

    Raises:
        TypeError: an operation has an argument that JSON cannot say.
    """
    steps = {batch: step if isinstance(step, str) else _step_rows(step) for batch, step in memory_model.steps.items()}
    rows = {"key": key, "sources": memory_model.sources, "batches": memory_model.batches, "steps": steps}
    text = json.dumps(rows, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=1, mtime=0)


def load_memory_model(path: Path, key: str) -> StoredModel | None:
    """The memory model in a file; None where the file is missing, of another key, or not readable."""
    try:
        read = json.loads(gzip.decompress(path.read_bytes()))
        if read["key"] != key:
            return None
        batches = tuple(read["batches"])
        steps = {int(batch): step if isinstance(step, str) else _step(step) for batch, step in read["steps"].items()}
        memory_model = StoredModel(batches, steps, dict(read["sources"]))
        return memory_model if len(batches) in (0, 3) and set(batches) <= steps.keys() else None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _step_rows(step: TracedStep) -> dict[str, Any]:
    return {
        "allocations": [[*vars(one).values()] for one in step.trace.allocations],
        "spans": [[*vars(span).values()] for span in step.trace.spans],
        "num_moments": step.trace.num_moments,
        "kernels": [
            [one.scratch.__name__, _plain(one.results), _plain(one.args), _plain(one.kwargs)] for one in step.kernels
        ],
        "work": [[*place, *work] for place, work in step.work.items()],
    }


def _step(rows: dict[str, Any]) -> TracedStep:
    allocations = tuple(Allocation(*row) for row in rows["allocations"])
    trace = Trace(allocations, tuple(Span(*row) for row in rows["spans"]), rows["num_moments"])
    kernels = tuple(Kernel(scratch_named(name), *map(_tree, trees)) for name, *trees in rows["kernels"])
    return TracedStep(trace, kernels, {(module, phase): Work(*work) for module, phase, *work in rows["work"]})


def _plain(tree: Any) -> Any:
    """A value as JSON can hold it: what JSON has no word for becomes an object with one key."""
    match tree:
        case Like():
            return {"like": [tree.size, tree.stride, str(tree.dtype)]}
        case torch.dtype():
            return {"dtype": str(tree)}
        case tuple():
            return {"tuple": [*map(_plain, tree)]}
        case list():
            return [*map(_plain, tree)]
        case dict():
            return {"dict": {key: _plain(value) for key, value in tree.items()}}
    return tree


def _tree(plain: Any) -> Any:
    if isinstance(plain, list):
        return [*map(_tree, plain)]
    if not isinstance(plain, dict):
        return plain
    (kind, value), *_ = plain.items()
    match kind:
        case "like":
            size, stride, dtype = value
            return Like(tuple(size), tuple(stride), _dtype(dtype))
        case "dtype":
            return _dtype(value)
        case "tuple":
            return tuple(map(_tree, value))
    return {key: _tree(one) for key, one in value.items()}


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found
