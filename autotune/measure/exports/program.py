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

from ...data.loader import EMPTY, Loader
from ...data.own_loader import OwnLoader
from ...data.sameness import mixed
from ...errors import Caught, PlanError, TaskError, first_line
from ...nested import dense_parts, mapped, rows_of, samples_in, tensors_in
from ...plan import Plan
from ...task import Task
from ...techniques import Settings
from ...techniques.support.bits.frozen_weight import FrozenWeight
from ...training.apply_plan import apply
from ...training.forward.inference import Inference
from ..checks.outputs import NO_LIMIT, held_against, packed_outputs, parts_of, without_fast_path
from ..checks.quality import bits_of
from .onnx_format import guards_of, unused, write_onnx
from .types import Dimension, ExportedFile, ExportOptions, RunOfFile, most_from_plan

CHECKED, FOUND = "checked.pt", "found.json"
"""Files between this process and the one that reads the file back."""
_ALIKE = 0.001
"""How far a model's outputs may differ from run to run."""


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
        TaskError: a batch or the outputs hold something else than tensors, ``infer`` is random, changes the model or
            cannot be traced, or what was written cannot be read back.
        PlanError: the format cannot hold the plan.
        Exception: whatever the task raises.
    """
    note("running the job as it stands")
    stock = plan.model_copy(update={"settings": Settings(batch=plan.settings.batch)})
    reference = _applied(stock, task, seed)
    batches = [*_batches(reference.loader)]
    if not batches:
        raise TaskError(f"{_source(task)}: {EMPTY}")
    inputs = [_plain(batch, "a batch", task) for batch in batches]
    expected = {"reference": _packed(reference, batches, task)[0]}
    del reference
    note("running the plan's model")
    applied = _applied(plan, task, seed)
    expected["plan"], like = _packed(applied, batches, task)
    _check_same_again(applied, batches[0], expected["plan"][0], task)
    del applied
    kept = plan.settings.in_file(options.to)
    applied = _applied(plan.model_copy(update={"settings": kept}), task, seed)
    _check_no_codes(applied, task)
    note("tracing")
    largest = max(range(len(batches)), key=lambda number: samples_in(batches[number]))
    infers = _Infers(applied, task, copy.copy(batches[largest]))
    program = _traced(infers, mapped(inputs[largest], torch.clone), _open_shapes(inputs, largest), task)
    taken: set[str] = set()
    names = _names(inputs[largest], "batch", taken), _names(like, "output", taken)
    note("writing")
    places = dict(zip(names[0], (f"L['batch']{place}" for place, _ in parts_of(inputs[largest])), strict=True))
    if options.to == "onnx":
        write_onnx(program, options.file, places, names[1], _source(task))
    else:
        with open(options.file, "wb") as file:
            torch.export.save(program, file)
    shapes, conditions = _shapes(program), [_named(guard, places) for guard in guards_of(program) or ()]
    del program, applied, infers
    note("reading back")
    own = plan.inference.tolerance if plan.inference is not None else None
    tolerances = {"plan": most_from_plan(plan), "reference": NO_LIMIT if own is None else own}
    asked = {"batches": inputs, "like": like, "names": names, "tolerances": tolerances, **expected}
    runs = _read_back(options, asked, ", ".join(one.describe() for one in kept.chosen()), task)
    return ExportedFile(
        num_bytes=os.stat(options.file).st_size,
        inputs=names[0],
        outputs=names[1],
        shapes=shapes,
        conditions=tuple(conditions),
        given=_as_code(inputs[largest], iter(names[0])),
        runs=runs,
    )


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


def _source(task: Task) -> str:
    return task.source or "task"


def _batches(loader: Loader) -> Iterator[Any]:
    """The first two, a smaller one as an epoch ends with, and a single sample; of one sample, two as well. Last, from
    all over the dataset, or from its end where those go into no batch: they may be of other lengths."""
    dataset, most = loader.spec.dataset, loader.batch.micro
    if isinstance(dataset, IterableDataset | OwnLoader):
        found = [*islice(loader, 2)]
        yield from found
        if not found:
            return
        first, num_samples = found[0], samples_in(found[0])
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
    for some in (mixed(length)[:most], range(length - most, length)):
        with Caught(MemoryError, torch.OutOfMemoryError) as raised:
            last = loader.move(loader.batch_of(some))
        if raised.error is None:
            yield last
            return


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
        f"{_source(task)}: a file takes and returns tensors alone, nested in dicts, lists, tuples and "
        f"dataclasses, but {what} holds {type(nested).__name__}. Leave it out of it, or make it a tensor."
    )


def _outputs(inference: Inference, batch: Any, task: Task) -> Any:
    """What ``infer`` does to a batch stays with it."""
    with without_fast_path():
        return _plain(inference.infer(mapped(batch, torch.clone)), "infer", task)


def _packed(inference: Inference, batches: list[Any], task: Task) -> tuple[list[str], Any]:
    """The outputs of each batch, to compare with, and how they are nested."""
    packed = []
    for batch in batches:
        outputs = _outputs(inference, batch, task)
        packed.append(packed_outputs(outputs, samples_in(batch)))
    return packed, mapped(outputs, lambda _: torch.empty(0))


def _check_same_again(inference: Inference, batch: Any, packed: str, task: Task) -> None:
    """
    Raises:
        TaskError: another run changes the model, or has other outputs.
    """
    before = _bits_by_name(inference.model)
    outputs = _outputs(inference, batch, task)
    if changed := [name for name, bits in _bits_by_name(inference.model).items() if before.get(name) != bits]:
        raise TaskError(
            f"{_source(task)}: infer changes the model: {changed[0]} is another after it. A file keeps nothing "
            "from one batch to the next. Leave the change out of infer."
        )
    found = held_against(outputs, samples_in(batch), packed, _ALIKE, "No file can be held against it")
    if found.unlike is not None:
        raise TaskError(
            f"{_source(task)}: infer is random: for one batch, run twice, {found.unlike}. "
            "Leave out what draws numbers, such as dropout in train mode."
        )


def _bits_by_name(model: nn.Module) -> dict[str, int]:
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: sum(bits_of(part) for part in dense_parts(one)) for name, one in held}


def _check_no_codes(inference: Inference, task: Task) -> None:
    """
    Raises:
        PlanError: a weight is kept as codes.
    """
    coded = [name for name, one in inference.model.named_parameters() if isinstance(one, FrozenWeight)]
    if coded:
        raise PlanError(
            f"{_source(task)}: the plan keeps {coded[0]} as codes ({inference.settings.quantization.describe()}), "
            "which no file holds: only this package reads them. Use a plan with quantization kind: int8, or none."
        )


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
        f"{_source(task)}: torch.export cannot trace infer: {first_line(raised.take())}\n"
        "What is computed must not depend on values of tensors, nor go through other libraries."
    )


def _read_back(options: ExportOptions, asked: Mapping[str, Any], has: str, task: Task) -> tuple[RunOfFile, ...]:
    """Run the file in a process that knows nothing of the task.

    Raises:
        TaskError: it cannot be read, does not run on the whole batch, or ends the process.
    """
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.save(asked, Path(folder) / CHECKED)
        command = [sys.executable, "-P", "-m", f"{__package__}.reload", options.file, options.to, folder]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        found = Path(folder) / FOUND
        said = json.loads(found.read_text()) if found.exists() else None
    if said is None:
        raise TaskError(
            f"{_source(task)}: the file was written, but the process that read it back ended with "
            f"{ended.returncode}: {' '.join(ended.stderr.split()[-40:])}"
        )
    runs = tuple(RunOfFile.model_validate(run) for run in said["runs"])
    if (refused := said["refused"] or runs[0].refused) is not None:
        runtime, other = ("onnxruntime", "pt2") if options.to == "onnx" else ("torch", "onnx")
        of_plan = f"Of the plan it has: {has}. " if has else ""
        raise PlanError(
            f"{_source(task)}: the file was written, but {runtime} does not run it: {refused}\n{of_plan}"
            f"Use --to {other}, or a plan with other settings."
        )
    return runs


def _names(nested: Any, what: str, taken: set[str]) -> list[str]:
    """Of its tensors: ``logits``, ``output_0``; none of those that are taken, which these join."""
    found = []
    for place, _ in parts_of(nested):
        name = re.sub(r"\W+", "_", place).strip("_")
        if not name[:1].isalpha() or (name in taken and what == "output"):
            name = f"{what}_{name}".rstrip("_")
        found.append(unused(name, taken))
        taken.add(found[-1])
    return found


def _as_code(nested: Any, names: Iterator[str]) -> str:
    """A batch of plain containers, as Python has it: ``{'x': x}``."""
    if isinstance(nested, dict):
        return "{" + ", ".join(f"{key!r}: {_as_code(value, names)}" for key, value in nested.items()) + "}"
    if isinstance(nested, list):
        return "[" + ", ".join(_as_code(value, names) for value in nested) + "]"
    if isinstance(nested, tuple):
        return "(" + "".join(f"{_as_code(value, names)}, " for value in nested).rstrip() + ")"
    return next(names)


def _named(guard: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        guard = guard.replace(f"{place}.size()", f"{name}.shape")
    return guard


def _shapes(program: torch.export.ExportedProgram) -> tuple[tuple[Dimension, ...], ...]:
    """Of each input, the sizes that the trace is right for, as far as each is bounded by itself."""
    ranges = {str(symbol): found for symbol, found in program.range_constraints.items()}
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}

    def of_size(size: int | torch.SymInt) -> Dimension:
        if str(size).isdecimal():  # a symbol that the code has fixed is one
            return Dimension(least=int(str(size)), most=int(str(size)))
        if (found := ranges.get(str(size))) is None:
            return Dimension()
        is_bounded = bool(found.upper < sys.maxsize // 2)
        # Torch leaves 1 out of every range, and takes it.
        return Dimension(
            least=int(found.lower) if found.lower > 2 else 1, most=int(found.upper) if is_bounded else None
        )

    return tuple(tuple(map(of_size, values[name].shape)) for name in program.graph_signature.user_inputs)
