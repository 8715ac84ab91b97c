"""Slots that are lost, and slots that are many."""

from __future__ import annotations

import threading

from autotune.workers import Crashed, Failed, TrialRequest
from autotune.workers.client import SlotLost
from autotune.workers.pool import SlotPool

REQUEST = TrialRequest(id="1", task="model.py", device="cpu")


class Scripted:
    """A slot that answers from a list; an exception in it is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def run(self, request):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.answers = []


def test_a_lost_slot_is_asked_again_twice_and_no_more():
    slot = Scripted(*(SlotLost(f"loss {number}") for number in range(4)))
    with SlotPool([slot]) as pool:
        outcome = pool.submit(REQUEST).result()
        assert outcome == Crashed(message="lost 3 times: loss 0; loss 1; loss 2")
        assert len(slot.answers) == 1


def test_another_try_is_made_elsewhere_where_there_is_an_elsewhere():
    here, there = Scripted(SlotLost("gone")), Scripted(Failed(message="there"))
    with SlotPool([there, here]) as pool:  # the slot that was put last is taken first
        assert pool.submit(REQUEST).result() == Failed(message="there")
    assert here.answers == []


def test_every_try_has_what_is_left_of_the_deadline():
    seen = []

    class Timed(Scripted):
        def run(self, request):
            seen.append(request.deadline_s)
            return super().run(request)

    with SlotPool([Timed(SlotLost("gone"), SlotLost("gone"), Failed(message="ran"))]) as pool:
        pool.submit(REQUEST.model_copy(update={"deadline_s": 100.0})).result()
    assert seen[0] == 100.0 > seen[1] > seen[2] > 90.0


def test_an_outcome_is_never_asked_for_again_whatever_it_says():
    slot = Scripted(Crashed(message="first"), Failed(message="second"))
    with SlotPool([slot]) as pool:
        assert pool.submit(REQUEST).result() == Crashed(message="first")
        assert len(slot.answers) == 1


def test_as_many_trials_run_at_once_as_there_are_slots():
    both = threading.Barrier(2)

    class Meeting(Scripted):
        def run(self, request):
            both.wait(timeout=60)
            return super().run(request)

    with SlotPool([Meeting(Failed(message="a")), Meeting(Failed(message="b"))]) as pool:
        futures = [pool.submit(REQUEST) for _ in range(2)]
        assert sorted(future.result().message for future in futures) == ["a", "b"]


def test_after_close_a_request_is_answered_and_not_run():
    pool = SlotPool([Scripted(Failed(message="ran"))])
    pool.close()
    assert pool.submit(REQUEST).result() == Crashed(message="stopped: the executor was closed")
