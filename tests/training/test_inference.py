"""A plan for inference in a job: what ``apply`` makes of it, and what a task has to have."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from search_tables import facts
from torch import nn
from torch.utils.data import TensorDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.plan import Inference as OfInference
from autotune.plan import Plan, TaskRef
from autotune.techniques import TECHNIQUES, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.quantization import Quantization
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.training.fingerprint import identify
from autotune.training.forward.inference import Inference
from autotune.training.training import Training

PIECES = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
def build_dataset():
    return [torch.full((4,), float(number)) for number in range(6)]
"""
TRAINS = PIECES + "def compute_loss(model, batch):\n    return model(batch).mean()\n"
INFERS = PIECES + "def infer(model, batch):\n    return model(batch)\n"


def plan(**settings) -> Plan:
    return Plan(settings=Settings(**settings), inference=OfInference(tolerance=0.05))


def task() -> autotune.Task:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    return autotune.Task(
        build_model=lambda: model,
        build_dataset=lambda: TensorDataset(torch.randn(6, 64)),
        infer=lambda model, batch: {"logits": model(batch[0])},
    )


def written(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return str(path)


def test_a_plan_for_inference_infers_in_eval_mode_without_gradients_in_the_order_of_the_samples():
    job = task()
    applied = autotune.apply(plan(batch=Batch(micro=4)), job)
    assert isinstance(applied, Inference)
    assert not applied.model.training
    found = [applied.infer(batch)["logits"] for batch in applied.loader]
    assert [len(one) for one in found] == [4, 2]
    assert not any(one.requires_grad for one in found)
    samples = applied.loader.spec.dataset.tensors[0]
    torch.testing.assert_close(torch.cat(found), applied.model(samples).detach())


def test_a_plan_that_is_refused_leaves_the_model_of_a_task_as_it_is():
    """The task builds one model, as in a notebook: weights that were rounded are not taken for those that were."""
    job = task()
    found, _ = identify(job.build_model(), job.build_dataset())
    autotune.apply(plan(quantization=Quantization(kind="int8_weights")), job)
    weight = job.build_model()[0].weight
    stock = plan().model_copy(update={"task": TaskRef(source="model.py", fingerprint=found)})
    with pytest.raises(PlanError, match="rounded this model's weights to int8"):
        autotune.apply(stock, job)
    assert job.build_model()[0].weight is weight


def test_every_sample_is_inferred_whatever_training_drops():
    job = dataclasses.replace(task(), loader_options={"drop_last": True, "timeout": 0})
    found = autotune.apply(plan(batch=Batch(micro=4)), job)
    assert [len(batch[0]) for batch in found.loader] == [4, 2]
    assert job.for_inference().loader_options == {"timeout": 0}


def test_pieces_are_a_model_a_dataset_and_infer():
    model = nn.Linear(4, 2)
    applied = autotune.apply(plan(), model=model, dataset=[torch.ones(4)] * 3, infer=lambda model, batch: model(batch))
    (batch,) = applied.loader
    assert applied.infer(batch).shape == (3, 2)
    with pytest.raises(TaskError, match="model=, dataset= and infer=; missing: infer"):
        autotune.apply(plan(), model=model, dataset=[torch.ones(4)] * 3)


def test_what_trains_is_refused():
    applied = autotune.apply(plan(), task())
    for name, given in (("backward", (torch.ones(()),)), ("optimizer_step", ()), ("forward_context", ())):
        with pytest.raises(TaskError, match=f"{name}: the plan is for inference"):
            getattr(applied, name)(*given)
    with pytest.raises(PlanError, match="halve_when_out_of_memory: it repeats optimizer steps"):
        autotune.apply(plan(), task(), halve_when_out_of_memory=True)
    with pytest.raises(PlanError, match="the plan is for inference"):
        autotune.apply_to_optimizer(plan(), torch.optim.SGD([torch.ones(1)], lr=0.1))


@pytest.mark.parametrize(
    "one", [Checkpointing(kind="blocks"), OptimizerStep(kind="in_backward"), Offload(kind="activations")]
)
def test_a_row_that_is_of_training_is_refused_in_words(one):
    with pytest.raises(PlanError, match=f"settings.{one.name}: .*, and the plan is for inference"):
        autotune.apply(plan(**{one.name: one}), task())


DATA = TensorDataset(torch.randn(6, 256, generator=torch.Generator().manual_seed(0)))


def three_layers() -> nn.Module:
    """Whose weights train."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))


def found_for_them(**settings: Any) -> Plan:
    """With the fingerprint of these layers and data."""
    found, _ = identify(three_layers(), DATA)
    ref = TaskRef(source="model.py", fingerprint=found)
    return plan(batch=Batch(micro=4), **settings).model_copy(update={"task": ref})


def test_weights_that_a_task_builds_to_train_are_in_a_file_in_inference():
    """Of all blocks, with outputs to the bit; the task is the one that the plan was found for, and its own model still
    trains."""
    job = dataclasses.replace(task(), build_model=three_layers, build_dataset=lambda: DATA)
    stock = autotune.apply(plan(batch=Batch(micro=4)), job)
    ours = autotune.apply(found_for_them(offload=Offload(kind="parameters")), job)
    assert [isinstance(one.weight, OffloadedWeight) for one in ours.model] == [True] * 3
    for _ in range(2):
        for batch, other in zip(ours.loader, stock.loader, strict=True):
            assert torch.equal(ours.infer(batch)["logits"], stock.infer(other)["logits"])
    assert ours.model[0].weight._content._held is None
    assert all(one.requires_grad for one in job.for_inference().build_model().parameters())


@pytest.mark.parametrize("how", ["pieces", "one model", "by hand"])
@pytest.mark.parametrize(
    "row", [{"offload": Offload(kind="parameters")}, {"quantization": Quantization(kind="int8_weights")}], ids=list
)
def test_a_model_in_hand_may_have_one_plan_after_another_and_trains_again(how, row):
    """Each time it is the model that the plans were found for."""
    model = three_layers()
    job = dataclasses.replace(task(), build_model=lambda: model, build_dataset=lambda: DATA)

    def put(one: Plan) -> None:
        if how == "pieces":
            autotune.apply(one, model=model, dataset=DATA, infer=job.infer)
        elif how == "one model":
            autotune.apply(one, job)
        else:
            autotune.apply_to_model(one, model.eval())

    for settings in ({}, row, row):
        put(found_for_them(**settings))
    assert not any(one.weight.requires_grad for one in model)
    assert type(model[0].weight) is not nn.Parameter
    assert model[0].bias.requires_grad
    if "offload" in row:
        for one in (copy.deepcopy(pickle.loads(pickle.dumps(model))), model):
            autotune.apply_to_model(Plan(settings=Settings()), one)
            assert all(type(weight) is nn.Parameter and weight.requires_grad for weight in one.parameters())
            assert torch.equal(one[1].weight, three_layers()[1].weight)


def test_in_training_what_trains_stays_in_memory_though_the_model_is_in_eval_mode():
    """As ``from_pretrained`` returns it."""
    model = three_layers().eval()
    model[1].requires_grad_(False)
    autotune.apply_to_model(Plan(settings=Settings(offload=Offload(kind="parameters"))), model)
    assert [isinstance(one.weight, OffloadedWeight) for one in model] == [False, True, False]


def test_a_search_for_inference_finds_weights_that_are_worth_a_file():
    known = facts(inference=True, num_parameters=2**20, num_trainable=2**20, num_blocks=3)
    assert Offload.choices(known) == (Offload(), Offload(kind="parameters"))
    assert Offload(kind="parameters").exactness(known) == "exact"
    small = known.model_copy(update={"num_parameters": 256})
    assert Offload(kind="parameters").unavailable(small) == "weights have 1 KiB, which is not worth it"


def test_what_inference_leaves_out():
    """What is about backward, an optimizer, or recovery."""
    assert {name for name, one in TECHNIQUES.items() if one.not_in_inference} == {
        "variant", "pruning", "low_rank", "layers", "checkpointing", "parallel", "optimizer",
        "optimizer_state", "optimizer_step", "sparse_gradients", "lazy_adam", "reversible", "trained_weights",
    }  # fmt: skip


def test_a_plan_for_training_takes_no_task_without_a_loss():
    with pytest.raises(TaskError, match=r"compute_loss is missing.*search with --inference"):
        autotune.apply(Plan(settings=Settings()), task())


@pytest.mark.parametrize("infer", ["infer = True", "def infer(images):\n    return images", "infer = None"])
def test_a_training_task_may_have_something_else_called_infer(tmp_path, infer):
    found = autotune.load_task(written(tmp_path, TRAINS + infer))
    assert isinstance(autotune.apply(Plan(settings=Settings()), found), Training)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRAINS, "missing infer. A task file defines:"),
        (TRAINS + "infer = True", "infer must be a function, but got bool"),
        (
            TRAINS + "def infer(images):\n    return images",
            r"infer takes \(images\), but is called with \(model, batch\)",
        ),
    ],
)
def test_a_task_for_inference_has_an_infer_of_a_model_and_a_batch(tmp_path, text, said):
    with pytest.raises(TaskError, match=said):
        autotune.load_task(written(tmp_path, text), inference=True)


def test_a_task_file_of_inference_alone_is_told_how_it_is_read(tmp_path):
    with pytest.raises(TaskError, match=r"(?s)missing compute_loss.*load_task\(…, inference=True\)") as told:
        autotune.load_task(written(tmp_path, INFERS))
    assert "build_model" not in str(told.value)
    with pytest.raises(TaskError) as told:
        autotune.load_task(written(tmp_path, PIECES))
    assert "For inference" not in str(told.value)


def test_a_task_file_for_inference_needs_nothing_that_trains(tmp_path):
    found = autotune.load_task(written(tmp_path, INFERS), inference=True)
    assert isinstance(autotune.apply(plan(), found), Inference)
    with pytest.raises(TaskError, match="missing compute_loss"):
        autotune.load_task(written(tmp_path, INFERS))


def test_a_model_that_trains_is_not_quantized():
    with pytest.raises(PlanError, match="int8 has no gradients, and the model is in training mode"):
        autotune.apply_to_model(Plan(settings=Settings(quantization=Quantization(kind="int8"))), nn.Linear(64, 64))
