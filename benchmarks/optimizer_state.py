"""Whether a training with its optimizer's state or its weights in fewer bits ends where the stock one does, and what a
step costs.

    python -m benchmarks.optimizer_state --keep  # half an hour

The GPT of examples/char_gpt, smaller (96 features, two blocks, 48 characters), AdamW with one cycle of the learning
rate up to 0.005, 400 steps by each kind with the same initial weights and batches; three seeds. Of each: the mean
training loss of the last 50 steps, and the loss on modules that it was not trained on. A kind is told by its mean
difference from stock with the same seed, beside the spread of stock between seeds. Then AdamW's step of 4 million
elements by each kind, in turns.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import autotune
from autotune import Plan
from autotune.techniques import Settings

from .rows import EXAMPLES, save_rows
from .steps import ratios_of, take_turns

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "8bit": {"optimizer_state": {"kind": "8bit"}},
    "4bit": {"optimizer_state": {"kind": "4bit"}},
    "factored": {"optimizer_state": {"kind": "factored"}},
    "bf16 weights": {"trained_weights": {"kind": "bf16"}},
    "bf16 weights, factored": {"trained_weights": {"kind": "bf16"}, "optimizer_state": {"kind": "factored"}},
}
"""Settings by their names here."""
RATE, BATCH, LENGTH = 5e-3, 16, 48
_LAST, _JUDGED = 50, 400
"""Steps whose losses are the training loss, and stretches of text that judge."""
_SIDE, _WEIGHTS = 1024, 4
"""Of a step that is timed."""
EXAMPLE = runpy.run_path(str(EXAMPLES / "char_gpt" / "model.py"))
EXAMPLE["build_model"].__globals__.update(WIDTH=96, NUM_BLOCKS=2, SEQUENCE=LENGTH)


def settings_of(kind: str) -> Settings:
    """By its name here."""
    return Settings.model_validate(KINDS[kind])


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of a model, which is changed in place, both of a kind."""
    plan = Plan(settings=settings_of(kind))
    model = autotune.apply_to_model(plan, model)
    return autotune.apply_to_optimizer(plan, torch.optim.AdamW(model.parameters(), lr=RATE))


def train(kind: str, seed: int, steps: int) -> dict[str, Any]:
    """One training."""
    text, generator = EXAMPLE["read_source"](EXAMPLE["TRAINED_ON"]), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = EXAMPLE["build_model"]()
    optimizer = optimizer_of(kind, model)
    schedule = OneCycleLR(optimizer, RATE, steps + 1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
        with settings_of(kind).forward_context("cpu"):
            loss = EXAMPLE["compute_loss"](model, text[starts + torch.arange(LENGTH + 1)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    tensors = (one for row in optimizer.state.values() for one in row.values() if isinstance(one, Tensor))
    return {
        "kind": kind,
        "seed": seed,
        "steps": steps,
        "training_loss": round(statistics.mean(losses[-_LAST:]), 4),
        "held_out_loss": round(held_out(kind, model), 4),
        "parameters": sum(one.numel() for one in model.parameters()),
        "weight_bytes": sum(one.nbytes for one in model.parameters()),
        "state_bytes": sum(one.nbytes for one in tensors),
    }


def held_out(kind: str, model: nn.Module) -> float:
    """Mean loss on text that it was not trained on."""
    text = EXAMPLE["read_source"](EXAMPLE["HELD_OUT"])
    stretches = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:_JUDGED]
    model.eval()
    with torch.no_grad(), settings_of(kind).forward_context("cpu"):
        return float(EXAMPLE["compute_loss"](model, stretches))


def told(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Each kind in words, by the same seed's stock training."""
    for what in ("training_loss", "held_out_loss"):
        found = {kind: [row[what] for row in rows if row["kind"] == kind] for kind in {row["kind"]: 0 for row in rows}}
        stock = found["default"]
        spread = max(stock) - min(stock)
        yield f"{what}: stock {statistics.mean(stock):.3f}, {spread:.3f} between the largest and the smallest seed"
        for kind in [*found][1:]:
            off = [ours - own for ours, own in zip(found[kind], stock, strict=True)]
            yield f"  {kind}: {statistics.mean(off):+.4f} ({min(off):+.4f} to {max(off):+.4f})"


def durations(kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """A step of each kind as a share of the first's."""
    steps = {}
    for kind in kinds:
        model = nn.Sequential(*(nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(_WEIGHTS)))
        optimizer = optimizer_of(kind, model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        steps[kind] = optimizer.step
        steps[kind]()
    seconds = take_turns(steps, rounds)
    ratios = {kind: ratios_of(seconds[kind], seconds[kinds[0]]) for kind in kinds[1:]}
    return {
        "elements": _WEIGHTS * _SIDE**2,
        "time_ratio": {kind: round(statistics.median(found), 2) for kind, found in ratios.items()},
        "time_spread": {kind: [round(min(found), 2), round(max(found), 2)] for kind, found in ratios.items()},
    }


def main() -> None:
    """Train with each kind and seed, time a step, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="0 times steps alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="times are shares of the first's")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps; 0 trains alone")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/optimizer-state-cpu.jsonl")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for kind in arguments.kinds:
            rows.append(train(kind, seed, arguments.steps))
            print(rows[-1], flush=True)
            if arguments.keep:
                save_rows("optimizer-state", "cpu", rows[-1:])
    if any(row["kind"] == "default" for row in rows):
        print("\n".join(told(rows)))
    if arguments.rounds:
        timed = durations(arguments.kinds, arguments.rounds)
        print(timed)
        if arguments.keep:
            save_rows("optimizer-state", "cpu", [timed])


if __name__ == "__main__":
    main()
