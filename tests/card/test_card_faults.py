"""A card that fails, a driver that torch cannot use, and a host without memory: each told for what it is, and none of
them held against a configuration's use of the card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import Card
from told import GIB

from autotune.device_memory import context, nvml
from autotune.device_memory.context import open_context
from autotune.errors import TrialsLost
from autotune.measure import MeasureOptions
from autotune.measure.errors import DeviceLost
from autotune.plan import Budget, Plan
from autotune.script.trial.trial import _without_card
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.techniques.parallel import Parallel
from autotune.units import MIB
from autotune.workers import Crashed, Failed, Lost, MeasureRequest, OutOfMemory, TimedOut, devices
from autotune.workers._base import result_of
from autotune.workers.devices import installed_gpus
from autotune.workers.local import LocalSlot
from autotune.workers.outcome import Outcome
from autotune.workers.pool import done
from autotune.workers.trial import child
from autotune.workers.trial.failure import outcome_of
from autotune.workers.trial.folder import TrialFolder
from autotune.workers.trial.group import run_group
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


@pytest.mark.parametrize(
    ("said", "kind"), [(TOO_OLD, Lost), ("No CUDA GPUs are available", Failed)], ids=["driver", "script"]
)
def test_a_script_that_hides_its_card_is_told_from_a_driver_that_shows_none(
    card: Card, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Outcome]
) -> None:
    def fails() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert isinstance(_without_card(), kind)


def test_several_processes_without_a_driver_are_lost_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = Settings(parallel=Parallel(kind="ddp", processes=2))
    asked = REQUEST.model_copy(update={"plan": REQUEST.plan.model_copy(update={"settings": settings})})
    with pytest.raises(DeviceLost, match="Torch not compiled with CUDA enabled"):
        run_group(asked, TrialFolder(tmp_path), 0.0, lambda *_: os._exit(1))


def test_a_card_that_fails_in_mid_trial_ends_in_its_words(card: Card, tmp_path: Path) -> None:
    card.fails["matmul"] = LOST[0]
    outcome = measured(tmp_path)
    assert isinstance(outcome, Lost)
    assert "uncorrectable ECC error" in outcome.message


def test_a_full_card_ends_a_trial_in_words_where_its_peak_cannot_be_read(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has failed with it: what the allocator had reserved is known all the same."""

    def info(*_: Any) -> tuple[int, int]:
        if "matmul" not in card.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return card.free_bytes, card.total_bytes

    card.has_nvml = False
    card.fails["matmul"] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
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


class Server:
    """A fork server whose next trial comes to this."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def run(self, request: MeasureRequest) -> Outcome:
        return self._outcome

    def is_up(self) -> bool:
        return True


def run_in_slot(
    monkeypatch: pytest.MonkeyPatch, folder: Path, outcome: Outcome, counted: Callable[[str | None], str | None]
) -> Outcome:
    """What a slot makes of an outcome, on a machine whose driver says this in a new process."""
    (folder / "nvidiactl").touch()
    monkeypatch.setattr(devices, "_DEV", folder)
    monkeypatch.setattr(devices, "_said_by_cuda", counted)
    slot = LocalSlot({"CUDA_VISIBLE_DEVICES": "GPU-7"}, name="GPU-7")
    monkeypatch.setattr(slot, "_server", lambda key: Server(outcome))
    return slot.run(REQUEST)


ENDINGS = [
    Failed(message="RuntimeError: CUDA error: unspecified launch failure"),
    Crashed(message="Bus error (SIGBUS) while training"),
    TimedOut(deadline_s=60.0, message="ended while training"),
]


@pytest.mark.parametrize("outcome", ENDINGS)
def test_a_card_that_fell_off_the_bus_in_mid_trial_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome
) -> None:
    """Whatever the trial came to: a kernel that failed, a signal, or a wait without end."""
    found = run_in_slot(monkeypatch, tmp_path, outcome, lambda visible: "")
    assert isinstance(found, Lost)
    assert "GPU-7: this GPU has failed: CUDA's driver does not count it any more." in found.message
    assert outcome.message in found.message


def test_a_driver_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hangs(visible: str | None) -> str:
        raise subprocess.TimeoutExpired("cuda_driver.py", 60)

    found = run_in_slot(monkeypatch, tmp_path, ENDINGS[2], hangs)
    assert isinstance(found, Lost)
    assert "does not answer" in found.message


@pytest.mark.parametrize("said", ["GPU-7\tNVIDIA A100\t42\n", None])
def test_on_a_card_that_is_well_a_failure_is_the_configurations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None
) -> None:
    """Also where nothing can be asked."""
    assert run_in_slot(monkeypatch, tmp_path, ENDINGS[0], lambda visible: said) == ENDINGS[0]


def test_the_driver_is_asked_in_a_process_of_its_own_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that a driver keeps is not waited for."""
    asked = tmp_path / "python"
    asked.write_text('#!/bin/sh\n[ "$CUDA_VISIBLE_DEVICES" = GPU-7 ] && exec sleep 60\necho all\n')
    asked.chmod(0o755)
    monkeypatch.setattr(devices.sys, "executable", str(asked))
    assert devices._said_by_cuda() == "all\n"
    monkeypatch.setattr(devices, "_PATIENCE_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        devices._said_by_cuda("GPU-7")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(nvml, "_is_silent", threading.Event())


def test_nvml_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    ended, asked = threading.Event(), []

    def hangs() -> None:
        asked.append(1)
        ended.wait()

    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(nvmlInit=hangs, NVMLError=RuntimeError))
    assert [nvml.ask(lambda _: 1) for _ in range(3)] == [None] * 3
    assert (nvml.is_silent(), asked) == (True, [1])
    assert installed_gpus() == ()
    ended.set()


@pytest.mark.parametrize("has_nvml", [True, False])
def test_nvml_that_refuses_or_is_not_there_answers_nothing(
    card: Card, monkeypatch: pytest.MonkeyPatch, has_nvml: bool
) -> None:
    """What the library of an older driver has not is as if it refused."""
    card.has_nvml = has_nvml
    assert nvml.ask(lambda pynvml: pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(7))) is None
    assert nvml.ask(lambda pynvml: pynvml.nvmlNotYet()) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.ask(lambda pynvml: 1) is None
    assert not nvml.is_silent()


def test_nvml_is_asked_nothing_of_torch_which_another_thread_may_be_initializing(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's first use opens the context, under torch's lock: what waits for that lock meanwhile waits for good."""
    held = threading.RLock()

    def waits(*_: Any) -> int:
        if not held.acquire(timeout=1.0):
            raise RuntimeError("it waits for the thread that waits for it")
        held.release()
        return 0

    monkeypatch.setattr(torch.cuda, "device_memory_used", waits)
    monkeypatch.setattr(torch.cuda, "current_device", waits)
    monkeypatch.setattr(nvml, "_PATIENCE_S", 0.5)
    with held:
        open_context()
    assert not nvml.is_silent()
    assert context._opened is not None


@pytest.mark.parametrize("shown", [1, 512 * MIB])
def test_nvml_that_shows_less_than_is_reserved_is_not_believed(
    card: Card, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """The context is by how much the card's used memory grew as it was opened."""
    rows = [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=shown)]
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetComputeRunningProcesses", lambda handle: rows)
    open_context()
    held = torch.zeros(1024 * MIB, dtype=torch.uint8, device="cuda")
    assert context.context_bytes() == card.context_bytes == 400 * MIB
    assert held.is_cuda
