"""Unequal shares of an optimizer step: cut by hand, and the same training as one process's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_pair import run_as_two
from test_parallel import counted, some_parameters, task
from torch import nn

import autotune
from autotune.data.cut import Cut
from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.ranks import Ranks
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel

WHOLE = Batch(micro=4, accumulate=4)
SHARES = {
    "unequal numbers": (Batch(micro=4, accumulate=3), Batch(micro=2, accumulate=2)),
    "unequal sizes": (Batch(micro=6, accumulate=2, effective=11), Batch(micro=3, accumulate=2, effective=5)),
}
"""Of 16 samples, what each of two ranks takes."""
TASKS: dict[str, dict[str, Any]] = {"means": {}, "counts": {"compute_loss": counted}}


def share(batch: Batch, kind: str = "ddp", effective: int = 16) -> Plan:
    return Plan(settings=Settings(batch=batch, parallel=Parallel(kind=kind, processes=2, effective=effective)))


def steps(training: Any, num_epochs: int = 2) -> list[list[float]]:
    """Some parameters after each optimizer step, and how many micro-batches it was."""
    found, num = [], 0
    for _ in range(num_epochs):
        for batch in training.loader:
            num += 1
            if training.step(batch).stepped:
                found.append([num, *some_parameters(training.model)])
                num = 0
    return found


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2))


def refusals(rank: int) -> dict[str, str]:
    mine = SHARES["unequal numbers"][rank]
    other = Parallel(kind="ddp", processes=2, effective=16) if rank else Parallel(kind="ddp", processes=2)
    even = Plan(settings=Settings(batch=WHOLE, parallel=other))
    tried: dict[str, Callable[[], Any]] = {
        "sum": lambda: autotune.apply(share(mine, effective=20), task()),
        "fsdp": lambda: autotune.apply(share(mine, "fsdp"), task()),
        "rows": lambda: autotune.apply(even, task()),
        "batches": lambda: autotune.apply(
            Plan(
                settings=Settings(
                    batch=Batch(micro=4, accumulate=2 + 2 * rank), parallel=other.model_copy(update={"effective": None})
                )
            ),
            task(),
        ),
        "norm": lambda: autotune.apply(share(mine), task(build_model=normed)),
        "fine": lambda: autotune.apply(share(mine), task()),
    }
    return {name: _said(act) for name, act in tried.items()}


def _said(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            act()
        except (PlanError, UserWarning) as error:
            return str(error)
    return ""


def found_by(rank: int) -> dict[str, Any]:
    """All that needs two processes, in one pair of them."""
    found: dict[str, Any] = {
        f"{shares}, {what}": steps(autotune.apply(share(SHARES[shares][rank]), task(**pieces), seed=5))
        for shares in SHARES
        for what, pieces in TASKS.items()
    }
    found["fsdp"] = steps(autotune.apply(share(SHARES["unequal sizes"][rank], "fsdp"), task(), seed=5))
    found["refusals"] = refusals(rank)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", TASKS)
@pytest.mark.parametrize("shares", SHARES)
def test_unequal_shares_train_what_one_process_does(pair, shares, what):
    """Two epochs of two steps of 16 and a tail of 8, clipped: parameters after each, to rounding."""
    alone = steps(autotune.apply(Plan(settings=Settings(batch=WHOLE)), task(**TASKS[what]), seed=5))
    found = [one[f"{shares}, {what}"] for one in pair]
    assert [[row[0] for row in one[:2]] for one in found] == [[one.accumulate] * 2 for one in SHARES[shares]]
    for one in found:
        assert torch.allclose(torch.tensor(one)[:, 1:], torch.tensor(alone)[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_shards_of_unequal_micro_batches_train_the_same(pair):
    """Gathers in forward want as many micro-batches of each rank, and not as large ones."""
    alone = steps(autotune.apply(Plan(settings=Settings(batch=WHOLE)), task(), seed=5))
    for one in pair:
        assert torch.allclose(torch.tensor(one["fsdp"])[:, 1:], torch.tensor(alone)[:, 1:], rtol=1e-4, atol=1e-5)


REFUSED = {
    "sum": "add up to 20 samples, but micro-batch 4 × 3, micro-batch 2 × 2 are 16",
    "fsdp": "fsdp exchanges data between ranks in each forward pass",
    "rows": "the ranks' plans are to have one row, but have ddp over 2 processes, ddp over 2 processes, a share of 16",
    "batches": "share one batch in equal parts, but have micro-batch 4 × 2, micro-batch 4 × 4",
    "norm": "BatchNorm sees micro-batches of unequal sizes",
    "fine": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_shares_cannot_have_is_said_in_each(pair, what):
    for one in pair:
        said = one["refusals"][what]
        assert REFUSED[what] in said
        assert bool(said) == bool(REFUSED[what])


def cut(length: int, shares: tuple[Batch, ...]) -> list[list[list[int]]]:
    """Of each rank, what it trains on."""
    cuts = [Cut(range(length), WHOLE, False, Ranks(rank, len(shares), shares)) for rank in range(len(shares))]
    found = [[*one] for one in cuts]
    assert [len(one) for one in found] == [len(one) for one in cuts]
    return found


TWO_TO_ONE = (Batch(micro=2, accumulate=2), Batch(micro=2))
ALIKE = (Batch(micro=2, accumulate=2), Batch(micro=1, accumulate=2))


@pytest.mark.parametrize(
    ("length", "shares", "expected"),
    [
        (6, TWO_TO_ONE, [[[0, 1], [2, 3]], [[4, 5]]]),
        (9, TWO_TO_ONE, [[[0, 1], [2, 3], [6, 7]], [[4, 5], [8]]]),
        (7, TWO_TO_ONE, [[[0, 1], [2, 3]], [[4, 5]]]),
        (8, TWO_TO_ONE, [[[0, 1], [2, 3], [6]], [[4, 5], [7]]]),
        (11, ALIKE, [[[0, 1], [2, 3], [6, 7], [8]], [[4], [5], [9], [10]]]),
        (10, ALIKE, [[[0, 1], [2, 3]], [[4], [5]]]),
    ],
)
def test_ranks_take_their_shares_one_after_the_other(length, shares, expected):
    """A tail in proportion; with as many micro-batches for each, or none, where the whole step's are as many."""
    assert cut(length, shares) == expected


def test_bad_shares_are_refused():
    with pytest.raises(ValueError, match="one process has the whole batch"):
        Parallel(effective=8)
    with pytest.raises(ValueError, match="takes a sample of an optimizer step or more, but got 2"):
        Parallel(kind="ddp", processes=3, effective=2)
    assert "stated by batch" in str(Settings(parallel=Parallel(kind="ddp", processes=2, effective=8)).conflict())
    assert Settings(parallel=Parallel(kind="ddp", processes=2, effective=8)).environment({}) == {}


if __name__ == "__main__":
    run_as_two(found_by)
