"""A graph of a job's model, as TensorBoard's ``add_graph`` draws it: by ``torch.jit.trace``, beside the training, of
which it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotune
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO

ROWS: dict[str, dict[str, Any]] = {
    "layers, blocks, bf16": {
        "layers": Layers(kind="exact"),
        "checkpointing": Checkpointing(kind="blocks", every=1),
        "precision": Precision(kind="bf16"),
    },
    "in backward": {"optimizer_step": OptimizerStep(kind="in_backward")},
}


def add_graph(model: nn.Module, inputs: torch.Tensor, folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_graph(model, inputs)
    assert [*folder.iterdir()]


def trace(model: nn.Module, inputs: torch.Tensor, folder: Path) -> None:
    assert torch.jit.trace(model, inputs).graph is not None


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("draw", [trace, add_graph])
def test_the_losses_of_a_job_are_those_without_it(draw: Callable[..., None], rows: str, tmp_path: Path):
    """Drawn before the first step and between two."""

    def losses(draws: bool) -> list[float]:
        plan = Plan(settings=Settings(batch=Batch(micro=8), **ROWS[rows]))
        training, found = autotune.apply(plan, ZOO["mlp"]), []
        for batch in training.loader:
            if draws and len(found) < 2:
                draw(training.model, batch[0], tmp_path)
            found.append(training.step(batch).loss.item())
        return found

    with one_thread():
        assert losses(True) == losses(False)
