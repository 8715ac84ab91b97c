"""A plan in words: what each row does, what it was measured at, how it was found, and how to apply it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from ..errors import PlanError
from ..measure.measurement import NUM_STEPS
from ..plain_yaml import read_yaml
from ..plan import Budget, Evaluation, Evidence, Foreseen, Inference, Peak, Plan, QualityEvidence, Speed
from ..searches.budget import budget_words, limits_words
from ..techniques import Technique
from ..units import format_bytes, format_duration, format_latency, size
from ..words import count, rate, settings_words, times
from .tables import rows_table

_CHECKED = {
    "losses": f"the losses of the first {NUM_STEPS} steps, which stay close to the reference's",
    "outputs": "the outputs of a batch of samples, each of which differs from the reference's",
    "quality": "the quality, without training; and the outputs of a batch of samples, each of which differs from the "
    "reference's",
    "sums": f"learning rates, samples and the sum of the losses of the first {NUM_STEPS} steps, which are the "
    "reference's; not each loss, since the job's own runs differ",
}
_EXACTNESS = {
    "exact": "Exact, up to the order of sums.",
    "rounding": "Rounding: results differ by how they are rounded.",
}
"""What a setting may do to the result."""
Rows = list[tuple[str, str]]


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as its YAML file has it."""
    return read_yaml(plan.to_yaml(), "plan", PlanError)


def explain(plan: Plan, path: Path, *, coloured: bool = True) -> RenderableType:
    """All that ``autotune show`` says; not ``coloured``, for a file, in half the time."""
    parts: list[RenderableType] = [Text(f"{path}: {headline(plan)}", style="bold")]
    parts += [Text("\nSettings", style="bold"), _settings(plan)]
    for title, rows in found_rows(plan).items():
        if rows:
            parts += [Text(f"\n{title}", style="bold"), rows_table(rows)]
    if plan.notes:
        parts += [Text("\nNotes", style="bold"), rows_table([("-", note) for note in plan.notes])]
    parts += [Text("\nTo apply it", style="bold"), *_how_to_apply(plan, path, coloured)]
    return Group(*parts)


def found_rows(plan: Plan) -> dict[str, Rows]:
    """What a plan was measured at, how it was found and where, by title."""
    return {"Measured": _measured(plan), "Found": _found(plan), "Measured on": _environment(plan)}


def settings_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """For each setting: its technique, the setting, and what it does."""
    return [(one.name, one.describe(), _purpose(plan, one) + _exactness(plan, one)) for one in plan.settings.chosen()]


def _purpose(plan: Plan, technique: Technique) -> str:
    if plan.inference is not None and technique.name == "batch":
        return "Samples in one forward pass."
    return technique.purpose()


def summary(plan: Plan, path: Path) -> RenderableType:
    """What the end of a search says: the choice, its evidence, and what to do next."""
    rows = [("settings", settings_words(plan.settings)), *_measured(plan)]
    rows += [("note", note) for note in plan.notes]
    rows.append(("next", f"autotune {'verify' if plan.measured is None else 'show'} {path}"))
    unproven = plan.gain.unproven if plan.gain is not None else None
    said = f"nothing is proven: {unproven}\n" if unproven is not None else ""
    return Group(Text(f"\n{said}{path}: {headline(plan)}", style="bold"), rows_table(rows))


def headline(plan: Plan) -> str:
    """What it comes to, in one line."""
    if plan.gain is not None and plan.gain.speed is not None and plan.measured and plan.reference:
        what = f"{times(plan.gain.speed)} the reference's speed"
        if plan.gain.low is not None and not plan.gain.is_proven:
            what += " (no gain in speed is proven)"
    elif plan.predicted is not None and plan.measured is None:
        what = "predicted, not measured"
    elif plan.measured is not None:
        what = f"{rate(plan.measured.samples_per_s.value)} samples/s"
    else:
        what = "settings without evidence"
    within = f", within {found}" if (found := limits_words(plan.budget)) != "none" else ", no memory limit"
    what = f"for inference: {what}" if plan.inference is not None else what
    on = f", on {plan.budget.device}" if plan.budget.device else ""
    return f"{what}{within if plan.measured or plan.predicted else ''}{on}"


