"""Predictions of a space's configurations: asked of child processes before any trial, and kept with the study."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from ...estimates import WORKER_BYTES, Prediction, untried
from ...techniques import Settings
from ...techniques.checkpointing import Checkpointing
from ...techniques.layers import Layers
from ...words import count, settings_words
from ...workers import Predicted, PredictRequest
from ...workers.trial.traces import first_line
from ..events import PredictionEnded, PredictionStarted
from ..requests import failure
from ..runs import run_once
from ..sampler.configuration_space import ConfigurationSpace, Foreseen, buys_memory
from ..sampler.loaders import Loaders
from ..session import Session

_EVERY_BLOCK = Checkpointing(kind="blocks")
_EVIDENCE = "predicted"
"""Prefix of the keys under which the study stores predictions."""
_TOGETHER = "chosen together"
"""Key under which it stores for what blocks and layers were."""
_PART = 0.1
"""Largest share of ``--max-time`` that predictions take, once their process has read the task; the combinations with
the fewest changes come first."""
_MOST_S = 1800.0
"""Most seconds that predictions take without ``--max-time``."""
_LEAST_S = 0.1
"""A request with no time left still answers for one combination."""


def foresee(session: Session, *parts: ConfigurationSpace) -> Foreseen:
    """Ask for predictions of these, one after the other, or take those that the study has. Where none can be made, as
    of a script or of inference, which are not traced, the sampler learns from trials alone."""
    foresight = _Foresight(session)
    foreseen, is_gain = Foreseen(foresight.predict, foresight.chosen), session.options.sampler == "gain"
    is_in_vain = not is_gain and not any(space.is_open for space in parts)  # others ask which blocks to recompute alone
    if session.options.command or session.facts.inference or session.stop.is_set() or is_in_vain:
        return foreseen
    if unsure := untried(session.facts.torch_version):
        session.warn(unsure)
    for space in parts:
        _foresee(session, space, foresight, foreseen)
    return foreseen


def predicted(session: Session, settings: Settings) -> Prediction | None:
    """What is predicted of one configuration, of which a process is asked now; None where that cannot be told."""
    foresight = _Foresight(session)
    foresight.begin()
    foresight.ask([foresight.key(settings)])
    return foresight.predict(settings)


def _foresee(session: Session, space: ConfigurationSpace, foresight: _Foresight, foreseen: Foreseen) -> None:
    record = session.study.record
    named, to_choose = (list(dict.fromkeys(map(foresight.key, row))) for row in space.weighed(record.seed))
    foresight.begin()
    if session.options.sampler == "gain":
        foresight.ask([settings for settings in named if not buys_memory(settings)])
        plain, usable = space.foretold(foreseen), record.usable_bytes
        named, to_choose = (
            [settings for settings in row if buys_memory(settings) and not plain.is_needless(settings, usable)]
            for row in (named, to_choose)
        )
    else:
        named = []
    foresight.ask(named, to_choose)
    foresight.tell_of_choices(to_choose)
    if session.is_tight and space.is_open and session.options.sampler == "gain":
        foresight.choose_together(space.foretold(foreseen))


class _Foresight:
    """The predictions so far, and the time that is left for more."""

    def __init__(self, session: Session) -> None:
        self.known: dict[str, Prediction] = {}
        """Predictions by ``settings.canonical()``."""
        self._chosen: dict[str, Settings] = {}
        """What was chosen, by ``settings.canonical()`` of the configuration with all blocks recomputed."""
        self._session = session
        self._asked: set[tuple[str, tuple[Settings, ...] | None]] = set()
        """What need not be asked again, and from what was to be chosen; None where nothing was."""
        self._num_asked = 0
        self._is_left_out = False
        """Whether there was no time to ask."""
        self._ends_s = 0.0

    def begin(self) -> None:
        """Another part begins, with time of its own."""
        most_s = _MOST_S if self._session.options.max_time is None else _PART * self._session.options.max_time
        self._ends_s = self._session.time_budget.elapsed_s() + most_s

    def predict(self, settings: Settings) -> Prediction | None:
        """The prediction for a configuration, with the bytes of an epoch that it caches in the device's memory, of all
        processes that are charged, and of its loader's workers; at the upper end with what it may hold beyond. All
        processes share the host's memory."""
        known, facts = self.known.get(self.key(settings).canonical()), self._session.facts
        cached, times = settings.cached_bytes(facts), settings.times_charged(facts)
        if known is None or times is None:
            return None
        cached += self._workers_beyond(settings)
        if (on_card := settings.parallel.bytes_on_card(known.beside_bytes, facts)) is not None:
            cached += on_card - known.tensor_bytes
        more = cached + settings.may_hold(known.step_bytes, facts)
        processes = settings.parallel.processes
        if not more and processes == 1:
            return known
        high = None if known.high_bytes is None else (known.high_bytes + more) * times
        peaks = {"peak_bytes": (known.peak_bytes + cached) * times, "high_bytes": high}
        return known.model_copy(update={**peaks, "host_bytes": known.host_bytes * processes})

    def _workers_beyond(self, settings: Settings) -> int:
        """What loader workers take beyond what a prediction has for each, where they are charged and known."""
        number = settings.num_loading(self._session.facts) if self._session.facts.device.type == "cpu" else 0
        taken = Loaders(self._session.study).workers_bytes(settings) if number else None
        return 0 if taken is None else taken - number * WORKER_BYTES

    def chosen(self, settings: Settings) -> Settings | None:
        """What was chosen for a configuration, whatever its own checkpointing, and nothing else of it; None where
        nothing could be."""
        return self._chosen.get(self.key(settings.having(_EVERY_BLOCK)).canonical())

    def key(self, settings: Settings) -> Settings:
        """The configuration that is predicted in its place."""
        return settings.as_predicted(self._session.facts)

    def choose_together(self, space: ConfigurationSpace) -> None:
        """For what is believed best, have chosen which blocks are recomputed and in which layers save memory, at once.
        That takes the place of its blocks as they were chosen with these layers everywhere, or nowhere."""
        study, rows = self._session.study, space.choices.get(Layers.name, ())
        saving = [one for one in rows if isinstance(one, Layers) and one != Layers() and not one.spared]
        if not saving:
            return
        kept = study.kept(_TOGETHER)  # what was measured since may have changed what is believed
        best = space.believed_best(study) if kept is None else Settings.model_validate(kept)
        own = self.key(best.having(_EVERY_BLOCK, Layers()))
        if best.affect("function") or self.chosen(own) is None:
            return
        choices = [Settings().having(one) for one in saving if self.chosen(own.having(one)) is not None]
        if choices:
            study.keep(_TOGETHER, best.model_dump(mode="json", exclude_defaults=True))
            self.ask((), (own,), (Settings().having(_EVERY_BLOCK), *choices))

    def ask(
        self, named: Sequence[Settings], to_choose: Sequence[Settings] = (), choices: Sequence[Settings] = ()
    ) -> None:
        """Ask for predictions, or take those that the study has. What was asked for is not asked for again.

        Args:
            named: of these as they are.
            to_choose: of these with what is chosen for each.
            choices: from what; none is which blocks are recomputed.
        """
        named, to_choose = self._new(named, None), self._new(to_choose, tuple(choices))
        session, num_asked = self._session, len(named) + len(to_choose)
        if not num_asked or session.stop.is_set() or session.time_budget.elapsed_s() > self._ends_s:
            return
        asked = hashlib.sha256(repr((*named, "", *to_choose, "", *choices)).encode()).hexdigest()
        key = f"{_EVIDENCE}:{asked[:12]}"
        outcome = session.study.evidence(key)
        if outcome is None and not session.time_budget.may_predict():
            self._tell_of_time()
            return
        session.observe(PredictionStarted(num_asked))
        if outcome is None:
            outcome = run_once(session, key, lambda: self._request(named, to_choose, choices))
            self._ends_s += session.time_budget.read_s  # their time begins once the task was read
        num_known = 0
        if isinstance(outcome, Predicted):
            num_known = sum(one is not None for one in outcome.predictions)
            self._take(named, to_choose, outcome, is_together=len(choices) > 1)
        elif outcome is not None:
            why = first_line(failure(outcome))
            session.warn(f"memory cannot be predicted, so that trials are spent on learning it: {why}")
        session.observe(PredictionEnded(num_known, num_asked))

    def _new(self, every: Sequence[Settings], choices: tuple[Settings, ...] | None) -> list[Settings]:
        new = [settings for settings in every if (settings.canonical(), choices) not in self._asked]
        self._asked |= {(settings.canonical(), choices) for settings in new}
        return new

    def _tell_of_time(self) -> None:
        self._is_left_out = True
        self._session.warn(
            f"memory is not predicted: reading the task takes {self._session.time_budget.read_s:.0f} s, and --max-time "
            "leaves no time for it beside the trials. They learn it instead."
        )

    def tell_of_choices(self, every: Sequence[Settings]) -> None:
        """Warn of configurations with all blocks recomputed because none could be chosen."""
        missing = sum(self.chosen(settings) is None for settings in every)
        if not missing or self._session.stop.is_set():
            return
        why = "what each block keeps could not be traced."
        if self._is_left_out:
            why = "memory is not predicted."
        elif self._session.time_budget.elapsed_s() >= self._ends_s - self._session.time_budget.read_s:
            why = "the time for predictions ran out."
            if self._session.options.max_time is not None:
                why += f" They get {_PART:.0%} of --max-time: allow more."
        self._session.warn(
            "checkpointing was to recompute only as many blocks as it takes, which is faster than all of them. For "
            f"{missing} of {len(every)} configurations it will be all: {why}"
        )

    def _request(
        self, named: Sequence[Settings], to_choose: Sequence[Settings], choices: Sequence[Settings]
    ) -> PredictRequest:
        time_budget = self._session.time_budget
        most_s = max(self._ends_s - time_budget.elapsed_s(), _LEAST_S)
        deadline_s = time_budget.prediction_deadline_s(most_s)
        self._num_asked += 1
        request = self._session.requests.predict_request(named, most_s, deadline_s, to_choose, choices)
        return request.model_copy(update={"id": f"predict-{self._num_asked}"})

    def _take(
        self, named: Sequence[Settings], to_choose: Sequence[Settings], outcome: Predicted, is_together: bool
    ) -> None:
        if outcome.probed is not None:
            self._session.warn(f"memory is predicted from real steps at small batches: {outcome.probed}")
        for why, every in itertools.groupby(sorted(outcome.refused, key=lambda row: row[1]), lambda row: row[1]):
            first, *others = (settings_words(settings, self._session.facts) for settings, _ in every)
            more = f" and {count(len(others), 'other combination')}" if others else ""
            self._session.warn(f"memory is not predicted of {first}{more}: {why}")
        for number, (settings, one) in enumerate(zip((*named, *to_choose), outcome.predictions, strict=True)):
            if one is None or (is_together and one.chosen is None):  # then it is of each choice everywhere
                continue
            if number >= len(named) and one.chosen is not None:
                layers = one.chosen.layers.kind
                whole = settings if layers == "none" else settings.having(Layers(kind=layers))
                self._chosen[whole.canonical()] = one.chosen
                settings = settings.having(Checkpointing(), *one.chosen.chosen())
            self.known[settings.canonical()] = one
