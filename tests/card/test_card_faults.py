"""A card that fails, a driver that torch cannot use, and a host without memory: each told for what it is, and none of
them held against a configuration's use of the card."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import GIB, Card

from autotune.errors import TrialsLost
from autotune.measure import MeasureOptions
from autotune.plan import Budget, Plan
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers import Crashed, Failed, Lost, MeasureRequest, OutOfMemory
from autotune.workers._base import result_of
from autotune.workers.outcome import Outcome
from autotune.workers.pool import done
from autotune.workers.trial import child
from autotune.workers.trial.failure import outcome_of
from autotune.workers.trial.folder import TrialFolder
from autotune.workers.trial.supervise import Ending
from autotune.workers.trial.verdict import verdict

REQUEST = MeasureRequest(
    id="1",
    task="model.py",
    device="cuda",
    plan=Plan(settings=Settings(), budget=Budget(limit=8 * GIB, device="cuda")),
    options=MeasureOptions(parity_batch=8),
)
TASK = """
import torch
from torch.utils.data import TensorDataset
build_model = lambda: torch.nn.Linear(4, 1)
build_dataset = lambda: TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
batch_size = 8
def compute_loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
LOST = [
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "CUDA error: system has unsupported display driver / cuda driver combination",
    "CUDA error: system not yet initialized",
    "CUDA error: unknown error",
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized",
    TOO_OLD,
]


def ending(**changes: Any) -> Ending:
    known = {"status": 0, "ended_for": None, "peak_bytes": 3500 * MIB, "oom_killed": True, "seconds": 1.0, "output": ""}
    return Ending(**{**known, **changes})


def measured(tmp_path: Path, request: MeasureRequest = REQUEST) -> Outcome:
    """What a trial's process answers."""
    task = tmp_path / "model.py"
    task.write_text(TASK)
    folder = TrialFolder(tmp_path / "trial")
    folder.make()
    asked = request.of_task(str(task))
    return child._answer(lambda: child._run(asked, folder, 0.0), asked.device)


@pytest.mark.parametrize("text", LOST)
def test_a_card_that_fails_says_nothing_of_the_configuration(text: str) -> None:
    outcome = outcome_of(RuntimeError(text), "cuda")
    assert isinstance(outcome, Lost)
    assert text.partition("\n")[0] in outcome.message


def test_a_search_ends_with_what_the_card_said() -> None:
    """As wrong input, exit code 2; what was measured is kept."""
    with pytest.raises(TrialsLost, match="uncorrectable ECC error") as raised:
        result_of(done(outcome_of(RuntimeError(LOST[0]), "cuda")))
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"]
)
def test_a_kernel_that_fails_is_the_tasks_own(text: str) -> None:
    assert isinstance(outcome_of(RuntimeError(text), "cuda"), Failed)


def test_on_a_cpu_a_task_that_asks_for_a_card_is_at_fault() -> None:
    assert isinstance(outcome_of(AssertionError("Torch not compiled with CUDA enabled"), "cpu"), Failed)


@pytest.mark.parametrize("error", [RuntimeError(TOO_OLD), AssertionError("Torch not compiled with CUDA enabled")])
def test_a_driver_that_torch_cannot_use_is_told_before_the_task_runs(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Torch itself only warns, and says that it sees no device."""

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fails)
    outcome = measured(tmp_path)
    assert isinstance(outcome, Lost)
    assert str(error) in outcome.message
    assert "--device cpu" in outcome.message


def test_a_card_that_fails_in_mid_trial_ends_in_its_words(card: Card, tmp_path: Path) -> None:
    card.fails["matmul"] = LOST[0]
    outcome = measured(tmp_path)
    assert isinstance(outcome, Lost)
    assert "uncorrectable ECC error" in outcome.message


def test_a_full_card_ends_a_trial_in_words_where_its_peak_cannot_be_read(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has failed with it: what the allocator had reserved is known all the same."""

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    card.has_nvml = False
    card.fails["matmul"] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    began: list[int] = []
    monkeypatch.setattr(child, "enforce_budget", lambda limit: began.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    outcome = measured(tmp_path)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_bytes == torch.cuda.max_memory_reserved() > 0
    assert not judge(outcome, REQUEST.plan.budget, 40 * GIB).feasible


def test_a_peak_of_nothing_is_judged(card: Card) -> None:
    """Of a device that fails before anything is reserved."""
    outcome = OutOfMemory(peak_bytes=0, message="CUDA error: out of memory")
    assert judge(outcome, REQUEST.plan.budget, 40 * GIB).over_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_host_memory_that_runs_out_is_no_use_of_the_card(error: Exception) -> None:
    outcome = outcome_of(error, "cuda")
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("the host's memory ran out, and not the device's")
    assert isinstance(outcome_of(error, "cpu"), OutOfMemory)


def test_a_trial_that_the_kernel_ended_is_no_use_of_the_card(tmp_path: Path) -> None:
    outcome = verdict(REQUEST, TrialFolder(tmp_path), ending(status=int(signal.SIGKILL)))
    assert isinstance(outcome, Crashed)
    assert "the host's memory ran out" in outcome.message
    on_cpu = REQUEST.model_copy(update={"device": "cpu"})
    assert isinstance(verdict(on_cpu, TrialFolder(tmp_path), ending(status=int(signal.SIGKILL))), OutOfMemory)


def test_a_loader_worker_that_the_kernel_ended_is_no_use_of_the_card(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.write_outcome(Failed(message="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "))
    outcome = verdict(REQUEST, folder, ending())
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("the host's memory ran out, and not the device's: the kernel killed")
