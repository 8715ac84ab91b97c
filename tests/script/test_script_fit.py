"""``autotune fit -- python train.py``: a script's own step is traced in its process, and a plan for it is chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from search_tables import MIB, REFERENCE, facts, options, run_search

from autotune.commands.fit import fit_job
from autotune.errors import NothingFits, SpaceError, TaskError, UserError
from autotune.estimates import Cheapest, Fill, Interval
from autotune.estimates.types import COUNTED, Foretold
from autotune.results import WhatToEstimate
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.workers import Chosen, Failed, Inspected, InspectRequest

COMMAND = (sys.executable, "train.py", "--bs={batch.micro=64}")
RECOMPUTED = Settings(checkpointing=Checkpointing(kind="blocks"))
STEPS_IN_BACKWARD = "the script may clip or log gradients, which would be gone"


def foretold(settings, peak_mib):
    peak = Interval(low=peak_mib * MIB, value=peak_mib * MIB, high=peak_mib * MIB)
    return Foretold(settings=settings, process=peak, step_s=1.0)


def found(fits=True, **changes):
    least = foretold(RECOMPUTED, 300)
    return Cheapest(
        chosen=least if fits else None,
        stock=foretold(Settings(), 900),
        least=least,
        **{"how": "traced", **changes},
        phase="backward",
        module="",
        fills=(Fill(kind="activation", module="", num_bytes=MIB),),
        law=COUNTED,
        seconds=1.0,
    )


class Answers:
    """An executor that knows a script's facts, and what fits."""

    def __init__(self, outcome, **known):
        left_out = {"optimizer_step": STEPS_IN_BACKWARD, **known.pop("left_out", {})}
        self._facts, self._outcome = facts(left_out=left_out, **known), outcome
        self.requests = []

    def ask(self, request):
        self.requests.append(request)
        return Inspected(facts=self._facts) if isinstance(request, InspectRequest) else self._outcome


def fitted(executor, **asked):
    return fit_job(WhatToEstimate("train.py", 400 * MIB, command=COMMAND, **asked), executor, Path("p.yaml"))


def test_the_script_is_run_twice_by_its_command_and_its_plan_has_its_batch():
    executor = Answers(Chosen(found=found()))
    plan = fitted(executor)
    assert {request.command[-1] for request in executor.requests} == {"--bs=64"}
    assert all("autotune.script" in request.command for request in executor.requests)
    assert plan.settings == RECOMPUTED.having(Batch(micro=64))
    assert (plan.measured, plan.predicted.process, plan.predicted.reference) == (None, 300 * MIB, 900 * MIB)
    assert f"start the job by `autotune run p.yaml -- {sys.executable} train.py '--bs={{batch.micro=64}}'`" in (
        plan.notes
    )


def test_only_what_a_script_can_have_is_chosen_from():
    """No step in backward; and where the script recomputes by itself, no blocks."""
    executor = Answers(Chosen(found=found()), left_out={"checkpointing": "the script's model recomputes blocks itself"})
    fitted(executor)
    asked = executor.requests[-1].options
    names = {one.name for each in (*asked.combinations, *asked.choices) for one in each.chosen()}
    assert "layers" in names
    assert not names & {"optimizer_step", "checkpointing"}


def test_techniques_that_are_named_are_those_that_are_chosen_from():
    executor = Answers(Chosen(found=found()), num_trainable=10**7, optimizer_states=2)
    fitted(executor, techniques=("optimizer_state",))
    asked = executor.requests[-1].options
    assert {each.optimizer_state.kind for each in asked.choices} == {"8bit", "4bit", "bf16"}
    assert {one.name for each in asked.choices for one in each.chosen()} == {"optimizer_state"}


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        (("optimizer_step",), f"optimizer_step is not for this script: {STEPS_IN_BACKWARD}"),
        (("batch",), "fit: techniques: it changes a model and its optimizer, and not what is computed or fed to it"),
        (("checkpoint",), "fit: techniques: checkpoint: "),
    ],
)
def test_a_technique_that_cannot_be_chosen_is_refused(techniques, words):
    with pytest.raises(SpaceError, match=words):
        fitted(Answers(Chosen(found=found())), techniques=techniques)


def test_what_the_script_makes_impossible_is_told():
    nothing = (
        r"train\.py: nothing fits within 400 MiB\. The smallest budget that works is 325 MiB .*; what binds there is"
    )
    with pytest.raises(NothingFits, match=nothing) as raised:
        fitted(Answers(Chosen(found=found(fits=False))))
    assert "optimizer_step" not in str(raised.value)  # which would help, and cannot be had
    with pytest.raises(UserError, match="one process is traced, but the script trains in 2"):
        fitted(Answers(Chosen(found=found()), ranks=2))
    with pytest.raises(TaskError, match=r"^it cannot be traced$"):
        fitted(Answers(Failed(message="it cannot be traced")))


def test_where_batches_vary_the_plan_states_none_and_says_so():
    plan = fitted(Answers(Chosen(found=found()), batch_varies=True))
    assert plan.settings.batch is None
    assert any("batches vary" in note for note in plan.notes)


def test_a_step_that_was_made_again_is_told():
    outcome = Chosen(found=found(how="probed", reason="its step reads values"))
    said = "by real steps of a copy of the model, at the script's own batch: its step reads values"
    assert said in fitted(Answers(outcome)).notes


def test_a_search_of_the_script_starts_from_its_plan(tmp_path, monkeypatch, in_memory):
    monkeypatch.chdir(tmp_path)
    plan = fitted(Answers(Chosen(found=found())))
    plan.save("start.yaml")
    run = run_search(options(task="train.py", command=COMMAND, start=Path("start.yaml")))
    assert run.measured[:2] == [REFERENCE, plan.settings]
