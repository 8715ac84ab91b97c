"""Processors of trials that run at once on the GPUs of one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from autotune.workers import placement
from autotune.workers.client import ForkServer
from autotune.workers.placement import _near, _shares


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Mapping[int, str]], None]:
    """What the kernel says of the processors: with which others each is one core."""

    def has(siblings: Mapping[int, str]) -> None:
        monkeypatch.setattr(placement, "_TOPOLOGY", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings))
        for number, text in siblings.items():
            (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
            (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{text}\n")

    return has


EIGHT = frozenset(range(8))


def test_a_core_is_of_one_trial(cores):
    """Two threads of one core are two processors: 0 and 4 here. Of four cores each of two trials has two."""
    cores({number: f"{number % 4},{number % 4 + 4}" for number in range(8)})
    assert _shares([EIGHT, EIGHT]) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_three_trials_share_four_cores(cores):
    cores({number: str(number) for number in range(4)})
    assert _shares([frozenset(range(4))] * 3) == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize("near", [[EIGHT], [frozenset({0, 1})] * 3])
def test_one_trial_has_all_and_too_few_cores_are_not_shared(cores, near):
    cores({number: str(number) for number in range(8)})
    assert _shares(near) == [()] * len(near)


def test_each_gpu_has_those_of_its_side(cores):
    """Of a machine with two sockets; a set that only overlaps another is none of a side."""
    cores({number: str(number) for number in range(8)})
    low, high = frozenset(range(4)), frozenset(range(4, 8))
    assert _shares([low, high, low]) == [(0, 1), (4, 5, 6, 7), (2, 3)]
    assert _shares([low, EIGHT]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_the_driver_says_which_side_a_gpu_is_on(cores, monkeypatch):
    """In words of 64 bits; where it says nothing, or what this process may not use, all are near."""
    cores({number: str(number) for number in (1, 2, 65)})
    for words, near in (([0b110, 0], {1, 2}), ([0, 0b10], {65}), ([1, 0], {1, 2, 65}), (None, {1, 2, 65})):
        monkeypatch.setattr(placement, "ask", lambda question, words=words: words)
        assert _near("GPU-1") == near


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor alone")
def test_a_slots_server_runs_on_its_processors_and_the_driver_on_all():
    before = os.sched_getaffinity(0)
    server = ForkServer(dict(os.environ), processors=[max(before)])
    try:
        assert os.sched_getaffinity(server.pid) == {max(before)}
        assert os.sched_getaffinity(0) == before
    finally:
        server.close()
