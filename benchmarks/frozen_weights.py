"""What frozen weights in fewer bits, or on disk, save, cost and change, in LLaMA-like models under adapters.

    python -m benchmarks.frozen_weights --keep  # eight minutes

Memory and time: four blocks of 512 features, 8,000 words and adapters of rank 8 on queries and values, 4 times 256
positions. Each plan's step takes turns with the stock step. The peak is that of the step's tensors with the model's
weights; predicted: the same, before it ran.

Change: four blocks of 128 features, trained whole on characters of this project's docs, then under adapters on its code
for 100 steps, from three seeds. Errors are relative, in L2: of logits and of the adapters' first gradients. Beside
fewer bits stands bf16 (autocast), which rounds too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autotune
from autotune import Plan, Task
from autotune.estimates.memory_model import fit_memory_model
from autotune.plan import Budget
from autotune.techniques import Settings
from autotune.units import MIB

from .layer_models import LoRA
from .rows import save_rows
from .steps import Step, ratios_of, take_turns

_EIGHT, _FOUR = {"frozen_weights": {"kind": "8bit"}}, {"frozen_weights": {"kind": "4bit"}}
_DISK = {"offload": {"kind": "parameters"}}
_EXACT, _BLOCKS = {"layers": {"kind": "exact"}}, {"checkpointing": {"kind": "blocks"}}
PLANS: dict[str, dict[str, Any]] = {
    "stock": {}, "8bit": _EIGHT, "4bit": _FOUR, "layers": _EXACT, "8bit, layers": _EIGHT | _EXACT, "blocks": _BLOCKS,
    "8bit, blocks": _EIGHT | _BLOCKS, "4bit, blocks": _FOUR | _BLOCKS,
    "8bit, layers, blocks": _EIGHT | _EXACT | _BLOCKS, "4bit, layers, blocks": _FOUR | _EXACT | _BLOCKS,
    "disk": _DISK, "disk, blocks": _DISK | _BLOCKS,
}  # fmt: skip
_STEPS, _SEEDS = 100, 3


def llama(features: int, words: int) -> nn.Module:
    """Four blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": features, "intermediate_size": 3 * features, "num_attention_heads": 4, "vocab_size": words}
    return LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=4, use_cache=False))


def adapted(model: nn.Module) -> nn.Module:
    """The same under adapters that begin at 0, in place."""
    model.requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            adapter = LoRA(getattr(layer.self_attn, name))  # type: ignore[union-attr]
            nn.init.zeros_(adapter.up.weight)
            setattr(layer.self_attn, name, adapter)  # type: ignore[union-attr]
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch, labels=batch).loss
    return found


def _applied(model: nn.Module, settings: dict[str, Any], run: Any = None) -> nn.Module:
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))
    return autotune.apply_to_model(plan, copy.deepcopy(model), run=run)


def measure_steps(rounds: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Memory and time with each plan, beside stock's."""
    torch.manual_seed(0)
    stock, words = adapted(llama(512, 8000)), torch.randint(0, 8000, (4, 256))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False)  # noqa: E731 - it needs no memory
    task = Task(lambda: copy.deepcopy(stock), lambda: [*words] * 4, loss_of, build_optimizer=sgd, batch_size=4)
    run = lambda model: loss_of(model, words)  # noqa: E731
    steps, predicted, own = {}, {}, {}
    for key in dict.fromkeys(("stock", *keys)):
        settings = PLANS[key]
        plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))
        predicted[key] = fit_memory_model(plan, task).peak_bytes(4)
        steps[key] = Step(_applied(stock, settings, run), run)
        own[key] = _own_bytes(steps[key].model)
    peaks = {key: step.peak_bytes() + own[key] for key, step in steps.items()}
    seconds = take_turns(steps, rounds)
    return [
        {
            "plan": key,
            "threads": torch.get_num_threads(),
            "weights_mib": round(own[key] / MIB, 1),
            "peak_mib": round(peaks[key] / MIB, 1),
            "predicted_mib": round(predicted[key] / MIB, 1),
            "seconds": [round(one, 3) for one in taken],
            "time_ratio": round(statistics.median(ratios := ratios_of(taken, seconds["stock"])), 3),
            "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        for key, taken in seconds.items()
    ]


def _own_bytes(model: nn.Module) -> int:
    storages = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def measure_change() -> list[dict[str, Any]]:
    """Errors at the start, and losses after 100 steps."""
    root = Path(__file__).parent.parent
    docs, code = (_characters(root.glob(one)) for one in ("docs/*/*.md", "autotune/*/*.py"))
    torch.manual_seed(0)
    base = llama(128, 128)
    _train(base, docs, seed=100, steps=3 * _STEPS)
    held = _batch(code, torch.Generator().manual_seed(99), 32)
    kinds: dict[str, dict[str, Any]] = {"stock": {}, "bf16": {}, "8bit": _EIGHT, "4bit": _FOUR}
    rows: list[dict[str, Any]] = [
        {"change": key, "losses": [], "output_error": [], "gradient_error": []} for key in kinds
    ]
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        stock = adapted(copy.deepcopy(base))
        for module in stock.modules():
            if isinstance(module, LoRA):
                nn.init.normal_(module.up.weight, std=0.02)
        wanted = _first(stock, held, "stock")
        for row in rows:
            key = row["change"]
            model = _applied(stock, kinds[key])
            found = _first(model, held, key)
            for name, one, other in zip(("output_error", "gradient_error"), found, wanted, strict=True):
                row[name].append(round(float((one - other).norm() / other.norm()), 5))
            _train(model, code, seed, _STEPS, key)
            with torch.no_grad():
                row["losses"].append(round(float(loss_of(model, held)), 4))
    return rows


def _characters(paths: Iterable[Path]) -> Tensor:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))
    return torch.tensor([ord(one) for one in text if ord(one) < 128])


def _batch(text: Tensor, generator: torch.Generator, number: int) -> Tensor:
    starts = torch.randint(0, len(text) - 64, (number,), generator=generator)
    return torch.stack([text[start : start + 64] for start in starts.tolist()])


def _autocast(key: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if key == "bf16" else contextlib.nullcontext()


def _train(model: nn.Module, text: Tensor, seed: int, steps: int, key: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for _ in range(steps):
        with _autocast(key):
            loss = loss_of(model, _batch(text, generator, 8))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _first(model: nn.Module, batch: Tensor, key: str) -> tuple[Tensor, Tensor]:
    """Logits, and all gradients of the adapters."""
    with _autocast(key):
        output = model(input_ids=batch, labels=batch)
    trained = [one for one in model.parameters() if one.requires_grad]
    found = torch.autograd.grad(output.loss, trained)
    return output.logits.detach().float(), torch.cat([one.flatten() for one in found])


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of a step of each plan")
    parser.add_argument("--plan", choices=PLANS, action="append", help="steps with these alone")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/frozen-weights-cpu.jsonl")
    arguments = parser.parse_args()
    steps = functools.partial(measure_steps, arguments.rounds, arguments.plan or tuple(PLANS))
    for measure in (steps,) if arguments.plan else (steps, measure_change):
        rows = measure()
        for row in rows:
            print(row, flush=True)
        if arguments.keep:
            save_rows("frozen-weights", "cpu", rows)


if __name__ == "__main__":
    main()
