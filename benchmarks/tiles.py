"""What tiles, disk, attention's kernels and reversible blocks save and cost, in training steps of three transformers
on long inputs.

    python -m benchmarks.tiles --keep  # six minutes
    python -m benchmarks.tiles --plan math --plan eager --positions 1024  # attention's alone
    python -m benchmarks.tiles --only reversible --positions 1024 --keep

Four blocks of GPT-2 (256 features, 1,024 inside, dropout 0.1 but in its attention) and of LLaMA (256, 1,024 twice),
2,048 positions or as many as asked for, without a head, whose logits would be the peak; twelve reversible blocks of the
same sizes, attention and dropout as GPT-2's. Each plan's step takes turns
with the stock step. The peak is the largest running sum of what a step allocates and frees, beside the model's weights;
predicted: the same, before it ran.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import autotune
from autotune import Plan, Task
from autotune.estimates.memory_model import fit_memory_model
from autotune.plan import Budget
from autotune.techniques import Settings
from autotune.units import MIB

from .rows import save_rows
from .steps import Step, ratios_of, take_turns

LENGTH = 2048
_TILES = {"tiles": {"kind": "feed_forward"}}
_BLOCKS = {"checkpointing": {"kind": "blocks"}}
_EXACT = {"layers": {"kind": "exact"}}
_MATH = {"attention": {"kind": "math"}}
_DISK = {"offload": {"kind": "activations"}}
PLANS: dict[str, dict[str, Any]] = {
    "stock": {}, "tiles": _TILES, "layers": _EXACT, "tiles, layers": _TILES | _EXACT, "blocks": _BLOCKS,
    "tiles, blocks": _TILES | _BLOCKS, "offload": _DISK, "layers, offload": _EXACT | _DISK,
    "blocks, offload": _BLOCKS | _DISK, "math": _MATH, "math, layers": _MATH | _EXACT,
    "eager": {"attention": {"kind": "eager"}}, "reversible": {"reversible": {"kind": "blocks"}},
}  # fmt: skip
_OF_REVERSIBLE = ("stock", "reversible", "blocks")


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    size = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    return GPT2Model(GPT2Config(**size, attn_pdrop=0.0, use_cache=False))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaModel(LlamaConfig(**size, use_cache=False))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(256), nn.Linear(256, 768)
        self.out, self.dropout = nn.Linear(256, 256), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, 64)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(found.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = _Attention()
        self.g = nn.Sequential(
            nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Dropout(0.1)
        )

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class _Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 256), nn.Embedding(LENGTH, 256)
        self.blocks = nn.ModuleList(_Block() for _ in range(12))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        pair = (x, x)
        for block in self.blocks:
            pair = block(*pair)
        return SimpleNamespace(last_hidden_state=pair[0] + pair[1])


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "llama": _llama, "reversible": _Reversible}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch).last_hidden_state.square().mean()
    return found


def measure(name: str, rounds: int, plans: Sequence[str], length: int) -> list[dict[str, Any]]:
    """One model with some of the plans, stock among them."""
    words = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False)  # noqa: E731 - it needs no memory
    task = Task(MODELS[name], lambda: [words[0]] * 4, loss_of, build_optimizer=sgd, batch_size=1)
    task = replace(task, reversible_blocks=["blocks"] if name == "reversible" else [])
    torch.manual_seed(0)
    stock = task.build_model()
    blocks = [key for key, module in stock.named_modules() if isinstance(module, nn.ModuleList)]
    steps, predicted = {}, {}
    for key in plans:
        plan = Plan(settings=Settings.model_validate(PLANS[key]), budget=Budget(device="cpu"))
        applied = copy.deepcopy(stock)
        run = lambda model: loss_of(model, words)  # noqa: E731
        model = autotune.apply_to_model(plan, applied, blocks=blocks, run=run)
        steps[key] = Step(model, run)
        live = fit_memory_model(plan, task).at(1).live_bytes()
        predicted[key] = max(live) - live[0]
    peaks = {key: step.peak_bytes() for key, step in steps.items()}
    seconds = take_turns(steps, rounds)
    rows = []
    for key, taken in seconds.items():
        ratios = ratios_of(taken, seconds["stock"])
        rows.append(
            {
                "model": name,
                "plan": key,
                "positions": length,
                "threads": torch.get_num_threads(),
                "peak_mib": round(peaks[key] / MIB),
                "predicted_mib": round(predicted[key] / MIB),
                "seconds": [round(one, 3) for one in taken],
                "time_ratio": round(statistics.median(ratios), 3),
                "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
    return rows


def main() -> None:
    """Measure each model, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--plan", choices=PLANS, action="append", help="default: all; stock is always among them")
    parser.add_argument("--rounds", type=int, default=5, help="of a step of each plan")
    parser.add_argument("--positions", type=int, default=LENGTH, help=f"1 to {LENGTH}")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/tiles-cpu.jsonl")
    arguments = parser.parse_args()
    for name in arguments.only or MODELS:
        known = _OF_REVERSIBLE if name == "reversible" else [key for key in PLANS if key != "reversible"]
        plans = ["stock", *(key for key in arguments.plan or known if key != "stock")]
        rows = measure(name, arguments.rounds, plans, arguments.positions)
        for row in rows:
            low, high = row["time_spread"]
            print(
                f"{name}, {row['plan']}: peak {row['peak_mib']} MiB ({row['predicted_mib']} predicted), "
                f"{row['time_ratio']:.2f} times the stock step ({low:.2f} to {high:.2f})",
                flush=True,
            )
        if arguments.keep:
            save_rows("tiles", "cpu", rows)


if __name__ == "__main__":
    main()
