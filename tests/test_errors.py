"""``Caught``: what is raised by a user's code, kept or let go."""

from __future__ import annotations

import weakref

import pytest

from autotune.errors import Caught


class Large:
    """Stands for a model in the frame of what fails."""


def fail(seen: list[weakref.ref[Large]]) -> None:
    held = Large()
    seen.append(weakref.ref(held))
    raise ValueError


def test_what_is_raised_is_kept_and_what_follows_runs():
    with Caught() as raised:
        raise ValueError("no such sample")
    assert isinstance(raised.error, ValueError)


def test_nothing_is_kept_where_nothing_is_raised():
    with Caught() as raised:
        pass
    assert raised.error is None


def test_what_is_named_goes_up():
    with pytest.raises(MemoryError), Caught(MemoryError):
        raise MemoryError


def test_the_end_of_the_process_goes_up_unless_it_is_asked_for():
    with pytest.raises(SystemExit), Caught():
        raise SystemExit(3)
    with Caught(of=BaseException) as raised:
        raise SystemExit(3)
    assert isinstance(raised.error, SystemExit)


def test_what_lay_in_the_frames_of_the_error_is_free_at_once():
    seen: list[weakref.ref[Large]] = []
    with Caught() as raised:
        fail(seen)
    assert seen[0]() is None
    assert raised.error is not None


def test_with_its_frames_an_error_holds_them_until_it_is_taken():
    seen: list[weakref.ref[Large]] = []
    with Caught(frames=True) as raised:
        fail(seen)
    assert seen[0]() is not None
    raised.take()
    assert seen[0]() is None
