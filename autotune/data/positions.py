"""``Positions``: the place in its optimizer step of each micro-batch that a loader has yielded, until it is trained
on."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

_MOST_PARTS = 64
"""Most tensors of a nested batch by which it is identified."""
_TIDIED_EVERY = 1024
"""Entries after which those of deleted batches are removed: an epoch may be read without training on it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """State at the start of an epoch, from which the epoch can be repeated."""

    random: dict[str, Any]
    """Random state of all generators."""
    order: list[torch.Tensor]
    """States of the generators that the order of samples comes from."""


class Position(NamedTuple):
    """The place of a micro-batch in its optimizer step."""

    num_samples: int
    """Samples in this micro-batch."""
    ends_step: bool
    """Whether it is the last of its optimizer step."""
    epoch: int = 0
    """Number of the iteration over the loader that yielded it, from 1."""
    place: int = 0
    """Micro-batches before it in its epoch."""
    start: Start | None = None
    """State at the start of its epoch."""
    step_samples: int = 0
    """Samples of its whole optimizer step, over all ranks; 0 where that is not known."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    position: Position
    marks: tuple[weakref.ref[Any], ...]
    """References by which a batch is recognized."""

    @property
    def is_there(self) -> bool:
        return any(mark() is not None for mark in self.marks)

    def num_marks_among(self, ids: set[int]) -> int:
        return sum(id(part) in ids for mark in self.marks if (part := mark()) is not None)


class Positions:
    """Positions of the micro-batches that were yielded and not yet trained on.

    A batch is known again by its tensors, whatever holds them, and nothing here keeps them alive. What cannot be known
    again (a changed batch, or a loss that comes without its batch) is the one that has waited longest. Batches may be
    yielded in one thread and trained on in another.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._running: int | None = None
        self._left: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, epoch: int) -> None:
        """A new iteration starts; batches of an iteration that was left early are forgotten."""
        with self._lock:
            self._tidy()
            if self._running is not None:
                self._left.add(self._running)
            self._left &= {entry.position.epoch for entry in self._waiting}
            self._running = epoch

    def end(self, epoch: int) -> None:
        """An iteration has yielded its last batch."""
        with self._lock:
            if self._running == epoch:
                self._running = None

    def put(self, batch: Any, position: Position) -> None:
        """A micro-batch is about to be yielded."""
        entry = _Entry(position, tuple(weakref.ref(part) for part in _parts(batch)))
        with self._lock:
            self._left.discard(position.epoch)  # it is being iterated beside a newer one
            self._waiting.append(entry)
            if len(self._waiting) % _TIDIED_EVERY == 0:
                self._tidy()

    def take(self, batch: Any = None) -> Position | None:
        """Take this batch's position; without a batch, or for an unknown one, that of the batch waiting longest."""
        with self._lock:
            entry = self._find(_parts(batch)) or self._longest_waiting()
            if entry is None:
                return None
            self._waiting.remove(entry)
            return entry.position

    def after(self, done: Position | None) -> Position | None:
        """The next micro-batch that a loop has fetched, holds, and has not trained on; ``done`` is its last."""
        last = done[2:4] if done else (0, 0)
        with self._lock:
            held = [e.position for e in self._waiting if e.is_there and e.position.epoch not in self._left]
        return min((one for one in held if one[2:4] > last), key=lambda one: one[2:4], default=None)

    def pass_over(self) -> None:
        """A forward pass begins: what has waited longest was left out if it is gone and a later batch is not."""
        if len(self._waiting) < 2:
            return
        with self._lock:
            if any(entry.is_there for entry in self._waiting):
                while not self._waiting[0].is_there:
                    self._waiting.popleft()

    def next(self) -> Position | None:
        """Position of the batch that has waited longest; it goes on waiting."""
        with self._lock:
            entry = self._longest_waiting()
            return None if entry is None else entry.position

    def clear(self) -> None:
        """Forget all batches that were yielded."""
        with self._lock:
            self._waiting.clear()

    def _find(self, parts: list[Any]) -> _Entry | None:
        """With the most of these tensors: one that all batches share (a mask) tells none of them."""
        best, most = None, 0
        ids = {id(part) for part in parts}
        for entry in self._waiting if ids else ():
            found = entry.num_marks_among(ids)
            if found and found == len(entry.marks):
                return entry
            if found > most:
                best, most = entry, found
        return best

    def _longest_waiting(self) -> _Entry | None:
        return next((entry for entry in self._waiting if entry.position.epoch not in self._left), None)

    def _tidy(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry.is_there)


def _parts(batch: Any) -> list[Any]:
    """The tensors of a nested batch; where none is found, the batch itself if it is an object of a class."""
    found: list[Any] = []
    nodes = [batch]
    for node in nodes:  # it grows
        if isinstance(node, torch.Tensor):
            found.append(node)
        elif len(nodes) < _MOST_PARTS:
            nodes.extend(itertools.islice(_inner(node), _MOST_PARTS))
    if found or batch is None:
        return found
    try:
        weakref.ref(batch)
    except TypeError:  # plain lists, numbers and texts
        return []
    return [batch]


def _inner(node: Any) -> Iterable[Any]:
    if isinstance(node, (tuple, list)):
        return node
    if isinstance(node, Mapping):
        return node.values()
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return (getattr(node, f.name) for f in dataclasses.fields(node))
    return ()
