"""Tasks whose evaluation runs out of memory, and the same mended: ``evaluating.py:joined_broken``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autotune

WIDTH, CLASSES, BATCH, NUM_BATCHES = 64, 2048, 64, 400
_LOGGED: list[Tensor] = []
_DRAW = torch.Generator().manual_seed(0)
_TRAIN = TensorDataset(torch.randn(640, WIDTH, generator=_DRAW), torch.randint(CLASSES, (640,), generator=_DRAW))
_HELD = TensorDataset(
    torch.randn(BATCH * NUM_BATCHES, WIDTH, generator=_DRAW), torch.randint(CLASSES, (BATCH * NUM_BATCHES,))
)


def _loader(batch: int = BATCH) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(_HELD, batch)


def joined(model: nn.Module, is_broken: bool) -> float:
    """transformers 8476, 12878: logits of the whole set are kept, and joined at the end."""
    found, labels = [], []
    for inputs, wanted in _loader():
        logits = model(inputs)
        found.append(logits if is_broken else logits.argmax(1))
        labels.append(wanted)
    answers = torch.cat(found)
    return float(((answers.argmax(1) if is_broken else answers) == torch.cat(labels)).float().mean())


def joined_anew(model: nn.Module, is_broken: bool) -> float:
    """transformers 25313, 10722: with each batch, all before it are joined anew, on the host."""
    found = None
    for inputs, _ in _loader():
        logits = model(inputs)
        part = (logits if is_broken else logits.argmax(1)).cpu()
        found = part if found is None else torch.cat([found, part])
    assert found is not None
    return float(found.float().mean())


def outputs(model: nn.Module, is_broken: bool) -> float:
    """Lightning 8453, 8583: what validation_step returns is kept until the epoch's end, whatever is needed of it."""
    kept = []
    for inputs, wanted in _loader():
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits, wanted)
        kept.append({"loss": loss, "logits": logits, "inputs": inputs} if is_broken else {"loss": loss})
    return -float(torch.stack([one["loss"] for one in kept]).mean())


def logged(model: nn.Module, is_broken: bool) -> float:
    """Lightning 14270: what is logged is appended to a list that no evaluation clears."""
    if not is_broken:
        _LOGGED.clear()
    for number, (inputs, _) in enumerate(_loader()):
        logits = model(inputs)
        _LOGGED.append(logits[:8].clone() if is_broken or number < 8 else logits.mean())
    return float(_LOGGED[-1].mean())


def large(model: nn.Module, is_broken: bool) -> float:
    """unsloth 1147, 5168: evaluation takes the library's own batch, which is larger than the training's."""
    total = 0.0
    for inputs, wanted in _loader(128 * BATCH if is_broken else BATCH):
        total += float(nn.functional.cross_entropy(model(inputs).float(), wanted, reduction="sum"))
    return -total / len(_HELD)


FAULTS: tuple[Callable[[nn.Module, bool], float], ...] = (joined, joined_anew, outputs, logged, large)
NUM_EVALUATIONS = {"logged": 8}
"""That the job makes, where its trouble is that each adds to the last."""


def _task(fault: Callable[[nn.Module, bool], float], is_broken: bool) -> autotune.Task:
    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return fault(model, is_broken)

    return autotune.Task(
        build_model=lambda: nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
        build_dataset=lambda: _TRAIN,
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=evaluate,
        batch_size=BATCH,
    )


for _fault in FAULTS:
    globals()[f"{_fault.__name__}_broken"] = _task(_fault, True)
    globals()[f"{_fault.__name__}_mended"] = _task(_fault, False)
