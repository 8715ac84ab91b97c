"""``offload``: its contract on the zoo, what is written where, and what is left of it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotune
from autotune.errors import PlanError, UserError
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Budget, Plan
from autotune.techniques import Settings, offload
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.support.disk import offloading, saved_elsewhere
from autotune.techniques.support.disk.saved_to_disk import Disk
from autotune.testing.techniques import TechniqueContract

ON_DISK = Offload(kind="activations")
FEATURES, SAMPLES = 64, 512
TENSOR_BYTES = 4 * FEATURES * SAMPLES
"""Of (samples, features): 128 KiB."""


@pytest.mark.usefixtures("_everything")
class TestOffload(TechniqueContract):
    technique = Offload
    bitwise = True
    lacking = (ON_DISK, Offload(kind="parameters"))

    @pytest.fixture
    def _everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors of any size: the zoo's are small."""
        for module in (offload, offloading, saved_elsewhere):
            monkeypatch.setattr(module, "_LEAST_BYTES", 1)


def block() -> nn.Module:
    """Keeps what it is given, and what the ReLU returns, once each."""
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5))


def model_of(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return autotune.apply_to_model(Plan(settings=Settings(**settings)), nn.Sequential(block(), block(), block()))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    loss = model(x).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def disk_of(model: nn.Module) -> Disk:
    """Of its first block."""
    found: Disk = vars(model[0])["forward"].args[1]
    return found


@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks")}, {"layers": Layers(kind="exact")}]
)
def test_values_gradients_and_dropout_are_the_stock_models(others):
    ours, theirs = gradients(model_of(offload=ON_DISK, **others)), gradients(model_of(**others))
    assert all(map(torch.equal, ours, theirs))


def test_room_in_the_file_is_used_again_and_nothing_of_it_has_a_name(monkeypatch, tmp_path):
    """Of each block: its input, what the ReLU returns, and the mask of the dropout, of which a CPU makes numbers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = model_of(offload=ON_DISK)
    for _ in range(3):
        gradients(model)
    assert disk_of(model)._file.end == 3 * 3 * TENSOR_BYTES
    assert not os.listdir(tmp_path)


def test_blocks_that_are_not_named_write_nothing():
    model = model_of(offload=Offload(kind="activations", blocks=(1,)))
    assert [("forward" in vars(one)) for one in model] == [False, True, False]


def test_of_a_recomputed_block_what_it_was_given_is_written():
    model = model_of(offload=ON_DISK, checkpointing=Checkpointing(kind="blocks"))
    gradients(model)
    assert disk_of(model)._file.end == 3 * TENSOR_BYTES


def test_without_gradients_nothing_is_written():
    model = model_of(offload=ON_DISK)
    with torch.no_grad():
        model(torch.randn(SAMPLES, FEATURES))
    assert disk_of(model)._file is None


class Parts(nn.Module):
    """The product of the first two parts of what a layer returns."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(FEATURES, number * FEATURES), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, *_ = self.linear(x).chunk(self.number, dim=-1)
        return one * two


@pytest.mark.parametrize("number", [2, 3])
def test_parts_of_one_tensor_are_written_once(number):
    """Of two halves, all of it; of two thirds, each by itself."""
    stock = nn.Sequential(Parts(number), Parts(number))
    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), copy.deepcopy(stock))
    for ours, theirs in zip(gradients(model), gradients(stock), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert disk_of(model)._file.end == 2 * 3 * TENSOR_BYTES


def test_a_tensor_that_was_changed_since_is_another():
    """Both values are had again: that of before the change, and that of after it."""
    disk, x = Disk(), torch.zeros(SAMPLES, FEATURES)
    pack = disk.saving(nn.Identity())
    before = pack(x)
    x.add_(1)
    after = pack(x)
    assert [one.tensor().sum().item() for one in (before, after)] == [0, SAMPLES * FEATURES]


def test_a_copy_has_a_file_of_its_own_and_survives_a_pickle():
    model = model_of(offload=ON_DISK)
    other = copy.deepcopy(model)
    assert disk_of(other) is not disk_of(model)
    assert vars(other[0])["forward"].args[2] is other[0]
    for one in (other, pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, gradients(one), gradients(model)))


