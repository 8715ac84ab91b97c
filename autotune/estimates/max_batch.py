"""``estimate``: the largest micro-batch that fits, and what fills the memory, for one combination of techniques."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile

from ..measure.profiling.allocations import Trace
from ..measure.profiling.rows import peak_moment
from ..task import Task
from ..techniques import Settings
from .checkpointing.block_choice import Places
from .checkpointing.process_choice import ProcessChoice
from .memory_model import largest
from .predictor import Predictor
from .tracing.fake_step import Untraceable
from .types import Estimate, EstimateOptions, Fill, Fit

_MOST_KEPT = 4
"""Predictors kept at a time. Each holds its traces, and the task's model where it was probed."""
_MOST_GROUPS = 12
"""Groups of modules; beyond so many, the members of a list are put together."""


def estimate(task: Task, options: EstimateOptions) -> Estimate:
    """Tell what a combination of techniques needs at any micro-batch.

    Args:
        task: what it is applied to.
        options: the combination, the device that is planned for, and its limit.

    Raises:
        Exception: whatever the user's code raises.
    """
    return _estimate(Predictor(task, options), task, options)


def estimate_each(task: Task, options: EstimateOptions) -> tuple[Estimate, ...]:
    """The same for the device that is planned for, and for each of the others, by one set of traces."""
    prediction = Predictor(task, options)
    others = ((prediction.on(room), options.model_copy(update=dict(room))) for room in options.others)
    return tuple(_estimate(one, task, asked) for one, asked in [(prediction, options), *others])


def _estimate(prediction: Predictor, task: Task, options: EstimateOptions) -> Estimate:
    began_s = time.perf_counter()
    reference = prediction.fit(options.own_micro)
    best = surely = smallest = None
    if options.limit_bytes is not None:
        limit, most = options.limit_bytes, options.most
        best = _largest(prediction, limit, most, lambda fit: fit.process.value)
        surely = _largest(prediction, limit, most, lambda fit: fit.process.high) if best else None
        smallest = None if best else prediction.smallest()
    shown = best or smallest or reference
    found = prediction.memory_model(shown.micro)
    trace = found.memory_model.at(shown.micro)
    moment = peak_moment(trace)
    return Estimate(
        how=found.how,
        reason=found.reason,
        base_bytes=prediction.base_bytes,
        largest=best,
        smallest=smallest,
        surely=surely.micro if surely else None,
        reference=reference,
        blocks=_blocks(prediction, task, options),
        phase=moment.phase,
        module=moment.module,
        fills=tuple(fills_of(trace)),
        seconds=time.perf_counter() - began_s,
    )


def _blocks(prediction: Predictor, task: Task, options: EstimateOptions) -> tuple[int, ...] | None:
    """The blocks to recompute for the job's own batch."""
    micro, settings = options.own_micro, options.settings
    if not options.choose_blocks or options.limit_bytes is None:
        return None
    if prediction.fit(micro).process.value <= options.limit_bytes:
        return None

    @lru_cache(_MOST_KEPT)
    def predictor(other: Settings) -> Predictor:
        if other == settings:
            return prediction
        return Predictor(
            task, options.model_copy(update={"settings": other}), prediction.base_bytes, prediction.memory_models
        )

    places = Places.of(settings.on_task(task))
    choice = ProcessChoice(places, predictor)
    try:
        chosen = choice.choose(settings, micro, options.limit_bytes, lambda process, _: process.value)
    except Untraceable:
        return None
    return None if chosen is None else chosen.checkpointing.numbers(places.num_blocks) or None


def _largest(prediction: Predictor, limit_bytes: int, most: int, takes: Callable[[Fit], int]) -> Fit | None:
    """The largest micro-batch that fits. From the job's own batch on, it is an optimizer step by itself; smaller ones
    are accumulated, and the gradients of earlier micro-batches come on top."""

    def does(micro: int) -> bool:
        may_fit = prediction.goes(micro) and prediction.may_fit(micro, limit_bytes)
        fit = prediction.fit_or_none(micro) if may_fit else None
        return fit is not None and takes(fit) <= limit_bytes

    whole = prediction.whole
    if whole <= most and does(whole):
        return prediction.fit(whole + (largest(lambda more: does(whole + more), most - whole) or 0))
    micro = largest(does, min(most, whole - 1))
    return None if micro is None else prediction.fit(micro)


def fills_of(trace: Trace) -> Iterable[Fill]:
    """Bytes alive at the peak, by kind, and activations by module too."""
    alive = list(trace.alive_at(trace.peak_moment()))
    groups = _groups({one.module for one in alive if one.kind == "activation"})
    found: Counter[tuple[str, str]] = Counter()
    for one in alive:
        kind: str = "scratch" if one.is_scratch else one.kind
        found[kind, groups[one.module] if kind == "activation" else ""] += one.num_bytes
    for (served, module), num_bytes in found.most_common():
        if num_bytes:
            yield Fill.model_validate({"kind": served, "module": module, "num_bytes": num_bytes})


def _groups(modules: Iterable[str]) -> dict[str, str]:
    """The group of each module: its place in a list (``h.3`` for ``h.3.attn``), or the whole list (``h.0-11``) where
    there are many."""
    found = {module: _down_to_number(module) for module in modules}
    if len(set(found.values())) <= _MOST_GROUPS:
        return found
    members: dict[str, set[int]] = {}
    for name in found.values():
        head, _, last = name.rpartition(".")
        if last.isdigit():
            members.setdefault(head, set()).add(int(last))
    for module, name in found.items():
        head, _, last = name.rpartition(".")
        numbers = members.get(head, set()) if last.isdigit() else set()
        if len(numbers) > 1:
            found[module] = f"{head}.{min(numbers)}-{max(numbers)}".lstrip(".")
    return found


def _down_to_number(module: str) -> str:
    parts = module.split(".")
    before = list(takewhile(lambda part: not part.isdigit(), parts))
    return ".".join(parts[: len(before) + 1])
