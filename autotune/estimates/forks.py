"""``in_forks``: calls a function for many arguments, in as many forked processes as there are processors."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from multiprocessing import get_context
from os import getpid
from typing import Any, TypeVar

import torch

from ..measure.processes import end_with
from ..techniques.support.facts import num_processors

T = TypeVar("T")
R = TypeVar("R")

_asked: Callable[[int], Any]
"""In a forked process: the function that it calls."""


def in_forks(
    function: Callable[[T], R], arguments: Sequence[T], room: int = sys.maxsize, ends_s: float = math.inf
) -> Iterator[R]:
    """The function's value for each argument, in order.

    Where a fork raises or dies, its argument is called once more in this process, so that the error is the function's
    own. A fork that still runs at ``ends_s`` is left, and ends with this process. Where this process has opened CUDA,
    as a model that is built on the card does, no fork can use it, and all is called here at once.

    Args:
        function: runs in a fork of this process; its value is pickled.
        arguments: of each call.
        room: so many forks there is memory for.
        ends_s: by ``time.monotonic()``, when no more values are waited for.
    """
    num_forks = min(num_processors(), room, len(arguments))
    if num_forks < 2 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield from map(function, arguments)
        return
    from concurrent.futures.process import ProcessPoolExecutor  # not to be in the memory of what is measured

    begin = (lambda number: function(arguments[number]), getpid())
    pool = ProcessPoolExecutor(num_forks, get_context("fork"), _begin, begin)
    futures: list[Future[R]] = []
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of any thread; see _begin
            warnings.simplefilter("ignore", DeprecationWarning)
            futures += [pool.submit(_call, number) for number in range(len(arguments))]
        wait(futures, None if ends_s == math.inf else max(0.0, ends_s - time.monotonic()))
        for argument, future in zip(arguments, futures, strict=True):
            if future.done():
                yield function(argument) if future.exception() else future.result()
    finally:
        pool.shutdown(wait=all(future.done() for future in futures), cancel_futures=True)


def _begin(asked: Callable[[int], Any], parent: int) -> None:
    """Make kernels in a fork compute in one thread: it has none of its parent's threads, and would wait for them.

    Source: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378
    """
    global _asked
    end_with(parent)
    torch.set_num_threads(1)
    _asked = asked


def _call(number: int) -> Any:
    return _asked(number)
