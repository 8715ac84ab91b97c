"""``KeptLaw``: the steps that a law was made of, as JSON and back."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..measure.allocations import Allocation, Span, Trace
from .kernels import Kernel, Like
from .rehearsal import Rehearsed
from .scratch import scratch_named
from .work import Work

__all__ = ["KeptLaw", "load_law", "packed"]


@dataclass(frozen=True)
class KeptLaw:
    """What there is to know of a law."""

    batches: tuple[int, ...]
    """Three that it goes by; none where each that is asked for is traced."""
    steps: dict[int, Rehearsed | str]
    """By their batch, these and others; or why there can be none."""
    sources: dict[str, str]
    """The user's files that were loaded once it was traced, and what was in them."""


def packed(key: str, law: KeptLaw) -> bytes:
    """A law under a key.

    Raises:
        TypeError: an operation has an argument that JSON cannot say.
    """
    steps = {batch: step if isinstance(step, str) else _step_rows(step) for batch, step in law.steps.items()}
    rows = {"key": key, "sources": law.sources, "batches": law.batches, "steps": steps}
    text = json.dumps(rows, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=1, mtime=0)


def load_law(path: Path, key: str) -> KeptLaw | None:
    """The law in a file; None where there is none, or that of another key, or anything else."""
    try:
        read = json.loads(gzip.decompress(path.read_bytes()))
        if read["key"] != key:
            return None
        batches = tuple(read["batches"])
        steps = {int(batch): step if isinstance(step, str) else _step(step) for batch, step in read["steps"].items()}
        law = KeptLaw(batches, steps, dict(read["sources"]))
        return law if len(batches) in (0, 3) and set(batches) <= steps.keys() else None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _step_rows(step: Rehearsed) -> dict[str, Any]:
    return {
        "allocations": [[*vars(one).values()] for one in step.trace.allocations],
        "spans": [[*vars(span).values()] for span in step.trace.spans],
        "num_moments": step.trace.num_moments,
        "kernels": [
            [one.scratch.__name__, _plain(one.results), _plain(one.args), _plain(one.kwargs)] for one in step.kernels
        ],
        "work": [[*place, *work] for place, work in step.work.items()],
    }


def _step(rows: dict[str, Any]) -> Rehearsed:
    allocations = tuple(Allocation(*row) for row in rows["allocations"])
    trace = Trace(allocations, tuple(Span(*row) for row in rows["spans"]), rows["num_moments"])
    kernels = tuple(Kernel(scratch_named(name), *map(_tree, trees)) for name, *trees in rows["kernels"])
    return Rehearsed(trace, kernels, {(module, phase): Work(*work) for module, phase, *work in rows["work"]})


def _plain(tree: Any) -> Any:
    """As JSON can say it: what it has no word for is an object of one key."""
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
