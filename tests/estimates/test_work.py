"""Operations that a step takes, by hand arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.estimates.tracing.work import WorkCounter, total_work
from autotune.measure.profiling.allocations import Phase

aten = torch.ops.aten


@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize("name", ["flash_attention_for_cpu", "flash_attention"])
def test_fewer_heads_of_keys_take_as_many_products(name: str, num_key_heads: int):
    """Each of 4 heads multiplies 8 queries by 8 keys of 16 numbers, and 8 by 8 shares by as many values. Torch 2.11
    has no formula where keys have fewer heads, and ended such a trace."""
    counter, kernel = WorkCounter(), getattr(aten, f"_scaled_dot_product_{name}").default
    with FakeTensorMode():
        query = torch.empty(1, 4, 8, 16)
        key = value = torch.empty(1, num_key_heads, 8, 16)
        counter(kernel, (query, key, value), {}, (torch.empty(1, 4, 8, 16),), ("attention", Phase.FORWARD))
    assert total_work(counter.by_place)[0].flops == 2 * (4 * 2 * 8 * 8 * 16)
