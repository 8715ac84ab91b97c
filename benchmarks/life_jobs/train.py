"""A script that trains, evaluates, saves and resumes: ``train.py FAULT broken|mended [EPOCHS]``."""

from __future__ import annotations

import copy
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT, IS_BROKEN = sys.argv[1], sys.argv[2] == "broken"
EPOCHS = int(sys.argv[3]) if len(sys.argv) > 3 else 10_000
WIDTH, BATCH, NUM_EVALUATED = (3072, 4, 0) if FAULT != "graphs" else (256, 64, 40)
PATH = Path("checkpoint.pt")


def main() -> None:
    """As in the thread that the fault is from."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    model, averaged = nn.Sequential(*layers), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if FAULT == "optimizer" else 0.0)
    if FAULT == "average":
        averaged = copy.deepcopy(model)
    kept = RESUME.get(FAULT, resume)(model, optimizer, averaged) if PATH.exists() else None
    loader = DataLoader(TensorDataset(torch.randn(8 * BATCH, WIDTH)), BATCH)
    for _ in range(EPOCHS):
        model.train()
        for (inputs,) in loader:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        if NUM_EVALUATED:
            evaluate(model)
        SAVE.get(FAULT, save)(model, optimizer, averaged)
    del kept


def evaluate(model: nn.Module) -> float:
    """pytorch-kaldi 41, labelmodels 4: without no_grad, the sum of the losses keeps the graph of each batch."""
    model.eval()
    total: Any = 0.0
    for (inputs,) in DataLoader(TensorDataset(torch.randn(NUM_EVALUATED * BATCH * 8, WIDTH)), BATCH * 8):
        with torch.set_grad_enabled(IS_BROKEN):
            loss = model(inputs).square().mean()
        total += loss if IS_BROKEN else loss.item()
    return float(total)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> None:
    """Weights, and what the optimizer and the average have."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if averaged is not None:
        state["average"] = averaged.state_dict()
    written = PATH.with_suffix(".new")
    torch.save(state, written)
    written.replace(PATH)  # the state that was resumed from may be mapped from the file


def save_copy(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> None:
    """ema-pytorch 35: the model is copied to be saved."""
    save(copy.deepcopy(model) if IS_BROKEN else model, optimizer, averaged)


def save_buffer(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> None:
    """Lightning 21823: the checkpoint is written into a buffer, and that into the file."""
    if not IS_BROKEN:
        save(model, optimizer, averaged)
        return
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    PATH.write_bytes(buffer.getvalue())


def save_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> None:
    """Qwen3-TTS 365, kohya_ss 1580: a copy of the state dict is made for safetensors."""
    state = model.state_dict()
    save_file({name: one.clone() for name, one in state.items()} if IS_BROKEN else state, PATH)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> object:
    """From what was saved, of which nothing stays."""
    if FAULT == "tensors":
        model.load_state_dict(load_file(PATH))
        return None
    state = torch.load(PATH, mmap=True)
    model.load_state_dict(state["model"])
    return None


def resume_kept(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> object:
    """nanoGPT 236, 158: the checkpoint stays in a variable while training goes on."""
    if not IS_BROKEN:
        return resume(model, optimizer, averaged)
    state = torch.load(PATH)
    model.load_state_dict(state["model"])
    return state


def resume_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> object:
    """transformers 22123, axolotl 219, mmf 185: the optimizer's state is copied beside the one that was loaded."""
    state = torch.load(PATH, mmap=not IS_BROKEN)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]) if IS_BROKEN else state["optimizer"])
    return state if IS_BROKEN else None


def resume_average(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: nn.Module | None) -> object:
    """pytorch-image-models 72: the average is read from the checkpoint a second time, and stays beside the first."""
    assert averaged is not None
    state = torch.load(PATH, mmap=not IS_BROKEN)
    model.load_state_dict(state["model"])
    again = torch.load(PATH) if IS_BROKEN else state
    averaged.load_state_dict(again["average"])
    return (state, again) if IS_BROKEN else None


SAVE: dict[str, Callable[..., None]] = {"copy": save_copy, "buffer": save_buffer, "tensors": save_tensors}
RESUME: dict[str, Callable[..., object]] = {
    "kept": resume_kept,
    "optimizer": resume_optimizer,
    "average": resume_average,
}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
