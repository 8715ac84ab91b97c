"""``low_rank``: its contract, the best approximation of a rank, what stays, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest
import torch
from pruning_models import MODELS
from search_tables import facts
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.pruning.factors import LowRankLinear
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.testing.runs import run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

QUARTER = LowRank(kind="svd", least_features=4)
"""For models of 16 features."""


pytestmark = pytest.mark.usefixtures("one_thread_only")


class TestLowRank(TechniqueContract):
    technique = LowRank
    keeps_shapes = False
    refuses = {"applied again": "cannot be taken back. Build it anew"}
    lacking = (LowRank(kind="svd"),)

    def _choices(self, task):
        small = (QUARTER, LowRank(kind="svd", energy=0.5, least_features=4))
        return (LowRank(), *(one for one in small if one.unavailable(self._facts(task)) is None))

    def _facts(self, task):
        from autotune.testing.facts import facts_of

        return facts_of(task)


def plan_of(low_rank: LowRank = QUARTER, **others) -> Plan:
    return Plan(settings=Settings(batch=Batch(micro=8), low_rank=low_rank, **others))


def applied(model: nn.Module, low_rank: LowRank, x: torch.Tensor) -> nn.Module:
    return autotune.apply_to_model(plan_of(low_rank), model, run=lambda model: model(x).sum())


def layers(model: nn.Module) -> dict[str, int]:
    return {path: one.rank for path, one in model.named_modules() if isinstance(one, LowRankLinear)}


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 8), (8, 12)])
def test_the_product_is_the_best_of_its_rank(inputs, outputs):
    """What torch's own singular value decomposition leaves of the weight, of rank 2 of 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 3))
    left, values, right = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    x = torch.randn(5, inputs)
    expected = F.linear(x, best, model[0].bias)
    applied(model, LowRank(kind="svd", least_features=8), x)
    assert layers(model) == {"0": 2}
    assert sum(p.numel() for p in model[0].parameters()) == 2 * (inputs + outputs) + outputs
    torch.testing.assert_close(model[0].weight, best)
    torch.testing.assert_close(model[0](x), expected)


def test_energy_keeps_as_many_singular_values_as_it_takes():
    """Squares 16, 9, 4, 1 and zeros: 25 of 30 are two values, 0.9 of it three."""
    for energy, rank in ((25 / 30 - 1e-6, 2), (0.9, 3), (0.5, 1)):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
        model[0].weight.data = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0] + 12 * [0.0]))
        applied(model, LowRank(kind="svd", energy=energy, least_features=8), torch.randn(2, 16))
        assert layers(model) == {"0": rank}


def test_a_layer_of_zeros_can_still_learn():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    applied(model, QUARTER, torch.randn(2, 8))
    assert model[0].weight.count_nonzero() == 0
    model(torch.randn(4, 8)).sum().backward()
    assert model[0].down.grad.count_nonzero() or model[0].up.grad.count_nonzero()


def test_whatever_values_a_model_has_that_is_only_traced_its_ranks_are_the_same():
    """Memory that was never written may hold anything."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight.data[0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0, 0, 0])
    applied(model, QUARTER, torch.randn(2, 8))
    assert layers(model) == {"0": 2}


def test_the_head_tied_weights_and_what_is_untouchable_stay():
    model = autotune.apply(plan_of(), ZOO["mlp"]).model
    assert layers(model) == {f"blocks.{number}.linear": 4 for number in range(4)} | {"stem": 1}
    model = autotune.apply(plan_of(QUARTER.model_copy(update={"untouchable": ("stem", "blocks.2")})), ZOO["mlp"]).model
    assert layers(model) == {f"blocks.{number}.linear": 4 for number in (0, 1, 3)}
    tied = autotune.apply(plan_of(), ZOO["tied"]).model
    shared = [p for name, p in tied.named_parameters(remove_duplicate=False) if "embedding" in name or "head" in name]
    assert len(shared) >= 2
    assert any(one is other for one, other in itertools.pairwise(shared))


@pytest.mark.parametrize("name", ["encoder", "vit", "bert", "gpt2", "llama"])
def test_models_of_other_libraries_train_and_are_judged(name):
    """Forward in both modes (torch's encoder reads weights in eval mode), backward, a state dict."""
    build, loss = MODELS[name]
    torch.manual_seed(0)
    model = build()
    before = sum(p.numel() for p in model.parameters())
    autotune.apply_to_model(plan_of(LowRank(kind="svd", least_features=16)), model, run=loss)
    assert len(layers(model)) >= 4
    assert sum(p.numel() for p in model.parameters()) < before
    loss(model).backward()
    assert all(p.grad is not None for path, p in model.named_parameters() if path.endswith((".up", ".down")))
    with torch.no_grad():
        torch.testing.assert_close(loss(model.eval()), loss(model.eval()))
    again = build()
    autotune.apply_to_model(plan_of(LowRank(kind="svd", least_features=16)), again, run=loss)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss(again.eval()), loss(model))


