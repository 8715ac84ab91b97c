"""How often the guard of quality errs: whole searches over tables that hold speeds, peaks and qualities.

    python -m benchmarks.guard [--part searches] [--searches 100] [--table pruned]
    python -m benchmarks.guard --part level [--draws 3000] [--seed 1]

Each table offers faster configurations that lose so much of the quality: nothing, a quarter of what is allowed, three
times of it, nearly all; a variant that cannot learn; fp16 whose gradients overflow, in a trial's losses or later. What
one seed's training comes to differs from the next by a third of what is allowed. Given is how often a plan has a
harmful configuration, how often none where a harmless one was offered, and how many trials and proofs harmful ones
took. Bars: a harmful plan in none of 100, a harmless one refused in at most 1 of 100.

``--part level`` draws the scores of a configuration and of the reference, right or wrong by example, and asks the
product's judge as a search does, one pair of seeds after the other. 97.5 % are right and 1 % of that may be lost, so
that 1.0 lost is just too much: bar, at most 5 % are kept, however much seeds scatter. The examples of a draw are others
than those of the next, and each model is right on its own ones from seed to seed; of a number alone, the drop is that
on the drawn examples.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from autotune.measure.checks.scores import judged_by
from autotune.measure.cuts.types import Cuts, JudgedCut
from autotune.measure.measurement import Parity, Quality
from autotune.plan import Plan
from autotune.search_spaces import load_space
from autotune.searches.driver import search
from autotune.searches.options import Drop, SearchOptions
from autotune.searches.requests import reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace
from autotune.searches.time_budget import MOST_ROUNDS
from autotune.searches.winner.proof import look
from autotune.techniques import Device, Facts, Settings
from autotune.workers import CutsJudged, JudgeRequest, MeasureRequest, NonFinite
from autotune.workers.table import Row, TableExecutor

from .rows import save_rows

ALLOWED = 1.0
"""Points of a quality of 90."""
NOISE = 0.33
"""Standard deviation from seed to seed, points."""
LOST: dict[str, dict[Any, float]] = {
    "pruning": {0.1: 0.0, 0.25: 0.25, 0.5: 3.0, 0.95: 80.0},
    "low_rank": {0.4: 0.1, 0.25: 0.5, 0.125: 4.0},
    "variant": {"narrow": 0.25, "unable": 80.0},
}
"""Points, by the ratio that is pruned, the ratio of the rank, and the variant."""
FASTER: dict[str, dict[Any, float]] = {
    "pruning": {ratio: 1 + ratio for ratio in LOST["pruning"]},
    "low_rank": {ratio: 1.3 - ratio / 2 for ratio in LOST["low_rank"]},
    "variant": {"narrow": 1.3, "unable": 3.0},
}
FACTS = Facts(
    fingerprint="sha256:" + 64 * "0", device=Device(type="cpu", name="a table", memory_bytes=2**36, bf16=True),
    torch_version="2.13.0", num_threads=2, host_memory_bytes=2**35, num_parameters=10**6, num_trainable=10**6,
    num_blocks=4, block_name="Block", conv_dims=(2,), dataset_length=10_000, dataset_kind="map", dataset_bytes=None,
    dataset_deterministic=True, stackable=False, shapes_vary=False, shards_by_worker=False, loader_options={},
    loader_samples_per_s={}, effective_batch=64, effective_batch_held=True, effective_batch_assumed=False,
    split_error=0.0, evaluates=True, allow_split=False, optimizer="AdamW", optimizer_implementations=(), allocators=(),
    allow_lossy=True, linear_features=512, variants={"narrow": 600_000, "unable": 10_000},
)  # fmt: skip
CARD = Device(type="cuda", name="a card", memory_bytes=2**36, bf16=False, capability=(7, 0))


@dataclass(frozen=True)
class Table:
    """What is offered beside the job as it stands."""

    offered: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By technique, what of :data:`LOST`."""
    device: Device = FACTS.device
    overflows: Callable[[random.Random], bool] | None = None
    """Whether fp16 overflows so that a trial's loss is no number; else its losses stray. None: there is no fp16."""


TABLES = {
    "pruned": Table({"pruning": (0.1, 0.25, 0.5, 0.95)}),
    "harmless": Table({"pruning": (0.1, 0.25)}),
    "nothing lost": Table({"pruning": (0.1,)}),
    "a variant that cannot learn": Table({"variant": ("narrow", "unable")}),
    "fp16 that overflows": Table({"pruning": (0.1,)}, CARD, lambda noise: noise.random() < 0.5),
    "combined": Table({"pruning": (0.1, 0.25, 0.5, 0.95), "low_rank": (0.4, 0.25, 0.125)}),
}


