"""The largest batch that samples can make, by their lengths alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from line_task import Stream, line, training_of
from torch.nn.utils.rnn import pad_sequence

from autotune.data.lengths import read_sizes
from autotune.errors import TaskError
from autotune.measure import MeasureOptions
from autotune.measure.lengths import as_runs, find_lengths, longest_batches, stretched
from autotune.measure.run import measure
from autotune.measure.tail import RISK, bound
from autotune.techniques.batch import Batch
from autotune.techniques.support.facts import Lengths, Longest


def pad(samples):
    return pad_sequence(samples, batch_first=True)


def words(lengths):
    return [torch.ones(length) for length in lengths]


def pairs(sizes):
    return [(torch.ones(source), torch.ones(target)) for source, target in sizes]


def pad_pairs(samples):
    sources, targets = zip(*samples, strict=True)
    return pad(list(sources)), pad(list(targets))


def found(task, **options):
    return find_lengths(task, task.build_dataset(), deterministic=True, **options)


def padded(batch):
    return [tensor.numel() for tensor in batch] if isinstance(batch, tuple) else [batch.numel()]


@pytest.mark.parametrize("micro", range(1, 6))
def test_the_largest_batch_is_that_of_brute_force(micro):
    lengths = [3, 9, 2, 7, 9]
    task = line(words(lengths), collate=pad)
    training = training_of(task, batch=Batch(micro=micro))
    made = [padded(batch) for batch, _ in longest_batches(training.loader, found(task))]
    assert made == [[max(micro * max(chosen) for chosen in itertools.combinations(lengths, micro))]]


@pytest.mark.parametrize("micro", [2, 3, 4])
def test_of_two_lengths_one_batch_has_the_longest_of_both(micro):
    """A source of 9 and a target of 8, which no sample has both."""
    sizes = [(9, 1), (2, 8), (3, 3), (1, 2), (4, 4)]
    task = line(pairs(sizes), collate=pad_pairs)
    training = training_of(task, batch=Batch(micro=micro))
    ((batch, num_samples),) = longest_batches(training.loader, found(task))
    assert (padded(batch), num_samples) == ([9 * micro, 8 * micro], micro)


def test_one_sample_at_a_time_is_tried_as_the_longest_of_each_and_of_both():
    task = line(pairs([(9, 1), (2, 8), (6, 6)]), collate=pad_pairs)
    training = training_of(task, batch=Batch(micro=1))
    made = sorted(padded(batch) for batch, _ in longest_batches(training.loader, found(task)))
    assert made == [[2, 8], [6, 6], [9, 1]]


def test_a_trial_measures_it_though_no_epoch_may_have_it():
    """Ten samples of 50 among 1,000, of which 8 are a batch: 400 tokens, which a shuffle hardly ever has."""
    seen = []

    def compute_loss(model, batch):
        seen.append(batch.numel())
        return model(batch).mean()

    lengths = [2] * 990 + [50] * 10
    task = dataclasses.replace(line(words(lengths), collate=pad), compute_loss=compute_loss)
    known = found(task)
    options = MeasureOptions(trial_time_s=0.1, parity_batch=None, lengths=known)
    peak = measure(training_of(task, batch=Batch(micro=8)), task, options).peak
    assert seen[0] == 400
    assert peak.longest == Longest(read=1000, samples=1000)
    assert peak.largest_of is None


def test_only_so_many_samples_are_read_as_there_is_time_for():
    class Slow(list):
        num_read = 0

        def __getitem__(self, place):
            self.num_read += 1
            return super().__getitem__(place)

    dataset = Slow(words([3, 4] * 500))
    sizes = read_sizes(dataset, pad, None, most_s=0.0)
    assert (len(sizes.places), sizes.num_samples, dataset.num_read) == (1, 1000, 2)
    assert not sizes.is_whole


def test_what_reads_and_draws_leaves_random_numbers_as_they_were():
    class Noisy(list):
        def __getitem__(self, place):
            return super().__getitem__(place) + torch.randn(1) + random.random()

    before = torch.get_rng_state(), random.getstate()
    read_sizes(Noisy(words([3, 4])), pad, None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_samples_that_are_alike_or_cannot_be_collated_alone_have_no_lengths():
    assert found(line(words([4, 4]))) is None
    assert found(line(words([4, 5]), collate=lambda samples: torch.stack([samples[0], samples[1]]))) is None


def test_images_of_other_sizes_have_lengths_but_no_tokens():
    images = [torch.ones(3, 8, 5), torch.ones(3, 4, 9)]
    known = found(line(images, collate=lambda rows: rows[0][None]))
    assert not known.in_tokens
    assert known.places[:2] == ((1, 0), (0, 1)) or known.places[:2] == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (lambda sample: 1 / 0, "length raised ZeroDivisionError: division by zero, for sample"),
        (lambda sample: None, "length returned None for sample"),
        (lambda sample: -1, "length returned -1 for sample"),
        (lambda sample: math.nan, "length returned nan for sample"),
        (lambda sample: 100 - len(sample), "is no longer than sample"),
        (lambda sample: 7, "is no longer than sample"),
    ],
)
def test_a_length_that_raises_or_lies_is_named(length, said):
    with pytest.raises(TaskError, match=said):
        found(line(words([3, 9, 2, 7]), collate=pad, length=length))


def test_a_length_in_other_units_is_true():
    known = found(line(words([30, 90, 20]), collate=pad, length=lambda sample: torch.tensor(len(sample) / 10)))
    assert (known.longest, known.in_tokens, known.risk) == (9, True, 0.0)


def test_a_stream_has_no_lengths_and_takes_none():
    assert find_lengths(line(Stream(words([3, 4])), collate=pad), Stream(words([3, 4])), True) is None
    with pytest.raises(TaskError, match="length is for a map-style dataset"):
        find_lengths(line(Stream([]), length=len), Stream([]), True)


def test_what_is_read_again_with_another_length_is_a_sample_of_its_law():
    task = line(words(range(100, 400)), collate=pad)
    known = find_lengths(task, task.build_dataset(), deterministic=False)
    assert 1 < known.stretch < 2
    assert known.risk == RISK


def test_a_bound_holds_for_more_than_the_risk_says():
    """Exponential lengths, 2,000 of 20,000 read, 100 times: at most 5 of 100 longest are beyond, and it is no wild
    guess."""
    torch.manual_seed(0)
    beyond, times = 0, []
    for _ in range(100):
        lengths = (torch.empty(20_000).exponential_(1 / 50)).ceil()
        most, risk = bound(lengths[:2000], 18_000)
        beyond += bool(lengths[2000:].max() > most)
        times.append(most / float(lengths.max()))
        assert risk == RISK or most == 2 * lengths[:2000].max()
    assert beyond <= 5
    assert sorted(times)[50] < 2


def test_samples_that_were_cut_to_a_length_are_bounded_by_it():
    torch.manual_seed(0)
    lengths = (torch.randn(5000) * 0.8 + 4).exp().clamp(max=128).ceil()
    assert bound(lengths, 10**6)[0] == 128


def test_where_nothing_tells_the_risk_is_more():
    most, risk = bound(torch.tensor([3.0, 900.0, 4.0]), 10**6)
    assert most == 1800
    assert risk > RISK


def test_a_batch_is_stretched_where_another_is_of_another_size():
    """Words repeat; the number of samples, and what each has one of, stay."""
    batch = {"words": torch.tensor([[1, 2, 3], [4, 5, 6]]), "label": torch.tensor([0, 1])}
    other = {"words": torch.tensor([[1, 2], [4, 5]]), "label": torch.tensor([0, 1])}
    longer = stretched(batch, other, 1.5)
    assert longer["words"].tolist() == [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]]
    assert longer["label"].tolist() == [0, 1]


def test_what_the_model_cannot_take_is_a_risk_and_not_measured():
    rows = words([4, 8, 2])
    known = Lengths(read=3, samples=4, longest=8, places=((1, 0, 2),), in_tokens=True, stretch=1.5, risk=0.05)
    positions = torch.nn.Embedding(8, 2)

    def run(batch):
        return positions(torch.arange(batch.shape[1]))

    def batch_of(places):
        return pad([rows[place] for place in places])

    refused = as_runs(known, batch_of, run)
    assert (refused.stretch, refused.risk) == (1.0, 0.25)
    assert as_runs(known, batch_of, torch.sum) is known


def test_words_say_what_was_done():
    assert "7 samples, whose lengths were all read" in Longest(read=7, samples=7).words()
    sampled = Longest(read=7, samples=9, stretch=1.5, risk=0.05).words()
    assert "7 samples of 9" in sampled
    assert "1.50 times as long: a chance of 5.0% that another is longer" in sampled
    assert "of 22.2% that one unlike them all was not read" in sampled
    assert "not read" not in Longest(read=9, samples=9, risk=0.05).words()
