"""``optimizer``: its contract, the flags it sets, and the same update from every class that has the choice."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from line_task import floats, line, training_of
from search_tables import facts

from autotune.errors import PlanError
from autotune.techniques.optimizers.optimizer import Optimizer, implementation_of, supported_implementations
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

KINDS = ("for_loop", "foreach", "fused")


class TestOptimizer(TechniqueContract):
    technique = Optimizer
    lacking = tuple(Optimizer(kind=kind) for kind in KINDS)


@pytest.mark.parametrize(
    ("kind", "foreach", "fused"), [("for_loop", False, False), ("foreach", True, False), ("fused", False, True)]
)
def test_the_flags_of_every_group_are_set(kind, foreach, fused):
    """Groups keep their own learning rates."""

    def build_optimizer(model):
        return torch.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters())])

    task = type(ZOO["mlp"])(**{**vars(ZOO["mlp"]), "build_optimizer": build_optimizer})
    groups = training_of(task, optimizer=Optimizer(kind=kind)).optimizer.param_groups
    assert {(group["foreach"], group["fused"]) for group in groups} == {(foreach, fused)}
    assert [group["lr"] for group in groups] == [0.1 * i for i in range(len(groups))]


def updated(build, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)]
    optimizer = build(parameters)
    Optimizer(kind=kind).on_optimizer(optimizer)
    for _ in range(3):
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "Adafactor", "RMSprop", "NAdam", "Adamax"])
def test_every_implementation_gives_the_same_update(name):
    """Three steps of each class with each implementation it has, against the class as it is built."""
    build = getattr(torch.optim, name)
    supported = supported_implementations(build([torch.zeros(1, requires_grad=True)]))
    assert supported[:2] == ("for_loop", "foreach")
    for kind in supported:
        torch.testing.assert_close(updated(build, kind), updated(build, "default"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["default", *KINDS])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_an_optimizer_that_was_built_fused_steps_after_a_loss_scaler(name, kind):
    """By whichever implementation, with gradients that are unscaled once: the update is that without a scaler."""
    weights = []
    for precision in (None, "fp16"):
        build = partial(getattr(torch.optim, name), lr=0.125, fused=True)
        training = training_of(
            line(floats(4), precision=precision, build_optimizer=build), optimizer=Optimizer(kind=kind)
        )
        training.step(next(iter(training.loader)))
        weights.append(training.model.weight.item())
    assert weights[0] == weights[1] != 1.0


def test_what_each_class_supports():
    """Fused where torch has a kernel; nothing to choose for LBFGS and SparseAdam."""
    expected = {"AdamW": KINDS, "SGD": KINDS, "Adagrad": KINDS, "RMSprop": KINDS[:2], "LBFGS": (), "SparseAdam": ()}
    found = {name: supported_implementations(getattr(torch.optim, name)([torch.zeros(1)])) for name in expected}
    assert found == expected


def test_what_the_user_has_is_not_offered_again():
    assert [choice.kind for choice in Optimizer.choices(facts())] == ["default", "fused", "foreach", "for_loop"]
    mine = facts(optimizer_implementation="foreach")
    assert [choice.kind for choice in Optimizer.choices(mine)] == ["default", "fused", "for_loop"]


def test_the_implementation_that_an_optimizer_takes_as_it_was_built():
    """A CPU loops unless it is told otherwise."""
    weights = [torch.zeros(1), torch.zeros(1)]
    assert implementation_of(torch.optim.AdamW(weights)) == "for_loop"
    assert implementation_of(torch.optim.AdamW(weights, foreach=True)) == "foreach"
    assert implementation_of(torch.optim.AdamW(weights, fused=True)) == "fused"
    groups = [{"params": weights[:1], "foreach": True}, {"params": weights[1:]}]
    assert implementation_of(torch.optim.AdamW(groups)) is None
    assert implementation_of(torch.optim.LBFGS(weights)) is None


def test_no_fused_kernel_for_complex_parameters():
    assert supported_implementations(torch.optim.AdamW([torch.zeros(1, dtype=torch.cfloat)])) == KINDS[:2]


def test_an_implementation_that_the_class_lacks_is_an_error_with_the_choices():
    task = line(floats(2), build_optimizer=torch.optim.RMSprop)
    with pytest.raises(PlanError) as error:
        training_of(task, optimizer=Optimizer(kind="fused"))
    assert str(error.value) == (
        "settings.optimizer.kind: RMSprop supports for_loop, foreach, but got fused. Use kind: default."
    )
