"""Made-up tables of measurements with the structure that real ones have, for tests of the sampler and of the replay.

A step takes a + b m; a choice changes a and b by factors, and pairs of choices by further factors; the peak is a base
and a part that grows with the micro-batch. Figures follow facts/memory.md: fp32 376 samples/s, bf16 434, channels_last
324, both 510; checkpointing costs 4/3 of the arithmetic.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
CHOICES: dict[str, list[dict[str, Any]]] = {
    "precision": [{"kind": "default"}, {"kind": "bf16"}],
    "memory_format": [{"kind": "contiguous"}, {"kind": "channels_last"}],
    "checkpointing": [{"kind": "none"}, {"kind": "blocks", "every": 1}, {"kind": "blocks", "every": 2}],
    "optimizer": [{"kind": "for_loop"}, {"kind": "foreach"}, {"kind": "fused"}],
    "allocator": [{"kind": "system"}, {"kind": "tcmalloc"}],
}


@dataclass(frozen=True)
class World:
    """What a made-up machine and model do."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    half: float = 4.0
    """Micro-batch at which half of the best speed is reached."""
    effects: bool = True
    """Whether any choice but the batch changes the speed."""
    spread: float = 0.4
    """How much effects differ from seed to seed, as a share."""
    interactions: float = 1.0
    """How much two choices together differ from each alone, over the example in the facts."""
    bad_choice: float = 1.0
    """What ``foreach`` does to the speed, besides."""
    batch_slows: float = 0.0
    """Loss of speed from the smallest batch to the largest, as where a cache overflows; in logarithms."""
    noise: float = 0.015
    """Of the speed, from repeat to repeat."""
    outliers: float = 0.0
    """Share of repeats that are 8 % slow."""
    peak_noise: float = 0.002
    base_bytes: float = 400 * MIB
    sample_bytes: float = 20 * MIB
    prediction_error: float = 0.01
    bias: float = 0.02
    """What all predicted peaks are too low by."""
    predicts: bool = True
    num_repeats: int = 3


def rows(world: World, seed: int) -> Iterator[dict[str, Any]]:
    """Every configuration, with effects that differ from seed to seed."""
    generator = np.random.default_rng(seed)
    effect = _effects(world, generator)
    for batch, *chosen in itertools.product(world.batches, *CHOICES.values()):
        settings = {"batch": {"micro": batch}, **dict(zip(CHOICES, chosen, strict=True))}
        kinds = [_word(choice) for choice in chosen]
        time = math.exp(sum(effect.get(word, 0.0) for word in (*kinds, *itertools.combinations(kinds, 2))))
        flops = {"blocks1": 4 / 3, "blocks2": 7 / 6}.get(kinds[2], 1.0)
        slow = world.batch_slows * math.log(batch / world.batches[0]) / math.log(world.batches[-1] / world.batches[0])
        speed = 400 / (time * (flops if world.effects else 1.0) * (1 + world.half / batch)) * math.exp(-slow)
        kept = {"blocks1": 0.3, "blocks2": 0.65}.get(kinds[2], 1.0) * (0.65 if "bf16" in kinds else 1.0)
        base = world.base_bytes * (1.05 if "foreach" in kinds else 1.0)
        predicted = base + world.sample_bytes * batch * kept
        error = world.prediction_error * generator.standard_normal() + world.bias
        peak = predicted * math.exp(error) * (0.9 if "tcmalloc" in kinds else 1.0)
        repeats = speed * np.exp(world.noise * generator.standard_normal(world.num_repeats))
        repeats *= np.where(generator.random(world.num_repeats) < world.outliers, 0.92, 1.0)
        yield {
            "settings": settings,
            "samples_per_s": repeats.tolist(),
            "peak_bytes": [round(peak * math.exp(world.peak_noise * z)) for z in generator.standard_normal(3)],
            "predicted": {
                "peak_bytes": round(predicted * (0.9 if "tcmalloc" in kinds else 1.0)),
                "flops_per_sample": 1e9 * flops,
                "bytes_per_sample": 1e7 * kept * (1 + 8 / batch),
            }
            if world.predicts
            else None,
        }


def write(path: Path, world: World, seed: int) -> Path:
    """A table as the recorder writes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(world, seed)))
    return path


def _effects(world: World, generator: np.random.Generator) -> dict[Any, float]:
    """Logarithms of factors on the time of a step, by choice and by pair."""
    if not world.effects:
        return {}
    about = 1 + world.spread * generator.standard_normal(6)
    return {
        "bf16": -0.143 * about[0],
        "channels_last": 0.149 * about[1],
        ("bf16", "channels_last"): -0.31 * about[2] * world.interactions,
        "fused": -0.05 * about[3],
        "foreach": -0.03 * about[4] + math.log(world.bad_choice),
        "tcmalloc": -0.08 * about[5],
        ("blocks1", "tcmalloc"): 0.04 * world.interactions,
        ("bf16", "fused"): 0.03 * world.interactions,
    }


def _word(choice: dict[str, Any]) -> str:
    return f"{choice['kind']}{choice.get('every', '')}"
