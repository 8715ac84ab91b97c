"""A plan in a ``transformers.Trainer``: what is applied is the plan, and the losses are those of ``Training``."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from conformance import ROWS, expected, plan_of, rounding, state_of, trace, watched
from integration_models import BUILD, DATA, LEARNING_RATE, Cnn, Images, build_cnn, build_gpt, task_of
from torch import nn

from autotune import Plan, Task, apply, apply_to_model, from_trainer, load_task
from autotune.errors import PlanError, TaskError
from autotune.integrations.transformers import PlanMixin, arguments, written
from autotune.measure.checks.quality import evaluate
from autotune.plan import Evaluation, TaskRef
from autotune.techniques.checkpointing import Checkpointing
from autotune.training.fingerprint import identify

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Planned(PlanMixin, transformers.Trainer):
    """As docs/use/frameworks.md has it."""


STOCK: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "logging_steps": 1, "num_train_epochs": 1, "max_grad_norm": 0,
    "lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE, "save_strategy": "no", "disable_tqdm": True,
    "optim": "adamw_torch", "train_sampling_strategy": "sequential",
}  # fmt: skip


@pytest.fixture
def arguments_of(tmp_path):
    return lambda **changes: transformers.TrainingArguments(str(tmp_path), **{**STOCK, **changes})


@pytest.fixture
def job(arguments_of):
    def build(kind: str, plan: Plan, model: nn.Module | None = None, **changes: Any) -> Any:
        given = arguments_of(**arguments(plan), **changes)
        return Planned(BUILD[kind]() if model is None else model, given, train_dataset=DATA[kind](), plan=plan)

    return build


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.medium
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_the_job_is_the_plan(kind, rows, job):
    plan = plan_of(**ROWS[rows])
    trainer = job(kind, plan)
    with watched(trainer.model, kind) as seen:
        trainer.train()
    losses, state = expected(kind, rows)
    assert seen.steps == [[2, 2, 2]] * 4
    assert seen.dtypes == {torch.bfloat16 if plan.settings.precision.kind == "bf16" else None}
    assert state_of(trainer.model, trainer.optimizer.optimizer) == state
    assert losses_of(trainer) == pytest.approx(losses, rel=rounding(plan))


def test_the_state_that_is_compared_is_not_empty():
    _, state = expected("gpt", "layers, chosen blocks")
    assert state["recomputed"] == {"transformer.h.1", "transformer.h.3"}
    assert {"transformer.h.0.mlp", "transformer.h.0.ln_1"} <= state["converted"]
    assert state["optimizer"] == {("AdamW", False, True)}


def test_arguments_say_the_plan():
    plan = plan_of(precision={"kind": "bf16"}, layers={"kind": "exact"})
    assert arguments(plan) == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "bf16": True, "fp16": False,
        "auto_find_batch_size": False, "torch_empty_cache_steps": None, "use_liger_kernel": False,
        "torch_compile": False,
    }  # fmt: skip
    assert "    per_device_train_batch_size=2\n" in written(plan)


def test_loader_settings_are_the_plans(job):
    plan = plan_of(data_loading={"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True})
    loader = job("cnn", plan).get_train_dataloader()
    next(iter(loader))
    read = loader.base_dataloader
    assert (read.num_workers, read.prefetch_factor, read.persistent_workers) == (2, 4, True)
    assert loader.batch_sampler.batch_size == 2


@pytest.mark.medium
def test_a_second_training_and_a_model_init_have_the_plan_once(arguments_of):
    plan = plan_of(checkpointing={"kind": "blocks"})
    given = arguments_of(**arguments(plan), max_steps=1)
    trainer = Planned(model_init=build_cnn, args=given, train_dataset=Images(), plan=plan)
    for _ in range(2):
        trainer.train()
        assert len(state_of(trainer.model, trainer.optimizer.optimizer)["recomputed"]) == 4
        assert not isinstance(trainer.model.blocks[0].forward.args[0], functools.partial)


def test_one_line_says_what_is_in_force(job, capsys):
    trainer = job("gpt", plan_of(allocator={"kind": "expandable_segments"}, layers={"kind": "exact"}))
    trainer.create_optimizer()
    trainer.create_optimizer()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune:")]
    assert len(lines) == 1
    assert "applied by a Trainer: micro-batch 2 × 3, memory-saving layers. " in lines[0]
    assert "not applied: allocator (" in lines[0]


def test_what_would_do_it_twice_is_off(job, capsys):
    """The class's own forward checkpoints where its flag is set, inside of ours."""
    model = build_gpt()
    model.activation_checkpointing_enable()
    trainer = job("gpt", plan_of(checkpointing={"kind": "blocks"}), model)
    trainer.create_optimizer()
    assert not trainer.model.is_activation_checkpointing
    assert "the model's own activation checkpointing off" in capsys.readouterr().err


