"""Each piece of advice, as a plan of ours or by torch's own call, and the jobs that it is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.techniques.batch import Batch

from . import edits
from .edits import Edit

ALL = ("char GPT", "GPT-2", "ResNet-50", "U-Net", "ViT", "embedding")
_IMAGES = ("ResNet-50", "U-Net", "ViT")
_LIGHT = ("char GPT", "U-Net", "ViT")
_TRANSFORMERS = ("char GPT", "GPT-2", "ViT")
_OPTIMIZED = (*_LIGHT, "GPT-2", "embedding")
"""In the last two weights, gradients and state make the peak."""
_TABLES = ("char GPT", "GPT-2", "embedding")


@dataclass(frozen=True)
class Advice:
    """One row of the page."""

    words: str
    models: tuple[str, ...] = ALL
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a plan, beside the batch."""
    batch: Callable[[int], Batch] = lambda size: Batch(micro=size)
    edit: Edit | None = None
    """What torch's own call does to the model."""
    of_both: Edit | None = None
    """What the stock model has, too."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Of both, in place of AdamW."""
    infers: bool = False
    """Whether both are forward passes in inference."""


ADVICE: dict[str, Advice] = {
    "larger batch": Advice("batch × 2", _LIGHT, batch=lambda size: Batch(micro=2 * size)),
    "smaller batch": Advice("batch ÷ 2, accumulated", _LIGHT, batch=lambda size: Batch(micro=size // 2, accumulate=2)),
    "blocks": Advice("checkpointing, all blocks", _LIGHT, {"checkpointing": {"kind": "blocks"}}),
    "exact": Advice("saving layers, exact", (*_LIGHT, "GPT-2"), {"layers": {"kind": "exact"}}),
    "tiles": Advice("feed-forward parts in tiles", _TRANSFORMERS, {"tiles": {"kind": "feed_forward"}}),
    "bf16": Advice("bf16 autocast", _LIGHT, {"precision": {"kind": "bf16"}}),
    "offload": Advice("activations on disk", _LIGHT, {"offload": {"kind": "activations"}}),
    "reversible": Advice(
        "reversible blocks", _TRANSFORMERS, {"reversible": {"kind": "blocks"}}, of_both=edits.make_reversible
    ),
    "math": Advice("attention by `math`", _TRANSFORMERS, {"attention": {"kind": "math"}}),
    "compile": Advice("compiled", _LIGHT, {"compile": {"kind": "model"}}),
    "frozen": Advice("exact, only norms train", _LIGHT, {"layers": {"kind": "exact"}}, of_both=edits.train_norms),
    "channels last": Advice("channels-last", _IMAGES, {"memory_format": {"kind": "channels_last"}}),
    "in place": Advice("ReLU, dropout in place", ("char GPT", "ResNet-50", "ViT"), edit=edits.in_place),
    "outputs": Advice("outputs kept, no `del`", ("char GPT", "ResNet-50", "ViT"), edit=edits.keep_outputs),
    "in backward": Advice(
        "gradients freed in backward",
        _OPTIMIZED,
        {"optimizer_step": {"kind": "in_backward"}},
    ),
    "8bit": Advice("8-bit optimizer state", _LIGHT, {"optimizer_state": {"kind": "8bit"}}),
    "4bit": Advice("4-bit optimizer state", (*_LIGHT, "GPT-2"), {"optimizer_state": {"kind": "4bit"}}),
    "bf16 state": Advice("bf16 optimizer state", _TRANSFORMERS, {"optimizer_state": {"kind": "bf16"}}),
    "factored": Advice("factored optimizer state", (*_LIGHT, "GPT-2"), {"optimizer_state": {"kind": "factored"}}),
    "bf16 weights": Advice(
        "bf16 weights, rounded at random", (*_LIGHT, "GPT-2"), {"trained_weights": {"kind": "bf16"}}
    ),
    "fused": Advice("fused optimizer", _OPTIMIZED, {"optimizer": {"kind": "fused"}}),
    "frozen 8bit": Advice(
        "frozen weights in 8 bits", _TRANSFORMERS, {"frozen_weights": {"kind": "8bit"}}, of_both=edits.train_norms
    ),
    "frozen disk": Advice(
        "frozen weights on disk", _LIGHT, {"offload": {"kind": "parameters"}}, of_both=edits.train_norms
    ),
    "frozen 4bit": Advice(
        "4 bits under adapters", _TRANSFORMERS, {"frozen_weights": {"kind": "4bit"}}, of_both=edits.train_adapters
    ),
    "disk": Advice("inference, weights on disk", _LIGHT, {"offload": {"kind": "parameters"}}, infers=True),
    "int8": Advice("inference, `int8`", _TRANSFORMERS, {"quantization": {"kind": "int8"}}, infers=True),
    "int8 weights": Advice(
        "inference, `int8_weights`", _TRANSFORMERS, {"quantization": {"kind": "int8_weights"}}, infers=True
    ),
    "pruning": Advice("structured pruning, 25 %", _LIGHT, {"pruning": {"kind": "structured", "ratio": 0.25}}),
    "masks": Advice("`l1_unstructured`, 50 %", _LIGHT, edit=edits.mask_weights),
    "low rank": Advice("low rank, a quarter", ("char GPT", "ViT", "embedding"), {"low_rank": {"kind": "svd"}}),
    "half": Advice("half the blocks", ("char GPT", "ResNet-50", "ViT"), {"variant": {"kind": "half"}}),
    "shared": Advice("blocks share weights", _TRANSFORMERS, edit=edits.share_blocks),
    "sparse": Advice(
        "sparse gradients, SGD",
        _TABLES,
        {"sparse_gradients": {"kind": "sparse", "least_rows": 1}},
        of_both=edits.untie,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
    "rows": Advice(
        "rows of embeddings, AdamW", _TABLES, {"lazy_adam": {"kind": "rows", "least_rows": 1}}, of_both=edits.untie
    ),
    "workers": Advice("2 loader workers", _LIGHT, {"data_loading": {"num_workers": 2, "persistent_workers": True}}),
    "cache": Advice("epoch cached", _LIGHT, {"data_loading": {"num_workers": 0, "cache": "host"}}),
}
"""In the page's order."""

ON_A_CARD: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16 or bf16 autocast", {"precision": {"kind": "fp16"}}),
    "channels last": ("channels-last", {"memory_format": {"kind": "channels_last"}}),
    "activations": ("activations on the host", {"offload": {"kind": "activations", "to": "host"}}),
    "state": ("optimizer state on the host", {"optimizer_state": {"kind": "host"}}),
    "math": ("attention by `math`", {"attention": {"kind": "math"}}),
}
"""What is predicted for a card: words, and settings of a plan."""
