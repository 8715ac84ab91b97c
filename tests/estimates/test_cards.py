"""The table of cards: what is asked by name, what a driver's name is taken for, and what a context takes."""

from __future__ import annotations

import re

import pytest

from autotune.errors import UserError
from autotune.estimates.cards import CARDS, find_cards, on_device, option_name
from autotune.estimates.types import CONTEXT
from autotune.techniques import Device
from autotune.units import MIB


def test_every_card_is_found_by_its_own_name_alone():
    assert [find_cards(option_name(card)) for card in CARDS] == [(card,) for card in CARDS]
    assert find_cards("all") == CARDS


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("h100,L40S", ["H100", "L40S"]),
        ("3090", ["RTX 3090"]),
        ("NVIDIA GeForce RTX 3090", ["RTX 3090"]),
        ("a6000, a6000", ["RTX A6000"]),
        ("v100-16gb", ["V100-16GB"]),
        ("h100nvl", ["H100 NVL"]),
        ("AMD Instinct MI325X", ["MI325X"]),
    ],
)
def test_what_people_leave_out_of_a_name_is_not_missed(asked: str, names: list[str]):
    assert [card.name for card in find_cards(asked)] == names


@pytest.mark.parametrize(
    ("asked", "near"),
    [("a100", "a100-40gb, a100-80gb"), ("h1000", "h100"), ("rtx-4080", "rtx-4090"), ("l40s,v100", "v100-16gb")],
)
def test_a_card_that_is_not_known_names_the_nearest(asked: str, near: str):
    with pytest.raises(UserError, match=rf"no card is known as '{asked.split(',')[-1]}'\. The nearest: .*{near}"):
        find_cards(asked)


def test_precisions_follow_from_the_capability():
    """bfloat16 and TF32 from 8.0 on; of AMD's torch's flags allow no TF32."""
    lacking = {card.name for card in CARDS if card.precisions == ("fp32", "fp16")}
    assert lacking == {"T4", "V100-16GB", "V100-32GB", "RTX 2080 Ti"}
    others = {card.name: card.precisions for card in CARDS if card.name not in lacking}
    assert others.pop("MI325X") == ("fp32", "bf16", "fp16")
    assert set(others.values()) == {("fp32", "tf32", "bf16", "fp16")}


def on(name: str, has_convolutions: bool = False) -> int:
    """MiB of the context of a device that a driver names so."""
    device = Device(type="cuda", name=name, memory_bytes=2**34, capability=(8, 0), bf16=True)
    return int(on_device(device, has_convolutions)["context"].value) // MIB


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("NVIDIA H100 80GB HBM3", 650),
        ("NVIDIA H100 NVL", 650),
        ("NVIDIA H200", 800),
        ("NVIDIA L40S", 270),
        ("NVIDIA A100-SXM4-80GB", 512),
        ("a CUDA device of 24 GiB", 512),
    ],
)
def test_the_context_is_the_cards_and_of_any_that_is_not_known(name: str, context: int):
    assert on(name) == context
    assert on(name, has_convolutions=True) == context + 16


def test_a_context_moves_all_of_its_interval():
    """An H100's is 138 MiB above the one of a card of which no more is known, at either end."""
    found = on_device(find_cards("h100")[0].device, has_convolutions=False)
    assert found == {"target": "cuda", "capability": (9, 0), "context": CONTEXT.plus(138 * MIB)}


def test_a_context_that_is_here_is_what_it_takes_and_what_a_step_loads():
    """An H200's took 610 MiB when it was opened, and 742 to 828 after steps."""
    device = Device(type="cuda", name="NVIDIA H200", memory_bytes=2**37, capability=(9, 0), bf16=True)
    found = on_device(device, False, context_bytes=610 * 2**20)["context"]
    assert (found.low / 2**20, found.value / 2**20, found.high / 2**20) == (610, 756, 910)
    planned = on_device(device, False)["context"]
    assert found.high < planned.high


@pytest.mark.parametrize(("name", "more"), [("NVIDIA H100 80GB HBM3", 1200), ("NVIDIA L40S", 100)])
def test_trying_every_kernel_loads_all_of_cudnns(name: str, more: int):
    """``torch.backends.cudnn.benchmark``: focalnet's process took as much more on an H100, of one sample already."""
    device = Device(type="cuda", name=name, memory_bytes=2**34, capability=(9, 0) if more > 1000 else (8, 9), bf16=True)
    chosen, tried = (on_device(device, True, tries)["context"] for tries in (False, True))
    assert (tried.value - chosen.value) // MIB == more
    assert on_device(device, False, True)["context"] == on_device(device, False)["context"]


def test_a_driver_keeps_what_nvidia_smi_counts_as_used():
    """81,559, 143,771 and 46,068 MiB are nvidia-smi's totals."""
    totals = {card.name: card.memory_mib + card.driver_mib for card in CARDS if card.driver_mib}
    assert totals == {"L40": 46_068, "L40S": 46_068, "H100": 81_559, "H200": 143_771, "MI325X": 262_144}


def test_an_amd_card_has_no_cudnn_and_what_its_convolutions_take_is_a_share():
    """1,688 MiB above the context of a card of which no more is known; beside it 0.8 of what a CUDA card takes, and 1.5
    at most, where there are convolutions."""
    (card,) = find_cards("MI325X")
    device = card.device.model_copy(update={"name": "AMD Instinct MI325X"})
    plain = {"target": "cuda", "capability": (9, 4), "context": CONTEXT.plus((2200 - 512) * MIB)}
    assert on_device(device, has_convolutions=False) == plain
    assert on_device(device, True, True) == {**plain, "workspaces": (0.8, 1.5)}
    assert [one.name for one in CARDS if one.is_amd] == [card.name]


def test_names_are_as_a_driver_would_have_them():
    assert all(re.fullmatch(r"[A-Za-z0-9 -]+", card.name) for card in CARDS)
