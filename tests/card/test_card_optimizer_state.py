"""``optimizer_state: host`` on a card: its state and its step are the host's, and the training is the job's own."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
from stand_in import Card
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers import optimizer_state
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.support.bits import kept_state
from autotune.testing.techniques import TechniqueContract
from autotune.training.apply_plan import apply
from autotune.units import MIB

HOST = OptimizerState(kind="host")
SIDE = 256
pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated in several."""
    monkeypatch.setattr(kept_state, "LEAST_PIECE", 2**12)


class TestOnACard(TechniqueContract):
    """On every model of the zoo, each parameter's state on the host."""

    technique = OptimizerState
    lacking = (HOST,)

    @pytest.fixture(autouse=True)
    def _every_parameter(self, monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
        monkeypatch.setattr(optimizer_state, "_LEAST_BYTES", 0)
        monkeypatch.setattr(kept_state, "LEAST", 1)
        monkeypatch.setattr(kept_state, "LEAST_PIECE", 256)

    def _choices(self, task: Task) -> tuple[OptimizerState, ...]:
        return (OptimizerState(), HOST)