class Ignores(Cnn):
    """Takes any keyword, the number of items too, and heeds none."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> dict[str, Any]:
        return super().forward(pixels, labels)


@pytest.mark.medium
def test_a_model_that_ignores_the_count_trains_on_the_mean(job, capsys, arguments_of):
    """A Trainer takes its loss for one that is divided by the step's items, and adds up gradients undivided."""
    losses, _ = expected("cnn", "the batch alone")

    def ignoring() -> nn.Module:
        torch.manual_seed(0)
        return Ignores()

    trainer = job("cnn", plan_of(), ignoring(), optim="sgd")
    stock = transformers.Trainer(ignoring(), arguments_of(**arguments(plan_of()), optim="sgd"), train_dataset=Images())
    norms = []
    for one in (trainer, stock):
        one.train()
        norms.append(one.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-4)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert "losses divided by 3" in capsys.readouterr().err


def test_every_n_layers_is_every_kth_block():
    model = build_gpt()
    model.activation_checkpointing_enable(every_n_layers=3)
    theirs = [number for number, layer in enumerate(model.transformer.h) if layer.gradient_checkpointing]
    assert theirs == [*Checkpointing(kind="blocks", every=3).numbers(4)] == [0, 3]


def test_evaluation_is_in_the_same_precision(job):
    trainer = job("cnn", plan_of(precision={"kind": "bf16"}))
    trainer.train()
    dtypes = set()
    trainer.model.blocks[0].conv.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    trainer.evaluate(Images())
    assert dtypes == {torch.bfloat16}


def test_outputs_are_cast_to_fp32_and_the_loss_is_not(job):
    """By Accelerate, outside of the model: the logits take twice the bytes once the loss is there."""
    plan = plan_of(precision={"kind": "bf16"})
    trainer = job("cnn", plan, max_steps=1)
    trainer.train()
    batch = torch.utils.data.default_collate([Images()[0]])
    assert trainer.model(**batch)["logits"].dtype == torch.float32
    training = trace(task_of("cnn"), plan)[1]
    with training.forward_context():
        assert training.model(**batch)["logits"].dtype == torch.bfloat16


def told_of(model: nn.Module, **rows: Any) -> Plan:
    found, identity = identify(model, ())
    return plan_of(**rows).model_copy(update={"task": TaskRef(source="model.py", fingerprint=found, identity=identity)})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"pruning": {"kind": "structured"}}, "settings.pruning: it makes another model"),
        ({"precision": {"kind": "fp16"}}, "fp16 is for CUDA devices"),
        ({"batch": {"micro": 4, "accumulate": 2, "effective": 6}}, "Use a micro that divides 6"),
    ],
)
def test_a_plan_that_a_trainer_cannot_follow_is_refused(rows, words, arguments_of):
    plan = plan_of(**rows)
    with pytest.raises(PlanError, match=words):
        Planned(build_cnn(), arguments_of(**arguments(plan)), train_dataset=Images(), plan=plan)


def test_other_arguments_are_refused(arguments_of):
    with pytest.raises(PlanError, match=r"gradient_accumulation_steps = 1, and the plan's is 3.*arguments\(plan\)"):
        Planned(build_cnn(), arguments_of(), train_dataset=Images(), plan=plan_of())


def test_clipping_and_a_step_in_backward_are_refused(job):
    plan = plan_of(batch={"micro": 2}, optimizer_step={"kind": "in_backward"})
    with pytest.raises(PlanError, match="the norm of all gradients is to be clipped at 1"):
        job("cnn", plan, max_grad_norm=1.0).train()


def test_another_model_is_refused(job):
    with pytest.raises(PlanError, match=r"the plan was found for another model: .*GPT2Block"):
        job("cnn", told_of(build_gpt()))
    job("cnn", told_of(build_cnn(), layers={"kind": "exact"})).create_optimizer()


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_refused(wrap, job):
    with pytest.raises(PlanError, match="already"):
        job("cnn", plan_of(), wrap(build_cnn()))


