"""How well the peak is known without running: predicted against measured tensor bytes of a steady optimizer step.

Measured is what is there when the step begins (parameters, buffers, optimizer state, batch) and the largest running sum
of torch's memory events in it, which includes what kernels take for themselves; with `--kept`, what kept rows say. The
estimator was developed on the first models; faults that those held out have shown were mended, and then those that each
round of unseen ones showed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune import Plan, Task, apply, load_task
from autotune.data.positions import Position
from autotune.estimates.memory_model import MemoryModel, fit_memory_model
from autotune.estimates.tracing.fake_step import Untraceable
from autotune.estimates.tracing.real_step import PROBES, ProbedModel, fit_probed_model
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.precision import Precision
from autotune.training.training import Training

from .layer_models import MODELS, loss_of
from .rows import EXAMPLES, load_rows, save_rows
from .steps import dynamic_peak_bytes
from .unseen import IMAGES, ROUNDS

Row = dict[str, Any]
DEVELOPED_ON = ("char_gpt", "digits_cnn", "gpt2", "resnet18")
HELD_OUT = ("resnet50", "unet", "vgg", "vit", "bert", "t5", "llama-lora", "efficientnet")
_UNSEEN = {name: build for models in ROUNDS.values() for name, build in models.items()}
_SIDE, _LENGTH = 96, 64
"""Larger images are cut to this side, and longer texts to this length; a ViT's size is its own, as that of the unseen
models is."""
_IMAGE_MODELS = ("digits_cnn", "resnet18", "resnet50", "unet", "vgg", "efficientnet", *IMAGES)


def main() -> None:
    """Print and keep a row for each model, combination and batch, and how far off they are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*DEVELOPED_ON, *HELD_OUT, *_UNSEEN), action="append", help="these alone")
    parser.add_argument("--probed", action="store_true", help="by the peaks of real steps, not by tracing")
    parser.add_argument(
        "--time-only", action="store_true", help="the time that each memory model takes; nothing is measured"
    )
    parser.add_argument(
        "--kept", action="store_true", help="against the peaks of the newest kept rows: none is measured"
    )
    parser.add_argument("--batch", type=int, action="append", help="micro-batches; default: 6 and 20")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.time_only:
        rows = list(itertools.chain.from_iterable(map(_time_models, arguments.model or ["gpt2"])))
        print(save_rows("memory-model-time", "cpu", rows))
        return
    kept = {_case(row): row["measured_bytes"] for row in load_rows("estimate", "cpu")} if arguments.kept else None
    for name in arguments.model or (*DEVELOPED_ON, *HELD_OUT, *_UNSEEN):
        for row in _rows(name, arguments.batch or [6, 20], arguments.probed, kept):
            print(_line(row), flush=True)
            rows.append(row)
    for known in ("developed on", "held out", *(f"unseen, {one}" for one in ROUNDS)):
        found = [row for row in rows if row["known"] == known]
        if found:
            print(_summary(known, found))
    print(save_rows("estimate", "cpu", rows))


def _case(row: Row) -> str:
    return json.dumps([row["model"], row["settings"]], sort_keys=True)


def _rows(name: str, batches: list[int], is_probed: bool, kept: dict[str, int] | None) -> Iterator[Row]:
    task = task_of(name)
    for settings in _combinations(name):
        began_s = time.perf_counter()
        memory_model = _by_peaks(_plan(settings), task) if is_probed else _model_of(_plan(settings), task)
        trace_s = time.perf_counter() - began_s
        for batch in batches:
            row = _row(name, task, settings.model_copy(update={"batch": Batch(micro=batch)}), memory_model, kept)
            yield row | {"trace_s": trace_s}


def _time_models(name: str) -> Iterator[Row]:
    """Print how long the memory model of each combination takes, by the clock and of a processor. The first is asked
    for twice: once, torch gets ready."""
    task, combinations = task_of(name), list(_combinations(name))
    for number, settings in enumerate([combinations[0], *combinations]):
        began_s, began_processor_s = time.perf_counter(), time.process_time()
        fit_memory_model(_plan(settings), task)
        seconds, processor_s = time.perf_counter() - began_s, time.process_time() - began_processor_s
        words = f"{settings.canonical()}{', for the first time' * (number == 0)}"
        print(f"{name:14}{seconds:6.2f} s, of a processor {processor_s:6.2f} s  {words}", flush=True)
        known = settings.model_dump(mode="json", exclude_defaults=True)
        told = {"is_first": number == 0, "trace_s": seconds, "processor_s": processor_s}
        yield {"model": name, "settings": known, **told}


def _model_of(plan: Plan, task: Task) -> MemoryModel | ProbedModel:
    """As a search has it."""
    try:
        return fit_memory_model(plan, task)
    except Untraceable:
        return fit_probed_model(plan, task)


