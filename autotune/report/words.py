"""Settings, outcomes and numbers in words."""

from __future__ import annotations

from ..measure import Measurement
from ..plan import Budget, Speed
from ..techniques import Facts, Settings, Technique
from ..techniques.batch import Batch
from ..techniques.checkpointing import Checkpointing
from ..techniques.data_loading import DataLoading
from ..techniques.layers import Layers
from ..techniques.optimizer import Optimizer
from ..units import MIB, printable
from ..workers import Crashed, Failed, Measured, NonFinite, Outcome, OutOfMemory, TimedOut
from ..workers.traces import first_line

__all__ = [
    "count",
    "outcome_words",
    "over_reference",
    "printable",
    "purpose",
    "rate",
    "remark",
    "roughly",
    "settings_words",
    "size",
    "spread",
    "technique_words",
    "times",
]


def settings_words(settings: Settings, facts: Facts | None = None) -> str:
    """``micro-batch 64 × 4, bf16, checkpoint every 2nd of 12 blocks, channels_last``; the user's own rows are left out.

    Args:
        settings: what to name.
        facts: adds what only the task knows, such as the number of blocks.
    """
    return ", ".join(technique_words(row, facts) for row in settings.techniques() if _is_chosen(row))


def technique_words(technique: Technique, facts: Facts | None = None) -> str:
    """One technique's setting; a technique without words of its own is named with its fields."""
    match technique:
        case Batch():
            return _batch(technique)
        case Layers(kind="exact"):
            return "memory-saving layers"
        case Layers(kind="recompute"):
            return "memory-saving layers that recompute norms"
        case Layers(kind="rounding"):
            return "memory-saving layers with 8-bit derivatives"
        case Checkpointing(kind="blocks" | "chosen"):
            return _checkpointing(technique, facts)
        case DataLoading():
            return _data_loading(technique)
        case Optimizer():
            return f"{technique.kind.replace('_', '-')} optimizer"
    chosen = technique.model_dump(exclude_defaults=True)
    kind = chosen.pop("kind", None)
    rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items())
    return " ".join(filter(None, [str(kind or technique.name.replace("_", " ")), f"({rest})" if rest else ""]))


def purpose(technique: Technique) -> str:
    """What a setting does, in one sentence; the class's own first line where nothing better is known."""
    fields = technique.model_dump()
    known = _PURPOSES.get((technique.name, str(fields.get("kind", fields.get("cache", "")))))
    return known or (type(technique).__doc__ or "").strip().splitlines()[0]


def outcome_words(outcome: Outcome, budget: Budget) -> str:
    """What came of a trial, on one line."""
    said = remark(outcome, budget)
    if isinstance(outcome, Measured):
        measured = outcome.measurement
        figures = f"{rate(measured.samples_per_s.value)} samples/s {spread(measured.samples_per_s)}"
        return f"{figures}, {size(measured.peak.process)}" + (f": {said}" if said else "")
    if isinstance(outcome, OutOfMemory):
        said = f"{said} at {size(outcome.peak_bytes)}"
    message = first_line(getattr(outcome, "message", ""))
    return f"{said}: {message}" if message else f"{said}"


def remark(outcome: Outcome, budget: Budget) -> str | None:
    """Why an outcome is of no use, in a word or two; None where it is."""
    match outcome:
        case Measured(measurement=measured):
            return _why_infeasible(measured, budget)
        case OutOfMemory():
            return "out of memory"
        case TimedOut():
            return f"timed out after {outcome.deadline_s:.0f} s"
        case NonFinite():
            return f"loss not finite at step {outcome.step}"
        case Crashed() | Failed():
            return outcome.kind
        case _:
            return None


def _why_infeasible(measured: Measurement, budget: Budget) -> str | None:
    if not budget.holds(measured.peak.process):
        return "over the budget"
    if measured.leak_bytes_per_step is not None:
        return f"leaks {size(round(measured.leak_bytes_per_step))} a step"
    if measured.parity.strayed_at is not None:
        return f"loss strays at step {measured.parity.strayed_at}"
    return None


def over_reference(measured: Measurement, reference: Measurement) -> str:
    """`` · 2.31x the reference``."""
    return f" · {times(measured.samples_per_s.value / reference.samples_per_s.value)} the reference"