def test_another_version_is_said_once(job, monkeypatch):
    monkeypatch.setattr("autotune.integrations.checks.TRIED", {"transformers": "4.0"})
    monkeypatch.setattr("autotune.integrations.checks._said", set())
    with pytest.warns(UserWarning, match=r"was tried with 4\.0"):
        job("cnn", plan_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job("cnn", plan_of())


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_a_task_of_a_trainer_trains_as_it_does(kind, arguments_of):
    given = arguments_of(per_device_train_batch_size=2, gradient_accumulation_steps=3)

    def build_trainer() -> Any:
        return transformers.Trainer(BUILD[kind](), given, train_dataset=DATA[kind]())

    task = from_trainer(build_trainer)
    assert (task.batch_size, task.micro_batch_size, task.precision, task.max_grad_norm) == (6, 2, None, None)
    trainer = build_trainer()
    trainer.train()
    assert trace(task, plan_of())[0] == pytest.approx(losses_of(trainer), rel=1e-5)


@pytest.mark.medium
def test_a_task_of_a_trainer_evaluates_as_it_does(arguments_of):
    """At its own batch unless told another, by the metric that it keeps its best model by, and with nothing changed."""
    sizes = []

    def metrics(predicted: Any) -> dict[str, float]:
        return {"rows": float(len(predicted.predictions))}

    class Watched(transformers.Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(next(iter(inputs.values()))))
            return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluating(**given: Any) -> Task:
        held_out = torch.utils.data.Subset(Images(), range(8))
        made = arguments_of(per_device_eval_batch_size=4, **given)
        compute = metrics if given else None
        return from_trainer(
            lambda: Watched(Cnn(), made, train_dataset=Images(), eval_dataset=held_out, compute_metrics=compute)
        )

    task = evaluating()
    assert task.evaluation_batch(1) == 4
    model = task.build_model()
    loss, *_ = evaluate(task, model)
    assert loss < 0
    assert evaluate(task, model, 8)[0] == pytest.approx(loss, rel=1e-5)
    assert sizes == [4, 4, 8]
    assert model.training
    assert "forward" not in vars(model)
    best = evaluating(metric_for_best_model="rows", greater_is_better=True)
    assert evaluate(best, best.build_model())[:2] == (8.0, 0.0)
    alone = from_trainer(lambda: transformers.Trainer(Cnn(), arguments_of(), train_dataset=Images()))
    assert alone.evaluate is None


def test_the_evaluation_batch_of_a_plan_is_an_argument():
    plan = plan_of().model_copy(update={"evaluation": Evaluation(batch=64)})
    assert arguments(plan)["per_device_eval_batch_size"] == 64


def test_a_task_states_what_the_trainer_does(arguments_of):
    given = arguments_of(bf16=True, max_grad_norm=0.5, dataloader_num_workers=1, activation_checkpointing=True)
    with pytest.warns(UserWarning, match="activation_checkpointing=True: left to the plan"):
        task = from_trainer(lambda: transformers.Trainer(build_gpt(), given, train_dataset=DATA["gpt"]()))
    assert (task.batch_size, task.precision, task.max_grad_norm) == (8, "bf16", 0.5)
    assert task.loader_options["num_workers"] == 1


@pytest.mark.parametrize(("kind", "shares"), [("cosine", (1.0, 0.75, 0.25)), ("linear", (1.0, 2 / 3, 1 / 3))])
def test_the_trainers_schedule_is_the_tasks_over_as_many_steps(kind, shares, arguments_of):
    """A model is judged after such a training. Each asked for is another, of its own optimizer."""
    given = arguments_of(lr_scheduler_type=kind)
    task = from_trainer(lambda: transformers.Trainer(Cnn(), given, train_dataset=Images()))
    for _ in range(2):
        optimizer = task.make_optimizer(task.build_model())
        schedule = task.make_scheduler(optimizer, 3)
        for share in shares:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(LEARNING_RATE * share)
            optimizer.step()
            schedule.step()


def test_a_constant_rate_is_no_schedule(arguments_of):
    task = from_trainer(lambda: transformers.Trainer(Cnn(), arguments_of(), train_dataset=Images()))
    assert task.make_scheduler(task.make_optimizer(task.build_model()), 3) is None


def test_models_of_a_task_are_built_anew_from_its_seed(arguments_of):
    task = from_trainer(lambda: transformers.Trainer(Cnn(), arguments_of(), train_dataset=Images()))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(task.build_model().stem.weight.sum().item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trial_builds_the_trainer_once(arguments_of):
    """As a job does: not a second dataset beside the first. The model is the one that another build makes."""
    built = []

    def build_trainer() -> Any:
        built.append(transformers.Trainer(Cnn(), arguments_of(), train_dataset=Images()))
        return built[-1]

    task = from_trainer(build_trainer)
    first = apply(plan_of(), task).model
    assert len(built) == 1
    again = apply(plan_of(), task).model
    assert len(built) == 2
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert first is not again


@pytest.mark.parametrize(("build", "words"), [(lambda: None, "must return a transformers.Trainer, but got NoneType")])
def test_what_is_no_trainer_is_refused(build, words):
    with pytest.raises(TaskError, match=words):
        from_trainer(build)


def test_a_trainer_with_a_plan_is_refused(job):
    with pytest.raises(TaskError, match="has a plan already"):
        from_trainer(lambda: job("cnn", plan_of()))


FILE = """
from integration_models import Images, build_cnn
from transformers import Trainer, TrainingArguments
from autotune import from_trainer


def build_trainer():
    args = TrainingArguments("out", use_cpu=True, report_to=[], per_device_train_batch_size=4)
    return Trainer(build_cnn(), args, train_dataset=Images())


task = from_trainer(build_trainer)
"""


def test_a_file_with_a_trainer_is_a_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(FILE)
    task = load_task("model.py")
    assert (task.source, task.batch_size, task.max_grad_norm) == ("model.py", 4, 1.0)
    assert apply_to_model(plan_of(layers={"kind": "exact"}), task.build_model()).training
