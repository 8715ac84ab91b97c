"""Settings, facts, outcomes and numbers in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .measure import Measurement
from .measure.measurement import CardState, Growth
from .plan import Budget, PhaseName, Speed
from .techniques import Facts, Settings
from .techniques.batch import Batch
from .units import ceil_mib, format_bytes, format_latency, size
from .workers import Crashed, Dropped, Failed, Measured, NonFinite, Outcome, OutOfMemory, TimedOut
from .workers.trial.traces import first_line


def settings_words(settings: Settings, facts: Facts | None = None) -> str:
    """``micro-batch 64 × 4, bf16, checkpoint every 2nd of 12 blocks, channels_last``; the user's own rows are left out.
    Without any other it is as it stands.

    Args:
        settings: what to name.
        facts: adds what only the task knows, such as the number of blocks.
    """
    return ", ".join(row.describe(facts) for row in settings.chosen()) or "as it stands"


def facts_words(facts: Facts) -> str:
    """The model, the data and the device in one line."""
    parts = [f"{_millions(facts.num_parameters)} parameters"]
    if facts.num_trainable < facts.num_parameters and not facts.inference:
        parts[0] += f" ({_millions(facts.num_trainable)} train)"
    if facts.num_blocks:
        parts.append(f"{facts.num_blocks} blocks of {facts.block_name}")
    if facts.dataset_length is not None:
        parts.append(count(facts.dataset_length, "sample"))
    held = "" if facts.effective_batch_held else ", assumed" if facts.effective_batch_assumed else ", free"
    held = ", varying" if facts.batch_varies else held
    own = Batch.reference(facts)
    cut = f" ({_cut(own)})" if own.accumulate > 1 and not facts.batch_varies else ""
    by_flag = facts.token_flag is not None
    parts.append(own.describe() if by_flag else f"batch {facts.effective_batch}{held}{cut}")
    if facts.ranks > 1:
        parts.append(f"{facts.shared_by} over {facts.ranks} processes")
    if facts.inference:
        parts.append("inference")
    if facts.precision is not None:
        parts.append(f"in {facts.precision}")
    if facts.max_grad_norm is not None:
        parts.append(f"clipped at {facts.max_grad_norm:g}")
    return f"{', '.join(parts)}; on {facts.device.name} ({facts.device.type})"


def trial_label(number: int) -> str:
    """How a trial is called: 0 is the reference."""
    return "reference" if number == 0 else f"trial {number}"


def finalist_label(number: int) -> str:
    """How a finalist's run is called."""
    return "reference again" if number == 0 else f"trial {number} again"


def round_words(number: int, whole: int | None = None) -> str:
    """Round 0 chooses among the finalists; those after it are reported."""
    if number == 0:
        return "to choose the best"
    return f"round {number}" + (f" of {whole}" if whole is not None else "")


def outcome_words(outcome: Outcome, budget: Budget) -> str:
    """What came of a trial, on one line."""
    said = remark(outcome, budget)
    if isinstance(outcome, Measured):
        measured = outcome.measurement
        figures = f"{rate(measured.samples_per_s.value)} samples/s {spread(measured.samples_per_s)}"
        return f"{figures}, {size(measured.peak.process)}" + (f": {said}" if said else "")
    if isinstance(outcome, OutOfMemory):
        said = f"{said} at {size(outcome.peak_bytes)}"
    message = first_line(getattr(outcome, "message", ""))
    return f"{said}: {message}" if message else f"{said}"


def remark(outcome: Outcome, budget: Budget) -> str | None:
    """Why an outcome is of no use, in a word or two; None where it is."""
    match outcome:
        case Measured(measurement=measured):
            return _why_infeasible(measured, budget)
        case OutOfMemory():
            return "out of memory"
        case TimedOut():
            return f"timed out after {outcome.deadline_s:.0f} s"
        case NonFinite():
            return f"loss not finite at step {outcome.step}"
        case Crashed() | Failed() | Dropped():
            return outcome.kind
        case _:
            return None


def _why_infeasible(measured: Measurement, budget: Budget) -> str | None:
    if (over := budget.over(measured.peak)) is not None:
        return f"over {over.budget}"
    if measured.leak_bytes_per_step is not None:
        return f"leaks {size(round(measured.leak_bytes_per_step))} a step"
    if measured.parity.strayed_at is not None:
        return f"loss strays at step {measured.parity.strayed_at}"
    if measured.parity.unlike is not None:
        what = "other outputs" if measured.parity.compared in ("outputs", "quality") else "another training"
        is_known = measured.latency is None or measured.parity.compared is not None
        return f"{what}: " * is_known + measured.parity.unlike.partition(". ")[0]
    if measured.latency is not None and measured.latency.exceeds(budget):
        return f"over the latency, at {format_latency(measured.latency.p95_s)}"
    return None


