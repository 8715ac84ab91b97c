"""Recognizes hand-written layers that compute what a function of torch computes: their forward is run, never read."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import Caught

_TOLERANCE = 1e-6
_LEAST = 1e-10
"""Absolute difference that values near zero may have."""
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "find_equivalent_op has seen it"
    return F.rms_norm(x, weight.shape, weight, _eps(module))


_OPS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "gelu": lambda module, x: F.gelu(x),
    "gelu_tanh": lambda module, x: F.gelu(x, approximate="tanh"),
    "silu": lambda module, x: F.silu(x),
    "relu": lambda module, x: F.relu(x),
    "rms_norm": _rms_norm,
}
"""Functions of torch that a hand-written module may compute, by name."""


@dataclass(frozen=True)
class EquivalentOp:
    """A function of torch that a module computes."""

    name: str
    parts: tuple[tuple[str, Any], ...]
    """Functions that the module has as attributes."""

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """What ``module`` returns for ``x``."""
        return _OPS[self.name](module, x)

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's attributes are still the same."""
        return all(vars(module).get(name) is part for name, part in self.parts)


def find_equivalent_op(module: nn.Module) -> EquivalentOp | None:
    """The function of torch that a module without children computes; None where there is none, or it cannot tell.

    A copy of it is run, in training and in eval mode, without hooks: values and gradients have to agree over the range
    of what activations see, and in several shapes. Modules with attributes of their own (a bound, a slope that
    training changes) are refused, but for an epsilon and functions; so are those that draw random numbers, or note
    something on themselves.
    """
    if type(module).__module__.startswith("torch.nn.") or any(True for _ in module.children()) or module._buffers:
        return None
    parameters = dict(module.named_parameters())
    if len(inspect.signature(module.forward).parameters) != 1 or set(parameters) - {"weight"}:
        return None
    parts = tuple((name, value) for name, value in vars(module).items() if name not in _OWN)
    if not all(callable(value) for _, value in parts):
        return None
    state = torch.get_rng_state()
    try:
        with Caught(), torch.enable_grad():  # a user's forward may raise anything at what it was not written for
            found = _find_norm(module) if parameters else _find_activation(module)
            if found is not None and torch.equal(torch.get_rng_state(), state):
                return EquivalentOp(found, parts)
        return None
    finally:
        torch.set_rng_state(state)


_OWN = frozenset((*vars(nn.Module()), *_EPS_NAMES, "_is_hf_initialized"))
"""Attributes that such a module may have: the last is a mark of transformers'."""


def _find_activation(module: nn.Module) -> str | None:
    near, far = torch.linspace(-8, 8, 160).double(), torch.tensor([30.0, 100.0, 1e4, 1e39], dtype=torch.float64)
    grid = torch.cat([near, far, -far])
    inputs = [grid, grid.view(2, 4, 21), grid.view(1, 2, 4, 21)]
    names = (name for name in _OPS if name != "rms_norm")
    return next((name for name in names if _agrees(module, name, inputs, _TOLERANCE)), None)


def _find_norm(module: nn.Module) -> str | None:
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.device.type == "meta" or _eps(module) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (torch.randn(*shape, len(weight), generator=generator) * scale).to(weight)
        for shape, scale in (((4,), 1.0), ((2, 3), 1e-3), ((2, 3, 2), 1e3))
    ]
    return "rms_norm" if _agrees(module, "rms_norm", inputs, 1e-5) else None


def _agrees(module: nn.Module, name: str, inputs: list[Tensor], tolerance: float) -> bool:
    """Whether a copy has the values and the gradients of torch's function, in either mode, and changes no input."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        parameter.requires_grad_()
    before = dict(vars(copied))
    for training, x in itertools.product((True, False), inputs):
        copied.training = training
        found = _with_gradients(lambda x: type(module).forward(copied, x), x, copied)
        wanted = _with_gradients(lambda x: _OPS[name](copied, x), x, copied)
        if not all(_is_close(one, other, tolerance) for one, other in zip(found, wanted, strict=True)):
            return False
    return all(value is before.get(key) for key, value in vars(copied).items() if key != "training")


def _with_gradients(run: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    leaf = x.clone().requires_grad_()  # which nobody can change in place
    output = run(leaf)
    weights = torch.linspace(0.5, 1.5, output.numel()).to(output).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], weights)]


def _eps(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPS_NAMES)
    return next((value for value in values if isinstance(value, float)), None)


def _is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if wanted.dtype == torch.float64:
        return bool(((found - wanted).abs() <= tolerance * wanted.abs() + _LEAST).all())
    scale = wanted.abs().max()
    return bool(((found - wanted).abs() <= tolerance * torch.maximum(scale, torch.ones_like(scale))).all())
