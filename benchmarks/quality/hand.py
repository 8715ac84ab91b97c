"""The table by hand: each cut's quality after further training, and its speed with each exact choice."""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune.measure.checks.scores import judged_by
from autotune.measure.measurement import Quality
from autotune.searches.options import Drop
from autotune.searches.time_budget import MOST_ROUNDS
from autotune.searches.winner.proof import look

from ..rows import load_rows, save_rows
from .cuts import Cut, cut_model, cuts, num_parameters
from .jobs import Job, train

ROWS = "quality-hand"
ALLOWED = 0.01
"""Share of the quality that may be lost."""
DROP = Drop(ALLOWED, is_share=True)
SEEDS = {"char_gpt": 2, "vit": 2, "text_cnn": 10}
"""Of a text CNN with half of its widths the first three lose 0.4 % and the others 1 %."""
_SEEDS = 3
_ROUNDS, _TURN_S = 7, 0.1
"""Turns of each model, and the least processor time of one."""
_NUM_BATCHES = 4
"""That a timed model trains on again and again."""


def table(job: Job) -> list[dict[str, Any]]:
    """A job's rows, each measured unless it is kept already, and added to ``results/``."""
    torch.set_num_threads(1)
    rows = known(job)
    for cut in cuts(job.name):
        for seed in range(SEEDS.get(job.name, _SEEDS)):
            if not any(row["what"] == "quality" and row["cut"] == cut.row and row["seed"] == seed for row in rows):
                rows += added(job, [quality(job, cut, seed)])
    if not any(row["what"] == "speed" for row in rows):
        rows += added(job, speeds(job))
    return rows


def known(job: Job) -> list[dict[str, Any]]:
    """Its rows of this version of its file, with this torch."""
    try:
        every = load_rows(ROWS, "cpu")
    except FileNotFoundError:
        return []
    own = {"job": job.name, "version": job.version, "torch": torch.__version__}
    return [row for row in every if own.items() <= row.items()]


