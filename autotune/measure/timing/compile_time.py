"""Seconds that torch.compile takes within a training: tracing, partitioning and the compiler's own runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch


class CompileTime:
    """Watches torch.compile in this process from here on, whoever called it, for as long as the process lives."""

    def __init__(self, note: Callable[[float, bool], None] = lambda seconds, is_compiling: None) -> None:
        """
        Args:
            note: told as compiling begins and as it has ended: the seconds so far, and whether more come.
        """
        from torch._dynamo.callback import callback_handler

        self._note = note
        self._seconds = 0.0
        self._began_s = 0.0
        self._depth = 0
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def seconds(self) -> float:
        """Wall time so far."""
        return self._seconds

    def _begin(self, _: Any) -> None:
        if self._depth == 0:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # what is queued is done beside it, and is no part of it
            self._began_s = perf_counter()
            self._note(self._seconds, True)
        self._depth += 1

    def _end(self, _: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += perf_counter() - self._began_s
            self._note(self._seconds, False)
