"""Whole models for ``benchmarks.layers``, from configurations alone: nothing is downloaded.

The transformers and the ResNets are Hugging Face's, unedited; two are jobs of ``examples/``; the others are written as
they usually are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autotune.task import Task
from autotune.task_file import load_task

Built = tuple[nn.Module, dict[str, Any]]
_GENERATOR = torch.Generator().manual_seed(0)


def _images(batch: int, side: int) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=_GENERATOR)


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=_GENERATOR)


def _resnet(kind: str, depths: list[int], hidden: list[int]) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=hidden))
    return model, {"pixel_values": _images(8, 224), "labels": torch.arange(8) % 2}


def _efficientnet() -> Built:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2)
    return EfficientNetForImageClassification(config), {"pixel_values": _images(8, 224), "labels": torch.arange(8) % 2}


class _Stage(nn.Sequential):
    """Two convolutions, each with its norm and ReLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        layers: list[nn.Module] = []
        for before in (channels_in, channels):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015, arXiv:1505.04597, at half its width and with norms."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(_Stage(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(_Stage(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x, skipped = pixel_values, []
        for stage in self.down:
            x = stage(F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for up, merge, skip in reversed(list(zip(self.up, self.merge, skipped, strict=False))):
            x = merge(torch.cat([skip, up(x)], 1))
        return F.cross_entropy(self.head(x), labels)


class VGG(nn.Module):
    """Simonyan and Zisserman 2014, arXiv:1409.1556, configuration A, for small images."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool"):
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 16, 512), nn.ReLU(True), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(True), nn.Dropout(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(pixel_values).flatten(1)), labels)


class Detector(nn.Module):
    """A frozen backbone in eval mode, a top-down pyramid and a dense head that train."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        self.backbone = ResNetModel(ResNetConfig()).requires_grad_(False).eval()
        self.lateral = nn.ModuleList(nn.Conv2d(width, 128, 1) for width in (256, 512, 1024, 2048))
        self.head = nn.Sequential(
            nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU(), nn.Conv2d(128, 9, 1)
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        features = self.backbone(pixel_values, output_hidden_states=True).hidden_states[1:]
        total, above = pixel_values.new_zeros(()), None
        for feature, lateral in reversed(list(zip(features, self.lateral, strict=True))):
            here = lateral(feature)
            above = here if above is None else here + F.interpolate(above, scale_factor=2.0)
            total = total + self.head(above).square().mean()
        return total


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = _tokens(4, 256, 50257)
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=6)), {"input_ids": tokens, "labels": tokens}


def _bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    tokens = _tokens(4, 256, config.vocab_size)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def _vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=128,
        patch_size=8, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": _images(8, 128), "labels": torch.arange(8) % 2}


def _t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=4, d_model=384, d_kv=64, num_heads=6, d_ff=1536, decoder_start_token_id=0)
    tokens = _tokens(4, 256, config.vocab_size)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank correction that trains. Hu et al. 2021, arXiv:2106.09685."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1024)
    model, tokens = LlamaForCausalLM(config).requires_grad_(False), _tokens(4, 256, config.vocab_size)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model, {"input_ids": tokens, "labels": tokens}


class _Example(nn.Module):
    """The job of an example, as a module that returns its loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss = task.build_model(), task.compute_loss

    def forward(self, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        assert isinstance(loss, Tensor)
        return loss


def _example(name: str) -> Built:
    torch.manual_seed(0)
    folder = Path(__file__).parent.parent / "examples" / name
    if (folder / "pretrain.py").exists() and not (folder / "backbone.pt").exists():
        subprocess.run([sys.executable, "pretrain.py"], cwd=folder, check=True)
    task = load_task(str(folder / "model.py"))
    batch = next(iter(DataLoader(task.build_dataset(), task.batch_size)))
    return _Example(task), {"batch": batch}


_DIGITS = {"pixel_values": _images(64, 64), "labels": torch.arange(64) % 10}
_MASKS = {"pixel_values": _images(8, 128), "labels": torch.zeros(8, 128, 128, dtype=torch.long)}

MODELS: dict[str, Callable[[], Built]] = {
    "resnet18": lambda: _resnet("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
    "resnet50": lambda: _resnet("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    "resnet101": lambda: _resnet("bottleneck", [3, 4, 23, 3], [256, 512, 1024, 2048]),
    "efficientnet": _efficientnet,
    "unet": lambda: (UNet(), _MASKS),
    "vgg": lambda: (VGG(), _DIGITS),
    "detector": lambda: (Detector(), {"pixel_values": _images(8, 224), "labels": torch.zeros(8)}),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "llama-lora": _llama,
    "style transfer": lambda: _example("style_transfer"),
    "adapters": lambda: _example("frozen_backbone"),
}
"""Each builds a model and the keywords of its forward, which returns the loss or what has one."""

CASES = ("as built", "input", "convolutions", "norms", "head", "every 4th")
"""What trains."""


def freeze(model: nn.Module, case: str) -> None:
    """Let train what ``case`` names, in place; "input" also sets eval mode, as adversarial examples do."""
    if case == "as built":
        return
    layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    chosen = {
        "input": [],
        "convolutions": [m for m in layers if isinstance(m, nn.modules.conv._ConvNd)],
        "norms": [m for m in layers if "Norm" in type(m).__name__],
        "head": layers[-1:],
        "every 4th": layers[::4],
    }[case]
    model.requires_grad_(False)
    for module in chosen:
        module.requires_grad_(True)
    model.train(case != "input")


def loss_of(model: nn.Module, inputs: dict[str, Any], case: str) -> Tensor:
    """The loss; in the case of the input, the input or its embedding is a leaf that wants its gradient."""
    inputs = dict(inputs)
    if case == "input":
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].detach().requires_grad_()
        else:
            embed: Any = model.get_input_embeddings()  # type: ignore[operator]
            inputs["inputs_embeds"] = embed(inputs.pop("input_ids")).detach().requires_grad_()
    output = model(**inputs)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
