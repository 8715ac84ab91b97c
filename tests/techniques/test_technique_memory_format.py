"""``memory_format``: its contract, and where strides change and where not."""

from __future__ import annotations

import pytest
import torch
from line_task import training_of
from torch import nn

from autotune.errors import PlanError
from autotune.techniques.memory_format import MemoryFormat, channels_last_fault
from autotune.testing.facts import BARE, facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

LAST = MemoryFormat(kind="channels_last")


class TestMemoryFormat(TechniqueContract):
    technique = MemoryFormat
    lacking = (LAST,)


def test_weights_of_convolutions_are_stored_with_channels_last():
    """A 4 × 3 × 3 × 3 weight: strides 27, 9, 3, 1 become 27, 1, 9, 3; the linear layer's stay."""
    stock, changed = (training_of(ZOO["resnet"], memory_format=choice).model for choice in (MemoryFormat(), LAST))
    assert stock.stem.weight.stride() == (27, 9, 3, 1)
    assert changed.stem.weight.stride() == (27, 1, 9, 3)
    assert changed.head.weight.stride() == stock.head.weight.stride()
    assert torch.equal(changed.stem.weight, stock.stem.weight)


def test_activations_follow_from_the_first_convolution_on():
    """Contiguous images come out of the first convolution with channels last."""
    training = training_of(ZOO["resnet"], memory_format=LAST)
    images = next(iter(training.loader))[0]
    assert images.is_contiguous()
    assert training.model.stem(images).is_contiguous(memory_format=torch.channels_last)


def test_the_optimizer_holds_the_parameters_that_train():
    """Storage is changed beneath the same parameters, before the optimizer is built."""
    training = training_of(ZOO["cnn"], memory_format=LAST)
    held = training.optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, training.model.parameters(), strict=True))


def test_volumes_are_stored_with_channels_last_too():
    """A 3-D convolution's weight, 2 × 2 × 3 × 3 × 3: strides 54, 1, 18, 6, 2; a 1-D convolution's stays."""
    model = nn.Sequential(nn.Conv3d(2, 2, 3), nn.Conv1d(2, 2, 3))
    before = model[1].weight.stride()
    LAST.on_model(model, ())
    assert model[0].weight.stride() == (54, 1, 18, 6, 2)
    assert model[1].weight.stride() == before


@pytest.mark.parametrize(
    ("convolution", "is_at_fault"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(8, 16, 1, stride=2), False),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
    ],
)
def test_a_convolution_that_onednn_computes_past_a_buffer_on_avx2_is_refused(convolution, is_at_fault, monkeypatch):
    """AVX2 takes 8 channels at once: on the other three, 300 backward passes under glibc's checks were clean."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert channels_last_fault(nn.Sequential(convolution)) is None
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    fault = channels_last_fault(nn.Sequential(convolution))
    assert (fault is not None) == is_at_fault
    assert LAST.unavailable(BARE.model_copy(update={"conv_dims": (2,), "channels_last_fault": fault})) == fault
    if is_at_fault:
        with pytest.raises(PlanError, match="0 is a strided 1 × 1 convolution of 4 channels"):
            LAST.on_model(nn.Sequential(convolution), ())


@pytest.mark.parametrize(("dims", "offered"), [((1,), 1), ((2,), 2), ((1, 3), 2), ((), 1)])
def test_it_is_offered_for_images_and_volumes(dims, offered):
    assert len(MemoryFormat.choices(BARE.model_copy(update={"conv_dims": dims}))) == offered


def test_the_zoo_has_models_on_both_sides():
    assert LAST in MemoryFormat.choices(facts_of(ZOO["resnet"]))
    assert LAST not in MemoryFormat.choices(facts_of(ZOO["gpt"]))


def test_dropout_takes_other_values_in_channels_last_and_as_many():
    """torch draws its mask in the order of memory: the same 96 draws, laid on other elements."""
    x, masks = torch.ones(2, 3, 4, 4), []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        masks.append(torch.nn.functional.dropout(x.to(memory_format=memory_format), 0.5))
    assert not masks[0].equal(masks[1])
    assert masks[0].sum() == masks[1].sum()
    assert masks[0].flatten().equal(masks[1].permute(0, 2, 3, 1).flatten())
