"""``Int8Linear``: a linear layer for inference that multiplies integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_LEAST_FEATURES = 32
"""Of smaller layers, rounding the input takes longer than the product saves."""
_READ_WEIGHTS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""They read the weights of their layers without calling these."""


class Int8Linear(nn.Module):
    """A linear layer whose weight is in int8, with a scale for each output feature. The input is rounded to int8 at
    each call, with a scale for each row, so that a sample's outputs do not depend on the others in its batch.

    Source: Dettmers et al. 2022, arXiv:2208.07339, vector-wise quantization.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Of a stock layer's weight, and its bias as it is."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        weight = linear.weight.detach().float()  # a scale in bf16 is off by more than the last code
        scales = _scales(weight)
        self.register_buffer("codes", _codes(weight, scales).t())  # (in, out), as the product has it
        self.register_buffer("scales", scales.flatten())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features): what the codes stand for, made anew."""
        return (self.codes.t() * self.scales.float()[:, None]).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """
        Args:
            input: (…, in_features) of any floating type, in which the outputs are too; under autocast in its type.

        Returns:
            (…, out_features).
        """
        device, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
        rows = input.reshape(-1, self.in_features).float()
        if rows.shape[0] == 0:  # len() would fix the size in an exported program
            return input.new_zeros(*input.shape[:-1], self.out_features, dtype=dtype)
        scales = _scales(rows)
        # NaN is no number in int8: the scale, which is NaN then, takes it to the outputs
        products = torch._int_mm(_codes(rows, scales), self.codes)
        outputs = products.float().mul_(scales).mul_(self.scales)
        outputs = outputs if self.bias is None else outputs.add_(self.bias)
        return outputs.to(dtype).reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As a stock layer's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def stock(self) -> nn.Linear:
        """A stock layer with the weight as it was rounded."""
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias)
        return made


def _codes(rows: Tensor, scales: Tensor) -> Tensor:
    """In int8, from -127 to 127; 0 for NaN."""
    return (rows * scales.reciprocal()).round_().nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8)


def _scales(rows: Tensor) -> Tensor:
    """(rows, 1): of each row, what 1 stands for."""
    return rows.abs().amax(1, keepdim=True).div_(127).clamp_min_(torch.finfo(rows.dtype).tiny)


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Stock linear layers that are worth it, each with the module that holds it and its name there.

    Those of torch's own transformer layers are left out, and whatever does more than multiply: with hooks, by which
    torch's weight_norm and pruning make a weight anew, a parametrization, or a forward of its own.
    """
    for path, child in model.named_modules(remove_duplicate=False):
        holder, _, name = path.rpartition(".")
        if not path or not isinstance(child, nn.Linear) or type(child) is not nn.Linear:
            continue
        module = model.get_submodule(holder)
        is_worth_it = min(child.in_features, child.out_features) >= _LEAST_FEATURES and child.weight.is_floating_point()
        if is_worth_it and not isinstance(module, _READ_WEIGHTS) and not _does_more(child):
            yield module, name, child


def _does_more(linear: nn.Linear) -> bool:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks)
    return any(hooks) or "forward" in vars(linear) or "weight" not in dict(linear.named_parameters(recurse=False))


def quantize(model: nn.Module) -> int:
    """Put integers into a model's linear layers, one layer at a time; returns how many there are."""
    made: dict[nn.Linear, Int8Linear] = {}  # one that is in two places stays one
    for module, name, linear in [*linear_layers(model)]:
        if linear not in made:
            made[linear] = Int8Linear(linear)
        setattr(module, name, made[linear])
    return len(made)


def restore(model: nn.Module) -> None:
    """Stock layers again, of the weights as they were rounded."""
    made: dict[Int8Linear, nn.Linear] = {}
    for path, child in [*model.named_modules(remove_duplicate=False)]:
        if path and isinstance(child, Int8Linear):
            holder, _, name = path.rpartition(".")
            made[child] = made.get(child) or child.stock()
            setattr(model.get_submodule(holder), name, made[child])
