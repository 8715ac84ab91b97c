"""Weights of a card's job in its host's pinned memory (``offload: {kind: parameters, to: host}``), beside stock.

    python -m benchmarks.cards.host_weights --keep  # on a card: a minute

A LLaMA-like in bf16, 2,048 features, blocks recomputed in training, 8 times 2,048 tokens: frozen weights under adapters
of rank 8 (20 blocks), all in inference (20), and all that train, with AdamW's averages, in backward (8). Bits are
compared with kernels that give the same ones again; peaks and steps are measured without. A step is the mean of a round
of several, the faster of two rounds, and so is the link's speed. What ``tests/card`` states over its stand-in is not
repeated but for equal bits and peaks, which there are a CPU's kernels' and a replayed allocator's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune
from autotune import Plan
from autotune.plan import Inference
from autotune.techniques import Settings
from autotune.techniques.support.disk.kept_on_host import most_host_bytes
from autotune.units import MIB

from ..layer_models import LoRA
from ..rows import save_rows

_BLOCKS: dict[str, Any] = {"checkpointing": {"kind": "blocks"}}
_ON_HOST: dict[str, Any] = {"kind": "parameters", "to": "host"}
_THERE = 3
"""Blocks whose weights are on the card at a time."""
_LINK_BYTES = 256 * MIB
_ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """Of a model and its batch."""

    features: int
    hidden: int
    heads: int
    words: int
    batch: int
    length: int


SIZE, SMALL = Size(2048, 5632, 16, 32000, 8, 2048), Size(256, 512, 4, 512, 2, 64)


@dataclass(frozen=True)
class Job:
    """What is done with a model: by default, adapters train."""

    blocks: int
    compared: int
    """Runs whose bits are compared."""
    timed: int
    """Steps of a round."""
    settings: dict[str, Any]
    inference: bool = False
    trained: bool = False

    def plan(self, offload: bool) -> Plan:
        """With the weights on the host, or stock."""
        found = {"offload": {**_ON_HOST, "trained": self.trained}} if offload else {}
        inference = Inference(tolerance=0.0) if self.inference else None
        return Plan(settings=Settings.model_validate(self.settings | found), inference=inference)

    def copies(self) -> float:
        """How often a step copies its blocks' weights, or as much: forward and backward each find three blocks there;
        of what trains, the weights go back, and two averages come and go."""
        return 1 if self.inference else 2 * (1 - _THERE / self.blocks) + 5 * self.trained


JOBS = {
    "adapters": Job(20, 2, 6, _BLOCKS),
    "inference": Job(20, 2, 6, {}, inference=True),
    "all train": Job(8, 4, 2, _BLOCKS | {"optimizer_step": {"kind": "in_backward"}}, trained=True),
}


class Block(nn.Module):
    """Attention with adapters on queries and values, and a gated feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.heads, features = size.heads, size.features
        self.norm, self.norm2 = nn.RMSNorm(features), nn.RMSNorm(features)
        self.q, self.v = (LoRA(linear(features, features)) for _ in range(2))
        self.k, self.o = (linear(features, features).requires_grad_(False) for _ in range(2))
        self.gate, self.up = (linear(features, size.hidden).requires_grad_(False) for _ in range(2))
        self.down = linear(size.hidden, features).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Frozen, but for adapters and norms."""

    def __init__(self, size: Size, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.features).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.norm = nn.RMSNorm(size.features)
        self.head = nn.Linear(size.features, size.words, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor, last: bool = False) -> Tensor:
        """
        Args:
            tokens: (batch, length).
            last: whether outputs are those of the last token alone.
        """
        x = self.embed(tokens)
        for one in self.blocks:
            x = one(x)
        return self.head(self.norm(x[:, -1] if last else x))  # type: ignore[no-any-return]


def _built(size: Size, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return Llama(size, blocks)
    finally:
        torch.set_default_dtype(torch.float32)


def _step(model: nn.Module, tokens: Tensor) -> Tensor:
    """Its loss; gradients are those of this step alone."""
    model.zero_grad()
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@torch.inference_mode()
def _infer(model: nn.Module, tokens: Tensor, last: bool = True) -> Tensor:
    return model(tokens, last=last)  # type: ignore[no-any-return]


def _seconds_and_peak(work: Callable[[], Any], num_steps: int) -> tuple[float, int]:
    work()
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        for _ in range(num_steps):
            work()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began_s) / num_steps)
    return min(found), torch.cuda.max_memory_allocated()


def _link_bytes_per_s() -> float:
    """From pinned memory to the card."""
    pinned = torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(pinned, device="cuda")
    return _LINK_BYTES / _seconds_and_peak(lambda: there.copy_(pinned, non_blocking=True), 6)[0]


def _bits(job: Job, model: nn.Module, few: Tensor) -> list[Tensor]:
    """Outputs; or losses, gradients where they are left, and the weights of a block."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = []
    for _ in range(job.compared):
        found.append((_infer(model, few, last=False) if job.inference else _step(model, few)).cpu())
        found.extend(one.grad.cpu() for one in model.parameters() if one.grad is not None)
    torch.use_deterministic_algorithms(False)
    return [*found, *(one.cpu() for name, one in model.state_dict().items() if name.startswith("blocks.3."))]


