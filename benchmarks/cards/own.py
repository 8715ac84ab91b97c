"""What training steps take on the card that is here, how long they are, and what is predicted for them.

    python -m benchmarks.cards.own --measure     # on a card: adds to benchmarks/results/cards-own-cuda.jsonl
    python -m benchmarks.cards.own --time        # the same to cards-own-time-cuda.jsonl
    python -m benchmarks.cards.own               # anywhere: predicts what is kept

Models are timm's and transformers', built from their configurations. To measure what they take, each is trained for a
few steps in a process of its own, by the plan of its settings, one at a time on the card. To time steps, one process
does so with all settings of a job, one after the other, and nothing runs beside it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn import functional as F

from autotune import Task
from autotune.errors import AutotuneError
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.units import MIB

from ..frozen_weights import adapted
from ..rows import load_rows, save_rows
from .jobs import JOBS, has_convolutions
from .samples import Samples
from .vision import import_torchvision, timm_model

Row = dict[str, Any]
_ROWS = "cards-own"
_NUM_STEPS = 4
_WARM, _WINDOWS, _WINDOW_S, _MOST_STEPS = 2, 3, 0.25, 10
"""Steps before, windows in which steps are timed, about how many seconds each takes, and most steps of one."""
_AT_ONCE = 8
"""Processes that import and build while one is on the card."""
_BF16: dict[str, Any] = {"precision": {"kind": "bf16"}}
_BLOCKS: dict[str, Any] = {"checkpointing": {"kind": "blocks"}}
_EXACT: dict[str, Any] = {"layers": {"kind": "exact"}}
_LAST: dict[str, Any] = {"memory_format": {"kind": "channels_last"}}
_IN_BACKWARD: dict[str, Any] = {"optimizer_step": {"kind": "in_backward"}}
_OFFLOAD: dict[str, Any] = {"offload": {"kind": "activations", "to": "host"}}
_WEIGHTS: dict[str, Any] = {"offload": {"kind": "parameters", "to": "host"}}
_TILES: dict[str, Any] = {"tiles": {"kind": "feed_forward"}}
_COMPILED: dict[str, Any] = {"compile": {"kind": "blocks"}}


def _state(kind: str) -> dict[str, Any]:
    return {"optimizer_state": {"kind": kind}}


@dataclass(frozen=True)
class Own:
    """A job, its batch, and the settings that it is measured with."""

    task: Callable[[], Task]
    batch: int
    settings: tuple[dict[str, Any], ...] = ({}, _BF16)


def _timm(name: str, side: int = 224) -> Task:
    return Task(
        build_model=lambda: timm_model(name),
        build_dataset=lambda: Samples(lambda: (torch.zeros(3, side, side), 0)),
        compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def _language(build_model: Callable[[], nn.Module], vocabulary: int, length: int = 1024) -> Task:
    def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def sample() -> dict[str, Tensor]:
        words = torch.randint(0, vocabulary, (length,))
        return {"input_ids": words, "labels": words.clone()}

    return Task(
        build_model=build_model,
        build_dataset=lambda: Samples(sample),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def _gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return _language(lambda: GPT2LMHeadModel(config), config.vocab_size)


def _llama() -> Task:
    """Of 0.9 billion parameters."""
    return _llama_under(lambda model: model)


def _llama_under(adapt: Callable[[nn.Module], nn.Module]) -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, num_key_value_heads=8, use_cache=False)
    return _language(lambda: adapt(LlamaForCausalLM(config)), config.vocab_size)


def _milabench(name: str) -> Task:
    return JOBS[name]().task


OWN: dict[str, Own] = {
    "gpt2": Own(
        _gpt2,
        8,
        (
            {},
            _BF16,
            {"precision": {"kind": "fp16"}},
            _BF16 | _BLOCKS,
            _BF16 | _EXACT,
            _BF16 | _BLOCKS | _EXACT,
            _BF16 | {"optimizer": {"kind": "fused"}},
            _BF16 | {"batch": {"micro": 2, "accumulate": 4}},
            *(_BF16 | _state(kind) for kind in ("bf16", "8bit", "4bit", "factored", "host")),
            _BF16 | {"trained_weights": {"kind": "bf16"}},
            _BF16 | _IN_BACKWARD,
            _BF16 | _OFFLOAD,
            _BF16 | _OFFLOAD | _BLOCKS,
            _BF16 | _TILES,
            *(_BF16 | {"attention": {"kind": kind}} for kind in ("math", "efficient", "flash", "cudnn", "flex")),
            _BF16 | _COMPILED,
        ),
    ),
    "llama": Own(
        _llama,
        4,
        (
            _BF16,
            _BF16 | _BLOCKS,
            _BF16 | _OFFLOAD,
            _BF16 | _TILES,
            _BF16 | _IN_BACKWARD,
            _BF16 | _state("8bit"),
            _BF16 | _state("host"),
            _BF16 | _BLOCKS | _IN_BACKWARD | _state("8bit"),
            _BF16 | {"attention": {"kind": "flex"}},
            {"precision": {"kind": "float8"}},
            _BF16 | _COMPILED,
            {"precision": {"kind": "float8"}, **_COMPILED},
        ),
    ),
    "llama under adapters": Own(
        partial(_llama_under, adapted),
        4,
        (
            _BF16,
            *(_BF16 | {"frozen_weights": {"kind": kind}} for kind in ("8bit", "4bit")),
            *(_BF16 | _WEIGHTS | one for one in ({}, _BLOCKS)),
            _BF16 | _BLOCKS,
        ),
    ),
    **{
        name: Own(partial(_milabench, name), batch, ({},))
        for name, batch in {"bert-fp16": 32, "bert-tf32": 32, "whisper": 64, "lightning": 64}.items()
    },
    "resnet50": Own(
        partial(_timm, "resnet50"),
        64,
        (
            {},
            _BF16,
            _BF16 | _LAST,
            *(_BF16 | _LAST | one for one in (_EXACT, _BLOCKS, _OFFLOAD, _COMPILED)),
        ),
    ),
    "vit_base_patch16_224": Own(
        partial(_timm, "vit_base_patch16_224"),
        64,
        ({}, _BF16, *(_BF16 | one for one in (_BLOCKS, _EXACT, _OFFLOAD, _TILES, _state("8bit"), _COMPILED))),
    ),
    "swin_tiny_patch4_window7_224": Own(partial(_timm, "swin_tiny_patch4_window7_224"), 64, (_BF16,)),
    "convnext_base": Own(partial(_timm, "convnext_base"), 64, (_BF16 | _LAST,)),
    "efficientnet_b3": Own(partial(_timm, "efficientnet_b3", 288), 64, (_BF16, _BF16 | _LAST)),
    "densenet121": Own(partial(_timm, "densenet121"), 64, (_BF16,)),
    "regnety_160": Own(partial(_timm, "regnety_160"), 64, (_BF16 | _LAST,)),
    "vgg16": Own(partial(_timm, "vgg16"), 64, ({},)),
    "mobilevit_s": Own(partial(_timm, "mobilevit_s", 256), 64, (_BF16,)),
    "hrnet_w40": Own(partial(_timm, "hrnet_w40"), 64, (_BF16,)),
}
"""By name."""


def main() -> None:
    """Measure, or predict what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on the card that is here, and keep the rows")
    parser.add_argument("--time", action="store_true", help="steps on the card that is here, and keep the rows")
    parser.add_argument("--job", choices=OWN, action="append", help="default: all")
    parser.add_argument("--one", nargs=3, metavar=("JOB", "SETTINGS", "LOCK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.job or [*OWN]
    if arguments.one:
        print(json.dumps(_measured(*arguments.one)))
    elif arguments.measure:
        for row in _measure(names):
            print(_words(row), save_rows(_ROWS, "cuda", [row]), flush=True)
    elif arguments.time:
        for row in itertools.chain.from_iterable(map(_timed, names)):
            print(_words(row), save_rows(f"{_ROWS}-time", "cuda", [row]), flush=True)
    else:
        _predict(names)


def _measure(names: list[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = [(name, json.dumps(one), f"{folder}/card") for name in names for one in OWN[name].settings]
        yield from pool.map(_in_process, asked)


def _words(row: Row) -> str:
    if "error" in row:
        found = row["error"]
    elif "step_s" in row:
        found = ", ".join(f"{1000 * seconds:.1f}" for seconds in row["step_s"])
        found += f" ms, {row['allocated_bytes'] / MIB:,.0f} MiB, losses {[round(loss, 4) for loss in row['losses']]}"
    else:
        found = f"{row['process_bytes'] / MIB:,.0f} MiB"
    return f"{row['job']} {json.dumps(row['settings'])}: {found}"


def _in_process(asked: tuple[str, str, str]) -> Row:
    done = subprocess.run([sys.executable, "-m", __spec__.name, "--one", *asked], capture_output=True, text=True)
    if done.returncode:
        return {"job": asked[0], "settings": json.loads(asked[1]), "error": done.stderr.strip().splitlines()[-1][:300]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(name: str, settings: str, lock: str) -> Row:
    """The peak of a few steps. The card is this process's own until it ends."""
    from autotune.measure.memory import Charge
    from autotune.training.apply_plan import apply

    import_torchvision()
    task = dataclasses.replace(OWN[name].task(), batch_size=OWN[name].batch)
    model = task.build_model()
    FileLock(lock).acquire()
    plan = Plan(settings=Settings.model_validate_json(settings), budget=Budget(device="cuda"))
    training = apply(plan, dataclasses.replace(task, build_model=lambda: model))
    batches, num_steps = iter(training.loader), 0
    while num_steps < _NUM_STEPS:
        num_steps += training.step(next(batches)).stepped
    peak = Charge(torch.device("cuda")).peak()
    return {
        "job": name,
        "batch": OWN[name].batch,
        "settings": json.loads(settings),
        "process_bytes": peak.process,
        "reserved_bytes": peak.reserved,
        "allocated_bytes": peak.allocated,
        "capability": torch.cuda.get_device_capability(),
    }


def _timed(name: str) -> Iterator[Row]:
    """With each settings, and as the first of them once more."""
    import_torchvision()
    own = OWN[name]
    task = dataclasses.replace(own.task(), batch_size=own.batch)
    with torch.device("cuda"):
        built = task.build_model()
    task = dataclasses.replace(task, build_model=lambda: copy.deepcopy(built))
    for settings in (*own.settings, own.settings[0]):
        yield {"job": name, "batch": own.batch, "settings": settings, **_seconds(task, settings)}
        gc.collect()
        torch.cuda.empty_cache()


def _seconds(task: Task, settings: dict[str, Any]) -> Row:
    """The first losses, and seconds of steps in each window; of batches that lie ready, and are those of all others."""
    from autotune.training.apply_plan import apply

    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    losses: list[float] = []

    def window(num_steps: int) -> float:
        ready = [*itertools.islice(batches, num_steps * per_step)]
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        found = [training.step(batch) for batch in ready]
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began_s) / num_steps
        losses.extend(float(one.loss) for one in found)
        return seconds

    try:
        plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cuda"))
        training = apply(plan, task)
        batches, per_step = iter(training.loader), training.batch.accumulate
        window(_WARM)
        num_steps = max(1, min(_MOST_STEPS, round(_WINDOW_S / window(1))))
        step_s = [window(num_steps) for _ in range(_WINDOWS)]
    except (AutotuneError, RuntimeError) as error:
        return {"error": str(error).splitlines()[0][:300]}
    allocated_bytes = torch.cuda.max_memory_allocated() - before_bytes
    return {"step_s": step_s, "allocated_bytes": allocated_bytes, "losses": losses[: 3 * per_step]}


def _predict(names: list[str]) -> None:
    """Print each row that is kept, and how far off they are together."""
    rows = [row for row in load_rows(_ROWS, "cuda") if row["job"] in names]
    errors: dict[str, list[float]] = {}
    for row in rows:
        try:
            told = row.get("error") or ", ".join(_told(row, errors))
        except AutotuneError as error:  # the torch that is here has other rules
            told = f"not predicted: {error}"
        print(f"{row['job']} {json.dumps(row['settings'])}: {told}", flush=True)
    for what, found in errors.items():
        worst = max(found, key=abs)
        median = statistics.median(map(abs, found))
        print(f"{what}: {len(found)} rows, {median:.1%} off at the median, {worst:+.1%} at worst")


def _told(row: Row, errors: dict[str, list[float]]) -> Iterator[str]:
    """What the process takes and what its allocator reserves, measured and predicted."""
    from autotune.estimates import EstimateOptions
    from autotune.estimates.cards import on_device
    from autotune.estimates.predictor import Predictor
    from autotune.techniques.support.facts import Device

    import_torchvision()
    own, settings = OWN[row["job"]], Settings.model_validate(row["settings"])
    task = dataclasses.replace(own.task(), batch_size=row["batch"])
    device = Device(type="cuda", name=row["device"], memory_bytes=0, capability=tuple(row["capability"]), bf16=True)
    on_card = on_device(device, has_convolutions(task))
    options = EstimateOptions(settings=settings, reference_batch=row["batch"], is_held=True, **on_card)
    predictor = Predictor(task, options)
    found = predictor.process(settings.batch.micro if settings.batch else row["batch"], settings)
    context = on_card["context"].value
    pairs = {
        "process": (row["process_bytes"], found.value),
        "reserved": (row["reserved_bytes"], found.value - context),
        "context": (row["process_bytes"] - row["reserved_bytes"], context),
    }
    for what, (measured, predicted) in pairs.items():
        errors.setdefault(what, []).append(predicted / measured - 1)
        yield f"{what} {measured / MIB:,.0f} MiB, predicted {predicted / MIB:,.0f} ({predicted / measured - 1:+.1%})"
    yield f"above the interval: {row['process_bytes'] > found.high}"


if __name__ == "__main__":
    main()
