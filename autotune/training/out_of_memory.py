"""Whether an exception says that memory ran out, by the types and messages of many libraries."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from typing import Literal

import torch

_OF_DEVICE = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "miopenStatusAllocFailed",
    "Triton Error [CUDA]: out of memory",
    "Failed to CUDA calloc",  # NCCL
    "Cuda failure 'out of memory'",  # NCCL
    "Cuda failure 2 'out of memory'",  # NCCL
    "MODULE:PT_DEVMEM Allocation failed",  # Habana
)
_OF_HOST = (
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "unable to allocate shared memory",
    "Cannot allocate memory",
    "std::bad_alloc",
)
_DOUBTFUL = (
    # cuDNN tries its engines one after another, and torch swallows that the allocator refused one its workspace
    # (torch 2.13, aten/src/ATen/native/cudnn/Conv_v8.cpp: `catch (c10::OutOfMemoryError&)`).
    "unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    # What these libraries take themselves, such as for a handle, they take from the driver.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_INTERNAL_ERROR",
    "CUFFT_INTERNAL_ERROR",
)
"""Words that a lack of the device's memory has, and other faults as well."""
_FULL_BYTES = 256 * 2**20
"""A device with less left than this is full: a library's handle, with the kernels that it loads, may take as much."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out: by type and by text."""
    return ran_out(error) is not None


def ran_out(error: BaseException) -> Literal["device", "host"] | None:
    """Whose memory an exception says ran out; None where it says nothing of the kind.

    What was trained on a CPU has but the host's. Where the text may have other causes, too, the device's free memory
    decides, and whether torch's allocator has refused any in this process.
    """
    return next((found for link in chain(error) if (found := _said_by(link)) is not None), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _said_by(error: BaseException) -> Literal["device", "host"] | None:
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    said = " ".join(one for one in error.args if isinstance(one, str))  # no word of its class's, which may be a user's
    if any(text in said for text in _OF_HOST):
        return "host"
    is_short = any(text in said for text in _OF_DEVICE) or (any(text in said for text in _DOUBTFUL) and _is_full())
    if not is_short:
        return None
    return "host" if _pins(error, said) else "device"


def _pins(error: BaseException, said: str) -> bool:
    """Whether a copy was to be pinned: CUDA says of host memory, too, that it is "out of memory"."""
    frames = traceback.extract_tb(error.__traceback__)
    # torch 2.13, torch/utils/data/_utils/pin_memory.py
    return "in pin memory thread" in said or bool(frames and "pin_memory(" in (frames[-1].line or ""))


def _is_full() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        has_refused = torch.cuda.memory_stats().get("num_ooms", 0) > 0
        return has_refused or torch.cuda.mem_get_info()[0] < _FULL_BYTES
    except RuntimeError:  # the device has failed
        return False
