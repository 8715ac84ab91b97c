"""Shares of an optimizer step for unlike devices: by hand, and the best of all there are."""

from __future__ import annotations

import itertools
import random

import pytest

from autotune.searches.winner.shares import Timed, quickest, share_out


def finish(types, counts):
    return max(quickest(timed, count).seconds_for(count) for timed, count in zip(types, counts, strict=True))


@pytest.mark.parametrize(
    ("types", "num_samples", "ranks", "expected"),
    [
        ([[Timed(1, 1.0)], [Timed(1, 2.0)]], 9, (), [6, 3]),
        ([[Timed(4, 4.0)], [Timed(4, 4.0)]], 16, (), [8, 8]),
        ([[Timed(8, 4.0), Timed(1, 1.0)], [Timed(4, 8.0)]], 20, (), [16, 4]),
        ([[Timed(1, 1.0)], [Timed(1, 9.0)]], 4, (), [3, 1]),
        ([[Timed(1, 1.0)], [Timed(1, 2.0)]], 8, (1, 2), [4, 2]),
    ],
)
def test_all_finish_together(types, num_samples, ranks, expected):
    """Twice as fast, twice as many; like ones, as many; whole micro-batches; at least one sample; two slow ranks that
    take as many each."""
    assert share_out(types, num_samples, ranks) == expected


def test_no_other_shares_finish_sooner():
    """Random types, against every way to share."""
    draw = random.Random(7)
    for _ in range(60):
        types = [
            [
                Timed(micro, draw.uniform(0.5, 2) * micro**0.8)
                for micro in draw.sample([1, 2, 3, 4, 6], draw.randint(1, 3))
            ]
            for _ in range(draw.randint(1, 3))
        ]
        num_samples = draw.randint(len(types), 14)
        counts = share_out(types, num_samples)
        ways = itertools.product(range(1, num_samples + 1), repeat=len(types))
        assert sum(counts) == num_samples
        assert finish(types, counts) == min(finish(types, way) for way in ways if sum(way) == num_samples)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="1 samples cannot be shared by 2 ranks"):
        share_out([[Timed(1, 1.0)], [Timed(1, 1.0)]], 1)
    with pytest.raises(ValueError, match="as many each"):
        share_out([[Timed(1, 1.0)]], 5, [2])
