"""A script trains the same with a plan as without, or is refused in words: the worst pairs of
``benchmarks.same_training``, each in processes of its own, seen from outside."""

from __future__ import annotations

import functools

import pytest

from benchmarks.same_training.plans import pairs_of
from benchmarks.same_training.run import attempt, train
from benchmarks.same_training.styles import STYLES
from benchmarks.same_training.task import task_of

STYLE = {style.name: style for style in STYLES}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A script's training without a plan, once for all that is held against it."""
    return functools.cache(lambda name: train(STYLE[name], None, tmp_path_factory.mktemp("cache")))


@pytest.fixture
def told(plain, tmp_path):
    """How a pair of a script and a technique ends."""

    def told(name, technique):
        (pair,) = (pair for pair in pairs_of(STYLE[name]) if pair.technique == technique)
        return attempt(pair, plain(name), task_of(STYLE[name]) if STYLE[name].has_task else None, tmp_path)

    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "technique"),
    [
        ("dropout", "layers"),
        ("epoch_schedule", "bf16"),
        ("bptt", "checkpointing"),
        ("accumulation", "batch"),
        ("linear_probe", "layers"),
        ("traced_first", "layers"),
        ("fixmatch", "foreach"),
        ("augmented", "no workers"),
    ],
)
def test_the_training_is_the_scripts_own(name, technique, told):
    assert told(name, technique) == "agrees"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "technique"),
    [
        ("infinite_loader", "cache"),
        ("resampled_negatives", "cache"),
        ("own_reference", "workers that stay"),
        ("accumulation_undivided", "batch"),
    ],
)
def test_another_training_is_refused_or_left_alone(name, technique, told):
    """Frozen augmentation, an epoch that is not drawn anew, a gradient that is twice as large."""
    assert not told(name, technique).startswith("FAILED")
