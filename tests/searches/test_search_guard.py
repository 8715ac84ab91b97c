"""Whole searches over a table that holds qualities: what is harmful is never chosen, and what is not is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import MIB, configurations, every, facts, options, row, run_search

from autotune.errors import TaskError, UserError
from autotune.measure.checks.scores import judged_by
from autotune.measure.measurement import Quality
from autotune.search_spaces import load_space
from autotune.searches.events import QualityKnown, TrialStarted, Warned
from autotune.searches.options import Drop
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.pruning import Pruning
from autotune.workers import Failed, TimedOut
from autotune.workers.table import Row

pytestmark = pytest.mark.usefixtures("in_memory")
REFERENCE = Settings(batch=Batch(micro=64))
CHOICES = "[{kind: none}, {kind: structured, ratio: 0.25}, {kind: structured, ratio: 0.5}]"
SPACE = f"schema: autotune/space@1\npruning: {CHOICES}\n"
JUDGED = facts(evaluates=True)
POINT = Drop(1.0, is_share=False)


def pruned(ratio: float) -> Settings:
    return REFERENCE.model_copy(update={"pruning": Pruning(kind="structured", ratio=ratio)})


def rows(**qualities: float) -> list[Row]:
    """Of the reference at 90 points, and of a quarter and a half pruned, which are faster each."""
    reference = row(REFERENCE, quality=(Quality(value=90.0, early=85.0),))
    return [
        reference,
        *(
            row(pruned(ratio), samples_per_s=(1000 * ratio,), peak_bytes=(100 * MIB,), quality=(Quality(value=value),))
            for ratio, value in zip((0.25, 0.5), (qualities["quarter"], qualities["half"]), strict=True)
        ),
    ]


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    return {"space": "space.yaml", "max_quality_drop": POINT, "recovery_steps": 10}


def test_the_fastest_whose_quality_is_kept_is_the_plan(space):
    """A half loses ten points, a quarter half of one: the plan says so, from three seeds at least."""
    run = run_search(options(**space), known=JUDGED, rows=rows(quarter=89.5, half=80.0))
    assert run.plan.settings == pruned(0.25)
    quality = run.plan.quality
    assert (quality.value, quality.reference, quality.max_drop, quality.samples) == (89.5, 90.0, 1.0, 640)
    assert quality.pairs >= 3
    assert (
        "pruning is lossy for this model: it changes what the model computes, not only its rounding" in run.plan.notes
    )


def test_a_space_need_not_name_the_model_as_it_is(space):
    """The reference is measured all the same, and is what the others are judged by."""
    Path("space.yaml").write_text(SPACE.replace("{kind: none}, ", ""))
    run = run_search(options(**space), known=JUDGED, rows=rows(quarter=89.5, half=80.0))
    assert run.plan.settings == pruned(0.25)


def test_rounds_of_what_is_judged_have_a_seed_each_and_the_reference_has_the_same(space):
    """Trials run from the search's seed."""
    run = run_search(options(**space), known=JUDGED, rows=rows(quarter=90.0, half=80.0))
    fresh = [request for request in run.executor.requests if request.kind == "measure" and request.fresh]
    assert all(request.options.quality.num_samples == 640 for request in fresh)
    assert [request.seed for request in fresh[::2]] == [request.seed for request in fresh[1::2]]
    assert len({request.seed for request in fresh}) == len(fresh) // 2


def test_nothing_is_chosen_that_loses_more_than_is_allowed(space):
    """Both lose ten points or more: the job as it stands is the plan, which says why."""
    run = run_search(options(**space), known=JUDGED, rows=rows(quarter=80.0, half=70.0))
    assert run.plan.settings == REFERENCE
    assert run.plan.quality is None
    (said,) = (note for note in run.plan.notes if note.startswith("none of "))
    assert said.startswith("none of 2 configurations that change the model can be used; of trial ")
    assert said.endswith("its quality is 80, the reference's 90, and 1 less is allowed")


def test_a_drop_that_shows_in_later_seeds_alone_is_found(space):
    """A half is as good in its trial and two points worse from other seeds."""
    half = row(
        pruned(0.5),
        samples_per_s=(500.0,),
        peak_bytes=(100 * MIB,),
        quality=(Quality(value=90.0), *(Quality(value=88.0 + 0.1 * seed) for seed in range(6))),
    )
    run = run_search(every(**space), known=JUDGED, rows=[*rows(quarter=90.0, half=90.0)[:2], half])
    assert run.plan.settings == pruned(0.25)
    said = [event.message for event in run.seen(Warned)]
    assert any("its quality is 88" in message and "1 less is allowed" in message for message in said), said


