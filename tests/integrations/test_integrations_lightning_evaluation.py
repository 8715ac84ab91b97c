"""The validation of a Lightning job in its trials is that of its Trainer, and has the plan's batch in the job."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.integrations.lightning import trainer_arguments, written
from autotune.measure.checks.quality import evaluate, evaluation_context
from autotune.measure.evaluation import measure_evaluations
from autotune.measure.measurement import EvaluationOptions, MeasureOptions
from autotune.measure.memory import Charge
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Evaluation, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping
from torchmetrics.classification import MulticlassAccuracy

from autotune.integrations.lightning import PlanCallback

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, 0].gt(0).long() + 2 * X[:, 1].gt(0).long()


@pytest.fixture(autouse=True)
def _quiet():
    with one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Job(pl.LightningModule):
    """A classifier with dropout that notes what its hooks see, and calls its parts one by one."""

    def __init__(self):
        super().__init__()
        self.net, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4)
        self.accuracy = MulticlassAccuracy(4)
        self.seen = []

    def both(self, batch):
        x, y = batch
        logits = self.head(self.drop(self.net(x).relu()))
        return logits, nn.functional.cross_entropy(logits, y)

    def training_step(self, batch, batch_idx):
        return self.both(batch)[1]

    def on_validation_start(self):
        self.note("start")

    def on_validation_epoch_start(self):
        self.note("epoch start")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if not self.training:
            self.note("before transfer", dataloader_idx)
        return batch

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.note("batch start", batch_idx, dataloader_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, loss = self.both(batch)
        self.note("step", len(batch[0]), batch_idx, dataloader_idx, logits.dtype)
        self.log("val_loss", loss)
        self.accuracy(logits, batch[1])
        self.log_dict({"val_acc": self.accuracy})

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("batch end", batch_idx, dataloader_idx)

    def on_validation_epoch_end(self):
        self.log("val_twice", 2.0)
        self.note("epoch end")

    def on_validation_end(self):
        self.note("end")

    def note(self, *what):
        self.seen.append((*what, self.training, torch.is_inference_mode_enabled()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batch_size=8, rows=slice(None)):
    return DataLoader(TensorDataset(X[rows], Y[rows]), batch_size=batch_size)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(5)


class Alone(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()


def of(evaluation=None, /, **settings):
    return Plan(settings=Settings(**settings), evaluation=Evaluation(batch=evaluation) if evaluation else None)


def task_of(data=Data, trainer=None, build=Job, **fields):
    return autotune.from_lightning(build, data, trainer, **fields)


def fitted(plan, module, folder, *data, **changes):
    given = {"max_epochs": 1, "num_sanity_val_steps": 0, "accelerator": "cpu", "default_root_dir": folder, **QUIET}
    made = pl.Trainer(callbacks=[PlanCallback(plan)], **given, **trainer_arguments(plan), **changes)
    if isinstance(data[0], pl.LightningDataModule):
        made.fit(module, datamodule=data[0])
    else:
        made.fit(module, *data)
    return made


def judged(task, plan, module=None, batch=None):
    training = autotune.apply(plan, task)
    model = training.model if module is None else module
    return evaluate(task, model, batch or training.evaluation_batch, evaluation_context(training, task))[0]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_trial_validates_as_the_job_does_with_the_same_plan(kind, tmp_path):
    """Hooks in their order, modes, precision, batches and what is logged."""
    plan, module, task = of(10, batch=Batch(micro=8), precision=Precision(kind=kind)), Job(), task_of()
    made = fitted(plan, module, tmp_path, Data())
    theirs, module.seen = module.seen, []
    value = judged(task, plan, module)
    assert module.seen == theirs
    assert [one[1] for one in theirs if one[0] == "step"] == [10, 10, 4]
    assert {one[4] for one in theirs if one[0] == "step"} == {torch.bfloat16 if kind == "bf16" else torch.float32}
    assert {one[-2:] for one in theirs} == {(False, False)}
    assert value == pytest.approx(-float(made.callback_metrics["val_loss"]), rel=1e-6)
    best = task_of(trainer={"callbacks": [EarlyStopping("val_acc", mode="max")]})
    for _ in range(2):  # of a metric that is reset each time
        assert judged(best, plan, module) == pytest.approx(float(made.callback_metrics["val_acc"]), rel=1e-6)
    assert "log" not in vars(module)


def test_today_it_validates_in_the_loaders_own_batch_and_as_many_as_the_trainer_does():
    task = task_of(trainer={"limit_val_batches": 2})
    assert task.evaluation_batch(1) == 5
    module = Job()
    judged(task, of(batch=Batch(micro=8)), module)
    assert [one[1] for one in module.seen if one[0] == "step"] == [5, 5]


def test_several_loaders_are_validated_one_after_the_other(tmp_path):
    def pair():
        return loader(), [loader(4, slice(8)), loader(6, slice(12))]

    plan, module, task = of(batch=Batch(micro=8)), Job(), task_of(pair)
    assert task.evaluation_batch(1) is None  # of two sizes
    made = fitted(plan, module, tmp_path, *pair())
    theirs, module.seen = module.seen, []
    with pytest.raises(TaskError, match=r"logs no 'val_loss', but val_acc/dataloader_idx_0, .*val_twice"):
        judged(task, plan, module)
    assert module.seen == theirs
    watching = {"callbacks": SimpleNamespace(monitor="val_loss/dataloader_idx_1", mode="min")}
    value = judged(task_of(pair, watching), plan, module)
    assert value == pytest.approx(-float(made.callback_metrics["val_loss/dataloader_idx_1"]), rel=1e-6)


@pytest.mark.parametrize(
    ("data", "trainer"), [(loader, {}), (Alone, {}), (lambda: (loader(), None), {}), (Data, {"limit_val_batches": 0})]
)
def test_a_job_that_does_not_validate_has_no_evaluate(data, trainer):
    assert task_of(data, trainer).evaluate is None


def test_batches_are_counted_of_a_module_that_never_calls_itself_and_end_it():
    task = task_of()
    training = autotune.apply(of(batch=Batch(micro=8)), task)

    def found(most_s, *batches):
        asked = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=most_s, batches=batches))
        return measure_evaluations(training, task, asked, Charge(training.device))

    assert [(one.batch, one.num_samples, one.largest_call) for one in found(60, 5, 10, 20, 40, 80)] == [
        (5, 24, 5), (10, 24, 10), (20, 24, 20), (40, 24, 24),
    ]  # fmt: skip
    (cut,) = found(1e-9)
    assert (cut.num_samples, cut.is_whole) == (5, False)


def test_a_call_within_a_batch_is_not_counted_twice():
    class Calling(Job):
        def forward(self, x):
            return self.net(x)

        def both(self, batch):
            logits = self.head(self(batch[0]))
            return logits, nn.functional.cross_entropy(logits, batch[1])

    task = task_of(build=Calling)
    training = autotune.apply(of(batch=Batch(micro=8)), task)
    asked = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=60))
    (found,) = measure_evaluations(training, task, asked, Charge(training.device))
    assert found.num_samples == 24


def test_a_module_that_needs_its_trainer_is_told_what_to_do():
    class Needing(Job):
        def on_validation_epoch_start(self):
            assert self.trainer.sanity_checking

    with pytest.raises(TaskError, match=r"Needing needs its Trainer to validate.*evaluate=None"):
        judged(task_of(build=Needing), of(batch=Batch(micro=8)))
    assert task_of(build=Needing, evaluate=None).evaluate is None


def test_a_module_without_validation_step_has_nothing_to_judge_by():
    class Bare(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(TaskError, match="nothing to judge a model by: Bare has no validation_step"):
        judged(task_of(build=Bare), of(batch=Batch(micro=8)))


class Blocks(BatchSampler):
    """One that is not torch's."""


