"""Cuts that one process judges before any trial: they are what a search tries, and their trials measure speed alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from search_tables import MIB, facts, options, row, run_search
from test_search_guard import REFERENCE, scored

from autotune.errors import NothingFits, TaskError
from autotune.estimates import Prediction
from autotune.measure.cuts.types import Cuts, JudgedCut
from autotune.measure.measurement import Quality
from autotune.searches.driver import search
from autotune.searches.events import CutsEnded, CutsStarted, TrialEnded, TrialStarted, Warned
from autotune.searches.options import Drop
from autotune.searches.winner.nothing_fits import in_words
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.words import settings_words
from autotune.workers import Crashed, CutsJudged, Failed, JudgeRequest, Outcome
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory")
SPACE = "schema: autotune/space@1\npruning: auto\nlow_rank: auto\n"
JUDGED = facts(evaluates=True, linear_features=128)
POINT = Drop(1.0, is_share=False)
HASH = "sha256:" + "b" * 64
HALF = REFERENCE.having(Pruning(kind="structured", ratio=0.5, record=HASH))
BOTH = HALF.having(LowRank(kind="svd", ranks=(("fc", 4),)))


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    return options(max_quality_drop=POINT, recovery_steps=10)


def cut(settings: Settings, step: float, *values: float) -> JudgedCut:
    return JudgedCut(settings=settings, step=step, qualities=tuple(Quality(value=one) for one in values))


def judged(*cuts: JudgedCut, **changes: object) -> CutsJudged:
    reference = JudgedCut(settings=REFERENCE, qualities=tuple(Quality(value=90.0) for _ in range(3)))
    return CutsJudged(found=Cuts(reference=reference, cuts=cuts, **changes))


class Table(TableExecutor):
    """The reference and two cuts, of 1 and of 2 and 4 times its speed; what judging comes to, attempt by attempt."""

    def __init__(self, *outcomes: Outcome, also: Sequence[Settings] = (), peak_bytes: int | None = None) -> None:
        self._outcomes = iter(outcomes)
        rows = [
            row(one, samples_per_s=(100 * speed,), peak_bytes=(100 * MIB,), quality=(Quality(value=89.9),))
            for one, speed in ((REFERENCE, 1), (HALF, 2), (BOTH, 4), *((one, 8) for one in also))
        ]
        known = None if peak_bytes is None else Prediction(peak_bytes=peak_bytes)
        super().__init__(JUDGED, rows, predict=lambda settings: known, judge=lambda request: next(self._outcomes))

    @property
    def judging(self) -> list[JudgeRequest]:
        return [request for request in self.requests if isinstance(request, JudgeRequest)]


def test_the_cuts_on_the_front_are_the_only_ones_that_are_tried(asked):
    """Half the widths lose a tenth of a point, with low rank beside it six; one is slower than both, and worse."""
    slow = cut(REFERENCE.having(Pruning(kind="structured", record=HASH)), 0.8, 89.5, 89.5, 89.5)
    lost = cut(BOTH.having(Pruning(kind="structured", ratio=0.9, record=HASH)), 0.1, 80.0, 80.0, 80.0)
    table = Table(judged(slow, cut(HALF, 0.5, 89.9, 89.9, 89.9), cut(BOTH, 0.25, 89.4, 89.4, 89.4), lost))
    run = run_search(asked.model_copy(update={"sampler": "random"}), executor=table)
    assert {*run.measured} == {REFERENCE, HALF, BOTH}
    assert run.plan.settings == BOTH
    (ended,) = run.seen(CutsEnded)
    assert [(speed, round(change, 5)) for _, speed, change in ended.front] == [(4.0, -0.00667), (2.0, -0.00111)]
    assert ended.num_cuts == 4


def test_what_loses_nearly_all_that_is_allowed_is_no_choice(asked):
    """It lost 0.97 of a point on average, and a tenth more or less by the seed: that it is proven to lose no more than
    one is unlikely. What loses less takes its place, and is the plan."""
    table = Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9), cut(BOTH, 0.25, 89.13, 89.03, 88.93)))
    run = run_search(asked.model_copy(update={"sampler": "random"}), executor=table)
    assert {*run.measured} == {REFERENCE, HALF}
    assert run.plan.settings == HALF


def test_what_is_unlikely_to_be_proven_is_tried_where_nothing_likelier_is_there(asked):
    """It lost 0.85 of a point. Six seeds leave 0.27 to chance, so that it would have to come to 0.73, 1.2 standard
    deviations away: some 15 %."""
    risky = cut(BOTH, 0.25, 89.16, 89.15, 89.14)
    for cuts, tried in (((cut(HALF, 0.5, 89.9, 89.9, 89.9), risky), {REFERENCE, HALF}), ((risky,), {REFERENCE, BOTH})):
        run = run_search(asked.model_copy(update={"sampler": "random"}), executor=Table(judged(*cuts), judged(risky)))
        assert {*run.measured} == tried


def test_trials_of_what_was_judged_measure_no_quality_and_have_it(asked):
    """The reference's neither."""
    table = Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)))
    run = run_search(asked, executor=table)
    trials = [one for one in table.requests if one.kind == "measure" and not one.fresh]
    assert all(one.options.quality is None for one in trials)
    assert run.plan.quality.reference == 90.0 or run.plan.quality.value == 89.9


