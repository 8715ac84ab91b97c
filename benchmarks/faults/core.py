"""A fault, and what trying it comes to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.apart import may_mount

from .ended import NoEnd
from .place import Place, place_of

Complaints = list[str]
"""What was not as it should be; empty where the fault was withstood."""
Executor = Literal["none", "local", "ray"]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    kind: str
    executor: Executor
    """What runs the trials; ``none`` where none are run."""
    expected: str
    """In words, for the table."""
    do: Callable[[Place], Complaints]
    undefended: str = ""
    """Why it is not withstood, or not tried; empty where it is to be withstood."""
    needs_mounts: bool = False


@dataclass(frozen=True)
class Result:
    """How one fault ended."""

    status: Literal["held", "failed", "undefended"]
    expected: str
    got: str
    seconds: float


def attempt(fault: Fault, template: Path) -> Result:
    """Do a fault in a place of its own, and look at what it left."""
    reason = fault.undefended or ("this system lets nobody mount" if fault.needs_mounts and not may_mount() else "")
    if reason:
        return Result("undefended", fault.expected, reason, 0.0)
    began_s = time.monotonic()
    with place_of(template) as place:
        try:
            complaints = fault.do(place)
        except NoEnd as reason_:
            complaints = [str(reason_)]
        except Exception:  # noqa: BLE001 - a fault of the harness is told as such, and the others go on
            complaints = [f"the harness: {traceback.format_exc(limit=-3)}"]
        complaints += place.left_behind()
    status: Literal["held", "failed"] = "failed" if complaints else "held"
    return Result(status, fault.expected, "; ".join(complaints) or "as expected", time.monotonic() - began_s)