class Forked(nn.Module):
    """Returns a small second output, of which no loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x).tanh()
        return y, self.router(y).softmax(-1)


def test_nothing_is_kept_of_what_backward_never_comes_to():
    """Neither in memory nor in the file, where an output is not used, or no backward pass follows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Forked(), Forked()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.blocks:
                x, _ = one(x)
            return x

    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), Model())
    disk: Disk = vars(model.blocks[0])["forward"].args[1]
    gc.collect()
    gc.disable()
    try:
        ends = []
        for step in range(6):
            loss = model(torch.randn(SAMPLES, FEATURES)).sum()
            if step % 2:
                loss.backward()
            del loss
            ends.append(disk._file.end)
    finally:
        gc.enable()
    assert len(set(ends[1:])) == 1


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.fft(self.linear(x))
        return torch.fft.ifft(f * f.conj() * f.conj()).real * f.conj().imag


class InPlace(nn.Module):
    """Changes what the operation before it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid()[:8].exp().mul_(2)


def test_conjugated_and_negated_views_are_had_again():
    stock = nn.Sequential(Spectrum(), Spectrum())
    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), copy.deepcopy(stock))
    assert all(map(torch.equal, gradients(model), gradients(stock)))


def test_what_stays_in_memory_and_was_changed_since_is_told_as_torch_tells_it():
    """Eight rows are too small for the file."""
    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), nn.Sequential(InPlace(), nn.Identity()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(SAMPLES, FEATURES)).sum().backward()


def _in_child(model: nn.Module, wanted: list[torch.Tensor], answer: Any) -> None:
    torch.set_num_threads(1)
    answer.put(all(all(map(torch.equal, gradients(model), wanted)) for _ in range(20)))


def test_a_process_that_was_forked_writes_to_a_file_of_its_own():
    with one_thread():
        model = model_of(offload=ON_DISK)
        wanted = gradients(model)
        fork = multiprocessing.get_context("fork")
        answer = fork.SimpleQueue()
        child = fork.Process(target=_in_child, args=(model, wanted, answer))
        child.start()
        assert all(all(map(torch.equal, gradients(model), wanted)) for _ in range(20))
        child.join()
    assert answer.get()


def test_a_full_disk_is_told_in_words():
    """A file may have 64 KiB here, as a process may be told."""
    model, limits = model_of(offload=ON_DISK), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(UserError, match=r"settings\.offload: .* cannot be written to .* Set TMPDIR"):
            gradients(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(UserError, match=r"/dev/shm lies in memory"):
        gradients(model_of(offload=ON_DISK))


def test_memory_is_predicted_before_a_trial():
    """Twelve blocks that keep 3 tensors each of 4 samples; with them on disk one block's are there at a time."""
    task = autotune.Task(
        build_model=lambda: nn.Sequential(*(block() for _ in range(12))),
        build_dataset=lambda: list(torch.randn(4, SAMPLES, FEATURES)),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=4,
    )
    stock, ours = (
        fit_memory_model(Plan(settings=Settings(offload=one), budget=Budget(device="cpu")), task).peak_bytes(4)
        for one in (Offload(), ON_DISK)
    )
    kept = 12 * 4 * 3 * TENSOR_BYTES
    assert 0.8 * kept < stock - ours < kept


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(
        PlanError, match=r"settings\.offload\.blocks: must be numbers of the model's 3 blocks, but got 3"
    ):
        model_of(offload=Offload(kind="activations", blocks=(3,)))
    assert Settings(offload=ON_DISK, compile=Compile(kind="model")).conflict() is not None
    with pytest.raises(ValueError, match="must ascend"):
        Offload(kind="activations", blocks=(1, 0))
