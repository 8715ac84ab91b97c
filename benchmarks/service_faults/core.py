"""What a fault is, and one tried."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.service.store.states import State

from .scene import POINTS, Scene, Template, scene

ANY_END = (State.SUCCEEDED, State.CANCELLED)


@dataclass(frozen=True)
class Fault:
    """What is done to a search that is held at a point; its ``do`` lets it go."""

    name: str
    do: Callable[[Scene], None]
    points: tuple[str, ...] = POINTS
    ends: tuple[State, ...] = (State.SUCCEEDED,)
    script: tuple[tuple[str, int], ...] = ()
    """What the driver does besides."""
    on_postgresql: bool = False
    with_limit: bool = False
    """It needs a control group with a limit on memory."""
    scene: type[Scene] = Scene


def attempt(fault: Fault, point: str, folder: Path, template: Template) -> str | None:
    """Do it, and look.

    Returns:
        What was broken; None where all held.
    """
    log = ""
    try:
        with scene(fault.scene, folder, template) as the:
            try:
                the.hold(point, **dict(fault.script))
                fault.do(the)
                the.check(*fault.ends)
            except BaseException:
                log = the.server.log.read_text(errors="replace")[-1500:]
                raise
    except Exception as reason:  # noqa: BLE001 - each is told
        where = traceback.extract_tb(reason.__traceback__)[-1]
        print(log, file=sys.stderr)
        return f"{type(reason).__name__} at {where.name}:{where.lineno}: {str(reason)[:300]}"
    return None
