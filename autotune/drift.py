"""Drift: what is not as it was when a plan was measured, and what follows of that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from .launched import STRICT_VARIABLE
from .machine import device_name
from .plan import Plan

__all__ = ["Difference", "differences", "here", "is_strict", "tell"]


class Difference(NamedTuple):
    """From what a plan states of its measurement."""

    what: str
    """The plan's, and what is here."""
    follows: str
    """For its figures."""


def differences(plan: Plan, torch_version: str, kind: str, device: str, num_threads: int) -> Iterator[Difference]:
    """Where a plan is used, against where it was measured.

    Args:
        plan: says nothing where it was written by hand.
        torch_version: here.
        kind: torch's device type.
        device: as the vendor calls it.
        num_threads: that torch computes with on the CPU.
    """
    then = plan.environment
    if then is None:
        return
    if then.torch != torch_version:
        what = f"the plan was measured with torch {then.torch}, and this is {torch_version}"
        yield Difference(what, "its speed and its peak may be others")
    if then.device != device:
        what = f"the plan was measured with device {then.device}, and this is {device}"
        yield Difference(what, "its speed is another's, and its peak may be")
    if then.threads is not None and kind == "cpu" and then.threads != num_threads:
        what = f"the plan was measured with {then.threads} threads, and here are {num_threads}"
        yield Difference(what, "its speed is another's")


def here(plan: Plan, kind: str) -> Iterator[Difference]:
    """The same, for this process."""
    import torch  # a driver may stand where there is none

    if plan.environment is not None:
        yield from differences(plan, torch.__version__, kind, device_name(kind), torch.get_num_threads())


def is_strict(strict: bool = False) -> bool:
    """Whether a difference is an error: as the caller says, or ``autotune run --strict``."""
    return strict or os.environ.get(STRICT_VARIABLE) == "1"


def tell(found: list[Difference], strict: bool) -> str:
    """In one line, with what to do."""
    told = "; ".join(f"{one.what}: {one.follows}" for one in found)
    then = "Search again here, or apply it without strict." if strict else "`autotune verify` measures it here."
    return f"{told}. {then}"
