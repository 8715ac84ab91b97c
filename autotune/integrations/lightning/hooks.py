"""What is known of Lightning without importing it: a module's hooks and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


class _Around:
    """A method of the job's with something around it; a copy of its object has the method itself."""

    __code__ = None  # by this Lightning sees that a method is overridden

    def __init__(self, around: Callable[..., Any], original: Callable[..., Any], own: Any) -> None:
        self._around, self.original, self.own = around, original, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self.original, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.original,)


def _itself(method: Any) -> Any:
    return method


def wrap(holder: Any, name: str, around: Callable[..., Any], *, is_seen: bool = True) -> None:
    """Have ``around(original, *args)`` called in the place of a method.

    Args:
        holder: whose method it is.
        name: of the method.
        around: what is called.
        is_seen: whether Lightning looks through it at the original: its signature, and whether it is overridden.
    """
    unwrap(holder, name)
    wrapped = _Around(around, getattr(holder, name), vars(holder).get(name))
    if is_seen:
        vars(wrapped)["__wrapped__"] = wrapped.original
    setattr(holder, name, wrapped)


def unwrap(holder: Any, name: str) -> None:
    """Take off what :func:`wrap` put around a method, if it did."""
    found = getattr(holder, "__dict__", {}).get(name)
    if isinstance(found, _Around):
        delattr(holder, name)
        if found.own is not None:
            setattr(holder, name, found.own)
