"""Leaks: growth that goes on, told from caches that fill and from noise."""

import pytest
import torch
from fresh_process import in_fresh_process
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from autotune.measure import Measurement, MeasureOptions
from autotune.measure.checks.leak import LeakWatch
from autotune.measure.life.growth import growth
from autotune.measure.run import measure
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.training.apply_plan import apply

pytestmark = pytest.mark.alone

MIB = 2**20
KIB = 2**10
ANY_PRECISION = 10.0  # ten windows are enough


def _noise(size):
    return torch.randint(0, 300 * KIB, (size,), generator=torch.Generator().manual_seed(0)).tolist()


def test_a_steady_gain_is_found_with_its_size():
    samples = [(step, 500 * MIB + step * 100 * KIB) for step in range(40)]
    assert growth(samples, 32 * KIB) == 100 * KIB


def test_a_steady_gain_is_found_through_noise():
    samples = [(step, 500 * MIB + step * 100 * KIB + noise) for step, noise in enumerate(_noise(60))]
    assert abs(growth(samples, 32 * KIB) / (100 * KIB) - 1) < 0.1


def test_noise_is_no_gain():
    assert growth([(step, 500 * MIB + noise) for step, noise in enumerate(_noise(60))], 0) is None


def test_a_cache_that_has_filled_is_no_gain():
    samples = [(step, 500 * MIB + min(step, 12) * MIB) for step in range(40)]
    assert growth(samples, 32 * KIB) is None


def test_growth_that_slows_down_settles():
    samples = [(step, 500 * MIB + round(64 * MIB * (1 - 0.85**step))) for step in range(40)]
    assert growth(samples, 32 * KIB) is None


def test_fewer_than_thirty_steps_are_no_evidence():
    assert growth([(step, step * MIB) for step in range(29)], 32 * KIB) is None
    assert growth([(step, step * MIB) for step in range(30)], 32 * KIB) == MIB


def test_thirty_steps_seen_only_a_few_times_are_no_evidence():
    assert growth([(step, step * MIB) for step in (0, 10, 20, 30)], 32 * KIB) is None


class _Grows:
    """Takes a MiB more at each look."""

    def __init__(self):
        self._bytes = 0

    def live_bytes(self):
        self._bytes += MIB
        return self._bytes


def test_a_trial_that_came_to_twenty_steps_is_suspected():
    watch = LeakWatch(_Grows(), "cpu")
    for step in range(20):
        watch.note(step)
    assert watch.suspected(after=10) == MIB
    assert not watch.is_decided


def test_a_gain_below_the_threshold_is_noise():
    assert growth([(step, step * 31 * KIB) for step in range(40)], 32 * KIB) is None


def _model():
    return nn.Linear(64, 10)


def _vectors():
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :10].argmax(1))


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Caching(Dataset):
    """Keeps 64 KiB of each sample that it has read."""

    def __init__(self):
        self._kept = {}

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if index not in self._kept:
            self._kept[index] = torch.ones(64 * KIB)
        return self._kept[index][:64], index % 10


_kept = []


def _keeping(model, batch):
    _kept.append(torch.ones(MIB // 4))
    return _loss(model, batch)


TASKS = {
    "plain": Task(_model, _vectors, _loss, batch_size=32),
    "leaking": Task(_model, _vectors, _keeping, batch_size=32),
    "caching": Task(_model, Caching, _loss, batch_size=8),
}


def measurement_of(name: str) -> Measurement:
    training = apply(Plan(settings=Settings()), TASKS[name])
    options = MeasureOptions(trial_time_s=30, precision=ANY_PRECISION, parity_batch=8)
    return measure(training, TASKS[name], options)


def test_a_task_that_keeps_a_megabyte_each_step_leaks_it():
    found = in_fresh_process(measurement_of, "leaking")
    assert abs(found.leak_bytes_per_step / MIB - 1) < 0.1
    assert found.warnings == ()


def test_a_dataset_that_keeps_what_it_reads_is_no_leak_but_is_said():
    found = in_fresh_process(measurement_of, "caching")
    assert found.leak_bytes_per_step is None
    assert any("a dataset that keeps what it has read" in warning for warning in found.warnings)


def test_a_plain_task_leaks_nothing():
    assert in_fresh_process(measurement_of, "plain").leak_bytes_per_step is None
