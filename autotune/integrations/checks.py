"""Checks and messages that all integrations share."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterable

from torch import nn

from ..errors import PlanError
from ..internals import TRIED, lost
from ..plan import Plan
from ..ranks import this_rank, world_size
from ..techniques import Stage
from ..techniques.batch import BY_TOKENS, Batch
from ..techniques.parallel import Parallel
from ..training.drift import other_model

_said: set[str] = set()


def check_version(framework: str) -> None:
    """Say once that a framework's version is not the one that was tried.

    Raises:
        PlanError: it lacks a private part that the integration goes by.
    """
    if (reason := lost(framework)) is not None:
        raise PlanError(f"{reason}, and a plan cannot be applied without it. Use {framework} {TRIED[framework]}.")
    found = importlib.metadata.version(framework)
    if not f"{found}.".startswith(f"{TRIED[framework]}.") and framework not in _said:
        _said.add(framework)
        warnings.warn(
            f"{framework} {found}: this integration was tried with {TRIED[framework]}. What a plan asks for is "
            "checked as ever; compare the first losses with those of a run without it.",
            stacklevel=3,
        )


def refuse_other_models(plan: Plan, *, is_first: bool = False) -> None:
    """Refuse a plan whose model is not the one that the job has built.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        is_first: whether the plan is put on the model before anything is built from it, so that what changes its
            parameters is in time; what builds another model never is.

    Raises:
        PlanError: a row of the plan takes parameters away, or builds another model.
    """
    for row in plan.settings.chosen():
        is_other = "function" in row.affects and row.stage <= Stage.LOW_RANK
        if is_other and not (is_first and row.stage > Stage.MODEL):
            raise PlanError(
                f"settings.{row.name}: it makes another model of the job's, which must be there before anything else "
                f"is built from it; but got {row.describe()}. Train it by autotune.apply, or leave that row out."
            )


def in_samples(plan: Plan) -> Batch | None:
    """The plan's batch.

    Raises:
        PlanError: it is cut by lengths.
    """
    batch = plan.settings.batch
    if batch is not None and batch.tokens is not None:
        raise PlanError(f"settings.{BY_TOKENS} Train by autotune.apply, or leave tokens out.")
    return batch


def even_batch(plan: Plan, framework: str) -> Batch | None:
    """One process's share of the plan's batch, in equal micro-batches.

    Raises:
        PlanError: its last micro-batch is smaller, or it is cut by lengths.
    """
    batch = in_samples(plan)
    if batch is None:
        return None
    if batch.effective is not None:
        raise PlanError(
            f"settings.batch.effective: {framework} weighs all micro-batches of an optimizer step alike, but got "
            f"{batch.effective} samples in {batch.accumulate} micro-batches of {batch.micro}, of which the last is "
            f"smaller. Use a micro that divides {batch.effective}."
        )
    return batch.share(plan.settings.parallel.num_shares)


def of_one_rank(plan: Plan, size: int | None = None) -> Plan:
    """What is left of a plan in a process whose framework wraps the model in ``DistributedDataParallel`` itself: its
    share of the batch, and no ``parallel``.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        size: processes that train together; None asks torch.distributed, or torchrun's variables.

    Raises:
        PlanError: the plan is for another number of processes, or shards the model, or cuts batches by lengths.
    """
    settings = plan.settings
    if (reason := settings.parallel.other_size(size or world_size())) is not None:
        raise PlanError(reason)
    if settings.parallel.kind == "fsdp":
        raise PlanError(
            "settings.parallel.kind: fsdp is for autotune.apply and for scripts that call fully_shard; a framework "
            "shards in its own way, which was not measured. Use ddp."
        )
    if (reason := settings.parallel.beyond_wrappers()) is not None:
        raise PlanError(f"settings.{reason}")
    batch = in_samples(plan)
    batch = batch and batch.share(settings.parallel.num_shares)
    alone = settings.model_copy(update={"batch": batch}).having(Parallel())
    return plan.model_copy(update={"settings": alone})


def of_ranks(plan: Plan, size: int) -> Plan:
    """A plan that was chosen in one of several processes, for all."""
    if size == 1:
        return plan
    return plan.model_copy(update={"settings": plan.settings.having(Parallel(kind="ddp", processes=size))})


def check_alone(plan: Plan, size: int, framework: str) -> None:
    """
    Raises:
        PlanError: several processes train together, or the plan is for several.
    """
    if (found := max(size, world_size(), plan.settings.parallel.processes)) > 1:
        raise PlanError(
            f"settings.parallel: a plan is applied in one process of {framework} so far, but got {found}. Use one "
            "there, or train by autotune.apply, by Accelerate or by a transformers.Trainer."
        )


def check_model(plan: Plan, model: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Check that a model, before any technique, is the one that the plan was found for.

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
    if (differs := other_model(plan, model, tuple(blocks))) is not None:
        raise PlanError(differs)


def tell(plan: Plan, framework: str, changed: Iterable[str] = (), missing: Iterable[str] = ()) -> None:
    """Print in one line, on the first rank, what is applied and what is not.

    Args:
        plan: applied, of all ranks.
        framework: as it is called.
        changed: what was turned off, or set, beside the plan's rows.
        missing: what is not applied, and why.
    """
    lacking = {t.name: reason for t in plan.settings.chosen() if (reason := t.not_in_force()) is not None}
    rows = ", ".join(t.describe() for t in plan.settings.chosen() if t.name not in lacking)
    absent = [*(f"{name} ({reason}; `autotune run plan.yaml -- …` sets it)" for name, reason in lacking.items())]
    parts = [f"applied by {framework}: {rows or 'nothing but the job as it is'}"]
    parts += [f"beside it: {', '.join(changed)}"] if (changed := [*changed]) else []
    parts += [f"not applied: {'; '.join(absent)}"] if (absent := [*absent, *missing]) else []
    if this_rank().rank == 0:
        print(f"autotune: {'. '.join(parts)}", file=sys.stderr, flush=True)
