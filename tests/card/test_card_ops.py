"""What CUDA makes of an operation, over fake tensors of a CPU: attention and dropout by hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from autotune.estimates.tracing.cuda_ops import attention_choice
from autotune.estimates.tracing.fake_ops import answers
from autotune.measure.profiling.tracer import tensors_of

FLASH, EFFICIENT, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
CUDNN = SDPBackend.CUDNN_ATTENTION


class Seen:
    """Operations, and what each makes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        self.names.append(func.overloadpacket.__name__)
        self.shapes |= {tuple(one.shape) for one in tensors_of(results)}

    def count(self, name: str) -> int:
        return self.names.count(name)


def heads(dtype: torch.dtype = torch.bfloat16, length: int = 128, head: int = 32, num: int = 4) -> Tensor:
    """Two samples of four heads, as a model has them: side by side in memory."""
    return torch.empty(2, length, num, head, dtype=dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, scaled_dot_product_attention])
def test_attention_with_dropout_is_fused(dtype: torch.dtype, kernel: str, attend: Any):
    """Nothing of length times length is made, in backward neither; a CPU makes several."""
    seen = Seen()
    with FakeTensorMode() as fakes, answers("cuda", fakes, sees=seen):
        query = heads(dtype)
        attend(query, heads(dtype), heads(dtype), dropout_p=0.1, is_causal=True).sum().backward()
    assert seen.count(f"_scaled_dot_product_{kernel}_attention") == 1
    assert seen.count(f"_scaled_dot_product_{kernel}_attention_backward") == 1
    assert not any(shape[-2:] == (128, 128) for shape in seen.shapes)
    assert query.grad is not None


def test_attention_and_dropout_that_a_checkpoint_computes_again_are_as_before():
    """Forward and the recomputation make the same, whatever the file imported by name."""
    seen = Seen()

    def block(x: Tensor) -> Tensor:
        return dropout(scaled_dot_product_attention(x, x, x, dropout_p=0.1), 0.1)

    with FakeTensorMode() as fakes:
        with answers("cuda", fakes, sees=seen):
            loss = checkpoint(block, heads(), use_reentrant=False).sum()
        with answers("cuda", fakes, sees=seen):
            loss.backward()
    assert seen.count("_scaled_dot_product_flash_attention") == 2
    assert seen.count("native_dropout") == 2
    assert seen.count("bernoulli_") == 0


@pytest.mark.parametrize(("target", "dtype"), [("cuda", torch.bool), ("cpu", torch.float32)])
def test_a_dropout_mask_is_bytes_on_a_card_and_numbers_on_a_cpu(target: Any, dtype: torch.dtype):
    kept: list[Tensor] = []
    saved = torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x)
    with FakeTensorMode() as fakes, answers(target, fakes), saved:
        F.dropout(torch.empty(8, requires_grad=True), 0.5)
    assert [one.dtype for one in kept] == [dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_its_input_and_a_number_a_row(dtype: torch.dtype):
    """A CPU is without that kernel, and keeps two more tensors as large as the input, in fp32."""
    kept: list[Tensor] = []
    seen = Seen()
    saved = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with FakeTensorMode() as fakes, answers("cuda", fakes, sees=seen):
        x, weight = torch.empty(4, 16, 32, dtype=dtype), torch.empty(32, dtype=dtype, requires_grad=True)
        with saved:
            output = F.rms_norm(x.requires_grad_(), [32], weight)
        output.backward(torch.empty_like(output))
    assert output.dtype == dtype
    assert [(one.shape, one.dtype) for one in kept] == [
        ((4, 16, 32), dtype),
        ((4, 16, 1), torch.float32),
        ((32,), dtype),
    ]
    assert seen.shapes == {(4, 16, 32), (4, 16, 1), (1, 1, 32), (32,)}  # the weight's gradient, and a view of it
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_rms_norm_with_a_weight_of_another_type_is_not_fused():
    """torch warns of that, and takes it apart as on a CPU (layer_norm.cpp)."""
    with FakeTensorMode() as fakes, answers("cuda", fakes):
        x = torch.empty(4, 32, dtype=torch.bfloat16, requires_grad=True)
        output = F.rms_norm(x, [32], torch.empty(32, requires_grad=True))
    assert output.dtype == torch.bfloat16
    assert "FusedRMSNorm" not in output.grad_fn.name()


def test_torch_has_its_own_kernels_again_afterwards():
    with FakeTensorMode() as fakes, answers("cuda", fakes):
        pass
    x = torch.ones(1, 1, 4, 8, requires_grad=True)
    assert F.dropout(x, 0.5).grad_fn.name() == "MulBackward0"
    assert F.rms_norm(x, [8]).grad_fn.name() == "MulBackward0"
    assert "ForCpu" in F.scaled_dot_product_attention(x, x, x).grad_fn.name()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ((heads(), heads(), heads()), {}), FLASH),
        (lambda: ((heads(), heads(), heads()), {"dropout_p": 0.1}), FLASH),
        (lambda: ((heads(head=20),) * 3, {}), FLASH),
        (lambda: ((heads(head=264),) * 3, {}), EFFICIENT),
        (lambda: ((heads(num=8), heads(), heads()), {"enable_gqa": True}), FLASH),
        (lambda: ((heads(length=64), heads(), heads()), {"is_causal": True}), EFFICIENT),
        (lambda: ((heads(), heads(), heads(head=64)), {}), EFFICIENT),
        (lambda: ((heads(), heads(), heads()), {"attn_mask": torch.empty(128, 128, dtype=torch.bool)}), EFFICIENT),
        (lambda: ((heads(torch.float32),) * 3, {}), EFFICIENT),
        (lambda: ((heads(torch.float32, head=20),) * 3, {}), EFFICIENT),
        (lambda: ((heads(torch.float32, head=18),) * 3, {}), MATH),
        (lambda: ((heads(head=20),) * 3, {"attn_mask": torch.empty(128, 128)}), MATH),
        (
            lambda: ((heads(torch.float32, num=8), heads(torch.float32), heads(torch.float32)), {"enable_gqa": True}),
            MATH,
        ),
        (lambda: ((heads(torch.float64),) * 3, {}), MATH),
        (lambda: ((heads()[0],) * 3, {}), MATH),
        (lambda: ((heads().transpose(2, 3),) * 3, {}), MATH),
    ],
)
def test_the_kernel_is_chosen_by_what_each_can_do(make: Any, expected: SDPBackend):
    """As torch's sdp_utils.cpp has it for compute capability 8.0 and up."""
    with FakeTensorMode():
        inputs, options = make()
        assert attention_choice(*inputs, **options) == expected


