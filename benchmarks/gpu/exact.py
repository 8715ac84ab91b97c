"""Techniques on the card's own kernels: the same training, to the bit or within rounding."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.training.apply_plan import apply
from autotune.training.training import Training

from .check import Check, Found
from .place import Place, task
from .tasks import dropping, words

_SPLIT_BAR = 1e-3
_MAX_GRAD_NORM = 0.1
_ROUNDED = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.05}
"""Largest relative difference of gradients, by precision: of another order of additions, and of rounding."""
_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"kind": "bf16"}},
    **{
        f"fp16, {kind}": {"precision": {"kind": "fp16"}, "optimizer": {"kind": kind}}
        for kind in ("for_loop", "foreach", "fused")
    },
    "fp16 in micro-batches": {"precision": {"kind": "fp16"}, "batch": {"micro": 3, "accumulate": 3, "effective": 8}},
    "tf32": {"precision": {"kind": "tf32"}},
}


def _training(settings: dict[str, Any], max_grad_norm: float | None = None) -> Training:
    task_ = dataclasses.replace(words(), max_grad_norm=max_grad_norm)
    return apply(Plan(settings=Settings.model_validate(settings), budget=Budget(device="cuda")), task_)


def _losses(settings: dict[str, Any], max_grad_norm: float | None = None, num_steps: int = 4) -> list[float]:
    training = _training(settings, max_grad_norm)
    losses: list[float] = []
    for batch in training.loader:
        result = training.step(batch)
        if result.stepped:
            losses.append(float(result.loss))
        if len(losses) == num_steps:
            break
    return losses


def _precision(place: Place) -> Found:
    """Losses of each precision beside fp32's, with clipped gradients too, and steps that fp16 skips."""
    found = place.alone(precisions)
    wrong = {name: value for name, value in found.items() if not isinstance(value, float) or value > 0.02}
    words_ = "; ".join(f"{name}: {value}" for name, value in wrong.items())
    return Found(words_ or f"{len(found)} ways within {max(found.values()):.2%} of fp32's loss", not wrong, found)


def precisions() -> dict[str, float | str]:
    """By name, how far the fourth loss is from fp32's, as a share; or what was raised."""
    found: dict[str, float | str] = {}
    for clipped, max_grad_norm in (("", None), (", clipped", _MAX_GRAD_NORM)):
        true = _losses({"precision": {"kind": "fp32"}}, max_grad_norm)[-1]
        for name, settings in _PRECISIONS.items():
            if name == "tf32" and torch.cuda.get_device_capability() < (8, 0):
                continue
            found[name + clipped] = _told(_apart, settings, max_grad_norm, true)
    for name, settings in _PRECISIONS.items():
        if name.startswith("fp16,"):
            found[f"{name}, skipped"] = _told(_skips, settings)
    return found


def _apart(settings: dict[str, Any], max_grad_norm: float | None, true: float) -> float:
    return abs(_losses(settings, max_grad_norm)[-1] / true - 1)


def _told(find: Callable[..., float], *args: Any) -> float | str:
    try:
        return find(*args)
    except Exception as error:  # noqa: BLE001 - what it raises is the result
        return f"{type(error).__name__}: {error}"[:200]


