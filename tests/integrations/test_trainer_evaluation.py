"""The evaluation of a ``transformers.Trainer`` in the trials of its task, and what of its first model it keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conformance import plan_of
from integration_models import Cnn, Images
from torch import nn

from autotune import Task, apply, from_trainer
from autotune.errors import TaskError
from autotune.measure.checks.quality import evaluate, evaluation_context
from autotune.measure.evaluation import measure_evaluations
from autotune.measure.measurement import EvaluationOptions, MeasureOptions
from autotune.measure.memory import Charge

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STOCK: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch",
    "train_sampling_strategy": "sequential", "per_device_eval_batch_size": 4,
}  # fmt: skip


class Unlabelled(Images):
    """Its samples have no labels."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": self.images[index]}


class Mean(Cnn):
    """Its loss is of its logits alone."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def task_of(tmp_path):
    def task_of(arguments: Any = None, fields: Any = None, **given: Any) -> Task:
        def build_trainer() -> Any:
            made = transformers.TrainingArguments(str(tmp_path), **{**STOCK, **(arguments or {})})
            return transformers.Trainer(**{"args": made, "train_dataset": Images(), "model": Mean(), **made_of(given)})

        return from_trainer(build_trainer, **(fields or {}))

    return task_of


def made_of(given: dict[str, Any]) -> dict[str, Any]:
    """Optimizers are built anew with their model."""
    if "optimizers" not in given:
        return given
    model = Mean()
    return {**given, "model": model, "optimizers": (given["optimizers"](model.parameters()), None)}


def evaluated(task: Task, **rows: Any) -> Any:
    training = apply(plan_of(**rows), task)
    asked = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=60.0))
    (found,) = measure_evaluations(training, task, asked, Charge(training.device))
    return found, training


@pytest.mark.medium
def test_data_without_labels_are_measured_and_nothing_is_judged_by_them(task_of):
    task = task_of(eval_dataset=Unlabelled())
    found, training = evaluated(task)
    assert (found.batch, found.num_samples, found.is_whole) == (4, 24, True)
    with pytest.raises(TaskError, match=r"eval_dataset has no labels.*compute_metrics.*evaluate=\.\.\."):
        evaluate(task, training.model, 4)


@pytest.mark.medium
def test_several_sets_are_evaluated_one_after_the_other(task_of):
    sets = {"a": Images(), "b": torch.utils.data.Subset(Images(), range(8))}
    task = task_of({"metric_for_best_model": "eval_b_loss"}, eval_dataset=sets)
    found, training = evaluated(task)
    assert found.num_samples == 24 + 8
    alone = task_of(eval_dataset=sets["b"])
    assert evaluate(task, training.model)[0] == pytest.approx(evaluate(alone, training.model)[0])


@pytest.mark.medium
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_it_evaluates_in_the_plans_precision_whatever_the_trainers_is(kind, own, task_of):
    task = task_of({"bf16": own}, eval_dataset=Images())
    training = apply(plan_of(precision={"kind": kind}), task)
    seen = set()
    training.model.stem.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    evaluate(task, training.model, 4, evaluation_context(training, task))
    assert seen == {torch.bfloat16 if kind == "bf16" else torch.float32}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.medium
@pytest.mark.parametrize("given", [{}, {"optimizers": sgd}, {"model": None, "model_init": Mean}])
def test_the_first_model_is_gone_once_another_is_built(given, task_of):
    """Nor does an optimizer that the Trainer was given keep its parameters."""
    task = task_of(eval_dataset=Images(), **given)
    training = apply(plan_of(), task)
    evaluate(task, training.model)
    first = [weakref.ref(p) for p in training.model.parameters()]
    del training
    second = apply(plan_of(), task)
    gc.collect()
    assert not any(ref() is not None for ref in first)
    held = {id(p) for group in second.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in second.model.parameters()}


def test_an_optimizer_that_was_made_before_a_model_init_is_made_anew(tmp_path):
    """As of a Trainer that was restored: it holds the parameters of a model that is not trained."""

    def build_trainer() -> Any:
        made = transformers.TrainingArguments(str(tmp_path), **STOCK)
        trainer = transformers.Trainer(model_init=Mean, args=made, train_dataset=Images())
        trainer.create_optimizer()
        return trainer

    training = apply(plan_of(), from_trainer(build_trainer))
    held = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in training.model.parameters()}