def test_a_cut_that_has_the_whole_models_scores_is_told_once(asked, tmp_path):
    """And not with each trial of it: here one in float32 and one in bfloat16."""
    (tmp_path / "space.yaml").write_text(SPACE + "precision: [{kind: fp32}, {kind: bf16}]\n")
    same = (scored(3600, 4000),) * 3
    cuts = Cuts(
        reference=JudgedCut(settings=REFERENCE, qualities=same),
        cuts=(JudgedCut(settings=HALF, step=0.5, qualities=same),),
    )
    also = [one.having(Precision(kind="bf16")) for one in (REFERENCE, HALF)]
    run = run_search(asked.model_copy(update={"sampler": "random"}), executor=Table(CutsJudged(found=cuts), also=also))
    assert {*run.measured} == {REFERENCE, HALF, *also}
    assert len([event for event in run.seen(Warned) if "every example has the same score" in event.message]) == 1


def test_what_computes_the_same_as_the_job_is_not_told_to_have_its_scores(asked, tmp_path):
    """A trial in bfloat16 changes the rounding alone, and has the quality that is known of the whole model."""
    (tmp_path / "space.yaml").write_text(SPACE + "precision: [{kind: fp32}, {kind: bf16}]\n")
    rounded = REFERENCE.having(Precision(kind="bf16"))
    half = JudgedCut(settings=HALF, step=0.5, qualities=(scored(3599, 4000),) * 3)
    reference = JudgedCut(settings=REFERENCE, qualities=(scored(3600, 4000),) * 3)
    table = Table(CutsJudged(found=Cuts(reference=reference, cuts=(half,))), also=[rounded])
    run = run_search(asked.model_copy(update={"sampler": "random"}), executor=table)
    assert {*run.measured} >= {REFERENCE, HALF, rounded}
    assert not [event for event in run.seen(Warned) if "every example has the same score" in event.message]


def test_every_pair_of_the_grid_is_a_candidate_and_every_seed_is_asked_for(asked):
    """Four ratios and no cut, two ranks and none: fourteen that cut anything."""
    table = Table(judged())
    run = run_search(asked, executor=table)
    (request,) = table.judging
    assert len(request.options.candidates) == 14
    assert request.options.seeds == (0, 1, 2)
    assert (request.options.allowed, request.options.is_share) == (1.0, False)
    assert run.seen(CutsStarted)[0].num_cuts == 14
    assert run.measured == [REFERENCE]
    assert run.seen(CutsEnded)[0].front == ()


@pytest.mark.parametrize("drop", [None, POINT])
def test_rows_that_a_space_writes_out_are_tried_one_by_one(asked, drop):
    """And nothing is judged beforehand without a drop that is allowed."""
    if drop is not None:
        Path("space.yaml").write_text("schema: autotune/space@1\npruning: [{kind: none}, {kind: structured}]\n")
    table = Table()
    run_search(asked.model_copy(update={"max_quality_drop": drop}), executor=table)
    assert table.judging == []


def test_a_process_that_dies_is_begun_again_once(asked):
    table = Table(Crashed(message="SIGKILL"), judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)))
    run = run_search(asked, executor=table)
    assert [one.options.keep for one in table.judging] == 2 * [str(Path(".autotune/model-1/cuts.json").absolute())]
    assert run.plan.settings == HALF


def test_what_cannot_be_judged_is_tried_one_by_one(asked):
    """The search says why."""
    table = Table(Failed(message="RuntimeError: no"))
    run = run_search(asked, executor=table)
    assert any("cuts are tried one by one: RuntimeError: no" in event.message for event in run.seen(Warned))
    assert len({*run.measured}) > 1


