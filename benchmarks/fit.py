"""Does a training stay within the budget that ``autotune.fit`` made it fit?

For each model four budgets between the smallest that works and what the training takes as it stands. A fresh process
builds the model and AdamW, calls ``fit`` and makes three optimizer steps; measured is its peak (VmHWM), from its start.
With ``--time`` only how long ``fit`` takes, of GPT-2 with 124 million parameters for 8 GiB of this machine, and of a
LLaMA of 6.7 billion without values for a card of 80 GiB. With ``--subsets``, of models of at most 12 blocks: what the
choice of blocks to recompute costs, over the cheapest of all subsets that are traced to fit the same limit, and over
every k-th block. Of models with few blocks those with saving layers are chosen too; beside it stands the least with
layers everywhere or nowhere. With ``--device cuda`` the process has the card that is here, beside others of this
benchmark: measured is what it is charged there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

import autotune
from autotune.errors import NothingFits
from autotune.estimates.checkpointing.block_choice import BlockChoice, Places
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.fake_step import FakeTraining, Untraceable
from autotune.measure.memory import Charge, process_bytes
from autotune.nested import to_device
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.units import MIB, parse_bytes, size

from .estimate import DEVELOPED_ON, HELD_OUT, task_of
from .rows import save_rows

Row = dict[str, Any]
_UNSEEN = (
    "convnext", "swin", "opt", "whisper", "falcon", "electra", "vitmae", "qwen3", "segformer", "wav2vec2", "gemma2",
    "bart",
)  # fmt: skip
MODELS = (*DEVELOPED_ON, *HELD_OUT, *_UNSEEN)
_SHARES = (0.02, 0.3, 0.6, 0.9)
"""Of the way from the smallest budget that works to what the training takes as it stands."""
_TENSORS = 400 * MIB
"""Most that a step's tensors take as it stands, or twice what those of two samples take: the largest power of two of
samples within it is the batch. Below, weights take most, and there is nothing to choose."""
_UNTRACED = 8
"""Samples of a batch of which a step reads values, so that it cannot be traced."""
_NUM_STEPS = 3
_ON_CARD = 4
"""Models at once there, each with all budgets."""
_IN_SUBSETS = 32
"""Samples of a step that is only traced: so many that activations take more than the optimizer's step."""
_MOST_BLOCKS, _FEW_BLOCKS = 12, 4
"""Of models of which every subset of recomputed blocks is traced; and everything that can be done in each."""
_CHOICES = (Checkpointing(kind="blocks"), Layers(kind="exact"))


