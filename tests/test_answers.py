"""What tensors without values are told, beside torch's own general answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from autotune.estimate import answers as module
from autotune.estimate.answers import answers
from autotune.estimate.law import memory_law
from autotune.measure.tracer import tensors_of
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.testing.zoo import ZOO

QUICK = module._LIKE | module._VIEWS | module._INTO | module._IN_PLACE


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Of each operation, how often it was asked; each answer is held against torch's."""
    asked: Counter[Any] = Counter()
    own = module._Answers._answer

    def answer(self: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        results = own(self, func, types, args, kwargs)
        if func in QUICK:
            asked[func] += 1
            with unset_fake_temporarily():
                expected = self._fakes.dispatch(func, types, args, kwargs)
            given = tensors_of((args, kwargs))
            assert type(results) is type(expected)
            assert said_of(results, given) == said_of(expected, given)
            if func not in module._LIKE | module._VIEWS:
                assert [results is one for one in given] == [expected is one for one in given]
        return results

    monkeypatch.setattr(module._Answers, "_answer", answer)
    return asked


def said_of(results: Any, given: Any) -> list[Any]:
    """Of each tensor what there is to know: strides of sides of 1 mean nothing."""
    return [
        (
            one.shape,
            [stride for side, stride in zip(one.shape, one.stride(), strict=True) if side != 1],
            one.storage_offset(),
            one.dtype,
            one.device,
            one.untyped_storage().nbytes(),
            [one.untyped_storage()._cdata == other.untyped_storage()._cdata for other in given],
        )
        for one in tensors_of(results)
    ]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "token_loss"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": {"kind": "bf16"}, "checkpointing": {"kind": "blocks"}},
        {"layers": {"kind": "rounding"}, "memory_format": {"kind": "channels_last"}},
    ],
    ids=["stock", "bf16-blocks", "layers"],
)
def test_what_is_answered_without_torch_is_what_torch_would_say(
    name: str, settings: Any, target: Any, compared: Counter[Any]
):
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))
    memory_law(plan, ZOO[name], accumulates=True, target=target, few=4)
    assert sum(compared.values()) > 200


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t().mul(x.t()),
        lambda x: x + x[:1],
        lambda x: x[:1] + x,
        lambda x: x + x.double(),
        lambda x: x * 2j,
        lambda x: x.int() / x.int(),
        lambda x: x.to(torch.bfloat16) * torch.tensor(2.0),
        lambda x: torch.zeros_like(x.t(), memory_format=torch.contiguous_format),
        lambda x: torch.zeros_like(x, dtype=torch.bool),
        lambda x: torch.zeros_like(x, device="meta"),
        lambda x: torch.ones(4, 3, 1, 1).to(memory_format=torch.channels_last).neg(),
        lambda x: torch.tensor(2.0).view(1) + x,
        lambda x: x.unbind(1),
        lambda x: x.mul_(x[:1]).add_(x[0], alpha=2).lerp_(x[:, :1].expand(3, 4), 0.5),
        lambda x: torch.add(x, x[0], out=torch.empty(3, 4)),
        lambda x: torch.mul(x, 2, out=torch.empty(4, 3).t()),
        lambda x: torch.add(x, x, out=torch.empty(3, 4, dtype=torch.float64)),
        lambda x: x.expand(5, 3, 4).permute(2, 0, 1)[1:, ..., 2],
    ],
)
def test_odd_arguments(make: Any, compared: Counter[Any]):
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, answers("cpu", fakes):
        make(torch.empty(3, 4))
    assert compared


def test_a_value_that_torch_remembers_is_still_known_of_a_view_of_it():
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        assert torch.tensor(3).view(1).item() == 3


def test_where_torch_would_raise_it_does():
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        x = torch.empty(3, 4)
        other = torch.empty(3, 4, device="meta")
        for wrong in (lambda: x.view(5), lambda: x + x.t(), lambda: x.expand(2, 4), lambda: x + other):
            with pytest.raises(RuntimeError):
                wrong()
        assert isinstance(x + 1, Tensor)
