"""Observes a script: its loaders, forward and backward passes, and optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..measure.losses import Losses
from ..measure.timing.moments import Gap, Gaps
from ..nested import samples_in
from ..ranks import world_size

_CPU = torch.device("cpu")


class _Draw(NamedTuple):
    """A batch that a loader has handed out."""

    iterator: Any
    num_samples: int
    wait: Gap


class Observer:
    """Counts samples, and what waiting for them took: by the batches that training loaders hand out; without such a
    loader by the first dimension of what the model is called with."""

    def __init__(self, device: torch.device = _CPU) -> None:
        """
        Args:
            device: that does without what is waited for.
        """
        self.num_steps = self.num_batches = 0
        self.waits = Gaps()
        self.losses = Losses()
        """Of backward passes, with the step that each is of."""
        self._device = device
        self._drawn = self._seen = 0
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Of the iterators that are watched."""
        self.drawn_from: list[Any] = []
        """The loaders that batches were drawn from since the last optimizer step."""
        self._trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators; of the next epoch's, the loader tells before the model is called."""
        self._loaders_trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unused: list[_Draw] = []
        """Since the model was last called."""

    @property
    def num_samples(self) -> int:
        """Trained on so far, by all processes: each has as many."""
        return (self._drawn or self._seen) * world_size()

    def epoch_begins(self, loader: Any) -> None:
        """A loader is about to be iterated over."""

    def epoch(self, iterator: Any, loader: Any) -> None:
        """A loader is iterated over, with gradients on: to train on, or to evaluate, as the model's next call tells."""
        self._loaders[iterator] = loader

    def ends_early(self, loader: Any) -> bool:
        """Whether a loader's epoch ends here, although there is more of it."""
        return False

    def install(self) -> Any:
        """Watch what loaders hand out; what is returned takes it off."""
        original, observer = _BaseDataLoaderIter.__next__, self

        def __next__(iterator: Any) -> Any:
            if iterator not in observer._loaders:
                if observer.draws_to_evaluate(iterator):
                    raise StopIteration
                return original(iterator)
            loader = observer._loaders[iterator]
            if observer.ends_early(loader):
                raise StopIteration
            if all(loader is not one for one in observer.drawn_from):
                observer.drawn_from.append(loader)
            if iterator in observer._trained_on or loader in observer._loaders_trained_on:
                observer.training_goes_on()
            wait = Gap(observer._device)
            batch = original(iterator)
            observer._count(_Draw(iterator, _drawn(iterator, batch), wait.end()))
            return batch

        _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign, assignment]

        def take_off() -> None:
            _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]

        return take_off

    def _count(self, draw: _Draw) -> None:
        self.num_batches += 1
        self._drawn += draw.num_samples
        self.waits.add(draw.wait)
        self._unused.append(draw)

    def draws_to_evaluate(self, iterator: Any) -> bool:
        """A batch is asked for that is not trained on; whether there is none, although there are more."""
        return False

    def saves(self, save: Callable[[], Any]) -> Any:
        """The script writes a checkpoint: what ``save`` returns."""
        return save()

    def loads(self, source: Any) -> None:
        """The script reads one, before it trains."""

    def training_goes_on(self) -> None:
        """A batch to train on is asked for, or the model is called with one."""

    def forward(self, inputs: Any) -> None:
        """The model is called, and a graph recorded."""
        self.training_goes_on()
        self._seen += samples_in(inputs)
        for draw in self._unused:
            self._trained_on.add(draw.iterator)
            self._loaders_trained_on.add(self._loaders[draw.iterator])
        self._unused.clear()

    def evaluated(self, inputs: Any = None) -> None:
        """A module was called to evaluate: in eval mode, without gradients. What was drawn for that does not count.

        Args:
            inputs: of the script's model; None of a module that may be a part of it.
        """
        for draw in self._unused:
            if draw.iterator not in self._trained_on:
                self.draws_to_evaluate(draw.iterator)
                self.num_batches -= 1
                self._drawn -= draw.num_samples
                self.waits.leave_out(draw.wait)
        self._unused.clear()

    def forward_ended(self, outputs: Any) -> None:
        """The model's call is over, and has returned ``outputs``; None where it raised."""

    def backward(self, loss: Any) -> None:
        """A backward pass begins."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.add(self.num_steps + 1, loss.detach())

    def stepped(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
        """The optimizer has stepped."""
        self.num_steps += 1


def _drawn(iterator: Any, batch: Any) -> int:
    """Samples of a batch: as many as its loader has put together, whatever its collate makes of them (a list of images,
    a graph); else by its tensors."""
    sampler = iterator._index_sampler
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, Sized):
        size: int = sampler.batch_size
        num_before: int = size * (iterator._num_yielded - 1)
        return min(size, len(sampler.sampler) - num_before)
    return samples_in(batch)