def _settings(plan: Plan) -> RenderableType:
    rows = [(name, Text(said).append(f"\n{purpose}", style="dim")) for name, said, purpose in settings_rows(plan)]
    return rows_table(rows or [("none", Text("everything is as the task has it"))])


def _exactness(plan: Plan, technique: Technique) -> str:
    """How it may change the result, as far as the plan knows."""
    found = plan.exactness.get(technique.name)
    if found == "lossy":
        changes = plan.inference is not None or "function" in technique.affects
        return " Lossy: it changes " + ("what the model computes." if changes else "gradients.")
    return "" if found is None else f" {_EXACTNESS[found]}"


def _checked(plan: Plan) -> str | None:
    """What was held against the reference, and what it cost; None where nothing was."""
    if plan.quality is not None:
        lost = plan.quality.reference - plan.quality.value
        cost = f" It cost {lost:.4g}." if lost > 0 else " It cost nothing."
        return f"quality, from {count(plan.quality.pairs, 'seed')}, after the same training as the reference.{cost}"
    if plan.measured == plan.reference:
        return None
    if plan.checked is None:
        return None
    words, found = _CHECKED[plan.checked], plan.inference
    if found is not None and found.deviation is not None:
        words += f" by {found.deviation:.2%} at most"
        words += "" if found.tolerance is None else f"; {found.tolerance:.2%} is allowed"
    if found is not None and found.quality is not None:
        words += f". Quality: {inferred_quality_words(found)}"
    return words


def inferred_quality_words(found: Inference) -> str:
    """``0.89, the reference's 0.9; 0.01 less is allowed``."""
    assert found.quality is not None, "the caller sees to it"
    known = "" if found.reference_quality is None else f", the reference's {found.reference_quality:.4g}"
    return f"{found.quality:.4g}{known}" + ("" if found.max_drop is None else f"; {found.max_drop:.4g} less is allowed")


def _measured(plan: Plan) -> Rows:
    rows: Rows = [*_predicted(plan)]
    if plan.measured is not None:
        rows += [("speed", speed_words(plan.measured.samples_per_s)), ("peak", peak_words(plan.measured, plan.budget))]
    if plan.evaluation is not None:
        rows.append(("evaluation", evaluation_words(plan.evaluation, plan.measured.peak if plan.measured else None)))
    if plan.measured is not None:
        rows += latency_row(plan.measured, plan.budget)
        rows += life_row(plan.measured.peak)
    if plan.measured is not None and plan.measured.compile_s is not None:
        rows.append(("compiling", _compiling(plan.measured.compile_s, plan)))
    if plan.reference is not None:
        over = f", over {what}" if (what := plan.reference.over(plan.budget)) else ""
        speed, peak = plan.reference.samples_per_s, plan.reference.peak
        beside = f", {size(peak.above_base)} beside imports and data" if peak.above_base is not None else ""
        tensors = f", tensors of {size(peak.tensors)}" if peak.tensors else ""
        rows.append(("reference", f"{speed_words(speed)}; peak {size(peak.process)}{over}{beside}{tensors}"))
    if plan.gain is not None:
        rows.append(("gain", _gain(plan)))
    if plan.quality is not None:
        rows.append(("quality", _quality(plan.quality)))
    if plan.weights is not None:
        made = f"quality {plan.weights.quality:.4g}, from seed {plan.weights.seed}"
        where, begins = f"{plan.weights.file}, next to the plan", "optimizer and schedule begin anew"
        rows.append(("weights", f"{where}: what recovery made of the model ({made}); {begins}"))
    if (checked := _checked(plan)) is not None:
        rows.append(("checked", checked))
    return rows


def _predicted(plan: Plan) -> Rows:
    """What is predicted of a plan."""
    found = plan.predicted
    if found is None:
        return []
    how = "" if found.how == "traced" else ", by a few real steps"
    peak = f"{size(found.process)} ({size(found.low)} to {size(found.high)}{how}); as it stands {size(found.reference)}"
    return [
        ("predicted peak", peak),
        _step_predicted(found),
        ("binds", found.binds),
    ]


def _step_predicted(found: Foreseen) -> tuple[str, str]:
    """How much longer a step takes, and how that is known."""
    of_step = f"of a step, {found.work:.2f} times that of the job as it stands"
    if found.speeds is None:
        return "counted work", f"{of_step}; no time is measured"
    return "predicted time", f"{of_step}, at {found.speeds} measured here"


