"""``fit`` in a ``transformers.Trainer`` and in Lightning: it trains as it did, within a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tanh_block import TanhBlock
from torch import nn

from autotune.errors import NothingFits, PlanError
from autotune.techniques.support.recomputed import is_recomputed
from autotune.units import MIB

NUM_BLOCKS, WIDTH, ROWS = 4, 64, 2**15
LACKING = 50 * MIB
"""A block's hidden layer has 32 MiB."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TanhBlock(WIDTH) for _ in range(NUM_BLOCKS)))

    def forward(self, x, labels=None):
        return {"loss": (self.blocks(x).mean(-1) - labels).square().mean()}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((WIDTH,), index / ROWS), "labels": torch.tensor(0.5)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        drawn = torch.tensor(indices) / ROWS
        return [{"x": drawn[:, None].expand(-1, WIDTH), "labels": torch.full((len(indices),), 0.5)}]


def joined(samples: list[Any]) -> dict[str, Any]:
    """Samples that are read at once are a batch already."""
    if len(samples) == 1 and samples[0]["x"].dim() == 2:
        return samples[0]
    return torch.utils.data.default_collate(samples)


def recomputed(model: nn.Module) -> list[int]:
    return [number for number, block in enumerate(model.blocks) if is_recomputed(block)]


@pytest.fixture
def trainer_of(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def build(**changes: Any) -> Any:
        torch.manual_seed(0)
        stock: dict[str, Any] = {
            "use_cpu": True, "report_to": [], "logging_steps": 1, "max_steps": 1, "save_strategy": "no",
            "disable_tqdm": True, "per_device_train_batch_size": ROWS, "max_grad_norm": 0,
            "remove_unused_columns": False,
        }  # fmt: skip
        args = transformers.TrainingArguments(str(tmp_path), **{**stock, **changes})
        return transformers.Trainer(Model(), args, train_dataset=Rows(), data_collator=joined)

    return build


def loss_of(trainer: Any) -> float:
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row)


@pytest.mark.slow
def test_a_trainer_trains_as_it_did_with_the_blocks_recomputed_that_it_takes(trainer_of):
    from autotune.integrations.transformers import fit

    trainer = trainer_of()
    stock = fit(trainer, 2**50, dry_run=True)
    assert stock.settings.chosen
    assert not hasattr(trainer, "plan")
    budget = round((stock.stock_peak.high - LACKING) * 1.03)
    fitted = fit(trainer, budget, techniques=("checkpointing",))
    assert recomputed(trainer.model) == []  # until the optimizer is built
    assert loss_of(trainer) == loss_of(trainer_of())
    assert recomputed(trainer.model) == list(fitted.settings.checkpointing.numbers(NUM_BLOCKS))
    assert recomputed(trainer.model)
    with pytest.raises(PlanError, match="has a plan already"):
        fit(trainer, budget)


@pytest.mark.medium
def test_gradients_that_a_trainer_clips_or_accumulates_are_not_freed(trainer_of):
    """Else the optimizer's step would be within backward."""
    from autotune.fitting.choices import combinations_of
    from autotune.integrations.transformers import fit

    for changes in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}):
        fitted = fit(trainer_of(**changes), 2**50, dry_run=True)
        facts = fitted.facts.model_copy(update={"num_trainable": 2**30})  # worth it
        found, _ = combinations_of(None, facts, may_free=True, batch=fitted.loop.batch)
        assert {one.optimizer_step.kind for one in found} == {"after_backward"}


@pytest.mark.medium
def test_nothing_fits_leaves_a_trainer_as_it_was(trainer_of):
    from autotune.integrations.transformers import fit

    trainer = trainer_of()
    own = type(trainer)
    with pytest.raises(NothingFits, match="smallest budget that works"):
        fit(trainer, "1MiB")
    assert type(trainer) is own
    assert trainer.optimizer is None


@pytest.mark.slow
def test_a_lightning_job_trains_as_it_did_with_the_blocks_recomputed_that_it_takes():
    pl = pytest.importorskip("lightning.pytorch")
    from autotune.integrations.lightning import FitCallback

    class Job(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Model().blocks

        def training_step(self, batch):
            loss = Model.forward(self, **batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(*callbacks: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        job = Job()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(max_steps=1, accelerator="cpu", callbacks=[*callbacks], **quiet)
        trainer.fit(job, torch.utils.data.DataLoader(Rows(), ROWS, collate_fn=joined))
        return job, trainer

    large = FitCallback(2**50)
    stock, trainer = trained(large)
    assert recomputed(stock) == []
    budget = round((large.fitted.stock_peak.high - LACKING) * 1.03)
    callback = FitCallback(budget, techniques=("checkpointing",))
    job, other = trained(callback)
    assert recomputed(job) == list(callback.fitted.settings.checkpointing.numbers(NUM_BLOCKS))
    assert recomputed(job)
    assert other.callback_metrics == trainer.callback_metrics
    assert all(map(torch.equal, job.parameters(), stock.parameters()))
