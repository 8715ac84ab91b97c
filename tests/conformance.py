"""What a job does with a plan applied, seen from outside, and what ``Training`` does with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from integration_models import task_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune import Plan, Task, apply
from autotune.techniques import Settings
from autotune.techniques.support.recomputed import recomputed

FIRST_BLOCK = {"cnn": "blocks.0", "gpt": "transformer.h.0"}
SPLIT = {"micro": 2, "accumulate": 3}
ROWS: dict[str, dict[str, Any]] = {
    "the batch alone": {},
    "bf16": {"precision": {"kind": "bf16"}},
    "layers, chosen blocks": {
        "layers": {"kind": "exact"},
        "checkpointing": {"kind": "chosen", "blocks": [1, 3]},
        "optimizer": {"kind": "fused"},
    },
    "every second block": {
        "precision": {"kind": "bf16"},
        "checkpointing": {"kind": "blocks", "every": 2},
        "memory_format": {"kind": "channels_last"},
        "optimizer": {"kind": "foreach"},
        "data_loading": {"num_workers": 0, "cache": "host"},
    },
}
"""Plans that the suite holds each job to, beside the batch."""


def plan_of(**rows: Any) -> Plan:
    return Plan(settings=Settings.model_validate({"batch": SPLIT, **rows}))


def rounding(plan: Plan) -> float:
    """Relative difference of losses that rounding may make: in bf16, of gradients that were scaled otherwise."""
    return 1e-3 if plan.settings.precision.kind == "bf16" else 1e-5


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Which modules are recomputed and which converted, how weights lie in memory, how the optimizer computes."""
    named = dict(model.named_modules())
    forwards = {name: vars(module).get("forward") for name, module in named.items()}
    return {
        "recomputed": {n for n, f in forwards.items() if isinstance(f, functools.partial) and f.func is recomputed},
        "converted": {name for name, module in named.items() if "_autotune_site" in vars(module)},
        "strides": {name: p.stride() for name, p in model.named_parameters()},
        "optimizer": {(type(optimizer).__name__, g["foreach"], g["fused"]) for g in optimizer.param_groups},
    }


class Seen:
    """Micro-batches of each optimizer step, and the types that a block computed in."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.dtypes: set[torch.dtype | None] = set()
        self._sizes: list[int] = []

    def forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._sizes.append(len(args[0]))
            self.dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)

    def step(self, *_: Any) -> None:
        self.steps.append(self._sizes)
        self._sizes = []


@contextlib.contextmanager
def watched(model: nn.Module, kind: str) -> Iterator[Seen]:
    seen = Seen()
    hooks = [
        model.get_submodule(FIRST_BLOCK[kind]).register_forward_pre_hook(seen.forward),
        register_optimizer_step_post_hook(seen.step),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def trace(task: Task, plan: Plan) -> tuple[list[float], Any]:
    """The loss of each optimizer step of an epoch, and the training."""
    training = apply(plan, task)
    steps, parts = [], []
    for batch in training.loader:
        result = training.step(batch)
        parts.append((float(result.loss), result.weight))
        if result.stepped:
            steps.append(sum(loss * weight for loss, weight in parts) / sum(weight for _, weight in parts))
            parts = []
    return steps, training


@functools.cache
def expected(kind: str, rows: str, **changes: Any) -> tuple[list[float], dict[str, Any]]:
    """Of ``apply`` and ``Training``: losses, and what is applied."""
    losses, training = trace(task_of(kind, **changes), plan_of(**ROWS[rows]))
    return losses, state_of(training.model, training.optimizer)