def _compiling(compile_s: float, plan: Plan) -> str:
    """How long it takes, and after how many steps the job is ahead of the reference all the same."""
    words = f"{format_duration(compile_s)} at the start of each process, longer in the first on a machine"
    batch, slower, faster = plan.settings.batch, plan.reference, plan.measured
    if batch is None or slower is None or faster is None:
        return words
    steps = "optimizer steps" if plan.inference is None else "batches"
    gained_s = batch.num_samples * (1 / slower.samples_per_s.value - 1 / faster.samples_per_s.value)
    return f"{words}; made up for after {math.ceil(compile_s / gained_s)} {steps}" if gained_s > 0 else words


def speed_words(speed: Speed) -> str:
    """Samples per second with the interval and the number of processes."""
    interval = f"95 %: {rate(speed.low)} to {rate(speed.high)}"
    processes = count(speed.repeats, "process", "fresh processes")
    return f"{rate(speed.value)} samples/s ({interval}; {processes})"


def peak_words(evidence: Evidence, budget: Budget) -> str:
    """Memory against the budget, with what is known beside it."""
    peak = evidence.peak
    words = size(peak.process)
    if (limit := budget.of_device) is not None:
        used = peak.process / limit
        kept = "admitted as it is" if budget.as_it_stands else f"{budget.margin:.0%} is kept as a margin"
        whole = budget_words(budget) if limit == budget.limit else f"{format_bytes(limit)} of the host's"
        words += f" of {whole} ({used:.0%}; {kept})"
    named = (("reserved", peak.reserved), ("allocated", peak.allocated))
    parts = [f"{name} {size(value)}" for name, value in named if value is not None]
    if peak.host is not None:
        of_budget = f" of {format_bytes(budget.host)} ({peak.host / budget.host:.0%})" if budget.host else ""
        parts.append(f"host {size(peak.host)}{of_budget}")
    parts += [f"loader workers {size(peak.workers)} of it"] if peak.workers is not None else []
    parts += [f"{size(peak.above_base)} beside imports and data"] if peak.above_base is not None else []
    parts += [f"tensors of {size(peak.tensors)}, as predicted, which is what counts on a card"] if peak.tensors else []
    if peak.allocator_retries:
        parts.append(count(peak.allocator_retries, "allocator retry", "allocator retries"))
    if peak.largest_of is not None:
        parts.append(f"on the largest of {peak.largest_of} batches")
    if peak.longest is not None:
        parts.append(f"on {peak.longest.words()}")
    return "; ".join([words, *parts])


def life_row(peak: Peak) -> Rows:
    """What each phase of the job's life takes, and which of them binds."""
    parts = []
    for name, row in peak.phases.items():
        beside = [f"{size(row.low)} to {size(row.high)}, seen in part"] if row.low and row.high else []
        beside += [f"host {size(row.host)}"] if row.host is not None else []
        beside += ["which binds"] if name == peak.binds else []
        more = f" ({'; '.join(beside)})" if beside else ""
        parts.append(f"{name.replace('_', ' ')} {size(row.process)}{more}")
    return [("life", ", ".join(parts))] if len(parts) > 1 else []


def latency_row(evidence: Evidence, budget: Budget) -> Rows:
    """What one batch takes in inference; none of training."""
    if (found := evidence.latency) is None:
        return []
    limit = "" if budget.latency_s is None else f"; {format_latency(budget.latency_s)} is allowed"
    median, most = format_latency(found.median_s), format_latency(found.p95_s)
    return [("latency", f"{median} for a batch at the median, 95 of 100 within {most}{limit}")]


def _gain(plan: Plan) -> str:
    gain = plan.gain
    if gain is None or gain.speed is None:
        return f"unknown: {gain.reason if gain and gain.reason else 'the reference could not be measured'}"
    words = f"{times(gain.speed)} the speed"
    if gain.low is not None and gain.high is not None and gain.rounds is not None:
        rounds = f"{count(gain.rounds, 'round')} in turn"
        if gain.turns is not None:
            rounds = f"{count(gain.turns, 'turn')} of each in {gain.rounds} fresh processes"
        words += f" (95 %: {times(gain.low)} to {times(gain.high)}; {rounds})"
    words += f", {times(gain.memory)} the memory" if gain.memory else ""
    beside = [one.peak.above_base for one in (plan.measured, plan.reference) if one is not None]
    if len(beside) == 2 and beside[0] is not None and beside[1]:
        words += f" ({times(beside[0] / beside[1])} beside imports and data)"
    return words


