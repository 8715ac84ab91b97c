"""A whole search on a card: each trial is what its process answers, on a card of its own that nothing else uses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from search_tables import facts
from stand_in import Card

from autotune.device_memory import context
from autotune.measure import others
from autotune.plan import Plan
from autotune.searches.driver import search
from autotune.searches.options import SearchOptions
from autotune.units import MIB
from autotune.workers import CompareRequest, Measured, MeasureRequest, TrialRequest
from autotune.workers.outcome import Outcome
from autotune.workers.table import TableExecutor
from autotune.workers.trial import child
from autotune.workers.trial.folder import TrialFolder

TASK = """
import torch
import stand_in
from torch import nn
from torch.utils.data import TensorDataset

build_model = lambda: nn.Sequential(nn.Linear(16, 1024), *(nn.GELU() for _ in range(16)), nn.Linear(1024, 1))
build_dataset = lambda: TensorDataset(torch.randn(1024, 16))
batch_size = 256

def compute_loss(model, batch):
    stand_in.in_use().work(0.1 + 0.0004 * len(batch[0]))
    return model(batch[0]).pow(2).mean()
"""
"""On the card, a pass takes 0.1 s and 0.4 ms a sample, and keeps nine tensors of 4 KiB a sample."""


class OverCards(TableExecutor):
    """Answers each request in this process, over a card that is made for it."""

    def __init__(self, folder: Path, make: Callable[[], Card]) -> None:
        super().__init__(facts(), ())
        self.answers: list[tuple[TrialRequest, Outcome, Card]] = []
        self._folder, self._make, self._numbers = folder, make, itertools.count()

    def _answer(self, request: TrialRequest) -> Outcome:
        if isinstance(request, CompareRequest):
            return self._compared(request)
        folder = TrialFolder(self._folder / str(next(self._numbers)))
        folder.make()
        with pytest.MonkeyPatch.context() as patch, self._make().in_place() as card:
            patch.setattr(others, "_began_with", None)
            patch.setattr(context, "_opened", None)
            outcome = child._answer(lambda: child._run(request, folder, card.now_s), "cuda")
        self.answers.append((request, outcome, card))
        return outcome


def _search(tmp_path: Path, make: Callable[[], Card], **options: object) -> tuple[Plan, OverCards]:
    task = tmp_path / "model.py"
    task.write_text(TASK)
    executor = OverCards(tmp_path, make)
    where = {"task": str(task), "storage": f"sqlite:///{tmp_path}/s.db", "output": tmp_path / "plan.yaml"}
    asked = SearchOptions(**where, device="cuda", trial_time=5, **options)
    return search(asked, executor, lambda event: None, threading.Event()), executor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:allocator")
def test_a_search_on_a_card_measures_what_the_card_does(tmp_path: Path) -> None:
    """The job takes 0.1 + 256 * 0.0004 s a step, whoever updates it, and is charged 432 MiB of context and 20 of
    segments."""
    plan, executor = _search(tmp_path, lambda: Card(read_s=1e-4), trials=2, space="exact")
    trials = [(outcome, card) for request, outcome, card in executor.answers if isinstance(request, MeasureRequest)]
    assert len(trials) > 2
    held = [
        request for request, *_ in executor.answers if isinstance(request, MeasureRequest) and request.options.enforce
    ]
    assert {request.plan.reference and request.plan.reference.peak.process for request in held} == {(432 + 20) * MIB}
    for outcome, card in trials:
        assert isinstance(outcome, Measured), outcome
        found = outcome.measurement
        assert found.samples_per_s.value == pytest.approx(256 / 0.2024, rel=1e-3)
        assert (found.peak.process, found.loader_wait, found.disturbed) == (card.most_charged_bytes, 0.0, 0.0)
    assert plan.measured is not None
    assert plan.measured.peak.process == (432 + 20) * MIB
    assert plan.environment is not None
    assert plan.environment.device == "NVIDIA A100-SXM4-40GB"