def test_pruning_that_cannot_be_done_is_said_once_and_left_out(asked):
    refused = [JudgedCut(settings=one, ended="settings.pruning: no") for one in (HALF, BOTH)]
    run = run_search(asked, executor=Table(judged(*refused)))
    assert [event.message for event in run.seen(Warned)].count("settings.pruning: no") == 1
    assert run.measured == [REFERENCE]


def test_where_every_cut_loses_too_much_the_plan_says_what_the_best_came_to(asked):
    """Half the widths lose two points of one from each seed; with low rank beside it, so much that it ended early."""
    far = "70 of the allowed drop lost after 0.125 of the recovery"
    early = JudgedCut(settings=BOTH, step=0.25, rungs=(20.0,), ended=far)
    for cuts, why in (
        ((early, cut(HALF, 0.5, 88.0, 88.0, 88.0)), "its quality is 88, the reference's 90, and 1 less is allowed"),
        ((early,), far),
    ):
        run = run_search(asked, executor=Table(judged(*cuts)))
        assert run.plan.settings == REFERENCE
        best = settings_words(cuts[-1].settings.part("function"))
        assert [note for note in run.plan.notes if note.startswith("none of ")] == [
            f"none of {len(cuts)} cut{'s' * (len(cuts) > 1)} of the model can be used; the best, {best}: {why}"
        ]


def test_several_ranks_train_what_one_process_has_judged(asked):
    """Of two processes, each has the whole model, and together they train on what one does: cuts are scanned and judged
    in one, whose word holds for both."""
    Path("space.yaml").write_text(
        f"{SPACE}batch: [{{micro: 64}}, {{micro: 32, accumulate: 2}}]\n"
        "parallel: [{kind: none}, {kind: ddp, processes: 2}]\n"
    )
    known = facts(evaluates=True, linear_features=128, num_devices=2)
    two = HALF.having(Batch(micro=32, accumulate=2), Parallel(kind="ddp", processes=2))
    rows = [
        row(one, samples_per_s=(speed,), peak_bytes=(100 * MIB,))
        for one, speed in ((REFERENCE, 100), (HALF, 200), (two, 300))
    ]
    table = TableExecutor(known, rows, judge=lambda request: judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)))
    run = run_search(asked.model_copy(update={"sampler": "random"}), executor=table, known=known)
    (request,) = (one for one in table.requests if isinstance(one, JudgeRequest))
    assert {one.parallel.processes for one in (request.plan.settings, *request.options.candidates)} == {1}
    assert run.plan.settings == two
    assert {one.options.quality for one in table.requests if one.kind == "measure"} == {None}
    assert run.plan.quality.pairs == 3


BLIND = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size = 16

def build_model():
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))

def build_dataset():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))

def compute_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

BEST = build_model()

def evaluate(model):
    return -compute_loss(BEST, build_dataset().tensors).item()
