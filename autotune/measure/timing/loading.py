"""Speed of the loader by itself, by number of workers, and what they take of the host's memory."""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import NamedTuple

import torch

from ...errors import Caught
from ...task import Task
from ...techniques import LoaderSpec
from ...techniques.batch import Batch
from ...training.apply_plan import build_loader
from ..feed import Feed
from ..processes import beside_bytes

_SHARE_S = 0.5
_GAIN = 1.1
_NEGLIGIBLE = 0.02


class LoaderRates(NamedTuple):
    """Of the loader alone."""

    by_workers: dict[int, float] = {}
    """Samples per second, by number of workers."""
    bytes_by_workers: dict[int, int] = {}
    """What these took of the host's memory."""
    notes: tuple[str, ...] = ()
    """What the user should hear."""


def loader_rates(
    task: Task, spec: LoaderSpec, batch: Batch, most_workers: int, step_samples_per_s: float
) -> LoaderRates:
    """Samples per second of the loader alone, by number of workers: 0, 1, 2, 4 and so on.

    Half a second each beyond the first batch; a count that adds less than 10 % is the last. Where loading in the
    training process takes less than 2 % of what a CPU needs for the step, workers are not tried: they have nothing to
    win. A CUDA device may be much faster at other batch sizes than at the one step here: there they always are. A count
    whose workers fail, as those do that want CUDA in a forked process, is the last too, and is not among the rates.

    Args:
        task: for the sampler.
        spec: what the user's loader is built from.
        batch: what is loaded at a time.
        most_workers: as many as there are processors; 1 for a stream that does not split itself, 0 where
            batches are on the device as they are collated.
        step_samples_per_s: of forward and backward alone.

    Raises:
        Exception: whatever the user's dataset raises in this process.
    """
    alone = dataclasses.replace(spec, device=torch.device("cpu")) if most_workers else spec
    rates, taken = {0: _rate(task, alone, batch, 0)[0]}, dict[int, int]()
    if spec.device.type == "cpu" and step_samples_per_s < _NEGLIGIBLE * rates[0]:
        return LoaderRates(rates)
    count, best = 1, rates[0]
    while count <= most_workers:
        with Caught() as raised:
            rates[count], taken[count] = _rate(task, alone, batch, count)
        if raised.error is not None:
            return LoaderRates(rates, taken, (_note(count, raised.error),))
        if rates[count] < _GAIN * best and count > 1:
            break  # one worker loads no faster than this process, but leaves it free
        best = max(best, rates[count])
        count *= 2
    return LoaderRates(rates, taken)


def _note(num_workers: int, error: BaseException) -> str:
    """The last line is the user's own: those before it are torch's, and the worker's traceback."""
    *_, said = str(error).strip().splitlines() or [""]
    which = "1 loader worker is" if num_workers == 1 else f"{num_workers} loader workers are"
    return f"{which} not tried, nor are more: the data cannot be loaded so ({type(error).__name__}: {said})"


def _rate(task: Task, spec: LoaderSpec, batch: Batch, num_workers: int) -> tuple[float, int]:
    """Samples per second of the loader, once the batches that its workers had ready are used up; and their bytes.

    Workers stay between epochs. An epoch's start counts, so that a dataset of few batches is measured too.
    """
    persistent = {"persistent_workers": True} if num_workers else {}
    options = {**spec.options, "num_workers": num_workers, **persistent}
    feed, others = Feed(build_loader(task, dataclasses.replace(spec, options=options), batch)), beside_bytes()
    feed.open()
    began_s = perf_counter()
    for _ in range(2 * num_workers * (options.get("prefetch_factor") or 2)):
        feed.next()
        if perf_counter() - began_s > _SHARE_S:
            break
    num_samples, began_s = 0, perf_counter()
    while perf_counter() - began_s < _SHARE_S:
        num_samples += feed.next()[1].num_samples
    return num_samples / (perf_counter() - began_s), max(beside_bytes() - others, 0) if num_workers else 0
