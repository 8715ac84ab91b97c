"""What each choice of the winner bought: measured in turn with it, in fresh interpreters, once the plan is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import BF16, BOTH, REFERENCE, SMALL, TCMALLOC, every, facts, run_search

from autotune.plan import load_plan
from autotune.search.ablation import counterparts
from autotune.techniques.batch import Batch

pytestmark = pytest.mark.usefixtures("in_memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SMALL)


def test_each_choice_alone_is_reset_to_the_references():
    winner = BOTH.model_copy(update={"batch": Batch(micro=16, accumulate=4)})
    parts = {part.choice.name: part.settings for part in counterparts(winner, REFERENCE, facts())}
    assert parts == {
        "batch": BOTH,
        "precision": TCMALLOC.model_copy(update={"batch": winner.batch}),
        "allocator": BF16.model_copy(update={"batch": winner.batch}),
    }


def test_the_winner_and_its_counterparts_take_turns_in_fresh_interpreters_after_the_plan_is_written():
    """Both figures of each are the same in every round, so that two rounds say all."""
    run = run_search(every(ablate=True))
    assert [request.applied for request in run.executor.requests[-6:]] == [
        *(BOTH, BF16, TCMALLOC),
        *(BOTH, TCMALLOC, BF16),
    ]
    assert all(request.fresh for request in run.executor.requests[-6:])
    assert run.plan == load_plan("plan.yaml")
