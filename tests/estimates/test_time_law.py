"""``TimeLaw``: what a step takes, and what a choice makes of it."""

from __future__ import annotations

import pytest
import torch
from tanh_block import TanhBlock
from torch import nn

from autotune.estimates import CheapestOptions, EstimateOptions
from autotune.estimates import cheapest as module
from autotune.estimates.cheapest import cheapest
from autotune.estimates.predictor import Predictor
from autotune.estimates.time_law import law_here, least_s, page_seconds, seconds
from autotune.estimates.tracing.work import Work
from autotune.estimates.types import TimeLaw
from autotune.measure.profiling.allocations import Allocation, Phase, Trace
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.checkpointing import Checkpointing
from autotune.units import MIB

LAW = TimeLaw(flop_s=2e-9, byte_s=3e-9, new_byte_s=5e-9, is_measured=True)
BLOCKS = Settings(checkpointing=Checkpointing(kind="blocks"))
MMAP = Settings(allocator=Allocator(kind="mmap"))
BATCH, ROWS, WIDTH = 2, 2**14, 64


def test_operations_and_bytes_each_take_their_time():
    assert seconds(LAW, Work(flops=1000, num_bytes=100)) == pytest.approx(2.3e-6)


def test_new_pages_are_those_of_tensors_that_are_mapped_each_time():
    """glibc maps from 32 MiB on, and from 1 MiB on where a plan says so; what was there before the step is not new,
    and what stays is of the first step alone."""
    made = [(0, 64 * MIB, 0, None), (1, 40 * MIB, 1, 4), (2, 2 * MIB, 2, 4), (3, MIB - 1, 3, 4), (4, 64 * MIB, 4, None)]
    trace = Trace(tuple(Allocation(*one, "a", Phase.FORWARD, "temporary") for one in made), (), 5)
    by_itself, mapped, preloaded = (Allocator(kind=kind) for kind in ("system", "mmap", "tcmalloc"))
    assert page_seconds(LAW, trace, by_itself) == {"a": pytest.approx(40 * MIB * 5e-9)}
    assert page_seconds(LAW, trace, mapped) == {"a": pytest.approx(42 * MIB * 5e-9)}
    assert page_seconds(LAW, trace, preloaded) == {}
    larger = Allocator(kind="mmap", from_mib=3)
    assert page_seconds(LAW, trace, larger) == {"a": pytest.approx(40 * MIB * 5e-9)}


def test_speeds_are_measured_once_in_a_process():
    first, again = (law_here("cpu", torch.float32, [2 * 64**3], 8 * MIB) for _ in range(2))
    assert first is again
    assert first.is_measured
    assert min(first.flop_s, first.byte_s) > 0 <= first.new_byte_s


def test_a_card_is_waited_for_after_eight_runs_in_a_row(monkeypatch):
    """A wait for each would measure how long the host takes to begin one; the first run is not timed."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    least_s(lambda: done.append("run"), "cuda", most_s=0.0)
    assert done == ["run", "wait", *["run"] * 8, "wait"]


TASK = Task(
    build_model=lambda: nn.Sequential(*(TanhBlock(WIDTH) for _ in range(8))),
    build_dataset=lambda: [torch.zeros(ROWS, WIDTH)] * BATCH,
    compute_loss=lambda model, x: model(x).square().mean(),
    batch_size=BATCH,
)


def chosen(limit_bytes: int, *combinations: Settings):
    options = CheapestOptions(
        combinations=combinations, choices=(BLOCKS,),
        limit_bytes=limit_bytes, reference_batch=BATCH, is_held=True, is_here=True,
    )  # fmt: skip
    return cheapest(TASK, options, base_bytes=0)


@pytest.mark.parametrize(("new_byte_s", "kind", "recomputes"), [(1e-15, "mmap", False), (1e-6, "system", True)])
def test_the_faster_of_new_pages_and_recomputed_blocks_is_taken(monkeypatch, new_byte_s, kind, recomputes):
    """Just below the heap as it stands both fit: pages of their own for all, and the heap with a recomputed block."""
    law = LAW.model_copy(update={"new_byte_s": new_byte_s})
    monkeypatch.setattr(module, "law_here", lambda *_: law)
    found = chosen(chosen(2**50, Settings()).stock.process.high - 1, Settings(), MMAP)
    assert found.law == law
    assert found.chosen is not None
    assert found.chosen.settings.allocator.kind == kind
    assert (found.chosen.settings.checkpointing != Checkpointing()) == recomputes


def test_how_much_more_glibcs_heap_may_take_goes_by_the_largest_tensors_on_it():
    """Blocks hand on 8 MiB, and what they make within, 32 MiB, has pages of its own. So a step that makes n of 8 MiB
    may take 1.7 times the root of n of them more. With pages from 1 MiB on it makes nothing large on the heap: a tenth
    of what the process is charged remains."""
    options = EstimateOptions(reference_batch=BATCH, is_held=True)
    own = Predictor(TASK, options, base_bytes=0, micros=(BATCH,))
    made = [one for one in own.memory_model(BATCH).memory_model.at(BATCH).allocations if one.born > 0]
    assert {one.num_bytes // MIB for one in made} == {0, 8, 32}
    num_large = sum(one.num_bytes == 8 * MIB for one in made)
    on_heap, mapped = (chosen(2**50, settings).stock.process for settings in (Settings(), MMAP))
    high = own.process(BATCH, Settings()).high
    assert on_heap.high - high == round(1.7 * 8 * MIB * num_large**0.5) > high / 10
    high = own.process(BATCH, MMAP).high
    assert mapped.high - high == round(high / 10)