def main() -> None:
    """Search so often, and print what was chosen; or draw so often, and print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("searches", "level"), default="searches")
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all")
    arguments = parser.parse_args()
    if arguments.part == "level":
        levels(arguments.draws, arguments.seed)
        return
    for name in arguments.table or TABLES:
        found = [searched(TABLES[name], seed) for seed in range(arguments.searches)]
        row = {
            "offered": name,
            "searches": arguments.searches,
            "chosen": dict(Counter(one["chosen"] for one in found).most_common()),
            "harmful": sum(one["harmful"] for one in found),
            "refused": sum(one["refused"] for one in found),
            "harmful_trials": sum(one["harmful_trials"] for one in found) / len(found),
            "harmful_proofs": sum(one["harmful_proofs"] for one in found) / len(found),
            "speed": sum(one["speed"] for one in found) / len(found),
        }
        print(", ".join(f"{what} {said}" for what, said in row.items()), flush=True)
        save_rows("guard", "cpu", [row])


def searched(table: Table, seed: int) -> dict[str, Any]:
    """One search: what was chosen, and the runs and proofs that harmful configurations took."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("space.yaml").write_text(_space(table))
        known = FACTS.model_copy(update={"device": table.device})
        choices = load_space("space.yaml").choices(known)
        reference = reference_settings(known)
        noise = random.Random(seed)
        configurations = [reference, *ConfigurationSpace(choices, reference, 4).shuffled("all")]
        rows = {settings.canonical(): _row(table, settings, noise) for settings in configurations}
        executor = TableExecutor(known, rows.values(), judge=lambda request: _proof(request, rows, seed))
        options = SearchOptions(
            task="model.py", space="space.yaml", trials=20, seed=seed, max_quality_drop=Drop(ALLOWED, is_share=False)
        )
        plan = search(options, executor, lambda event: None, threading.Event())
    trials = [one.plan.settings for one in executor.requests if isinstance(one, MeasureRequest) and not one.fresh]
    proofs = [one.options.candidates[0] for one in executor.requests if isinstance(one, JudgeRequest)]
    return {
        **_judged(plan),
        "harmful_trials": sum(map(is_harmful, trials)),
        "harmful_proofs": sum(map(is_harmful, proofs)),
    }


def _proof(request: JudgeRequest, rows: Mapping[str, Row], first: int) -> CutsJudged:
    """What is known of a finalist and of the job as it stands, from each seed that is asked for."""

    def judged(settings: Settings) -> JudgedCut:
        known = rows[settings.canonical()].quality
        return JudgedCut(settings=settings, qualities=tuple(known[seed - first] for seed in request.options.seeds))

    cuts = tuple(judged(one) for one in request.options.candidates)
    return CutsJudged(found=Cuts(reference=judged(request.plan.settings), cuts=cuts))


RIGHT, SHARE = 97.5, 0.01
"""Percent that the reference has right, and what share of that may be lost."""
EXAMPLES = (360, 1_000, 4_000)
LOST_POINTS = (0.0, 0.5, 1.2)
"""Truly, beside what is just too much: 1.0."""
SCATTER = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Times :data:`FROM_SEED`."""
ALIKE, OWN, FROM_SEED = 0.95, 0.02, 0.012
"""Of the variance of how far a model is from being wrong about an example: what hangs on the example, and what on the
model and the example; the rest is drawn anew for each seed. And the standard deviation of each seed's own level."""


@dataclass(frozen=True)
class Drawn:
    """Two models on the same examples: from each seed another training of both."""

    generator: np.random.Generator
    own: Any
    """Of both and each example, how far from wrong it is on average over seeds."""
    from_seed: float
    """Standard deviation of each seed's own level."""

    @classmethod
    def of(cls, generator: np.random.Generator, num_examples: int, drop: float, from_seed: float) -> Drawn:
        """Both on so many examples."""
        alike = ALIKE**0.5 * generator.standard_normal(num_examples)
        own = alike + OWN**0.5 * generator.standard_normal((2, num_examples))
        rights = np.array([[RIGHT - drop], [RIGHT]]) / 100
        return cls(generator, own + ndtri(rights) * (1 + from_seed**2) ** 0.5, from_seed)

    @property
    def drop(self) -> float:
        """Points that are lost on these examples, over all seeds."""
        spread = (1 - ALIKE - OWN + self.from_seed**2) ** 0.5
        right = ndtr(self.own / spread).mean(axis=1)
        return float(100 * (right[1] - right[0]))

    def pair(self, kind: str, more: float = 0.0) -> tuple[Quality, Quality]:
        """What ``evaluate`` says of both, trained from the next seed; of the configuration so much more."""
        noise = (1 - ALIKE - OWN) ** 0.5 * self.generator.standard_normal(self.own.shape)
        seed = self.from_seed * self.generator.standard_normal((2, 1))
        one, other = 100.0 * (self.own + noise + seed > 0)
        return _quality(one + more, kind), _quality(other, kind)


