"""What growing back gains: a job whose sequences double and whose neighbour takes a fifth of the device for a while.

    python -m benchmarks.growing_back --keep

A small language model, a transformer or GRUs, trains for 600 optimizer steps of 16 sequences: of 32 words, from step
250 on of 64. From step 300 to 400 a neighbour has a fifth of the memory. ``apply(…, halve_when_out_of_memory=True)``
begins with micro-batches of 16; the static plan has those of 4, which always fit. The device's memory is simulated:
what autograd keeps for the backward pass is counted, and more than there is raises torch's error. The rest is real, and
both jobs run in turn. Bars: no death, 1.3 times the speed of the static plan, and its losses to rounding: the first
hundred to 1e-4, as training amplifies it. What larger micro-batches gain is the model's: GRUs take sixteen sequences
about as fast as four.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import autotune
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch

from .rows import save_rows

SAMPLES, WORDS, SHORT, LONG, WIDTH, STATIC = 16, 256, 32, 64, 64, 4
NUM_STEPS, LONGER_AT, NEIGHBOUR, TAKES, CALM_STEPS = 600, 250, range(300, 400), 0.2, 25
BAR, SAME, COMPARED = 1.3, 1e-4, 100


def main() -> None:
    """Run both in turn, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="add the row to benchmarks/results/growing_back-cpu.jsonl")
    arguments = parser.parse_args()
    rows = [compare(kind, arguments.rounds) for kind in ("transformer", "GRU")]
    if arguments.keep:
        print(save_rows("growing_back", "cpu", rows))


def compare(kind: str, num_rounds: int) -> dict[str, Any]:
    """One row, which is printed."""
    room_bytes = 1.1 * train(kind, SAMPLES, float("inf"), adapts=False, num_steps=2)["most_bytes"]
    pairs = [
        (train(kind, SAMPLES, room_bytes, adapts=True), train(kind, STATIC, room_bytes, adapts=False))
        for _ in range(num_rounds)
    ]
    adaptive, static = pairs[0]
    ratios = [other["seconds"] / one["seconds"] for one, other in pairs]
    both = zip(adaptive["losses"][:COMPARED], static["losses"][:COMPARED], strict=True)
    row = {
        "model": kind,
        "room_bytes": int(room_bytes),
        "micros": adaptive["micros"],
        "seconds": [[round(each["seconds"], 2) for each in pair] for pair in pairs],
        "speed": [round(ratio, 3) for ratio in ratios],
        "losses_differ_by": max(abs(one - other) / other for one, other in both),
        "last_losses": [adaptive["losses"][-1], static["losses"][-1]],
    }
    print(
        f"{kind}: micro-batches {' → '.join(map(str, row['micros']))}: {statistics.median(ratios):.2f}x the speed of "
        f"{STATIC} throughout ({min(ratios):.2f} to {max(ratios):.2f}; bar {BAR}); the first {COMPARED} "
        f"losses differ by at most {row['losses_differ_by']:.1e} (bar {SAME:.0e})"
    )
    return row


class Model(nn.Module):
    """Predicts each next word."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks: nn.Module = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (samples, length); logits of shape (samples, length, WORDS)."""
        if isinstance(self.blocks, nn.GRU):
            return self.head(self.blocks(self.embed(words))[0])  # type: ignore[no-any-return]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.blocks(self.embed(words), mask=mask, is_causal=True))  # type: ignore[no-any-return]


@dataclass
class Device:
    """Memory for what autograd keeps, as it is at the moment."""

    room_bytes: float = float("inf")
    step: int = 0
    most_bytes: int = 0
    _kept_bytes: int = field(default=0, init=False)
    _kept: set[int] = field(default_factory=set, init=False)
    """Addresses of what counts already."""

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Of the words that this step's sequences have."""
        words = batch[0][:, : 1 + (LONG if self.step >= LONGER_AT else SHORT)]
        self._kept_bytes = 0
        self._kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            logits = model(words[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._kept_bytes += 0 if storage.data_ptr() in self._kept else storage.nbytes()
        self._kept.add(storage.data_ptr())
        self.most_bytes = max(self.most_bytes, self._kept_bytes)
        if self._kept_bytes > self.room_bytes * (1 - TAKES * (self.step in NEIGHBOUR)):
            raise torch.OutOfMemoryError("CUDA out of memory (simulated).")
        return tensor


def train(kind: str, micro: int, room_bytes: float, adapts: bool, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """A job from its beginning to its end: seconds, losses, and the micro-batches that it took."""
    device = Device(room_bytes)
    words = torch.randint(0, WORDS, (SAMPLES * 64, 1 + LONG), generator=torch.Generator().manual_seed(0))
    plan = Plan(settings=Settings(batch=Batch(micro=micro, accumulate=SAMPLES // micro)))
    torch.manual_seed(0)
    training = autotune.apply(
        plan,
        model=Model(kind),
        dataset=torch.utils.data.TensorDataset(words),
        loss=device.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=SAMPLES,
        halve_when_out_of_memory=adapts,
        calm_steps=CALM_STEPS,
    )
    losses, total, micros = [], 0.0, [micro]
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(losses) < num_steps:
            for batch in training.loader:
                result = training.step(batch)
                total += float(result.loss) * micro / SAMPLES
                if result.stepped:
                    losses.append(total)
                    total, device.step = 0.0, len(losses)
                    micros += [training.batch.micro] if micros[-1] != training.batch.micro else []
                    if len(losses) == num_steps:
                        break
    return {
        "seconds": time.perf_counter() - began,
        "losses": losses,
        "micros": micros,
        "most_bytes": device.most_bytes,
    }


if __name__ == "__main__":
    main()
