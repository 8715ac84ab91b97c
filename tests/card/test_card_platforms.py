"""Systems other than Linux with a GPU of its own: what is refused there, and what a search there is told."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from stand_in import Card
from told import GIB, Process

from autotune.device_memory import cap
from autotune.measure import MeasureOptions
from autotune.measure.others import take_card
from autotune.plan import Budget, Plan
from autotune.report.doctor import examine, explain
from autotune.service import driver
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers.devices import Gpu


def test_windows_is_refused_in_words(tmp_path):
    """And not for a module that it has not."""
    program = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['resource'] = None; import autotune"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("ImportError: autotune runs on Linux, and on macOS, but not on Windows itself")
    assert "Use it in WSL 2" in said


@pytest.mark.parametrize(
    "name",
    [
        "PYTORCH_ALLOC_CONF",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_P2P_DISABLE",
        "TRITON_CACHE_DIR",
        "LD_PRELOAD",
        "MALLOC_CONF",
    ],
)
def test_a_services_trials_run_under_the_allocator_of_its_machine(name):
    """As jobs there do; what is the service's own stays with it."""
    own = {name: "as here", "AUTOTUNE_TOKEN": "secret", "AUTOTUNE_DATABASE": "postgresql://a:b@c"}
    kept = driver.driver_environment(own, (), "search", 1)
    assert kept[name] == "as here"
    assert not {"AUTOTUNE_TOKEN", "AUTOTUNE_DATABASE"} & kept.keys()


@pytest.fixture
def wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows' driver is here."""
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(cap, "_WSL", tmp_path / "dxg")


def take(enforce: bool) -> None:
    """Begin a trial, and use CUDA."""
    plan = Plan(settings=Settings(), budget=Budget(limit=8 * GIB, device="cuda"))
    take_card(plan, MeasureOptions(parity_batch=None, enforce=enforce), lambda: None)
    torch.cuda.init()


@pytest.mark.usefixtures("wsl")
def test_in_wsl_what_runs_without_a_budget_has_what_the_device_has_free(card: Card) -> None:
    """Else Windows' driver would lend host memory, and the reference crawl."""
    card.total_bytes, card.context_bytes = 512 * MIB, 100 * MIB
    card.processes = [Process(1, 256 * MIB, "Xwayland", is_graphics=True)]
    take(enforce=False)
    assert card.most_reserved_bytes == 156 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(158 * MIB, dtype=torch.uint8, device="cuda")


def test_elsewhere_the_driver_refuses_by_itself(card: Card) -> None:
    take(enforce=False)
    assert card.fraction == 1.0


@pytest.mark.usefixtures("wsl")
def test_in_wsl_a_trial_with_a_budget_is_held_to_that(card: Card) -> None:
    take(enforce=True)
    assert card.fraction == 1.0  # until its plan is applied


@pytest.fixture
def doctor(card: Card, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[dict[str, Any], str]]:
    """What it finds, and says, over a card whose torch has CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("autotune.workers.devices.torch_builds", lambda: {"cuda": "13.0"})

    def run() -> tuple[dict[str, Any], str]:
        found = examine()
        screen = Console(width=300, record=True, file=io.StringIO())
        screen.print(explain(found))
        return found, screen.export_text()

    return run


def test_doctor_says_who_uses_a_gpu(card: Card, doctor: Callable[[], tuple[dict[str, Any], str]]) -> None:
    card.processes = [Process(os.getppid(), 3 * GIB)]
    found, said = doctor()
    (row,) = found["gpus"]
    assert (row["uuid"], row["type"]) == (f"GPU-{card.uuid}", "NVIDIA A100-SXM4-40GB, 40 GiB")
    assert [(one["pid"], one["bytes"]) for one in row["others"]] == [(os.getppid(), 3 * GIB)]
    assert "also used by" in said
    assert "Others use a GPU here: a trial waits" in said


def test_doctor_says_nothing_of_a_gpu_that_is_this_processes_alone(card, doctor):
    card.open()
    found, said = doctor()
    assert found["gpus"][0]["free_bytes"] == card.free_bytes
    assert "nobody else is seen on it" in said
    assert not [line for line in found["advice"] if "GPU" in line]


def test_doctor_says_what_a_container_hides(card, doctor):
    card.pids_hidden = True
    card.open()
    assert any("The driver does not show what this process takes" in line for line in doctor()[0]["advice"])


def test_doctor_says_that_unlike_gpus_want_a_name_and_what_is_not_visible(card, doctor, monkeypatch):
    other = Card(name="NVIDIA T4", total_bytes=15 * GIB)
    card.beside = [other]
    advice = doctor()[0]["advice"]
    assert any("Unlike GPUs: a search wants one type" in line for line in advice)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{card.uuid}")
    found = doctor()[0]
    assert [row["uuid"] for row in found["gpus"]] == [f"GPU-{card.uuid}"]
    assert "Not visible, and not used: NVIDIA T4, 15 GiB." in found["advice"]


@pytest.mark.usefixtures("wsl")
def test_doctor_says_what_follows_in_wsl(doctor):
    assert any(line.startswith("WSL: Windows' driver lends host memory") for line in doctor()[0]["advice"])


def test_doctor_says_whose_memory_a_jetson_has(card, doctor, monkeypatch):
    card.is_unified = True
    monkeypatch.setattr("autotune.report.doctor.visible_gpus", lambda: (Gpu("GPU-1", "Orin", 30 * GIB),))
    found, said = doctor()
    assert any(line.startswith("This GPU shares the machine's memory (Jetson, GB10)") for line in found["advice"])
    assert "Orin, 30 GiB, free memory unknown" in said


def test_doctor_says_that_like_gpus_have_a_trial_each(card, doctor):
    card.beside = [Card()]
    advice = doctor()[0]["advice"]
    assert "A search runs 2 trials at once, one on each GPU, each on processors of its own." in advice


def test_doctor_says_that_a_driver_is_too_old_for_torch(card, doctor, monkeypatch):
    """Torch then sees no device, and only the CPU is listed."""
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("autotune.report.doctor.torch_builds", lambda: {"cuda": "13.0"})

    def init() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("torch.cuda.init", init)
    found = doctor()[0]
    assert [one["type"] for one in found["devices"]] == ["cpu"]
    assert [line for line in found["advice"] if said in line and "a newer driver" in line]
