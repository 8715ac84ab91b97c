"""What ``autotune show`` says of each setting's exactness, what was held against the reference, and what it cost."""

from __future__ import annotations

import io
from pathlib import Path

from screen import printed

from autotune.plan import Evidence, Gain, KeptWeights, Peak, Plan, QualityEvidence, Speed
from autotune.report.printing import print_words
from autotune.report.show import explain
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.precision import Precision

SETTINGS = Settings(
    batch=Batch(micro=8, accumulate=2),
    precision=Precision(kind="bf16"),
    pruning=Pruning(kind="structured"),
    checkpointing=Checkpointing(kind="blocks"),
)
EXACTNESS = {"batch": "lossy", "precision": "rounding", "pruning": "lossy", "checkpointing": "exact"}


def evidence(value: float) -> Evidence:
    return Evidence(samples_per_s=Speed(value=value, low=value, high=value), peak=Peak(process=2**20))


def said(**changes) -> str:
    plan = Plan(
        **{
            "settings": SETTINGS,
            "exactness": EXACTNESS,
            "checked": "losses",
            "measured": evidence(2.0),
            "reference": evidence(1.0),
            **changes,
        }
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan
    return printed(explain(plan, Path("plan.yaml")), 400)


def test_each_setting_has_its_exactness():
    lines = [line.rstrip() for line in said().splitlines()]
    found = {
        name: next(line for number, line in enumerate(lines) if lines[number - 1].lstrip().startswith(f"{name} "))
        for name in EXACTNESS
    }
    assert found["batch"].endswith("Lossy: it changes gradients.")
    assert found["precision"].endswith("Rounding: results differ by how they are rounded.")
    assert found["pruning"].endswith("Lossy: it changes what the model computes.")
    assert found["checkpointing"].endswith("Exact, up to the order of sums.")


def test_losses_were_compared_where_the_function_stays():
    assert "the losses of the first 10 steps, which stay close to the reference's" in said()
    assert "the losses of the first" not in said(reference=evidence(2.0))  # it is the reference


def test_checked_is_said_of_what_was_compared_alone():
    sums = said(checked="sums")
    assert "learning rates, samples and the sum of the losses of the first 10 steps" in sums
    assert "stay close" not in sums
    assert "checked" not in said(checked=None)


def test_quality_was_compared_where_it_does_not_and_what_that_cost():
    quality = QualityEvidence(value=0.75, reference=1.0, max_drop=0.5, pairs=3, samples=100, lr_factor=0.5)
    words = said(quality=quality)
    assert "quality, from 3 seeds, after the same training as the reference. It cost 0.25." in words
    assert "after 100 samples of training each at 0.5 times the task's learning rate" in words
    assert "It cost nothing." in said(quality=quality.model_copy(update={"value": 1.5}))
    by_words = quality.model_copy(update={"recovered": "9 steps, learning rate falling from 0.5 times the job's to 0"})
    assert f"after 100 samples of training each ({by_words.recovered}), from 3 seeds" in said(quality=by_words)


def test_weights_beside_the_plan_are_named_with_their_quality():
    weights = KeptWeights(hash="sha256:" + 64 * "a", quality=0.75, seed=1)
    assert "weights-aaaaaaaaaaaaaaaa.pt, next to the plan" in said(weights=weights)
    assert "quality 0.75, from seed 1" in said(weights=weights)


def test_a_plan_by_hand_says_nothing_of_it():
    words = said(exactness={}, measured=None, reference=None)
    assert not any(word in words for word in ("Lossy", "Exact,", "Rounding:", "checked"))
    assert "exactness" not in Plan(settings=SETTINGS).to_yaml()


def test_a_report_for_a_file_has_the_same_words_without_colours():
    """What the service stores is what ``autotune show`` prints into a pipe."""
    plan = Plan.from_yaml("schema: autotune/plan@1\nsettings: {}\n", "plan.yaml")
    files = io.StringIO(), io.StringIO()
    for coloured, file in zip((True, False), files, strict=True):
        print_words(file, explain(plan, Path("plan.yaml"), coloured=coloured), 110)
    assert files[0].getvalue() == files[1].getvalue()
    assert "autotune.load_plan" in files[0].getvalue()


def test_a_smaller_model_shows_beside_imports_and_data():
    """Both processes peak at 576 MiB, as torch is imported. What the training takes beside that is a quarter, and so
    are its tensors, as predicted."""

    def found(value: float, above_mib: int, tensors_mib: int) -> Evidence:
        peak = Peak(process=576 * 2**20, above_base=above_mib * 2**20, tensors=tensors_mib * 2**20)
        return Evidence(samples_per_s=Speed(value=value, low=value, high=value), peak=peak)

    text = said(measured=found(2.0, 15, 12), reference=found(1.0, 60, 48), gain=Gain(speed=2.0, memory=1.0))
    assert "15 MiB beside imports and data; tensors of 12 MiB, as predicted, which is what counts on a card" in text
    assert "60 MiB beside imports and data, tensors of 48 MiB" in text
    assert "1.00x the memory (0.25x beside imports and data)" in text
