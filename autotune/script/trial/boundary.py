"""What a script does to its datasets between two epochs, seen at an epoch that is ended early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from ...data.sameness import Sameness
from ...randomness import undisturbed
from ...ranks import world_size
from ...techniques import Facts
from ...workers import Inspected, Outcome
from ..plan.loaders import Loaders

_MOST_S = 20.0
"""How long the script may take from the last step of an epoch to its next epoch: an evaluation, a checkpoint."""


class Boundary:
    """Ends the epoch of the loaders that are trained on, and answers once the next begins.

    ``len(loader)``, and so what a schedule is made of, stays as it is.
    """

    def __init__(self, loaders: Loaders, answer: Callable[[Outcome], NoReturn], obstacle: str | None = None) -> None:
        """
        Args:
            loaders: that the script reads.
            answer: takes the outcome, and ends the script.
            obstacle: why no epoch is ended; None where one may be.
        """
        self._obstacle = obstacle
        self._loaders, self._answer = loaders, answer
        self._facts: Facts | None = None
        self._trained_on: Sequence[Any] = ()
        self._before: dict[int, Sameness] = {}
        """By place among the loaders, their datasets as the epoch ended."""
        self._seen: set[int] = set()
        self._answering = threading.Lock()
        self._waiting: threading.Timer | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether all is known but the next epoch."""
        return self._facts is not None

    def await_next(self, trained_on: Sequence[Any], facts: Facts) -> None:
        """From now on epochs end early.

        Args:
            trained_on: the loaders of the last step.
            facts: what is known.
        """
        self.hold(trained_on, facts)
        if (reason := self._why_not()) is not None:
            self._end(reason)
        with undisturbed():
            if not all(self._loaders.is_deterministic(loader) for loader in trained_on):
                assert self._facts is not None, "it is held"
                self._facts = self._facts.model_copy(update={"dataset_deterministic": False})
        late = f"the script was not seen to begin a next epoch within {_MOST_S:.0f} s"
        self._waiting = threading.Timer(_MOST_S, self._end, (late,))
        self._waiting.daemon = True
        self._waiting.start()

    def hold(self, trained_on: Sequence[Any], facts: Facts) -> None:
        """What is known, where no next epoch is awaited.

        Args:
            trained_on: the loaders of the last step.
            facts: what is known.
        """
        named = tuple(one for loader in trained_on if (one := self._loaders.named(loader)) is not None)
        known = facts.identity and facts.identity.model_copy(update={"loaders": named})
        self._facts, self._trained_on = facts.model_copy(update={"identity": known}), trained_on

    def _why_not(self) -> str | None:
        if not self._trained_on:
            return "the script reads no DataLoader in each step"
        if world_size() > 1:
            return "what becomes of its dataset between two epochs is not looked at in several processes"
        if any(isinstance(loader.dataset, IterableDataset) for loader in self._trained_on):
            return "workers that stay go on in a stream where those of a new epoch begin it anew"
        if any(loader.worker_init_fn is not None for loader in self._trained_on):
            return "worker_init_fn is called for the workers of each epoch"
        return self._obstacle

    def ends(self, loader: Any) -> bool:
        """Whether a batch that is asked for is not given, since the epoch ends."""
        place = self._place(loader)
        if self._facts is None or place is None or place in self._seen:
            return False
        for other in self._trained_on:  # of two that are read in turn, one may end both
            self._before.setdefault(self._place(other) or 0, self._loaders.watch(other))
        return True

    def begins(self, loader: Any) -> None:
        """The next epoch of a loader: once all of them have begun it, or one is another, that is the answer."""
        place = self._place(loader)
        if place is None or place not in self._before:
            return
        if (change := self._before[place].change()) is not None:
            self._end(f"from one epoch to the next, {change}")
        self._seen.add(place)
        if len(self._seen) == len(self._before):
            self._end(None)

    def _place(self, loader: Any) -> int | None:
        return next((n for n, one in enumerate(self._trained_on) if one.dataset is loader.dataset), None)

    def finish(self) -> Outcome | None:
        """The script has ended instead."""
        if self._waiting is not None:
            self._waiting.cancel()
        return None if self._facts is None else self._outcome("the script was not seen to begin a next epoch")

    def _outcome(self, reason: str | None) -> Outcome:
        assert self._facts is not None, "it is awaited"
        return Inspected(facts=self._facts.model_copy(update={"epochs_differ": reason}))

    def _end(self, reason: str | None) -> None:
        if self._answering.acquire(blocking=False):
            if self._waiting is not None:
                self._waiting.cancel()
            self._answer(self._outcome(reason))
