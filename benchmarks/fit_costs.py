"""Does a step take what ``autotune.fit`` predicts of offload, of state in fewer bits, and of steps in backward?

    python -m benchmarks.fit_costs                # a small GPT-2; processor time of one thread, all in turns
    python -m benchmarks.fit_costs --device cuda  # GPT-2 of 124 million parameters on the card that is here

With ``--by-parameter``: by how much a step would be faster if the optimizer's state was chosen for each parameter
(of a GPT-2, of a ViT, and of an embedding of 200,000 words), at ten budgets between the smallest that works and what
the training takes as it stands. Nothing is trained: both are the program's choice among blocks to recompute and state
in 8 and 4 bits, by the law that is measured here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import autotune
from autotune.estimates.cards import on_device
from autotune.estimates.cheapest import cheapest as cheapest_settings
from autotune.estimates.checkpointing.block_choice import BlockChoice, Places
from autotune.estimates.checkpointing.knapsack import Rules, cheapest, smallest
from autotune.estimates.tracing.fake_ops import Target
from autotune.estimates.types import CheapestOptions, TimeLaw
from autotune.measure.device import inspect_device
from autotune.plan import Budget, Plan
from autotune.task import Task
from autotune.techniques import Settings, Technique
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.units import MIB

from .rows import save_rows
from .steps import ratios_of, take_turns

Row = dict[str, Any]
RECOMPUTED, OFFLOADED = Checkpointing(kind="blocks"), Offload(kind="activations")
STATES = tuple(OptimizerState(kind=kind) for kind in ("8bit", "4bit"))
IN_BACKWARD = OptimizerStep(kind="in_backward")
CHOICES: tuple[Technique, ...] = (RECOMPUTED, OFFLOADED, *STATES, IN_BACKWARD)
CASES = {
    "as it stands": Settings(),
    "recomputed": Settings().having(RECOMPUTED),
    "offload": Settings().having(OFFLOADED),
    "recomputed, offload": Settings().having(RECOMPUTED, OFFLOADED),
    **{f"state in {one.kind}": Settings().having(one) for one in STATES},
    "step in backward": Settings().having(IN_BACKWARD),
}
_SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the way from the smallest budget that works to the training as it stands."""
_LEAST = 4096
"""Elements of a parameter whose state may be in fewer bits."""


class Embedding(nn.Module):
    """Words' means through a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(200_000, 64), nn.Linear(512, 10)
        sides = ((64, 512), (512, 512), (512, 512), (512, 512))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(*one), nn.ReLU()) for one in sides))

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.words(x).mean(1)))


def gpt2(blocks: int, features: int, batch: int, length: int) -> Task:
    """Of 8,000 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": blocks, "n_embd": features, "n_head": features // 64, "vocab_size": 8000}
    return _task(
        lambda: GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)),
        torch.zeros(length, dtype=torch.long),
        lambda model, x: model(input_ids=x, labels=x).loss,
        batch,
    )


def vit() -> Task:
    """Of 8 blocks of 384 features, 36 patches an image."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1536}
    return _task(
        lambda: ViTForImageClassification(ViTConfig(**sizes, image_size=96, patch_size=16)),
        torch.zeros(3, 96, 96),
        lambda model, x: model(pixel_values=x).logits.square().mean(),
        16,
    )


def _task(build_model: Any, sample: torch.Tensor, loss: Any, batch: int) -> Task:
    return Task(
        build_model=build_model,
        build_dataset=lambda: [sample] * batch,
        compute_loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=batch,
    )


def choices_on(device: Target) -> tuple[Technique, ...]:
    """A card's activations go to no file."""
    return tuple(one for one in CHOICES if device == "cpu" or one is not OFFLOADED)


def times(rounds: int, device: Target) -> Iterator[Row]:
    """Real steps, and what is predicted of them."""
    is_card = device == "cuda"
    length = 512 if is_card else 128
    task = gpt2(12, 768, 8, length) if is_card else gpt2(4, 256, 8, length)
    cases = {name: one for name, one in CASES.items() if not is_card or one.offload.kind == "none"}
    batch, steps = torch.zeros(8, length, dtype=torch.long, device=device), {}
    wait: Any = torch.cuda.synchronize if is_card else lambda: None
    for name, settings in cases.items():
        torch.manual_seed(0)
        plan = Plan(settings=settings, budget=Budget(device=device))
        model = autotune.apply_to_model(plan, task.build_model().to(device))
        optimizer = autotune.apply_to_optimizer(plan, torch.optim.AdamW(model.parameters()))

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            task.compute_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            wait()

        step()
        steps[name] = step
    seconds = take_turns(steps, rounds, time.perf_counter if is_card else time.thread_time)
    steps.clear()
    stock_s, law = _as_it_stands(task, device)
    choice, first = _choice(task, law, choices_on(device), device), next(iter(cases))
    for name, settings in cases.items():
        found = ratios_of(seconds[name], seconds[first])
        yield {
            "settings": name,
            "seconds": statistics.median(seconds[name]),
            "time_ratio": round(statistics.median(found), 3),
            "time_spread": [round(min(found), 3), round(max(found), 3)],
            "predicted_ratio": round(1 + choice.cost(settings, 8) / stock_s, 3),
            "speeds": law.said(settings),
        }


