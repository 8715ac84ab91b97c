"""Seconds that torch.compile takes within a training: tracing, partitioning and the compiler's own runs; and where it
breaks a model into pieces."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ...internals import lost


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
        self._num_breaks = len(_breaks())

    def seconds(self) -> float:
        """Wall time so far."""
        return self._seconds

    def graph_breaks(self) -> tuple[str, ...]:
        """Each line at which a program ended, since torch could not trace what it does, and why; what follows is
        another program."""
        return tuple(dict.fromkeys(map(_in_words, _breaks()[self._num_breaks :])))

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


def _breaks() -> list[Any]:
    if lost("graph breaks") is not None:
        return []
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def _in_words(found: Any) -> str:
    """``model.py, line 9: print(x) (Failed to trace builtin operator)``."""
    reason: str = found.reason.strip().partition("\n")[0]
    if reason.startswith("generic_jump"):
        reason = "which way to go depends on a tensor's value"
    if not found.user_stack:
        return reason
    at = found.user_stack[-1]
    return f"{os.path.basename(at.filename)}, line {at.lineno}: {at.line} ({reason})"
