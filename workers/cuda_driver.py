"""Prints what CUDA's driver counts in this process, a line each: UUID, name and bytes. Run as a program of its own, so
that no other process opens CUDA; needs neither torch nor this package."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from typing import Any


def rows(cuda: Any) -> Iterator[str]:
    """What ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` leave, in CUDA's order; no context is made.

    Args:
        cuda: the driver's library, ``libcuda.so.1``.
    """
    count, device, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return
    for number in range(count.value):
        name, identity = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        cuda.cuDeviceGetUuid_v2(identity, device)  # of an instance (MIG) its own
        called = name.value.decode()
        kind = "MIG" if " MIG " in called else "GPU"
        yield f"{kind}-{uuid.UUID(bytes=bytes(identity))}\t{called}\t{memory.value}"


if __name__ == "__main__":
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is no driver
        raise SystemExit(0) from None
    for row in rows(library):
        print(row)
