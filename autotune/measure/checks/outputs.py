"""Compares the outputs of inference with those of the job as it stands, on the same samples in the same batches."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from ...data.loader import Loader
from ...data.own_loader import OwnLoader
from ...data.sameness import mixed
from ...errors import TaskError
from ...nested import samples_in, to_device
from ...plan import Latency
from ...randomness import seed_everything
from ...task import SIGNATURES, Task
from ...techniques.batch import Batch
from ...techniques.support.replica import within
from ...training.apply_plan import build_loader
from ...training.forward.inference import Inference
from ..measurement import MeasureOptions, Parity
from .quality import evaluate, look
from .scores import Judged
from .split import Split, autocast_seen

_MOST_VALUES = 2**17
"""Numbers that are kept of one batch's outputs, drawn by chance but the same each time, and as many of each sample."""


NO_LIMIT = sys.float_info.max
"""A tolerance that all numbers are within but NaN and infinity."""
_HUGE = 1e30
"""From here on a number is as good as infinite: what masks scores by a type's least number."""
_MASKS, _ABOVE = 1e4, 100.0
"""Numbers from here on, and so many times larger than all smaller ones of their sample, are held against each other
alone: -1e9 in masked places hides all else."""
_PLAIN = (str, bytes, bool, int, type(None))
"""Of these, outputs are equal or are not."""


@dataclass(frozen=True)
class _Output:
    """One tensor of a batch's outputs, or one plain value."""

    place: str
    """Where it lies: ``['logits'][0]``."""
    kind: str
    """``float``, ``complex``, ``int``, or a plain value's type: widths do not count."""
    shape: tuple[int, ...]
    num_odd: int
    """Numbers of it that are NaN, infinite or huge."""
    values: Tensor
    """Some of its numbers, or all, (rows, numbers): of each sample as many, where its first dimension is samples. In
    float64, where huge ones are infinite, or int64."""
    text: str = ""
    """A plain value."""