def added(job: Job, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what they are of, once they are kept."""
    found = [{"job": job.name, "version": job.version, **row} for row in rows]
    save_rows(ROWS, "cpu", found)
    return found


def quality(job: Job, cut: Cut, seed: int) -> dict[str, Any]:
    """What a cut loses against the job as it stands, both trained further on the same batches: paired by example."""
    scores, whole = (trained_scores(job, one, seed) for one in (cut, Cut()))
    lost = whole - scores
    return {
        "what": "quality",
        "cut": cut.row,
        "seed": seed,
        "num_examples": len(scores),
        "quality": scores.mean().item(),
        "lost": lost.mean().item(),
        "error": (lost.std() / len(lost) ** 0.5).item(),
    }


def trained_scores(job: Job, cut: Cut, seed: int) -> Tensor:
    """Scores of a cut after its further training; those that the cache has are taken from it."""
    path = job.kept(f"{cut.ratio}-{cut.rank}-{seed}")
    if not path.exists():
        model = cut_model(job, cut)
        train(job, model, job.recovery_steps, seed + 1)
        torch.save(job.scores(model), path)
    found: Tensor = torch.load(path)
    return found


def speeds(job: Job) -> list[dict[str, Any]]:
    """A row for each cut: seconds of a step, in turn with all others, with each set of exact choices."""
    batches = list(itertools.islice(job.batches(0), _NUM_BATCHES))
    models = {cut: cut_model(job, cut) for cut in cuts(job.name)}
    sides = {
        (cut, chosen): stepping(job, copy.deepcopy(model), chosen, batches)
        for cut, model in models.items()
        for chosen in choices(model)
    }
    found: dict[tuple[Cut, tuple[str, ...]], list[float]] = {side: [] for side in sides}
    for _ in range(_ROUNDS):
        for side, step in sides.items():
            found[side].append(turn(step))
    return [
        {
            "what": "speed",
            "cut": cut.row,
            "num_parameters": num_parameters(model),
            "step_s": {
                "+".join(chosen) or "plain": [round(one, 6) for one in found[cut, chosen]] for chosen in choices(model)
            },
        }
        for cut, model in models.items()
    ]


def choices(model: nn.Module) -> list[tuple[str, ...]]:
    """Every set of what leaves the function as it is, up to rounding."""
    is_of_images = any(isinstance(one, nn.Conv2d) for one in model.modules())
    every = ("bf16", "fused", *(["channels_last"] if is_of_images else []))
    return [chosen for size in range(len(every) + 1) for chosen in itertools.combinations(every, size)]


def stepping(job: Job, model: nn.Module, chosen: tuple[str, ...], batches: Sequence[Any]) -> Callable[[], None]:
    """What takes a model's next step; the first is taken here."""
    model.train()
    if "channels_last" in chosen:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = job.parts["build_optimizer"](list(model.parameters()))
    for group in optimizer.param_groups:
        group["fused"] = "fused" in chosen or None
    endless = itertools.cycle(batches)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if "bf16" in chosen else contextlib.nullcontext():
            loss = job.parts["compute_loss"](model, next(endless))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def turn(step: Callable[[], None]) -> float:
    """Processor seconds of one step."""
    began_s, number = time.process_time(), 0
    while (took_s := time.process_time() - began_s) < _TURN_S:
        step()
        number += 1
    return took_s / number


def front(rows: Sequence[dict[str, Any]], job: str) -> Iterator[dict[str, Any]]:
    """Of each cut: how fast, plain and with the fastest choice, over the job as it stands; what it loses, as shares of
    the quality, seed by seed."""
    timed = {_key(row): row for row in rows if row["what"] == "speed"}
    whole = timed[_key({"cut": Cut().row})]
    for cut in cuts(job):
        row = timed[_key({"cut": cut.row})]
        ratios = {
            chosen: statistics.median(a / b for a, b in zip(whole["step_s"]["plain"], took, strict=True))
            for chosen, took in row["step_s"].items()
        }
        fastest = max(ratios, key=lambda chosen: ratios[chosen])
        judged = [one for one in rows if one["what"] == "quality" and one["cut"] == cut.row]
        worth = [abs(one["quality"] + one["lost"]) for one in judged]
        lost = [one["lost"] / of for one, of in zip(judged, worth, strict=True)]
        error = statistics.fmean(one["error"] / of for one, of in zip(judged, worth, strict=True))
        yield {
            "cut": cut,
            "left": row["num_parameters"] / whole["num_parameters"],
            "quality": statistics.fmean(one["quality"] for one in judged),
            "speed": ratios["plain"],
            "fastest": fastest,
            "fastest_speed": ratios[fastest],
            "lost": lost,
            "error": error,
            "is_within": statistics.fmean(lost) <= ALLOWED,
        }


def _key(row: dict[str, Any]) -> Cut:
    return Cut(**row["cut"])


def best(rows: Sequence[dict[str, Any]], job: str) -> dict[str, Any]:
    """The fastest cut within the allowed loss, at the mean of its seeds."""
    return _within(rows, job)[0]


def best_proven(rows: Sequence[dict[str, Any]], job: Job) -> dict[str, Any]:
    """The fastest of those that a search would keep by the same scores; the whole model where there is none."""
    return next(one for one in _within(rows, job.name) if one["cut"] == Cut() or is_proven(job, one["cut"]))


def _within(rows: Sequence[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    return sorted((one for one in front(rows, job) if one["is_within"]), key=lambda one: -float(one["fastest_speed"]))


def is_proven(job: Job, cut: Cut) -> bool:
    """Whether its loss is proven to be allowed, as a plan's is, by its scores and the whole model's."""
    most = MOST_ROUNDS if SEEDS.get(job.name, _SEEDS) > _SEEDS else _SEEDS
    pairs = [[judged_by(trained_scores(job, one, seed).tolist()) for one in (cut, Cut())] for seed in range(most)]
    found = [(Quality(**one._asdict()), Quality(**whole._asdict())) for one, whole in pairs]
    return look(found, DROP) == "kept"


def told(rows: Sequence[dict[str, Any]], job: Job) -> str:
    """The table in words; losses are in percent of the quality."""
    lines = [f"{job.name}:"]
    for one in front(rows, job.name):
        lost = " ".join(f"{100 * share:+.2f}" for share in one["lost"])
        fastest = f"{one['fastest_speed']:5.2f}x with {one['fastest']}"
        lines.append(
            f"  {one['cut']!s:19} {one['left']:.2f} of the parameters, {one['speed']:5.2f}x, {fastest}; "
            f"{one['quality']:.4f}, lost {lost} (paired error {100 * one['error']:.2f})"
            f"{'' if one['is_within'] else ': beyond'}"
        )
    for one, said in ((best(rows, job.name), "at the mean of the seeds"), (best_proven(rows, job), "proven")):
        fastest = f"{one['cut']}, {one['fastest_speed']:.2f}x with {one['fastest']}"
        lines.append(f"  best within {ALLOWED:.0%}, {said}: {fastest}")
    return "\n".join(lines)