def main() -> None:
    """Print and keep a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="these alone")
    parser.add_argument("--time", action="store_true", help="how long fit takes; nothing is trained")
    parser.add_argument("--subsets", action="store_true", help="choices against all there are; nothing is trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that is trained on")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_in_child(**json.loads(arguments.child))))
        return
    if arguments.time:
        for row in _times():
            path = save_rows("fit-time", "cpu", [row])
        print(path)
        return
    if arguments.subsets:
        for name in arguments.model or MODELS:
            for row in _subsets(name):
                print(row, save_rows("fit-subsets", "cpu", [row]), flush=True)
        return
    rows = []
    with ThreadPoolExecutor(_ON_CARD if arguments.device == "cuda" else 1) as pool:
        for found in pool.map(partial(_rows, device=arguments.device), arguments.model or MODELS):
            path = save_rows("fit", arguments.device, found)
            rows += found
    within = sum(row["measured_bytes"] <= row["budget_bytes"] for row in rows)
    errors = sorted(row["measured_bytes"] / row["predicted_bytes"] - 1 for row in rows)
    print(
        f"within the budget: {within} of {len(rows)}; measured over predicted: median "
        f"{statistics.median(errors):+.1%}, {errors[0]:+.1%} to {errors[-1]:+.1%}; fit took "
        f"{statistics.median(row['fit_s'] for row in rows):.1f} s at the median"
    )
    print(path)


def _rows(name: str, device: str) -> list[Row]:
    case: Row = {"name": name, "num_samples": 0, "device": device}
    case |= _asked(case, "batch")
    edges = _asked(case, "edges")
    least, stock = edges["least"], edges["stock"]

    def row(share: float) -> Row:
        budget = round(least + (stock - least) * share)
        found = {"model": name, "batch": case["num_samples"], "share": share, **_asked(case, str(budget))}
        print(_line(found), flush=True)
        return found

    with ThreadPoolExecutor(len(_SHARES) if device == "cuda" else 1) as pool:
        return [*pool.map(row, _SHARES)]


def _num_samples(task: Task) -> int:
    """Of the batch."""
    try:
        law = fit_memory_model(Plan.model_validate({"settings": Settings(), "budget": {"device": "cpu"}}), task)
    except Untraceable:
        return _UNTRACED
    num_samples, most = 2, max(_TENSORS, 2 * law.peak_bytes(2))
    while num_samples < 64 and law.peak_bytes(2 * num_samples) <= most:
        num_samples *= 2
    return num_samples


def _asked(case: Row, what: str) -> Row:
    """A child's answer."""
    asked = json.dumps({**case, "what": what})
    command = [sys.executable, "-m", "benchmarks.fit", "--child", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{asked}: {done.stderr}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_child(name: str, num_samples: int, device: str, what: str) -> Row:
    task, place = task_of(name), torch.device(device)
    if what == "batch":
        return {"num_samples": _num_samples(task)}
    torch.manual_seed(0)
    before_bytes = process_bytes(place) if place.type == "cuda" else 0  # opens its context, which its peak counts
    model, dataset = task.build_model().to(place), task.build_dataset()
    batch = (task.collate or default_collate)([dataset[number % len(dataset)] for number in range(num_samples)])
    batch = to_device(batch, place)
    optimizer = torch.optim.AdamW(model.parameters())
    if what == "edges":
        return _edges(model, batch, task, optimizer)
    began_s = time.perf_counter()
    budget, given = int(what), dict[str, Any](loss=task.compute_loss, optimizer=optimizer)
    try:
        fitted = autotune.fit(model, batch, budget, **given)
    except NothingFits as error:  # no two processes are alike: the smallest that works in this one is taken
        budget, began_s = _smallest(error), time.perf_counter()
        fitted = autotune.fit(model, batch, budget, **given)
    fit_s = time.perf_counter() - began_s
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        fitted.loss(model, batch).backward()
        optimizer.step()
    return {
        "budget_bytes": budget,
        "settings": fitted.settings.model_dump(mode="json", exclude_defaults=True),
        "predicted_bytes": fitted.peak.value,
        "high_bytes": fitted.peak.high,
        "as_it_stands_bytes": fitted.stock_peak.value,
        "work": fitted.found.times_step,
        "how": fitted.found.how,
        "measured_bytes": Charge(place).peak().process,
        "before_bytes": before_bytes,
        "fit_s": fit_s,
    }


def _edges(model: Any, batch: Any, task: Task, optimizer: Any) -> dict[str, int]:
    """The smallest budget that works, and the least with which nothing is changed."""

    def fit(budget: int) -> autotune.Fitted:
        return autotune.fit(model, batch, budget, loss=task.compute_loss, optimizer=optimizer, dry_run=True)

    stock = round(fit(2**50).stock_peak.high * 1.03)
    try:
        fit(MIB)
    except NothingFits as error:
        return {"least": _smallest(error), "stock": stock}
    raise AssertionError("no process is so small")


def _smallest(error: NothingFits) -> int:
    return parse_bytes(str(error).partition("works is ")[2].partition(" (")[0])


def _times() -> Iterator[Row]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    def words(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (batch, length))
        return {"input_ids": ids, "labels": ids}

    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False))
    for budget in ("8GiB", "5GiB"):
        yield _timed("gpt2-124m, batch 8 of 512", model, words(50_257, 8, 512), budget, "cpu")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False))
    for num_samples in (1, 2):
        batch = words(32_000, num_samples, 4096)
        techniques = ("checkpointing", "layers", "optimizer_step")
        yield _timed(
            f"llama-6.7b, SGD, batch {num_samples} of 4096", model, batch, "80GiB", "cuda", techniques=techniques
        )


