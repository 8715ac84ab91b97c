"""Weights that recovery made, beside a plan: written, found again, started from, and refused where they are others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from line_task import Line, floats, line
from search_tables import MIB, facts, options, row, run_search
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.files import hash_of
from autotune.measure.cuts.types import Cuts, JudgedCut
from autotune.measure.measurement import MeasureOptions, Quality, QualityOptions
from autotune.plan import KeptWeights, Plan
from autotune.searches.driver import search
from autotune.searches.events import Warned
from autotune.searches.options import Drop
from autotune.task_file import load_task
from autotune.techniques import Facts, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.pruning import Pruning
from autotune.training.weights import save_kept
from autotune.workers import CutsJudged, JudgeRequest, Measured, MeasureRequest, Outcome, TrialRequest
from autotune.workers.table import Row, TableExecutor

TASKS = Path(__file__).parents[1] / "tasks"


def plan_with(model: nn.Module, folder: Path) -> Path:
    """The path of a saved plan that starts from this model's weights."""
    made = folder / "elsewhere" / "made.pt"
    save_kept(model, made)
    weights = KeptWeights(hash=hash_of(made), quality=0.5, seed=1, path=str(made))
    Plan(settings=Settings(batch=Batch(micro=2)), weights=weights).save(folder / "plan.yaml")
    return folder / "plan.yaml"


@pytest.fixture
def recovered(tmp_path: Path) -> Path:
    """A plan that starts from a weight of 7, where the task's own is 1."""
    model = Line()
    nn.init.constant_(model.weight, 7.0)
    return plan_with(model, tmp_path)


def test_apply_starts_from_what_lies_beside_the_plan(recovered):
    """Wherever it was made: the plan names no path."""
    plan = autotune.load_plan(recovered)
    assert (recovered.parent / plan.weights.file).is_file()
    assert "path" not in recovered.read_text()
    assert autotune.apply(plan, line(floats(4))).model.weight.item() == 7.0
    without = plan.model_copy(update={"weights": None})
    assert autotune.apply(without, line(floats(4))).model.weight.item() == 1.0


