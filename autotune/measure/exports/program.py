"""``export``: what a plan for inference computes, as a file that needs neither the task nor this package."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ...data.loader import Loader
from ...data.own_loader import OwnLoader
from ...errors import Caught, PlanError, TaskError
from ...nested import mapped, rows_of, samples_in, tensors_in
from ...plan import TOLERANCE, Plan
from ...task import Task
from ...techniques import Settings
from ...training.apply_plan import apply
from ...training.forward.inference import Inference
from ..checks.outputs import NO_LIMIT, packed_outputs, parts_of, without_fast_path
from .types import ExportedFile, ExportOptions, RunOfFile

CHECKED, FOUND = "checked.pt", "found.json"
"""Files between this process and the one that reads the file back."""
_MOST_BYTES = 2**31
"""Of an ONNX file: protobuf holds no more."""


def export(task: Task, plan: Plan, options: ExportOptions, seed: int, note: Callable[[str], None]) -> ExportedFile:
    """Write a file, and run it in a process of its own on the task's first batches.

    The batch dimension, and whatever else differs between these batches, is left open as far as torch.export can.

    Args:
        task: of the plan, for inference.
        plan: for inference.
        options: the file.
        seed: of everything random before the model is built.
        note: is told what is done.

    Raises:
        TaskError: a batch or the outputs hold something else than tensors, ``infer`` cannot be traced, or what was
            written cannot be read back.
        PlanError: the format cannot hold the plan.
        Exception: whatever the task raises.
    """
    note("running the job as it stands")
    stock = plan.model_copy(update={"settings": Settings(batch=plan.settings.batch)})
    reference = _applied(stock, task, seed)
    batches = [*_batches(reference.loader)]
    inputs = [_plain(batch, "a batch", task) for batch in batches]
    expected = {"reference": [*_packed(reference, batches, task)]}
    del reference
    note("running the plan's model")
    applied = _applied(plan, task, seed)
    expected["plan"] = [*_packed(applied, batches, task)]
    del applied
    kept = plan.settings.in_file(options.to)
    applied = _applied(plan.model_copy(update={"settings": kept}), task, seed)
    note("tracing")
    largest = max(range(len(batches)), key=lambda number: samples_in(batches[number]))
    infers = _Infers(applied, task, copy.copy(batches[largest]))
    program = _traced(infers, inputs[largest], _open_shapes(inputs, largest), task)
    like = mapped(infers(inputs[largest]), lambda tensor: tensor.new_empty(0))
    names = _names(inputs[largest], "batch"), _names(like, "output")
    names = names[0], [f"output_{name}" if name in names[0] else name for name in names[1]]
    note("writing")
    _write(program, options, *names, task)
    del program, applied, infers
    note("reading back")
    own = plan.inference.tolerance if plan.inference is not None else None
    tolerances = {"plan": TOLERANCE, "reference": NO_LIMIT} if own is None else {"plan": own, "reference": own}
    asked = {"batches": inputs, "like": like, "names": names, "tolerances": tolerances, **expected}
    runs = _read_back(options, asked, ", ".join(one.describe() for one in kept.chosen()), task)
    return ExportedFile(num_bytes=os.stat(options.file).st_size, inputs=names[0], outputs=names[1], runs=runs)


class _Infers(nn.Module):
    """``infer`` as a module: of plain batches, plain outputs."""

    def __init__(self, applied: Inference, task: Task, like: Any) -> None:
        """``like`` is a batch as ``infer`` takes it."""
        super().__init__()
        self.model = applied.model
        self._infer, self._like, self._task = task.infer, like, task
        self._settings, self._kind = applied.settings, applied.device.type
        self.eval()

    def forward(self, batch: Any) -> Any:
        """The outputs for the tensors of a batch."""
        tensors = tensors_in(batch)
        with self._settings.forward_context(self._kind):
            return _plain(self._infer(self.model, mapped(self._like, lambda _: next(tensors))), "infer", self._task)


def _applied(plan: Plan, task: Task, seed: int) -> Inference:
    found = apply(plan, task, seed=seed, enforce=True)
    assert isinstance(found, Inference), "the plan is for it"
    return found


def _batches(loader: Loader) -> Iterator[Any]:
    """The first two, a smaller one as an epoch ends with, and a single sample; of one sample, two as well."""
    dataset, most = loader.spec.dataset, loader.batch.micro
    if isinstance(dataset, IterableDataset | OwnLoader):
        first, *others = islice(loader, 2)
        num_samples = samples_in(first)
        yield from (first, *others)
        for size in {max(1, num_samples // 2), 1} - {num_samples}:
            yield rows_of(first, num_samples, slice(size))
        return
    length = len(dataset)
    most = min(most, length)
    places = [range(most), range(most, min(2 * most, length)), range(length % most or most // 2), range(1), range(2)]
    asked = dict.fromkeys(range(one.start, min(one.stop, length)) for one in places[: 5 if most == 1 else 4])
    for one in asked:
        if one:
            yield loader.move(loader.batch_of(one))


def _plain(nested: Any, what: str, task: Task) -> Any:
    """In dicts, lists and tuples, which every format has.

    Raises:
        TaskError: something in it is no tensor.
    """
    if isinstance(nested, Tensor):
        return nested
    if isinstance(nested, Mapping):
        return {str(key): _plain(value, what, task) for key, value in nested.items()}
    if isinstance(nested, tuple | list):
        kind = list if isinstance(nested, list) else tuple
        return kind(_plain(value, what, task) for value in nested)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        fields = (field.name for field in dataclasses.fields(nested))
        return {name: _plain(getattr(nested, name), what, task) for name in fields}
    raise TaskError(
        f"{task.source or 'task'}: a file takes and returns tensors alone, nested in dicts, lists, tuples and "
        f"dataclasses, but {what} holds {type(nested).__name__}. Leave it out of it, or make it a tensor."
    )


def _packed(inference: Inference, batches: list[Any], task: Task) -> Iterator[str]:
    """The outputs of each batch, to compare with; what ``infer`` does to a batch stays with it."""
    with without_fast_path():
        for batch in batches:
            outputs = inference.infer(mapped(batch, torch.clone))
            yield packed_outputs(_plain(outputs, "infer", task), samples_in(batch))


def _open_shapes(batches: list[Any], largest: int) -> Any:
    """Of each tensor, the dimensions whose sizes differ between batches: torch.export leaves those open that it can."""
    shapes = [[tensor.shape for tensor in tensors_in(batch)] for batch in batches]
    is_alike = len({tuple(map(len, each)) for each in shapes}) == 1
    found = (
        {dim: torch.export.Dim.AUTO for dim, sizes in enumerate(zip(*each, strict=True)) if len({*sizes}) > 1}
        for each in (zip(*shapes, strict=True) if is_alike else ([shape] for shape in shapes[largest]))
    )
    return mapped(batches[largest], lambda _: next(found))  # type: ignore[arg-type, return-value]


def _traced(infers: nn.Module, example: Any, shapes: Any, task: Task) -> torch.export.ExportedProgram:
    """
    Raises:
        TaskError: torch.export cannot: a value decides what is computed, mostly.
    """
    with Caught(MemoryError, torch.OutOfMemoryError, TaskError) as raised, without_fast_path(), torch.no_grad():
        return torch.export.export(infers, (example,), dynamic_shapes={"batch": shapes})
    raise TaskError(
        f"{task.source or 'task'}: torch.export cannot trace infer: {_said(raised.take())}\n"
        "What is computed must not depend on values of tensors, nor go through other libraries."
    )


def _write(
    program: torch.export.ExportedProgram, options: ExportOptions, inputs: list[str], outputs: list[str], task: Task
) -> None:
    """
    Raises:
        PlanError: the format cannot hold it.
        OSError: the file cannot be written.
    """
    if options.to == "pt2":
        with open(options.file, "wb") as file:
            torch.export.save(program, file)
        return
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in([*_held_by(program)])}
    num_bytes = sum(tensor.nbytes for tensor in held.values())
    if num_bytes > _MOST_BYTES:
        raise PlanError(f"--to onnx: a file holds at most 2 GiB, but the model has {num_bytes:,} bytes. Use --to pt2.")
    with Caught(MemoryError, OSError) as raised:
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
            custom_translation_table={torch.ops.aten._int_mm.default: _integer_product},
        )
        assert made is not None, "a program comes back where no file is named"
        made.save(options.file)
    if raised.error is not None:
        raise PlanError(
            f"{task.source or 'task'}: ONNX cannot hold what the plan computes: {_said(raised.take())}\nUse --to pt2."
        )


def _held_by(program: torch.export.ExportedProgram) -> Iterator[Any]:
    yield from program.state_dict.values()
    yield from program.constants.values()


def _integer_product(one: Any, other: Any) -> Any:
    """ONNX's operation for ``torch._int_mm``, which torch 2.13 has none for.

    Source: https://onnx.ai/onnx/operators/onnx__MatMulInteger.html
    """
    from onnxscript import opset18

    return opset18.MatMulInteger(one, other)


def _read_back(options: ExportOptions, asked: Mapping[str, Any], has: str, task: Task) -> tuple[RunOfFile, ...]:
    """Run the file in a process that knows nothing of the task.

    Raises:
        TaskError: it cannot be read, does not run on the whole batch, or ends the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(asked, Path(folder) / CHECKED)
        command = [sys.executable, "-P", "-m", f"{__package__}.reload", options.file, options.to, folder]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        found = Path(folder) / FOUND
        said = json.loads(found.read_text()) if found.exists() else None
    if said is None:
        raise TaskError(
            f"{task.source or 'task'}: the file was written, but the process that read it back ended with "
            f"{ended.returncode}: {' '.join(ended.stderr.split()[-40:])}"
        )
    runs = tuple(RunOfFile.model_validate(run) for run in said["runs"])
    if (refused := said["refused"] or runs[0].refused) is not None:
        runtime, other = ("onnxruntime", "pt2") if options.to == "onnx" else ("torch", "onnx")
        of_plan = f"Of the plan it has: {has}. " if has else ""
        raise PlanError(
            f"{task.source or 'task'}: the file was written, but {runtime} does not run it: {refused}\n{of_plan}"
            f"Use --to {other}, or a plan with other settings."
        )
    return runs


def _names(nested: Any, what: str) -> list[str]:
    """Of its tensors: ``logits``, ``output_0``."""
    found = []
    for place, _ in parts_of(nested):
        name = re.sub(r"\W+", "_", place).strip("_")
        found.append(name if name[:1].isalpha() else f"{what}_{name}".rstrip("_"))
    return found


def _said(error: BaseException) -> str:
    """The first line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
