"""What CUDA's autocast computes in fp32, over fake tensors of a CPU, whose list is another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.estimates.tracing import cuda_autocast
from autotune.estimates.tracing.fake_ops import answers
from autotune.measure.profiling.tracer import tensors_of

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def listed(macro: str) -> set[str]:
    """Operations of a list of torch's."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", HEADER.read_text())
    assert body is not None, macro
    rows = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])
    return {f"{name}.{kind}" if kind else name for name, kind in rows}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_FP32", cuda_autocast.IN_FP32 - {"norm.Scalar", "norm.ScalarOpt_dim"}),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", cuda_autocast.RESULT_IN_FP32),
        ("AT_FORALL_PROMOTE", cuda_autocast.IN_WIDEST),
    ],
)
def test_the_lists_are_torchs(macro: str, ours: frozenset[str]):
    """But for ``norm``, which torch lists by signatures."""
    assert listed(macro) == ours


def images() -> Tensor:
    return torch.empty(2, 8, 6, 6, dtype=BF16, requires_grad=True)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, torch.dtype]] = {
    "layer_norm": (lambda x: F.layer_norm(x, [6]), FP32, BF16),
    "group_norm": (lambda x: F.group_norm(x, 2), FP32, BF16),
    "softmax": (lambda x: x.softmax(-1), FP32, BF16),
    "pow": (lambda x: x**2, FP32, BF16),
    "square": (lambda x: x.square(), FP32, BF16),
    "exp": (lambda x: x.exp(), FP32, BF16),
    "sum": (lambda x: x.sum(1), FP32, BF16),
    "sum asked for in bf16": (lambda x: x.sum(1, dtype=BF16), BF16, BF16),
    "mean": (lambda x: x.mean(1), BF16, BF16),
    "cumsum": (lambda x: x.cumsum(0), FP32, BF16),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), FP32, BF16),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0), FP32, BF16),
    "scatter_add of two types": (lambda x: x.scatter_add(0, torch.zeros(2, 8, 6, 6).long(), x.float()), FP32, BF16),
    "linear": (lambda x: F.linear(x, torch.empty(3, 6)), BF16, BF16),
    "reflection_pad": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), BF16, FP32),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), BF16, FP32),
    "float64": (lambda x: x.double().exp(), torch.float64, torch.float64),
}
"""What is called, and its type on CUDA and on a CPU."""


@pytest.mark.parametrize("name", CASES)
def test_the_type_of_a_result_is_cudas(name: str):
    call, expected, _ = CASES[name]
    with FakeTensorMode() as fakes, answers("cuda", fakes), torch.autocast("cpu", BF16):
        assert call(images()).dtype == expected


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("scatter_add")])
def test_a_cpus_stays_a_cpus(name: str):
    call, _, expected = CASES[name]
    with FakeTensorMode() as fakes, answers("cpu", fakes), torch.autocast("cpu", BF16):
        assert call(images()).dtype == expected


def test_without_autocast_nothing_is_cast():
    with FakeTensorMode() as fakes, answers("cuda", fakes):
        assert F.layer_norm(images(), [6]).dtype == BF16


def made(call: Callable[[Tensor], Any], target: Any, dtype: torch.dtype) -> list[torch.dtype]:
    """Types of what is made of logits, in order, by operations that are no views."""
    found: list[torch.dtype] = []

    def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        if not func.is_view and func.namespace == "aten":
            found.extend(one.dtype for one in tensors_of(results) if one.dim() == 2)

    with FakeTensorMode() as fakes, torch.autocast("cpu", dtype):
        logits = torch.empty(4, 1000, dtype=dtype, requires_grad=True)
        with answers(target, fakes, sees=sees):
            call(logits)
    return found


@pytest.mark.parametrize(("target", "expected"), [("cuda", [BF16, FP32]), ("cpu", [FP32, FP32])])
def test_cross_entropy_is_not_in_cudas_list(target: Any, expected: list[torch.dtype]):
    """It asks for log_softmax in its own type, of which nll_loss takes a copy in fp32. A CPU copies the logits.

    Source: aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss.
    """
    assert made(lambda x: F.cross_entropy(x, torch.empty(4, dtype=torch.long)), target, BF16) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(FP16, [FP32]), (BF16, [FP32, FP32])])
@pytest.mark.parametrize("call", [torch.softmax, torch.log_softmax])
def test_cuda_reads_float16_as_it_is_and_copies_bfloat16(call: Any, dtype: torch.dtype, expected: list[torch.dtype]):
    """For a softmax in fp32."""
    assert made(lambda x: call(x, -1), "cuda", dtype) == expected


def test_a_written_out_softmax_keeps_six_bytes_a_weight_for_two():
    """Of bf16 scores: the weights in fp32, which softmax's backward reads, and in bf16 for the product; on a CPU one
    tensor in bf16 is both."""

    def kept(target: Any) -> int:
        saved: dict[int, int] = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.setdefault(x.untyped_storage()._cdata, x.untyped_storage().nbytes()) and x, lambda x: x
        )
        with FakeTensorMode() as fakes, torch.autocast("cpu", BF16), answers(target, fakes):
            scores = torch.empty(4, 128, 128, dtype=BF16, requires_grad=True)
            value = torch.empty(4, 128, 32, dtype=BF16, requires_grad=True)
            with hooks:
                scores.softmax(-1) @ value
        return sum(saved.values()) - value.nbytes

    weights = 4 * 128 * 128
    assert kept("cuda") == 6 * weights
    assert kept("cpu") == 2 * weights


def test_what_this_torchs_cuda_does_not_cast_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """As ``rms_norm`` in torch 2.11, of which two kernels were registered: torch refused, and nothing was traced."""
    registered = cuda_autocast._registered
    lacking = {"AutocastCUDA": {"rms_norm"}}
    monkeypatch.setattr(cuda_autocast, "_registered", lambda key: registered(key) - lacking.get(key, set()))
    with FakeTensorMode() as fakes, answers("cuda", fakes), torch.autocast("cpu", BF16):
        assert F.rms_norm(images(), [6]).dtype == BF16
