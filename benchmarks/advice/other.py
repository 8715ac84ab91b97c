"""What is no training step of the six jobs: weights of other kinds in a forward pass, gradients that end, peaks
predicted for a card."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotune import Plan, layers
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.units import MIB

from ..steps import Step, ratios_of, take_turns
from . import processes, ranks
from .jobs import JOBS, SIDE, vit
from .known import ON_A_CARD
from .measure import built

SHAPES = {"char GPT": (768, 192), "GPT-2": (3072, 768), "ViT": (768, 192)}
"""Outputs and inputs of a feed-forward layer."""
_SPARSITY, _BLOCK, _POSITIONS = 0.9, 32, 512


def measure_weights(name: str) -> dict[str, Any]:
    """A feed-forward layer's forward with weights of nine tenths zeros, or of 8 bits, over the dense fp32 one's."""
    torch.manual_seed(0)
    outputs, inputs = SHAPES[name]
    layer, x = nn.Linear(inputs, outputs, bias=False).requires_grad_(False), torch.randn(_POSITIONS, inputs)
    weight = layer.weight
    single = torch.rand_like(weight) < _SPARSITY
    blocks = (torch.rand(outputs // _BLOCK, inputs // _BLOCK) < _SPARSITY).kron(torch.ones(_BLOCK, _BLOCK)).bool()
    csr, bsr = weight.masked_fill(single, 0).to_sparse_csr(), weight.masked_fill(blocks, 0).to_sparse_bsr(_BLOCK)
    int8 = _quantized(nn.Sequential(layer))
    seconds = take_turns(
        {
            "dense": lambda: F.linear(x, weight),
            "csr": lambda: torch.mm(csr, x.T),
            "bsr": lambda: torch.mm(bsr, x.T),
            "int8": lambda: int8(x),
        },
        30,
        time.process_time,
    )
    ratios = {key: ratios_of(taken[5:], seconds["dense"][5:]) for key, taken in seconds.items() if key != "dense"}
    num_bytes = {"csr": _sparse_bytes(csr), "bsr": _sparse_bytes(bsr), "int8": weight.numel()}
    return {
        "part": "weights",
        "model": name,
        "threads": torch.get_num_threads(),
        "bytes_ratio": {key: round(found / weight.nbytes, 3) for key, found in num_bytes.items()},
        "time_ratio": {key: round(statistics.median(found), 3) for key, found in ratios.items()},
        "time_spread": {key: [round(min(found), 3), round(max(found), 3)] for key, found in ratios.items()},
    }


def _sparse_bytes(weight: Tensor) -> int:
    return weight.values().nbytes + weight.crow_indices().nbytes + weight.col_indices().nbytes


def _quantized(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        found: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return found


def count_gradients(name: str) -> dict[str, Any]:
    """Parameters that have a gradient after a backward pass of the job with linear layers quantized dynamically."""
    task = JOBS[name]()
    stock = task.build_model()
    model, dataset, size = _quantized(stock), task.build_dataset(), task.batch_size
    assert size is not None, "each job states it"
    batch = torch.utils.data.default_collate([dataset[number] for number in range(size)])
    error = None
    try:
        task.compute_loss(model, batch).backward()
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    return {
        "part": "quantized",
        "model": name,
        "parameters": sum(one.numel() for one in stock.parameters()),
        "with_gradient": sum(one.numel() for one in model.parameters() if one.grad is not None),
        "error": error,
    }


def predict_card(name: str) -> dict[str, Any]:
    """All tensors of a step at their peak on a card, and what plans make of it; nothing runs. None is a plan that the
    model cannot have."""
    task = JOBS[name]()
    size = task.batch_size
    assert size is not None, "each job states it"

    def peak_bytes(settings: dict[str, Any]) -> float | None:
        plan = Plan(settings=Settings.model_validate(settings))
        try:
            return max(fit_memory_model(plan, task, target="cuda", few=size).at(size).live_bytes())
        except PlanError:
            return None

    stock = peak_bytes({})
    assert stock is not None, "it is the job as it stands"
    found = {key: peak_bytes(settings) for key, (_, settings) in ON_A_CARD.items()}
    return {
        "part": "predicted",
        "model": name,
        "peak_mib": round(stock / MIB, 1),
        "peak_ratio": {key: None if peak is None else round(peak / stock, 3) for key, peak in found.items()},
    }


_CONVOLUTIONS, _WIDTH, _BLOCKS = (4, 8, 16), 16, (3, 6, 12)


def grow_convolutions(_: str) -> dict[str, Any]:
    """What frozen convolutions keep for backward, by how many there are, with torch's and with saving layers."""

    def kept_mib(number: int, convert: bool) -> float:
        model = nn.Sequential(*(nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1) for _ in range(number))).requires_grad_(False)
        x = torch.randn(8, _WIDTH, SIDE, SIDE, requires_grad=True)
        run = lambda model: model(x).sum()  # noqa: E731
        step = Step(layers.convert(model, run) if convert else model, run)
        return round(step.kept_bytes() / MIB, 2)

    found = {key: [kept_mib(number, key == "exact") for number in _CONVOLUTIONS] for key in ("stock", "exact")}
    return {"part": "depth", "model": "convolutions", "layers": [*_CONVOLUTIONS], "kept_mib": found}


def grow_blocks(name: str) -> dict[str, Any]:
    """The peak with all blocks recomputed over stock's, by how many there are."""
    size, ratios = JOBS[name]().batch_size, []
    assert size is not None, "each job states it"
    for number in _BLOCKS:
        task = dataclasses.replace(JOBS[name](), build_model=functools.partial(vit, number))
        settings = {"batch": Batch(micro=size)}
        stock, recomputed = (built({**settings, **one}, task)[1] for one in ({}, {"checkpointing": {"kind": "blocks"}}))
        ratios.append(round(recomputed / stock, 3))
    return {"part": "deep", "model": name, "blocks": [*_BLOCKS], "peak_ratio": ratios}


OTHERS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "weights": (measure_weights, (*SHAPES,)),
    "ranks": (ranks.measure, ("char GPT", "U-Net", "ViT")),
    "processes": (processes.measure, ("char GPT", "U-Net", "ViT")),
    "depth": (grow_convolutions, ("U-Net",)),
    "deep": (grow_blocks, ("ViT",)),
    "quantized": (count_gradients, ("char GPT", "ViT", "embedding")),
    "predicted": (predict_card, ("char GPT", "ViT", "U-Net", "embedding", "GPT-2")),
}
"""Each with the jobs that it is of."""
