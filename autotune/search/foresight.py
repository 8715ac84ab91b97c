"""What the laws say of a space's configurations before any trial: asked of a child process once for each study."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from ..estimate import Prediction
from ..techniques import Settings
from ..techniques.data_loading import DataLoading
from ..workers import Predicted, TrialRequest
from .candidates import ConfigurationSpace, Predict
from .events import PredictionEnded, PredictionStarted
from .inquiry import failure
from .session import Session
from .trades import num_trades

__all__ = ["foresee"]

_EVIDENCE = "predicted"
"""The study's key for it begins so; what was asked follows."""
_PART = 0.1
"""Of ``--max-time``, at most so much goes into predictions; the combinations with the fewest changes come first."""
_LEAST_S = 0.1
"""A request with no time left still answers for one combination."""


def foresee(session: Session, space: ConfigurationSpace) -> Predict:
    """Ask for predictions, or take those that the study has; without any, trials have to teach everything."""
    foresight = _Foresight(session)
    if session.stop.is_set() or (session.options.sampler != "law" and not space.is_open):
        return foresight.predict
    every = list(dict.fromkeys(map(_key, space.weighed(session.study.record.seed))))
    session.observe(PredictionStarted(len(every)))
    if session.options.sampler == "law":
        foresight.ask([settings for settings in every if not num_trades(settings)])
        plain, usable = space.foretold(foresight.predict), session.study.record.usable_bytes
        wanted = [settings for settings in every if not plain.is_needless(settings, usable)]
        foresight.ask([settings for settings in wanted if num_trades(settings)])
    else:  # Optuna's samplers ask for nothing but which blocks to recompute
        wanted = [settings for settings in every if settings.checkpointing.is_open]
        foresight.ask(wanted)
    session.observe(PredictionEnded(len(foresight.known), len(wanted)))
    left_open = [foresight.predict(settings) for settings in wanted if settings.checkpointing.is_open]
    missing = sum(found is None or found.blocks is None for found in left_open)
    if missing and not session.stop.is_set():
        session.warn(
            "--space: checkpointing: kind chosen: which blocks to recompute could not be chosen for "
            f"{missing} of {len(left_open)} configurations: there, all are."
        )
    return foresight.predict


class _Foresight:
    """What is known so far, and the time that is left to know more."""

    def __init__(self, session: Session) -> None:
        self.known: dict[str, Prediction] = {}
        """By ``settings.canonical()`` of what was asked for."""
        self._session = session
        most_s = session.options.max_time_s
        self._ends_s = math.inf if most_s is None else session.pace.elapsed_s() + _PART * most_s

    def predict(self, settings: Settings) -> Prediction | None:
        """What is known of a configuration."""
        return self.known.get(_key(settings).canonical())

    def ask(self, every: Sequence[Settings]) -> None:
        """Ask for predictions, or take those that the study has."""
        session = self._session
        if not every or session.stop.is_set():
            return
        asked = hashlib.sha256("\n".join(settings.canonical() for settings in every).encode()).hexdigest()
        key = f"{_EVIDENCE}:{asked[:12]}"
        outcome = session.study.evidence(key)
        if outcome is None:
            outcome = session.executor.ask(self._request(every))
            if not session.was_cut_off(outcome):
                session.study.keep_evidence(key, outcome)
        if isinstance(outcome, Predicted):
            self._take(every, outcome)
        elif not session.was_cut_off(outcome):
            session.warn(f"memory cannot be predicted, trials have to teach it: {failure(outcome).splitlines()[0]}")

    def _request(self, every: Sequence[Settings]) -> TrialRequest:
        pace, most_s = self._session.pace, None
        if self._ends_s < math.inf:
            most_s = max(self._ends_s - pace.elapsed_s(), _LEAST_S)
        deadline_s = pace.deadline_s(most_s or 0.0, spare_finalists=True)
        return self._session.inquiry.predict_request(every, most_s, deadline_s)

    def _take(self, every: Sequence[Settings], outcome: Predicted) -> None:
        if outcome.probed is not None:
            self._session.warn(f"memory is predicted from real steps at small batches: {outcome.probed}")
        pairs = zip(every, outcome.predictions, strict=False)
        self.known |= {settings.canonical(): one for settings, one in pairs if one is not None}


def _key(settings: Settings) -> Settings:
    """Configurations that predictions do not tell apart are one: of data loading they know the number of workers, and
    how the optimizer is implemented shows for a moment at the end of a step."""
    data_loading = DataLoading(num_workers=settings.data_loading.num_workers or None)
    return settings.model_copy(update={"data_loading": data_loading, "optimizer": Settings().optimizer})
