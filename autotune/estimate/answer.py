"""``estimate``: the largest batch that fits, and what fills the memory, of one combination of techniques."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, Protocol

from ..measure.allocations import Trace
from ..measure.rows import peak_moment
from ..plan import Plan
from ..task import Task
from .baseline import process_interval, resident_bytes
from .estimated import Estimate, EstimateOptions, Fill, Fit, Interval
from .law import largest, memory_law
from .probe import ProbedLaw, probed_law
from .rehearsal import Untraceable
from .segments import base_bytes, reserved_bytes

__all__ = ["estimate"]

_MOST_GROUPS = 12
"""Of modules, beyond which the members of a list are put together."""


class _Law(Protocol):
    def at(self, batch: int) -> Trace: ...

    def peak_bytes(self, batch: int) -> int: ...

    def interval(self, batch: int) -> Interval: ...


@dataclass(frozen=True)
class _Found:
    """A law for steps of one micro-batch or of several, and how it was had."""

    law: _Law
    how: Literal["traced", "probed"]
    reason: str | None


class _Prediction:
    """What a process is charged at any batch."""

    def __init__(self, plan: Plan, task: Task, options: EstimateOptions) -> None:
        self._plan, self._task, self._options = plan, task, options
        self._found: dict[bool, _Found] = {}
        self._fits: dict[int, Fit] = {}
        self.whole = options.reference_batch if options.is_held else 2
        """Samples from which on a micro-batch is thought of as a whole optimizer step."""
        self._is_cuda = options.target == "cuda"
        if self._is_cuda:
            self.base_bytes = base_bytes()
        else:  # a dataset that lies in memory is the process's too
            dataset = task.build_dataset()
            self._task = replace(task, build_dataset=lambda: dataset)
            self.base_bytes = resident_bytes(plan.settings)

    def law(self, micro: int) -> _Found:
        """Of a step with this micro-batch."""
        accumulates = self._passes(micro) > 1
        if accumulates not in self._found:
            self._found[accumulates] = self._find(accumulates)
        return self._found[accumulates]

    def fit(self, micro: int) -> Fit:
        """What a micro-batch takes."""
        if micro not in self._fits:
            law, passes = self.law(micro).law, self._passes(micro)
            tensors, process = law.interval(micro), self._process(law, micro)
            self._fits[micro] = Fit(micro=micro, accumulate=passes, tensors=tensors, process=process)
        return self._fits[micro]

    def fit_or_none(self, micro: int) -> Fit | None:
        """None where the training cannot run with this micro-batch: a BatchNorm wants more than one value."""
        try:
            return self.fit(micro)
        except Untraceable:
            return None

    def may_fit(self, micro: int, limit_bytes: int) -> bool:
        """Whether the tensors alone do, which is known sooner."""
        try:
            return self.base_bytes + self.law(micro).law.interval(micro).low <= limit_bytes
        except Untraceable:
            return False

    def smallest(self) -> Fit:
        """The smallest micro-batch that there is."""
        return self.fit_or_none(1) or self.fit(2)

    def _find(self, accumulates: bool) -> _Found:
        arguments = (self._plan, self._task, accumulates, self._options.largest_of or 1, self._options.target)
        try:
            return _Found(memory_law(*arguments), "traced", None)
        except Untraceable as error:
            return _Found(probed_law(*arguments), "probed", str(error))

    def _passes(self, micro: int) -> int:
        return -(-self._options.reference_batch // micro) if self._options.is_held else 1

    def _process(self, law: _Law, micro: int) -> Interval:
        tensors = law.interval(micro)
        at = law.at(micro)
        if not self._is_cuda:
            return process_interval(self.base_bytes, at, tensors, self._plan.settings)
        reserved = reserved_bytes(at) * (tensors.value / at.peak_bytes() if isinstance(law, ProbedLaw) else 1)
        shares = (tensors.low / tensors.value, 1.0, tensors.high / tensors.value)
        low, value, high = (self.base_bytes + round(reserved * share) for share in shares)
        return Interval(low=low, value=value, high=high)


def estimate(plan: Plan, task: Task, options: EstimateOptions) -> Estimate:
    """Say what ``apply(plan, task)`` needs at any micro-batch; the plan's own does not matter.

    Args:
        plan: its settings are the combination.
        task: what it is applied to.
        options: the device that is planned for, and its limit.

    Raises:
        Exception: whatever the user's code raises.
    """
    began_s = time.perf_counter()
    prediction = _Prediction(plan, task, options)
    reference = prediction.fit(min(options.reference_batch, options.most))
    best = surely = smallest = None
    if options.limit_bytes is not None:
        limit, most = options.limit_bytes, options.most
        best = _largest(prediction, limit, most, lambda fit: fit.process.value)
        surely = _largest(prediction, limit, most, lambda fit: fit.process.high) if best else None
        smallest = None if best else prediction.smallest()
    shown = best or smallest or reference
    found = prediction.law(shown.micro)
    trace = found.law.at(shown.micro)
    moment = peak_moment(trace)
    return Estimate(
        how=found.how,
        reason=found.reason,
        base_bytes=prediction.base_bytes,
        largest=best,
        smallest=smallest,
        surely=surely.micro if surely else None,
        reference=reference,
        phase=moment.phase,
        module=moment.module,
        fills=tuple(_fills(trace)),
        seconds=time.perf_counter() - began_s,
    )


def _largest(prediction: _Prediction, limit_bytes: int, most: int, takes: Callable[[Fit], int]) -> Fit | None:
    """The largest micro-batch that fits: from the job's own batch on in one piece, and below it accumulated, where
    gradients come on top."""

    def does(micro: int) -> bool:
        fit = prediction.fit_or_none(micro) if prediction.may_fit(micro, limit_bytes) else None
        return fit is not None and takes(fit) <= limit_bytes

    whole = prediction.whole
    if whole <= most and does(whole):
        return prediction.fit(whole + (largest(lambda more: does(whole + more), most - whole) or 0))
    micro = largest(does, min(most, whole - 1))
    return None if micro is None else prediction.fit(micro)


def _fills(trace: Trace) -> Iterable[Fill]:
    """What is alive at the peak, by kind, and activations by module too."""
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
    """For each module the group that it is counted to: down to its place in a list, ``h.3`` of ``h.3.attn``; the whole
    list, ``h.0-11``, where those are many."""
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
