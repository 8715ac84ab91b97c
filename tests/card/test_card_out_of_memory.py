"""Memory that ran out on a card: known for what it is, whichever library says so, and nothing else taken for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.measure import inspect as inspecting
from autotune.techniques.batch import Batch
from autotune.training.halving import Halving
from autotune.training.out_of_memory import is_out_of_memory, ran_out

MIB = 2**20

PROVEN = [
    "Triton Error [CUDA]: out of memory",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "miopenStatusAllocFailed",
]
DOUBTFUL = [
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "FIND was unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
]


def card(monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, num_refused: int = 0) -> None:
    """A card with so much free memory, whose allocator has refused so often in this process; None is one that has
    failed and answers no more."""

    def answer(what):
        if free_bytes is None:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return what

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: answer((free_bytes, 16384 * MIB)))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: answer({"num_ooms": num_refused}))


@pytest.mark.parametrize("text", PROVEN)
def test_every_librarys_words_for_it_are_known(text):
    """With most of the card free, since a smaller limit may be set."""
    assert ran_out(RuntimeError(text)) == "device"


@pytest.mark.parametrize("text", DOUBTFUL)
def test_what_may_have_other_causes_is_a_lack_of_memory_on_a_full_card(monkeypatch, text):
    card(monkeypatch, free_bytes=20 * MIB)
    assert ran_out(RuntimeError(text)) == "device"


@pytest.mark.parametrize("text", DOUBTFUL)
def test_it_is_so_where_the_allocator_refused_memory_and_a_library_swallowed_that(monkeypatch, text):
    """As cuDNN's convolutions do, engine by engine: a limit refuses while the card is nearly empty."""
    card(monkeypatch, free_bytes=12000 * MIB, num_refused=7)
    assert ran_out(RuntimeError(text)) == "device"


@pytest.mark.parametrize("text", DOUBTFUL)
def test_with_memory_left_it_is_an_error_of_another_kind(monkeypatch, text):
    card(monkeypatch, free_bytes=12000 * MIB)
    assert not is_out_of_memory(RuntimeError(text))


def test_a_card_that_has_failed_is_no_full_one(monkeypatch):
    card(monkeypatch, free_bytes=None)
    assert not is_out_of_memory(RuntimeError(DOUBTFUL[0]))


def test_without_a_card_such_a_text_proves_nothing():
    assert not is_out_of_memory(RuntimeError(DOUBTFUL[0]))


def test_tritons_shared_memory_is_no_memory_of_the_card():
    text = "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help."
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: Cannot allocate memory (12)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ],
)
def test_the_hosts_memory_is_told_from_the_devices(error):
    assert ran_out(error) == "host"


def test_host_memory_that_cannot_be_pinned_is_the_hosts():
    """By the thread that pins, in torch's words, or by the line that pins."""
    said = "CUDA error: out of memory"
    assert ran_out(RuntimeError(f"Caught RuntimeError in pin memory thread for device 0.\n{said}")) == "host"

    with pytest.raises(RuntimeError) as raised:
        torch.ones(1).pin_memory()  # which this machine cannot do
    raised.value.args = (said,)
    assert ran_out(raised.value) == "host"


def test_the_split_check_takes_fewer_samples_where_cudnn_has_no_memory(monkeypatch):
    """The reference's own inspection: 8, 4, then 2 samples fit."""
    card(monkeypatch, free_bytes=20 * MIB)
    seen = []

    def measured(task, model, samples, device):
        seen.append(len(samples))
        if len(samples) > 2:
            raise RuntimeError(DOUBTFUL[5])
        return "split"

    monkeypatch.setattr(inspecting, "measure_split", measured)
    data = SimpleNamespace(samples=[*range(8)])
    assert inspecting._split(SimpleNamespace(infers=False), nn.Linear(1, 1), data, "cpu") == "split"
    assert seen == [8, 4, 2]


def test_the_split_check_raises_what_is_no_lack_of_memory(monkeypatch):
    def measured(*_):
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(inspecting, "measure_split", measured)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        inspecting._split(SimpleNamespace(infers=False), nn.Linear(1, 1), SimpleNamespace(samples=[1, 2]), "cpu")


def test_the_micro_batch_is_halved_where_cublas_has_no_memory(monkeypatch):
    card(monkeypatch, free_bytes=20 * MIB)
    halving, sizes = Halving(Batch(micro=8), is_on=True), []

    def train(part, position):
        sizes.append(len(part))
        if len(part) > 4:
            raise RuntimeError(DOUBTFUL[2])
        return torch.zeros(()), 1.0

    with pytest.warns(UserWarning, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        halving.run(torch.zeros(8), None, True, train, lambda: None, lambda: True)
    assert sizes == [8, 4, 4]
