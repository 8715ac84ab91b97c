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
from autotune.measure.measurement import TurnOptions
from autotune.measure.run import measure
from autotune.measure.steps import Steps
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
    card: Card,
    host_s: float,
    device_s: float,
    options: dict[str, Any] | None = None,
    counts: bool = False,
    collates: bool = True,
    fused: bool = False,
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
        collate=collate if collates else None,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=fused),
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


_NOT_PINNED: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("settings", "more", "waits"),
    [
        ({}, {}, []),
        ({}, {"counts": True}, []),
        ({}, {"options": _NOT_PINNED}, ["copy from pageable memory"]),
        ({"data_loading": {"num_workers": 0, "cache": "device"}}, {"options": _NOT_PINNED, "collates": False}, []),
        ({"precision": {"kind": "fp16"}}, {"fused": True}, []),
        ({"precision": {"kind": "fp16"}}, {}, ["item"]),
        ({"precision": {"kind": "fp16"}, "optimizer": {"kind": "fused"}}, {}, []),
        ({"precision": {"kind": "fp16"}, "optimizer": {"kind": "for_loop"}}, {"fused": True}, ["item"]),
    ],
    ids=[
        "mean",
        "sum and count",
        "not pinned",
        "cache on the card",
        "fp16, built fused",
        "fp16: torch's own",
        "the plan's fused",
        "the plan's loop",
    ],
)
def test_a_step_waits_for_the_card_no_more_than_torch_does(
    card: Card, settings: dict[str, Any], more: dict[str, Any], waits: list[str]
) -> None:
    """A loss scaler that leaves an optimizer out reads what it found first (torch 2.13, amp/grad_scaler.py,
    ``_maybe_opt_step``)."""
    task = _task(card, 0.0, 0.001, **more)
    steps = Steps(autotune.apply(_plan(**settings), task))
    steps.step()
    card.waits.clear()
    for _ in range(20):  # over the end of an epoch
        steps.step()
    assert card.waits == waits * 20


def test_a_fused_optimizer_s_skipped_step_is_told(card: Card) -> None:
    """Its kernel leaves it out on the card; who asks waits."""
    training = autotune.apply(_plan(precision={"kind": "fp16"}), _task(card, 0.0, 0.001, fused=True))
    batches, before = iter(training.loader), training.model.weight.detach().clone()
    first = training.step(next(batches) * float("inf"))
    assert (first.stepped, torch.equal(training.model.weight, before)) == (False, True)
    assert training.step(next(batches) * 1e-3).stepped  # its gradients times the loss scale are finite in fp16
    assert not torch.equal(training.model.weight, before)


@pytest.mark.parametrize(
    ("options", "host_ms", "share"),
    [
        ({"pin_memory": True}, 20, 0.0),
        ({"pin_memory": True}, 150, 1 / 3),
        (_NOT_PINNED, 1, 0.0),
        (_NOT_PINNED, 150, 1 / 3),
    ],
    ids=["overlaps", "too slow", "not pinned", "not pinned, too slow"],
)
def test_waiting_for_data_is_what_the_card_does_without(
    card: Card, options: dict[str, Any], host_ms: int, share: float
) -> None:
    """Of 100 ms on the card. A copy from pageable memory waits for what is queued, which is no waiting for data."""
    found = _measured(_task(card, host_ms / 1000, 0.1, options))
    assert found.loader_wait == pytest.approx(share, abs=0.01)


class Turns:
    """Three turns of a second; in between the other process has the card for five, and finds it idle."""

    turn_s, at_rest_s = 1.0, 0.0

    def __init__(self, card: Card) -> None:
        self.card, self.rates = card, list[float]()

    def wait(self, samples_per_s: float = 0.0, disturbed: float = 0.0) -> bool:
        card = self.card
        assert card.now_s >= card.stream.free_at_s
        self.rates.append(samples_per_s)
        card.host(5.0)
        self.at_rest_s += 5.0
        return len(self.rates) < 5


def test_by_turns_a_speed_is_what_it_is_alone(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets ahead of the card anew at the beginning of each turn, in a step that is not timed."""
    task, side = _task(card, 0.02, 0.1), Turns(card)
    monkeypatch.setattr("autotune.measure.timing.engine.Side", lambda options: side)
    options = MeasureOptions(trial_time_s=20, parity_batch=None, turns=TurnOptions(folder="unused", turn_s=1.0))
    found = measure(autotune.apply(_plan(), task), task, options)
    assert side.rates[0] == side.rates[1] == 0.0  # before the warm-up and after it
    assert side.rates[2:] == [pytest.approx(40, rel=0.01)] * 3
    assert found.samples_per_s.value == pytest.approx(40, rel=0.01)
