"""Searches of one service take turns on its devices, trial by trial: their drivers ask the server over sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from autotune.batch.turns import Turn
from autotune.batch.turns_of_server import SOCKET, TurnsOfServer, server_connection, taking_turns
from autotune.measure import MeasureOptions
from autotune.plan import Plan
from autotune.searches.time_budget import TimeBudget
from autotune.service.turns import DriverTurns, SearchTurns
from autotune.techniques import Settings
from autotune.workers import STOPPED, Crashed, Executor, Lost, MeasureRequest, Outcome, TrialRequest

ENDED = Crashed(message="ended")
OPTIONS = MeasureOptions(parity_batch=None)


class ByHand(Executor):
    """A driver's: its runs end when the test says so."""

    device_type = "a card"

    def __init__(self, num_slots: int = 1) -> None:
        self.num_slots = num_slots
        self.running: list[Future[Outcome]] = []
        self.told: list[bool] = []

    def share(self, others_wait: bool) -> None:
        self.told.append(others_wait)

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        self.running.append(Future())
        return self.running[-1]

    def end(self) -> None:
        self.running.pop(0).set_result(ENDED)

    def close(self) -> None: ...


class Driver:
    """One search's driver, and the server's end of its socket."""

    def __init__(self, turns: SearchTurns, name: str, num_slots: int = 1, device: str = "cpu") -> None:
        self.stop, self.executor, self.has_ended = threading.Event(), ByHand(num_slots), False
        self.server = DriverTurns(turns, name, 1.0)
        connection = socket.socket(fileno=os.dup(self.server.theirs.fileno()))
        self.server.begin()
        self.turns = TurnsOfServer(connection, self.executor, device, self.stop)
        self.turn = Turn(self.turns, self.executor)

    def ask(self, promise: float | None = None) -> Future[Outcome]:
        self.turn.promise = promise
        plan = Plan(settings=Settings())
        return self.turn.submit(MeasureRequest(id="1", task="t.py", device="cpu", plan=plan, options=OPTIONS))

    def ends(self) -> None:
        """As its supervisor sees it, once."""
        if not self.has_ended:
            self.has_ended = True
            self.turns.close()
            self.server.close()


@contextmanager
def drivers(
    *names: str, num_slots: int = 1, device: str = "cpu", is_cluster: bool = False
) -> Iterator[tuple[SearchTurns, list[Driver]]]:
    turns = SearchTurns(is_cluster)
    found = [Driver(turns, name, num_slots, device) for name in names]
    known(turns, len(found))
    yield turns, found
    for driver in found:
        driver.ends()


def known(turns: SearchTurns, number: int) -> None:
    until(lambda: len(turns._drivers) == number)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    ends = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_one_trial_runs_at_a_time_and_the_most_expected_gain_is_next():
    with drivers("low", "high", "runs") as (turns, (low, high, runs)):
        first = runs.ask(9.0)
        low.ask(0.01)
        high.ask(0.02)
        until(lambda: turns.waits_for() == {"low": ["runs"], "high": ["runs"]})
        until(lambda: len(runs.executor.running) == 1)
        assert (low.executor.running, high.executor.running) == ([], [])
        runs.executor.end()
        assert first.result(10) == ENDED
        runs.ends()
        until(lambda: turns.waits_for() == {"low": ["high"]})
        until(lambda: len(high.executor.running) == 1)
        assert low.executor.running == []
        high.executor.end()
        high.ends()
        until(lambda: len(low.executor.running) == 1)
        assert turns.waits_for() == {}
        low.ends()


def test_what_waits_for_others_is_not_the_searchs_time():
    with drivers("waits", "runs") as (turns, (waits, runs)):
        runs.ask(2.0)
        asked = waits.ask(1.0)
        until(lambda: turns.waits_for() == {"waits": ["runs"]})
        before = waits.turn.clock()
        time.sleep(0.05)
        assert waits.turn.clock() == pytest.approx(before, abs=1e-6)
        runs.executor.end()
        runs.ask(0.5)  # else it would be waited for
        until(lambda: len(waits.executor.running) == 1)
        waits.executor.end()
        assert asked.result(10) == ENDED
        until(lambda: waits.turn.clock() > before)


