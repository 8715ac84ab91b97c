"""What each advice about memory does to a training's peak and speed, beside the same training without it.

    python -m benchmarks.advice [--model NAME]... [--advice NAME]... [--rounds 3] [--keep]

Each round trains each model in a fresh process without and with each advice, ten optimizer steps after two. Printed
are medians over the rounds, and the lowest and highest: the process's peak over what it had before the model was
built; processor time of a step, as a share of the plain training's of its round; and how far the losses of the ten
steps are from the plain ones at most, as a share of their mean. `--keep` adds the rows to results/advice-cpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import autotune
from autotune.measure.processes import own_peak_bytes
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.units import MIB

from .rows import save_rows

PLAIN = "plain"
ADVICE: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "optimizer state in bf16": {"optimizer_state": {"kind": "bf16"}},
    "optimizer state in 8 bits": {"optimizer_state": {"kind": "8bit"}},
    "optimizer step in backward": {"optimizer_step": {"kind": "in_backward"}},
    "both, 8 bits": {"optimizer_state": {"kind": "8bit"}, "optimizer_step": {"kind": "in_backward"}},
}
_WARM_UP, _STEPS = 2, 10


def _gpt2() -> autotune.Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    words = torch.randint(0, 50_257, (24, 64), generator=torch.Generator().manual_seed(0))

    def build_model() -> nn.Module:
        config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    return autotune.Task(build_model, lambda: TensorDataset(words), loss, build_optimizer=_adamw, batch_size=2)


def _resnet50() -> autotune.Task:
    from transformers import ResNetConfig, ResNetForImageClassification

    generator = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(96, 3, 64, 64, generator=generator), torch.arange(96) % 10)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])

    def build_model() -> nn.Module:
        return ResNetForImageClassification(ResNetConfig(num_labels=10)).train()  # type: ignore[no-any-return]

    return autotune.Task(
        build_model,
        lambda: images,
        loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        batch_size=8,
    )


class _Words(nn.Module):
    """200,000 words of 64 numbers, of which a bag is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(200_000, 64)
        self.head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.words(x))
        return found


def _embedding() -> autotune.Task:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 200_000, (64 * 12, 32), generator=generator)
    bags = TensorDataset(words, words[:, 0] % 10)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return autotune.Task(_Words, lambda: bags, loss, build_optimizer=_adamw, batch_size=64)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


MODELS: dict[str, Callable[[], autotune.Task]] = {
    "GPT-2 of 124 M, fused AdamW": _gpt2,
    "ResNet-50 at 64 px, SGD with momentum": _resnet50,
    "embedding of 200,000 words, fused AdamW": _embedding,
}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--advice", choices=[*ADVICE][1:], action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="add the rows to results/advice-cpu.jsonl")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ADVICE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(trained(*arguments.one)))
        return
    asked = arguments.advice or [*ADVICE][1:]
    for model in arguments.model or MODELS:
        rounds = [{name: _apart(model, name) for name in (PLAIN, *asked)} for _ in range(arguments.rounds)]
        rows = [summary(model, name, rounds) for name in (PLAIN, *asked)]
        for row in rows:
            print(told(row), flush=True)
        if arguments.keep:
            save_rows("advice", "cpu", rows)


def _apart(model: str, advice: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.advice", "--one", model, advice]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def trained(model: str, advice: str) -> dict[str, Any]:
    """Train in this process."""
    task = MODELS[model]()
    before = own_peak_bytes()
    training = autotune.apply(Plan(settings=Settings.model_validate(ADVICE[advice])), task)
    losses, seconds = [], []
    for batch in training.loader:
        began = time.process_time()
        losses.append(float(training.step(batch).loss))
        seconds.append(time.process_time() - began)
        if len(losses) == _WARM_UP + _STEPS:
            break
    step_s = statistics.median(seconds[_WARM_UP:])
    return {"peak_bytes": own_peak_bytes() - before, "step_cpu_s": step_s, "losses": losses[:_STEPS]}


def summary(model: str, advice: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """One advice beside the plain training, over the rounds."""
    losses = rounds[0][PLAIN]["losses"]
    scale = sum(map(abs, losses)) / len(losses)
    off = [max(abs(a - b) for a, b in zip(one[advice]["losses"], losses, strict=True)) / scale for one in rounds]
    return {
        "model": model,
        "advice": advice,
        "peak_mib": [round(one[advice]["peak_bytes"] / MIB, 1) for one in rounds],
        "times_peak": [round(one[advice]["peak_bytes"] / one[PLAIN]["peak_bytes"], 4) for one in rounds],
        "times_step": [round(one[advice]["step_cpu_s"] / one[PLAIN]["step_cpu_s"], 4) for one in rounds],
        "losses_off": round(max(off), 6),
    }


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    both = (
        f"{name} {statistics.median(row[key]):.2f} ({min(row[key]):.2f} to {max(row[key]):.2f})"
        for name, key in (("peak", "times_peak"), ("step", "times_step"))
    )
    peak = statistics.median(row["peak_mib"])
    return f"{row['model']}: {row['advice']}: {', '.join(both)}; {peak:,.0f} MiB; losses off by {row['losses_off']:.2%}"


if __name__ == "__main__":
    main()
