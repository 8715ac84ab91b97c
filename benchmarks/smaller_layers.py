"""What masks, and factors of low rank, save of one linear layer: numbers stored, and the time of a step.

    python -m benchmarks.smaller_layers [--rounds 20] [--samples 256]

Times are processor seconds of forward and backward on one thread, each layer and the whole one in turns; the ratio is
the median over rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from autotune.pruning import factorise

from .rows import environment, save_rows

__all__ = ["main"]

_INPUTS, _OUTPUTS = 512, 2048
_RANKS = (32, 64, 128, 256)


def main() -> None:
    """Print the table, and keep its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--samples", type=int, default=256, help="rows of the input")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{environment('cpu')}\na linear layer {_INPUTS} → {_OUTPUTS}, {arguments.samples} rows")
    whole = nn.Sequential(nn.Linear(_INPUTS, _OUTPUTS))
    x = torch.randn(arguments.samples, _INPUTS, requires_grad=True)
    for name, layer in _layers(whole):
        pairs = [[_step_s(one, x) for one in (whole, layer)] for _ in range(arguments.rounds + 1)][1:]
        row = {
            "layer": name,
            "samples": arguments.samples,
            "numbers": _numbers(layer),
            "numbers_whole": _numbers(whole),
            "processor_s": pairs,
        }
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(f"{name:32}{row['numbers'] / row['numbers_whole']:8.2f}{ratio:8.2f}", flush=True)
        save_rows("smaller-layers", "cpu", [row])


def _layers(whole: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    for share in (0.5, 0.9):
        masked = copy.deepcopy(whole)
        prune.l1_unstructured(masked[0], "weight", amount=share)
        yield f"mask, {share:.0%} of the weights", masked
    for rank in _RANKS:
        factors = copy.deepcopy(whole)
        factorise(factors, (("0", rank),))
        yield f"low rank, {rank}", factors


def _step_s(layer: nn.Module, x: torch.Tensor) -> float:
    layer.zero_grad()
    began_s = time.process_time()
    layer(x).sum().backward()
    return time.process_time() - began_s


def _numbers(layer: nn.Module) -> int:
    """Of every tensor that the layer holds, a masked weight's product included."""
    held: list[Any] = [one for module in layer.modules() for one in vars(module).values()]
    held += [*layer.parameters(), *layer.buffers()]
    return sum(one.numel() for one in {id(one): one for one in held if isinstance(one, torch.Tensor)}.values())


if __name__ == "__main__":
    main()
