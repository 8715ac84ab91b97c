"""A job as people have them: 8 x 4 samples a step in bf16, clipped. Each process writes down what it sees."""

import json
import os
from pathlib import Path

import torch
from torch import nn

SEEN = Path(__file__).parent / "seen"
MOST = 12
"""Forward passes that are written down."""
_seen = []


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def build_dataset():
    return torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))


def build_optimizer(parameters):
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def note(*_):
        norm = torch.stack([p.grad.norm() for p in parameters]).norm().item()
        _write({"norm": norm})

    optimizer.register_step_pre_hook(note)
    return optimizer


def compute_loss(model, batch):
    x, y = batch
    out = model(x)
    _write({"samples": len(x), "type": str(out.dtype)})
    return nn.functional.cross_entropy(out.float(), y) * 100


def _write(row):
    if len(_seen) < 3 * MOST:
        _seen.append(row)
        SEEN.mkdir(exist_ok=True)
        (SEEN / f"{os.getpid()}.json").write_text(json.dumps(_seen))


batch_size = 32
micro_batch_size = 8
precision = "bf16"
max_grad_norm = 0.5
