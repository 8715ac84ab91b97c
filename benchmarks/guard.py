"""How often the guard of quality errs: whole searches over a table that holds speeds, peaks and qualities.

    python -m benchmarks.guard [--searches 100]

Pruning a tenth of the widths, or more, makes each configuration faster, and loses so much of the quality: nothing, a
quarter of what is allowed, three times of it, nearly all. What one seed's training comes to differs from the next by a
third of what is allowed. Given is how often a plan has which of them. Bars: a harmful one in none of 100, a harmless
one refused in at most 5.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import threading
from collections import Counter
from pathlib import Path

from autotune.measure.measurement import Quality
from autotune.search.driver import search
from autotune.search.options import Drop, SearchOptions
from autotune.search.requests import reference_settings
from autotune.search.sampler.configuration_space import ConfigurationSpace
from autotune.search_spaces import load_space
from autotune.techniques import Device, Facts, Settings
from autotune.workers.table import Row, TableExecutor

from .rows import save_rows

ALLOWED = 1.0
"""Points of a quality of 90."""
LOST = {0.1: 0.0, 0.25: 0.25, 0.5: 3.0, 0.95: 80.0}
"""Points, by the ratio that is pruned; the first two are harmless."""
NOISE = 0.33
"""Standard deviation from seed to seed, points."""
FACTS = Facts(
    fingerprint="sha256:" + 64 * "0", device=Device(type="cpu", name="a table", memory_bytes=2**36, bf16=True),
    torch_version="2.13.0", num_threads=2, host_memory_bytes=2**35, num_parameters=10**6, num_trainable=10**6,
    num_blocks=4, block_name="Block", conv_dims=(2,), dataset_length=10_000, dataset_kind="map", dataset_bytes=None,
    dataset_deterministic=True, stackable=False, shapes_vary=False, shards_by_worker=False, loader_options={},
    loader_samples_per_s={}, effective_batch=64, effective_batch_held=True, effective_batch_assumed=False,
    split_error=0.0, evaluates=True, allow_split=False, optimizer="AdamW", optimizer_implementations=(), allocators=(),
)  # fmt: skip


def main() -> None:
    """Search so often, and print what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100)
    arguments = parser.parse_args()
    for best, what in ((0.95, "all four"), (0.25, "the harmless two"), (0.1, "the one that loses nothing")):
        chosen = Counter(searched(seed, best) for seed in range(arguments.searches))
        harmful = sum(number for ratio, number in chosen.items() if LOST.get(ratio, 0.0) > ALLOWED)
        print(f"offered {what}: chosen {dict(sorted(chosen.items()))}; harmful {harmful}, refused {chosen[0.0]}")
        row = {"offered": best, "searches": arguments.searches, "chosen": {str(k): v for k, v in chosen.items()}}
        save_rows("guard", "cpu", [{**row, "harmful": harmful, "refused": chosen[0.0]}])


def searched(seed: int, most: float) -> float:
    """The ratio of one search's plan, where more than ``most`` is not offered; 0 is none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        offered = [ratio for ratio in LOST if ratio <= most]
        Path("space.yaml").write_text(_space(offered))
        space = load_space("space.yaml")
        known = FACTS.model_copy(update={"allow_lossy": True})
        choices = space.choices(known)
        reference = reference_settings(known)
        noise = random.Random(seed)
        configurations = [reference, *ConfigurationSpace(choices, reference, 4).shuffled("all")]
        executor = TableExecutor(known, [_row(settings, noise) for settings in configurations])
        options = SearchOptions(
            "model.py",
            space="space.yaml",
            trials=20,
            seed=seed,
            max_quality_drop=Drop(ALLOWED, is_share=False),
        )
        plan = search(options, executor, lambda event: None, threading.Event())
    return plan.settings.pruning.ratio if plan.settings.pruning.kind != "none" else 0.0


def _space(ratios: list[float]) -> str:
    rows = [{"kind": "none"}, *({"kind": "structured", "ratio": ratio} for ratio in ratios)]
    return f"schema: autotune/space@1\nprecision: [{{kind: fp32}}, {{kind: bf16}}]\npruning: {json.dumps(rows)}\n"


def _row(settings: Settings, noise: random.Random) -> Row:
    ratio = settings.pruning.ratio if settings.pruning.kind != "none" else 0.0
    speed = 100 * (1.5 if settings.precision.kind == "bf16" else 1.0) * (1 + ratio)
    lost = LOST.get(ratio, 0.0)
    qualities = [90 - lost + noise.gauss(0, NOISE / 2**0.5) for _ in range(8)]
    return Row(
        settings=settings,
        samples_per_s=tuple(speed * (1 + noise.gauss(0, 0.01)) for _ in range(8)),
        peak_bytes=(round(2**30 * (1 - ratio / 2)),) * 8,
        quality=tuple(Quality(value=one, early=one - 5) for one in qualities),
    )


if __name__ == "__main__":
    main()
