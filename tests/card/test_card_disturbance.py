"""Other work on a card, its clock and its heat: what a measurement knows and keeps of them."""

from __future__ import annotations

import os
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import pynvml
import pytest
import torch
from search_tables import facts
from stand_in import Card
from told import Process

from autotune.device_memory import nvml
from autotune.measure import MeasureOptions
from autotune.measure.measurement import Measurement
from autotune.measure.run import measure
from autotune.measure.timing import card as watching
from autotune.measure.timing.card import CardWatch, Sample, taken_of
from autotune.plan import Budget, Plan
from autotune.report.show import found_rows
from autotune.searches.verdict import is_spoiled
from autotune.searches.winner.build_plan import environment_of
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.testing.zoo import ZOO
from autotune.training.apply_plan import apply
from autotune.workers import Measured

HEAT, POWER = pynvml.nvmlClocksEventReasonSwThermalSlowdown, pynvml.nvmlClocksEventReasonSwPowerCap


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement over the stand-in takes less than half a second."""
    monkeypatch.setattr(watching, "_EVERY_S", 0.002)
    monkeypatch.setattr(nvml, "_is_silent", threading.Event())


def measured(card: Card) -> Measurement:
    task = ZOO["mlp"]
    plan = Plan(settings=Settings(), budget=Budget(device="cuda"))
    card.kernel_s = 0.01
    return measure(apply(plan, task), task, MeasureOptions(trial_time_s=1.5, parity_batch=None))


def samples(clocks: Sequence[int], reasons: int) -> list[Sample]:
    return [Sample(float(at), clock, reasons if clock < 1400 else 0) for at, clock in enumerate(clocks)]


def test_what_others_compute_on_the_card_is_a_disturbance(card: Card) -> None:
    """40 % of its time, of the windows that a sample of the card falls into; such a run is made again."""
    card.processes = (Process(7, 2**20, utilization=40),)
    found = measured(card)
    assert found.card is not None
    assert found.card.others == pytest.approx(0.4)
    assert 0.2 < found.disturbed <= 0.4 + 1e-9
    assert is_spoiled(Measured(measurement=found))


def test_a_card_of_its_own_is_calm_and_its_state_is_kept(card: Card) -> None:
    card.clock_mhz, card.power_w, card.temperature_c = 1305, 310.5, 71
    found = measured(card)
    assert found.disturbed == 0
    assert found.card is not None
    assert found.card.model_dump() == {
        "clock_mhz": 1305,
        "least_clock_mhz": 1305,
        "lowered": (),
        "power_w": 310.5,
        "power_limit_w": None,
        "temperature_c": 71,
        "others": 0.0,
    }
    assert found.warnings == ()


def test_a_card_that_is_hot_all_the_time_is_said_to_be(card: Card) -> None:
    """It is no disturbance: its windows are alike."""
    card.clock_mhz, card.throttle_reasons = 900, HEAT
    found = measured(card)
    assert found.disturbed == 0
    assert found.card is not None
    assert found.card.lowered == ("for heat",)
    assert any("the GPU lowered its clock for heat" in one for one in found.warnings)


def test_a_clock_that_heat_lowers_takes_its_part_of_the_time() -> None:
    """705 of 1410 MHz is half."""
    assert taken_of(samples([1410, 1410, 1410, 705], HEAT)) == [0, 0, 0, 0.5]


def test_a_clock_that_a_limit_of_power_lowers_is_the_configurations_own() -> None:
    assert taken_of(samples([1410, 1410, 1410, 705], POWER)) == [0, 0, 0, 0]


def test_others_take_their_part_of_what_a_low_clock_leaves() -> None:
    """Half of a half."""
    one = Sample(9.0, 705, HEAT, others=0.5)
    assert taken_of([*samples([1410, 1410, 1410], HEAT), one])[-1] == pytest.approx(0.75)


def test_a_window_has_the_samples_within_it_or_the_nearest(card: Card) -> None:
    watch = CardWatch()
    watch.end()
    watch.samples = [Sample(at, others=others) for at, others in ((1.0, 0.1), (2.0, 0.3), (5.0, 0.9))]
    watch._times = [(0.5, 2.5), (2.6, 2.8), (4.0, 4.5)]
    assert watch.shares() == pytest.approx([0.2, 0.3, 0.9])


@pytest.mark.parametrize("changes", [{"has_nvml": False}, {"is_mig": True}, {"pids_hidden": True}])
def test_where_the_driver_tells_less_less_is_known(card: Card, changes: dict[str, bool]) -> None:
    """A number of this process that is another's there would make a disturbance of its own work."""
    vars(card).update(changes)
    card.processes = (Process(os.getpid() + 1, 2**20, utilization=90),)
    found = measured(card)
    assert found.disturbed == 0
    assert (found.card.others if found.card is not None else None) is None