def test_it_is_exported():
    model = autotune.apply(plan_of(), ZOO["mlp"]).model
    x = torch.randn(3, 6)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_plan_has_the_ranks(tmp_path):
    """Energy is not asked again, nor samples."""
    training = autotune.apply(plan_of(LowRank(kind="svd", energy=0.6, least_features=4)), ZOO["mlp"])
    Plan(settings=training.settings).save(tmp_path / "plan.yaml")
    plan = autotune.load_plan(tmp_path / "plan.yaml")
    assert dict(plan.settings.low_rank.ranks) == layers(training.model)
    assert layers(autotune.apply(plan, ZOO["stream"]).model) == layers(training.model)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "svd", "rank_ratio": 1.0}, "less than 1"),
        ({"kind": "svd", "energy": 0}, "greater than 0"),
        ({"kind": "svd", "energy": 0.5, "rank_ratio": 0.5}, "exclude each other"),
        ({"kind": "none", "rank_ratio": 0.5}, "kind: none does nothing, but got rank_ratio"),
        ({"kind": "nmf"}, "kind"),
    ],
)
def test_what_cannot_be_meant_is_refused_as_a_plan_is_read(row, said):
    with pytest.raises(PlanError, match=said):
        Plan.from_yaml(f"schema: autotune/plan@1\nsettings: {json.dumps({'low_rank': row})}\n")


@pytest.mark.parametrize(
    ("name", "low_rank", "said"),
    [
        ("cnn", QUARTER, "the model has no linear layers that are not tied"),
        ("mlp", LowRank(kind="svd"), "have at most 16 features on the smaller side, and least_features is 64"),
        ("mlp", LowRank(kind="svd", rank_ratio=0.9, least_features=4), "rank_ratio 0.9 makes no layer smaller"),
        ("stream", QUARTER, "an iterable dataset is read only once"),
        ("mlp", QUARTER.model_copy(update={"untouchable": ("block.1",)}), "no module block.1.*such as blocks.1"),
        ("mlp", LowRank(kind="svd", ranks=(("linear", 2),)), "another model's: this one has no linear layer linear"),
        ("mlp", LowRank(kind="svd", ranks=(("stem", 7),)), "no linear layer stem of at least 7 features"),
    ],
)
def test_what_cannot_be_had_is_refused(name, low_rank, said):
    with pytest.raises(PlanError, match=rf"^settings\.low_rank.*{said}"):
        autotune.apply(plan_of(low_rank), ZOO[name])


def test_a_factorised_model_is_not_factorised_again():
    model = ZOO["mlp"].build_model()
    task = dataclasses.replace(ZOO["mlp"], build_model=lambda: model)
    autotune.apply(plan_of(), task)
    for plan in (plan_of(), Plan(settings=Settings())):
        with pytest.raises(PlanError, match=r"factorised already, which cannot be taken back\. Build it anew"):
            autotune.apply(plan, task)


def test_an_optimizer_that_was_built_before_is_refused():
    model, task = ZOO["mlp"].build_model(), ZOO["mlp"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"the optimizer holds weights that factors took the place of\. Build it after"):
        autotune.apply(
            plan_of(), model=model, dataset=task.build_dataset(), loss=task.compute_loss, optimizer=optimizer
        )


def test_it_is_offered_where_it_pays():
    assert [one.rank_ratio for one in LowRank.choices(facts(linear_features=64))] == [0.25, 0.25, 0.125]
    for changed in ({}, {"linear_features": 63}, {"linear_features": 64, "dataset_kind": "iterable"}):
        assert LowRank.choices(facts(**changed)) == (LowRank(),)
    assert "--max-quality-drop" in LowRank(kind="svd").unavailable(facts(linear_features=64, allow_lossy=False))


def test_the_lossy_preset_has_it_and_others_do_not():
    from autotune.search_spaces import load_space

    assert load_space("lossy").low_rank == "auto"
    assert load_space("default").low_rank is None
    assert load_space("exact").low_rank is None


def test_it_composes_with_what_comes_before_and_after():
    """Of a pruned model, with smaller layers recomputed and checkpointed."""
    settings = Settings(
        batch=Batch(micro=8),
        pruning=Pruning(kind="structured", ratio=0.25),
        low_rank=QUARTER,
        layers=Layers(kind="recompute"),
        checkpointing=Checkpointing(kind="blocks"),
    )
    assert all(loss.isfinite() for loss in run_applied(ZOO["gpt"], settings).losses)


def test_the_memory_model_traces_the_factorised_model():
    """As real steps of it take it; less than of the whole one."""
    wide = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    task = dataclasses.replace(
        ZOO["mlp"],
        build_model=lambda: copy.deepcopy(wide),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )
    low = Plan(settings=Settings(low_rank=LowRank(kind="svd", rank_ratio=0.125)))
    whole, ours = (fit_memory_model(plan, task).peak_bytes(8) for plan in (Plan(settings=Settings()), low))
    assert ours < 0.6 * whole
    assert fit_probed_model(low, task).peak_bytes(8) == pytest.approx(ours, rel=0.02)
