"""``TechniqueContract``: what a technique must hold on every model of the zoo. A new one's tests inherit it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from ..plan import Plan
from ..task import Task
from ..techniques import Settings, Technique
from ..techniques.batch import Batch
from ..training.apply_plan import apply
from .facts import BARE, facts_of
from .in_use import TechniqueInUse
from .runs import Run, equal_gradients, loss_and_backward, run_applied, run_by_hand, without_dropout
from .zoo import BATCH_SIZE, once_each

_NOTHING = Settings(batch=Batch(micro=BATCH_SIZE))
"""What each technique's default comes to."""


@once_each
def _run_of_nothing(task: Task) -> Run:
    return run_applied(task, _NOTHING)


class TechniqueContract(TechniqueInUse):
    """Subclass it as ``class TestMine(TechniqueContract)`` and set ``technique``."""

    bitwise: ClassVar[bool] = False
    """Whether every setting gives the very bits of a stock loop, and not only the same up to reordering."""
    keeps_random_numbers: ClassVar[bool] = True
    """Whether dropout draws what it draws in a stock loop; where it does not, dropout is off for the comparison."""
    keeps_shapes: ClassVar[bool] = True
    """Whether ``state_dict`` has the stock model's keys and shapes; where it has not, the same model must come of what
    was applied and the same weights."""
    lacking: ClassVar[tuple[Technique, ...]]
    """Settings that a bare machine and model (:data:`autotune.testing.facts.BARE`) cannot have; at least one."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Whatever asks for a task of the zoo is asked of each."""
        if "zoo_task" in metafunc.fixturenames:
            metafunc.parametrize("zoo_task", list(self.tasks), indirect=True)

    @pytest.fixture
    def zoo_task(self, request: pytest.FixtureRequest) -> Task:
        """Each of ``tasks``."""
        return self.tasks[request.param]

    def test_default_is_bitwise_the_stock_loop(self, zoo_task: Task) -> None:
        """Losses, gradients, parameters and buffers of the default are those of a plain loop, bit for bit."""
        assert self.settings(self.default()) == _NOTHING
        assert _run_of_nothing(zoo_task).equals(run_by_hand(zoo_task))

    def test_every_choice_agrees_with_the_stock_loop(self, zoo_task: Task) -> None:
        """Losses, first gradients and trained state agree within the stated exactness; a lossy choice still learns."""
        task = zoo_task if self.keeps_random_numbers else without_dropout(zoo_task)
        facts, others = facts_of(zoo_task), self._others(zoo_task)
        stock = run_by_hand(task) if others else Run()
        stock = stock if self.keeps_gradients else replace(stock, gradients={})
        for choice in others:
            applied = run_applied(task, self.settings(choice))
            if self.bitwise:
                assert applied.equals(stock), choice
            else:
                self.check(choice, facts, applied, stock)

    def test_every_choice_survives_yaml(self, zoo_task: Task) -> None:
        """A plan with the choice is read back equal, and the default has no row."""
        for choice in self._choices(zoo_task):
            plan = Plan(settings=self.settings(choice))
            text = plan.to_yaml()
            assert Plan.from_yaml(text) == plan
            assert (f"  {choice.name}:" in text) == (choice.model_dump(exclude_defaults=True) != {}), text

    def test_choices_are_available_and_start_with_the_users_own(self, zoo_task: Task) -> None:
        """What ``choices`` offers is available, offered once, and holds the default."""
        choices = self._choices(zoo_task)
        assert len(set(choices)) == len(choices)
        assert all(choice.unavailable(facts_of(zoo_task)) is None for choice in choices)
        assert self.default() in choices

    def test_every_choice_is_told_in_words_of_its_own(self, zoo_task: Task) -> None:
        """No two choices read alike; each has a sentence that says what it does."""
        choices, facts = self._choices(zoo_task), facts_of(zoo_task)
        assert len({choice.describe(facts) for choice in choices}) == len(choices)
        assert all(choice.purpose().endswith(".") for choice in (*choices, *self.lacking))

    def test_the_users_own_setting_is_believed_to_gain_nothing(self) -> None:
        """A prior is of another setting, and says how sure it is."""
        assert self.default().prior_gain() == (0.0, 0.0)
        assert all(spread > 0 for mean, spread in (lacking.prior_gain() for lacking in self.lacking) if mean)

    def test_what_a_bare_machine_lacks_is_refused_in_words(self) -> None:
        """Each of ``lacking`` is refused with a reason, and not offered."""
        assert self.lacking
        for setting in self.lacking:
            assert len((setting.unavailable(BARE) or "").split()) >= 3, setting
            assert setting not in self.technique.choices(BARE)

    def test_a_context_is_there_where_one_is_declared(self, zoo_task: Task) -> None:
        """Integrations ask by ``has_context`` whether forward and loss must be within ``forward_context``."""
        for choice in (*self._choices(zoo_task), *self.lacking):
            is_null = isinstance(choice.forward_context("cpu"), nullcontext)
            assert is_null != choice.has_context, choice

    def test_state_dict_loads_both_ways(self, zoo_task: Task) -> None:
        """Keys, shapes and dtypes of ``state_dict`` stay, so that checkpoints go to and from the stock model."""
        for choice, model in self._applied_models(zoo_task) if self.keeps_shapes else ():
            stock = zoo_task.build_model()
            assert _signature(model) == _signature(stock), choice
            stock.load_state_dict(model.state_dict())
            model.load_state_dict(zoo_task.build_model().state_dict())

    def test_what_was_applied_is_applied_again_the_same(self, zoo_task: Task) -> None:
        """The settings of a training, read back from JSON, make its very model of the same weights."""
        for choice in () if self.keeps_shapes else self._others(zoo_task):
            first = apply(Plan(settings=self.settings(choice)), zoo_task)
            plan = Plan(settings=Settings.model_validate_json(first.settings.model_dump_json()))
            second = apply(plan, zoo_task)
            assert second.settings == first.settings, choice
            assert _signature(second.model) == _signature(first.model), choice
            ours, theirs = first.model.state_dict(), second.model.state_dict()
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), choice
            second.model.load_state_dict(ours)

    def test_modes_and_trainable_flags_stay(self, zoo_task: Task) -> None:
        """``training`` and ``requires_grad`` are as the user left them, of whatever has kept its name."""
        stock = _flags(zoo_task.build_model())
        for choice, model in self._applied_models(zoo_task):
            flags = _flags(model)
            names = set(stock) if self.keeps_shapes else set(stock) & set(flags)
            assert {name: flags.get(name) for name in names} == {name: stock[name] for name in names}, choice
            assert self.keeps_shapes is False or set(flags) == names, choice

    def test_a_deep_copy_is_a_model_of_its_own(self, zoo_task: Task) -> None:
        """The copy gives the same loss and gradients, and none of them reach the original."""
        batch = next(iter(apply(Plan(settings=Settings()), zoo_task).loader))
        for choice, model in self._applied_models(zoo_task):
            copied = copy.deepcopy(model)
            losses = [loss_and_backward(zoo_task, each, batch) for each in (copied, model)]
            assert torch.equal(*losses), choice
            pairs = zip(copied.parameters(), model.parameters(), strict=True)
            assert all(a is not b and (equal_gradients(a, b) or not self.keeps_gradients) for a, b in pairs), choice

    def _applied_models(self, task: Task) -> Iterator[tuple[Technique, nn.Module]]:
        for choice in self._others(task):
            yield choice, apply(Plan(settings=self.settings(choice)), task).model


def _signature(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, value.shape, value.dtype) for name, value in model.state_dict().items()]


def _flags(model: nn.Module) -> dict[str, bool]:
    return {
        **{f"{name}.training": module.training for name, module in model.named_modules()},
        **{f"{name}.requires_grad": p.requires_grad for name, p in model.named_parameters()},
    }
