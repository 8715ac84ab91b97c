"""Records a training, whole. Written at its end to ``$SAME_TRAINING_RECORD/<pid>.json``: the batches of each loader's
epochs (a hash of each sample, and the sampler's indices), and of each optimizer step its optimizer, learning rates,
backward passes, losses, gradient norm, and the state of the random generators after it. The norm is that of before the
step, since torch's own foreach SGD with Nesterov momentum writes over the gradients, or of after it where a closure
makes them within.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PLACE = os.environ.get("SAME_TRAINING_RECORD")


class Recorder:
    """What this process has trained so far."""

    def __init__(self) -> None:
        self._process, self._depth = os.getpid(), 0
        self._num_loaders = self._num_optimizers = 0
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()
        self._losses: list[float | None] = []
        self.epochs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []

    def install(self, torch: Any) -> None:
        """Put the hooks on torch."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._torch = torch
        random.seed(0)  # which a script may leave to the system
        for owner in (torch.Tensor, torch.autograd):
            _around(owner, "backward", self._backward)
        _around(_BaseDataLoaderIter, "_reset", self._reset)
        _around(_BaseDataLoaderIter, "_next_index", self._next_index)
        _around(_BaseDataLoaderIter, "__next__", self._next)
        _around(DataLoader, "__iter__", self._iterated)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._write)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth == 0 and type(args[0]).__name__ != "FakeTensor":
            is_loss = isinstance(args[0], self._torch.Tensor) and args[0].numel() == 1
            self._losses.append(float(args[0].detach()) if is_loss else None)
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _reset(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Workers that stay begin another epoch, or new ones their first: before they are asked for anything."""
        iterator._recorded_indices = []
        return original(iterator, *args, **kwargs)

    def _next_index(self, original: Any, iterator: Any) -> Any:
        index = original(iterator)
        vars(iterator).setdefault("_recorded_indices", []).append(index)
        return index

    def _iterated(self, original: Any, loader: Any) -> Any:
        iterator = original(loader)
        if loader not in self._loaders:
            self._loaders[loader], self._num_loaders = self._num_loaders, self._num_loaders + 1
        indices = vars(iterator).setdefault("_recorded_indices", [])
        iterator._recorded = {"loader": self._loaders[loader], "indices": indices, "batches": []}
        self.epochs.append(iterator._recorded)
        return iterator

    def _next(self, original: Any, iterator: Any) -> Any:
        batch = original(iterator)
        with self._torch._C.DisableTorchFunction(), self._torch.no_grad():
            iterator._recorded["batches"].append(_hashes(batch, self._torch))
        return batch

    def _norm(self, optimizer: Any) -> float:
        with self._torch._C.DisableTorchFunction(), self._torch.no_grad():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            return sum(float(gradient.float().square().sum()) for gradient in gradients) ** 0.5

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._before[optimizer] = len(self._losses), self._norm(optimizer)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        num_losses, norm = self._before[optimizer]
        if len(self._losses) != num_losses:
            norm = self._norm(optimizer)
        with self._torch._C.DisableTorchFunction(), self._torch.no_grad():
            generators = self._torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode()
        self.steps.append(
            {
                **self._step(optimizer),
                "norm": norm,
                "drawn": [self._drawn(number) for number in range(self._num_loaders)],
                "generators": _digest(generators),
            }
        )
        self._losses = []

    def _step(self, optimizer: Any) -> dict[str, Any]:
        """What any record says of a step."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer], self._num_optimizers = self._num_optimizers, self._num_optimizers + 1
        return {
            "optimizer": self._optimizers[optimizer],
            "class": type(optimizer).__name__,
            "rates": [float(group["lr"]) for group in optimizer.param_groups],
            "losses": self._losses,
        }

    def _drawn(self, loader: int) -> int:
        return sum(len(rows) for epoch in self.epochs if epoch["loader"] == loader for rows in epoch["batches"])

    def _write(self) -> None:
        if os.getpid() != self._process or not (self.steps or self._losses or self.epochs):
            return
        epochs = [{**one, "indices": repr(one["indices"][: len(one["batches"])])} for one in self.epochs]
        record = {"epochs": epochs, "steps": self.steps, "losses_left": self._losses}
        Path(str(PLACE), f"{self._process}.json").write_text(json.dumps(record), encoding="utf-8")


def _around(owner: Any, name: str, around: Any) -> None:
    original = getattr(owner, name)

    def answer(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, answer)


def _hashes(batch: Any, torch: Any) -> list[str]:
    """One for each sample where all tensors have one first dimension, else one of the whole batch."""
    tensors = list(tensors_in(batch, torch))
    sizes = {len(tensor) if tensor.dim() else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        return [_digest(b"".join(_bytes(tensor, torch) for tensor in tensors))]
    rows = range(sizes.pop() or 0)
    return [_digest(b"".join(_bytes(tensor[row], torch) for tensor in tensors)) for row in rows]


def tensors_in(nested: Any, torch: Any) -> Iterator[Any]:
    """The tensors of a batch, in order."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for key in nested:
            yield from tensors_in(nested[key], torch)
    elif isinstance(nested, Sequence) and not isinstance(nested, (str, bytes)):
        for one in nested:
            yield from tensors_in(one, torch)


def _bytes(tensor: Any, torch: Any) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()[:12]