def _as_it_stands(task: Task, device: Target = "cpu") -> tuple[float, TimeLaw]:
    """Seconds of a step, and the law of this machine."""
    options = CheapestOptions(
        **on_device(inspect_device(device), has_convolutions=False),
        combinations=(Settings(),),
        choices=tuple(Settings().having(one) for one in choices_on(device)),
        limit_bytes=2**50,
        reference_batch=8,
        is_held=True,
        is_here=True,
    )
    found = cheapest_settings(task, options, base_bytes=0)
    return found.stock.step_s, found.law


def _choice(task: Task, law: TimeLaw, choices: tuple[Technique, ...], device: Target = "cpu") -> BlockChoice:
    plain = Plan(settings=Settings(), budget=Budget(device="cpu"))
    counted = BlockChoice.of(plain, task, target=device, choices=choices)
    return BlockChoice(Places.of(task), counted.memory_model, Settings(), choices, law)


def gains() -> Iterator[Row]:
    """At each budget, a step with state of one kind, and with that of each parameter."""
    tasks = {"gpt2": gpt2(6, 384, 8, 256), "vit": vit()}
    tasks["embedding"] = _task(
        Embedding, torch.zeros(32, dtype=torch.long), lambda model, x: model(x).square().mean(), 256
    )
    law = _as_it_stands(gpt2(4, 256, 8, 128))[1]
    for name, task in tasks.items():
        choice, micro = _choice(task, law, (RECOMPUTED, *STATES)), task.batch_size or 1
        (base, changes), costs, rules = choice.rows(micro), choice.costs(micro), choice.variables.rules
        step, optimizer = choice.memory_model(Settings()).work(micro)
        stock_s = law.flop_s * (step.flops + optimizer.flops) + law.byte_s * (step.num_bytes + optimizer.num_bytes)
        apart = _apart(costs, changes, rules, [one for one in Places.of(task).trained if one >= _LEAST], law)
        low = (base + changes[:, list(smallest(base, changes, rules) or ())].sum(axis=1)).max()
        for share in _SHARES:
            room = low + share * (base.max() - low) - base
            together, each = cheapest(costs, changes, room, rules=rules), cheapest(*apart[:2], room, rules=apart[2])
            assert together is not None, "the smallest is within it"
            assert each is not None, "all parameters alike are, too"
            seconds = stock_s + sum(costs[one] for one in together), stock_s + sum(apart[0][one] for one in each)
            yield {
                "model": name,
                "share": share,
                "limit_mib": round((low + share * (base.max() - low)) / MIB),
                "stock_s": round(stock_s, 3),
                "together_s": round(seconds[0], 3),
                "by_parameter_s": round(seconds[1], 3),
                "gain": round(seconds[0] / seconds[1] - 1, 4),
            }


def _apart(costs: Any, changes: Any, rules: Rules, sizes: list[int], law: TimeLaw) -> tuple[Any, Any, Rules]:
    """The same program with an unknown for each parameter and kind: it saves and costs by its elements. The last
    unknowns are the state's, which ``rules`` has in one row, its last."""
    first, count = len(costs) - len(STATES), len(sizes)
    shares = np.array(sizes) / sum(sizes)
    steps = [step for one in STATES if (step := law.step(one)) is not None]
    more = [
        whole * step.seconds([size]) / step.seconds(sizes)
        for whole, step in zip(costs[first:], steps, strict=True)
        for size in sizes
    ]
    columns = [changes[:, :first], *(changes[:, [first + number]] * shares for number in range(len(STATES)))]
    of_each = (tuple(first + count * kind + number for kind in range(len(STATES))) for number in range(count))
    of_blocks = (row for row in rules.one_of if max(row, default=0) < first)
    return [*costs[:first], *more], np.concatenate(columns, axis=1), Rules((*of_blocks, *of_each), rules.needs)


def main() -> None:
    """Print and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-parameter", action="store_true", help="what state chosen for each would gain")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that steps run on")
    parser.add_argument("--rounds", type=int, default=9, help="of steps in turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for row in gains() if arguments.by_parameter else times(arguments.rounds, arguments.device):
        print(row, flush=True)
        path = save_rows("fit-costs", arguments.device, [row])
        found.setdefault(row.get("model", ""), []).append(row.get("gain", 0.0))
    for name, each in found.items() if arguments.by_parameter else ():
        print(f"{name}: {statistics.mean(each):.1%} on average, {max(each):.1%} at most")
    print(path)


if __name__ == "__main__":
    main()
