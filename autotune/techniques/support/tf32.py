"""torch's flags that let fp32 compute in TF32 on CUDA: as they stand, set, and put back.

They have two sets of names, and torch refuses to read an older one (``allow_tf32``, ``float32_matmul_precision``)
where the newer ones (``fp32_precision``) say something that it has no word for. So they are read by the newer names,
and set by both: then both can be read afterwards, by Lightning and by dynamo for two (torch 2.13,
aten/src/ATen/Context.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .facts import InTf32


@dataclass(frozen=True)
class Tf32:
    """The flags as they stood."""

    newer: tuple[str, ...]
    """``fp32_precision`` of each of :func:`_places`."""
    matmul: str | None
    """``torch.get_float32_matmul_precision()``; None where it could not be read."""
    cudnn: bool | None
    """``torch.backends.cudnn.allow_tf32``; None where it could not be read."""

    @classmethod
    def now(cls) -> Tf32:
        """As they stand."""
        import torch

        newer = tuple(place.fp32_precision for place in _places())
        return cls(newer, _read(torch.get_float32_matmul_precision), _read(lambda: torch.backends.cudnn.allow_tf32))

    def restore(self) -> None:
        """Put them back. Torch's state before anybody has set a flag, which follows ``torch.backends.fp32_precision``,
        has no name: what computes in TF32 then says so by itself afterwards."""
        import torch

        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.cudnn is not None:
            torch.backends.cudnn.allow_tf32 = self.cudnn
        for place, before in zip(_places(), self.newer, strict=True):
            if place.fp32_precision != before:
                place.fp32_precision = before


def allow_tf32(allowed: bool) -> Tf32:
    """Let matrix products, convolutions and recurrent layers on CUDA compute in TF32, process-wide as torch has it, or
    keep them from it. Returns the flags as they were."""
    import torch

    before = Tf32.now()
    torch.backends.cuda.matmul.allow_tf32 = allowed  # and not set_float32_matmul_precision, which is for CPUs too
    torch.backends.cudnn.allow_tf32 = allowed
    for place in _places()[:3]:
        place.fp32_precision = "tf32" if allowed else "ieee"
    return before


def in_tf32(flags: Tf32 | None = None) -> tuple[InTf32, ...]:
    """What of fp32 computes in TF32 by these flags, or as they stand, on a device that has it."""
    newer = (flags or Tf32.now()).newer
    names: tuple[InTf32, ...] = ("matrix products", "convolutions")
    return tuple(name for name, one in zip(names, newer, strict=False) if one == "tf32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within the block, fp32 on CUDA computes in fp32."""
    before = allow_tf32(False)
    try:
        yield
    finally:
        before.restore()


def _places() -> tuple[Any, ...]:
    """Of CUDA, and the CPU's matrix products, which the older name for those sets as well."""
    from torch import backends

    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul  # type: ignore[attr-defined]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None
