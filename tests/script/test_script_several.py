"""A script that its command starts in two processes, as one trial: measured together, ended together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gloo_pair import needs_two

from autotune.errors import UserError
from autotune.measure import InspectOptions, MeasureOptions
from autotune.plan import Plan
from autotune.ranks import Ranks
from autotune.report.printing import print_words
from autotune.report.verification import explain
from autotune.results import Verification
from autotune.script.command import own_share, script_name, under_launcher
from autotune.script.trial.several import Several
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.layers import Layers
from autotune.techniques.parallel import Parallel
from autotune.workers import Failed, Inspected, InspectRequest, Measured, MeasureRequest, TimedOut
from autotune.workers.process import identify
from autotune.workers.trial.folder import TrialFolder

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = str(SCRIPTS / "ddp.py")
DDP = Parallel(kind="ddp", processes=2)
BATCH = Batch(micro=4, accumulate=4)
LAUNCHER = """
import os, subprocess, sys

def started(rank):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-P", "-m", "autotune.script", "--add-path", sys.argv[1]]
    return subprocess.Popen(command, env={**os.environ, **place})

for process in [started("0"), started("1")]:
    process.wait()
"""


@pytest.fixture
def answered(local_executor, tmp_path):
    """What a request comes to; afterwards no process of its trial is left."""

    def ask(kind, *arguments, settings=None, command=None, starter=TORCHRUN, script=SCRIPT, **options):
        pids = tmp_path / "pids"
        words = (*starter, script, "--batch-size=4", "--grad-accum=2", f"--pids={pids}", *arguments)
        started = tuple(command or under_launcher(words))
        fields = {"id": "ranks", "task": "ddp.py", "device": "cpu", "command": started}
        if kind is MeasureRequest:
            fields["plan"] = Plan(settings=settings or Settings(parallel=DDP))
            options = {"options": MeasureOptions(trial_time_s=1.0, parity_batch=16), **options}
        else:
            options = {"options": InspectOptions(), **options}
        outcome = local_executor.submit(kind(**{"deadline_s": 600.0, **fields, **options})).result()
        said = pids.read_text().split() if pids.exists() else []
        assert [pid for pid in said if identify(int(pid))] == []
        return outcome, len(said)

    return ask


@pytest.mark.slow
@needs_two
def test_two_processes_are_measured_as_one(answered):
    """Speed in the samples of both, memory of both; the plan is applied in both."""
    settings = Settings(batch=BATCH, layers=Layers(kind="exact"), parallel=DDP)
    outcome, num_started = answered(MeasureRequest, settings=settings)
    assert isinstance(outcome, Measured), outcome
    assert num_started == 2
    found = outcome.measurement
    assert found.num_windows >= 3
    assert found.samples_per_s.value > 0
    assert found.peak.process == sum(found.bytes_by_rank) > 2 * 100 * 2**20
    assert len(found.bytes_by_rank) == 2
    assert len(found.parity.losses) == 10


def test_processes_end_with_the_step_that_the_first_has_named(tmp_path):
    """Also one that comes to the end of a step later than the first, which has named the next by then."""
    ended = []

    def end(outcome):
        ended.append(outcome)
        raise SystemExit

    answer = Failed(message="held")
    first, second = (Several(TrialFolder(tmp_path), Ranks(rank, 2)) for rank in range(2))
    measured = Inspected.model_construct(kind="inspected")
    steps = [first.follow(lambda *_: first.hold(measured), end), second.follow(lambda *_: None, end)]
    for step in steps:
        step(None, 1)
    assert ended == []
    for step in steps:
        with pytest.raises(SystemExit):
            step(None, 1)
    assert ended == [measured, None]
    first.hold(answer)  # a failure is not held


@pytest.mark.slow
@needs_two
def test_facts_are_of_all_processes(answered):
    outcome, _ = answered(InspectRequest)
    assert isinstance(outcome, Inspected), outcome
    facts = outcome.facts
    assert (facts.ranks, facts.shared_by) == (2, "ddp")
    assert (facts.effective_batch, facts.micro_batch) == (16, 4)
    assert Batch.reference(facts) == BATCH
    assert Parallel.reference(facts) == DDP
    assert Parallel.reference(facts).unavailable(facts) is None
    assert facts.num_parameters == 12 * 32 + 32 + 32 * 4 + 4
    assert "torchrun" in facts.left_out["parallel"]


@pytest.mark.slow
@needs_two
def test_two_processes_of_accelerate_are_one_job(answered):
    """`accelerate launch` has torchrun start them; on a CPU it does so where it is told of GPUs."""
    starter = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    options = {"starter": (*starter, "--main_process_port=0"), "script": str(SCRIPTS / "accelerated.py")}
    outcome, num_started = answered(InspectRequest, **options)
    assert isinstance(outcome, Inspected), outcome
    assert num_started == 2
    assert (outcome.facts.ranks, outcome.facts.shared_by, outcome.facts.effective_batch) == (2, "ddp", 16)


@pytest.mark.slow
@needs_two
def test_one_process_is_measured_where_accelerate_starts_one(answered):
    """With --cpu it does, whatever number it is given."""
    starter = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2")
    outcome, num_started = answered(InspectRequest, starter=starter, script=str(SCRIPTS / "accelerated.py"))
    assert isinstance(outcome, Inspected), outcome
    assert (num_started, outcome.facts.ranks, outcome.facts.effective_batch) == (1, 1, 8)


@pytest.mark.slow
@needs_two
def test_the_first_process_to_fail_says_what_the_trial_comes_to(answered):
    """Once: what torchrun starts anew has its answer."""
    starter = (*TORCHRUN, "--max-restarts", "1")
    settings = Settings(batch=BATCH, parallel=DDP)
    outcome, num_started = answered(MeasureRequest, "--fails-at=5", settings=settings, starter=starter)
    assert isinstance(outcome, Failed), outcome
    assert outcome.message == "ValueError: mine"
    assert num_started == 2


@pytest.mark.slow
@needs_two
def test_a_script_that_ends_by_itself_is_measured_by_what_there_was_or_fails(answered):
    outcome, _ = answered(MeasureRequest, "--steps=3", settings=Settings(batch=BATCH, parallel=DDP))
    assert isinstance(outcome, Failed), outcome
    assert "the script ended before it could be measured" in outcome.message


@pytest.mark.slow
@needs_two
def test_at_its_deadline_it_is_ended_with_the_line_that_it_was_at(answered, tmp_path):
    """Two processes that a launcher has started, which is quicker than torchrun."""
    launcher, path = tmp_path / "launcher.py", tmp_path / "waits.py"
    launcher.write_text(LAUNCHER)
    path.write_text("import time\ntime.sleep(600)\n")
    for deadline_s in (10, 40, 160):  # on a busy machine Python comes to the script later
        outcome, _ = answered(MeasureRequest, command=(sys.executable, str(launcher), str(path)), deadline_s=deadline_s)
        assert isinstance(outcome, TimedOut), outcome
        if "waits.py" in outcome.message:
            break
    assert "waits.py" in outcome.message


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("model = nn.Linear(2, 2)\n", "but got no such"),
        (
            "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(nn.Linear(2, 2))\n",
            "but got fully_shard",
        ),
    ],
)
def test_processes_that_are_not_joined_by_ddp_are_refused(answered, tmp_path, body, reason):
    path = tmp_path / "script.py"
    path.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch import nn\ndist.init_process_group('gloo')\n"
        f"{body}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n    optimizer.zero_grad(); model(torch.ones(2, 2)).sum().backward(); optimizer.step()\n"
    )
    outcome, _ = answered(InspectRequest, command=under_launcher((*TORCHRUN, str(path))))
    assert isinstance(outcome, Failed), outcome  # the other process, which waits for nobody, is ended with the first
    assert reason in outcome.message


def test_each_process_is_told_its_share():
    assert own_share(Settings(batch=Batch(micro=4, accumulate=4), parallel=DDP)) == Batch(micro=4, accumulate=2)
    assert own_share(Settings(batch=Batch(micro=4, accumulate=4))) == Batch(micro=4, accumulate=4)
    assert own_share(Settings()) is None


@pytest.mark.parametrize(
    "starter",
    [("torchrun", "--nnodes=2"), ("torchrun", "--nnodes", "1:4"), ("accelerate", "launch", "--num_machines", "2")],
)
def test_several_machines_are_refused(starter):
    with pytest.raises(UserError, match="a trial runs on one machine"):
        script_name([*starter, "train.py"])
    assert script_name(["torchrun", "--nnodes=1", "--nproc-per-node", "2", "train.py"]) == "train.py"


def test_a_verification_tells_what_each_process_took_the_largest_first(capsys):
    found = Verification(None, None, None, (), bytes_by_rank=(300 * 2**20, 500 * 2**20))
    print_words(sys.stdout, explain(found, Plan(settings=Settings(parallel=DDP))))
    assert "process 1: 500 MiB; process 0: 300 MiB" in capsys.readouterr().out
