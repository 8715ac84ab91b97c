"""``variant``: its contract, what a task may offer, what is refused, and that the guard holds."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch
from search_tables import every, facts, row, run_search
from torch import nn

import autotune
from autotune.errors import PlanError, TaskError
from autotune.estimates import PredictOptions
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.predict import predict
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions, Quality
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan, TaskRef
from autotune.searches.options import Drop
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.models.variant import Variant
from autotune.testing.models import Mlp
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO
from autotune.training.fingerprint import fingerprint

MLP = ZOO["mlp"]
NARROW = Variant(kind="narrow")


class TestVariant(TechniqueContract):
    technique = Variant
    keeps_shapes = False

    def test_it_is_applied_again_and_taken_off(self):
        """It is built anew: a plan without it trains the task's own model."""
        for settings in (Settings(variant=NARROW), Settings(variant=NARROW), Settings()):
            model = autotune.apply(Plan(settings=settings), ZOO["mlp"]).model
            assert model.head.in_features == (16 if settings == Settings() else 8)

    lacking = (NARROW,)


def plan_of(variant: Variant = NARROW, **others) -> Plan:
    return Plan(settings=Settings(batch=Batch(micro=8), variant=variant, **others))


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_variant_is_what_trains():
    """Width 8 in place of 16: a stem of 56, four blocks of 72, a head of 27 parameters."""
    training = autotune.apply(plan_of(), MLP)
    assert num_parameters(training.model) == 56 + 4 * 72 + 27
    assert training.step(next(iter(training.loader))).loss.isfinite()


def test_the_tasks_weights_are_not_loaded_into_it():
    """They are the whole model's, and would not fit."""
    task = dataclasses.replace(MLP, weights=lambda: MLP.build_model().state_dict())
    assert num_parameters(autotune.apply(plan_of(), task).model) == 371


def test_the_plan_is_held_against_the_tasks_own_model():
    """A plan with a variant is for the task that it was found for, and draws what it would have drawn without that."""
    own = fingerprint(MLP.build_model(), MLP.build_dataset())
    plan = plan_of().model_copy(update={"task": TaskRef(source="model.py", fingerprint=own)})
    with one_thread():
        ours, theirs = (autotune.apply(one, MLP).model.state_dict() for one in (plan, plan_of()))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    other = dataclasses.replace(MLP, build_model=partial(Mlp, width=24))
    with pytest.raises(PlanError, match="this model is another"):
        autotune.apply(plan, other)


def test_the_memory_model_traces_the_variant():
    task = dataclasses.replace(MLP, build_model=partial(Mlp, width=256), variants={"narrow": partial(Mlp, width=64)})
    whole, ours = (fit_memory_model(plan, task).peak_bytes(8) for plan in (Plan(settings=Settings()), plan_of()))
    assert ours < 0.2 * whole


def test_blocks_to_recompute_are_chosen_among_its_own():
    """Two blocks in place of four, and a limit below what any choice takes: all of its own are recomputed."""
    task = dataclasses.replace(MLP, variants={"short": shorter})
    chosen = [Settings(batch=Batch(micro=8), variant=variant) for variant in (Variant(), Variant(kind="short"))]
    every = Checkpointing(kind="blocks")
    named = tuple(one.having(every) for one in chosen)
    options = PredictOptions(settings=named, to_choose=tuple(chosen), target="cuda", limit_bytes=1)
    *wanted, whole, short = predict(task, options).predictions
    assert [whole.chosen, short.chosen] == [Settings(checkpointing=every)] * 2
    assert [whole.flops_per_sample, short.flops_per_sample] == [one.flops_per_sample for one in wanted]
    assert short.flops_per_sample < whole.flops_per_sample


def shorter() -> Mlp:
    model = Mlp()
    del model.blocks[2:]
    return model


def test_a_variant_can_be_pruned():
    task = dataclasses.replace(ZOO["cnn"], variants={"narrow": ZOO["cnn"].build_model})
    training = autotune.apply(plan_of(pruning=Pruning(kind="structured")), task)
    assert num_parameters(training.model) == 168 + 12 + 330 + 12 + 21
    assert training.settings.variant == NARROW


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"narrow": 3}, r"variants\['narrow'\] must be a function that builds a model, but got int"),
        ({"narrow": lambda width: Mlp()}, r"variants\['narrow'\] takes arguments, but is called without any"),
        ({"none": Mlp}, "variants: 'none' would be taken for 'none'"),
        ({"Narrow": Mlp, "narrow ": Mlp}, "variants: 'narrow ' would be taken for 'Narrow'"),
        ({"": Mlp}, "variants: a name in text was expected, but got ''"),
        ({3: Mlp}, "variants: a name in text was expected, but got 3"),
        ([Mlp], "variants must be a dict of names and functions that build a model, but got list"),
    ],
)
def test_what_is_no_variant_is_refused_as_the_task_is_read(variants, said):
    with pytest.raises(TaskError, match=said):
        dataclasses.replace(MLP, variants=variants)


def raises() -> nn.Module:
    raise RuntimeError("no such width")


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (raises, RuntimeError, "no such width"),
        (lambda: 3, TaskError, r"variants\['narrow'\] returned int\. Wanted: a torch\.nn\.Module"),
    ],
)
def test_a_variant_that_cannot_be_built_is_said_before_anything_is_measured(build, error, said):
    task = dataclasses.replace(MLP, variants={"narrow": build})
    for build_it in (
        lambda: inspect_task(task, InspectOptions(runs_model=False), "cpu"),
        lambda: autotune.apply(plan_of(), task),
    ):
        with pytest.raises(error, match=said):
            build_it()
    assert inspect_task(task, InspectOptions(runs_model=False, allow_lossy=False), "cpu").variants == {}


def test_what_cannot_be_had_is_refused():
    with pytest.raises(PlanError, match=r"the task has no variant small; it has narrow\. Use kind: none"):
        autotune.apply(plan_of(Variant(kind="small")), MLP)
    with pytest.raises(PlanError, match=re.escape("it has none: variants = {...} in its file offers some")):
        autotune.apply(plan_of(), ZOO["cnn"])
    with pytest.raises(PlanError, match="a model that is built already cannot become that"):
        autotune.apply_to_model(plan_of(), MLP.build_model())


def test_it_is_offered_where_the_task_does():
    known = inspect_task(MLP, InspectOptions(runs_model=False), "cpu")
    assert known.variants == {"narrow": 371}
    assert Variant.choices(known) == (Variant(), NARROW)
    assert NARROW.describe(known) == "variant narrow (371 parameters)"
    assert Variant.choices(known.model_copy(update={"allow_lossy": False})) == (Variant(),)


@pytest.mark.parametrize(("quality", "chosen"), [(50.0, Variant()), (89.8, NARROW)])
def test_a_variant_that_learns_nothing_is_not_chosen(tmp_path, monkeypatch, quality, chosen):
    """However fast it is; one that does as well is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nbatch: [{micro: 64}]\nvariant: auto\n")
    known = facts(variants={"narrow": 1000}, evaluates=True)
    own, narrow = (Settings(batch=Batch(micro=64), variant=one) for one in (Variant(), NARROW))
    speeds = tuple(3 * one for one in row(own).samples_per_s)
    rows = [
        row(own, quality=(Quality(value=90.0),)),
        row(narrow, samples_per_s=speeds, quality=(Quality(value=quality),)),
    ]
    run = run_search(every(max_quality_drop=Drop(0.01, is_share=True)), known, rows=rows)
    assert NARROW in [one.variant for one in run.measured]
    assert run.plan.settings.variant == chosen
    assert (run.plan.quality is None) == (chosen == Variant())
