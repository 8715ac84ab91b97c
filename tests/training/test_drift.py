"""A plan that is applied elsewhere than it was measured: what differs, what follows, and when that is an error."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import autotune
from autotune.bundle import device_name
from autotune.errors import PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Budget, Environment, Plan, TaskRef
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.training.drift import differences
from autotune.training.fingerprint import identify


def measured(**changes):
    """A plan that was measured here, but for what changes."""
    here = {"torch": torch.__version__, "device": device_name("cpu"), "autotune": "0.1", "python": "3", "threads": 1}
    environment = Environment(**{**here, **changes})
    return Plan(settings=Settings(batch=Batch(micro=2)), budget=Budget(device="cpu"), environment=environment)


def applied(plan, **options):
    pieces = {
        "model": nn.Linear(2, 1),
        "dataset": TensorDataset(torch.ones(4, 2)),
        "loss": lambda model, batch: model(batch[0]).mean(),
        "batch_size": 2,
    }
    with one_thread():
        return autotune.apply(plan, **{**pieces, **options})


OTHERS = {"torch 1.0": {"torch": "1.0"}, "device Another": {"device": "Another"}, "3 threads": {"threads": 3}}


@pytest.mark.parametrize("what", OTHERS)
def test_apply_warns_once_of_what_differs_and_says_what_follows(what):
    with pytest.warns(UserWarning, match="the plan was measured with") as warned:
        applied(measured(**OTHERS[what]))
    (said,) = (str(one.message) for one in warned)
    assert f"measured with {what}, and " in said
    assert "its speed" in said
    assert said.endswith("`autotune verify` measures it here.")


def test_nothing_is_said_where_nothing_differs(recwarn):
    applied(measured(), strict=True)
    assert not [str(one.message) for one in recwarn if "measured" in str(one.message)]


@pytest.mark.parametrize("what", OTHERS)
def test_each_is_an_error_if_asked_for(what):
    with pytest.raises(PlanError, match=f"measured with {what}.* Search again here"):
        applied(measured(**OTHERS[what]), strict=True)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ({"model": nn.Linear(2, 3)}, "the model: 3 parameters → 9 parameters"),
        ({"dataset": TensorDataset(torch.ones(4, 2), torch.ones(4))}, r"batch shapes: float32 \[\*, 2\] → "),
    ],
)
def test_another_model_or_batch_is_refused_whatever_was_asked_for(pieces, said):
    """What differs is told in words."""
    fingerprint, identity = identify(nn.Linear(2, 1), TensorDataset(torch.ones(4, 2)))
    task = TaskRef(source="model.py", fingerprint=fingerprint, identity=identity)
    plan = measured().model_copy(update={"task": task})
    applied(plan)
    with pytest.raises(PlanError, match=f"the plan was found for model.py .*{said}.* Search again for this model"):
        applied(plan, **pieces)


def test_it_is_an_error_if_asked_for(monkeypatch):
    plan = measured(torch="1.0", threads=3)
    with pytest.raises(PlanError, match=r"torch 1\.0.*; the plan was measured with 3 threads") as found:
        applied(plan, strict=True)
    assert "Search again here" in str(found.value)
    monkeypatch.setenv("AUTOTUNE_STRICT", "1")
    with pytest.raises(PlanError):
        applied(plan)


def test_threads_of_a_plan_for_a_gpu_do_not_count():
    plan = measured(threads=3)
    on_gpu = plan.environment.model_copy(update={"threads": None})
    assert not [*differences(plan, on_gpu)]
    assert not [*differences(Plan(settings=Settings()), on_gpu)]


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (("convolutions",), ("matrix products", "convolutions"), "convolutions of .*it is matrix products and convol"),
        (("convolutions",), (), "convolutions of fp32 in TF32, and here it is nothing, by torch's flags"),
        (("convolutions",), ("convolutions",), None),
        (None, ("convolutions",), None),
        (("convolutions",), None, None),
    ],
)
def test_flags_for_tf32_that_differ_are_told(then, now, said):
    """A plan of an earlier version does not know them; a device may have none."""
    plan = measured(tf32=then)
    found = [one.what for one in differences(plan, plan.environment.model_copy(update={"tf32": now}))]
    assert bool(found) == (said is not None)
    assert said is None or re.search(said, found[0])
