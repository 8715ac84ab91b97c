"""Outputs of inference against the reference's: what passes, and that nothing broken does."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autotune
from autotune.errors import TaskError
from autotune.measure import MeasureOptions, Parity
from autotune.measure.checks.outputs import compare_outputs, latency_of
from autotune.plan import Budget, Inference, Latency, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision

X = torch.arange(1.0, 33.0).reshape(8, 4)
Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    scores: torch.Tensor
    count: int


def seen(infer: Any, reference: Parity | None = None, tolerance: float = 0.05, batch: int = 8, **pieces: Any) -> Parity:
    """The comparison of what ``infer`` returns."""
    pieces = {"model": nn.Identity(), "dataset": list(X)} | pieces
    task = autotune.Task(build_model=lambda: pieces["model"], build_dataset=lambda: pieces["dataset"], infer=infer)
    task = task.for_inference()
    settings = pieces.get("settings", Settings()).having(Batch(micro=batch))
    plan = Plan(settings=settings, inference=Inference(tolerance=tolerance), budget=Budget(device="cpu"))
    outputs = reference.outputs if reference is not None else None
    options = MeasureOptions(parity_batch=8, reference_outputs=outputs, tolerance=tolerance)
    return compare_outputs(autotune.apply(plan, task), task, options)


def of(value: Any) -> Any:
    """An ``infer`` that returns what a function makes of the batch, or a value."""
    return lambda model, batch: value(batch) if callable(value) else value


def test_the_largest_difference_of_a_sample_is_a_share_of_its_norm():
    """One sample of eight is 10 % off: not 10 % / sqrt(8), which all together are."""

    def off(batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([batch[:1] * 1.1, batch[1:]])

    reference = seen(of(lambda batch: batch))
    found = seen(of(off), reference)
    assert found.deviation == pytest.approx(0.1, rel=1e-5)
    assert found.compared == "outputs"
    assert found.is_other_training
    assert found.unlike == (
        "its outputs differ by 10.00%: of the reference's, at most 5.00% is allowed. --tolerance allows more"
    )
    assert seen(of(off), reference, tolerance=0.2).unlike is None


class Grading(nn.Module):
    """Adds a number to what it is given."""

    def __init__(self, added: float) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.tensor(added))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.added


def graded(
    added: float,
    reference: Parity | None = None,
    allowed: float = 0.5,
    precision: Any = None,
    looks: bool = False,
    **changed: Any,
) -> Parity:
    """Of a model that ``evaluate`` says is as much worse as it adds."""
    pieces: dict[str, Any] = {
        "infer": lambda model, batch: model(batch),
        "evaluate": lambda model: 2.0 - float(model(torch.zeros(())).abs()),
    } | changed
    task = autotune.Task(build_model=lambda: Grading(added), build_dataset=lambda: list(X), **pieces).for_inference()
    settings = Settings(batch=Batch(micro=8), **({"precision": precision} if precision else {}))
    known = reference.quality if reference is not None else None
    options = MeasureOptions(
        parity_batch=8,
        judges=True,
        looks=looks,
        reference_outputs=reference.outputs if reference is not None else None,
        reference_quality=known,
        least_quality=None if known is None else known - allowed,
        tolerance=0.0,
    )
    return compare_outputs(
        autotune.apply(Plan(settings=settings, inference=Inference(max_drop=allowed)), task), task, options
    )


def test_where_quality_judges_outputs_may_differ_by_what_evaluate_allows():
    """The reference adds nothing, and has 2; who adds 0.5 has 1.5, and who adds 0.75 has 1.25."""
    reference = graded(0.0)
    assert (reference.quality, reference.compared, reference.unlike) == (2.0, None, None)
    kept = graded(0.5, reference)
    assert (kept.quality, kept.unlike, kept.compared) == (1.5, None, "quality")
    first = X[0]  # the smallest of the samples: 0.5 on each of its numbers
    assert kept.deviation == pytest.approx(float(torch.full((4,), 0.5).norm() / first.norm()))
    lost = graded(0.75, reference)
    assert lost.unlike == (
        "its quality is 1.25, the reference's 2: at least 1.5 is wanted. --max-quality-drop allows less"
    )


def test_what_quality_does_not_see_is_still_refused():
    """Outputs of another shape, and NaN that the reference does not have."""
    reference = graded(0.0)
    other = graded(0.0, reference, infer=lambda model, batch: model(batch)[:, :2])
    assert "of [8, 2]" in (other.unlike or "")
    assert "NaN" in (graded(0.0, reference, infer=lambda model, batch: model(batch) * torch.nan).unlike or "")


def test_quality_is_judged_without_training_as_infer_computes():
    """Under the plan's autocast, in eval mode and without gradients."""
    seen = []

    def evaluate(model: nn.Module) -> float:
        seen.append((torch.is_autocast_enabled("cpu"), model.training, torch.is_grad_enabled()))
        return 1.0

    graded(0.0, precision=Precision(kind="bf16"), evaluate=evaluate)
    assert seen == [(True, False, False)]


