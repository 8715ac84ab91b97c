"""``search --inference`` and ``verify`` of its plan, over a table: outputs, latency, words; and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from screen import printed
from search_tables import (
    BF16,
    BOTH,
    MIB,
    REFERENCE,
    TCMALLOC,
    Run,
    configurations,
    facts,
    options,
    peak,
    row,
    run_search,
)

from autotune.commands.plans.run import run
from autotune.commands.plans.show import show
from autotune.commands.profile import profile_task
from autotune.commands.search import check_asked
from autotune.commands.verify import verify_plan
from autotune.errors import NothingFits, PlanError, StudyError, TaskError, UserError
from autotune.measure import Parity
from autotune.plan import Budget, Inference, Latency, Plan
from autotune.report.displays.lines import phase_words
from autotune.report.displays.progress import Progress
from autotune.report.show import explain
from autotune.report.verification import explain as explain_verified
from autotune.results import WhatToProfile
from autotune.search_spaces import load_space
from autotune.searches.events import QualityKnown, TrialEnded, Warned
from autotune.searches.requests import reference_settings
from autotune.techniques import Facts, Settings, not_in_inference
from autotune.techniques.batch import Batch
from autotune.workers import InspectRequest, MeasureRequest, OutOfMemory
from autotune.workers.table import Row, TableExecutor

FACTS = facts(inference=True, effective_batch_held=False, left_out=not_in_inference())
OUTPUTS = Parity(losses=(), outputs="those of the reference")
ALIKE = Parity(losses=(), deviation=0.02, compared="outputs")
OTHER = Parity(losses=(), deviation=0.2, compared="outputs", unlike="its outputs differ by 20.00%: at most 5.00%. More")
FAST = Latency(median_s=0.005, p95_s=0.01)
SIXTEEN = REFERENCE.having(Batch(micro=16))
NO_ROOM = OutOfMemory(peak_bytes=2**40, message="no room")

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")


def rows(bf16: Parity = ALIKE, bf16_takes: Latency = FAST) -> list:
    every = [row(one, parity=OUTPUTS, latency=FAST) for one in (REFERENCE, SIXTEEN)]
    every.append(row(TCMALLOC, parity=ALIKE, latency=FAST))
    return [*every, *(row(one, parity=bf16, latency=bf16_takes) for one in (BF16, BOTH))]


def searched(changed: list | None = None, **asked) -> Run:
    return run_search(options(inference=True, trial_time=1.0, **asked), FACTS, changed or rows())


def plan(**changes) -> Plan:
    found = searched().plan
    assert found is not None
    return found.model_copy(update=changes)


def test_every_request_says_that_the_job_is_inference_and_trials_compare_outputs():
    found = searched(tolerance=0.1)
    inspected, *asked = found.executor.requests
    assert isinstance(inspected, InspectRequest)
    assert inspected.infers
    measured = [one for one in asked if isinstance(one, MeasureRequest)]
    assert all(one.infers and one.plan.inference == Inference(tolerance=0.1) for one in measured)
    first, second = (one.options for one in measured[:2])
    assert (first.reference_outputs, second.reference_outputs) == (None, OUTPUTS.outputs)
    assert (first.parity_batch, second.tolerance) == (16, 0.1)
    assert [one.kind for one in asked if one.kind not in ("measure", "compare")] == []  # nothing is traced
    assert not any(one.options.life or one.options.evaluation or one.options.plain_loop for one in measured)


def test_the_plan_says_that_it_is_for_inference_and_how_far_outputs_are():
    found = plan()
    assert found.settings == BOTH
    assert (found.inference, found.checked) == (Inference(tolerance=0.05, deviation=0.02), "outputs")
    assert found.measured is not None
    assert found.measured.latency == FAST
    assert Plan.from_yaml(found.to_yaml()) == found


def without_reference(*changed) -> list:
    return [row(REFERENCE, outcome=NO_ROOM), *rows()[1:], *changed]


def test_where_the_job_does_not_fit_its_outputs_are_those_of_sixteen_samples():
    found = searched(without_reference())
    _, reference, outputs, *asked = [one for one in found.executor.requests if one.kind != "predict"]
    assert outputs.plan.settings == SIXTEEN
    assert {reference.options.reference_outputs, outputs.options.reference_outputs} == {None}
    assert [one.options.reference_outputs for one in asked if one.options.parity_batch] == [OUTPUTS.outputs] * 3
    assert found.plan.inference == Inference(tolerance=0.05, deviation=0.02)


def test_where_they_cannot_be_had_what_rounds_is_told_to_be_of_no_use_and_no_deviation_is_stated():
    own = [row(one, parity=OUTPUTS, latency=FAST) for one in (TCMALLOC, BF16, BOTH)]
    found = searched(without_reference(row(SIXTEEN, outcome=NO_ROOM), *own))
    asked = [one for one in found.executor.requests if isinstance(one, MeasureRequest)]
    told = {one.plan.settings.canonical(): one.options.must_compare for one in asked if one.options.parity_batch}
    exact = [one.canonical() for one in (REFERENCE, SIXTEEN, TCMALLOC)]
    assert set(told) >= {*exact[:2], BOTH.canonical()}
    assert all(must is (one not in exact) for one, must in told.items())
    assert found.plan.inference == Inference(tolerance=0.05, deviation=None)


def test_verify_compares_as_many_samples_as_a_search_whatever_the_plans_batch():
    small = BF16.having(Batch(micro=8))
    stated = Plan(settings=small, inference=Inference(tolerance=0.05), budget=Budget(device="cpu"))
    for first in ({"parity": OUTPUTS}, {"outcome": NO_ROOM}):
        _, executor = verified(stated, [row(REFERENCE, **first), *rows()[1:], row(small, parity=ALIKE, latency=FAST)])
        _, reference, *repeats = executor.requests
        assert reference.plan.settings == SIXTEEN
        assert {one.options.parity_batch for one in (reference, *repeats)} == {16}


def test_a_configuration_of_other_outputs_is_not_the_plan():
    found = searched(rows(OTHER))
    assert found.plan is not None
    assert found.plan.settings == TCMALLOC
    said = [event.words(Progress(options())) for event in found.seen(TrialEnded)]
    assert "other outputs: its outputs differ by 20.00%" in " ".join(said)


def test_a_batch_that_takes_longer_than_the_latency_is_not_the_plan():
    slow = Latency(median_s=0.005, p95_s=0.021)
    assert searched(rows(bf16_takes=slow), max_latency="20ms").plan.settings == TCMALLOC
    assert searched(rows(bf16_takes=slow), max_latency="22ms").plan.settings == BOTH


def test_the_job_as_it_stands_is_no_plan_once_its_own_batch_takes_longer(monkeypatch):
    """In its trial it was within the latency, and again it is the faster, and not within it."""
    was = Row.outcome_at
    slow = Latency(median_s=0.005, p95_s=0.03)

    def at(self: Row, repeat: int, num_judged: int | None = None):
        late = self.settings == REFERENCE and repeat
        return was(self.model_copy(update={"latency": slow}) if late else self, repeat, num_judged)

    monkeypatch.setattr(Row, "outcome_at", at)
    speeds, peaks = (100.0, *[10_000.0] * 9), (900 * MIB,) * 10
    reference = row(REFERENCE, parity=OUTPUTS, latency=FAST, samples_per_s=speeds, peak_bytes=peaks)
    found = searched([reference, *rows()[1:]], max_latency="20ms").plan
    assert found.settings != REFERENCE
    assert found.measured.latency == FAST


def test_nothing_within_the_latency_ends_in_words():
    said = "Nearest miss: 95 of 100 batches take up to 9 ms with .*--max-latency 9ms would admit it"
    with pytest.raises(NothingFits, match=f"(?s){said}"):
        searched(rows(bf16_takes=Latency(median_s=0.005, p95_s=0.009)), max_latency="1ms")


def test_a_reference_that_is_slow_and_small_is_over_the_latency_alone():
    slow = Latency(median_s=0.005, p95_s=0.03)
    found = searched([row(REFERENCE, parity=OUTPUTS, latency=slow), *rows()[1:]], max_latency="20ms").plan
    assert "the reference is over the latency; it was measured without enforcement" in found.notes
    assert ", over the latency" in printed(explain(found, Path("plan.yaml")), 400)
    small = found.reference.model_copy(update={"latency": FAST})
    tight = found.budget.model_copy(update={"limit": MIB})
    assert (small.over(tight), found.reference.over(tight)) == ("the budget", "the budget and the latency")


def test_what_inference_leaves_out_is_said_of_a_space_of_ones_own_alone():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecision: auto\nallocator: auto\nlayers: auto\n")
    said = [event.message for event in searched().seen(Warned)]
    assert "layers stays as it is: it saves what backward needs." in said


def test_resume_goes_on_with_inference_alone():
    searched()
    again = searched(resume=True)
    assert again.measured == []  # all is known
    for changed in ({"inference": False}, {"tolerance": 0.1}, {"max_latency": "20ms"}):
        with pytest.raises(StudyError, match="--resume: study model-1 cannot go on"):
            run_search(options(**{"inference": True, "trial_time": 1.0, "resume": True, **changed}), FACTS, rows())


def test_show_speaks_of_inference():
    said = printed(explain(plan(), Path("plan.yaml")), 400)
    assert "plan.yaml: for inference: " in said
    assert "5 ms for a batch at the median, 95 of 100 within 10 ms" in said
    assert "the outputs of a batch of samples, each of which differs from the reference's by 2.00% at most" in said
    assert 'inference = autotune.apply(plan, autotune.load_task("model.py", inference=True))' in said
    assert "outputs = inference.infer(batch)" in said
    assert "train" not in said
    assert "optimizer" not in said


def verified(found: Plan, changed: list | None = None, known: Facts = FACTS):
    executor = TableExecutor(known, changed or rows())
    return verify_plan(found, "model.py", executor, lambda words: None), executor


def test_verify_measures_the_job_once_for_its_outputs_and_compares_them():
    stated = plan()
    found, executor = verified(stated)
    assert found.holds
    _, reference, *repeats = executor.requests
    assert reference.plan.settings == reference_settings(FACTS).having(Batch(micro=16))
    assert all(one.infers for one in executor.requests)
    assert [one.options.reference_outputs for one in repeats] == [OUTPUTS.outputs] * 3
    said = printed(explain_verified(found, stated), 200)
    assert "5 ms for a batch at the median" in said
    assert "2.00% from those of the job as it stands at most; 5.00% is allowed" in said
    assert "train" not in said


def test_verify_says_no_of_other_outputs_and_of_a_longer_latency():
    stated = plan()
    found, _ = verified(stated, rows(OTHER))
    assert not found.holds
    assert found.over_budget == OTHER.unlike
    limited = stated.model_copy(update={"budget": stated.budget.model_copy(update={"latency_s": 0.001})})
    found, _ = verified(limited)
    assert found.over_budget == "over the latency of 1 ms: 95 of 100 batches take up to 10 ms"


JUDGED = FACTS.model_copy(update={"evaluates": True})
JOBS = Parity(losses=(), outputs="those of the reference", quality=0.9)


def of_quality(value: float, unlike: str | None = None) -> Parity:
    return Parity(losses=(), deviation=0.2, quality=value, unlike=unlike, compared="quality")


def judged_rows(bf16: Parity) -> list:
    every = [row(one, parity=JOBS, latency=FAST) for one in (REFERENCE, SIXTEEN)]
    every.append(row(TCMALLOC, parity=of_quality(0.9), latency=FAST))
    return [*every, *(row(one, parity=bf16, latency=FAST) for one in (BF16, BOTH))]


def judged(bf16: Parity, drop: str = "10%", known: Facts = JUDGED) -> Run:
    asked = options(inference=True, trial_time=1.0, max_quality_drop=drop)
    return run_search(asked, known, judged_rows(bf16))


def test_with_a_quality_drop_trials_are_told_the_references_quality_and_the_least_that_is_wanted():
    """A tenth less than 0.9 is 0.81; nothing is trained before it is judged."""
    inspected, *asked = judged(of_quality(0.85)).executor.requests
    assert inspected.options.allow_lossy
    measured = [one.options for one in asked if isinstance(one, MeasureRequest)]
    first, second = measured[:2]
    assert (first.judges, first.reference_quality, first.least_quality) == (True, None, None)
    assert (second.judges, second.reference_quality) == (True, 0.9)
    assert second.least_quality == pytest.approx(0.81)
    assert not any(one.quality or one.evaluation for one in measured)


def test_outputs_beyond_the_tolerance_are_used_where_the_quality_is_kept_and_the_plan_has_both_qualities():
    found = judged(of_quality(0.85)).plan
    assert found.settings == BOTH
    assert found.checked == "quality"
    stated = found.inference
    assert (stated.tolerance, stated.deviation, stated.quality, stated.reference_quality) == (None, 0.2, 0.85, 0.9)
    assert stated.max_drop == pytest.approx(0.09)
    assert Plan.from_yaml(found.to_yaml()) == found
    said = printed(explain(found, Path("plan.yaml")), 400)
    assert "Quality: 0.85, the reference's 0.9; 0.09 less is allowed" in said
    assert "each of which differs from the reference's by 20.00% at most." in said
    assert "train" not in said.replace("without training", "")


def test_what_may_be_lost_is_told():
    (told,) = judged(of_quality(0.85)).seen(QualityKnown)
    said = "quality: 0.9, of which 0.09 may be lost, without training, by evaluate's own examples"
    assert told.words(Progress(options())) == said


def test_a_quality_that_falls_too_far_is_not_the_plan():
    low = of_quality(0.8, "its quality is 0.8, the reference's 0.9: at least 0.81 is wanted")
    found = judged(low)
    assert found.plan.settings == TCMALLOC
    assert "its quality is 0.8" in " ".join(event.words(Progress(options())) for event in found.seen(TrialEnded))


def test_what_makes_a_drop_of_this_size_chance_is_told():
    """A tenth of 0.9, 0.09, may be lost."""
    for changed, said in (
        ({"quality_noise": 0.1, "quality_error": 0.08}, "two evaluations are 0.1 apart, where 0.09 may be lost"),
        ({"quality_noise": 0.08, "quality_error": 0.1}, "10% is 0.09, and evaluate's standard error 0.1"),
    ):
        jobs = [
            row(REFERENCE, parity=JOBS.model_copy(update=changed), latency=FAST),
            *judged_rows(of_quality(0.85))[1:],
        ]
        found = run_search(options(inference=True, trial_time=1.0, max_quality_drop="10%"), JUDGED, jobs)
        assert [said in event.message for event in found.seen(Warned)] == [True]


def test_a_plan_has_the_drop_that_was_asked_for_or_a_tolerance_where_the_jobs_own_quality_is_not_known():
    """It did not fit, by itself and for its outputs: what is used is exact."""
    unknown = [row(one, outcome=NO_ROOM) for one in (REFERENCE, SIXTEEN)]
    own = [row(one, parity=of_quality(0.9), latency=FAST) for one in (TCMALLOC, BF16, BOTH)]
    for drop, stated in (("0.02", Inference(max_drop=0.02)), ("2%", Inference(tolerance=0.05))):
        found = run_search(options(inference=True, trial_time=1.0, max_quality_drop=drop), JUDGED, [*unknown, *own])
        assert found.plan.inference.model_copy(update={"deviation": None, "quality": None}) == stated


@pytest.mark.parametrize("row", ["{}", "{tolerance: 0.05, max_drop: 0.1}"])
def test_a_plan_says_by_one_of_the_two_how_outputs_are_compared(row):
    with pytest.raises(
        PlanError, match=r"inference: wanted tolerance, of outputs, or max_drop, .* but got (neither|both)"
    ):
        Plan.from_yaml(f"schema: autotune/plan@1\ninference: {row}\nsettings: {{}}")


CODES = FACTS.model_copy(update={"codable_bytes": 64 * MIB})
"""Of embeddings, so that int8 is none of the choices."""


def of_codes(job: Row | None = None, rows: str = "precision: auto\nquantization: auto", **asked) -> Run:
    """All configurations are as fast with codes as without, and take a tenth of the memory."""
    Path("space.yaml").write_text(f"schema: autotune/space@1\n{rows}\n")
    every = [row(one, parity=ALIKE, latency=FAST) for one in configurations(CODES, load_space("space.yaml"))]
    smaller = [
        one.model_copy(update={"peak_bytes": (peak(one.settings) // 10,)}) for one in every if has_codes(one.settings)
    ]
    jobs = [row(one, parity=OUTPUTS, latency=FAST) for one in (REFERENCE, SIXTEEN)]
    asked = options(inference=True, trial_time=1.0, **asked)
    return run_search(asked, CODES, [*every, *smaller, *jobs, *([job] if job else [])])


def has_codes(settings: Settings) -> bool:
    return settings.quantization.kind == "int8_weights"


def test_what_takes_time_for_memory_is_tried_where_memory_may_be_short_alone():
    """Without a limit, where the job as it stands does not fit the machine, or where nothing else is listed."""
    assert not any(map(has_codes, of_codes().measured))
    assert any(map(has_codes, of_codes(row(REFERENCE, outcome=NO_ROOM)).measured))
    assert has_codes(of_codes(budget=200 * MIB).plan.settings)
    assert any(map(has_codes, of_codes(rows="quantization: [{kind: int8_weights}]").measured))


def test_of_a_preset_what_does_not_go_together_is_not_said():
    """Nobody has asked for both."""
    text = "schema: autotune/space@1\ncompile: [{kind: none}, {kind: model}]\nquantization: auto\n"
    Path("space.yaml").write_text(text)
    for space, told in (("space.yaml", 1), ("default", 0)):
        found = run_search(options(inference=True, trial_time=1.0, space=space, trials=1), CODES, rows())
        assert sum("left out" in event.message for event in found.seen(Warned)) == told


def test_a_quality_drop_needs_evaluate_and_a_share_needs_a_quality():
    with pytest.raises(TaskError, match="--max-quality-drop 10% needs evaluate"):
        judged(of_quality(0.85), known=FACTS)
    nothing = [row(one, parity=JOBS.model_copy(update={"quality": 0.0}), latency=FAST) for one in (REFERENCE, SIXTEEN)]
    with pytest.raises(UserError, match="the reference's quality is 0, and a share of that is nothing"):
        run_search(options(inference=True, trial_time=1.0, max_quality_drop="1%"), JUDGED, nothing)


def test_verify_judges_the_quality_again():
    stated = judged(of_quality(0.85)).plan
    found, executor = verified(stated, judged_rows(of_quality(0.84)), JUDGED)
    assert found.holds
    _, reference, *repeats = executor.requests
    assert reference.options.judges
    assert [one.options.least_quality for one in repeats] == [pytest.approx(0.81)] * 3
    assert (found.inferred.quality, found.inferred.reference_quality) == (0.84, 0.9)
    assert "0.84, the reference's 0.9; 0.09 less is allowed" in printed(explain_verified(found, stated), 200)
    low = of_quality(0.7, "its quality is 0.7")
    found, _ = verified(stated, judged_rows(low), JUDGED)
    assert found.over_budget == "its quality is 0.7"


def test_what_trains_does_not_take_the_plan(monkeypatch, capsys):
    plan().save(Path("plan.yaml"))
    with pytest.raises(PlanError, match="the plan is for inference, and transformers trains"):
        show(Path("plan.yaml"), json=False, framework="transformers")
    with pytest.raises(PlanError, match="this search for training"):
        run_search(options(start=Path("plan.yaml")))
    what = WhatToProfile("model.py", "cpu", plan=plan())
    with pytest.raises(PlanError, match="it is for inference, and a step of training is profiled"):
        profile_task(what, TableExecutor(facts(), []), lambda event: None)


def test_run_leaves_the_plan_to_the_job(monkeypatch, capsys):
    """A script is not changed as one that trains is: it starts as it is, and finds the plan."""
    plan().save(Path("plan.yaml"))
    started: list = []
    monkeypatch.setattr("os.execvpe", lambda *asked: started.append(asked))
    run(Path("plan.yaml"), [sys.executable, "serve.py"])
    ((program, words, environment),) = started
    assert (program, words) == (sys.executable, [sys.executable, "serve.py"])
    assert environment["AUTOTUNE_PLAN"].endswith("plan.yaml")
    assert "is for inference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_latency": "20ms"}, "--max-latency is of inference plans. Give --inference too"),
        ({"tolerance": 0.1}, "--tolerance is of inference plans"),
        ({"inference": True, "max_quality_drop": "1%", "tolerance": 0.1}, "--tolerance is of outputs, .* one of them"),
        ({"inference": True, "max_quality_drop": "1%", "recovery_steps": 7}, "--recovery-steps is of what is trained"),
        ({"inference": True, "life": True}, "--life is of training"),
        ({"inference": True, "effective_batch": 8}, "--effective-batch is of training"),
        ({"inference": True, "allow_split": True}, "--allow-split is of training"),
        ({"inference": True, "command": ("python", "train.py")}, "--inference is of a task file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(asked, said):
    with pytest.raises(UserError, match=said):
        check_asked(options(**asked))


def test_a_long_reading_is_told_in_words_of_inference():
    now = [0.0]
    progress = Progress(options(inference=True), clock=lambda: now[0])
    now[0] = 60.0
    assert "does it run where it is imported?" in (phase_words(progress) or "")


def test_the_budget_of_a_plan_holds_the_latency():
    assert searched(max_latency="20ms", budget=900 * MIB).plan.budget.latency_s == 0.02