def _by_peaks(plan: Plan, task: Task) -> ProbedModel:
    """The fallback of models whose allocations do not even correspond from batch to batch."""
    found = fit_probed_model(plan, task)
    if isinstance(found, ProbedModel):
        return found
    first, second, third = (step.trace for step in found.steps)
    return ProbedModel(PROBES, (first, second, third))


def _row(
    name: str,
    task: Task,
    settings: Settings,
    memory_model: MemoryModel | ProbedModel,
    kept: dict[str, int] | None,
) -> Row:
    assert settings.batch is not None, "set by the caller"
    batch = settings.batch.micro
    case = {"model": name, "settings": settings.model_dump(mode="json", exclude_defaults=True)}
    measured = _measure(apply(_plan(settings), task), batch) if kept is None else kept[_case(case)]
    predicted = memory_model.interval(batch)
    return {
        **case,
        "known": _known(name),
        "predicted_bytes": predicted.value,
        "high_bytes": predicted.high,
        "measured_bytes": measured,
        "error": predicted.value / measured - 1,
        "how": "probed" if isinstance(memory_model, ProbedModel) else "traced",
        "is_traced_at_each_batch": isinstance(memory_model, MemoryModel) and memory_model.is_traced_at_each_batch,
    }


def _known(name: str) -> str:
    rounds = (f"unseen, {number}" for number, models in ROUNDS.items() if name in models)
    return next(rounds, "held out" if name in HELD_OUT else "developed on")


def _combinations(name: str) -> Iterator[Settings]:
    formats = (MemoryFormat(), MemoryFormat(kind="channels_last")) if name in _IMAGE_MODELS else (MemoryFormat(),)
    more = Layers(kind="recompute" if name in _IMAGE_MODELS else "rounding")
    for precision, blocks, layers, memory_format in itertools.product(
        (Precision(), Precision(kind="bf16")),
        (Checkpointing(), Checkpointing(kind="blocks")),
        (Layers(), Layers(kind="exact"), more),
        formats,
    ):
        is_plain = blocks.kind == layers.kind == "none"
        if (layers != more or blocks.kind == "none") and (memory_format == formats[0] or is_plain):
            yield Settings(precision=precision, checkpointing=blocks, layers=layers, memory_format=memory_format)


def _plan(settings: Settings) -> Plan:
    return Plan.model_validate({"settings": settings, "budget": {"device": "cpu"}})


def task_of(name: str) -> Task:
    """Of a model, with samples as it was built for; images and texts are cut."""
    models = {**MODELS, **_UNSEEN}
    if name not in models:
        return load_task(str(EXAMPLES / name / "model.py"))
    torch.manual_seed(0)
    _, inputs = models[name]()
    sample = {key: _cut(name, value[0]) for key, value in inputs.items()}
    return Task(
        build_model=lambda: _without_cache(models[name]()[0]),
        build_dataset=lambda: [sample] * 64,
        compute_loss=lambda model, batch: loss_of(model, batch, "as built"),
    )


def _without_cache(model: nn.Module) -> nn.Module:
    """A cache of keys and values for generation, which a checkpoint's recomputation would extend once more."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def _cut(name: str, sample: Tensor) -> Tensor:
    if name == "vit" or name in _UNSEEN:
        return sample
    if sample.dim() >= 2:
        return sample[..., :_SIDE, :_SIDE].clone()
    return sample[:_LENGTH].clone() if sample.dim() == 1 else sample


def _measure(training: Training, num_samples: int) -> int:
    """Tensor bytes at the peak of the third step on one batch."""
    batch = next(iter(training.loader))
    step = functools.partial(_step, training, batch, num_samples)
    for _ in range(2):
        step()
    gc.collect()
    state = [list(training.model.parameters()), list(training.model.buffers()), [*training.optimizer.state.values()]]
    there = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in _tensors([*state, batch])}
    return sum(there.values()) + dynamic_peak_bytes(step)


def _step(training: Training, batch: Any, num_samples: int) -> None:
    training.loader.positions.put(batch, Position(num_samples, ends_step=True))
    training.step(batch)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _line(row: Row) -> str:
    settings = dict(row["settings"])
    batch = settings.pop("batch")["micro"]
    kinds = " ".join(value["kind"] for value in settings.values()) or "-"
    mib = row["measured_bytes"] / 2**20
    return f"{row['model']:14}{batch:4} {kinds:36}{mib:9.1f} MiB{row['error']:+9.2%}{row['trace_s']:7.2f} s"


def _summary(name: str, rows: list[Row]) -> str:
    sizes = sorted(abs(row["error"]) for row in rows)
    late = sizes[math.ceil(0.95 * len(sizes)) - 1]
    above = sum(row["measured_bytes"] > row["high_bytes"] for row in rows)
    return (
        f"{name}: {len(rows)} cases, median {statistics.median(sizes):.2%}, 95th percentile {late:.2%}, "
        f"worst {sizes[-1]:.2%}, above the interval in {above} ({above / len(rows):.1%})"
    )


if __name__ == "__main__":
    main()
