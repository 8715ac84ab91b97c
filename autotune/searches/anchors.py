"""Measures the reference again between trials, so that each is compared with a neighbour in time.

Where the reference could not be measured (it fits nowhere), the first trial that could takes its place.
"""

from __future__ import annotations

from ..workers import Measured, MeasureRequest
from .events import AnchorEnded, AnchorStarted
from .runs import run_once
from .session import Session
from .store.pace import Anchor, is_due, is_other
from .store.tried import Tried
from .time_budget import LEAST_SHARE_S

_SHARE = 0.25
"""Of a trial's timed windows."""


class Anchors:
    """The anchors of one process's trials, which run one at a time: beside others, the reference tells nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begins = 1 + max((row.number for row in session.study.tried), default=-1)
        """Number of this process's first trial."""
        self._last: Anchor | None = None
        """None before the first measurement, and where that is an earlier process's: nobody knows what has changed
        since."""

    def look(self, is_last: bool) -> bool:
        """Measure an anchor where the newest trial calls for it; returns whether speeds are compared anew.

        Args:
            is_last: no trial follows that could need an anchor too.
        """
        row, first = self._newest(), self._session.study.first_measured
        if row is None or first is None or self._session.executor.num_slots > 1:
            return False
        if self._last is None and (first.number >= self._begins or not self._has_resumed()):
            assert isinstance(first.outcome, Measured)
            self._last = Anchor.of(first.number, first.outcome.measurement)
        return row is not first and self._is_due(row, is_last) and self._measure(first, row)

    def _has_resumed(self) -> bool:
        """Whether an earlier process has measured more than the reference."""
        return self._session.study.resumed and self._begins > 1

    def _is_due(self, row: Tried, is_last: bool) -> bool:
        last = self._last
        if row.known or not isinstance(row.outcome, Measured):
            return False
        if last is None:
            return row.number >= self._begins
        if row.number < last.position:
            return False
        disturbed = row.outcome.measurement.disturbed
        return is_other(disturbed, last) or (not is_last and is_due(row.number, disturbed, last))

    def _newest(self) -> Tried | None:
        rows = [row for row in self._session.study.tried if row.number]
        return rows[-1] if rows else None

    def _measure(self, first: Tried, row: Tried) -> bool:
        """Measure after a trial; where nothing was measured since an earlier process, it stands for before, too."""
        session, study = self._session, self._session.study
        position = row.number + (self._last is not None)

        def make() -> MeasureRequest | None:
            trials_left = max(session.options.trials - study.num_measured, 1)
            whole_s = session.time_budget.trial_share_s(trials_left)
            if whole_s is None:
                return None
            share_s = max(LEAST_SHARE_S, _SHARE * whole_s)
            request = session.request(f"anchor-{position:03d}", first.applied, share_s, finalist_round=0)
            short = request.options.model_copy(update={"evaluation": None, "life": None})
            return request.model_copy(update={"options": short})

        outcome = run_once(session, study.anchor_key(position), make, AnchorStarted(first.number, first.settings))
        if isinstance(outcome, Measured):
            study.take_anchor(position, outcome.measurement)
            self._last = study.paces.anchors[-1]
        if outcome is not None:
            session.observe(AnchorEnded(first.number, first.settings, outcome, study.paces.shift))
        return isinstance(outcome, Measured)
