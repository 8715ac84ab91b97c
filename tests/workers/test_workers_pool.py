"""Slots that are lost, and slots that are many."""

from __future__ import annotations

import threading
import time

import pytest

from autotune.errors import TrialsLost
from autotune.workers import Crashed, Failed, InspectRequest, Lost, pool
from autotune.workers.pool import SlotPool, TurnsPool

REQUEST = InspectRequest(id="1", task="model.py", device="cpu")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_PAUSES_S", (0.0, 0.0))


class Scripted:
    """A slot that answers from a list."""

    name = ""

    def __init__(self, *answers):
        self.answers = list(answers)

    def run(self, request):
        return self.answers.pop(0)

    def close(self):
        self.answers = []


def test_a_lost_trial_is_asked_again_twice_and_then_it_is_lost():
    slot = Scripted(*(Lost(message=reason) for reason in ("no room", "no room", "killed", "never")))
    with SlotPool([slot]) as pool:
        assert pool.submit(REQUEST).result() == Lost(message="no room; killed")
        assert [left.message for left in slot.answers] == ["never"]


def test_who_waits_for_a_trial_that_is_lost_is_told_as_of_an_error():
    slot = Scripted(*[Lost(message="no room")] * 3)
    with SlotPool([slot]) as pool, pytest.raises(TrialsLost, match="trials cannot be run: no room"):
        pool.ask(REQUEST)


def test_another_try_is_made_elsewhere_where_there_is_an_elsewhere():
    here, there = Scripted(Lost(message="gone")), Scripted(Failed(message="there"))
    with SlotPool([there, here]) as pool:  # the slot that was put last is taken first
        assert pool.submit(REQUEST).result() == Failed(message="there")
    assert here.answers == []


def test_every_try_has_the_whole_deadline():
    """With what a lost one has left of it, a trial would seem to hang."""
    seen = []

    class Timed(Scripted):
        def run(self, request):
            seen.append(request.deadline_s)
            return super().run(request)

    with SlotPool([Timed(Lost(message="gone"), Lost(message="gone"), Failed(message="ran"))]) as pool:
        pool.submit(REQUEST.model_copy(update={"deadline_s": 100.0})).result()
    assert seen == [100.0] * 3


def test_an_outcome_is_never_asked_for_again_whatever_it_says():
    slot = Scripted(Crashed(message="first"), Failed(message="second"))
    with SlotPool([slot]) as pool:
        assert pool.submit(REQUEST).result() == Crashed(message="first")
        assert len(slot.answers) == 1


def test_as_many_trials_run_at_once_as_there_are_slots():
    both = threading.Barrier(2)

    class Meeting(Scripted):
        def run(self, request):
            both.wait(timeout=600)
            return super().run(request)

    with SlotPool([Meeting(Failed(message="a")), Meeting(Failed(message="b"))]) as pool:
        futures = [pool.submit(REQUEST) for _ in range(2)]
        assert sorted(future.result().message for future in futures) == ["a", "b"]


def test_after_close_a_request_is_answered_and_not_run():
    pool = SlotPool([Scripted(Failed(message="ran"))])
    pool.close()
    assert pool.submit(REQUEST).result() == Crashed(message="stopped: the executor was closed")


def test_an_outcome_names_the_device_that_ran_it():
    slot = Scripted(Failed(message="ran"))
    slot.name = "node-1"
    with SlotPool([slot]) as pool:
        assert pool.submit(REQUEST).result().where == "node-1"


def test_a_device_that_has_gone_gives_its_trial_back_and_gets_no_other():
    """The trial runs on the other, once that is free; without the first's third try."""
    going, staying = Scripted(Lost(message="gone")), Scripted(Failed(message="a"), Failed(message="b"))
    with SlotPool([staying, going], lambda slot: slot is not going) as pool:
        assert pool.submit(REQUEST).result() == Failed(message="a")
        assert pool.num_slots == 1
        assert pool.submit(REQUEST).result() == Failed(message="b")


def test_where_no_device_is_left_it_is_said_at_once():
    going = Scripted(Lost(message="gone"))
    with SlotPool([going], lambda slot: False) as pool:
        assert pool.submit(REQUEST).result() == Lost(message="gone; no device is left")
        assert pool.submit(REQUEST).result() == Lost(message="no device is left")


def test_a_device_that_joins_later_is_used():
    """A second trial runs while the first still does."""
    both = threading.Barrier(2)

    class Meeting(Scripted):
        def run(self, request):
            both.wait(timeout=600)
            return super().run(request)

    with SlotPool([Meeting(Failed(message="a"))]) as pool:
        futures = [pool.submit(REQUEST) for _ in range(2)]
        pool.add(Meeting(Failed(message="b")))
        assert pool.num_slots == 2
        assert sorted(future.result().message for future in futures) == ["a", "b"]


def test_a_loss_that_its_device_went_with_is_none_of_the_trials_tries():
    """However many go."""
    going = [Scripted(Lost(message="gone")) for _ in range(5)]
    with SlotPool([Scripted(Failed(message="ran")), *going], lambda slot: slot not in going) as pool:
        assert pool.submit(REQUEST).result() == Failed(message="ran")
        assert pool.num_slots == 1