def test_of_two_that_take_turns_neither_is_the_others_disturbance(card: Card) -> None:
    card.processes = (Process(7, 2**20, utilization=90),)
    torch.cuda.init()
    watch = CardWatch(watches_others=False)
    until_s = time.monotonic() + 5.0
    while len(watch.samples) < 3 and time.monotonic() < until_s:
        watch._ended.wait(0.001)
    watch.end()
    assert [one.others for one in watch.samples[:3]] == [None] * 3


def test_what_was_computed_before_the_first_look_is_not_counted() -> None:
    """The driver keeps the last seconds."""

    rows = [types.SimpleNamespace(pid=7, smUtil=80, timeStamp=5)]
    answers: Any = types.SimpleNamespace(
        nvmlDeviceGetComputeRunningProcesses=lambda card: [types.SimpleNamespace(pid=os.getpid())],
        nvmlDeviceGetProcessUtilization=lambda card, seen: rows,
    )
    assert watching._others(answers, None, watching._NEVER) == (None, 5)
    assert watching._others(answers, None, 5) == (None, 5)
    rows.append(types.SimpleNamespace(pid=7, smUtil=30, timeStamp=9))
    rows.append(types.SimpleNamespace(pid=os.getpid(), smUtil=70, timeStamp=9))
    assert watching._others(answers, None, 5) == (0.3, 9)


def test_a_driver_that_hangs_keeps_no_measurement_and_is_told(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda *_: ended.wait())
    monkeypatch.setattr(nvml, "_PATIENCE_S", 0.01)
    found = measured(card)
    ended.set()
    assert found.card is None
    assert any("(NVML) does not answer" in one for one in found.warnings)


def test_a_plan_says_what_the_card_was_like_while_it_was_measured(card: Card) -> None:
    """Over its runs: the mean of clock and power, the lowest clock, the highest temperature, and each reason once."""
    card.clock_mhz, card.power_w, card.temperature_c = 1305, 310.0, 71
    first = measured(card).card
    card.clock_mhz, card.power_w, card.temperature_c, card.throttle_reasons = 905, 290.0, 88, HEAT
    cards = [one for one in (first, measured(card).card, measured(card).card) if one is not None]
    plan = Plan(settings=Settings(batch=Batch(micro=1)), environment=environment_of(facts(), cards))
    said = "1,038 MHz (at least 905), lowered for heat, 297 W, 88 °C, while the plan was measured"
    assert ("GPU", said) in found_rows(Plan.from_yaml(plan.to_yaml()))["Measured on"]
    card.has_nvml = False
    assert measured(card).card is None
    assert environment_of(facts()).card is None


def test_a_limit_of_power_below_the_card_s_default_is_told(card: Card) -> None:
    """Of 400 W: whoever compares a plan with another card of its kind reads why it is slower."""
    card.clock_mhz, card.power_w, card.power_limit_w, card.temperature_c = 1100, 248.0, 250.0, 60
    found = measured(card).card
    assert found is not None
    assert found.power_limit_w == 250
    plan = Plan(settings=Settings(batch=Batch(micro=1)), environment=environment_of(facts(), [found]))
    said = "1,100 MHz (at least 1,100), 248 W, limited to 250 W (below its default), 60 °C, while the plan was measured"
    assert ("GPU", said) in found_rows(Plan.from_yaml(plan.to_yaml()))["Measured on"]
