"""Drift: differences between this machine and the one that a plan was measured on, and what follows from them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..bundle import device_name
from ..distribution import VERSION
from ..plan import Environment, Plan
from ..techniques.precision import tf32_of_job
from ..techniques.support.facts import difference
from .launched import STRICT_VARIABLE

if TYPE_CHECKING:
    from torch import nn


class Difference(NamedTuple):
    """From what a plan states of its measurement."""

    what: str
    """The plan's, and what is here."""
    follows: str
    """For its figures."""


def differences(plan: Plan, now: Environment) -> Iterator[Difference]:
    """Compare the machine that a plan is used on with the one that it was measured on.

    Args:
        plan: says nothing where it was written by hand.
        now: here; its threads are those of a CPU alone.
    """
    then = plan.environment
    if then is None:
        return
    if then.torch != now.torch:
        what = f"the plan was measured with torch {then.torch}, and this is {now.torch}"
        yield Difference(what, "its speed and its peak may be others")
    if then.device != now.device:
        what = f"the plan was measured with device {then.device}, and this is {now.device}"
        yield Difference(what, "its speed is another's, and its peak may be")
    if then.threads is not None and now.threads is not None and then.threads != now.threads:
        what = f"the plan was measured with {then.threads} threads, and here are {now.threads}"
        yield Difference(what, "its speed is another's")
    if then.tf32 is not None and now.tf32 is not None and then.tf32 != now.tf32:
        known, found = (" and ".join(one) or "nothing" for one in (then.tf32, now.tf32))
        what = f"the plan was measured with {known} of fp32 in TF32, and here it is {found}, by torch's flags"
        yield Difference(what, "its speed and its rounding are another's")


def here(plan: Plan, kind: str) -> Iterator[Difference]:
    """The same, for this process, on a device of torch's type ``kind``."""
    import torch  # a driver may stand where there is none

    if plan.environment is not None:
        now = Environment(
            torch=torch.__version__,
            device=device_name(kind),
            autotune=VERSION,
            python=platform.python_version(),
            threads=torch.get_num_threads() if kind == "cpu" else None,
            tf32=tf32_of_job(kind),
        )
        yield from differences(plan, now)


def other_model(plan: Plan, model: nn.Module, blocks: Sequence[str] = ()) -> str | None:
    """Why a model is not the one that a plan was found for; None where it is, or the plan does not say.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        model: before any technique.
        blocks: as a task's ``blocks``.
    """
    from .fingerprint import identify

    known = plan.task.identity if plan.task is not None else None
    if known is None:
        return None
    _, found = identify(model, (), blocks=blocks)
    if (found.model, found.names) == (known.model, known.names):
        return None
    differs = difference(known, found.model_copy(update={"batch": known.batch}))
    return (
        f"task.identity: the plan was found for another model: {differs}. Search again for this one, or give the one "
        "that the plan was found for."
    )


def other_shapes(plan: Plan, loader: Any) -> Difference | None:
    """How a training DataLoader's batches differ from the plan's; None if they do not, or cannot be read."""
    from torch.utils.data import default_collate

    from .fingerprint import batch_words, sample_shapes

    known = plan.task.identity if plan.task is not None else None
    if known is None or not known.batch:
        return None
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    found = ""
    with suppress(Exception):  # a dataset may take other than numbers
        found = batch_words(sample_shapes(loader.dataset, collate))
    if found in ("", known.batch):
        return None
    what = f"the plan was found with batches of {known.batch}, and here are {found}"
    return Difference(what, "its speed and its peak are of those")


def is_strict(strict: bool = False) -> bool:
    """Whether a difference is an error: as the caller says, or ``autotune run --strict``."""
    return strict or os.environ.get(STRICT_VARIABLE) == "1"


def tell(found: list[Difference], strict: bool) -> str:
    """In one line, with what to do."""
    told = "; ".join(f"{one.what}: {one.follows}" for one in found)
    then = "Search again here, or apply it without strict." if strict else "`autotune verify` measures it here."
    return f"{told}. {then}"
