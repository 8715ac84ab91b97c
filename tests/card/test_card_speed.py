"""A speed that is measured on a card is that of a loop that waits for it once, at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_in import Card
from torch import nn
from torch.utils.data import Dataset

import autotune
from autotune.measure import Measurement, MeasureOptions
from autotune.measure.run import measure
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.units import MIB


class Rows(Dataset[torch.Tensor]):
    """16 batches of 4 samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _task(
    card: Card, host_s: float, device_s: float, options: dict[str, Any] | None = None, counts: bool = False
) -> autotune.Task:
    """A batch takes the host ``host_s`` to put together, and the card ``device_s`` to train on."""

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        card.host(host_s)
        return torch.stack(samples)

    def compute_loss(model: nn.Module, batch: torch.Tensor) -> Any:
        card.work(device_s)
        losses = model(batch).pow(2).mean(1)
        return (losses.sum(), torch.ones_like(losses).sum()) if counts else losses.mean()

    return autotune.Task(
        build_model=lambda: nn.Linear(4, 2),
        build_dataset=Rows,
        compute_loss=compute_loss,
        collate=collate,
        loader_options={"pin_memory": True} if options is None else options,
    )


def _plan(**settings: Any) -> Plan:
    return Plan(settings=Settings(batch=Batch(micro=4), **settings), budget=Budget(device="cuda", limit=1024 * MIB))


def _measured(task: autotune.Task, **settings: Any) -> Measurement:
    options = MeasureOptions(trial_time_s=20, precision=0.01, parity_batch=None)
    return measure(autotune.apply(_plan(**settings), task), task, options)


def _samples_per_s(card: Card, task: autotune.Task, num_steps: int = 64) -> float:
    """Of a plain loop, which waits at its two ends."""
    training = autotune.apply(_plan(), task)
    batches = (batch for _ in range(num_steps) for batch in training.loader)
    training.step(next(batches))
    torch.cuda.synchronize()
    began_s = card.now_s
    for _ in range(num_steps):
        training.step(next(batches))
    torch.cuda.synchronize()
    return 4 * num_steps / (card.now_s - began_s)


@pytest.mark.parametrize(("host_ms", "device_ms"), [(20, 100), (30, 60), (60, 30), (55, 50), (200, 900)], ids=str)
def test_speed_is_that_of_a_loop_that_waits_once(card: Card, host_ms: int, device_ms: int) -> None:
    """The host is ahead of the card in the one, and behind it in the other: the longer of the two is a step's time."""
    task = _task(card, host_ms / 1000, device_ms / 1000)
    measured, truth = _measured(task).samples_per_s.value, _samples_per_s(card, task)
    assert truth == pytest.approx(4000 / max(host_ms, device_ms), rel=0.1)
    assert measured == pytest.approx(truth, rel=0.02)
