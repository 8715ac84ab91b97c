"""Fake tensors, which are private in torch; stand-ins where they are not there, so that what does without them runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

try:
    from torch._subclasses.fake_tensor import (
        FakeCopyMode,
        FakeTensor,
        FakeTensorMode,
        in_kernel_invocation_manager,
        unset_fake_temporarily,
    )
except ImportError:

    class _Missing:
        """No tensor is one of these, and none can be made: ``lost("estimates")`` says why."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError("this torch has no fake tensors where they are looked for")

    FakeCopyMode = FakeTensor = FakeTensorMode = in_kernel_invocation_manager = _Missing  # type: ignore[assignment, misc]
    unset_fake_temporarily = _Missing  # type: ignore[assignment]

__all__ = [
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "PlannedMode",
    "device_type",
    "in_kernel_invocation_manager",
    "is_planned_for_card",
    "planned_for",
    "unset_fake_temporarily",
]

_target: ContextVar[str] = ContextVar("_target", default="cpu")


class PlannedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of a step that is planned for a type of device, which they are not on."""

    def __init__(self, target: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target = target
        """torch's name of it."""


def device_type(x: Tensor) -> str:
    """Of the device that ``x`` is on; of a fake tensor, of the device that is planned for."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, PlannedMode):
        return x.fake_mode.target
    return x.device.type


@contextmanager
def planned_for(target: str) -> Iterator[None]:
    """While a plan is applied on the CPU for a type of device that need not be here."""
    before = _target.set(target)
    try:
        yield
    finally:
        _target.reset(before)


def is_planned_for_card() -> bool:
    """Whether what is applied now, on the CPU, is planned for a card."""
    return _target.get() != "cpu"
