"""``parallel: {kind: fsdp, cpu_offload: true}`` on a card: where its shards are, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from search_tables import facts
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotune
from autotune.errors import PlanError
from autotune.estimates.types import Prediction
from autotune.measure.facts import _of_model
from autotune.plan import Plan
from autotune.searches.predicted.predictions import _Foresight
from autotune.techniques import Device, Facts, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.offload import Offload
from autotune.techniques.parallel import Parallel

ON_HOST = Parallel(kind="fsdp", processes=2, cpu_offload=True)
CARD = Device(type="cuda", name="A card", memory_bytes=2**33, capability=(8, 0), bf16=True)


@pytest.fixture
def two_ranks(card) -> Iterator[None]:
    """This process as the first of two, whose exchanges do nothing; there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    return nn.Sequential(blocks, nn.BatchNorm1d(8), nn.Linear(8, 2)).to("cuda")


def shared_out(parallel: Parallel) -> nn.Module:
    return autotune.apply_to_model(Plan(settings=Settings(parallel=parallel)), model())


def test_shards_lie_in_page_locked_memory_and_buffers_on_the_card(two_ranks):
    there = shared_out(ON_HOST)
    assert {p.to_local().device.type for p in there.parameters()} == {"cpu"}
    assert all(p.to_local().is_pinned() for p in there.parameters())
    assert {buffer.device.type for buffer in there.buffers()} == {"cuda"}
    on_card = shared_out(ON_HOST.model_copy(update={"cpu_offload": False}))
    assert {p.to_local().device.type for p in on_card.parameters()} == {"cuda"}


def test_a_group_that_exchanges_nothing_on_the_host_is_refused_in_words(two_ranks, monkeypatch):
    """As one that was joined for NCCL alone."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(PlanError, match="No backend type associated with device type cpu"):
        shared_out(ON_HOST)


def on_card(**known):
    return facts(device=CARD, num_devices=2, **known)


def foresight_of(known: Facts) -> _Foresight:
    """That has time to ask."""
    time_budget = SimpleNamespace(elapsed_s=lambda: 0.0)
    return _Foresight(SimpleNamespace(options=SimpleNamespace(max_time=None), time_budget=time_budget, facts=known))


def test_each_process_keeps_what_blocks_save_on_the_one_host():
    """And has a card of its own."""
    foresight = foresight_of(on_card(num_blocks=2))
    settings = Settings(
        batch=Batch(micro=8, accumulate=2),
        offload=Offload(kind="activations", to="host"),
        parallel=Parallel(kind="ddp", processes=2),
    )
    alone = Prediction(peak_bytes=1050, high_bytes=1100, host_bytes=300)
    foresight.known[foresight.key(settings).canonical()] = alone
    assert foresight.predict(settings) == alone.model_copy(update={"host_bytes": 600})


def test_memory_is_predicted_of_what_is_on_the_card():
    """Blocks of 100 bytes, 40 outside of them, 8 of buffers: 2 * 40 + 6 * 100 + 8 beside 300 of 1,000 bytes of tensors;
    700 of 1,000 bytes were the model's. With the card's context of 50 it was 1,050 for one process."""
    known = on_card(block_bytes=100, outside_bytes=40, buffer_bytes=8, num_parameters=85)
    foresight = foresight_of(known)
    settings = Settings(batch=Batch(micro=8, accumulate=2), parallel=ON_HOST)
    alone = Prediction(peak_bytes=1050, high_bytes=1100, tensor_bytes=1000, beside_bytes=300)
    foresight.known[foresight.key(settings).canonical()] = alone
    found = foresight.predict(settings)
    assert (found.peak_bytes, found.high_bytes) == (50 + 300 + 680 + 8, 100 + 300 + 680 + 8)
    sharded = settings.having(ON_HOST.model_copy(update={"cpu_offload": False}))
    assert foresight.predict(sharded) is None


def test_the_card_has_the_whole_model_once_and_the_host_its_shards():
    """250 parameters take more than two gathered blocks of eight bytes; AdamW has two numbers beside each of those 200
    that train, and a gradient."""
    known = on_card(block_bytes=8, outside_bytes=4, num_parameters=250, num_trainable=200, optimizer_states=2)
    assert ON_HOST.bytes_on_card(20, known) == 1000
    assert ON_HOST.host_cached_bytes(known) == 4 * (250 + 3 * 200)
    assert ON_HOST.unavailable(known) is None
    assert ON_HOST.model_copy(update={"reshard": False}).bytes_on_card(20, known) is None


def test_what_is_known_of_a_model():
    net = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.BatchNorm1d(4))
    found = _of_model(net, ["0"])
    assert (found["block_bytes"], found["outside_bytes"], found["buffer_bytes"]) == (80, 32, 40)
    assert torch.tensor(0).nbytes == 8  # of batches that the norm has seen, beside two rows of four
    net.register_buffer("adjacency", torch.eye(4).to_sparse())  # four values, of two places each
    assert _of_model(net, ["0"])["buffer_bytes"] == 40 + 4 * (4 + 2 * 8)
