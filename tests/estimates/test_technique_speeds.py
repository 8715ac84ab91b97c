"""What offload and other ways to step the optimizer take, by a law; and the law's own figures."""

from __future__ import annotations

import pytest
import torch
from tanh_block import TanhBlock
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import autotune
from autotune.estimates.checkpointing.block_choice import BlockChoice, Places, believed
from autotune.estimates.technique_speeds import file_speeds, step_laws, with_techniques
from autotune.estimates.types import COUNTED, StepLaw, TimeLaw
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.support.disk.unnamed_file import UnnamedFile
from autotune.units import MIB

BATCH, ROWS, WIDTH, NUM_BLOCKS = 2, 2**10, 64, 4
ON_DISK, WEIGHTS_ON_DISK = Offload(kind="activations"), Offload(kind="parameters")
EIGHT_BITS, IN_BACKWARD = OptimizerState(kind="8bit"), OptimizerStep(kind="in_backward")
STEPS = (
    StepLaw(settings=Settings(optimizer_state=EIGHT_BITS), parameter_s=3.0, element_s=0.5, least=4096),
    StepLaw(settings=Settings(optimizer_step=IN_BACKWARD), parameter_s=7.0, element_s=0.0),
)
LAW = TimeLaw(flop_s=1e-30, byte_s=1e-30, write_byte_s=3.0, read_byte_s=2.0, steps=STEPS, is_measured=True)
"""What is counted otherwise takes next to nothing."""


def build_model(freezes: bool = False) -> nn.Module:
    model = nn.Sequential(*(TanhBlock(WIDTH) for _ in range(NUM_BLOCKS)))
    return model.requires_grad_(not freezes)


def task_of(freezes: bool = False) -> Task:
    return Task(
        build_model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), build_model(freezes)),
        build_dataset=lambda: [torch.zeros(ROWS, WIDTH)] * BATCH,
        compute_loss=lambda model, x: model(x).square().mean(),
        batch_size=BATCH,
        blocks=("1",),
    )


def choice(*choices, task: Task | None = None, law: TimeLaw = LAW) -> BlockChoice:
    task = task or task_of()
    counted = BlockChoice.of(Plan(settings=Settings(), budget={"device": "cpu"}), task, choices=choices)
    return BlockChoice(Places.of(task), counted.memory_model, Settings(), choices, law)


INPUT_BYTES = BATCH * ROWS * WIDTH * 4
TANH_BYTES = 4 * INPUT_BYTES
"""What tanh gives, which the layer behind it saves, too: that reads it before tanh does."""
WEIGHT_BYTES = 2 * WIDTH * 4 * WIDTH * 4


def test_what_blocks_save_is_written_once_and_read_by_each_that_saved_it():
    cost = choice(ON_DISK).cost(Settings(offload=ON_DISK), BATCH)
    written, read = INPUT_BYTES + TANH_BYTES, INPUT_BYTES + 2 * TANH_BYTES
    assert cost == pytest.approx(NUM_BLOCKS * (3.0 * written + 2.0 * read))


def test_blocks_that_are_recomputed_write_their_input_alone():
    found = choice(ON_DISK, Checkpointing(kind="blocks"))
    both = Settings(offload=ON_DISK, checkpointing=Checkpointing(kind="blocks"))
    assert found.cost(both, BATCH) == pytest.approx(NUM_BLOCKS * INPUT_BYTES * (3.0 + 2.0))


def test_frozen_weights_are_read_in_forward_and_again_in_backward():
    """They are written once for all."""
    cost = choice(WEIGHTS_ON_DISK, task=task_of(freezes=True)).cost(Settings(offload=WEIGHTS_ON_DISK), BATCH)
    assert cost == pytest.approx(NUM_BLOCKS * 2 * WEIGHT_BYTES * 2.0)