@dataclass(frozen=True)
class Found:
    """Of a job with or without offload."""

    bits: list[Tensor]
    step_s: float
    peak_bytes: int
    moved_bytes: int
    """Of weights that are not on the card all the time."""
    host_bytes: int


def _run(job: Job, size: Size, offload: bool) -> Found:
    gc.collect()
    torch.cuda.empty_cache()
    plan, model, optimizer = job.plan(offload), _built(size, job.blocks), None
    model = autotune.apply_to_model(plan, model.requires_grad_() if job.trained else model)
    if job.trained:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        optimizer = autotune.apply_to_optimizer(plan, adamw)
    words = torch.randint(0, size.words, (size.batch, size.length), generator=torch.Generator().manual_seed(1))
    tokens = words.to("cuda")
    bits, work = _bits(job, model, tokens[:2, :512]), _infer if job.inference else _step
    seconds, peak = _seconds_and_peak(lambda: work(model, tokens), job.timed)
    moved = sum(one.nbytes for one in model.parameters() if type(one) is not nn.Parameter)
    if optimizer is not None:
        autotune.apply_to_optimizer(Plan(settings=Settings()), optimizer)  # its hooks hold it and the model
    return Found(bits, seconds, peak, moved, most_host_bytes(model))


def measure(name: str, size: Size, bytes_per_s: float) -> dict[str, Any]:
    """A job's row, where the link copies so many bytes."""
    job = JOBS[name] if size is SIZE else dataclasses.replace(JOBS[name], blocks=6)
    stock, found = _run(job, size, False), _run(job, size, True)
    each = {"stock": stock, "offload": found}
    return {
        "job": name,
        "blocks": job.blocks,
        "batch": size.batch,
        "length": size.length,
        "equal_bits": len(stock.bits) == len(found.bits) and all(map(torch.equal, stock.bits, found.bits)),
        "moved_mib": round(found.moved_bytes / MIB),
        "host_mib": round(found.host_bytes / MIB),
        "peak_mib": {key: round(one.peak_bytes / MIB) for key, one in each.items()},
        "step_ms": {key: round(1e3 * one.step_s, 1) for key, one in each.items()},
        "time_ratio": round(found.step_s / stock.step_s, 3),
        "copies_ms": round(1e3 * job.copies() * found.moved_bytes / bytes_per_s, 1),
        "link_gb_per_s": round(1e-9 * bytes_per_s, 1),
    }


def main() -> None:
    """Measure each job, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model: whether it runs, not what it finds")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/host-weights-cuda.jsonl")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal bits
    link = _link_bytes_per_s()
    for name in JOBS:
        row = measure(name, SMALL if arguments.small else SIZE, link)
        print(row, flush=True)
        if arguments.keep:
            save_rows("host-weights", "cuda", [row])


if __name__ == "__main__":
    main()
