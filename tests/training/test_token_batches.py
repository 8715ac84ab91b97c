"""Micro-batches of so many tokens: an optimizer step sees the samples that it would see otherwise."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from line_task import Stream, line, step_gradients, training_of
from torch.nn.utils.rnn import pad_sequence

import autotune
from autotune.data.cut import Cut
from autotune.data.token_batches import TokenCut, even_groups, extremes, grouped
from autotune.errors import PlanError, TaskError
from autotune.plan import Plan
from autotune.ranks import Ranks
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading

LENGTHS = [9, 3, 5, 2, 8, 4, 1, 7, 6, 3, 2, 9, 1]
STEP = Batch(micro=1, accumulate=5, tokens=16)


def words(lengths=LENGTHS):
    """Sample n is n + 1, as often as it is long."""
    return [torch.full((length,), float(number + 1)) for number, length in enumerate(lengths)]


def pad(samples):
    return pad_sequence(samples, batch_first=True)


def sum_over_tokens(model, batch):
    return model(batch).sum(), (batch > 0).sum()


def job(lengths=LENGTHS, **pieces):
    return line(words(lengths), collate=pad, compute_loss=sum_over_tokens, **pieces)


def samples_of(batch):
    return [int(row[0]) - 1 for row in batch]


def test_a_step_is_cut_by_hand():
    """In 32 tokens, and 2 for each group: 20 alone, 6 + 5 as two of 6, three of 2. That is 38 and 6. With 6 and 5 apart
    it would be 37 and 8; in the fewest groups, of which 5 + 2 + 2 + 2 is one of 20, 46 and 6."""
    lengths = [6, 2, 20, 2, 5, 2]
    assert grouped(range(6), lengths, 32) == [[2], [0, 4], [1, 3, 5]]


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_takes_less(seed):
    """Of all cuts of seven samples in their order."""
    rng = random.Random(seed)
    lengths = sorted((rng.randint(1, 9) for _ in range(7)), reverse=True)

    def takes(groups):
        return sum(lengths[group[0]] * len(group) + 1 for group in groups)

    def cuts(left):
        yield from ([left[:1], *rest] for rest in cuts(left[1:])) if left else [[]]
        for num in range(2, len(left) + 1):
            if lengths[left[0]] * num <= 16:
                yield from ([left[:num], *rest] for rest in cuts(left[num:]))

    found = grouped(range(7), lengths, 16)
    assert list(itertools.chain(*found)) == list(range(7))
    assert takes(found) == min(map(takes, cuts(list(range(7)))))


def test_a_sample_that_is_longer_by_itself_is_a_batch_of_its_own():
    assert grouped([0, 1], [20, 5], 16) == [[0], [1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_step_has_the_samples_that_it_would_have_otherwise(workers):
    """Thirteen samples in steps of five: three steps, of which the last has three."""
    training = training_of(job(), batch=STEP, data_loading=DataLoading(num_workers=workers))
    steps = [[]]
    for batch in training.loader:
        position = training.loader.positions.take(batch)
        assert batch.shape[0] == position.num_samples
        assert batch.numel() <= 16
        steps[-1] += samples_of(batch)
        if position.ends_step:
            assert position.step_samples == len(steps[-1])
            steps.append([])
    assert [sorted(step) for step in steps] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12], []]


def test_a_shuffled_epoch_has_every_sample_once_and_the_next_another_order():
    training = training_of(job(build_sampler=None), batch=STEP)
    epochs = [[number for batch in training.loader for number in samples_of(batch)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(13))
    assert epochs[0] != epochs[1]


def test_gradients_are_those_of_the_whole_step():
    """Of a mean over tokens: sum of value × length over sum of lengths, however the step is cut."""
    expected = []
    for start in (0, 5, 10):
        step = range(start, min(start + 5, 13))
        expected.append(sum((n + 1) * LENGTHS[n] for n in step) / sum(LENGTHS[n] for n in step))
    assert step_gradients(training_of(job(), batch=STEP)) == pytest.approx(expected)
    assert step_gradients(training_of(job(), batch=Batch(micro=5))) == pytest.approx(expected)


def test_a_mean_over_samples_is_weighted_by_samples():
    means = line(words(), collate=pad, compute_loss=lambda model, batch: model(batch[:, 0]).mean())
    assert step_gradients(training_of(means, batch=STEP)) == pytest.approx([3.0, 8.0, 12.0])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_each_step_in_equal_numbers_of_micro_batches(size):
    """Nobody reads a sample twice, and the last step of three samples serves up to three ranks."""
    cuts = [
        TokenCut(range(13), Batch(micro=1, accumulate=5, tokens=16), False, LENGTHS, Ranks(rank, size, ()))
        for rank in range(size)
    ]
    found = [[(piece, cut.pieces.places.popleft()) for piece in iter(cut)] for cut in cuts]
    assert sorted(n for rows in found for piece, _ in rows for n in piece) == list(range(13))
    ends = [[place.ends_step for _, place in rows] for rows in found]
    assert ends[0] == ends[-1]
    assert sum(ends[0]) == 3


def test_groups_are_halved_until_all_ranks_have_as_many():
    lengths = [5, 4, 3, 3, 2, 2, 1]
    assert even_groups([[1], [2, 3, 4, 5], [6]], lengths, 16, 2) == [[1], [2, 3], [4, 5], [6]]


def test_groups_of_too_few_samples_are_joined_where_they_fit():
    """Five samples cannot be six groups, and of four groups two are joined: 3 × 3 tokens, not 2 × 5."""
    lengths = [9, 5, 3, 2, 2]
    assert even_groups([[0], [1], [2], [3, 4]], lengths, 16, 3) == [[0], [1], [2, 3, 4]]
    assert even_groups([[0], [1], [2], [3, 4]], lengths, 8, 3) == [[0], [1], [2]]
    assert even_groups([[0]], lengths, 16, 2) == []


def test_an_epoch_goes_on_in_the_middle_of_a_step():
    """Saved after each micro-batch; the rest is what would have come."""

    def build():
        return training_of(job(build_sampler=None), batch=STEP)

    whole = [batch.tolist() for batch in build().loader]
    for place in range(1, len(whole)):
        begun, resumed = build(), build()
        for batch in itertools.islice(begun.loader, place):
            begun.step(batch)
        resumed.load_state_dict(begun.state_dict())
        assert [batch.tolist() for batch in resumed.loader] == whole[place:]


@pytest.mark.parametrize("seed", range(4))
def test_no_batch_is_larger_than_the_largest(seed):
    """Over all orders of six samples in steps of four: samples, tokens, and tokens times length."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(6)]
    batch = Batch(micro=1, accumulate=4, tokens=14)
    seen = set()
    for order in itertools.permutations(range(6)):
        cut = TokenCut(order, batch, False, lengths)
        seen |= {(len(piece), max(lengths[n] for n in piece)) for piece in iter(cut)}
    found = {(len(piece), max(lengths[n] for n in piece)) for piece in extremes(lengths, batch)}
    for size in (lambda n, _: n, lambda n, long: n * long, lambda n, long: n * long * long):
        assert max(itertools.starmap(size, found)) >= max(itertools.starmap(size, seen))