class Slow(Scripted):
    """Says that it runs, and waits."""

    def __init__(self, *answers):
        super().__init__(*answers)
        self.runs, self.may_end, self.closed = threading.Event(), threading.Event(), threading.Event()

    def run(self, request):
        self.runs.set()
        self.may_end.wait(timeout=600)
        return super().run(request)

    def close(self):
        self.closed.set()
        self.may_end.set()


def test_a_device_that_is_about_to_go_ends_its_trial_and_is_let_go():
    """An idle one at once."""
    busy, idle = Slow(Failed(message="ran")), Slow()
    with SlotPool([idle, busy]) as pool:
        future = pool.submit(REQUEST)
        assert busy.runs.wait(timeout=600)
        pool.retire(lambda slot: True)
        assert idle.closed.wait(timeout=600)
        assert not busy.closed.is_set()
        busy.may_end.set()
        assert future.result() == Failed(message="ran")
        assert busy.closed.wait(timeout=600)


def test_close_ends_what_still_runs_on_a_device_that_is_about_to_go():
    leaving = Slow(Lost(message="closed"))
    with SlotPool([leaving]) as pool:
        future = pool.submit(REQUEST)
        assert leaving.runs.wait(timeout=600)
        pool.retire(lambda slot: True)
    assert future.result() == Crashed(message="stopped: the executor was closed")


@pytest.mark.medium
def test_who_comes_first_is_served_first():
    """Threads that wait for one slot, each of which looked now and then, came to it in any order."""
    served = []

    class Named(Slow):
        def run(self, request):
            served.append(request.id)
            return super().run(request)

    names = [str(number) for number in range(200)]
    slot = Named(*[Failed(message="ran")] * len(names))
    with SlotPool([slot]) as pool:
        futures = [pool.submit(REQUEST.model_copy(update={"id": name})) for name in names]
        slot.may_end.wait(timeout=1.0)  # in which each would look
        slot.may_end.set()
        for future in futures:
            future.result()
    assert served == names


class Shared(Scripted):
    """On a device that others may have."""

    def __init__(self, *answers, is_free=True):
        super().__init__(*answers)
        self.is_free, self.has_device, self.asked = is_free, False, threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    def gets_device(self, within_s):
        self.asked.release()
        self.has_device = self.has_device or self.is_free
        if not self.has_device:
            time.sleep(0.01)
        return self.has_device

    def leave_device(self):
        self.has_device = False
        self.left.release()

    def close(self):
        super().close()
        self.is_free = True


def turns_pool(*slots, tell=lambda: None):
    return TurnsPool(slots, lambda slot: True, lambda slot: not (slot.has_device or slot.is_free), tell)


def test_a_device_is_kept_after_a_trial_until_others_wait():
    slot = Shared(Failed(message="a"))
    with turns_pool(slot) as pool:
        pool.ask(REQUEST)
        assert slot.has_device
        pool.share(True)
        assert slot.left.acquire(timeout=60)
        assert not slot.has_device


def test_while_others_wait_a_device_is_given_back_before_the_outcome_is_told():
    """And once none does any more, it is kept again."""
    slot = Shared(*[Failed(message="a")] * 3)
    with turns_pool(slot) as pool:
        pool.share(True)
        for _ in range(2):
            assert pool.ask(REQUEST) == Failed(message="a")
            assert not slot.has_device
        pool.share(False)
        pool.ask(REQUEST)
        assert slot.has_device


def test_a_search_holds_no_second_device_beside_one_that_stands_idle():
    """Whichever was free last."""
    first, second = Shared(*[Failed(message="first")] * 2), Shared()
    first.name = "first"
    with turns_pool(first, second) as pool:
        first.has_device = True
        assert [pool.ask(REQUEST).where for _ in range(2)] == ["first"] * 2
        assert not second.has_device


def test_a_trial_whose_device_others_have_goes_to_another_as_soon_as_that_is_idle():
    """What it waited for is asked for no more."""
    mine, other = (Shared(Failed(message="ran"), is_free=False) for _ in range(2))
    other.name = "other"
    with turns_pool(other, mine) as pool:
        future = pool.submit(REQUEST)
        assert other.asked.acquire(timeout=60)  # of two that are used the first is waited for
        mine.name, mine.is_free = "mine", True
        assert future.result(60).where == "mine"
        assert other.left.acquire(timeout=60)
        assert pool.num_slots == 2


def test_a_trial_that_waits_for_long_although_it_is_its_turn_says_so_once(monkeypatch):
    """Others use all devices, who do not take turns."""
    monkeypatch.setattr(pool, "_PATIENCE_S", pool._LOOK_S)
    slot, told = Shared(Failed(message="ran"), is_free=False), []
    with turns_pool(slot, tell=lambda: told.append(slot)) as found:
        future = found.submit(REQUEST)
        for _ in range(5):
            assert slot.asked.acquire(timeout=60)
        slot.is_free = True
        assert future.result(60) == Failed(message="ran")
    assert told == [slot]