"""


@pytest.mark.slow
def test_a_search_ends_where_evaluate_does_not_see_the_model(asked, local_executor):
    """The process that judges cuts says so, and then the job as it stands: nothing that is lossy is tried."""
    Path("blind.py").write_text(BLIND)
    changes = {"task": "blind.py", "trials": 3, "trial_time": 0.1, "recovery_steps": 4}
    events: list[object] = []
    with pytest.raises(TaskError, match="does not see the model that it is given"):
        search(asked.model_copy(update=changes), local_executor, events.append, threading.Event())
    assert [event.number for event in events if isinstance(event, TrialStarted)] == [0]


@pytest.mark.parametrize(
    ("budget", "is_over"), [(0.7, True), (1.0, False), (150 * MIB, True), (205 * MIB, True), (300 * MIB, False)]
)
def test_where_the_job_as_it_stands_is_over_the_budget_cuts_are_chosen_by_memory(asked, budget, is_over):
    """It is predicted to take 200 MiB, to which the margin adds 6."""
    table = Table(judged(), peak_bytes=200 * MIB)
    with suppress(NothingFits):
        run_search(asked.model_copy(update={"budget": budget}), executor=table)
    (request,) = table.judging
    assert request.options.by_bytes == is_over


def test_threads_that_judge_cuts_sleep_where_they_wait_and_those_of_trials_do_as_in_the_job(asked):
    table = Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)))
    run_search(asked, executor=table)
    assert [one.environment.get("OMP_WAIT_POLICY") for one in table.judging] == ["passive"]
    assert {one.environment.get("OMP_WAIT_POLICY") for one in table.requests if one not in table.judging} == {None}


def test_judging_has_a_quarter_of_the_time(asked):
    table = Table(judged())
    run_search(asked.model_copy(update={"max_time": 400.0}), executor=table)
    (request,) = table.judging
    assert request.options.most_s == 100.0
    assert request.deadline_s < 400.0


def test_a_search_that_goes_on_judges_nothing_anew(asked):
    """The study has what was found."""
    run_search(asked, executor=Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9))))
    table = Table()
    run = run_search(asked.model_copy(update={"resume": True}), executor=table)
    assert table.judging == []
    assert run.plan.settings == HALF


def test_a_finalist_that_rounds_nothing_is_proven_by_what_was_judged_before_any_trial(asked):
    """Half the widths loses a tenth of a point from each of three seeds: its rounds are for speed and memory."""
    table = Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)))
    run = run_search(asked, executor=table)
    assert len(table.judging) == 1
    assert {one.options.quality for one in table.requests if one.kind == "measure"} == {None}
    assert (run.plan.quality.value, run.plan.quality.reference, run.plan.quality.pairs) == (89.9, 90.0, 3)


def test_one_whose_proof_is_open_is_judged_from_three_more_seeds_in_one_process(asked):
    """It loses 0.5, 0.9 and 0.8 of one point. From the others it loses nothing, or two points: then it falls."""
    for later, settings in ((90.0, HALF), (88.0, REFERENCE)):
        table = Table(judged(cut(HALF, 0.5, 89.5, 89.1, 89.2)), judged(cut(HALF, 0.5, later, later, later)))
        run = run_search(asked, executor=table)
        first, more = table.judging
        assert (first.options.seeds, more.options.seeds) == ((0, 1, 2), (3, 4, 5))
        assert more.options.candidates == (HALF,)
        assert run.plan.settings == settings


def test_one_that_rounds_beside_its_cut_is_judged_as_it_is_beside_known_qualities_of_the_reference(asked):
    Path("space.yaml").write_text(f"{SPACE}precision: [{{kind: bf16}}]\n")
    rounded = HALF.having(Precision(kind="bf16"))
    table = Table(judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)), judged(cut(rounded, 0.5, 89.8, 89.8, 89.8)), also=[rounded])
    run = run_search(asked, executor=table)
    assert run.plan.settings == rounded
    proof = table.judging[1].options
    assert (proof.candidates, proof.seeds, proof.allowed) == ((rounded,), (0, 1, 2), None)
    assert [one.value for one in proof.reference] == [90.0, 90.0, 90.0]
    assert run.plan.quality.value == 89.8


def test_what_judging_took_is_not_taken_for_a_part_of_a_trial(asked):
    """The reference was judged for 50 s in another process: its trial took none of that."""
    found = judged(cut(HALF, 0.5, 89.9, 89.9, 89.9)).found
    own = tuple(Quality(value=90.0, seconds=50.0) for _ in range(3))
    reference = found.reference.model_copy(update={"qualities": own})
    run = run_search(asked, executor=Table(CutsJudged(found=found.model_copy(update={"reference": reference}))))
    first = run.seen(TrialEnded)[0].outcome
    assert (first.measurement.quality.value, first.measurement.quality.seconds) == (90.0, 0.0)


def test_what_was_found_impossible_at_inspection_is_no_candidate(asked):
    """Pruning is left out, and said once; low rank is judged alone."""
    known = facts(evaluates=True, linear_features=128, left_out={"pruning": "its code goes by its widths"})
    table = TableExecutor(known, [row(REFERENCE, quality=(Quality(value=90.0),))], judge=lambda request: judged())
    run = run_search(asked, executor=table)
    (request,) = (one for one in table.requests if isinstance(one, JudgeRequest))
    assert {one.pruning for one in request.options.candidates} == {Pruning()}
    said = [event.message for event in run.seen(Warned)]
    assert said.count("pruning stays as it is: its code goes by its widths.") == 1


def test_a_nearest_miss_is_named_without_the_packed_record_of_its_cut():
    packed = REFERENCE.having(HALF.pruning.model_copy(update={"kept": "H4sIAAAA"}))
    assert in_words(packed) == f"batch {{micro: 64}}, pruning {{kind: structured, ratio: 0.5, record: {HASH}}}"
