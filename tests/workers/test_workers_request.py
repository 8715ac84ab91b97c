"""Requests: each kind has what it needs and nothing else, and comes over the wire as it was."""

import pytest
from pydantic import ValidationError

from autotune.estimates import EstimateOptions, PredictOptions
from autotune.measure import MeasureOptions
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.precision import Precision
from autotune.workers import (
    REQUEST,
    CompareRequest,
    ExportRequest,
    InspectRequest,
    MeasureRequest,
    PredictRequest,
    ProfileRequest,
)

COMMON = {"id": "1", "task": "model.py", "device": "cpu"}
BF16 = Settings(precision=Precision(kind="bf16"))
PLAN = Plan(settings=BF16, budget=Budget(limit=2**30))
MEASURE = MeasureRequest(**COMMON, plan=PLAN, options=MeasureOptions(parity_batch=8))


@pytest.mark.parametrize(
    "request_",
    [
        InspectRequest(**COMMON),
        MEASURE,
        ProfileRequest(**COMMON, plan=PLAN),
        ExportRequest(**COMMON, plan=PLAN, options={"to": "pt2", "file": "/there"}),
        PredictRequest(**COMMON, options=PredictOptions(settings=(BF16,))),
        PredictRequest(**COMMON, options=EstimateOptions(settings=BF16)),
    ],
    ids=lambda request: f"{request.kind}-{type(request.options).__name__}",
)
def test_a_request_is_the_same_on_the_other_side(request_):
    assert REQUEST.validate_json(request_.model_dump_json(by_alias=True)) == request_


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "inspect", "plan": {"settings": {}}}, "inspect.plan\n  Extra inputs are not permitted"),
        ({"kind": "measure", "options": {"parity_batch": 8}}, "measure.plan\n  Field required"),
        ({"kind": "measure", "plan": {"settings": {}}}, "measure.options\n  Field required"),
        ({"kind": "profile"}, "profile.plan\n  Field required"),
        ({"kind": "predict"}, "predict.options\n  Field required"),
    ],
)
def test_a_request_with_too_little_or_too_much_cannot_be_written(changes, said):
    with pytest.raises(ValidationError, match=said):
        REQUEST.validate_python({**COMMON, **changes})


def test_what_is_in_force_is_the_plans_and_else_nothing():
    assert [one.applied for one in (MEASURE, InspectRequest(**COMMON))] == [BF16, Settings()]


def test_a_measurement_alone_is_held_to_its_budget():
    """And where it is to be enforced alone: the reference is not."""
    free = MEASURE.model_copy(update={"options": MeasureOptions(parity_batch=8, enforce=False)})
    limits = [one.memory_limit_bytes for one in (MEASURE, free, ProfileRequest(**COMMON, plan=PLAN))]
    assert limits == [2**30 * 5 // 4, None, None]


def test_another_deadline_is_of_both_sides_and_bounds_compiling():
    """600 s of compiling beyond a deadline, of which 50 s are left where the whole may take 150; a task that lies
    elsewhere is both sides'."""
    both = CompareRequest.of(MEASURE, MEASURE, 60.0)
    assert (both.one.deadline_s, both.one.compiling_s, both.compiling_s) == (1260.0, 600.0, 1200.0)
    shorter = both.with_deadline(100.0, 150.0)
    assert [(one.deadline_s, one.compiling_s, one.latest_s) for one in (shorter, shorter.one, shorter.other)] == [
        (100.0, 50.0, 150.0)
    ] * 3
    assert MEASURE.with_deadline(100.0, 90.0).compiling_s == 0.0
    moved = both.of_task("elsewhere.py")
    assert {one.task for one in (moved, moved.one, moved.other)} == {"elsewhere.py"}