def test_an_evaluation_that_does_not_see_the_model_is_refused_of_the_reference():
    """Of numbers that hang on chance alone, too."""
    for judge in (lambda model: 0.9, lambda model: torch.rand(()).item()):
        with pytest.raises(TaskError, match="it does not see the model that it is given"):
            graded(1.0, looks=True, evaluate=judge)


def test_of_the_reference_it_is_known_how_far_quality_scatters():
    """By seeds of torch, beside the standard error that ``evaluate`` states."""

    def judge(model: nn.Module) -> tuple[float, float]:
        return model.added.item() + torch.rand(()).item(), 0.25

    drawn = [torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in (1, 2)]
    found = graded(1.0, looks=True, evaluate=judge)
    assert found.quality_noise == pytest.approx(abs(drawn[0] - drawn[1]), abs=1e-5)
    assert (found.quality_error, found.outputs is not None) == (0.25, True)
    assert graded(1.0, found, evaluate=judge).quality_noise is None


def test_what_must_be_compared_is_of_no_use_where_there_is_nothing_to_compare_with():
    task = autotune.Task(build_model=nn.Identity, build_dataset=lambda: list(X), infer=of(lambda batch: batch))
    plan = Plan(settings=Settings(batch=Batch(micro=8)), inference=Inference(tolerance=0.05))
    for must, unlike in ((False, None), (True, "its outputs cannot be compared")):
        found = compare_outputs(autotune.apply(plan, task), task, MeasureOptions(parity_batch=8, must_compare=must))
        assert found.compared is None
        assert (found.unlike or "").startswith(unlike or "")
        assert found.is_other_training is must


@pytest.mark.parametrize("shape", [lambda x: x, lambda x: {"a": x, "b": [x, (x, x)]}, lambda x: Pair(x, x * 2)])
def test_what_is_the_same_passes(shape):
    reference = seen(of(shape))
    assert reference.outputs is not None
    found = seen(of(shape), reference)
    assert (found.deviation, found.unlike, found.outputs) == (0.0, None, None)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (lambda x: {"logits": x * torch.nan, "hidden": x}, "['logits'] are NaN or infinite elsewhere"),
        (lambda x: {"logits": x / 0, "hidden": x}, "['logits'] are NaN or infinite elsewhere"),
        (lambda x: {"logits": x[:, :2], "hidden": x}, "['logits'] are float of [8, 2], and the reference's float of"),
        (lambda x: {"logits": x}, "they lack ['hidden']"),
        (lambda x: {"logits": x, "hidden": x, "more": x}, "they have ['more']"),
        (lambda x: {"hidden": x, "logits": x}, "they have another order"),
        (lambda x: [x, x], "they lack ['logits'], ['hidden']"),
        (lambda x: {"logits": None, "hidden": x}, "['logits'] are NoneType of []"),
        (lambda x: {"logits": x.long(), "hidden": x}, "['logits'] are int of [8, 4]"),
        (lambda x: {"logits": x, "hidden": -x}, "['hidden'] differ by 200.00%"),
        (lambda x: {"logits": x * 0, "hidden": x}, "['logits'] differ by 100.00%"),
        (lambda x: {"logits": x, "hidden": x[torch.arange(7, -1, -1)]}, "['hidden'] differ by"),
    ],
)
def test_what_is_broken_does_not(mine, said):
    found = seen(of(mine), seen(of(lambda x: {"logits": x, "hidden": x})))
    assert found.unlike is not None
    assert said in found.unlike


def test_nan_where_the_reference_has_it_and_narrow_types_pass():
    def with_nan(batch: torch.Tensor) -> torch.Tensor:
        return torch.where(batch == 3, torch.nan, torch.where(batch == 5, -torch.inf, batch))

    reference = seen(of(with_nan))
    assert seen(of(with_nan), reference).unlike is None
    assert seen(of(lambda batch: with_nan(batch).bfloat16()), reference).unlike is None
    assert "NaN" in (seen(of(lambda batch: batch), reference).unlike or "")
    assert "NaN" in (
        seen(of(lambda batch: torch.where(batch == 5, torch.inf, with_nan(batch))), reference).unlike or ""
    )


