"""Whose trial is next, by hand: an executor whose trials end when the test says so, and a clock that stands still."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from autotune.batch.turns import Turn, Turns
from autotune.measure import MeasureOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.workers import STOPPED, Crashed, Executor, MeasureRequest, Outcome, TrialRequest

ENDED = Crashed(message="ended")
OPTIONS = MeasureOptions(parity_batch=None)


class ByHand(Executor):
    """Runs what it is given until :meth:`end`."""

    def __init__(self, num_slots: int = 1) -> None:
        self.num_slots = num_slots
        self.started: list[str] = []
        self._running: list[Future[Outcome]] = []

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        self.started.append(request.id)
        self._running.append(Future())
        return self._running[-1]

    def end(self) -> None:
        """The trial that has run longest ends."""
        self._running.pop(0).set_result(ENDED)

    def close(self) -> None: ...


class Clock:
    """Seconds, as the test sets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(turn: Turn, promise: float | None = None, name: str | None = None) -> Future[Outcome]:
    turn.promise = promise
    plan = Plan(settings=Settings())
    request = MeasureRequest(id=name or turn.name, task="t.py", device="cpu", plan=plan, options=OPTIONS)
    return turn.submit(request)


EXECUTORS: dict[Turns, ByHand] = {}


def turns_of(executor: ByHand, clock: Clock) -> Turns:
    turns = Turns(lambda: executor.num_slots, clock)
    EXECUTORS[turns] = executor
    return turns


def join(turns: Turns, name: str, priority: float) -> Turn:
    turn = Turn(turns, EXECUTORS[turns], name, priority)
    turns.join(turn)
    return turn


@pytest.fixture
def executor() -> ByHand:
    return ByHand()


def alternate(executor: ByHand, turns: list[Turn], promises: list[float], num: int) -> list[str]:
    """Which searches' trials run, where each asks for its next as soon as one has ended."""
    for turn, promise in zip(turns, promises, strict=True):
        ask(turn, promise)
    while len(executor.started) < num:
        last = next(turn for turn in turns if turn.name == executor.started[-1])
        executor.end()
        ask(last, promises[turns.index(last)])
    return executor.started


def test_the_trial_with_the_most_expected_gain_is_next(executor):
    """Whoever asked first."""
    turns = turns_of(executor, Clock())
    low, high = join(turns, "low", 1.0), join(turns, "high", 1.0)
    ask(low, 0.01)
    assert executor.started == []  # the other search may have something better
    ask(high, 0.02)
    assert executor.started == ["high"]


def test_priority_multiplies_the_expected_gain(executor):
    """0.01 times 3 is more than 0.02 times 1."""
    turns = turns_of(executor, Clock())
    urgent, other = join(turns, "urgent", 3.0), join(turns, "other", 1.0)
    ask(other, 0.02)
    ask(urgent, 0.01)
    assert executor.started == ["urgent"]


def test_what_is_not_known_yet_comes_first(executor):
    """A search that begins has no expectation; among two such the higher priority."""
    turns = turns_of(executor, Clock())
    known, new, urgent = join(turns, "known", 9.0), join(turns, "new", 1.0), join(turns, "urgent", 2.0)
    for turn, promise in ((known, 5.0), (new, None), (urgent, None)):
        ask(turn, promise)
    executor.end()
    ask(urgent, 0.0)
    executor.end()
    ask(new, 0.0)
    assert executor.started == ["urgent", "new", "known"]


def test_within_one_priority_none_waits_for_ever(executor):
    """Two searches: one with little to gain goes after two rounds of two trials of the other."""
    turns = turns_of(executor, Clock())
    found = alternate(executor, [join(turns, "much", 1.0), join(turns, "little", 1.0)], [1.0, 0.001], 10)
    assert found == ["much"] * 4 + ["little"] + ["much"] * 4 + ["little"]


def test_another_priority_does_not_count_as_waiting(executor):
    """Fairness is among equals: what matters less waits until the other has less to gain."""
    turns = turns_of(executor, Clock())
    assert alternate(executor, [join(turns, "urgent", 2.0), join(turns, "other", 1.0)], [1.0, 0.1], 9) == ["urgent"] * 9


def test_one_trial_on_each_device():
    """Of three that ask, two run."""
    executor = ByHand(num_slots=2)
    turns = turns_of(executor, Clock())
    for turn in [join(turns, name, 1.0) for name in "abc"]:
        ask(turn, 1.0)
    assert len(executor.started) == 2
    executor.end()
    turns.advance()
    assert len(executor.started) == 2  # the first may have something better than the third has
    ask(turns._turns[0], 2.0, "a again")
    assert executor.started[-1] == "a again"


def test_a_search_that_thinks_is_waited_for_and_not_for_long(executor):
    """Two seconds."""
    clock = Clock()
    turns = turns_of(executor, clock)
    asking, _ = join(turns, "asks", 1.0), join(turns, "thinks", 1.0)
    ask(asking, 1.0)
    clock.now = 1.9
    turns.advance()
    assert executor.started == []
    clock.now = 2.0
    turns.advance()
    assert executor.started == ["asks"]


def test_a_search_that_left_is_waited_for_no_more(executor):
    turns = turns_of(executor, Clock())
    stays, leaves = join(turns, "stays", 1.0), join(turns, "leaves", 1.0)
    ask(stays, 1.0)
    turns.leave(leaves)
    assert executor.started == ["stays"]


def test_what_waits_is_given_back_and_what_runs_ends(executor):
    """After Ctrl-C."""
    turns = turns_of(executor, Clock())
    one, other = join(turns, "one", 1.0), join(turns, "other", 1.0)
    running, waiting = ask(one, 2.0), ask(other, 1.0)
    turns.give_back()
    assert waiting.result() == STOPPED
    assert ask(other, 1.0).result() == STOPPED
    executor.end()
    assert running.result() == ENDED


def test_time_spent_waiting_for_a_device_is_not_the_searchs(executor):
    """Its clock stands while another's trial runs; of the devices it had the 3 s of its own."""
    clock = Clock()
    turns = turns_of(executor, clock)
    one, other = join(turns, "one", 1.0), join(turns, "other", 1.0)
    ask(one, 2.0)
    ask(other, 1.0)
    clock.now = 10.0
    assert (one.clock(), other.clock()) == (10.0, 0.0)
    turns.leave(one)
    executor.end()
    clock.now = 13.0
    executor.end()
    assert (other.clock(), other.device_s, other.num_runs) == (3.0, 3.0, 1)


@pytest.mark.parametrize(("num_slots", "num_searches", "each"), [(8, 1, 8), (8, 3, 3), (2, 12, 1)])
def test_searches_share_the_devices(num_slots, num_searches, each):
    """Rounded up, so that none is idle."""
    turns = turns_of(ByHand(num_slots), Clock())
    searches = [join(turns, str(number), 1.0) for number in range(num_searches)]
    assert searches[0].num_slots == each
