"""Recurrent layers on a CPU: what oneDNN keeps for backward, by a few short sequences, and what it takes for itself."""

from __future__ import annotations

import pytest
import torch

from autotune.estimates.tracing.recurrent import RECURRENT_LAYER, workspace_bytes
from autotune.estimates.workspace import workspace_bytes as taken_by_kernel

aten = torch.ops.aten

NO_BF16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 on this CPU")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)])
def test_a_recurrent_layers_workspace_is_reckoned_from_a_few_sequences(dtype):
    """Against torch's own, of another number of them: 37 of 32 steps, 24 features and 64 states."""
    sizes = [(32, 37, 24), (256, 24), (256, 64), (256,), (256,), (37, 64), (37, 64)]
    tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
    call = (*tensors, False, [], 2, 64, 1, True, False, False, True)
    with torch.enable_grad():
        kept = RECURRENT_LAYER(*call)[3]
    assert workspace_bytes(call) == pytest.approx(kept.nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "taken", "taken_back"), [(torch.float32, 16.22, 22.55), (torch.bfloat16, 3.24, 11.85)]
)
def test_a_recurrent_layer_has_its_weights_in_blocks_and_what_goes_into_its_gates(dtype, taken, taken_back):
    """Measured, in MiB: weights of 6 MiB in single precision, gates of 10."""
    x = torch.empty(64, 20, 256, dtype=dtype, device="meta")
    weights = [torch.empty(size, dtype=dtype, device="meta") for size in ((2048, 256), (2048, 512), (2048,), (2048,))]
    for operation, expected in ((aten.mkldnn_rnn_layer, taken), (aten.mkldnn_rnn_layer_backward, taken_back)):
        found = taken_by_kernel("cpu", operation.default, (x, *weights), {}, ())
        assert found == pytest.approx(expected * 2**20, rel=0.08)