def test_a_job_begins_with_the_recovered_weights_and_a_new_optimizer(recovered):
    """Samples 0 and 1, mean 0.5, at a rate of 1: from 7 to 6.5. What recovery's optimizer had learned is not kept."""
    momentum = {"build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9)}
    training = autotune.apply(autotune.load_plan(recovered), line(floats(2), batch_size=2, **momentum))
    assert not training.optimizer.state
    training.step(next(iter(training.loader)))
    assert training.model.weight.item() == 6.5


def test_a_job_that_is_resumed_goes_on_from_its_own_checkpoint(recovered, tmp_path):
    """The recovered weights are its first, and its state is loaded after them."""
    task = line(floats(4), batch_size=2)
    training = autotune.apply(autotune.load_plan(recovered), task)
    training.step(next(iter(training.loader)))
    torch.save(training.state_dict(), tmp_path / "state.pt")
    again = autotune.apply(autotune.load_plan(recovered), task)
    assert again.model.weight.item() == 7.0
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.model.weight.item() == 6.5


def test_weights_that_were_edited_are_refused(recovered):
    plan = autotune.load_plan(recovered)
    torch.save({"weight": torch.tensor(8.0)}, plan.weights.path)
    with pytest.raises(PlanError, match=r"these are not the weights that the plan was saved with: .* Copy those"):
        autotune.apply(plan, line(floats(4)))


def test_weights_that_are_missing_are_refused(recovered):
    plan = autotune.load_plan(recovered)
    Path(plan.weights.path).unlink()
    with pytest.raises(PlanError, match=r"weights cannot be read: No such file.* Copy them next to the plan; or leave"):
        autotune.apply(plan, line(floats(4)))


def test_weights_of_another_model_are_refused(tmp_path):
    plan = autotune.load_plan(plan_with(nn.Linear(2, 3), tmp_path))
    with pytest.raises(PlanError, match=r"another model's: bias is not in the model, and 1 more"):
        autotune.apply(plan, line(floats(4)))


def test_a_plan_that_was_read_as_text_says_how_its_weights_are_found(recovered):
    plan = Plan.from_yaml(recovered.read_text())
    with pytest.raises(PlanError, match=r"goes on from weights-\w+\.pt, which is not here\. Read the plan with"):
        autotune.apply(plan, line(floats(4)))


@pytest.mark.medium
def test_a_trial_writes_what_its_recovery_made_and_apply_makes_the_same_model(tmp_path, local_executor):
    """Six of eight hidden units stay, with the untouched model as their teacher."""
    shutil.copy(TASKS / "healthy.py", tmp_path)
    (tmp_path / "judged.py").write_text(
        "from healthy import *\n"
        "def evaluate(model): return -model[0].weight.abs().sum().item()\n"
        "def weights(): return build_model().state_dict()\n"
    )
    task, made = str(tmp_path / "judged.py"), tmp_path / "made.pt"
    quality = QualityOptions(num_samples=16, distill=True, keep=str(made))
    plan = Plan(settings=Settings(batch=Batch(micro=8), pruning=Pruning(kind="structured")))
    options = MeasureOptions(trial_time_s=0.1, parity_batch=None, quality=quality)
    request = MeasureRequest(id="kept", task=task, seed=1, device="cpu", plan=plan, options=options, deadline_s=600.0)
    outcome = local_executor.ask(request)
    assert isinstance(outcome, Measured), outcome
    judged = outcome.measurement.quality
    weights = KeptWeights(hash=hash_of(made), quality=judged.value, seed=1, path=str(made))
    Plan(settings=outcome.applied, weights=weights).save(tmp_path / "plan.yaml")
    model = autotune.apply(autotune.load_plan(tmp_path / "plan.yaml"), load_task(task)).model
    assert model[0].weight.shape == (6, 4)
    assert -model[0].weight.abs().sum().item() == judged.value


def test_weights_that_cannot_be_written_are_said_and_cost_nothing_else(tmp_path, local_executor):
    shutil.copy(TASKS / "healthy.py", tmp_path)
    (tmp_path / "judged.py").write_text("from healthy import *\ndef evaluate(model): return 0.0\n")
    (tmp_path / "file").write_text("in the way of a folder")
    quality = QualityOptions(num_samples=16, keep=str(tmp_path / "file" / "made.pt"))
    options = MeasureOptions(trial_time_s=0.1, parity_batch=None, quality=quality)
    plan = Plan(settings=Settings(batch=Batch(micro=8)))
    request = MeasureRequest(
        id="kept", task=str(tmp_path / "judged.py"), seed=1, device="cpu", plan=plan, options=options, deadline_s=600.0
    )
    outcome = local_executor.ask(request)
    assert isinstance(outcome, Measured), outcome
    assert any("the recovered weights cannot be written" in said for said in outcome.measurement.warnings)


# The search

REFERENCE = Settings(batch=Batch(micro=64))
HALF = REFERENCE.model_copy(update={"pruning": Pruning(kind="structured", ratio=0.5)})
JUDGED = facts(evaluates=True)
STEPS = "100 steps, learning rate falling to 0"


class Writes(TableExecutor):
    """Recovery's weights are these bytes, in the file that is asked for; each round judges for itself."""

    def _answer(self, request: TrialRequest) -> Outcome:
        asked = getattr(request, "options", None)
        quality = getattr(asked, "quality", None) or getattr(asked, "recovery", None)
        if quality is not None and quality.keep is not None:
            Path(quality.keep).parent.mkdir(parents=True, exist_ok=True)
            Path(quality.keep).write_bytes(b"recovered")
        return super()._answer(request)


class Judges(Writes):
    """One process judges the half from every seed, a tenth of a point more from each."""

    def __init__(self, known: Facts, rows: list[Row]) -> None:
        super().__init__(known, rows, judge=self._of_all_seeds)

    def _of_all_seeds(self, request: JudgeRequest) -> Outcome:
        qualities = tuple(Quality(value=89.5 + number / 10, recovered=STEPS) for number in request.options.seeds)
        reference = JudgedCut(settings=REFERENCE, qualities=tuple(Quality(value=90.0) for _ in qualities))
        return CutsJudged(found=Cuts(reference=reference, cuts=(JudgedCut(settings=HALF, qualities=qualities),)))


def searched(quality: float, executor: type[TableExecutor] = Writes):
    """A half pruned is four times as fast, of such a quality beside the reference's 90."""
    Path("space.yaml").write_text("schema: autotune/space@1\npruning: [{kind: none}, {kind: structured, ratio: 0.5}]\n")
    rows = [
        row(REFERENCE, quality=(Quality(value=90.0, early=85.0),)),
        row(HALF, samples_per_s=(500.0,), peak_bytes=(100 * MIB,), quality=(Quality(value=quality, recovered=STEPS),)),
    ]
    asked = options(space="space.yaml", max_quality_drop=Drop(1.0, is_share=False), keep_weights=True)
    return run_search(asked, known=JUDGED, executor=executor(JUDGED, rows))


@pytest.fixture
def here(tmp_path, monkeypatch, in_memory):
    monkeypatch.chdir(tmp_path)


def test_a_search_keeps_what_was_recovered_from_the_first_seed_of_the_process_that_judges(here):
    """The rounds measure speed and memory alone."""
    run = searched(89.5, Judges)
    (judging,) = [one for one in run.executor.requests if one.kind == "judge"]
    assert (judging.options.seeds, bool(judging.options.recovery.keep)) == ((0, 1, 2), True)
    assert {one.options.quality for one in run.executor.requests if one.kind == "measure" and one.fresh} == {None}
    plan = autotune.load_plan("plan.yaml")
    assert (plan.weights.quality, plan.weights.seed, plan.quality.pairs) == (89.5, 0, 3)
    assert plan.quality.recovered == STEPS
    assert Path(plan.weights.path).read_bytes() == b"recovered"


def test_a_search_whose_rounds_judge_keeps_what_the_first_recovered(here):
    """No process could judge all seeds."""
    run = searched(89.5)
    keeping = [one for one in run.executor.requests if one.kind == "measure" and one.options.quality.keep]
    assert [request.id for request in keeping] == ["finalist-001-round-1"]
    assert autotune.load_plan("plan.yaml").quality.recovered == STEPS
    weights = autotune.load_plan("plan.yaml").weights
    assert (weights.quality, weights.seed) == (89.5, keeping[0].seed)
    assert Path(weights.path).read_bytes() == b"recovered"
    assert Path(weights.path).parent == Path.cwd()


@pytest.mark.parametrize(
    ("quality", "executor", "said"),
    [
        (89.5, TableExecutor, r"No such file.*goes on from the task's own"),
        (50.0, Writes, "there is nothing to recover"),
    ],
)
def test_a_search_says_why_there_are_no_weights(here, quality, executor, said):
    """They were not written, or the plan is the job as it stands."""
    run = searched(quality, executor)
    assert run.plan.weights is None
    assert [event for event in run.seen(Warned) if "--keep-weights" in event.message]
    assert any(re.search(said, event.message) for event in run.seen(Warned))


def test_a_distillation_that_the_job_would_not_have_is_refused(here):
    Path("space.yaml").write_text("schema: autotune/space@1\npruning: auto\n")
    asked, executor = options(max_quality_drop=Drop(1.0, is_share=False), distill=True), TableExecutor(JUDGED, [])
    with pytest.raises(PlanError, match=r"--distill: .* Give --keep-weights too"):
        run_search(asked, known=JUDGED, executor=executor)
    assert executor.requests == []  # before the task is inspected


WIDE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 256


def build_model():
    widths = [32, 1024, 1024, 1024]
    hidden = [one for sides in zip(widths, widths[1:]) for one in (nn.Linear(*sides), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 4))


def rows(seed):
    inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :4].argmax(1)


