"""A call of a part of a block that is made again in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ..recomputed import Buffers


class Call:
    """A call that is made again: with the random numbers, the autocast and the buffers that it had."""

    def __init__(self, module: nn.Module, buffers: Buffers) -> None:
        self._module = module
        self._first, self._again = buffers.contexts()

    def first(self, x: Tensor) -> Tensor:
        """Its result without a graph. Gradients are on, since layers may compute another way without; nothing is
        saved."""
        self._random, self._on_device = torch.get_rng_state(), get_device_states(x)
        kind = x.device.type
        self._autocast: dict[str, Any] = {"device_type": kind, "enabled": False}
        if torch.amp.is_autocast_available(kind):
            self._autocast |= {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
        with torch.enable_grad(), saved_tensors_hooks(forget, gone), self._first:
            found: Tensor = self._module(x.detach().requires_grad_())
        self._parameters = self._versions()
        return found.detach()

    def again(self, x: Tensor) -> Tensor:
        """Its result with a graph that begins at ``x``.

        Raises:
            RuntimeError: its parameters are others by now.
        """
        if self._parameters != self._versions():
            raise RuntimeError(
                "reversible: a parameter of f or g was changed in place or replaced after forward, and backward needs "
                "it as it was. Change parameters after backward, or leave reversible out of the plan."
            )
        devices, states = self._on_device
        with torch.enable_grad(), forked(x), torch.autocast(**self._autocast), self._again:
            torch.set_rng_state(self._random)
            set_device_states(devices, states, device_type=x.device.type)
            return self._module(x)  # type: ignore[no-any-return]

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(parameter), parameter._version) for parameter in self._module.parameters()]


def forget(_: Any) -> Any:
    """In the place of what would be saved."""


def gone(_: Any) -> Any:
    """
    Raises:
        RuntimeError: what was not saved is asked for.
    """
    raise RuntimeError(
        "reversible: backward came to a tensor that f or g computed and did not return (an auxiliary loss?), "
        "of which nothing is saved. Return it, detach it, or leave reversible out of the plan."
    )


def forked(x: Tensor) -> AbstractContextManager[Any]:
    """Random numbers that are drawn within, on the CPU and on the device of ``x``, are as if they had not been."""
    devices, _ = get_device_states(x)
    kind = x.device.type
    return torch.random.fork_rng(devices, device_type=kind if devices else "cuda")  # of no device, its name
