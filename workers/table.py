"""Trials from a table: nothing runs. For tests of the driver, and for replaying what was measured elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..estimates import Prediction, PredictOptions
from ..measure import Measurement, Parity
from ..measure.measurement import Quality
from ..measure.timing.turns import is_enough
from ..plan import Latency, Peak, Speed
from ..techniques import Facts, Settings
from ._base import Executor
from .outcome import COMPARED, STOPPED, Failed, Inspected, Measured, Outcome, Predicted, Turn
from .pool import done
from .request import CompareRequest, InspectRequest, JudgeRequest, MeasureRequest, PredictRequest, TrialRequest

_RELATIVE_INTERVAL = 0.01  # half the width of a made-up interval
_SLOWER = 0.98
"""Of the speed to beat: below it a trial is surely slower."""


class Row(BaseModel):
    """What one configuration does, each time it is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    settings: Settings
    """The configuration."""
    samples_per_s: tuple[float, ...] = ()
    """Samples per second, repeat by repeat."""
    peak_bytes: tuple[int, ...] = ()
    """Bytes charged, repeat by repeat."""
    host_bytes: int | None = None
    """What the job takes of the host's memory, on a machine whose device has its own."""
    workers_bytes: int | None = None
    """What loader workers take of it."""
    disturbed: tuple[float, ...] = ()
    """Share of the time that other work took, repeat by repeat; empty is none."""
    losses: tuple[float, ...] = (1.0,)
    """Of the parity run."""
    parity: Parity | None = None
    """How the losses compare with the reference's; None is no deviation."""
    latency: Latency | None = None
    """Of inference: what one batch takes."""
    loader_wait: float = 0.0
    """Share of the time spent waiting for data."""
    optimizer_share: float = 0.0
    """Share of the time spent in the optimizer's own steps."""
    leak_bytes_per_step: float | None = None
    """Memory gained by each step without end."""
    quality: tuple[Quality, ...] = ()
    """What ``evaluate`` says, of those repeats that ask for it."""
    outcome: Outcome | None = None
    """What comes back instead of a measurement."""

    @model_validator(mode="after")
    def _answers(self) -> Self:
        if self.outcome is None and (not self.samples_per_s or len(self.samples_per_s) != len(self.peak_bytes)):
            raise ValueError("a row has an outcome, or as many samples_per_s as peak_bytes, at least one")
        return self

    def outcome_at(self, repeat: int, num_judged: int | None = None) -> Outcome:
        """The outcome of the ``repeat``-th request, counted from 0; the rows start again after the last.

        Args:
            repeat: how many came before.
            num_judged: how many of those asked for quality; None where this one does not.
        """
        if self.outcome is not None:
            return self.outcome
        at = repeat % len(self.samples_per_s)
        speed, margin = self.samples_per_s[at], self.samples_per_s[at] * _RELATIVE_INTERVAL
        measurement = Measurement(
            samples_per_s=Speed(value=speed, low=speed - margin, high=speed + margin),
            peak=Peak(process=self.peak_bytes[at], host=self.host_bytes, workers=self.workers_bytes),
            parity=self.parity or Parity(losses=self.losses),
            disturbed=self.disturbed[at] if self.disturbed else 0.0,
            num_steps=100,
            num_windows=10,
            latency=self.latency,
            loader_wait=self.loader_wait,
            optimizer_share=self.optimizer_share,
            epoch_start_s=0.0,
            leak_bytes_per_step=self.leak_bytes_per_step,
            quality=None if num_judged is None else self.quality[num_judged % len(self.quality)],
            phases_s={"load": 0.0, "apply": 0.0, "parity": 0.0, "warmup": 0.0, "timed": 0.0},
        )
        return Measured(measurement=measurement)


class TableExecutor(Executor):
    """Answers each request with the row of its settings. Keeps the requests, in order, for whoever asks."""

    def __init__(
        self,
        facts: Facts,
        rows: Iterable[Row],
        num_slots: int = 1,
        predict: Callable[[Settings], Prediction | None] = lambda settings: None,
        choose: Callable[[Settings, tuple[Settings, ...]], Prediction | None] = lambda settings, choices: None,
        judge: Callable[[JudgeRequest], Outcome] = lambda request: Failed(message="the table judges nothing"),
    ) -> None:
        """Take the table.

        Args:
            facts: the answer to every inspect request.
            rows: one for each configuration that may be asked for.
            num_slots: what to say of trials at once; every answer is there at once anyway.
            predict: what to say of a configuration before it is measured.
            choose: the same, of one for which something is to be chosen, of these choices.
            judge: what comes of cuts.
        """
        self.num_slots = num_slots
        self.requests: list[TrialRequest] = []
        self._facts = facts
        self._predict, self._choose, self._judge = predict, choose, judge
        self._rows = {row.settings.canonical(): row for row in rows}
        self._asked: Counter[str] = Counter()
        self._judged: Counter[str] = Counter()
        self._is_closed = False

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """A future that is done already."""
        return done(self._answer(request))

    def close(self) -> None:
        """Later requests get ``Crashed``."""
        self._is_closed = True

    def _answer(self, request: TrialRequest) -> Outcome:
        if self._is_closed:
            return STOPPED
        self.requests.append(request)
        match request:
            case InspectRequest():
                return Inspected(facts=self._facts)
            case PredictRequest(options=PredictOptions() as options):
                chosen = (self._choose(settings, options.choices) for settings in options.to_choose)
                return Predicted(predictions=(*map(self._predict, options.settings), *chosen))
            case JudgeRequest():
                return self._judge(request)
            case CompareRequest():
                return self._compared(request)
        key = request.applied.canonical()
        if key not in self._rows:
            return Failed(message=f"the table has no row for {key}; it has {len(self._rows)} others")
        repeat, self._asked[key] = self._asked[key], self._asked[key] + 1
        if not isinstance(request, MeasureRequest) or request.options.quality is None:
            return _raced(request, self._rows[key].outcome_at(repeat))
        num_judged, self._judged[key] = self._judged[key], self._judged[key] + 1
        return self._rows[key].outcome_at(repeat, num_judged)

    def _compared(self, request: CompareRequest) -> Outcome:
        """What each side's row comes to, and the ratio of their speeds, turn after turn."""
        one, other = self._answer(request.one), self._answer(request.other)
        turns: list[Turn] = []
        if isinstance(one, Measured) and isinstance(other, Measured):
            rates = one.measurement.samples_per_s.value, other.measurement.samples_per_s.value
            disturbed = max(one.measurement.disturbed, other.measurement.disturbed)
            while not is_enough([turn.log_ratio for turn in turns], request.precision):
                turns.append(Turn(rates=rates, disturbed=disturbed))
        return COMPARED.validate_python({"one": one, "other": other, "turns": tuple(turns)})


def _raced(request: TrialRequest, outcome: Outcome) -> Outcome:
    """What is surely slower than what the request is to beat ends before its losses are compared."""
    if not isinstance(request, MeasureRequest) or not isinstance(outcome, Measured):
        return outcome
    found, to_beat = outcome.measurement, request.options.to_beat
    if to_beat is None or found.samples_per_s.high >= _SLOWER * to_beat:
        return outcome
    update = {"stopped": "slower", "parity": Parity(losses=()), "leak_bytes_per_step": None}
    return outcome.model_copy(update={"measurement": found.model_copy(update=update)})