def test_of_integers_the_share_that_differs_counts():
    reference = seen(of(lambda batch: Record(batch.long(), 3)))
    assert seen(of(lambda batch: Record(batch.long(), 3)), reference).unlike is None
    found = seen(of(lambda batch: Record(batch.long() + (batch == 1), 3)), reference)
    assert found.deviation == 1 / 4  # of the first sample, whose tokens are four
    assert ".count differ by 100.00%" in (seen(of(lambda batch: Record(batch.long(), 4)), reference).unlike or "")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("cat", "dog"),
        (2**70, 2**70 + 1),
        (torch.tensor([2**53]), torch.tensor([2**53 + 1])),
        (np.zeros(3), np.ones(3)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (1.0, 2.0),
        (True, False),
        (torch.full((2,), 1e-9), torch.zeros(2)),
    ],
)
def test_whatever_stands_beside_tensors_is_compared_too(mine, theirs):
    reference = seen(of(lambda batch: {"x": batch, "also": theirs}))
    assert seen(of(lambda batch: {"x": batch, "also": theirs}), reference).unlike is None
    assert "['also'] differ by" in (seen(of(lambda batch: {"x": batch, "also": mine}), reference).unlike or "")


def test_what_cannot_be_compared_is_refused_by_name():
    with pytest.raises(TaskError, match=r"infer's outputs\['also'\] are set, which cannot be compared"):
        seen(of(lambda batch: {"x": batch, "also": {1}}))


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("masked", [LEAST, -math.inf, -1e9, -1e4])
def test_a_mask_hides_nothing_that_stands_beside_it(masked):
    def of_scores(scores: torch.Tensor) -> Any:
        return of(torch.where(torch.arange(4) == 3, masked, scores))

    reference = seen(of_scores(X))
    assert seen(of_scores(X), reference).deviation == 0.0
    assert seen(of_scores(X * 1.04), reference).deviation == pytest.approx(0.04, rel=1e-4)
    assert seen(of_scores(X * 1.1), reference).unlike is not None
    assert seen(of(X), reference).unlike is not None
    if masked == LEAST:
        narrow = torch.where(torch.arange(4) == 3, torch.finfo(torch.bfloat16).min, X)
        assert seen(of(narrow), reference).unlike is None


def test_what_is_too_large_for_float32_is_infinite():
    wide = X.double() * 1e39
    assert seen(of(wide), seen(of(wide))).unlike is None


def test_of_large_outputs_as_many_numbers_of_each_sample_are_kept_and_all_are_looked_at_for_nan():
    big = torch.randn(8, 100_000, generator=torch.Generator().manual_seed(0))
    reference = seen(of(big))
    assert len(reference.outputs or "") < 1_000_000
    assert seen(of(big * 1.01), reference).deviation == pytest.approx(0.01, rel=1e-3)
    one_nan = big.clone()
    one_nan[0, 77_777] = torch.nan
    assert "NaN" in (seen(of(one_nan), reference).unlike or "")


class Padded:
    """Samples of unlike lengths, and a collate function that pads to the longest of a batch."""

    samples = [torch.full((length,), 1.0 * length) for length in (1, 2, 3, 4, 5, 6, 7, 8)]

    @staticmethod
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_samples_see_equal_padding_whatever_the_plans_batch():
    """An output that hangs on padding, the mean over positions, is the same in batches of 2 and of 8."""
    task = {"build_dataset": lambda: Padded.samples, "collate": Padded.collate}
    found = []
    for batch, reference in ((8, None), (2, "of 8")):
        job = autotune.Task(build_model=nn.Identity, infer=lambda model, x: x.mean(1), **task).for_inference()
        plan = Plan(settings=Settings(batch=Batch(micro=batch)), inference=Inference(tolerance=0.01))
        outputs = found[0].outputs if reference else None
        options = MeasureOptions(parity_batch=8, reference_outputs=outputs, tolerance=0.01)
        found.append(compare_outputs(autotune.apply(plan, job), job, options))
    assert (found[1].deviation, found[1].unlike) == (0.0, None)


def test_the_fast_path_of_torchs_transformer_is_off_while_outputs_are_compared():
    """It writes zeros where a position is padding, which autocast, that has no such path, does not."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    is_padding = torch.arange(6) >= 3

    def infer(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch, src_key_padding_mask=is_padding.expand(len(batch), 6))

    samples = list(torch.randn(8, 6, 32))
    with torch.inference_mode():
        assert not infer(model, torch.stack(samples))[:, 3:].any(), "or the test shows nothing"
    reference = seen(infer, model=model, dataset=samples)
    found = seen(infer, reference, model=model, dataset=samples, settings=Settings(precision=Precision(kind="bf16")))
    assert 0 < found.deviation < 0.05
    assert found.unlike is None
    assert torch.backends.mha.get_fastpath_enabled()


def test_latency_is_the_median_and_what_95_of_100_stay_within():
    assert latency_of([]) is None
    assert latency_of([0.1] * 95 + [0.5] * 5) == Latency(median_s=0.1, p95_s=0.1)
    assert latency_of([0.1] * 94 + [0.5] * 6) == Latency(median_s=0.1, p95_s=0.5)
    assert Latency(median_s=0.1, p95_s=0.3).exceeds(Budget(latency_s=0.2))
    assert not Latency(median_s=0.1, p95_s=0.2).exceeds(Budget(latency_s=0.2))