def evaluation_words(found: Evaluation, peak: Peak | None) -> str:
    """The job's evaluation: its batch, what it takes, and what it adds to the peak of training."""
    said = [f"batches of {found.batch}"] if found.batch is not None else []
    if found.seconds is not None:
        said.append(format_duration(found.seconds))
    elif found.training is not None:
        said.append("stopped before its end")
    if found.training is not None and peak is not None:
        more = peak.process - found.training
        said.append(f"{size(more)} above training's peak" if more > 0 else "within training's peak")
    return ", ".join(said)


def _quality(found: QualityEvidence) -> str:
    rate = "" if found.lr_factor is None else f" at {found.lr_factor:g} times the task's learning rate"
    rate = rate if found.recovered is None else f" ({found.recovered})"
    taught = ", the plan's by the untouched model's outputs too" if found.distilled else ""
    trained = f"after {found.samples:,} samples of training each{rate}{taught}, from {count(found.pairs, 'seed')}"
    allowed = f"{found.max_drop:.4g} less was allowed"
    proven = ""
    if found.most_lost is not None:
        over = "over seeds and examples" if found.over_examples else "over seeds; the error over examples is not known"
        proven = f"; at 95 %, {found.most_lost:.4g} less at most ({over})"
    return f"{found.value:.4g}, the reference's {found.reference:.4g}, {trained}; {allowed}{proven}"


def _found(plan: Plan) -> Rows:
    record = plan.search
    rows: Rows = []
    if plan.task is not None:
        rows.append(("for", f"{plan.task.source}, model {plan.task.fingerprint[:19]}…"))
    if record is not None:
        rows.append(("by", f"{count(record.trials, 'trial')} in {format_duration(record.seconds)}: {record.stopped}"))
        rows.append(("study", f"{record.study} (sampler {record.sampler}, seed {record.seed})"))
    return rows


def _environment(plan: Plan) -> Rows:
    there = plan.environment
    if there is None:
        return []
    driver = f", driver {there.driver}" if there.driver else ""
    versions = f"torch {there.torch}, Python {there.python}, autotune {there.autotune}"
    threads = f", {count(there.threads, 'thread')}" if there.threads else ""
    rows = [("device", there.device + driver + threads), ("versions", versions)]
    if there.tf32 is not None:
        how = "by torch's default" if there.tf32 == ("convolutions",) else "by torch's flags, as the job leaves them"
        rows.append(("TF32", f"{' and '.join(there.tf32) or 'nothing'} of what is in fp32 computes in it, {how}"))
    if there.card is not None:
        rows.append(("GPU", f"{there.card}, while the plan was measured"))
    return rows


def _how_to_apply(plan: Plan, path: Path, coloured: bool) -> Iterator[RenderableType]:
    source = json.dumps(plan.task.source if plan.task else "model.py")
    code = (
        f"plan = autotune.load_plan({json.dumps(str(path))})\n"
        f"training = autotune.apply(plan, autotune.load_task({source}))\n"
        "for batch in training.loader:\n"
        "    result = training.step(batch)"
    )
    if plan.inference is not None:
        code = (
            f"plan = autotune.load_plan({json.dumps(str(path))})\n"
            f"inference = autotune.apply(plan, autotune.load_task({source}, inference=True))\n"
            "for batch in inference.loader:\n"
            "    outputs = inference.infer(batch)"
        )
    if coloured:
        yield Syntax(code, "python", background_color="default", theme="ansi_dark", padding=(0, 2), word_wrap=True)
    else:
        yield Padding(Text(code), (0, 2))
    try:
        environment = plan.settings.environment(os.environ)
    except PlanError as error:
        yield Padding(Text(f"Not on this machine as it is: {error}", style="yellow"), (0, 2))
        return
    if environment:
        variables = " ".join(f"{key}={value}" for key, value in environment.items())
        script = "train.py" if plan.inference is None else "serve.py"
        yield Padding(Text(f"Start the job by `autotune run {path} -- python {script}`: it needs {variables}."), (0, 2))
