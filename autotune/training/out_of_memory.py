"""Whether an exception says that memory ran out, by the types and messages of many libraries."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

_TEXTS = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "Failed to CUDA calloc",  # NCCL
    "Cuda failure 'out of memory'",  # NCCL
    "Cuda failure 2 'out of memory'",  # NCCL
    "MODULE:PT_DEVMEM Allocation failed",  # Habana
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "unable to allocate shared memory",
    "Cannot allocate memory",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out: by type and by text."""
    return any(
        isinstance(link, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or (isinstance(link, RuntimeError) and any(text in _said(link) for text in _TEXTS))
        for link in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _said(error: BaseException) -> str:
    """Its text, without a word of its class's, which may be a user's."""
    return " ".join(one for one in error.args if isinstance(one, str))
