"""What the stand-in does is what torch and CUDA do: else tests over it show nothing."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pynvml
import pytest
import torch
from stand_in import TEXTS, Card
from told import GIB, Process, put_smi
from torch import nn
from torch.utils.data import TensorDataset

import autotune
from autotune.device_memory.context import context_bytes, open_context
from autotune.measure.memory import Charge
from autotune.measure.steps import Steps
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.units import MIB


def test_a_tensor_is_on_the_card_and_so_is_what_is_made_of_it(card: Card) -> None:
    """Also in backward, and in an optimizer's state."""
    model = nn.Linear(4, 4).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(2, 4)
    assert (x.device.type, x.cuda().device.type, x.to(torch.device("cuda", 0)).is_cuda) == ("cpu", "cuda", True)
    model(x.to("cuda")).sum().backward()
    optimizer.step()
    found = [model.weight, model.weight.grad, optimizer.state[model.weight]["exp_avg"]]
    assert [one.device for one in found] == [torch.device("cuda", 0)] * 3
    assert model.weight.cpu().device.type == "cpu"
    assert torch.zeros(3, device="cuda").is_cuda
    assert not torch.zeros(3).is_cuda


def test_the_host_goes_on_and_what_reads_a_result_waits(card: Card) -> None:
    began_s, loss = card.now_s, torch.ones((), device="cuda")
    card.work(0.1)
    assert card.now_s - began_s < 0.001
    assert float(loss) == 1.0
    assert card.now_s - began_s == pytest.approx(0.1, abs=0.001)
    assert card.waits == ["item"]


def test_an_event_is_where_the_stream_is_and_not_where_the_host_is(card: Card) -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    card.work(0.25)
    events[1].record()
    with pytest.raises(RuntimeError, match="not ready"):
        events[0].elapsed_time(events[1])
    events[1].synchronize()
    assert events[0].elapsed_time(events[1]) == pytest.approx(250)


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_copy_waits_unless_it_is_pinned_and_asked_not_to(
    card: Card, pinned: bool, non_blocking: bool, waits: bool
) -> None:
    batch = torch.ones(8)
    batch = batch.pin_memory() if pinned else batch
    card.work(0.1)
    batch.to("cuda", non_blocking=non_blocking)
    assert card.waits == (["copy from pageable memory"] if waits else [])


def test_the_host_waits_where_too_much_is_queued(card: Card) -> None:
    card.most_queued = 4
    began_s = card.now_s
    for _ in range(10):
        card.work(1.0)
    assert card.now_s - began_s == pytest.approx(6.0)


def test_memory_is_reserved_by_torch_s_rules_and_kept(card: Card) -> None:
    """2 MiB for small tensors, 20 for those from 1 MiB on, and another where it needs more; 1 MiB is too little to be
    split off."""
    kept = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for num_bytes in (512, 2 * MIB, 19 * MIB)]
    assert torch.cuda.memory_reserved() == (2 + 20 + 20) * MIB
    assert torch.cuda.memory_allocated() == 512 + (2 + 20) * MIB
    del kept
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == (42 * MIB, 0)
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (0, 42 * MIB)


