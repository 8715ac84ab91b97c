"""Everyone who is replayed, and the replaying of many at once."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from autotune.techniques import Settings
from autotune.techniques.support.facts import num_processors

from .gains import gains_of_other_tables, no_gains
from .load import Load
from .play import Replay, play
from .problem import Competitor, Problem, Result, Space
from .samplers import expected_gain, optuna_sampler, prior_alone
from .table import Table


def _grid(problem: Problem, seed: int) -> Generator[Settings, Result, str | None]:
    """Everything, by nested loops in an order that is the seed's, the last technique changing fastest."""
    names = random.Random(seed).sample(list(problem.choices), len(problem.choices))
    for chosen in itertools.product(*(problem.choices[name] for name in names)):
        settings = problem.settings[0].model_copy(update=dict(zip(names, chosen, strict=True)))
        if problem.is_known(settings):
            yield settings
    return None


COMPETITORS: dict[str, Competitor] = {
    "gain": expected_gain(),
    "gain, raw space": expected_gain(is_derived=False),
    "gain, other tables' gains": expected_gain(gains=gains_of_other_tables),
    "gain, no gains": expected_gain(gains=no_gains),
    "prior alone": prior_alone,
    **{
        f"{kind}, {name} space": optuna_sampler(kind, space)
        for kind, (name, space) in itertools.product(
            ("tpe", "gp", "random"), (("raw", Space.raw), ("derived", Space.derived))
        )
    },
    "grid": _grid,
}


def replay(
    table: Table, games: list[tuple[str, str]], num_seeds: int, num_trials: int, load: Load | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each competitor and budget of ``games``, with the replays of all seeds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the processes that are started next
    with ProcessPoolExecutor(num_processors(), get_context("spawn")) as pool:
        every = itertools.product(games, range(num_seeds))
        played = pool.map(partial(_play, table, num_trials, load), every, chunksize=2)
        for (competitor, budget), replays in itertools.groupby(
            zip(itertools.product(games, range(num_seeds)), played, strict=True), key=lambda pair: pair[0][0]
        ):
            runs = [replay.as_row() for _, replay in replays]
            yield {"table": table.name, "competitor": competitor, "budget": budget, "runs": runs}


def _play(table: Table, num_trials: int, load: Load | None, game: tuple[tuple[str, str], int]) -> Replay:
    (competitor, budget), seed = game
    return play(table, budget, COMPETITORS[competitor], seed, num_trials, load)
