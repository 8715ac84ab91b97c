"""Cuts by hand are what they say, and the best of a table is the fastest that keeps its quality."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.quality.cuts import Cut, cut_model, cuts, num_parameters, of_rank, prune_heads
from benchmarks.quality.hand import best, is_proven, quality
from benchmarks.quality.jobs import JOBS, Job

EXAMPLES = {"mlp": 4000, "mlp_narrow": 4000, "vgg": 360, "text_cnn": 3000, "vit": 360}


def untrained(name: str, folder: Path) -> Job:
    """A job whose weights count as trained."""
    job = Job(name, folder)
    torch.manual_seed(0)
    torch.save(job.parts["build_model"]().state_dict(), job.kept("weights"))
    return job


def perceptron(*widths: int) -> int:
    """Parameters, by hand."""
    return sum(one * other + other for one, other in itertools.pairwise(widths))


@pytest.mark.parametrize(("ratio", "width"), [(0.25, 384), (0.5, 256), (0.75, 128), (0.9, 51)])
def test_a_share_of_every_hidden_width_goes(tmp_path: Path, ratio: float, width: int):
    cut = cut_model(untrained("mlp_narrow", tmp_path), Cut(ratio))
    assert num_parameters(cut) == perceptron(64, width, width, width, 6)


def test_ranks_are_lowered_in_what_a_cut_has_left(tmp_path: Path):
    """Of 64-256-256-256-6: rank 16 of the first layer, 64 of two, and the last one whole."""
    cut = cut_model(untrained("mlp_narrow", tmp_path), Cut(0.5, 0.25))
    first, inner, last = 16 * (64 + 256) + 256, 64 * (256 + 256) + 256, perceptron(256, 6)
    assert num_parameters(cut) == first + 2 * inner + last


def test_two_layers_of_full_rank_compute_what_one_did():
    torch.manual_seed(0)
    layer, rows = nn.Linear(12, 8), torch.randn(5, 12)
    torch.testing.assert_close(of_rank(layer, 8)(rows), layer(rows))


@pytest.mark.medium
def test_dead_heads_go_first_and_nothing_changes():
    """Of four heads, two give nothing to the output."""
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTAttention

    torch.manual_seed(0)
    attention = ViTAttention(ViTConfig(hidden_size=32, num_attention_heads=4, attn_implementation="sdpa")).eval()
    dead = [*range(8), *range(16, 24)]
    with torch.no_grad():
        for one in (attention.q_proj, attention.k_proj, attention.v_proj):
            one.weight[dead] = 0
        attention.o_proj.weight[:, dead] = 0
        rows = torch.randn(2, 6, 32)
        before = attention(rows)[0]
        prune_heads(attention, 0.5)
        torch.testing.assert_close(attention(rows)[0], before)
    assert attention.q_proj.weight.shape == (16, 32)


def test_what_is_lost_is_paired_by_example(tmp_path: Path):
    """Of four examples the cut loses one and wins none: a quarter, with the error of the differences."""
    job = Job("mlp", tmp_path)
    torch.save(torch.tensor([1.0, 1.0, 1.0, 0.0]), job.kept("0.0-None-0"))
    torch.save(torch.tensor([1.0, 1.0, 0.0, 0.0]), job.kept("0.5-None-0"))
    found = quality(job, Cut(0.5), seed=0)
    assert (found["quality"], found["lost"]) == (0.5, 0.25)
    assert found["error"] == pytest.approx(0.25)  # their variance is (9 + 3 * 1) / 16 / 3


def test_a_cut_by_hand_is_proven_as_a_plan_is(tmp_path: Path):
    """Of 4,000 examples a cut gets none or 40 wrong that the whole model gets right, from each seed: 0 and 1 %."""
    job = Job("mlp", tmp_path)
    for seed in range(3):
        for name, num_wrong in (("0.0-None", 0), ("0.25-None", 0), ("0.5-None", 40)):
            torch.save((torch.arange(4_000) >= num_wrong).float(), job.kept(f"{name}-{seed}"))
    assert is_proven(job, Cut(0.25))
    assert not is_proven(job, Cut(0.5))


def test_the_best_is_the_fastest_that_keeps_its_quality():
    """Of the cuts by half and by three quarters the second is faster, and loses 2 % of the quality."""
    seconds = {0.0: 8.0, 0.25: 6.0, 0.5: 3.0, 0.75: 1.0, 0.9: 0.5}
    lost = {0.0: 0.0, 0.25: 0.0, 0.5: 0.005, 0.75: 0.02, 0.9: 0.5}
    rows: list[dict[str, Any]] = []
    for cut in cuts("vgg"):
        step_s = {"plain": [seconds[cut.ratio]] * 3, "bf16": [seconds[cut.ratio] / 1.5] * 3}
        rows.append({"what": "speed", "cut": cut.row, "num_parameters": 10, "step_s": step_s})
        judged = {"quality": 1 - lost[cut.ratio], "lost": lost[cut.ratio], "error": 0.001}
        rows += [{"what": "quality", "cut": cut.row, "seed": seed, **judged} for seed in range(2)]
    found = best(rows, "vgg")
    assert found["cut"] == Cut(0.5)
    assert (found["fastest"], found["speed"], found["fastest_speed"]) == ("bf16", 8 / 3, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_every_job_scores_each_example_and_can_be_cut(tmp_path: Path, name: str):
    """Half of it goes, it still takes a batch, and its gradients reach what is left."""
    job = untrained(name, tmp_path)
    cut = cut_model(job, Cut(0.5))
    job.parts["compute_loss"](cut, next(job.batches(0))).backward()
    assert all(one.grad is not None for one in cut.parameters())
    scores = job.scores(cut)
    assert scores.ndim == 1
    assert len(scores) == EXAMPLES.get(name, len(scores))
