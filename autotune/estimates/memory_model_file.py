"""``StoredModel``: the traced steps of a memory model, as JSON and back."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measure.profiling.allocations import Allocation, Span, Trace
from .tracing.fake_step import TracedStep
from .tracing.work import Work


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
    """A memory model under its key, as text."""
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
        "work": [[*place, *work] for place, work in step.work.items()],
        "possible_bytes": step.possible_bytes,
        "host_bytes": step.host_bytes,
        "host_kept_bytes": step.host_kept_bytes,
    }


def _step(rows: dict[str, Any]) -> TracedStep:
    allocations = tuple(Allocation(*row) for row in rows["allocations"])
    trace = Trace(allocations, tuple(Span(*row) for row in rows["spans"]), rows["num_moments"])
    work = {(module, phase): Work(*work) for module, phase, *work in rows["work"]}
    on_host = rows.get("host_bytes", 0), rows.get("host_kept_bytes", 0)
    return TracedStep(trace, work, rows["possible_bytes"], *on_host)