def test_the_largest_batch_is_made_of_samples_that_are_about_as_long():
    """Four of 10 in 40 tokens, if a step has them; and eight of 5."""
    lengths = [10] * 4 + [5] * 8 + [1] * 4
    batch = Batch(micro=1, accumulate=8, tokens=40)
    assert [[lengths[n] for n in group] for group in extremes(lengths, batch)] == [[10] * 4, [5] * 8]
    assert grouped(range(8), lengths, 40)[0] == [0, 1, 2, 3]
    assert grouped(range(4, 12), lengths, 40) == [[*range(4, 12)]]


def test_it_does_not_say_how_many_batches_an_epoch_has():
    loader = training_of(job(), batch=STEP).loader
    with pytest.raises(TypeError, match="3 optimizer steps"):
        len(loader)
    assert loader.num_samples == 13


def test_samples_without_one_length_and_streams_are_refused():
    images = [torch.ones(2, 3 + n) for n in range(4)]
    with pytest.raises(PlanError, match="length\\(sample\\)"):
        training_of(line(images, collate=lambda rows: rows[0][None]), batch=STEP)
    with pytest.raises(PlanError, match=r"settings\.batch\.tokens: an iterable"):
        training_of(line(Stream(words()), collate=pad), batch=STEP)


def test_a_length_that_lies_is_named_before_the_first_batch():
    with pytest.raises(TaskError, match="collates to 9 elements"):
        training_of(job(length=lambda sample: 1), batch=STEP)


def test_without_tokens_nothing_is_read():
    def length(sample):
        raise AssertionError

    assert type(training_of(job(length=length), batch=Batch(micro=5)).loader._cut) is Cut


def test_where_memory_runs_out_every_batch_is_halved():
    """Eight samples of 2 in passes of 16 tokens; the device has room for 8: two passes of four."""
    sizes = []

    def compute_loss(model, batch):
        sizes.append(batch.numel())
        if batch.numel() > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(batch).sum(), (batch > 0).sum()

    training = autotune.apply(
        Plan(settings=Settings(batch=Batch(micro=1, accumulate=8, tokens=16))),
        line(words([2] * 8), collate=pad, compute_loss=compute_loss, length=len),
        halve_when_out_of_memory=True,
    )
    (batch,) = training.loader
    with pytest.warns(UserWarning, match="takes 8 tokens in place of 16 tokens, and a micro-batch 2 passes"):
        assert training.step(batch).stepped
    assert sizes == [16, 8, 8]
    assert training.batch == Batch(micro=1, accumulate=8, tokens=8)