def test_the_references_quality_of_a_seed_is_measured_once_and_its_speed_beside_each_finalist(space):
    """A half falls by its quality in later seeds, then a quarter is judged from the same seeds."""
    half = row(
        pruned(0.5),
        samples_per_s=(500.0,),
        peak_bytes=(100 * MIB,),
        quality=(Quality(value=90.0), *(Quality(value=88.0 + 0.1 * seed) for seed in range(6))),
    )
    run = run_search(every(**space), known=JUDGED, rows=[*rows(quarter=90.0, half=90.0)[:2], half])
    fresh = [request for request in run.executor.requests if request.kind == "measure" and request.fresh]
    own = [request for request in fresh if request.plan.settings == REFERENCE]
    judged = [request.seed for request in own if request.options.quality is not None]
    assert {pruned(0.5), pruned(0.25)} == {request.plan.settings for request in fresh} - {REFERENCE}
    assert len(own) == len(fresh) / 2
    assert len(judged) == len(set(judged)) < len(own)
    assert run.plan.quality.pairs >= 3


def test_what_looks_far_too_bad_is_no_finalist_while_others_are_left(space):
    """A half loses two and a half points in its trial, which rules nothing out, and is the faster."""
    run = run_search(every(**space), known=JUDGED, rows=rows(quarter=89.5, half=87.5))
    assert pruned(0.5) in run.measured
    assert pruned(0.5) not in run.again
    assert run.plan.settings == pruned(0.25)


def test_what_looks_far_too_bad_is_tried_in_the_end_where_nothing_else_is_left(space):
    """Both look so, and the reference is over the budget: later seeds show that a half loses nothing."""
    half = row(
        pruned(0.5),
        samples_per_s=(500.0,),
        peak_bytes=(100 * MIB,),
        quality=(Quality(value=87.5), *(Quality(value=90.0) for _ in range(6))),
    )
    asked = every(**space, budget=500 * MIB)
    run = run_search(asked, known=JUDGED, rows=[*rows(quarter=80.0, half=90.0)[:2], half])
    assert run.plan.settings == pruned(0.5)


def test_without_a_drop_nothing_lossy_is_tried(space):
    """The space names it, and the search says what allows it."""
    known = facts(evaluates=True, allow_lossy=False)
    run = run_search(options(space="space.yaml"), known=known, rows=rows(quarter=90.0, half=90.0))
    assert run.plan.settings == REFERENCE
    assert any("which --max-quality-drop allows" in event.message for event in run.seen(Warned))


@pytest.mark.parametrize(
    "outcome",
    [TimedOut(deadline_s=60.0), Failed(message="evaluate(model) raised KeyError: 'label'.", traceback="Traceback")],
)
def test_a_candidate_that_hangs_or_raises_as_it_is_judged_is_an_outcome_and_the_others_go_on(space, outcome):
    """The fastest does; the next is the plan."""
    half = Row(settings=pruned(0.5), outcome=outcome)
    run = run_search(every(**space), known=JUDGED, rows=[*rows(quarter=90.0, half=90.0)[:2], half])
    assert run.plan.settings == pruned(0.25)


def test_a_drop_without_evaluate_is_refused(space):
    with pytest.raises(TaskError, match=r"--max-quality-drop 1 needs evaluate, .* Wanted: def evaluate\(model\)"):
        run_search(options(**space), known=facts(), rows=rows(quarter=90.0, half=90.0))


@pytest.mark.usefixtures("space")
def test_what_computes_a_function_that_was_dropped_falls_with_it_and_an_exact_plan_is_left():
    """Six trials. Each pruned configuration fits and is fast, loses two points, and its first seed does not show it;
    the reference is over the budget. bf16 alone was tried before any of them."""
    space = f"{SPACE}precision: [{{kind: fp32}}, {{kind: bf16}}]\nallocator: auto\n"
    Path("space.yaml").write_text(space)
    qualities = (Quality(value=90.0), *(Quality(value=87.0 + 0.1 * seed) for seed in range(20)))
    known = [one for one in configurations(JUDGED, load_space("space.yaml")) if one.affect("function")]
    lossy = [row(one, samples_per_s=(900.0,), peak_bytes=(100 * MIB,), quality=qualities) for one in known]
    judged = [row(REFERENCE, quality=(Quality(value=90.0, early=85.0),)), *lossy]
    asked = options(trials=6, budget=800 * MIB, max_quality_drop=POINT)
    run = run_search(asked, known=JUDGED, rows=judged)
    assert not run.plan.settings.affect("function")
    assert run.plan.settings != REFERENCE
    fell = [note for note in run.plan.notes if "fell" in note]
    assert len(fell) <= 2  # once for each of the two functions


def test_what_is_fast_and_unlikely_is_proven_after_what_is_likely(space):
    """A half loses nearly twice what is allowed in its trial, and is twice as fast as a quarter."""
    run = run_search(every(**space), known=JUDGED, rows=rows(quarter=89.8, half=88.05))
    assert pruned(0.5) in run.measured
    assert pruned(0.5) not in run.again
    assert run.plan.settings == pruned(0.25)