def latency_of(seconds: Sequence[float]) -> Latency | None:
    """Of some batches; None of none."""
    if not seconds:
        return None
    ranked = sorted(seconds)
    return Latency(median_s=ranked[len(ranked) // 2], p95_s=ranked[math.ceil(0.95 * len(ranked)) - 1])


def measure_forward(task: Task, model: nn.Module, samples: Sequence[Any], device: torch.device) -> Split:
    """Run ``infer`` on a batch, twice: its speed.

    Args:
        task: for inference.
        model: on the device, without techniques.
        samples: of the dataset, at least one.
        device: where the model is.

    Raises:
        TaskError: it returns no tensor, or what cannot be compared.
        Exception: whatever it raises.
    """
    seed_everything(0)
    batch = to_device((task.collate or default_collate)(list(samples)), device)
    with torch.inference_mode(), autocast_seen(device.type) as seen:
        outputs = task.infer(model, batch)
    try:
        list(_outputs(outputs, len(samples)))
    except TaskError as error:
        raise TaskError(f"{task.source or 'task'}: {error}") from None
    if not any(isinstance(leaf, Tensor | np.ndarray) for _, leaf in parts_of(outputs)):
        raise TaskError(
            f"{task.source or 'task'}: infer returned no tensor, but {type(outputs).__name__}. "
            f"Wanted: {SIGNATURES['infer']}."
        )
    began_s = perf_counter()
    with torch.inference_mode():
        task.infer(model, batch)
    return Split(0.0, None, len(samples) / (perf_counter() - began_s), seen.turned_on)


def compare_outputs(training: Inference, task: Task, options: MeasureOptions) -> Parity:
    """The outputs of one batch, held against the reference's; where the task's ``evaluate`` judges, the quality of the
    model without training, beside the outputs' structure and what is NaN or infinite. Of the reference it is looked at
    whether ``evaluate`` sees the model.

    The batch is of the same samples whatever the plan's batch, so that each sees equal padding. The fast path of
    torch's own transformer layers is off: it writes zeros where a position is padding, which nobody reads.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from.
        options: samples of the batch, the reference's outputs and the tolerance, or its quality and the least.

    Raises:
        TaskError: ``evaluate`` raised, returned no number, changed the model, or does not see it.
        Exception: whatever ``infer`` raises.
    """
    assert options.parity_batch is not None, "the caller sees to it"
    batch = _fixed_batch(training, task, options.parity_batch)
    with without_fast_path():
        outputs = training.infer(batch)
    num_samples, said = samples_in(batch), _judged(training, task, options.looks) if options.judges else {}
    quality = said.get("quality")
    if options.reference_outputs is None:
        unknown = "its outputs cannot be compared: those of the job as it stands are not known"
        packed = packed_outputs(outputs, num_samples)
        return Parity(losses=(), outputs=packed, unlike=unknown if options.must_compare else None, **said)
    if quality is None:
        return held_against(outputs, num_samples, options.reference_outputs, options.tolerance)
    found = held_against(outputs, num_samples, options.reference_outputs, NO_LIMIT)
    unlike = found.unlike
    if unlike is None and options.least_quality is not None and quality < options.least_quality:
        unlike = (
            f"its quality is {quality:.6g}, the reference's {options.reference_quality:.6g}: at least "
            f"{options.least_quality:.6g} is wanted. --max-quality-drop allows less"
        )
    compared = found.compared if found.unlike is not None else "quality"
    return found.model_copy(update={**said, "unlike": unlike, "compared": compared})


def packed_outputs(outputs: Any, num_samples: int) -> str:
    """What outputs of a batch are held against later: some of their numbers, as text.

    Raises:
        TaskError: a part of them is nothing that can be compared.
    """
    return _packed([*_outputs(outputs, num_samples)])


def held_against(
    outputs: Any, num_samples: int, packed: str, tolerance: float, advice: str = "--tolerance allows more"
) -> Parity:
    """Outputs of a batch beside those of the same batch, of :func:`packed_outputs`.

    Args:
        outputs: nested.
        num_samples: of the batch.
        packed: the reference's.
        tolerance: how far each sample's may be, as a share of the reference's norm.
        advice: what to do where one is farther.

    Raises:
        TaskError: a part of them is nothing that can be compared.
    """
    found, reference = [*_outputs(outputs, num_samples)], _unpacked(packed)
    if (reason := _other_structure(found, reference)) is not None:
        return Parity(losses=(), unlike=reason, compared="outputs")
    differences = [(_difference(*pair), pair[1]) for pair in zip(found, reference, strict=True)]
    deviation, worst = max(differences, key=lambda one: one[0], default=(0.0, None))
    reason = None
    if worst is not None and deviation > tolerance:
        reason = (
            f"its outputs{worst.place} are NaN or infinite elsewhere than the reference's"
            if math.isinf(deviation)
            else f"its outputs{worst.place} differ by {deviation:.2%}: of the reference's, at most {tolerance:.2%} is "
            f"allowed. {advice}"
        )
    return Parity(losses=(), deviation=0.0 if math.isinf(deviation) else deviation, unlike=reason, compared="outputs")


def _judged(training: Inference, task: Task, looks: bool) -> dict[str, Any]:
    """What ``evaluate`` says of the model with the plan, computed as ``infer`` is: what a parity has of it."""
    model = within(training.model)

    def judge() -> Judged:
        context = training.settings.forward_context(training.device.type)
        return evaluate(task, model, training.evaluation_batch, context)

    found = judge()
    noise = look(task, model, judge, is_suspect=True) if looks else None
    return {"quality": found.value, "quality_error": found.error, "quality_noise": noise}


def _fixed_batch(training: Inference, task: Task, num_samples: int) -> Any:
    """From all over a map-style dataset; the first of another."""
    spec = training.loader.spec
    loader: Loader = build_loader(
        task, dataclasses.replace(spec, options={}, lengths=None), Batch(micro=num_samples), ranks=training.loader.ranks
    )
    if isinstance(spec.dataset, IterableDataset | OwnLoader):
        return next(iter(loader))
    places = mixed(len(spec.dataset))
    return loader.move(loader.batch_of(places[:num_samples]))


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Torch's transformer layers compute operation by operation."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


def parts_of(nested: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What outputs hold, and where."""
    if isinstance(nested, Tensor):
        yield place, nested
    elif isinstance(nested, Mapping):
        for key, value in nested.items():
            yield from parts_of(value, f"{place}[{key!r}]")
    elif isinstance(nested, tuple | list):
        for number, value in enumerate(nested):
            yield from parts_of(value, f"{place}[{number}]")
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        for field in dataclasses.fields(nested):
            yield from parts_of(getattr(nested, field.name), f"{place}.{field.name}")
    else:
        yield place, nested


def _outputs(nested: Any, num_samples: int) -> Iterator[_Output]:
    """
    Raises:
        TaskError: a part of them is nothing that can be compared.
    """
    leaves = [(place, _as_tensor(leaf)) for place, leaf in parts_of(nested)]
    num_each = _MOST_VALUES // max(1, sum(isinstance(leaf, Tensor) for _, leaf in leaves))
    for place, leaf in leaves:
        if isinstance(leaf, _PLAIN):
            yield _Output(place, type(leaf).__name__, (), 0, torch.empty(0), repr(leaf))
            continue
        if not isinstance(leaf, Tensor):
            raise TaskError(
                f"infer's outputs{place} are {type(leaf).__name__}, which cannot be compared. Return tensors, arrays, "
                "numbers and text, nested in dicts, lists, tuples and dataclasses."
            )
        if leaf.layout is not torch.strided:
            leaf = leaf.to_dense()
        kind = "float" if leaf.is_floating_point() else "complex" if leaf.is_complex() else "int"
        shape, numbers = tuple(leaf.shape), leaf.detach().cpu()
        numbers = torch.view_as_real(numbers) if kind == "complex" else numbers
        rows = numbers.reshape(_num_rows(shape, num_samples), -1)
        some = max(1, num_each // max(1, len(rows)))
        if rows.shape[1] > some:
            rows = rows[:, torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))[:some]]
        if kind == "int":
            yield _Output(place, kind, shape, 0, rows.to(torch.int64))
            continue
        rows = rows.double()
        rows = torch.where(rows.abs() < _HUGE, rows, rows * math.inf)
        yield _Output(place, kind, shape, int((~(numbers.abs() < _HUGE)).sum()), rows)


def _as_tensor(leaf: Any) -> Any:
    """Arrays and floats as tensors, arrays of text as plain values; the rest as it is."""
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "US":
        return repr(leaf.tolist())
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(np.array(leaf))
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else leaf


def _num_rows(shape: Sequence[int], num_samples: int) -> int:
    """Samples in a tensor: its first dimension, where that is theirs."""
    return shape[0] if shape and shape[0] == num_samples and 0 not in shape else 1


def _other_structure(outputs: Sequence[_Output], reference: Sequence[_Output]) -> str | None:
    """In what outputs are built otherwise, in words."""
    places, theirs = [one.place for one in outputs], [one.place for one in reference]
    if places != theirs:
        missing = [place for place in theirs if place not in places]
        more = [place for place in places if place not in theirs]
        what = (
            f"they lack {', '.join(missing[:3])}" if missing else f"they have {', '.join(more[:3]) or 'another order'}"
        )
        return f"its outputs are built otherwise than the reference's: {what}"
    for one, other in zip(outputs, reference, strict=True):
        if (one.kind, one.shape) != (other.kind, other.shape):
            return (
                f"its outputs{one.place} are {one.kind} of {list(one.shape)}, and the reference's {other.kind} of "
                f"{list(other.shape)}"
            )
    return None


def _difference(one: _Output, other: _Output) -> float:
    """The largest over samples: of floats, the distance over the reference's norm; of integers, the share that differs;
    of a plain value, whether it does. Infinite where one is NaN or infinite and the other is not so."""
    mine, theirs = one.values, other.values
    if one.text != other.text:
        return 1.0
    if not theirs.numel():
        return 0.0
    if one.kind == "int":
        return float((mine != theirs).double().mean(1).max())
    is_odd = ~torch.isfinite(theirs)
    alike = torch.equal(mine[is_odd].nan_to_num(nan=0.5), theirs[is_odd].nan_to_num(nan=0.5))
    if one.num_odd != other.num_odd or not alike or not bool(torch.isfinite(mine[~is_odd]).all()):
        return math.inf
    mine, theirs = (each.masked_fill(is_odd, 0.0) for each in (mine, theirs))
    size = theirs.abs()
    most = size.masked_fill(size >= _MASKS, 0.0).amax(1, keepdim=True)
    is_mask = size >= (_ABOVE * most).clamp_min(_MASKS)
    parts = (tuple(each.masked_fill(left_out, 0.0) for each in (mine, theirs)) for left_out in (is_mask, ~is_mask))
    return max(_distance(*part) for part in parts)


def _distance(mine: Tensor, theirs: Tensor) -> float:
    """The largest over rows of the distance over the reference's norm. A sample whose outputs are nearly nothing beside
    the others' is held against theirs."""
    norms = theirs.norm(dim=1)
    if not float(norms.max()):
        return float(bool(mine.any()))
    return float(((mine - theirs).norm(dim=1) / norms.clamp_min(float(norms.mean()) / 100)).max())


def _packed(outputs: Sequence[_Output]) -> str:
    """As text: JSON, with the numbers as float32 or int64, compressed, base64."""
    rows = []
    for one in outputs:
        numbers = one.values if one.kind == "int" else one.values.float()
        text = base64.b64encode(numbers.numpy().tobytes()).decode()
        rows.append([one.place, one.kind, one.shape, one.num_odd, len(numbers), text, one.text])
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def _unpacked(packed: str) -> list[_Output]:
    found = []
    for place, kind, shape, num_odd, num_rows, values, text in json.loads(zlib.decompress(base64.b64decode(packed))):
        numbers = np.frombuffer(base64.b64decode(values), dtype=np.int64 if kind == "int" else np.float32)
        rows = torch.from_numpy(numbers.copy()).reshape(num_rows, -1 if num_rows else 0)
        found.append(_Output(place, kind, tuple(shape), num_odd, rows if kind == "int" else rows.double(), text))
    return found
