"""``autotune.fit`` in two ranks: both take the choice of the one whose step takes more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import found_by_two, needs_two, run_as_two
from test_fit import MIB, NUM_BLOCKS, WIDTH, Model, batch, recomputed

import autotune
from autotune.errors import NothingFits

ROWS = (2**14, 2**16)
"""Of each rank's batch: hidden layers of 16 and of 64 MiB."""


def choose(rows: int, budget: int, **options: Any) -> Any:
    model = Model()
    fitted = autotune.fit(model, batch(rows), budget, device="cuda", techniques=("checkpointing",), **options)
    return model, fitted


def found_by(rank: int) -> dict[str, Any]:
    """With a budget that the larger batch takes two blocks for, and the smaller none."""
    _, stock = choose(ROWS[rank], 2**40, dry_run=True)
    budget = round((stock.stock_peak.high - 100 * MIB) * 1.03)
    model, fitted = choose(ROWS[rank], budget)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    fitted.loss(wrapped, {"x": torch.full((4, WIDTH), 1.0 + rank)}).backward()
    try:
        choose(ROWS[rank], 2**20)
        refused = None
    except NothingFits as error:
        refused = str(error)
    return {
        "stock": stock.stock_peak.high,
        "blocks": recomputed(model),
        "gradient": [p.grad.sum().item() for p in model.parameters()],
        "refused": refused,
    }


@needs_two
@pytest.mark.slow
def test_both_ranks_choose_alike_and_train_together(tmp_path: Path) -> None:
    one, other = found_by_two(__file__, tmp_path)
    assert one["stock"] == other["stock"]
    assert one["blocks"] == other["blocks"]
    assert 0 < len(one["blocks"]) < NUM_BLOCKS
    assert one["gradient"] == other["gradient"]
    assert one["refused"] == other["refused"]
    assert "smallest budget that works" in one["refused"]


if __name__ == "__main__":
    run_as_two(found_by)
