"""What a context takes, also where the driver does not show whose memory is whose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autotune import ranks
from autotune.device_memory import context
from autotune.measure.memory import of_others, process_bytes
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.testing.zoo import ZOO
from autotune.training.apply_plan import apply
from autotune.units import MIB
from autotune.workers.trial.group import join_group

BARE, GROWN, RESERVED = 400 * MIB, 180 * MIB, 6000 * MIB
"""Bytes of a context as it is opened, what it grows by in the first step, and what a training reserves."""


class Device:
    """A device that shows its used memory, and not by whom; like torch, ``set_device`` opens a context."""

    def __init__(self, patch: pytest.MonkeyPatch, num_devices: int = 1) -> None:
        self.others = 3000 * MIB
        self.context = self.reserved = 0
        self.index = 0
        self.has_nvml = True
        self.is_integrated = False
        for name, function in {
            "is_available": lambda: True,
            "is_initialized": lambda: self.context > 0,
            "device_count": lambda: num_devices,
            "current_device": lambda: self.index,
            "set_device": self.open,
            "synchronize": lambda: None,
            "get_rng_state": torch.get_rng_state,
            "memory_reserved": lambda: self.reserved,
            "max_memory_reserved": lambda: self.reserved,
            "mem_get_info": lambda: (100_000 * MIB - self.total(), 100_000 * MIB),
            "get_device_properties": lambda index=None: SimpleNamespace(is_integrated=self.is_integrated, uuid="1"),
        }.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(context, "_shown_for_this_process", lambda: None)
        patch.setattr(context, "_shown_for_all", self.used)
        patch.setattr(context, "_opened", None)

    def open(self, index: int) -> None:
        self.index, self.context = index, max(self.context, BARE)

    def total(self) -> int:
        return self.others + self.context + self.reserved

    def used(self, index: int | None = None) -> int | None:
        return self.total() if self.has_nvml else None

    def step(self) -> None:
        """The first optimizer step."""
        context.step_begins()
        self.context, self.reserved = BARE + GROWN, RESERVED
        context.step_ended()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_what_nvml_shows_for_this_process_counts_without_the_reservation(device, monkeypatch):
    context.open_context()
    device.reserved = RESERVED
    monkeypatch.setattr(context, "_shown_for_this_process", lambda: RESERVED + 11 * MIB)
    device.others += 1000 * MIB
    assert context.context_bytes() == 11 * MIB
    assert context.changed_by_others() == 0


@pytest.mark.parametrize("taken", [0, 1024 * MIB, -1024 * MIB])
@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_what_others_take_or_give_back_is_no_part_of_a_context(device, taken, when):
    """A process of 6.68 GiB had a peak of 7.68 or 6.00 where another took a GiB or gave one back."""
    context.open_context()
    device.others += taken if when == "before the step" else 0
    device.step()
    device.others += taken if when == "after it" else 0
    assert context.context_bytes() == BARE + GROWN
    assert context.changed_by_others() == taken


def test_a_context_counts_from_the_first_moment(device):
    """Others of before it are not in it, whatever comes after."""
    context.open_context()
    assert context.context_bytes() == process_bytes(torch.device("cuda")) - device.reserved == BARE


def test_memory_is_read_before_a_rank_takes_its_device(device, monkeypatch, tmp_path):
    """``set_device`` opens the context: what was read after it had the bare context in it, which no trial was then
    charged."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: None)
    request, folder = SimpleNamespace(device="cuda", latest_s=1.0), SimpleNamespace(path=tmp_path)
    join_group(request, folder)
    device.step()
    assert context.context_bytes() == BARE + GROWN


def test_a_device_that_shares_the_machines_memory_is_not_charged_all_of_it(device, monkeypatch):
    """NVML has no figure for GB10 and Jetson, and ``mem_get_info`` has the whole machine's: 31 GiB were taken for a
    context."""
    device.has_nvml, device.is_integrated, device.others = False, True, 31_000 * MIB
    monkeypatch.setattr(context, "_used_of_machine", lambda index: device.total())
    context.open_context()
    device.step()
    assert context.context_bytes() == BARE + GROWN


def test_the_machines_used_memory_is_what_is_not_available(device, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  300 kB\n")
    monkeypatch.setattr(context, "_MEMORY", tmp_path / "meminfo")
    assert context._used_of_machine(None) is None
    device.is_integrated = True
    assert context._used_of_machine(None) == 700 * 1024


def test_without_any_figure_the_driver_is_asked(device):
    device.has_nvml = False
    context.open_context()
    device.step()
    assert context.context_bytes() == device.others + BARE + GROWN


@pytest.mark.parametrize(("num_devices", "taken"), [(8, 3), (1, 0), (2, 1)])
def test_a_process_takes_the_device_of_its_local_rank_or_the_one_that_it_sees(monkeypatch, num_devices, taken):
    """SLURM and MPI show each process one device: it is number 0 there, whatever ``LOCAL_RANK`` says."""
    device = Device(monkeypatch, num_devices)
    for name, value in {"WORLD_SIZE": "16", "RANK": "11", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: None)
    ranks.join_ranks(torch.device("cuda"))
    assert device.index == taken


def test_a_measurement_says_that_others_came_or_went(device):
    context.open_context()
    device.step()
    assert [*of_others()] == []
    device.others += 1024 * MIB
    (said,) = of_others()
    assert said.startswith("others on the device took 1 GiB while this was measured")


def test_a_trainings_first_step_is_what_a_context_grows_in(device):
    """What ``apply`` and the loader's start take meanwhile is not looked at, nor any later step."""
    training = apply(Plan(settings=Settings(), budget=Budget(device="cpu")), ZOO["mlp"])
    context.open_context()
    device.others += 1024 * MIB
    training.model.register_forward_pre_hook(lambda *_: setattr(device, "context", BARE + GROWN))
    training.step(next(iter(training.loader)))
    training.model.register_forward_pre_hook(lambda *_: setattr(device, "context", BARE + GROWN + 500 * MIB))
    training.step(next(iter(training.loader)))
    assert context.context_bytes() == BARE + GROWN
