"""A split of the batch that nothing has compared with the job: what the first step tells of it."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from command_line import autotune
from torch import nn

from autotune.script.flags import is_split_otherwise
from autotune.script.plan.undivided import Undivided
from autotune.techniques.batch import Batch

PLAN = "schema: autotune/plan@1\nsettings:\n  batch: {micro: 4, accumulate: 2}\n"
SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.add_argument("--grad-accum", type=int)
args = parser.parse_args()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(args.batch_size, 4)
for step in range(12):
    for _ in range(args.grad_accum):
        loss = nn.functional.mse_loss(model(x), x[:, :1])
        ({loss}).backward()
    {after}
    optimizer.step()
    optimizer.zero_grad()
print("came to its end")
"""
OWN = ("--batch-size", "8", "--grad-accum", "1")


@pytest.fixture
def run(tmp_path):
    """``autotune run`` of a script that passes this loss back, in a process of its own."""

    def run(loss, *flags, plan=PLAN, after=""):
        (tmp_path / "train.py").write_text(SCRIPT.format(loss=loss, after=after))
        (tmp_path / "plan.yaml").write_text(plan)
        return autotune("run", "plan.yaml", "--", sys.executable, "train.py", *flags, cwd=tmp_path)

    return run


@pytest.mark.slow
def test_a_loss_that_is_not_divided_is_refused_before_the_first_step(run):
    ended = run("loss", *OWN)
    assert ended.returncode == 2
    assert "came to its end" not in ended.stdout
    assert "passes back 2 losses to a step that are divided by nothing, so that its gradient is 2 times" in ended.stderr
    assert "`(loss / accumulate).backward()`" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "after"),
    [
        ("loss / args.grad_accum", ""),
        ("loss", "for p in model.parameters(): p.grad /= args.grad_accum"),
        ("loss", "nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"),
    ],
    ids=["divided", "gradients are", "clipped"],
)
def test_where_a_loss_may_be_divided_one_line_says_that_nothing_compared_the_split(loss, after, run):
    ended = run(loss, *OWN, after=after)
    assert ended.returncode == 0
    assert ended.stdout == "came to its end\n"
    assert ended.stderr.count("nothing has compared the plan's split of the batch with the job as it stands") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        (("--batch-size", "4", "--grad-accum", "2"), PLAN),
        (("--batch-size={batch.micro=4}", "--grad-accum={batch.accumulate=2}"), PLAN),
        (OWN, f"{PLAN}checked: losses\n"),
        (OWN, f"{PLAN}checked: sums\n"),
    ],
    ids=["the command's own", "its placeholders'", "losses", "sums"],
)
def test_nothing_is_said_of_the_jobs_own_split_and_of_one_that_a_search_compared(flags, plan, run):
    """The first is what the job is without the plan."""
    ended = run("loss", *flags, plan=plan)
    assert ended.returncode == 0
    assert "split" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--batch-size", "8", "--grad-accum", "1"), True),
        (("--batch-size", "4", "--grad-accum", "2"), False),
        (("--bsz", "{batch.micro}", "--n", "{batch.accumulate}"), True),
        (("--bsz", "{batch.micro=4}", "--n", "{batch.accumulate=2}"), False),
        (("--bsz", "8"), False),
    ],
)
def test_the_command_tells_whether_the_plan_splits_as_the_job_does(words, expected):
    command = (sys.executable, os.fspath("train.py"), *words)
    assert is_split_otherwise(command, Batch(micro=4, accumulate=2)) is expected
    assert not is_split_otherwise(command, None)


MODEL, X, Y = nn.Linear(4, 3), torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
LOSSES = {
    "a mean": (lambda: MODEL(X).square().mean(), True),
    "cross entropy": (lambda: nn.functional.cross_entropy(MODEL(X), Y), True),
    "in another dtype": (lambda: nn.functional.cross_entropy(MODEL(X), Y).double(), True),
    "with a penalty": (lambda: nn.functional.cross_entropy(MODEL(X), Y) + 0.1 * MODEL.weight.square().sum(), True),
    "divided by 1": (lambda: MODEL(X).square().mean() / 1, True),
    "divided": (lambda: MODEL(X).square().mean() / 2, False),
    "multiplied": (lambda: 0.5 * MODEL(X).square().mean(), False),
    "each part divided": (lambda: MODEL(X).square().mean() / 2 + MODEL(X).abs().mean() / 2, False),
    "a sum": (lambda: MODEL(X).square().sum(), False),
    "a sum over all": (lambda: MODEL(X).square().sum() / 16, False),
    "by a divisor that is learned": (lambda: MODEL(X).square().mean() / MODEL.bias[0], False),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_mean_that_nothing_scales_is_seen_in_the_graph(what):
    loss, expected = LOSSES[what]
    seen = Undivided()
    for _ in range(2):
        passed = loss()
        with seen.passing_back(passed, MODEL.parameters):
            passed.backward()
    assert seen.are_sure(MODEL.parameters()) is expected
