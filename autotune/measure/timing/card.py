"""A card while something is timed on it: its clock, heat and power, and what others take of its time.

The driver is asked in a thread of its own, which keeps nobody waiting where it does not answer.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from ...device_memory.nvml import ask, is_silent
from ..measurement import CardState
from ..processes import descendants

_Answer = TypeVar("_Answer")

_EVERY_S = 0.5
"""The driver takes the processes' shares of the card's time that often, or less.
Source: https://docs.nvidia.com/deploy/nvml-api, nvmlDeviceGetProcessUtilization"""
_NEVER = -1
_USUAL = 0.75
"""Quantile of the clock that counts as an undisturbed one."""
_TOLERANCE = 0.95
"""A clock below this share of the usual one was lowered."""
_FEW = 0.05
"""A reason that holds for less than this share of the time is none."""
_REASONS = {
    0x08: "by the hardware (HW slowdown)",
    0x20: "for heat",
    0x40: "for heat (HW thermal slowdown)",
    0x80: "for the power supply (HW power brake)",
}
"""Why a clock is lowered that has nothing to do with what is computed at the moment, as NVML's bits name it: heat may
be an earlier run's. A limit of power is left out: what a configuration draws, its job draws."""


class Sample(NamedTuple):
    """The card at a moment; None is what the driver does not tell."""

    at_s: float
    """By ``time.perf_counter``."""
    clock_mhz: int | None = None
    reasons: int = 0
    """Why the clock is not higher, as NVML's bits have it."""
    power_w: float | None = None
    temperature_c: int | None = None
    others: float | None = None
    """Share of the card's time that other processes computed since the sample before."""
    power_limit_w: float | None = None
    """The limit of its power, where that is set below the card's default."""


class CardWatch:
    """Watches the current CUDA device from its creation."""

    def __init__(self, watches_others: bool = True) -> None:
        """``watches_others``: also what other processes compute; False where one of them is ours, and has its turns."""
        self._watches_others = watches_others
        self.samples: list[Sample] = []
        self._times: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._uuid = str(torch.cuda.get_device_properties().uuid)
        threading.Thread(target=self._watch, name="autotune-card", daemon=True).start()

    def open(self) -> None:
        """A window begins."""
        self._opened_s = perf_counter()

    def close(self) -> None:
        """The window that was opened has ended."""
        self._times.append((self._opened_s, perf_counter()))

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def shares(self) -> list[float]:
        """Of each window so far, the share that others took of it, or that a lowered clock did."""
        samples = [*self.samples]
        if not samples:
            return [0.0] * len(self._times)
        taken = taken_of(samples)
        return [statistics.fmean(_within(samples, taken, *times)) for times in self._times]

    def state(self) -> CardState | None:
        """What it was like, over all samples; None where the driver tells nothing of it."""
        samples = [*self.samples]
        clocks = [one.clock_mhz for one in samples if one.clock_mhz is not None]
        powers = [one.power_w for one in samples if one.power_w is not None]
        temperatures = [one.temperature_c for one in samples if one.temperature_c is not None]
        if not (clocks or powers or temperatures):
            return None
        least, others = _FEW * len(samples), [one.others for one in samples if one.others is not None]
        lowered = [words for bit, words in _REASONS.items() if sum(one.reasons & bit > 0 for one in samples) > least]
        return CardState(
            clock_mhz=round(statistics.fmean(clocks)) if clocks else None,
            least_clock_mhz=min(clocks, default=None),
            lowered=tuple(lowered),
            power_w=round(statistics.fmean(powers), 1) if powers else None,
            power_limit_w=min((one.power_limit_w for one in samples if one.power_limit_w is not None), default=None),
            temperature_c=max(temperatures, default=None),
            others=round(statistics.fmean(others), 3) if others else None,
        )

    def warnings(self) -> Iterator[str]:
        """What the user should hear of it."""
        if is_silent():
            yield "the GPU's driver (NVML) does not answer: nothing is known of its clock, and of others that use it"
        state = self.state()
        if state is not None and state.lowered:
            yield (
                f"the GPU lowered its clock {' and '.join(state.lowered)} while it was timed: its speed depends on "
                "what it did before. Cool it, or hold its clock (nvidia-smi --lock-gpu-clocks)"
            )

    def _watch(self) -> None:
        seen, is_ended = _NEVER if self._watches_others else None, False
        while not is_ended:
            found = ask(partial(_look, uuid=self._uuid, seen=seen))
            if found is None:  # it would tell nothing the next time either
                return
            sample, seen = found
            if sample.others is None and self.samples:
                sample = sample._replace(others=self.samples[-1].others)
            self.samples.append(sample)
            is_ended = self._ended.wait(_EVERY_S)


def taken_of(samples: Sequence[Sample]) -> list[float]:
    """At each sample, the share of the card that others took, or that a lowered clock did, compared with the usual one:
    a card that is always hot is as it is."""
    clocks = sorted(one.clock_mhz for one in samples if one.clock_mhz is not None)
    usual = clocks[int(_USUAL * (len(clocks) - 1))] if clocks else 0
    found = []
    for one in samples:
        is_lowered = one.reasons & sum(_REASONS) and (one.clock_mhz or usual) < _TOLERANCE * usual
        left = (one.clock_mhz or usual) / usual if is_lowered else 1.0
        found.append(1 - left * (1 - (one.others or 0.0)))
    return found


def _within(samples: Sequence[Sample], taken: Sequence[float], began_s: float, ended_s: float) -> list[float]:
    """Between two moments; where none is, the nearest to them."""
    found = [share for one, share in zip(samples, taken, strict=True) if began_s <= one.at_s <= ended_s]
    if found:
        return found
    middle_s = (began_s + ended_s) / 2
    return [min(zip(samples, taken, strict=True), key=lambda pair: abs(pair[0].at_s - middle_s))[1]]


def _look(nvml: Any, uuid: str, seen: int | None) -> tuple[Sample, int | None]:
    """The card now, and until when others' shares are known, by the driver's clock: None where they are not asked
    for."""
    try:
        card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError_NotFound:  # an instance: the clock is the whole card's
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))

    def told(question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None

    milliwatts = told(lambda: nvml.nvmlDeviceGetPowerUsage(card))
    limit = told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card))
    usual = told(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(card))
    found = None if seen is None else told(partial(_others, nvml, card, seen))
    others, seen = found or (None, seen)
    sample = Sample(
        perf_counter(),
        told(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
        told(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(card)) or 0,
        None if milliwatts is None else milliwatts / 1000,
        told(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
        others,
        limit / 1000 if limit is not None and usual is not None and limit < usual else None,
    )
    return sample, seen


def _others(nvml: Any, card: Any, seen: int) -> tuple[float | None, int]:
    """The share of other processes since a moment; None where nothing new is known. Nor is it where this process is not
    shown under its own number, as in a container: it would be taken for another."""
    if os.getpid() not in {row.pid for row in nvml.nvmlDeviceGetComputeRunningProcesses(card)}:
        return None, seen
    rows = [row for row in nvml.nvmlDeviceGetProcessUtilization(card, max(seen, 0)) if row.timeStamp > seen]
    latest = {row.pid: row.smUtil for row in sorted(rows, key=lambda row: row.timeStamp) if row.pid != os.getpid()}
    own = {*descendants()} if latest else set()  # which takes a moment of Python's
    share = min(1.0, sum(used for pid, used in latest.items() if pid not in own) / 100)
    is_known = bool(rows) and seen != _NEVER  # what is told first is of who knows when
    return share if is_known else None, max([seen, 0, *(row.timeStamp for row in rows)])
