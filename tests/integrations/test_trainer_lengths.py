"""A ``transformers.Trainer`` that groups samples by length: a plan keeps its order, or refuses in words."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from conformance import plan_of
from integration_models import LEARNING_RATE, build_gpt
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune import apply, from_trainer
from autotune.errors import PlanError, TaskError
from autotune.integrations.transformers import PlanMixin, arguments
from autotune.measure.lengths import find_lengths

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LENGTHS = [2 + 5 * number % 13 for number in range(24)]
LONGEST = max(LENGTHS)


class Planned(PlanMixin, transformers.Trainer):
    """As docs/use/frameworks.md has it."""


class Texts(torch.utils.data.Dataset):
    """Each with a first token of its own, by which it is known again."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + LENGTHS[index])
        return {"input_ids": tokens, "labels": tokens}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    columns = {name: [one[name] for one in samples] for name in samples[0]}
    fill = {"input_ids": 0, "labels": -100}
    return {name: pad_sequence(rows, True, fill[name]) for name, rows in columns.items()}


@pytest.fixture
def trainer_of(tmp_path):
    def build(own: Any = transformers.Trainer, plan: Any = None, **changes: Any) -> Any:
        stock = {
            "use_cpu": True, "report_to": [], "logging_steps": 1, "num_train_epochs": 1, "max_grad_norm": 0,
            "lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE, "save_strategy": "no",
            "disable_tqdm": True, "optim": "adamw_torch", "train_sampling_strategy": "group_by_length",
        }  # fmt: skip
        args = transformers.TrainingArguments(str(tmp_path), **{**stock, **arguments(plan_of()), **changes})
        return own(build_gpt(), args, train_dataset=Texts(), data_collator=padded, **({"plan": plan} if plan else {}))

    return build


def trained(trainer: Any) -> tuple[list[list[list[int]]], list[float]]:
    """The samples of each micro-batch of each optimizer step, and the losses."""
    steps, passes = [], []
    stepped = register_optimizer_step_post_hook(lambda *_: (steps.append([*passes]), passes.clear()))
    watch = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            passes.append(kwargs["input_ids"][:, 0].tolist()) if torch.is_grad_enabled() else None
        ),
        with_kwargs=True,
    )
    try:
        trainer.train()
    finally:
        stepped.remove()
        watch.remove()
    return steps, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.medium
@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"checkpointing": {"kind": "blocks"}, "layers": {"kind": "exact"}, "data_loading": {"cache": "host"}},
        {"data_loading": {"num_workers": 2, "prefetch_factor": 1}},
    ],
)
def test_a_plan_keeps_the_trainers_order(rows, trainer_of):
    steps, losses = trained(trainer_of())
    assert [len(one) for step in steps for one in step] == [2] * 12
    assert LENGTHS[steps[0][0][0]] == LONGEST
    planned_steps, planned_losses = trained(trainer_of(Planned, plan_of(**rows)))
    assert planned_steps == steps
    assert planned_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.medium
def test_another_micro_batch_leaves_each_steps_samples(trainer_of):
    """Groups are made of a step's samples, which are as many."""
    steps, losses = trained(trainer_of())
    plan = plan_of(batch={"micro": 3, "accumulate": 2})
    planned_steps, planned_losses = trained(trainer_of(Planned, plan, **arguments(plan)))
    assert [len(one) for one in planned_steps[0]] == [3, 3]
    assert [[*chain(*step)] for step in planned_steps] == [[*chain(*step)] for step in steps]
    assert planned_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.medium
def test_a_task_of_it_draws_the_samplers_order_and_cuts_it_by_tokens_too(trainer_of):
    """Cut by lengths, a step has the same samples, in passes of at most so many tokens; its loss is the same."""
    task = from_trainer(trainer_of)
    found = []
    for batch in ({"micro": 2, "accumulate": 3}, {"tokens": 40, "effective": 6}):
        torch.manual_seed(0)
        training = apply(plan_of(batch=batch), task)
        torch.manual_seed(0)
        steps: list[tuple[list[int], float]] = [([], 0.0)]
        for micro in training.loader:
            result = training.step(micro)
            samples, loss = steps.pop()
            steps.append((samples + micro["input_ids"][:, 0].tolist(), loss + float(result.loss) * result.weight))
            assert "tokens" not in batch or micro["input_ids"].numel() <= 40
            if result.stepped:
                steps.append(([], 0.0))
        found.append(steps[:-1])
    own = torch.utils.data.DataLoader(range(24), 6, sampler=task.build_sampler(task.build_dataset()))
    torch.manual_seed(0)
    order = [step.tolist() for step in own]
    (in_samples, losses), (in_tokens, their_losses) = (zip(*steps, strict=True) for steps in found)
    assert [*in_samples] == order
    assert [sorted(step) for step in in_tokens] == [sorted(step) for step in order]
    assert [*their_losses] == pytest.approx([*losses], rel=1e-4)


def test_the_longest_batch_of_its_samples_is_the_one_that_is_measured(trainer_of):
    task = from_trainer(trainer_of)
    found = find_lengths(task, task.build_dataset(), deterministic=True)
    assert (found.read, found.longest) == (24, LONGEST)
    assert {LENGTHS[place] for place in found.batches(2)[0]} == {*sorted(LENGTHS)[-2:]}


@pytest.mark.medium
def test_batches_of_tokens_are_refused_in_a_trainer_and_its_own_in_a_task(trainer_of):
    plan = plan_of(batch={"tokens": 40, "effective": 6})
    with pytest.raises(PlanError, match=r"batch\.tokens: batches are made of samples by their lengths"):
        trainer_of(Planned, plan)
    with pytest.raises(TaskError, match=r"batch sampler \(BatchRebalanceSampler\).*Use another train_sampling_strat"):
        from_trainer(lambda: trainer_of(train_sampling_strategy="batch_rebalance"))
    with pytest.raises(PlanError, match=r"batches of any size \(BatchRebalanceSampler\)"):
        trained(trainer_of(Planned, plan_of(), train_sampling_strategy="batch_rebalance"))


class Pairs(torch.utils.data.Sampler):
    """Batches of two, which it does not say."""

    def __len__(self) -> int:
        return len(LENGTHS) // 2

    def __iter__(self) -> Any:
        return iter([[place + 1, place] for place in range(0, len(LENGTHS), 2)])


class InPairs(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=Pairs(), collate_fn=padded)
        return self.accelerator.prepare(loader)


class PlannedInPairs(PlanMixin, InPairs):
    pass


@pytest.mark.medium
def test_a_users_own_batch_sampler_may_make_the_plans_batches(trainer_of):
    steps, losses = trained(trainer_of(InPairs))
    assert [*chain(*steps)] == [*Pairs()]
    planned_steps, planned_losses = trained(trainer_of(PlannedInPairs, plan_of()))
    assert planned_steps == steps
    assert planned_losses == pytest.approx(losses, rel=1e-5)
