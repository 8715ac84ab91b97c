"""The six jobs, each trained to its quality once."""

from __future__ import annotations

import hashlib
import itertools
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..rows import EXAMPLES, HERE

JOBS = ("mlp", "mlp_narrow", "vgg", "text_cnn", "char_gpt", "vit")
_DIGITS = EXAMPLES / "digits_cnn" / "model.py"
BUILT_ON = {
    "mlp_narrow": HERE / "quality_jobs" / "mlp.py",
    "vgg": _DIGITS,
    "char_gpt": EXAMPLES / "char_gpt" / "model.py",
    "vit": _DIGITS,
}
"""The file that a job's own one runs."""


@dataclass(frozen=True)
class Job:
    """One of them."""

    name: str
    cache: Path
    """Folder for what need not be computed twice."""

    @property
    def path(self) -> Path:
        """Of its task file."""
        return HERE / "quality_jobs" / f"{self.name}.py"

    @property
    def version(self) -> str:
        """Of its files: rows of others are not taken up."""
        files = [self.path, BUILT_ON.get(self.name, self.path)]
        return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()[:8]

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What its task file defines."""
        return runpy.run_path(str(self.path))

    @cached_property
    def dataset(self) -> Any:
        """What it trains on."""
        return self.parts["build_dataset"]()

    @property
    def recovery_steps(self) -> int:
        """For which a cut and the job as it stands are trained further."""
        return int(self.parts["recovery_steps"])

    def kept(self, what: str) -> Path:
        """The cache's file of that name."""
        return self.cache / f"{self.name}-{self.version}-{torch.__version__}-{what}.pt"

    @cached_property
    def weights(self) -> Path:
        """Those that it goes on from; trained now, if they have not been before."""
        path = self.kept("weights")
        if not path.exists():
            torch.manual_seed(0)
            model = self.parts["build_model"]()
            train(self, model, self.parts["train_steps"], seed=0)
            self.cache.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path)
        return path

    def trained(self) -> nn.Module:
        """The job's model with its weights."""
        model: nn.Module = self.parts["build_model"]()
        model.load_state_dict(torch.load(self.weights))
        return model

    def batches(self, seed: int) -> Iterator[Any]:
        """Batches without end, shuffled anew in each epoch."""
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(self.dataset, self.parts["batch_size"], shuffle=True, drop_last=True, generator=order)
        return itertools.chain.from_iterable(itertools.repeat(loader))

    def scores(self, model: nn.Module) -> Tensor:
        """Of each example that judges."""
        found: Tensor = self.parts["scores"](model, self.parts["JUDGED"])
        return found


def train(job: Job, model: nn.Module, num_steps: int, seed: int) -> None:
    """Train by the job's loss and optimizer; its rate falls to 0."""
    torch.manual_seed(seed)
    optimizer = job.parts["build_optimizer"](list(model.parameters()))
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    model.train()
    for batch in itertools.islice(job.batches(seed), num_steps):
        job.parts["compute_loss"](model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
