"""What the laws say of a space's configurations before any trial: asked of a child process once for each study."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..estimate import Prediction
from ..techniques import Settings
from ..techniques.data_loading import DataLoading
from ..workers import Predicted
from .candidates import ConfigurationSpace, Predict
from .events import PredictionEnded, PredictionStarted
from .inquiry import failure
from .session import Session

__all__ = ["foresee"]

_EVIDENCE = "predicted"
"""The study's key for it begins so; what was asked follows."""
_PART = 0.1
"""Of ``--max-time``, at most so much goes into predictions; the combinations with the fewest changes come first."""


def foresee(session: Session, space: ConfigurationSpace) -> Predict:
    """Ask for predictions, or take those that the study has; without any, trials have to teach everything."""
    every = list(dict.fromkeys(map(_key, space.weighed(session.study.record.seed))))
    session.observe(PredictionStarted(len(every)))
    known = _ask(session, every)
    session.observe(PredictionEnded(len(known), len(every)))
    left_open = [known.get(settings.canonical()) for settings in every if settings.checkpointing.is_open]
    missing = sum(found is None or found.blocks is None for found in left_open)
    if missing and not session.stop.is_set():
        session.warn(
            "--space: checkpointing: kind chosen: which blocks to recompute could not be chosen for "
            f"{missing} of {len(left_open)} configurations: there, all are."
        )
    return lambda settings: known.get(_key(settings).canonical())


def _ask(session: Session, every: Sequence[Settings]) -> dict[str, Prediction]:
    asked = hashlib.sha256("\n".join(settings.canonical() for settings in every).encode()).hexdigest()
    key = f"{_EVIDENCE}:{asked[:12]}"
    outcome = session.study.evidence(key)
    if outcome is None:
        most_s = None if session.options.max_time_s is None else _PART * session.options.max_time_s
        deadline_s = session.pace.deadline_s(most_s or 0.0, spare_finalists=True)
        outcome = session.executor.ask(session.inquiry.predict_request(every, most_s, deadline_s))
        if not session.was_cut_off(outcome):
            session.study.keep_evidence(key, outcome)
    if not isinstance(outcome, Predicted):
        if not session.was_cut_off(outcome):
            session.warn(f"memory cannot be predicted, trials have to teach it: {failure(outcome).splitlines()[0]}")
        return {}
    if outcome.probed is not None:
        session.warn(f"memory is predicted from real steps at small batches: {outcome.probed}")
    pairs = zip(every, outcome.predictions, strict=False)
    return {settings.canonical(): one for settings, one in pairs if one is not None}


def _key(settings: Settings) -> Settings:
    """Configurations that predictions do not tell apart are one: of data loading they know the number of workers, and
    how the optimizer is implemented shows for a moment at the end of a step."""
    data_loading = DataLoading(num_workers=settings.data_loading.num_workers or None)
    return settings.model_copy(update={"data_loading": data_loading, "optimizer": Settings().optimizer})
