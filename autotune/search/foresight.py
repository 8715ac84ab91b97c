"""What the laws say of a space's configurations before they are tried: asked of children, kept with the study."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..estimate import Prediction, untried
from ..techniques import Settings
from ..workers import Predicted, PredictRequest
from ..workers.traces import first_line
from .candidates import ConfigurationSpace, Predict
from .events import PredictionEnded, PredictionStarted
from .inquiry import failure
from .session import Session
from .trades import buys_memory

__all__ = ["foresee"]

_EVIDENCE = "predicted"
"""The study's key for it begins so; what was asked follows."""
_PART = 0.1
"""Of ``--max-time``, at most so much goes into predictions; the combinations with the fewest changes come first."""
_MOST_S = 1800.0
"""The same without ``--max-time``."""
_LEAST_S = 0.1
"""A request with no time left still answers for one combination."""


def foresee(session: Session, space: ConfigurationSpace) -> Predict:
    """Ask for predictions, or take those that the study has; without any, trials have to teach everything."""
    foresight, usable = _Foresight(session), session.study.record.usable_bytes
    if session.stop.is_set() or (session.options.sampler != "law" and not space.is_open):
        return foresight.predict
    if unsure := untried(session.facts.torch_version):
        session.warn(unsure)
    every = list(dict.fromkeys(map(foresight.key, space.weighed(session.study.record.seed))))
    if session.options.sampler == "law":
        foresight.ask([settings for settings in every if not buys_memory(settings)])
        plain = space.foretold(foresight.predict)
        trading = [settings for settings in every if buys_memory(settings) and not plain.is_needless(settings, usable)]
    else:  # Optuna's samplers ask for nothing but which blocks to recompute
        trading = list(filter(_is_open, every))
    foresight.ask(trading)
    foresight.tell_of_choices(list(filter(_is_open, trading)))
    return foresight.predict


def _is_open(settings: Settings) -> bool:
    return settings.checkpointing.is_open


class _Foresight:
    """What is known so far, and the time that is left to know more."""

    def __init__(self, session: Session) -> None:
        self.known: dict[str, Prediction] = {}
        """By ``settings.canonical()`` of what was asked for."""
        self._session = session
        self._num_asked = 0
        most_s = _MOST_S if session.options.max_time_s is None else _PART * session.options.max_time_s
        self._ends_s = session.pace.elapsed_s() + most_s

    def predict(self, settings: Settings) -> Prediction | None:
        """What is known of a configuration, an epoch that it keeps in the device's memory included."""
        known = self.known.get(self.key(settings).canonical())
        cached = settings.cached_bytes(self._session.facts)
        if known is None or not cached:
            return known
        high = None if known.high_bytes is None else known.high_bytes + cached
        return known.model_copy(update={"peak_bytes": known.peak_bytes + cached, "high_bytes": high})

    def key(self, settings: Settings) -> Settings:
        """What is asked in its place."""
        return settings.as_predicted(self._session.facts)

    def ask(self, every: Sequence[Settings]) -> None:
        """Ask for predictions, or take those that the study has."""
        session = self._session
        if not every or session.stop.is_set() or session.pace.elapsed_s() > self._ends_s:
            return
        session.observe(PredictionStarted(len(every)))
        before = len(self.known)
        asked = hashlib.sha256("\n".join(settings.canonical() for settings in every).encode()).hexdigest()
        key = f"{_EVIDENCE}:{asked[:12]}"
        outcome = session.study.evidence(key)
        if outcome is None:
            request = self._request(every)
            outcome = session.executor.ask(request)
            session.keep_output(request.id, outcome)
            if isinstance(outcome, Predicted):
                session.study.keep_evidence(key, outcome)
        if isinstance(outcome, Predicted):
            self._take(every, outcome)
        elif not session.was_cut_off(outcome):
            why = first_line(failure(outcome))
            session.warn(f"memory cannot be predicted, so that trials are spent on learning it: {why}")
        session.observe(PredictionEnded(len(self.known) - before, len(every)))

    def tell_of_choices(self, every: Sequence[Settings]) -> None:
        """Say where all blocks will be recomputed although only those that it takes were to be."""
        known = [self.predict(settings) for settings in every]
        missing = sum(found is None or found.blocks is None for found in known)
        if not missing or self._session.stop.is_set():
            return
        why = "what each block keeps could not be traced."
        if self._session.pace.elapsed_s() >= self._ends_s:
            why = "the time for predictions ran out."
            if self._session.options.max_time_s is not None:
                why += f" They get {_PART:.0%} of --max-time: allow more."
        self._session.warn(
            "checkpointing was to recompute only as many blocks as it takes, which is faster than all of them. For "
            f"{missing} of {len(known)} configurations it will be all: {why}"
        )

    def _request(self, every: Sequence[Settings]) -> PredictRequest:
        pace = self._session.pace
        most_s = max(self._ends_s - pace.elapsed_s(), _LEAST_S)
        deadline_s = pace.deadline_s(most_s, spare_finalists=True)
        self._num_asked += 1
        request = self._session.inquiry.predict_request(every, most_s, deadline_s)
        return request.model_copy(update={"id": f"predict-{self._num_asked}"})

    def _take(self, every: Sequence[Settings], outcome: Predicted) -> None:
        if outcome.probed is not None:
            self._session.warn(f"memory is predicted from real steps at small batches: {outcome.probed}")
        pairs = zip(every, outcome.predictions, strict=False)
        self.known |= {settings.canonical(): one for settings, one in pairs if one is not None}
