"""Products of linear layers on a card in fewer bits (``precision: {kind: float8}``) and with 2:4 sparse weights.

    python -m benchmarks.cards.products --keep  # on a card: half a minute

Of float8: errors, relative in L2, of outputs and gradients against fp32, beside bf16's; and what share of numbers is
lost where one number of an input, weight or gradient is none or infinite: 1 is all of them, so that it is seen. Of a
weight in bf16 of which every four numbers have two zeros, packed by torch for cuSPARSELt and multiplied in inference:
its bytes and milliseconds (a median of 20) beside the dense one's, and the error against it; the package does not have
such weights. torch packs for CUTLASS too, whose kernel refuses a card of capability 9.0.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from autotune.techniques.support.bits.float8_linear import Float8Linear

from ..rows import save_rows

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Shape = tuple[int, int]
_SHAPES: tuple[Shape, ...] = ((768, 3072), (4096, 11008))
_SMALL: Shape = (64, 128)
_WARM, _TIMES = 5, 20


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(f"{(found.float() - wanted.float()).norm() / wanted.float().norm():.3g}")


def _run(kind: str, shape: Shape, x: Tensor, grad: Tensor, bad: str = "", value: float = 0.0) -> dict[str, Tensor]:
    """Outputs, and gradients of the input, weight and bias. A number of one of the tensors is another."""
    torch.manual_seed(0)
    linear = nn.Linear(*shape, device=_DEVICE)
    if kind == "float8":
        linear.__class__ = Float8Linear  # whatever its size
    if bad:
        {"input": x, "weight": linear.weight.detach(), "gradient": grad}[bad][1, 1] = value
    x = x.detach().requires_grad_()
    with torch.autocast(_DEVICE, torch.bfloat16, enabled=kind != "fp32"):
        y = linear(x)
    gradients = torch.autograd.grad(y, (x, *linear.parameters()), grad.to(y.dtype))
    return dict(zip(("output", "input", "weight", "bias"), (y, *gradients), strict=True))


def errors(shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of bf16 and of float8, with an input of that type."""
    torch.manual_seed(1)
    x = (3 * torch.randn(rows, shape[0], device=_DEVICE)).to(dtype)
    grad = 1e-5 * torch.randn(rows, shape[1], device=_DEVICE)
    wanted = _run("fp32", shape, x.float(), grad)
    found = {kind: _run(kind, shape, x, grad) for kind in ("bf16", "float8")}
    each = {kind: {name: _error(one[name], wanted[name]) for name in wanted} for kind, one in found.items()}
    return {"products": "float8", "shape": shape, "rows": rows, "input": str(dtype), "errors": each}


def lost() -> dict[str, Any]:
    """Of outputs, or of the weight's gradient where the number is a gradient; and whether zeros' are bf16's."""
    share = {}
    for value in (float("nan"), float("inf")):
        for bad in ("input", "weight", "gradient"):
            x, grad = torch.randn(32, _SMALL[0], device=_DEVICE), torch.randn(32, _SMALL[1], device=_DEVICE)
            found = _run("float8", _SMALL, x, grad, bad, value)["weight" if bad == "gradient" else "output"]
            share[f"{bad} {value}"] = 1 - found.isfinite().double().mean().item()
    x, grad = (torch.zeros(32, one, device=_DEVICE) for one in _SMALL)
    pairs = zip(*(_run(kind, _SMALL, x, grad).values() for kind in ("float8", "bf16")), strict=True)
    stay = all(itertools.starmap(torch.equal, pairs))
    return {"products": "float8", "shape": _SMALL, "rows": 32, "lost": share, "zeros_stay": stay}


def _milliseconds(run: Callable[[], Any]) -> float:
    """By the card's clock."""
    for _ in range(_WARM):
        run()
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    pairs = [(event(), event()) for _ in range(_TIMES)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs), 4)


@torch.inference_mode()
def sparse(shape: Shape, rows: int) -> dict[str, Any]:
    """Of a weight whose two largest of every four numbers stay."""
    torch.manual_seed(0)
    weight = torch.randn(shape[1], shape[0], device=_DEVICE, dtype=torch.bfloat16)
    fours = weight.view(-1, 4)
    two = torch.zeros_like(fours).scatter_(1, fours.abs().topk(2, 1).indices, 1)
    dense = (fours * two).view_as(weight)
    packed = SparseSemiStructuredTensorCUSPARSELT.from_dense(dense)
    assert packed.packed is not None, "numbers with their places"
    x = torch.randn(rows, shape[0], device=_DEVICE, dtype=torch.bfloat16)
    weights = {"dense": dense, "sparse": packed}
    return {
        "products": "2:4",
        "shape": shape,
        "rows": rows,
        "bytes": {"dense": dense.nbytes, "sparse": packed.packed.untyped_storage().nbytes()},
        "ms": {key: _milliseconds(functools.partial(F.linear, x, one)) for key, one in weights.items()},
        "error": _error(F.linear(x, packed), F.linear(x, dense)),
    }


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny products, also on a CPU, which has no sparse ones")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/products-cuda.jsonl")
    arguments = parser.parse_args()
    shapes, rows = ((_SMALL,), (64, 10)) if arguments.small else (_SHAPES, (8192, 1000))
    found = [*map(errors, (shapes[0],) * 2, rows, (torch.bfloat16, torch.float32)), lost()]
    if _DEVICE == "cuda":
        found += [sparse(shape, number) for shape in shapes for number in (512, 4096)]
    for row in found:
        print(row, flush=True)
    if arguments.keep:
        save_rows("products", "cuda", found)


if __name__ == "__main__":
    main()
