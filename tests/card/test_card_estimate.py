"""A task is read for the card that is here: its facts are the card's, and its model stays off it."""

from __future__ import annotations

import torch
from stand_in import Card
from told import GIB
from torch import nn

from autotune.estimates.cards import on_device
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions
from autotune.task import Task
from autotune.testing.zoo import ZOO


def test_a_model_that_is_larger_than_the_card_is_read_all_the_same(card: Card) -> None:
    """4 MiB of parameters, on a card that has 1 to give."""
    card.name, card.capability = "NVIDIA H100 80GB HBM3", (9, 0)
    card.total_bytes = card.context_bytes + 2**20
    task = Task(**{**vars(ZOO["mlp"]), "build_model": lambda: nn.Linear(1024, 1024)})
    facts = inspect_task(task, InspectOptions(runs_model=False), "cuda")
    assert (facts.device.type, facts.device.capability, facts.num_trainable) == ("cuda", (9, 0), 1024 * 1025)
    assert torch.cuda.max_memory_allocated() < 2**20
    assert on_device(facts.device, False)["context"].value == 650 * 2**20


def test_tf32_is_not_refused_for_a_card_that_has_none_where_nothing_runs(card: Card) -> None:
    card.name, card.capability, card.total_bytes = "Tesla T4", (7, 5), 15 * GIB
    task = Task(**{**vars(ZOO["mlp"]), "precision": "tf32"})
    facts = inspect_task(task, InspectOptions(runs_model=False), "cuda")
    assert (facts.precision, facts.device.bf16) == ("tf32", False)
