"""What the weights of an encoder of BERT's shape and of a vision transformer cost in inference, by how they are kept:
in fp32, as integers that are multiplied, as codes, or with zeros left out.

    python -m benchmarks.inference_weights --keep  # five minutes

Each forward pass of a batch takes turns with the stock one, on one thread; the bytes are those of all weights. Static
quantization, with one scale for each layer's input from a batch of its own in place of one for each row, and sparse
weights are built here alone: the package does not have them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import autotune
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Budget
from autotune.techniques.support.bits.int8_linear import Int8Linear, linear_layers
from autotune.units import MIB

from .inference import JOBS
from .rows import save_rows
from .steps import ratios_of, take_turns

MODELS = ("bert", "vit")
ZEROS = (50, 80, 90)
"""Percent of a weight's numbers, those of the least magnitude."""
_BATCH, _BLOCK = 8, 32


class Static(nn.Module):
    """An ``Int8Linear`` whose input has one scale, of the largest number that it saw while it was calibrated."""

    def __init__(self, layer: Int8Linear, sees_nan: bool) -> None:
        """
        Args:
            layer: of which it has the codes.
            sees_nan: whether NaN and infinity in a row get to its outputs, as ``Int8Linear``'s scale takes them there.
        """
        super().__init__()
        self.layer, self.sees_nan, self.largest = layer, sees_nan, torch.zeros(())
        self.scales: Tensor | None = None

    def calibrated(self) -> None:
        """Fix the scale."""
        self.per_unit = 127 / float(self.largest)
        self.scales = self.layer.scales / self.per_unit

    def forward(self, x: Tensor) -> Tensor:
        """As ``Int8Linear``; without autocast and empty batches."""
        if self.scales is None:
            self.largest = torch.maximum(self.largest, x.abs().max())
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)
        rows = x.reshape(-1, self.layer.in_features)
        codes = (rows * self.per_unit).round_().nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8)
        outputs = torch._int_mm(codes, self.layer.codes).float().mul_(self.scales)
        outputs = outputs.add_(rows.sum(1, keepdim=True).mul_(0.0)) if self.sees_nan else outputs
        outputs = outputs if self.layer.bias is None else outputs.add_(self.layer.bias)
        return outputs.reshape(*x.shape[:-1], self.layer.out_features)


class Sparse(nn.Module):
    """A linear layer whose weight has no place for zeros."""

    def __init__(self, linear: nn.Linear, percent: int, block: int) -> None:
        """
        Args:
            linear: a stock one.
            percent: of zeros.
            block: numbers on a side of what is left out; 1 is CSR, others BSR.
        """
        super().__init__()
        weight = linear.weight.detach()
        rows, columns = (-(-size // block) for size in weight.shape)
        sizes = weight.reshape(rows, block, columns, block).norm(dim=(1, 3))
        least = sizes.flatten().kthvalue(sizes.numel() * percent // 100).values
        kept = weight * (sizes > least).kron(torch.ones(block, block))
        self.weight = kept.to_sparse_csr() if block == 1 else kept.to_sparse_bsr(block)
        self.bias, self.out_features = linear.bias, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """The product with the rows that are there."""
        found = torch.mm(self.weight, x.reshape(-1, x.shape[-1]).t()).t()
        found = found if self.bias is None else found + self.bias
        return found.reshape(*x.shape[:-1], self.out_features)

    def bytes(self) -> int:
        """Of its numbers and their places."""
        weight = self.weight
        return weight.values().nbytes + weight.crow_indices().nbytes + weight.col_indices().nbytes


def _replaced(model: nn.Module, made_of: Callable[[nn.Linear], nn.Module], block: int = 1) -> nn.Module:
    """A copy with others in the place of linear layers that are whole blocks."""
    model = copy.deepcopy(model)
    for module, name, linear in [*linear_layers(model)]:
        if not (linear.in_features % block or linear.out_features % block):
            setattr(module, name, made_of(linear))
    return model


def _quantized(model: nn.Module, kind: str) -> nn.Module:
    settings = autotune.techniques.Settings.model_validate({"quantization": {"kind": kind}})
    return autotune.apply_to_model(autotune.Plan(settings=settings, budget=Budget(device="cpu")), copy.deepcopy(model))


def _static(model: nn.Module, run: Callable[[nn.Module], Any], sees_nan: bool) -> nn.Module:
    model = _replaced(model, lambda linear: Static(Int8Linear(linear), sees_nan))
    run(model)
    for module in model.modules():
        if isinstance(module, Static):
            module.calibrated()
    return model


def _bytes(model: nn.Module) -> int:
    """Of parameters, buffers and sparse weights, each once."""
    storages = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
    own = sum({one._cdata: one.nbytes() for one in storages}.values())
    return own + sum(one.bytes() for one in model.modules() if isinstance(one, Sparse))


def _norms(outputs: Any, wanted: Any) -> float:
    """The largest over samples and outputs of the distance over the stock outputs' norm."""
    pairs = zip(outputs, wanted, strict=True) if isinstance(outputs, tuple) else ((outputs, wanted),)
    each = [((one - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)).max() for one, other in pairs]
    return float(max(each))


def measure(name: str, rounds: int, batch: int, only_codes: bool) -> list[dict[str, Any]]:
    """Bytes, time and outputs of one model, of each kind of weights."""
    torch.manual_seed(0)
    task = autotune.load_task(str(JOBS / f"{name}.py"), inference=True)
    stock, dataset = task.build_model().eval(), task.build_dataset()
    samples = default_collate([dataset[number] for number in range(batch)])
    others = default_collate([dataset[number] for number in range(batch, 2 * batch)])

    @torch.inference_mode()
    def run(model: nn.Module, samples: Any = samples) -> Any:
        return task.infer(model, samples)

    models = {"fp32": stock, **{kind: _quantized(stock, kind) for kind in ("int8", "int8_weights", "int4_weights")}}
    for key, sees_nan in (("int8_static", True), ("int8_static, NaN unseen", False)):
        models[key] = _static(stock, functools.partial(run, samples=others), sees_nan)
    for percent in () if only_codes else ZEROS:
        for kind, block in (("csr", 1), ("bsr", _BLOCK)):
            made_of = functools.partial(Sparse, percent=percent, block=block)
            models[f"{kind} {percent} %"] = _replaced(stock, made_of, _BLOCK)  # the same layers of both
    wanted, outputs = run(stock), {key: run(model) for key, model in models.items()}
    seconds = take_turns({key: functools.partial(run, one) for key, one in models.items()}, rounds, time.process_time)
    return [
        {
            "model": name,
            "weights": key,
            "batch": batch,
            "threads": torch.get_num_threads(),
            "mib": round(_bytes(models[key]) / MIB, 2),
            "bytes_ratio": round(_bytes(models[key]) / _bytes(stock), 3),
            "seconds": [round(one, 4) for one in taken],
            "time_ratio": round(statistics.median(ratios := ratios_of(taken, seconds["fp32"])), 3),
            "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "over_int8": round(statistics.median(ratios_of(taken, seconds["int8"])), 3),
            "outputs_differ": round(_norms(outputs[key], wanted), 4),
        }
        for key, taken in seconds.items()
    ]


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=_BATCH)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--only-codes", action="store_true", help="without sparse weights")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/inference-weights-cpu.jsonl")
    arguments = parser.parse_args()
    for name in arguments.model or MODELS:
        with one_thread():
            rows = measure(name, arguments.rounds, arguments.batch, arguments.only_codes)
        for row in rows:
            print(row, flush=True)
        if arguments.keep:
            save_rows("inference-weights", "cpu", rows)


if __name__ == "__main__":
    main()