def test_a_step_moves_as_many_bytes_as_a_trace_tells(monkeypatch):
    """Of a real step."""
    moved = {"write": 0, "read": 0}

    def counting(name):
        own = getattr(UnnamedFile, name)

        def counted(self, content, **place):
            moved[name] += len(content)
            return own(self, content, **place)

        return counted

    for name in moved:
        monkeypatch.setattr(UnnamedFile, name, counting(name))
    model = build_model()
    autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), model)
    model(torch.zeros(BATCH, ROWS, WIDTH)).square().mean().backward()
    written, read = INPUT_BYTES + TANH_BYTES, INPUT_BYTES + 2 * TANH_BYTES
    assert moved == {"write": NUM_BLOCKS * written, "read": NUM_BLOCKS * read}


def test_the_optimizers_step_takes_more_for_each_parameter_and_element():
    """A layer of 64 to 64 before four blocks of 64 to 256 to 64: nine weights, whose states go to 8 bits, and as many
    biases, which are too small for that."""
    elements = 64 * 64 + 8 * 64 * 256
    found = choice(EIGHT_BITS, IN_BACKWARD)
    assert found.cost(Settings(optimizer_state=EIGHT_BITS), BATCH) == pytest.approx(9 * 3.0 + 0.5 * elements)
    assert found.cost(Settings(optimizer_step=IN_BACKWARD), BATCH) == pytest.approx(18 * 7.0)


def test_what_is_measured_is_not_believed():
    """The tenth is of what nothing is known."""
    for one in (ON_DISK, EIGHT_BITS, IN_BACKWARD):
        assert believed(Settings().having(one), LAW) == 1
        assert believed(Settings().having(one), COUNTED) == pytest.approx(1.105, abs=1e-3)
    assert believed(Settings(optimizer_state=OptimizerState(kind="4bit")), LAW) > 1
    assert believed(Settings(offload=Offload(kind="activations", to="host")), LAW) > 1


def test_a_law_says_the_speeds_of_what_was_chosen():
    law = TimeLaw(
        flop_s=5e-12, byte_s=2.5e-11, write_byte_s=1.25e-10, read_byte_s=5e-11,
        steps=(StepLaw(settings=Settings(optimizer_state=EIGHT_BITS), parameter_s=3.6e-4, element_s=8e-9),),
    )  # fmt: skip
    assert law.said(Settings()) == "200 GFLOP/s, 40 GB/s"
    assert law.said(Settings(offload=ON_DISK, optimizer_state=EIGHT_BITS)) == (
        "200 GFLOP/s, 40 GB/s, a file at 8 and 20 GB/s, "
        "optimizer state in 8 bits for 8 ns an element and 360 µs a parameter more"
    )


def test_only_what_may_be_chosen_is_measured_and_once_in_a_process():
    plain = with_techniques(COUNTED, "cpu", task_of(), (Checkpointing(kind="blocks"),), 64 * MIB)
    assert plain == COUNTED
    choices = (ON_DISK, EIGHT_BITS, IN_BACKWARD)
    law, again = (with_techniques(COUNTED, "cpu", task_of(), choices, 64 * MIB) for _ in range(2))
    assert law == again
    assert min(law.write_byte_s, law.read_byte_s) > 0
    assert [one.settings for one in law.steps] == [Settings().having(one) for one in choices[1:]]
    assert law.steps[0].element_s > 0


def test_what_an_optimizer_cannot_have_is_not_measured():
    """SGD without momentum keeps no state."""
    model = build_model()
    found = [*step_laws("cpu", torch.optim.SGD(model.parameters(), 0.1), (EIGHT_BITS, IN_BACKWARD), MIB)]
    assert [one.settings.optimizer_step for one in found] == [IN_BACKWARD]


def test_without_a_place_on_a_disk_no_speed_of_it_is_known(monkeypatch):
    def full(*_):
        raise autotune.errors.UserError("the disk is full")

    monkeypatch.setattr(UnnamedFile, "write", full)
    assert file_speeds.__wrapped__(2 * MIB) == (0.0, 0.0)


def test_hooks_of_every_optimizers_step_are_not_told():
    told: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *its: told.append(its))
    try:
        own = torch.optim.AdamW([nn.Parameter(torch.ones(2**13))])
        assert list(step_laws("cpu", own, [OptimizerState(kind="8bit")], 2**30))
    finally:
        hook.remove()
    assert not told
