"""Each piece of advice, as a plan of ours or by torch's own call, and the jobs that it is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils import prune

from autotune.techniques.batch import Batch

from ..layer_models import freeze

ALL = ("char GPT", "GPT-2", "ResNet-50", "U-Net", "ViT", "embedding")
_IMAGES = ("ResNet-50", "U-Net", "ViT")
_LIGHT = ("char GPT", "U-Net", "ViT")
_TRANSFORMERS = ("char GPT", "GPT-2", "ViT")

Edit = Callable[[nn.Module], Any]


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


def in_place(model: nn.Module) -> None:
    """ReLU and dropout write over their input."""
    for module in model.modules():
        if isinstance(module, nn.ReLU | nn.Dropout):
            module.inplace = True


def share_blocks(model: nn.Module) -> None:
    """All blocks are the first one."""
    blocks = max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len)
    for number in range(1, len(blocks)):
        blocks[number] = blocks[0]


def mask_weights(model: nn.Module) -> None:
    """The smaller half of each layer's weights is masked."""
    for module in [*model.modules()]:
        if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D":
            prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


def keep_outputs(model: nn.Module) -> None:
    """The loop's variable holds a step's outputs until the next one's."""
    kept: dict[str, Any] = {}
    model.register_forward_hook(lambda module, inputs, output: kept.update(output=output))


def train_norms(model: nn.Module) -> None:
    """All else is frozen."""
    freeze(model, "norms")


ADVICE: dict[str, Advice] = {
    "larger batch": Advice("batch × 2", _LIGHT, batch=lambda size: Batch(micro=2 * size)),
    "smaller batch": Advice("batch ÷ 2, accumulated", _LIGHT, batch=lambda size: Batch(micro=size // 2, accumulate=2)),
    "blocks": Advice("checkpointing, all blocks", _LIGHT, {"checkpointing": {"kind": "blocks"}}),
    "exact": Advice("saving layers, exact", _LIGHT, {"layers": {"kind": "exact"}}),
    "tiles": Advice("feed-forward parts in tiles", _TRANSFORMERS, {"tiles": {"kind": "feed_forward"}}),
    "bf16": Advice("bf16 autocast", _LIGHT, {"precision": {"kind": "bf16"}}),
    "offload": Advice("activations on disk", _LIGHT, {"offload": {"kind": "activations"}}),
    "frozen": Advice("exact, only norms train", _LIGHT, {"layers": {"kind": "exact"}}, of_both=train_norms),
    "channels last": Advice("channels-last", _IMAGES, {"memory_format": {"kind": "channels_last"}}),
    "in place": Advice("ReLU, dropout in place", ("char GPT", "ResNet-50", "ViT"), edit=in_place),
    "outputs": Advice("outputs kept, no `del`", ("char GPT", "ResNet-50", "ViT"), edit=keep_outputs),
    "in backward": Advice(
        "gradients freed in backward",
        _LIGHT,
        {"optimizer_step": {"kind": "in_backward"}},
    ),
    "8bit": Advice("8-bit optimizer state", _LIGHT, {"optimizer_state": {"kind": "8bit"}}),
    "4bit": Advice("4-bit optimizer state", (*_LIGHT, "GPT-2"), {"optimizer_state": {"kind": "4bit"}}),
    "frozen 8bit": Advice(
        "frozen weights in 8 bits", _TRANSFORMERS, {"frozen_weights": {"kind": "8bit"}}, of_both=train_norms
    ),
    "pruning": Advice("structured pruning, 25 %", _LIGHT, {"pruning": {"kind": "structured", "ratio": 0.25}}),
    "masks": Advice("`l1_unstructured`, 50 %", _LIGHT, edit=mask_weights),
    "low rank": Advice("low rank, a quarter", ("char GPT", "ViT", "embedding"), {"low_rank": {"kind": "svd"}}),
    "half": Advice("half the blocks", ("char GPT", "ResNet-50", "ViT"), {"variant": {"kind": "half"}}),
    "shared": Advice("blocks share weights", ("char GPT", "ViT"), edit=share_blocks),
    "rows": Advice("rows of embeddings", ("embedding",), {"lazy_adam": {"kind": "rows"}}),
    "workers": Advice("2 loader workers", _LIGHT, {"data_loading": {"num_workers": 2, "persistent_workers": True}}),
    "cache": Advice("epoch cached", _LIGHT, {"data_loading": {"num_workers": 0, "cache": "host"}}),
}
"""In the page's order."""

ON_A_CARD: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16 or bf16 autocast", {"precision": {"kind": "fp16"}}),
    "channels last": ("channels-last", {"memory_format": {"kind": "channels_last"}}),
}
"""What is predicted for a card: words, and settings of a plan."""