def levels(num_draws: int, seed: int) -> None:
    """Print and keep the share that is kept, by what ``evaluate`` returns, and of how many examples."""
    for kind, num_examples in itertools.product(("scores", "a number", "(value, error)"), EXAMPLES):
        row: dict[str, Any] = {"returned": kind, "examples": num_examples, "draws": num_draws, "seed": seed}
        for scatter in SCATTER:
            row[f"kept at 1.0 lost, {scatter:g} times the scatter"] = kept(
                kind, num_examples, 1.0, num_draws, seed, scatter
            )
        row |= {f"kept at {lost} lost": kept(kind, num_examples, lost, num_draws, seed, 1.0) for lost in LOST_POINTS}
        print(", ".join(f"{what} {said}" for what, said in row.items()), flush=True)
        save_rows("guard-level", "cpu", [row])


def kept(kind: str, num_examples: int, drop: float, num_draws: int, seed: int, scatter: float) -> float:
    """The share of draws in which a configuration is kept that loses so many points."""
    generator, num_kept = np.random.default_rng(seed), 0
    for _ in range(num_draws):
        drawn = Drawn.of(generator, num_examples, drop, scatter * FROM_SEED)
        more = drawn.drop - drop if kind == "a number" else 0.0
        pairs: list[tuple[Quality, Quality]] = []
        end = "unknown"
        while end == "unknown" and len(pairs) < MOST_ROUNDS:
            pairs.append(drawn.pair(kind, more))
            end = look(pairs, Drop(RIGHT * SHARE, is_share=False))
        num_kept += end == "kept"
    return round(num_kept / num_draws, 4)


def _quality(scores: Any, kind: str) -> Quality:
    judged = judged_by(scores.tolist())
    if kind == "scores":
        return Quality(**judged._asdict())
    return Quality(value=judged.value, error=judged.error if kind == "(value, error)" else 0.0)


def is_harmful(settings: Settings) -> bool:
    """Whether it loses more than is allowed, or overflows."""
    return lost(settings) > ALLOWED or settings.precision.kind == "fp16"


def lost(settings: Settings) -> float:
    """Points."""
    return sum(LOST[name][value] for name, value in _values(settings).items())


def _judged(plan: Plan) -> dict[str, Any]:
    chosen = plan.settings
    said = ", ".join(f"{name} {value}" for name, value in (*_values(chosen).items(), ("", chosen.precision.kind)))
    harmful = is_harmful(chosen)
    return {
        "chosen": said,
        "harmful": harmful,
        "refused": not harmful and not chosen.affect("function"),
        "speed": _speed(chosen),
    }


def _values(settings: Settings) -> dict[str, Any]:
    """Of each lossy technique that is in use, the ratio or the name."""
    every = {
        "pruning": settings.pruning.ratio,
        "low_rank": settings.low_rank.rank_ratio,
        "variant": settings.variant.kind,
    }
    return {name: value for name, value in every.items() if getattr(settings, name).kind != "none"}


def _space(table: Table) -> str:
    written = {
        "pruning": lambda ratio: {"kind": "structured", "ratio": ratio},
        "low_rank": lambda ratio: {"kind": "svd", "rank_ratio": ratio},
        "variant": lambda name: {"kind": name},
    }
    rows = {name: [{"kind": "none"}, *map(written[name], values)] for name, values in table.offered.items()}
    rows["precision"] = [{"kind": "fp32"}, {"kind": "fp16" if table.overflows else "bf16"}]
    return "\n".join(["schema: autotune/space@1", *(f"{name}: {json.dumps(row)}" for name, row in rows.items())])


def _speed(settings: Settings) -> float:
    speed = 150.0 if settings.precision.kind in ("bf16", "fp16") else 100.0
    for name, value in _values(settings).items():
        speed *= FASTER[name][value]
    return speed


def _row(table: Table, settings: Settings, noise: random.Random) -> Row:
    speed = _speed(settings)
    strays = None
    if table.overflows is not None and settings.precision.kind == "fp16":
        if table.overflows(noise):
            return Row(settings=settings, outcome=NonFinite(step=3))
        strays = Parity(losses=(1.0,), deviation=0.5, strayed_at=7)
    qualities = [90 - lost(settings) + noise.gauss(0, NOISE / 2**0.5) for _ in range(8)]
    return Row(
        settings=settings,
        samples_per_s=tuple(speed * (1 + noise.gauss(0, 0.01)) for _ in range(8)),
        peak_bytes=(round(2**30 * 50 / speed),) * 8,
        quality=tuple(Quality(value=one, early=one - 5) for one in qualities),
        parity=strays,
    )


if __name__ == "__main__":
    main()
