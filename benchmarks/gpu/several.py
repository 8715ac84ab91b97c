"""Two cards: a trial through Ray, two trials at once, and trainings over both."""

from __future__ import annotations

import importlib.util
import sys

from autotune.commands.where import Where
from autotune.measure.measurement import Measurement
from autotune.script.command import under_launcher
from autotune.techniques import Settings
from autotune.workers.local import LocalExecutor

from ..rows import HERE
from .check import Check, Found, Skipped, off
from .place import Place, measurement

_BAR, _LOSS_BAR = 0.03, 1e-3
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def _several(place: Place) -> Found:
    """On two cards: a trial through Ray, and two at once, beside one alone; DDP over NCCL, as a task and as a script of
    torchrun's, beside one process."""
    if len(place.cards) < 2:
        raise Skipped("there is one card")
    if len({card.type for card in place.cards}) > 1:
        raise Skipped(f"the cards are unlike: {', '.join(card.type for card in place.cards)}")
    here = place.measured(place.language)
    with place.all_cards():
        figures = _figures(place, here)
    bars = {"two at once": _BAR, "through Ray": _BAR, "DDP's losses": _LOSS_BAR, "torchrun's processes": _BAR}
    words = ", ".join(f"{name} {value:.2%} apart" for name, value in figures.items())
    words += "" if "through Ray" in figures else "; Ray is not installed"
    return Found(words, all(value <= bars[name] for name, value in figures.items()), figures)


def _figures(place: Place, here: Measurement) -> dict[str, float]:
    """How far apart each way is, as a share."""
    figures = {"two at once": max(_apart(one, here) for one in _at_once(place))}
    if importlib.util.find_spec("ray") is not None:
        figures["through Ray"] = _apart(_through_ray(place), here)
    with LocalExecutor("cuda", gpus_per_trial=2) as both:
        figures["DDP's losses"] = _over_both(place, both)
        figures["torchrun's processes"] = _by_torchrun(place, both)
    return figures


def _apart(found: Measurement, true: Measurement) -> float:
    """The larger of the differences in speed and in peak."""
    return max(off(found.samples_per_s.value, true.samples_per_s.value), off(found.peak.process, true.peak.process))


def _at_once(place: Place) -> list[Measurement]:
    with LocalExecutor("cuda") as each:
        asked = [each.submit(place.request(place.language)) for _ in range(2)]
        outcomes = [one.result() for one in asked]
    if len({one.where for one in outcomes}) < 2:
        raise RuntimeError(f"two trials ran on one card: {outcomes[0].where}")
    return [*map(measurement, outcomes)]


def _through_ray(place: Place) -> Measurement:
    with Where("ray").open(place.language, "cuda") as executor:
        return measurement(executor.ask(place.request(place.language)))


def _over_both(place: Place, both: LocalExecutor) -> float:
    """Largest difference of ten losses from those of one process, as a share of their mean."""
    batch = place.facts(place.language).effective_batch
    halves = {"batch": {"micro": batch // 2, "accumulate": 2}}
    alone = place.measured(place.language, Settings.model_validate(halves), parity_batch=batch)
    settings = Settings.model_validate({**halves, "parallel": {"kind": "ddp", "processes": 2}})
    found = measurement(both.ask(place.request(place.language, settings, parity_batch=batch)))
    true = alone.parity.losses
    differences = (abs(one - other) for one, other in zip(found.parity.losses, true, strict=True))
    return max(differences) / (sum(true) / len(true))


def _by_torchrun(place: Place, both: LocalExecutor) -> float:
    """How far what each of two processes takes is from what the only one takes."""
    peaks = []
    for number in (1, 2):
        launched = under_launcher((*_TORCHRUN, str(number), str(HERE / "gpu" / "ranks.py")))
        assert launched is not None, "torchrun starts Python"
        settings = {"parallel": {"kind": "ddp", "processes": 2}} if number == 2 else {}
        request = place.request("ranks.py", Settings.model_validate(settings))
        found = measurement(both.ask(request.model_copy(update={"command": tuple(launched)})))
        peaks.append(found.bytes_by_rank or (found.peak.process,))
    ((alone,), each) = peaks
    return max(off(one, alone) for one in each)


CHECKS = (
    Check(
        "two cards",
        f"speed and peak within {_BAR:.0%} of one trial's; losses of DDP within {_LOSS_BAR:.1%} of one process's",
        _several,
    ),
)