def test_a_proof_that_is_unlikely_to_come_ends(space):
    """A half loses nothing in its trial and a little more than is allowed from other seeds: after three of them six are
    not waited for."""
    half = row(
        pruned(0.5),
        samples_per_s=(500.0,),
        peak_bytes=(100 * MIB,),
        quality=tuple(Quality(value=value) for value in (90.0, 88.9, 89.1, 88.8, 89.0, 88.9, 89.0)),
    )
    run = run_search(every(**space), known=JUDGED, rows=[*rows(quarter=90.0, half=90.0)[:2], half])
    assert run.fresh.count(pruned(0.5)) == 3
    assert run.plan.settings == pruned(0.25)
    said = [event.message for event in run.seen(Warned)]
    assert any("after 3 seeds, the chance that it is proven by 6 is 1." in message for message in said), said


def scored(num_right: int, num_examples: int = 360) -> Quality:
    """In percent; the first so many are right."""
    return Quality(**judged_by([100.0 * (index < num_right) for index in range(num_examples)])._asdict(), early=80.0)


def test_scores_are_kept_with_the_study_and_prove(space):
    """A half has one of 4,000 examples wrong that the job as it stands has right, from each seed."""
    reference = row(REFERENCE, quality=(scored(3900, 4000),))
    half = row(pruned(0.5), samples_per_s=(500.0,), peak_bytes=(100 * MIB,), quality=(scored(3899, 4000),))
    run = run_search(options(**space), known=JUDGED, rows=[reference, rows(quarter=80, half=80)[1], half])
    assert run.plan.settings == pruned(0.5)
    assert run.plan.quality.over_examples
    assert run.plan.quality.most_lost == pytest.approx(0.025 + 1.645 * (1.0 * 100 / 4000) ** 0.5, rel=1e-3)
    (told,) = run.seen(QualityKnown)
    assert (told.value, told.num_examples) == (97.5, 4000)


def test_a_drop_that_the_examples_cannot_prove_is_said_before_anything_lossy_is_tried(space):
    """Of 360 examples 9 are wrong: 0.82 points of standard error, and 1.645 * 0.6 of that is 0.81. One example is 100
    points, of which 1.645 ** 2 / 360 is 0.75."""
    said = {}
    for drop in (0.5, 1.0):
        asked = options(**{**space, "max_quality_drop": Drop(drop, is_share=False)})
        reference = row(REFERENCE, quality=(scored(351),))
        run = run_search(asked, known=JUDGED, rows=[reference, *rows(quarter=97.5, half=97.5)[1:]])
        said[drop] = [event.message for event in run.seen(Warned) if "hardly be proven" in event.message]
        told = next(index for index, event in enumerate(run.events) if isinstance(event, QualityKnown))
        assert not any(isinstance(event, TrialStarted) and event.number for event in run.events[:told])
    assert said[1.0] == []
    assert said[0.5] == [
        "--max-quality-drop 0.5 can hardly be proven with 360 examples: the smallest that 6 pairs can prove is about "
        "0.81. Evaluate on more examples, or allow more."
    ]


def test_a_share_of_a_quality_of_0_is_refused(space):
    reference = row(REFERENCE, quality=(Quality(value=0.0),))
    with pytest.raises(UserError, match="the reference's quality is 0, and a share of that is nothing"):
        run_search(
            options(**{**space, "max_quality_drop": Drop(0.01, is_share=True)}),
            known=JUDGED,
            rows=[reference, *rows(quarter=0.0, half=0.0)[1:]],
        )


def test_scores_that_are_the_whole_models_in_every_example_are_told(space):
    """A cut that changes nothing may well be; it may also be that evaluate judges another model."""
    same = scored(351)
    half = row(pruned(0.5), samples_per_s=(500.0,), peak_bytes=(100 * MIB,), quality=(same.model_copy(),))
    reference = row(REFERENCE, quality=(same,))
    run = run_search(options(**space), known=JUDGED, rows=[reference, rows(quarter=80, half=80)[1], half])
    said = [event.message for event in run.seen(Warned) if "every example has the same score" in event.message]
    assert len(said) == 1


def test_an_evaluation_that_draws_random_numbers_is_told(space):
    reference = row(REFERENCE, quality=(Quality(value=90.0, early=85.0, noise=0.3),))
    run = run_search(options(**space), known=JUDGED, rows=[reference, *rows(quarter=89.5, half=80.0)[1:]])
    said = [event.message for event in run.seen(Warned) if "draws random numbers" in event.message]
    assert len(said) == 1
    assert "two evaluations are 0.3 apart, where 1 may be lost" in said[0]