def build_dataset():
    return TensorDataset(*rows(0))


def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(model):
    inputs, classes = rows(1)
    model.eval()
    return (model(inputs).argmax(1) == classes).float().mean().item()
"""
JOB = """
import autotune, torch
task = autotune.load_task("wide.py")
training = autotune.apply(autotune.load_plan("plan.yaml"), task)
print(task.evaluate(training.model), training.model[0].out_features)
for batch in training.loader:
    loss = training.step(batch).loss
print(loss.isfinite().item())
"""


@pytest.mark.slow
def test_a_job_starts_at_the_quality_that_its_plan_states(tmp_path, monkeypatch, local_executor):
    """Searched for real, from the plan's file, in a process that ``autotune run`` starts: half of a perceptron of
    1024, which is three times as fast. Any quality is kept."""
    monkeypatch.chdir(tmp_path)
    Path("wide.py").write_text(WIDE)
    Path("train.py").write_text(JOB)
    Path("space.yaml").write_text("schema: autotune/space@1\npruning: [{kind: none}, {kind: structured, ratio: 0.5}]\n")
    asked = options(
        task="wide.py",
        trials=2,
        trial_time=0.2,
        recovery_steps=4,
        max_quality_drop=Drop(1.0, is_share=True),
        keep_weights=True,
    )
    plan = search(asked, local_executor, lambda event: None, threading.Event())
    assert plan.settings.pruning.ratio == 0.5
    run = [sys.executable, "-m", "autotune", "run", "plan.yaml", "--", sys.executable, "train.py"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    quality, width, is_finite = done.stdout.split()
    assert float(quality) == pytest.approx(plan.weights.quality, abs=1e-6)
    assert (width, is_finite) == ("512", "True")
