"""Memory that kernels allocate while they run, beside operands and results: a dispatch mode does not see it.

Only that of convolutions and recurrent layers is known, and of theirs the larger part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cudnn import cudnn_columns, cudnn_convolution, cudnn_convolution_backward
from .onednn import onednn_convolution, onednn_convolution_backward
from .recurrent import onednn_recurrent, onednn_recurrent_backward

__all__ = ["possible_bytes", "workspace_bytes"]

_FORWARD, _BACKWARD = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
_TABLES: dict[str, dict[Any, Callable[..., int]]] = {
    "cpu": {
        _FORWARD: onednn_convolution,
        _BACKWARD: onednn_convolution_backward,
        torch.ops.aten.mkldnn_rnn_layer: onednn_recurrent,
        torch.ops.aten.mkldnn_rnn_layer_backward: onednn_recurrent_backward,
    },
    "cuda": {_FORWARD: cudnn_convolution, _BACKWARD: cudnn_convolution_backward},
}
"""What computes the bytes of an operation, by the device that is planned for."""


def workspace_bytes(target: str, func: Any, args: Any, kwargs: Any, results: Any) -> int | None:
    """Bytes that an operation's kernel takes for itself; None where none are known of.

    Args:
        target: the device that is planned for.
        func: an overload, as a dispatch mode sees it.
        args: of fake or real tensors.
        kwargs: the same.
        results: what it returned.
    """
    of_kernel = _TABLES[target].get(func.overloadpacket)
    return None if of_kernel is None else of_kernel(results, *args, **kwargs)


def possible_bytes(target: str, func: Any, args: Any, kwargs: Any, results: Any) -> int:
    """Most bytes that an operation's kernel may take for itself beside what is known, where libraries choose among
    kernels. The arguments are those of :func:`workspace_bytes`."""
    return cudnn_columns(*args, **kwargs) if target == "cuda" and func.overloadpacket is _FORWARD else 0