def test_devices_are_shared_as_searches_come_and_go():
    """Four: two each of two searches, all of one that is alone."""
    with drivers("one", "other", num_slots=4, device="cuda") as (_, (one, other)):
        until(lambda: (one.turn.num_slots, other.turn.num_slots) == (2, 2))
        for _ in range(2):
            one.ask(1.0)
            other.ask(1.0)
        until(lambda: len(one.executor.running) + len(other.executor.running) == 4)
        other.ends()
        until(lambda: one.turn.num_slots == 4)


def test_of_a_cpu_nobody_is_believed_to_have_several():
    """Else one task could have the others' trials measured beside each other."""
    with drivers("one", "other", num_slots=4) as (turns, (one, other)):
        one.ask(2.0)
        other.ask(1.0)
        until(lambda: turns.waits_for() == {"other": ["one"]})
        assert (one.turn.num_slots, other.turn.num_slots, other.executor.running) == (1, 1, [])


def test_who_has_a_clusters_device_hears_as_long_as_another_waits_for_it():
    with drivers("has", "asks", is_cluster=True) as (turns, (has, asks)):
        has.ask(2.0)
        asks.ask(1.0)
        until(lambda: turns.waits_for() == {"asks": ["has"]})
        until(lambda: has.executor.told[-1:] == [True])
        has.ask(0.5)  # else it would be waited for
        has.executor.end()
        until(lambda: turns.waits_for() == {"has": ["asks"]})
        until(lambda: (has.executor.told[-1:], asks.executor.told[-1:]) == ([False], [True]))
        asks.ends()
        until(lambda: len(has.executor.running) == 1)
        assert has.executor.told[-1] is False


def test_a_search_that_asks_for_a_clusters_idle_device_has_it_given_back():
    """The other has run on both, and may keep that of its next trial."""
    with drivers("has", "asks", num_slots=2, is_cluster=True) as (turns, (has, asks)):
        has.ask(2.0)
        asks.ask(1.0)
        until(lambda: (len(has.executor.running), len(asks.executor.running)) == (1, 1))
        asks.executor.end()
        until(lambda: has.executor.told[-1:] == [False])
        before = len(has.executor.told)
        asks.ask(1.0)
        until(lambda: has.executor.told[before:] == [True, False])
        assert turns.waits_for() == {}


def test_nobody_is_to_leave_a_device_of_this_machine():
    """Nothing holds one between trials."""
    with drivers("has", "asks") as (turns, (has, asks)):
        has.ask(2.0)
        asks.ask(1.0)
        until(lambda: turns.waits_for() == {"asks": ["has"]})
        assert has.executor.told == []


def test_a_cluster_of_cpus_has_as_many_as_are_told():
    """Ray gives each to one search at a time, whatever a driver says."""
    with drivers("one", "other", num_slots=2, is_cluster=True) as (_, (one, other)):
        one.ask(2.0)
        other.ask(1.0)
        until(lambda: len(one.executor.running) + len(other.executor.running) == 2)


def test_trials_on_gpus_and_on_processors_of_one_cluster_wait_for_each_other():
    """Each has a queue of its own, and a GPU is not had without a processor of its node."""
    turns = SearchTurns(is_cluster=True)
    processors, gpu = Driver(turns, "processors"), Driver(turns, "gpu", device="cuda")
    known(turns, 2)
    processors.ask(1.0)
    gpu.ask(1.0)
    until(lambda: (len(processors.executor.running), len(gpu.executor.running)) == (1, 1))
    until(lambda: (processors.executor.told[-1:], gpu.executor.told[-1:]) == ([True], [True]))
    gpu.executor.end()
    until(lambda: processors.executor.told[-1] is False)
    processors.ends()
    gpu.ends()


def test_a_device_that_comes_while_trials_wait_is_told_of():
    with drivers("one", "other", device="cuda") as (turns, (one, other)):
        one.ask(2.0)
        other.ask(1.0)
        until(lambda: turns.waits_for() == {"other": ["one"]})
        other.executor.num_slots = 2
        until(lambda: turns.queue("cuda a card").num_slots() == 1 and other.server.num_slots == 2)
        turns.advance()
        until(lambda: len(other.executor.running) == 1)