def _skips(settings: dict[str, Any]) -> float:
    """Largest change of a parameter in a step whose gradients are infinite, which is to be skipped.

    Raises:
        RuntimeError: it says that it was taken, or the next one is not.
    """
    training = _training(settings)
    batches = iter(training.loader)
    while not training.step(next(batches)).stepped:
        pass
    before = [one.detach().clone() for one in training.model.parameters()]
    hook = next(training.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    was_taken = training.step(next(batches)).stepped
    hook.remove()
    changed = max(float((a - b).abs().max()) for a, b in zip(training.model.parameters(), before, strict=True))
    if was_taken or not training.step(next(batches)).stepped:
        raise RuntimeError("the step was taken" if was_taken else "so is the next step")
    return changed


def _checkpointing(place: Place) -> Found:
    """Gradients of recomputed blocks that draw dropout, beside those that are not recomputed."""
    found = place.alone(recomputed)
    apart = [name for name, is_equal in found.items() if not is_equal]
    return Found(
        f"{len(found) - len(apart)} of {len(found)} bit for bit{': not ' if apart else ''}{', '.join(apart)}",
        not apart,
        found,
    )


def recomputed() -> dict[str, bool]:
    """By how blocks are called, and in which precision: whether the gradients are the same to the bit."""
    found = {}
    for how, precision in itertools.product(("position", "keyword"), ("fp32", "bf16")):
        gradients = []
        for kind in ("none", "blocks"):
            settings = Settings.model_validate({"checkpointing": {"kind": kind}})
            training = apply(Plan(settings=settings, budget=Budget(device="cuda")), dropping(how, precision))
            torch.manual_seed(3)
            batch = next(iter(training.loader))
            torch.manual_seed(5)
            gradients.append(_first_gradients(training, batch))
        found[f"by {how}, {precision}"] = all(map(torch.equal, *gradients))
    return found


def _first_gradients(training: Any, batch: Any) -> list[torch.Tensor]:
    """As the first optimizer step sees them."""
    seen: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        seen[:] = [one.grad.detach().clone() for one in training.model.parameters() if one.grad is not None]

    hook = training.optimizer.register_step_pre_hook(note)
    training.step(batch)
    hook.remove()
    return seen


def _layers(place: Place) -> Found:
    """Models with this package's layers beside stock ones: gradients, allocated peak, time."""
    found = place.alone(converted, rounds=3 if place.is_quick else 20, is_small=place.is_quick)
    wrong = [name for name, row in found.items() if row["apart"] > row["bar"] or row["peak"] > 1.0]
    slow = max(row["time"] for row in found.values())
    least = min(row["peak"] for row in found.values())
    words_ = f"peaks from {least:.2f} of stock's, steps up to {slow:.2f} times as long"
    return Found(f"{words_}{'; wrong: ' if wrong else ''}{', '.join(wrong)}", not wrong, found)


def converted(rounds: int, is_small: bool) -> dict[str, dict[str, float]]:
    """By model and precision: relative difference of gradients and its bar, peak and time over stock's."""
    from autotune.testing.models import Gpt, ResNet

    models: dict[str, tuple[Any, Any]] = {
        "GPT": (lambda: Gpt(dropout=0.0), lambda: torch.randint(0, 11, (8, 8), device="cuda")),
        "ResNet": (ResNet, lambda: torch.randn(8, 3, 32, 32, device="cuda")),
    }
    found = {}
    for (name, (build, make)), precision in itertools.product(models.items(), _ROUNDED):
        if is_small and precision == "fp16":
            continue
        data = make()
        rows = [_converted(build, data, precision, rounds, is_ours) for is_ours in (False, True)]
        (stock, peak, seconds), (ours, own_peak, own_s) = rows
        apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(stock, ours, strict=True)))
        size = math.sqrt(sum(float(one.square().sum()) for one in stock)) or 1.0
        bar, row = _ROUNDED[precision], {"apart": apart / size, "peak": own_peak / peak, "time": own_s / seconds}
        found[f"{name} {precision}"] = {**row, "bar": bar}
    return found


def _converted(build: Any, data: Any, precision: str, rounds: int, is_ours: bool) -> tuple[list[Any], int, float]:
    from autotune.layers.convert import convert

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    torch.manual_seed(0)
    model = build().to("cuda")

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            logits = model(data).flatten(0, -2)
            return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long, device="cuda"))

    if is_ours:
        model = convert(model, loss)
    seconds = 0.0
    for at in range(rounds):
        model.zero_grad()
        torch.cuda.synchronize()
        if at == 1:
            torch.cuda.reset_peak_memory_stats()
        began_s = time.perf_counter()
        loss(model).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began_s if at else 0.0
    gradients = [one.grad.float().cpu() for one in model.parameters()]
    return gradients, torch.cuda.max_memory_allocated(), seconds


def _split(place: Place) -> Found:
    """The gradient of a split batch beside the whole one's, where a model splits exactly."""
    error = place.facts(task("convolutions")).split_error
    words_ = "it could not be measured" if error is None else f"relative difference {error:.1e}"
    return Found(words_, error is not None and error < _SPLIT_BAR, {"split_error": error})


CHECKS = (
    Check(
        "precision",
        "within 2 % of fp32's fourth loss, clipped or not; infinite gradients change nothing; no error",
        _precision,
    ),
    Check("checkpointing", "gradients with dropout, bit for bit", _checkpointing),
    Check("layers", "gradients within rounding, and a peak at most stock's", _layers),
    Check("split check", f"below {_SPLIT_BAR:g} with TF32 on", _split),
)
