"""Fake tensors, which are private in torch; stand-ins where they are not there, so that what does without them runs."""

from __future__ import annotations

from typing import Any

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

__all__ = ["FakeCopyMode", "FakeTensor", "FakeTensorMode", "in_kernel_invocation_manager", "unset_fake_temporarily"]
