"""What every integration says and refuses in the same words."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterable

from torch import nn

from ..errors import PlanError
from ..fingerprint import other_model
from ..plan import Plan
from ..ranks import world_size
from ..techniques.batch import Batch

__all__ = ["TRIED", "check_model", "check_version", "even_batch", "refuse_other_models", "tell"]

TRIED = {"transformers": "5.23", "accelerate": "1.15"}
"""Versions (major and minor) that the integrations were tried with."""
_said: set[str] = set()


def check_version(framework: str) -> None:
    """Say once that a framework's version is not the one that was tried."""
    found = importlib.metadata.version(framework)
    if not f"{found}.".startswith(f"{TRIED[framework]}.") and framework not in _said:
        _said.add(framework)
        warnings.warn(
            f"{framework} {found}: this integration was tried with {TRIED[framework]}. What a plan asks for is "
            "checked as ever; compare the first losses with those of a run without it.",
            stacklevel=3,
        )


def refuse_other_models(plan: Plan, instead: str) -> None:
    """Refuse a plan whose model is not the one that the job has built.

    Raises:
        PlanError: a row of the plan takes parameters away, or builds another model.
    """
    settings = plan.settings
    for row, default in ((settings.variant, "none"), (settings.pruning, "none"), (settings.low_rank, "none")):
        if row.kind != default:
            raise PlanError(
                f"settings.{row.name}: it makes another model of the job's, which must be there before anything else "
                f"is built from it; but got {row.describe()}. {instead}"
            )


def even_batch(plan: Plan, framework: str) -> Batch | None:
    """The plan's batch, in equal micro-batches.

    Raises:
        PlanError: its last micro-batch is smaller.
    """
    batch = plan.settings.batch
    if batch is not None and batch.effective is not None:
        raise PlanError(
            f"settings.batch.effective: {framework} weighs all micro-batches of an optimizer step alike, but got "
            f"{batch.effective} samples in {batch.accumulate} micro-batches of {batch.micro}, of which the last is "
            f"smaller. Use a micro that divides {batch.effective}."
        )
    return batch


def check_model(plan: Plan, model: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Hold a model, before any technique, against the one that the plan was found for.

    Raises:
        PlanError: it is another, or a wrapper around one.
    """
    wrapper = type(model).__name__
    if getattr(model, "_is_accelerate_prepared", False) or wrapper.startswith(("FSDP", "Distributed", "DataParallel")):
        raise PlanError(
            f"the model is prepared already, or wrapped ({wrapper}), and a plan comes before that. Give the model as "
            "it was built."
        )
    if hasattr(model, "_orig_mod") or (model._compiled_call_impl is not None and plan.settings.compile.kind == "none"):
        raise PlanError("the model is compiled already, and a plan comes before that. Leave torch.compile to the plan.")
    if plan.task is not None and (differs := other_model(plan.task.identity, model, tuple(blocks))) is not None:
        raise PlanError(
            f"task.identity: the plan was found for another model: {differs}. Search again for this one, or give the "
            "one that the plan was found for."
        )


def tell(plan: Plan, framework: str, changed: Iterable[str] = (), missing: Iterable[str] = ()) -> str:
    """Print in one line, on the first rank, what is in force and what is not.

    Args:
        plan: in force.
        framework: as it is called.
        changed: what was turned off, or set, beside the plan's rows.
        missing: what is not in force, and why.

    Returns:
        The line.
    """
    lacking = {t.name: reason for t in plan.settings.chosen() if (reason := t.not_in_force()) is not None}
    rows = ", ".join(t.describe() for t in plan.settings.chosen() if t.name not in lacking)
    absent = [*(f"{name} ({reason}; `autotune run plan.yaml -- …` sets it)" for name, reason in lacking.items())]
    absent += missing
    if (size := world_size()) > 1 and plan.settings.batch is not None:
        changed = [*changed, f"{size} ranks: {size} × {plan.settings.batch.num_samples} samples a step"]
    parts = [f"in force by {framework}: {rows or 'nothing but the job as it is'}"]
    parts += [f"beside it: {', '.join(changed)}"] if changed else []
    parts += [f"not in force: {'; '.join(absent)}"] if absent else []
    line = f"autotune: {'. '.join(parts)}"
    if _rank() == 0:
        print(line, file=sys.stderr, flush=True)
    return line


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    is_one = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if distributed is not None and is_one else 0
