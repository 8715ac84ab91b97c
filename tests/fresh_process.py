"""A function called in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

_Result = TypeVar("_Result")


def in_fresh_process(function: Callable[..., _Result], *args: object) -> _Result:
    """What a function of a module returns or raises in a process that has done nothing before, as a trial's: one that
    has freed much memory takes from that first, so that less is seen to grow."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args).result()
