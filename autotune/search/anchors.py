"""Measures the reference again between trials, so that each is compared with a neighbour in time."""

from __future__ import annotations

from ..workers import Measured, MeasureRequest
from .events import AnchorEnded, AnchorStarted
from .pace import Anchor, is_due, is_other
from .runs import run_once
from .session import Session
from .store.tried import Tried
from .time_budget import LEAST_SHARE_S

__all__ = ["Anchors"]

_SHARE = 0.25
"""Of a trial's timed windows."""


class Anchors:
    """The anchors of one process's trials, which run one at a time: beside others, the reference tells nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begins = 1 + max((row.number for row in session.study.tried), default=-1)
        """Number of this process's first trial."""
        self._last: Anchor | None = None
        """None where the anchors are an earlier process's: nobody knows what has changed since."""
        reference = session.reference
        self._is_possible = (
            session.executor.num_slots == 1 and reference is not None and isinstance(reference.outcome, Measured)
        )
        if self._is_possible and not (session.study.resumed and len(session.study.tried) > 1):
            assert reference is not None
            assert isinstance(reference.outcome, Measured)
            self._last = Anchor.of(0, reference.outcome.measurement)

    def look(self, is_last: bool) -> bool:
        """Measure the reference where the newest trial calls for it; returns whether speeds are compared anew.

        Args:
            is_last: no trial follows that could need an anchor too.
        """
        row = self._newest()
        return row is not None and self._is_possible and self._is_due(row, is_last) and self._measure(row)

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

    def _measure(self, row: Tried) -> bool:
        """Measure after a trial; where nothing was measured since an earlier process, it stands for before, too."""
        session = self._session
        reference, study = session.reference, session.study
        assert reference is not None
        position = row.number + (self._last is not None)

        def make() -> MeasureRequest | None:
            trials_left = max(session.options.trials - study.num_measured, 1)
            whole_s = session.time_budget.trial_share_s(trials_left)
            if whole_s is None:
                return None
            share_s = max(LEAST_SHARE_S, _SHARE * whole_s)
            request = session.request(f"anchor-{position:03d}", reference.applied, share_s, finalist_round=0)
            short = request.options.model_copy(update={"evaluation": None})
            return request.model_copy(update={"options": short})

        outcome = run_once(session, study.anchor_key(position), make, AnchorStarted(reference.settings))
        if isinstance(outcome, Measured):
            study.take_anchor(position, outcome.measurement)
            self._last = study.paces.anchors[-1]
        if outcome is not None:
            session.observe(AnchorEnded(reference.settings, outcome, study.paces.shift))
        return isinstance(outcome, Measured)
