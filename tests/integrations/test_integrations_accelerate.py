"""A plan in an Accelerate loop: what is applied is the plan, and the losses are those of ``Training``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance import ROWS, expected, plan_of, rounding, state_of, watched
from integration_models import BUILD, DATA, Images, adamw, build_cnn, mean_loss
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from autotune import Plan
from autotune.errors import PlanError
from autotune.integrations.accelerate import arguments, prepare, written

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps its precision for the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def stock(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """A job's own three, in another batch."""
    model = BUILD[kind]().train()
    return model, adamw(model.parameters()), DataLoader(DATA[kind](), batch_size=4)


def accelerator_of(plan: Plan, **changes: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **arguments(plan), **changes)


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """The loop of Accelerate's own documentation; the mean loss of each optimizer step."""
    steps, parts = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        parts.append(float(loss.detach()))
        if accelerator.sync_gradients:
            steps.append(sum(parts) / len(parts))
            parts = []
    return steps


@pytest.mark.medium
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_the_job_is_the_plan(kind, rows):
    plan = plan_of(**ROWS[rows])
    accelerator = accelerator_of(plan)
    model, optimizer, loader = accelerator.prepare(*prepare(plan, accelerator, *stock(kind)))
    with watched(model, kind) as seen:
        found = train(accelerator, model, optimizer, loader)
    losses, state = expected(kind, rows, compute_loss=mean_loss)
    assert seen.steps == [[2, 2, 2]] * 4
    assert seen.dtypes == {torch.bfloat16 if plan.settings.precision.kind == "bf16" else None}
    assert state_of(model, optimizer.optimizer) == state
    assert found == pytest.approx(losses, rel=rounding(plan))


def test_arguments_say_the_plan():
    plan = plan_of(precision={"kind": "bf16"})
    assert arguments(plan) == {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"}
    assert arguments(plan_of(precision={"kind": "fp32"}))["mixed_precision"] == "no"
    assert "#     gradient_accumulation_steps=3\n" in written(plan)


def test_the_loader_is_torchs_with_the_plans_settings():
    plan = plan_of(data_loading={"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True})
    model, optimizer, _ = stock("cnn")
    order = torch.utils.data.RandomSampler(Images())
    own = DataLoader(Images(), batch_size=8, sampler=order, collate_fn=list, drop_last=True)
    accelerator = accelerator_of(plan)
    loader = prepare(plan, accelerator, model, optimizer, own, loss=lambda *_: None)[2]
    assert type(loader) is DataLoader
    assert (loader.batch_size, loader.sampler, loader.collate_fn, loader.drop_last) == (2, order, list, True)
    prepared = accelerator.prepare(loader)
    assert len(next(iter(prepared))) == 2
    read = prepared.base_dataloader
    assert (read.num_workers, read.prefetch_factor, read.persistent_workers) == (2, 4, True)


def test_twice_is_once(capsys):
    plan = plan_of(checkpointing={"kind": "blocks"}, layers={"kind": "exact"})
    accelerator, three = accelerator_of(plan), stock("cnn")
    first = prepare(plan, accelerator, *three)
    state = state_of(first[0], first[1])
    second = prepare(plan, accelerator, *first)
    assert second[0] is first[0]
    assert state_of(second[0], second[1]) == state
    assert capsys.readouterr().err.count("autotune: applied by Accelerate") == 1


def test_what_is_left_to_the_loop_is_said(capsys):
    plan = plan_of(precision={"kind": "bf16"})
    accelerator = accelerator_of(plan)
    prepare(plan, accelerator, *stock("cnn"))
    assert "not applied: precision in a loss that is computed outside the model" in capsys.readouterr().err
    with accelerator.autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_layers_are_in_a_loss_within_autocast():
    """A cross-entropy outside the model is answered there, as within ``Training.forward_context``."""
    plan = plan_of(layers={"kind": "exact"})
    accelerator = accelerator_of(plan)
    prepare(plan, accelerator, *stock("cnn"))
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])

    def backward_of() -> str:
        return type(nn.functional.relu(logits + 0).grad_fn).__name__

    plain = backward_of()
    with accelerator.autocast():
        assert backward_of() != plain
    assert backward_of() == plain
    assert labels.shape == (4,)


def test_outputs_are_cast_to_fp32():
    """By Accelerate, once the model has run: logits take twice the bytes, a loss outside computes in fp32."""
    plan = plan_of(precision={"kind": "bf16"})
    accelerator = accelerator_of(plan)
    model, _, loader = accelerator.prepare(*prepare(plan, accelerator, *stock("cnn")))
    inside = []
    model.head.register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    assert model(**next(iter(loader)))["logits"].dtype == torch.float32
    assert inside == [torch.bfloat16]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"pruning": {"kind": "structured"}}, "settings.pruning: it makes another model"),
        ({"low_rank": {"kind": "svd", "rank_ratio": 0.5}}, "settings.low_rank: it makes another model"),
        ({"batch": {"micro": 4, "accumulate": 2, "effective": 6}}, "Use a micro that divides 6"),
    ],
)
def test_a_plan_that_accelerate_cannot_follow_is_refused(rows, words):
    plan = plan_of(**rows)
    with pytest.raises(PlanError, match=words):
        prepare(plan, accelerate.Accelerator(cpu=True), *stock("cnn"))