def rate(value: float) -> str:
    """Three digits that mean something: ``12,345``, ``812``, ``81.2``, ``0.812``."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def roughly(seconds: float) -> str:
    """A time that is expected: ``45 s``, ``1.5 min``, ``11 min``, ``2.5 h``."""
    if seconds < 55:
        return f"{max(5 * round(seconds / 5), 5)} s"
    minutes = seconds / 60
    if minutes < 10:
        return f"{round(2 * minutes) / 2:g} min"
    return f"{round(minutes)} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def spread(speed: Speed) -> str:
    """``± 0.8 %``: half the 95 % interval over the value."""
    return f"± {(speed.high - speed.low) / 2 / speed.value * 100:.1f} %"


def times(ratio: float) -> str:
    """``2.31x``."""
    return f"{ratio:.2f}x"


def size(num_bytes: int) -> str:
    """Bytes for people, in three or four digits: ``605 MiB``, ``7.61 GiB``."""
    mib = num_bytes / MIB
    if mib < 1:
        return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"
    if mib < 4096:
        return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"
    return f"{mib / 1024:.2f}".rstrip("0").rstrip(".") + " GiB"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 block``, ``12 blocks``; ``plural`` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _is_chosen(technique: Technique) -> bool:
    return bool(technique.model_dump(exclude_defaults=True))


def _batch(batch: Batch) -> str:
    if batch.accumulate == 1:
        return f"batch {batch.micro}"
    whole = f" (the last smaller, {batch.effective} in all)" if batch.effective else ""
    return f"micro-batch {batch.micro} × {batch.accumulate}{whole}"


def _checkpointing(checkpointing: Checkpointing, facts: Facts | None) -> str:
    blocks = f"{facts.num_blocks} blocks" if facts else "blocks"
    if checkpointing.is_open:
        return f"checkpoint as many of {blocks if facts else 'the blocks'} as it takes"
    if checkpointing.kind == "chosen":
        *before, last = map(str, checkpointing.blocks)
        named = f"blocks {', '.join(before)} and {last}" if before else f"block {last}"
        return f"checkpoint {named}{f' of {facts.num_blocks}' if facts else ''}"
    if checkpointing.every == 1:
        return f"checkpoint all {blocks}"
    suffix = {2: "nd", 3: "rd"}.get(checkpointing.every, "th")
    return f"checkpoint every {checkpointing.every}{suffix} of {blocks if facts else 'the blocks'}"


def _data_loading(loading: DataLoading) -> str:
    details = [f"prefetch {loading.prefetch_factor}"] if loading.prefetch_factor is not None else []
    details += [
        word for word, chosen in (("pinned", loading.pin_memory), ("persistent", loading.persistent_workers)) if chosen
    ]
    what = f"epoch cached in {loading.cache} memory"
    if loading.cache == "none":
        what = "loader" if loading.num_workers is None else count(loading.num_workers, "loader worker")
    return f"{what} ({', '.join(details)})" if details else what


_PURPOSES = {
    ("batch", ""): "Samples in one forward pass, and how many such passes make one optimizer step.",
    ("precision", "fp32"): "Everything computes in the types that it has: no autocast.",
    ("precision", "bf16"): "Matrix products and convolutions compute in bfloat16; parameters stay fp32.",
    ("precision", "fp16"): "Matrix products and convolutions compute in float16, with a loss scaler.",
    ("precision", "tf32"): "Matrix products and convolutions round their inputs to TF32.",
    ("layers", "exact"): "Keeps for backward only what it reads: bits, or nothing, instead of whole tensors.",
    ("layers", "rounding"): "The same, and keeps the derivatives of GELU and SiLU in 8 bits.",
    ("layers", "recompute"): "The same, and computes BatchNorm and ReLU again for the convolution behind them.",
    ("checkpointing", "blocks"): "Keeps only these blocks' inputs and computes their inside again in backward.",
    ("checkpointing", "chosen"): "Keeps only these blocks' inputs and computes their inside again in backward.",
    ("memory_format", "channels_last"): "Stores images channels last (NHWC), which convolutions read faster.",
    ("data_loading", "host"): "Reads the dataset once, when training starts, and keeps it in host memory.",
    ("data_loading", "device"): "Reads the dataset once, when training starts, and keeps it on the device.",
    ("data_loading", "none"): "How many processes load data beside the training, and how far ahead.",
    ("optimizer", "foreach"): "One grouped kernel per operation of the update; the same arithmetic.",
    ("optimizer", "fused"): "The whole update in one kernel; the same arithmetic.",
    ("optimizer", "for_loop"): "One parameter at a time: no temporaries the size of the model.",
    ("allocator", "tcmalloc"): "Preloads tcmalloc for malloc: less memory, the same peak each time.",
    ("allocator", "jemalloc"): "Preloads jemalloc for malloc: less memory.",
    ("allocator", "expandable_segments"): "Lets the CUDA allocator grow its segments: less fragmentation.",
}
