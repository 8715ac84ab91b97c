"""Speed of the loader by itself, by number of workers."""

from __future__ import annotations

import dataclasses
from time import perf_counter

import torch

from ...task import Task
from ...techniques import LoaderSpec
from ...techniques.batch import Batch
from ...training.apply_plan import build_loader
from ..feed import Feed

_SHARE_S = 0.5
_GAIN = 1.1
_NEGLIGIBLE = 0.02


def loader_rates(
    task: Task, spec: LoaderSpec, batch: Batch, most_workers: int, step_samples_per_s: float
) -> dict[int, float]:
    """Samples per second of the loader alone, by number of workers: 0, 1, 2, 4 and so on.

    Half a second each beyond the first batch; a count that adds less than 10 % is the last. Where loading in the
    training process takes less than 2 % of what a CPU needs for the step, workers are not tried: they have nothing to
    win. A CUDA device may be much faster at other batch sizes than at the one step here: there they always are.

    Args:
        task: for the sampler.
        spec: what the user's loader is built from.
        batch: what is loaded at a time.
        most_workers: as many as there are processors; 1 for a stream that does not split itself.
        step_samples_per_s: of forward and backward alone.

    Raises:
        Exception: whatever the user's dataset raises, in a worker too.
    """
    rates = {0: _rate(task, spec, batch, 0)}
    if spec.device.type == "cpu" and step_samples_per_s < _NEGLIGIBLE * rates[0]:
        return rates
    count, best = 1, rates[0]
    while count <= most_workers:
        rates[count] = _rate(task, spec, batch, count)
        if rates[count] < _GAIN * best and count > 1:
            break  # one worker loads no faster than this process, but leaves it free
        best = max(best, rates[count])
        count *= 2
    return rates


def _rate(task: Task, spec: LoaderSpec, batch: Batch, num_workers: int) -> float:
    """Samples per second of the loader, once the batches that its workers had ready are used up.

    Workers stay between epochs. An epoch's start counts, so that a dataset of few batches is measured too.
    """
    persistent = {"persistent_workers": True} if num_workers else {}
    options = {**spec.options, "num_workers": num_workers, **persistent}
    alone = dataclasses.replace(spec, options=options, device=torch.device("cpu"))
    feed = Feed(build_loader(task, alone, batch))
    feed.open()
    began_s = perf_counter()
    for _ in range(2 * num_workers * (options.get("prefetch_factor") or 2)):
        feed.next()
        if perf_counter() - began_s > _SHARE_S:
            break
    num_samples, began_s = 0, perf_counter()
    while perf_counter() - began_s < _SHARE_S:
        num_samples += feed.next()[1].num_samples
    return num_samples / (perf_counter() - began_s)
