"""A plan in two ranks of unedited scripts that share their model in different ways: they train as they would have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_pair import needs_two

from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.parallel import Parallel

HERE = Path(__file__).parents[1]
SCRIPT = str(HERE / "scripts" / "ddp_kinds.py")
KINDS = ("uneven", "no_sync", "prepare, then share", "share, then prepare", "unused", "static", "join")


def plan_of(kind: str) -> Plan:
    accumulate = 4 if kind == "no_sync" else 2
    return Plan(
        settings=Settings(
            batch=Batch(micro=2, accumulate=accumulate),
            layers=Layers(kind="exact"),
            checkpointing=Checkpointing(kind="blocks", every=2),
            parallel=Parallel(kind="ddp", processes=2),
        )
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of each kind, with a plan and without: the exit codes, what was told, and what each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {}
    for kind in KINDS:
        plan_of(kind).save(folder / f"{kind}.yaml")
        jobs[f"{kind}, planned"] = (str(folder / f"{kind}.yaml"), [SCRIPT, kind])
        jobs[f"{kind}, plain"] = (None, [SCRIPT, kind])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    driver = [sys.executable, str(HERE / "ranks_of_script.py"), "jobs.json"]
    done = subprocess.run(driver, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: read(folder, name, codes) for name, codes in json.loads(done.stdout).items()}


def read(folder: Path, name: str, codes: list[int]) -> dict[str, Any]:
    said = [(folder / f"{name}-{rank}.out").read_text() for rank in range(2)]
    lines = [[line for line in one.splitlines() if line.startswith("{")] for one in said]
    return {"codes": codes, "said": said, "ranks": [json.loads(one[-1]) if one else None for one in lines]}


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_with_the_plan_as_without(ended, kind):
    """The same batches, losses and weights; the plan is applied in both ranks, and told by the first."""
    planned, plain = ended[f"{kind}, planned"], ended[f"{kind}, plain"]
    assert planned["codes"] == plain["codes"] == [0, 0], planned["said"]
    assert ["applied: " in one for one in planned["said"]] == [True, False]
    for found, expected in zip(planned["ranks"], plain["ranks"], strict=True):
        assert (found["patched"], expected["patched"]) == (True, False)
        assert found["drawn"] == expected["drawn"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@needs_two
def test_five_samples_are_three_for_each_rank(ended):
    assert [one["drawn"] for one in ended["uneven, planned"]["ranks"]] == [[2, 1] * 2] * 2


@pytest.mark.slow
@needs_two
def test_ranks_may_come_to_their_end_apart(ended):
    assert [len(one["drawn"]) for one in ended["join, planned"]["ranks"]] == [6, 4]