def of_its_own():
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_sampler=Blocks(SequentialSampler(data), 5, False))


@pytest.mark.parametrize("kind", ["datamodule", "loader", "module"])
def test_the_plans_evaluation_batch_reaches_the_jobs_loaders(kind, tmp_path):
    class Own(Job):
        def val_dataloader(self):
            return [loader(5)]

    module, given = Own() if kind == "module" else Job(), loader(5)
    data = {"datamodule": (Data(),), "loader": (loader(), given), "module": (loader(),)}[kind]
    fitted(of(12), module, tmp_path, *data)
    assert [one[1] for one in module.seen if one[0] == "step"] == [12, 12]
    assert given.batch_size == 5
    assert "val_dataloader" not in vars(module)
    fitted(of(), module, tmp_path, *data)
    assert [one[1] for one in module.seen if one[0] == "step"][2:] == [5, 5, 5, 5, 4]


def test_batches_that_cannot_be_made_in_validation_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r"evaluation\.batch: the plan validates in batches of 12"):
        fitted(of(12), Job(), tmp_path, loader(), of_its_own())
    fitted(of(5), Job(), tmp_path, loader(), of_its_own())
    assert task_of(lambda: (loader(), of_its_own())).evaluation_batch(1) is None


def test_what_to_write_tells_the_evaluation_batch():
    assert "# and validation in batches of 12\n" in written(of(12))
