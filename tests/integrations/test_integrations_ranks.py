"""A plan of two processes in Accelerate and in a Trainer: its batch is that of both."""

from __future__ import annotations

import pytest
from conformance import trace
from gloo_pair import told_by
from integration_models import task_of

from autotune.errors import PlanError
from autotune.integrations.checks import of_one_rank
from autotune.techniques.parallel import Parallel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import ranks_job
from ranks_job import PLAN

ALONE = PLAN.model_copy(update={"settings": PLAN.settings.model_copy(update={"parallel": Parallel()})})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank says of each framework, and what both printed."""
    found, printed = told_by(ranks_job.__file__, tmp_path_factory.mktemp("ranks"))
    said = [line for line in printed.splitlines() if line.startswith("autotune: applied by")]
    return [{**one, "said": said} for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_two_ranks_train_as_one_process_does(framework, ranks):
    """24 samples in steps of 2 ranks x 3 micro-batches of 2 are 2 steps; weights end where one process's do."""
    _, training = trace(task_of("cnn"), ALONE)
    one = sum(float(p.detach().double().abs().sum()) for p in training.model.parameters())
    found = [rank[framework] for rank in ranks]
    assert sorted(number for rank in found for number in rank["samples"]) == list(range(24))
    for rank in found:
        assert rank["steps"] == [[2, 2, 2]] * 2
        assert rank["weights"] == pytest.approx(one, rel=1e-6)
        assert rank["wrapper"] == "DistributedDataParallel"


@pytest.mark.slow
def test_the_line_is_the_first_ranks_and_of_all(ranks):
    assert len(ranks[0]["said"]) == 2
    assert all("micro-batch 2 × 6" in line and "ddp over 2 processes" in line for line in ranks[0]["said"])


def test_a_plan_of_another_number_of_processes_is_refused():
    with pytest.raises(PlanError, match="the plan is for 2 processes, but this is the only one"):
        of_one_rank(PLAN, 1)
    with pytest.raises(PlanError, match="the plan is for one process, but this is one of 2 ranks"):
        of_one_rank(ALONE, 2)
    shards = PLAN.settings.model_copy(update={"parallel": Parallel(kind="fsdp", processes=2)})
    with pytest.raises(PlanError, match="a framework shards in its own way"):
        of_one_rank(PLAN.model_copy(update={"settings": shards}), 2)
    half = PLAN.settings.having(Parallel(kind="ddp", processes=2, comm_hook="fp16_compress"))
    with pytest.raises(PlanError, match=r"comm_hook is for .*, which wraps the model itself"):
        of_one_rank(PLAN.model_copy(update={"settings": half}), 2)
