"""``Twin``: a copy whose tensors hold their own flat indices, so that whatever cuts it shows what it kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .rebuild import record_of, tensors_of
from .record import Record


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model with tensors that were computed, such as a weight under weight norm."""
    computed = (one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor))
    return copy.deepcopy(model, {id(one): one.detach().clone() for one in computed if not one.is_leaf})


class Twin:
    """A copy to be traced with the model's values, then cut with places in the stead of values."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: is left alone.
        """
        self._original = model
        self.model = copied(model).requires_grad_(True)
        """To be traced, or tagged and cut."""
        self._turned = _turn_conv1d(self.model)

    def set_modes(self) -> None:
        """Put train and eval modes back: a loss may be there in training alone."""
        for path, module in self._original.named_modules():
            self.model.get_submodule(path).training = module.training

    def tag(self) -> None:
        """Replace each value by its place in the original's tensor."""
        sources = tensors_of(self._original)
        tagged: set[int] = set()
        for path, module in self.model.named_modules():
            for leaf, tensor in _own_tensors(module):
                source = sources[f"{path}.{leaf}" if path else leaf]
                if id(tensor) not in tagged and tensor.dim() and tensor.is_floating_point():
                    tagged.add(id(tensor))
                    places = torch.arange(source.numel(), dtype=torch.float64).reshape(source.shape)
                    tensor.data = places.T.contiguous() if module in self._turned and leaf == "weight" else places

    def record(self) -> Record:
        """What was kept.

        Raises:
            ValueError: that is no choice of indices in each dimension, or tied tensors differ.
        """
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for module, conv1d in self._turned.items():
            assert isinstance(module, nn.Linear)
            vars(conv1d).update(nx=module.in_features, nf=module.out_features)
        originals = {path: self._turned.get(module, module) for path, module in modules.items()}
        return record_of(self._original, self.model, originals)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _turn_conv1d(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Put linear layers in the place of transformers' ``Conv1D``, which is one with its weight transposed."""
    turned: dict[nn.Module, nn.Module] = {}
    by_old: dict[nn.Module, nn.Linear] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D" and hasattr(child, "nf"):
                if child not in by_old:
                    by_old[child] = linear = nn.Linear(1, 1, bias=getattr(child, "bias", None) is not None)
                    assert isinstance(child.weight, Tensor)
                    linear.weight = nn.Parameter(child.weight.detach().T.contiguous())
                    linear.out_features, linear.in_features = linear.weight.shape
                    if isinstance(child.bias, nn.Parameter):
                        linear.bias = child.bias
                    linear.train(child.training)
                    turned[linear] = child
                setattr(module, name, by_old[child])
    return turned