def test_the_devices_of_a_driver_that_died_are_others():
    """Once nothing that it ran is left, which its supervisor says."""
    with drivers("dies", "waits") as (turns, (dies, waits)):
        dies.ask(2.0)
        asked = waits.ask(1.0)
        until(lambda: turns.waits_for() == {"waits": ["dies"]})
        dies.turns.close()
        assert not asked.done()
        assert waits.executor.running == []
        dies.server.close()
        dies.has_ended = True
        until(lambda: len(waits.executor.running) == 1)


def test_a_search_that_is_stopped_waits_no_more_and_its_running_trial_ends():
    with drivers("stops", "runs") as (turns, (stops, runs)):
        runs.ask(2.0)
        asked = stops.ask(1.0)
        until(lambda: turns.waits_for() == {"stops": ["runs"]})
        stops.stop.set()
        assert asked.result(10) == STOPPED
        assert stops.ask().result(10) == STOPPED


def test_a_driver_whose_server_has_gone_is_told_so():
    """It would wait without end, and nobody would read what it finds."""
    with drivers("one", "other") as (turns, (one, other)):
        other.ask(2.0)
        asked = one.ask(1.0)
        until(lambda: turns.waits_for() == {"one": ["other"]})
        one.server.close()
        outcome = asked.result(10)
        assert isinstance(outcome, Lost)
        assert "has gone" in outcome.message
        assert isinstance(one.ask().result(10), Lost)
        one.turns.close()
        one.has_ended = True


@pytest.mark.parametrize(
    "said",
    [
        b"\xff",
        b"[]",
        b'{"device": "cpu a card", "num_slots": "many"}',
        b'{"device": "cpu a card", "num_slots": 1, "asks": 0, "promise": NaN}',
        b'{"device": "cpu a card", "num_slots": 1, "asks": 0, "promise": 1e999}',
        b'{"device": "cpu a card", "num_slots": 1, "more": 1}',
        b'{"device": "' + b"x" * 8000,
    ],
)
def test_a_driver_that_says_what_is_no_message_is_hung_up_on_alone(said):
    """A task may have its socket. Others go on."""
    turns = SearchTurns()
    bad = DriverTurns(turns, "bad", 1.0)
    with socket.socket(fileno=os.dup(bad.theirs.fileno())) as theirs:
        bad.begin()
        theirs.send(said)
        assert theirs.recv(4096) == b""
        good = Driver(turns, "good")
        good.ask()
        until(lambda: len(good.executor.running) == 1)
        good.ends()
        bad.close()


def test_a_driver_that_asks_for_too_much_or_never_listens_holds_up_nobody():
    turns = SearchTurns()
    bad, good = DriverTurns(turns, "bad", 1.0), Driver(turns, "good")
    known(turns, 1)
    good.ask()
    until(lambda: len(good.executor.running) == 1)
    with socket.socket(fileno=os.dup(bad.theirs.fileno())) as theirs:
        bad.begin()
        for number in range(1001):
            theirs.send(b'{"device": "cpu a card", "num_slots": 1, "asks": %d}' % number)
        until(lambda: not bad._thread.is_alive())
        for _ in range(1000):  # it would block one that waits for it
            bad.tell()
        good.executor.end()
        bad.close()
    good.ask()
    until(lambda: len(good.executor.running) == 1)
    good.ends()


def test_a_search_that_no_service_runs_has_its_executor_as_it_is(monkeypatch):
    monkeypatch.delenv(SOCKET, raising=False)
    executor = ByHand()
    with taking_turns(server_connection(), executor, "cpu", threading.Event(), TimeBudget(1.0, None)) as (found, _):
        assert found is executor


def test_a_drivers_trials_have_no_socket_of_the_servers(monkeypatch):
    one, other = socket.socketpair()
    other.set_inheritable(True)
    monkeypatch.setenv(SOCKET, str(other.detach()))
    found = server_connection()
    assert found is not None
    with one, found:
        assert (found.get_inheritable(), SOCKET in os.environ) == (False, False)
