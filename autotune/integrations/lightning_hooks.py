"""What is known of Lightning without importing it: its precisions, and hooks and logging of a module without a
Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Lightning's names for a plan's precisions."""


def is_own(module: Any, name: str) -> bool:
    """Whether a class of the job's, and none of Lightning's, has the method."""
    home = next(one for one in type(module).__mro__ if name in vars(one))
    return home.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def batch_hook(module: Any, data: Any, name: str) -> Callable[..., Any]:
    """A hook around a batch's transfer: the datamodule's, where that has it, else the module's."""
    hook: Callable[..., Any] = getattr(data if data is not None and is_own(data, name) else module, name)
    return hook


@contextmanager
def logging_to(module: Any, log: Callable[..., None]) -> Iterator[None]:
    """Have ``log`` called in the place of ``LightningModule.log``, which works within a Trainer's loop alone."""
    module.log = log
    try:
        yield
    finally:
        del module.log


def nowhere(*_: Any, **__: Any) -> None:
    """A ``log`` that keeps nothing."""