def card_words(states: Sequence[CardState]) -> str:
    """A GPU while it was timed, over all runs: ``1,305 MHz (at least 1,290), lowered for heat, 310 W, 71 °C``; empty
    where its driver told nothing."""

    def mean(name: str) -> float | None:
        known = [value for one in states if (value := getattr(one, name)) is not None]
        return statistics.fmean(known) if known else None

    clock, power, others = mean("clock_mhz"), mean("power_w"), mean("others")
    least = min((one.least_clock_mhz for one in states if one.least_clock_mhz is not None), default=None)
    heat = max((one.temperature_c for one in states if one.temperature_c is not None), default=None)
    limit = min((one.power_limit_w for one in states if one.power_limit_w is not None), default=None)
    lowered = dict.fromkeys(reason for one in states for reason in one.lowered)
    parts = [f"{clock:,.0f} MHz" + (f" (at least {least:,})" if least else "")] if clock is not None else []
    parts += [f"lowered {' and '.join(lowered)}"] if lowered else []
    parts += [f"{power:.0f} W"] if power is not None else []
    parts += [f"limited to {limit:.0f} W (below its default)"] if limit is not None else []
    parts += [f"{heat} °C"] if heat is not None else []
    parts += [f"others computed {others:.0%} of the time"] if others else []
    return ", ".join(parts)


def over_reference(measured: Measurement, reference: Measurement) -> str:
    """`` · 2.31x the reference``."""
    return f" · {times(measured.samples_per_s.value / reference.samples_per_s.value)} the reference"


def rate(value: float) -> str:
    """Three digits that mean something: ``12,345``, ``812``, ``81.2``, ``0.812``."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def roughly(seconds: float) -> str:
    """A time that is expected: ``45 s``, ``1.5 min``, ``11 min``, ``2.5 h``."""
    if seconds < 55:
        return f"{max(5 * round(seconds / 5), 5)} s"
    minutes = seconds / 60
    if minutes < 10:
        return f"{round(2 * minutes) / 2:g} min"
    return f"{round(minutes)} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def spread(speed: Speed) -> str:
    """``± 0.8 %``: half the 95 % interval over the value."""
    return f"± {(speed.high - speed.low) / 2 / speed.value * 100:.1f} %"


def times(ratio: float) -> str:
    """``2.31x``."""
    return f"{ratio:.2f}x"


def percent(share: float, digits: int = 2) -> str:
    """``+4.2 %``, ``-12 %``, ``+1,860 %``."""
    value = 100 * share
    return f"{value:+,.0f} %" if abs(value) >= 99.5 else f"{value:+.{digits}g} %"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 block``, ``12 blocks``; ``plural`` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _cut(batch: Batch) -> str:
    """``8 × 4``; ``8 × 3, then 6`` where the last is smaller."""
    rest = batch.num_samples % batch.micro
    return f"{batch.micro} × {batch.accumulate - 1}, then {rest}" if rest else f"{batch.micro} × {batch.accumulate}"


def _millions(number: int) -> str:
    if number < 10_000:
        return str(number)
    return f"{number / 1e6:.2f} M" if number < 10**9 else f"{number / 1e9:.2f} G"


PHASES: dict[PhaseName, str] = {
    "first_step": "its first step",
    "training": "its training",
    "last_batch": "the last batch of an epoch",
    "evaluation": "its evaluation",
    "saving": "saving",
    "resuming": "resuming",
}
"""Phases of a job's life, as a sentence has them."""


def growth_words(growth: Growth, budget: Budget) -> str:
    """``after about 61 of 300 batches``: when memory runs out in an evaluation in which something piles up; empty where
    it does not."""
    whole, last = growth.whole_bytes or growth.seen_bytes, growth.all_batches
    if budget.of_device is None or budget.holds(whole):
        return ""
    lasts = growth.lasts(budget.of_device / budget.factor)
    if last is not None and lasts >= last:
        return f"at its end, after {last:,} batches"
    return f"after about {lasts:,}" + (f" of {last:,} batches" if last is not None else " batches")


def pile_words(growth: Growth) -> str:
    """What piles up in an evaluation, and what it comes to."""
    each = format_bytes(ceil_mib(round(growth.bytes_per_batch)))
    seen = "" if growth.all_batches is None else f" of {growth.all_batches:,}"
    words = f"each of its batches leaves about {each} until its end, seen in {growth.num_batches:,}{seen}"
    if growth.whole_bytes is None or growth.low_bytes is None or growth.high_bytes is None:
        return words
    whole, low, high = (
        format_bytes(ceil_mib(one)) for one in (growth.whole_bytes, growth.low_bytes, growth.high_bytes)
    )
    return f"{words}: it comes to {whole} ({low} to {high}). Keep what the result needs, such as argmax, in its place"
