"""Predictions, compiling, and a whole search with its job."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from autotune.estimates import EstimateOptions
from autotune.measure.measurement import Measurement
from autotune.plan import load_plan
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.workers import Estimated, Measured, Outcome, PredictRequest
from autotune.workers.trial.environment import own_thread_variables

from .check import Check, Found, Skipped, off
from .place import ROOT, Place, measurement, name_of, task

_PREDICTED_BAR, _ABOVE_BAR = 0.05, 1 / 20
_CLAIM_BAR = 0.05
_PEAK_S = 0.3
"""Timed windows of a trial whose peak alone is asked for."""
_COMPILED = (("blocks", "default"), ("model", "reduce-overhead"))
_LOSS_BAR = 0.02
_BUDGET = 0.8
"""Of what the reference reserves, beside its context."""
_TRIALS_LONG = 12
"""A quick search may take as long as so many trials in new interpreters do: on a slow machine longer."""


def _predictions(place: Place) -> Found:
    """Peaks that are predicted on the CPU beside measured ones."""
    rows = []
    kinds = [{"precision": {"kind": kind}} for kind in ("fp32", "bf16")]
    more: list[dict[str, Any]] = [{}, {"checkpointing": {"kind": "blocks"}}, {"layers": {"kind": "exact"}}]
    for source, precision, other in itertools.product((place.language, place.images), kinds, more):
        if place.is_quick and (other or precision is kinds[1]):
            continue
        settings = Settings.model_validate({**precision, **other})
        estimated = place.executor.submit(_estimate(place, source, settings)).result()
        if not isinstance(estimated, Estimated):
            raise RuntimeError(f"{source}: {estimated}")
        found = estimated.estimate.reference.process
        peak = place.measured(source, settings, trial_time_s=_PEAK_S).peak.process
        row = {"task": name_of(source), "settings": settings.model_dump(mode="json", exclude_defaults=True)}
        rows.append({**row, "error": found.value / peak - 1, "is_above": peak > found.high})
    median = statistics.median(abs(row["error"]) for row in rows)
    above = sum(row["is_above"] for row in rows)
    words = f"{median:.1%} off at the median of {len(rows)}; {above} measured above the interval"
    return Found(words, median <= _PREDICTED_BAR and above <= _ABOVE_BAR * len(rows), {"rows": rows})


def _estimate(place: Place, source: str, settings: Settings) -> PredictRequest:
    facts = place.facts(source)
    batch, capability = facts.effective_batch, facts.device.capability
    options = EstimateOptions(settings=settings, target="cuda", capability=capability, reference_batch=batch)
    return PredictRequest(
        id="gpu-estimate", task=source, device="cpu", options=options, environment=own_thread_variables()
    )


def _compile(place: Place) -> Found:
    """Trials that compile, with the deadline that a search gives them: cold, then warm."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed, and torch.compile needs it on a card")
    batch = place.facts(place.language).effective_batch
    reference = place.trial(place.language, parity_batch=batch)
    true = measurement(reference)
    budget = TimeBudget(place.trial_s, None)
    budget.learn(reference, fresh=False)
    figures = {}
    for (kind, mode), which in itertools.product(_COMPILED, ("cold", "warm")):
        settings = Settings.model_validate({"compile": {"kind": kind, "mode": mode}})
        asked = place.request(place.language, settings, parity_batch=batch)
        deadline_s = budget.deadline_s(place.trial_s, spare_finalists=True)
        outcome = place.executor.submit(asked.with_deadline(deadline_s)).result()
        figures[f"{kind}, {mode}, {which}"] = _compiled(outcome, true)
    told = ", ".join(
        f"{name}: {row['outcome']}"
        + (f" after {row['compile_s']:.0f} s, {row['speed']:.2f} times as fast" if "speed" in row else "")
        for name, row in figures.items()
    )
    is_within = all(bool(row.get("compile_s")) and row["losses"] <= _LOSS_BAR for row in figures.values())
    return Found(told, is_within, figures)


def _compiled(outcome: Outcome, true: Measurement) -> dict[str, Any]:
    """A trial that compiles, beside the task as it stands: seconds, speed and peak over its, and how far apart losses
    are."""
    if not isinstance(outcome, Measured):
        return {"outcome": outcome.kind, "message": getattr(outcome, "message", "")[:300]}
    found = outcome.measurement
    pairs = zip(found.parity.losses, true.parity.losses, strict=True)
    return {
        "outcome": outcome.kind,
        "compile_s": found.compile_s,
        "speed": found.samples_per_s.value / true.samples_per_s.value,
        "peak": found.peak.process / true.peak.process,
        "losses": max(off(loss, other) for loss, other in pairs),
    }


def _search(place: Place) -> Found:
    """A search within 80 % of what the reference reserves, its plan verified, and the job that applies it."""
    path, storage = place.folder / "found.yaml", f"sqlite:///{place.folder}/studies.db"
    source = place.language if place.is_quick else task("writer")
    began_s = time.monotonic()
    anew = place.request(source).model_copy(update={"fresh": place.is_quick})
    peak = measurement(place.executor.ask(anew)).peak
    most_s = _TRIALS_LONG * (time.monotonic() - began_s)
    assert peak.reserved is not None, "it was on a card"
    limit = round(peak.process * 1.1) if place.is_quick else peak.process - round((1 - _BUDGET) * peak.reserved)
    asked = ["--device", "cuda", "--executor", "local", "--storage", storage]
    words = ["search", source, "--budget", str(limit), "-o", str(path), *asked]
    trial_time = "0.3s" if place.is_quick else "3s"
    most = ["--trials", "12", "--max-time", "150s"]
    if place.is_quick:
        most = ["--trials", "2", "--space", str(_batches(place)), "--max-time", f"{most_s:.0f}s"]
    told = place.command(*words, *most, "--trial-time", trial_time)
    plan = load_plan(path)
    assert plan.measured is not None, "a search wrote it"
    told += place.command("verify", str(path), source, "--executor", "local", "--trial-time", trial_time)
    job = place.job(source, path, 5 if place.is_quick else 50)
    apart = off(job["samples_per_s"], plan.measured.samples_per_s.value)
    used = plan.measured.peak.process / limit
    words_ = f"the job's speed is {apart:.1%} off its plan's, which takes {used:.0%} of the budget"
    told = told.replace(str(place.folder), "…").replace(str(ROOT), "…")
    figures = {"speed": apart, "used": used, "plan": plan.settings.model_dump(mode="json", exclude_defaults=True)}
    return Found(words_, apart <= _CLAIM_BAR and used <= 1, {**figures, "told": told.splitlines()})


def _batches(place: Place) -> Path:
    """A space of micro-batches alone."""
    path = place.folder / "space.yaml"
    path.write_text("schema: autotune/space@1\nbatch: auto\n")
    return path


CHECKS = (
    Check("predictions", f"{_PREDICTED_BAR:.0%} at the median, 1 in 20 above the interval", _predictions),
    Check(
        "compile",
        f"not timed out in a search's own deadline; compile_s is told; losses within {_LOSS_BAR:.0%} of the task's",
        _compile,
    ),
    Check("whole search", f"a plan within its budget; the job's speed within {_CLAIM_BAR:.0%} of it", _search),
)