@pytest.mark.parametrize(
    ("make", "able"),
    [
        (lambda: ((heads(),) * 3, {}), {MATH, EFFICIENT, FLASH, CUDNN}),
        (lambda: ((heads(head=20),) * 3, {}), {MATH, FLASH}),
        (lambda: ((heads(head=136),) * 3, {}), {MATH, EFFICIENT, FLASH}),
        (lambda: ((heads(),) * 3, {"attn_mask": torch.empty(128, 128)}), {MATH, EFFICIENT, CUDNN}),
        (lambda: ((heads(),) * 3, {"dropout_p": 0.1}), {MATH, EFFICIENT, FLASH}),
        (lambda: ((heads(),) * 3, {"dropout_p": 0.125}), {MATH, EFFICIENT, FLASH, CUDNN}),
        (lambda: ((heads(num=8), heads(), heads()), {"enable_gqa": True}), {MATH, FLASH, CUDNN}),
        (lambda: ((heads(torch.float32),) * 3, {}), {MATH, EFFICIENT}),
        (lambda: ((heads(torch.float64),) * 3, {}), {MATH}),
        (lambda: ((heads()[0],) * 3, {}), {MATH}),
    ],
)
def test_a_kernel_alone_does_it_or_raises_as_torch_does(make: Any, able: set[SDPBackend]):
    """As torch's sdp_utils.cpp has it; cuDNN's dropout is a multiple of 1/16, its heads 128 at most before Hopper."""
    with FakeTensorMode():
        inputs, options = make()
        for kernel in (MATH, EFFICIENT, FLASH, CUDNN):
            with sdpa_kernel(kernel):
                if kernel in able:
                    assert attention_choice(*inputs, **options) == kernel
                else:
                    with pytest.raises(RuntimeError, match="No available kernel"):
                        attention_choice(*inputs, **options)


@pytest.mark.parametrize(
    ("length", "kept"),
    [(128, 128), (100, 112)],
    ids=["as it is", "rows of 100 numbers lie in 112"],
)
def test_the_efficient_kernels_mask_has_rows_of_sixteens(length: int, kept: int):
    """Strides of what it is given: a mask that all heads share is shared still, but for rows that are padded."""
    masks: list[Tensor] = []

    def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        if func.overloadpacket.__name__ == "_scaled_dot_product_efficient_attention":
            masks.append(args[3])

    with FakeTensorMode() as fakes, answers("cuda", fakes, sees=sees):
        mask = torch.empty(2, 1, length, length, dtype=torch.bool)
        F.scaled_dot_product_attention(*[heads(length=length)] * 3, attn_mask=mask)
    assert masks[0].shape == (2, 4, length, length)
    assert masks[0].dtype == torch.bfloat16
    assert masks[0].stride(2) == kept
    assert (masks[0].stride(1) == 0) == (length == 128)


def test_an_odd_head_is_padded_for_flash_and_cut_again():
    """20 numbers lie in 24."""
    seen = Seen()
    with FakeTensorMode() as fakes, answers("cuda", fakes, sees=seen):
        found = F.scaled_dot_product_attention(*[heads(head=20)] * 3)
    assert found.shape == (2, 4, 128, 20)
    assert (2, 4, 128, 24) in seen.shapes