def _subsets(name: str) -> Iterator[Row]:
    """At each limit, what the choice costs, and the cheapest that fits: of all that it chooses from, with layers
    everywhere or nowhere, and of every k-th block."""
    task, num_samples = task_of(name), _IN_SUBSETS
    plain = Plan.model_validate({"settings": Settings(), "budget": {"device": "cpu"}})
    num_blocks = Places.of(task).num_blocks
    if not 1 < num_blocks <= _MOST_BLOCKS:
        return
    has_layers = num_blocks <= _FEW_BLOCKS
    choices = _CHOICES if has_layers else _CHOICES[:1]
    choice, numbers = BlockChoice.of(plain, task, choices=choices), range(num_blocks)
    peaks = {}
    for settings in dict.fromkeys(_of_blocks(numbers) if has_layers else _recomputed(numbers)):
        step = FakeTraining(plain.model_copy(update={"settings": settings}), task).step(num_samples)
        peaks[settings] = step.trace.peak_bytes()
    every_kth = {tuple(numbers)[::k] for k in range(1, num_blocks + 1)}
    low, high = min(peaks.values()), max(peaks.values())
    for share in _SHARES:
        limit = round(low + share * (high - low))
        fits = {settings: choice.cost(settings, num_samples) for settings, peak in peaks.items() if peak <= limit}
        one_by_one = [cost for settings, cost in fits.items() if not settings.layers.spared]
        kth = [c for s, c in fits.items() if s.layers == Layers() and s.checkpointing.numbers(num_blocks) in every_kth]
        chosen = choice.choose(num_samples, limit)
        yield {
            "model": name,
            "batch": num_samples,
            "num_blocks": num_blocks,
            "choices": [one.name for one in choices],
            "share": share,
            "limit_bytes": limit,
            "chosen": None if chosen is None else chosen.model_dump(mode="json", exclude_defaults=True),
            "fits": chosen in peaks and peaks[chosen] <= limit,
            "cost": None if chosen is None else choice.cost(chosen, num_samples),
            "least_cost": min(fits.values()),
            "one_by_one_cost": min(one_by_one, default=None),
            "every_kth_cost": min(kth, default=None),
            "num_combinations": len(peaks),
        }


def _recomputed(numbers: range) -> Iterator[Settings]:
    """Every subset of the blocks."""
    for is_one in itertools.product((False, True), repeat=len(numbers)):
        yield Settings(checkpointing=Checkpointing.of(tuple(itertools.compress(numbers, is_one)), len(numbers)))


def _of_blocks(numbers: range) -> Iterator[Settings]:
    """Every block as it is, recomputed, with saving layers, or both; layers outside the blocks wherever any has them,
    and alone."""
    for ways in itertools.product(itertools.product((False, True), repeat=2), repeat=len(numbers)):
        recomputed = [number for number in numbers if ways[number][0]]
        saving = [number for number in numbers if ways[number][1]]
        settings = Settings(checkpointing=Checkpointing.of(tuple(recomputed), len(numbers)))
        if not saving:
            yield settings
        yield settings.having(_CHOICES[1].in_blocks(saving, len(numbers)))


def _timed(name: str, model: Any, batch: Any, budget: str, device: Any, **options: Any) -> Row:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1) if device == "cuda" else torch.optim.AdamW(parameters)

    began_s, began_processor_s = time.perf_counter(), time.process_time()
    try:
        said = str(
            autotune.fit(model, batch, budget, optimizer=build, device=device, dry_run=True, **options)
        ).splitlines()
    except NothingFits as error:
        said = [str(error)]
    seconds, processor_s = time.perf_counter() - began_s, time.process_time() - began_processor_s
    words = f"{seconds:.1f} s, of a processor {processor_s:.1f} s"
    print(f"{name}, {budget} ({device}): {words}", *said, sep="\n  ", flush=True)
    known = {"model": name, "budget": budget, "planned_for": device}
    return {**known, "fit_s": seconds, "processor_s": processor_s, "said": said}


def _line(row: Row) -> str:
    within = "within" if row["measured_bytes"] <= row["budget_bytes"] else "OVER"
    kinds = " ".join(one["kind"] for one in row["settings"].values()) or "-"
    return (
        f"{row['model']:14}{row['batch']:4} {row['share']:4.0%}  budget {size(row['budget_bytes']):>9}  predicted "
        f"{size(row['predicted_bytes']):>9} (to {size(row['high_bytes'])})  measured {size(row['measured_bytes']):>9} "
        f"{within:7} fit {row['fit_s']:.1f} s  {kinds}"
    )


if __name__ == "__main__":
    main()
