"""NVML, the library of NVIDIA's driver: what it tells, where it is there and answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")

_PATIENCE_S = 5.0
"""How long an answer may take. It takes milliseconds, or a second where the driver has to wake a card; a driver that is
out of order keeps whoever asks for good."""
_is_silent = threading.Event()


def ask(question: Callable[[Any], _Answer], num_cards: int = 1) -> _Answer | None:
    """What NVML answers; None where there is no NVML, it refuses, or it has not answered in time: from then on this
    process asks it nothing more.

    Args:
        question: is given ``pynvml``, in a thread, where it is to ask torch nothing.
        num_cards: that the driver may have to wake for it, one by one.
    """
    try:
        import pynvml
    except ModuleNotFoundError:  # it is required on Linux alone
        return None
    if _is_silent.is_set():
        return None
    answers: list[_Answer] = []
    thread = threading.Thread(target=_put, args=(pynvml, question, answers), name="autotune-nvml", daemon=True)
    thread.start()
    thread.join(num_cards * _PATIENCE_S)
    if thread.is_alive():
        _is_silent.set()
    return answers[0] if answers else None


def is_silent() -> bool:
    """Whether it has left a question of this process without an answer."""
    return _is_silent.is_set()


def _put(nvml: Any, question: Callable[[Any], _Answer], answers: list[_Answer]) -> None:
    # also what an older library has not
    with contextlib.suppress(nvml.NVMLError, AttributeError, UnicodeDecodeError):
        nvml.nvmlInit()
        answers.append(question(nvml))