def test_fp16_on_a_cpu_is_refused():
    """Accelerate itself does not build such an Accelerator."""
    plan = plan_of(precision={"kind": "fp16"})
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    with pytest.raises(PlanError, match="mixed_precision = 'no', and the plan's is 'fp16'"):
        prepare(plan, accelerator, *stock("cnn"))


def test_another_accelerator_is_refused():
    plan = plan_of(precision={"kind": "bf16"})
    with pytest.raises(PlanError, match=r"steps = 1, and the plan's is 3.*mixed_precision = 'no'"):
        prepare(plan, accelerate.Accelerator(cpu=True), *stock("cnn"))


def test_what_is_prepared_is_refused():
    plan = plan_of()
    accelerator = accelerator_of(plan)
    model, optimizer, loader = stock("cnn")
    prepared = accelerator.prepare(optimizer, loader)
    with pytest.raises(PlanError, match=r"came from accelerator\.prepare"):
        prepare(plan, accelerator, model, prepared[0], loader)
    with pytest.raises(PlanError, match=r"came from accelerator\.prepare"):
        prepare(plan, accelerator, model, optimizer, prepared[1])
    with pytest.raises(PlanError, match="prepared already, or wrapped"):
        prepare(plan, accelerator, accelerator.prepare(build_cnn()), optimizer, loader)


class Grouped(BatchSampler):
    """A user's own."""


def test_a_batch_sampler_must_say_the_plans_batch():
    plan = plan_of()
    model, optimizer, _ = stock("cnn")

    def fed(size: int) -> DataLoader:
        sampler = Grouped(SequentialSampler(Images()), size, drop_last=False)
        own = DataLoader(Images(), batch_sampler=sampler)
        return prepare(plan, accelerator_of(plan), model, optimizer, own)[2]

    assert type(fed(2).batch_sampler) is Grouped
    with pytest.raises(PlanError, match=r"batch sampler of its own \(Grouped, batches of 4\)"):
        fed(4)


class Pairs(Dataset):
    """No dicts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(4), index % 2


def test_a_loop_of_tuples_needs_no_loss():
    plan = plan_of(layers={"kind": "exact"})
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    own = DataLoader(Pairs(), batch_size=8)
    model, _, loader = prepare(plan, accelerator_of(plan), model, adamw(model.parameters()), own)
    assert state_of(model, adamw(model.parameters()))["converted"]
    assert next(iter(loader))[0].shape == (2, 4)
