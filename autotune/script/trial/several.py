"""A script that its own command starts in several processes, as one trial: they end at the same optimizer step, and the
first answers for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ...ranks import Ranks
from ...workers import Failed, Inspected, Measured, Outcome
from ...workers.trial.folder import TrialFolder

if TYPE_CHECKING:
    from ...measure.memory import Charge

_PATIENCE_S = 30.0
"""How long the first waits for the others' peaks, once it has come to the last step itself."""


class _OneMoreStep(Exception):
    """There is an answer; the others may wait for this process in the next optimizer step."""


class Several:
    """This process's part in a trial of several.

    The first process names the next optimizer step as the last while the others cannot have made it: its part of those
    gradients is still to come. So each finds that out in time.
    """

    def __init__(self, folder: TrialFolder, ranks: Ranks) -> None:
        """
        Args:
            folder: the trial's.
            ranks: which process this is.
        """
        self._folder, self._ranks = folder, ranks
        self._charge: Charge | None = None
        self._held: Outcome | None = None
        self._num_steps = 0

    def hold(self, outcome: Outcome) -> None:
        """Keep the first process's answer until the others have theirs. It returns where there is no need to.

        Raises:
            _OneMoreStep: caught by :meth:`follow`.
        """
        if isinstance(outcome, Measured | Inspected) and self._held is None:
            self._held = outcome
            self._folder.write_last_step(self._num_steps + 1)
            raise _OneMoreStep

    def begin(self, charge: Charge) -> None:
        """Torch is there: this process's memory is charged."""
        self._charge = charge

    def follow(
        self, step: Callable[[Any, int], None], end: Callable[[Outcome | None], NoReturn]
    ) -> Callable[[Any, int], None]:
        """What to call after each optimizer step.

        Args:
            step: what an observer makes of it.
            end: takes the trial's outcome, None from all but the first process, and ends the script.
        """

        def stepped(optimizer: Any, num_backwards: int) -> None:
            self._num_steps += 1
            if self._num_steps >= self._folder.read_last_step():
                end(self._held)
            if self._charge is not None:
                self._charge.sample_descendants(every_s=1.0)
            with suppress(_OneMoreStep):
                step(optimizer, num_backwards)

        return stepped

    def write_peak(self) -> None:
        """Tell the first process what this one was charged."""
        if self._charge is not None:
            self._folder.write_peak(self._ranks.rank, self._charge.peak())

    def together(self, outcome: Outcome) -> Outcome:
        """The first process's measurement, at the memory of all: their sum, or the largest device's."""
        if not isinstance(outcome, Measured):
            return outcome
        until_s, others = time.monotonic() + _PATIENCE_S, range(1, self._ranks.size)
        while (missing := [rank for rank in others if self._folder.read_peak(rank) is None]) and (
            time.monotonic() < until_s
        ):
            time.sleep(0.01)
        if missing:
            return Failed(
                message=f"process {missing[0]} of the script did not come to the end of an optimizer step with the "
                "first. A search measures processes that make their steps together."
            )
        found = (self._folder.read_peak(rank) for rank in others)
        return outcome.at_peak_of([outcome.measurement.peak, *(peak for peak in found if peak is not None)])
