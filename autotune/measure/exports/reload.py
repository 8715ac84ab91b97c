"""Reads a file back that :mod:`.program` wrote, in a process of its own, and holds its outputs against those expected.

``python -m autotune.measure.exports.reload FILE KIND FOLDER``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import Caught, first_line
from ...nested import mapped, samples_in, tensors_in
from ..checks.outputs import held_against
from .program import CHECKED, FOUND
from .types import RunOfFile

_ADVICE = {
    "plan": "The runtime computes otherwise than the plan: write the other format",
    "reference": "Search with a larger --tolerance",
}
"""Where outputs differ by more than is allowed, by what they are held against."""


def check(file: Path, to: str, folder: Path) -> None:
    """Run the file on the batches in ``folder``, and write there what came of it."""
    asked = torch.load(folder / CHECKED, weights_only=True, map_location="cpu" if to == "onnx" else None)
    refused, runs = None, []
    with Caught() as raised:
        run = _loaded(file, to, asked)
        for number in range(len(asked["batches"])):
            runs.append(_run(run, asked, number))
    if raised.error is not None:
        refused = first_line(raised.take())
    found = {"refused": refused, "runs": [one.model_dump(mode="json") for one in runs]}
    (folder / FOUND).write_text(json.dumps(found))


def _loaded(file: Path, to: str, asked: dict[str, Any]) -> Callable[[Any], Any]:
    """What computes a batch's outputs."""
    if to == "pt2":
        with file.open("rb") as opened:
            module: Callable[[Any], Any] = torch.export.load(opened).module()
        return module
    import onnxruntime

    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    inputs, outputs = asked["names"]
    wanted = {one.name for one in session.get_inputs()}  # an input that is not used may have gone

    def run(batch: Any) -> Any:
        given = dict(zip(inputs, tensors_in(batch), strict=True))
        found = iter(session.run(outputs, {name: one.numpy() for name, one in given.items() if name in wanted}))
        return mapped(asked["like"], lambda _: torch.from_numpy(next(found)))

    return run


def _run(run: Callable[[Any], Any], asked: dict[str, Any], number: int) -> RunOfFile:
    """One batch; that it does not run is an answer, too."""
    batch = asked["batches"][number]
    num_samples, shapes = samples_in(batch), tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
    with Caught() as raised, torch.no_grad():
        outputs = run(batch)
    if raised.error is not None:
        return RunOfFile(num_samples=num_samples, shapes=shapes, refused=first_line(raised.take()))
    beside = {
        whose: held_against(outputs, num_samples, asked[whose][number], asked["tolerances"][whose], advice)
        for whose, advice in _ADVICE.items()
    }
    unlike = [f"beside the {whose}'s: {one.unlike}" for whose, one in beside.items() if one.unlike is not None]
    return RunOfFile(
        num_samples=num_samples,
        shapes=shapes,
        from_plan=beside["plan"].deviation or 0.0,
        from_reference=beside["reference"].deviation or 0.0,
        unlike=unlike[0] if unlike else None,
    )


if __name__ == "__main__":
    check(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