def test_a_cap_ends_in_out_of_memory_once_the_cache_is_given_back(card: Card) -> None:
    torch.cuda.set_per_process_memory_fraction(64 * MIB / card.total_bytes)
    first = torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")
    del first
    second = torch.zeros(60 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 10\.00 MiB"):
        torch.zeros(10 * MIB, dtype=torch.uint8, device="cuda")
    assert second.numel() == 60 * MIB


def test_others_leave_less_than_the_cap_does(card: Card) -> None:
    card.processes = (Process(77, 39 * GIB + 590 * MIB),)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")


def test_the_context_grows_with_the_first_product_and_the_first_convolution(card: Card) -> None:
    open_context()
    found = [context_bytes()]
    x = torch.ones(1, 2, 8, 8, device="cuda")
    for run in (lambda: x[0, 0] @ x[0, 0], lambda: nn.functional.conv2d(x, x)):
        run()
        found.append(context_bytes())
    assert found == [400 * MIB, 432 * MIB, 480 * MIB]


@pytest.mark.parametrize("hidden", [{"pids_hidden": True}, {"has_nvml": False}])
def test_a_context_is_found_where_nvml_hides_it(card: Card, hidden: dict[str, bool]) -> None:
    vars(card).update(hidden)
    open_context()
    assert Charge(torch.device("cuda")).peak().process == 400 * MIB


def test_nvml_and_nvidia_smi_tell_of_the_same_cards(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.beside = (Card(name="NVIDIA GeForce GTX 1080", total_bytes=8 * GIB, capability=(6, 1)),)
    put_smi(card, tmp_path, monkeypatch)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    assert [pynvml.nvmlDeviceGetUUID(handle) in listed for handle in handles] == [True, True]
    assert torch.cuda.get_device_name(1) == "NVIDIA GeForce GTX 1080"


def test_of_two_cards_a_process_has_those_that_it_is_shown_and_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the processes of ``processes/``: what it takes is charged by the card that it took."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "processes")
    import shared_card

    for module in ("two_cards", "shared_card"):
        monkeypatch.setattr(f"{module}.FOLDER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with shared_card.SharedCard(**shared_card.LIKE, context_bytes=330 * MIB).in_place():
        assert (pynvml.nvmlDeviceGetCount(), torch.cuda.device_count()) == (2, 1)
        assert torch.cuda.get_device_properties().uuid == shared_card.UUIDS[1]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(1)
        assert torch.zeros(2**20, device="cuda").device == torch.device("cuda", 1)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(2)]
        used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
        assert used == [0, (330 + 20) * MIB]


def test_a_fault_comes_once(card: Card) -> None:
    card.fails["convolution"] = TEXTS["cudnn_engine"]
    x = torch.ones(1, 1, 4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        nn.functional.conv2d(x, x)
    nn.functional.conv2d(x, x)


def test_a_fork_cannot_use_the_card(card: Card) -> None:
    card.open()
    card._opened_by = os.getppid()
    with pytest.raises(RuntimeError, match="forked subprocess"):
        torch.zeros(1, device="cuda")


def test_own_code_reads_its_clock_and_ours_does_not(card: Card) -> None:
    from autotune.measure.timing import moments

    before_s, real_s = moments.perf_counter(), perf_counter()
    card.host(1000.0)
    assert moments.perf_counter() - before_s == pytest.approx(1000, abs=0.001)
    assert perf_counter() - real_s < 1000


def _loss(model: Any, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_a_plan_is_applied_and_trains_on_the_card(card: Card) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    task = autotune.Task(build_model=lambda: nn.Linear(4, 2), build_dataset=lambda: data, compute_loss=_loss)
    plan = Plan(settings=Settings(batch=Batch(micro=8)), budget=Budget(device="cuda", limit=GIB))
    training = autotune.apply(plan, task)
    steps = Steps(training)
    card.waits.clear()
    assert training.device == torch.device("cuda", 0)
    assert [steps.step().num_samples for _ in range(9)] == [8] * 9
    assert next(training.model.parameters()).is_cuda
    steps.settle()
    assert card.waits == ["copy from pageable memory"] * 2 * 9 + ["synchronize"]


def test_streams_do_their_work_at_once_and_an_event_orders_them(card: Card) -> None:
    side, began_s = torch.cuda.Stream(), card.now_s
    card.work(0.2)
    with torch.cuda.stream(side):
        card.work(0.1)
        event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    card.work(0.1)
    torch.cuda.synchronize()
    assert card.now_s - began_s == pytest.approx(0.3, abs=0.001)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        card.work(0.1)
    torch.cuda.synchronize()
    assert card.now_s - began_s == pytest.approx(0.4, abs=0.001)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_s_copy_is_told(card: Card, waits: bool) -> None:
    """A copy of 8 MB takes a second here: who writes, or gives back, what it reads has to wait."""
    card.link_bytes_per_s = 8e6
    side, x = torch.cuda.Stream(), torch.ones(2 * 10**6, device="cuda")
    room = torch.empty(2 * 10**6).pin_memory()
    for _ in range(2):
        with torch.cuda.stream(side):
            room.copy_(x, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.add_(1)
        del x
        x = torch.ones(2 * 10**6, device="cuda")
    del x
    found = ["add_ while copy_ of another stream", "freed while copy_ of another stream uses it"]
    assert card.races == ([] if waits else found * 2)
    assert not card.waits


def test_no_stream_is_the_one_that_is(card: Card) -> None:
    """As torch has it for None."""
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        inner = torch.cuda.current_stream()
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is inner


def test_hooks_of_saved_tensors_have_names_and_may_be_of_any_class(card: Card) -> None:
    """torch's names; a partial has no module."""
    kept: list[torch.Tensor] = []
    pack = functools.partial(lambda into, tensor: into.append(tensor) or tensor, kept)
    with torch.autograd.graph.saved_tensors_hooks(pack_hook=pack, unpack_hook=lambda tensor: tensor):
        torch.ones(2, device="cuda").requires_grad_().square().sum().backward()
    assert len(kept) == 1
