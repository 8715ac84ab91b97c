"""Workspace of operations whose kernels are made up of others, below what a dispatch mode sees."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def logsumexp(result: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> int:
    """The exponentials before they are summed, and the largest of each row.

    Source: aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl.
    """
    return x.nbytes + result.nbytes
