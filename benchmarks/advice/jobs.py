"""The six jobs, from configurations alone: nothing is downloaded. All train with AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune import Task
from autotune.task_file import load_task

from .. import embeddings
from ..layer_models import UNet
from ..rows import EXAMPLES

SIDE = 64
"""Pixels of an image."""
_NUM_IMAGES = 64
_LENGTH, _VOCABULARY = 128, 50257


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _images(labels: Callable[[torch.Generator], Tensor]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(_NUM_IMAGES, 3, SIDE, SIDE, generator=generator), labels(generator))


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 10, (_NUM_IMAGES,), generator=generator)


def _masks(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (_NUM_IMAGES, SIDE, SIDE), generator=generator)


def _loss_of_images(model: nn.Module, batch: Any) -> Tensor:
    pixels, labels = batch
    output = model(pixel_values=pixels, labels=labels)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def _loss_of_words(model: nn.Module, batch: Any) -> Tensor:
    (words,) = batch
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)).train()


def _resnet(*depths: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[*depths], num_labels=10)).train()


def vit(num_blocks: int = 6) -> nn.Module:
    """On small images, untrained."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": SIDE}
    config = ViTConfig(**size, num_hidden_layers=num_blocks, patch_size=4, hidden_dropout_prob=0.1, num_labels=10)
    return ViTForImageClassification(config).train()


def _words() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, _VOCABULARY, (64, _LENGTH), generator=generator))


def _char_gpt() -> Task:
    task = load_task(str(EXAMPLES / "char_gpt" / "model.py"))

    def half() -> nn.Module:
        model: Any = task.build_model()
        del model.blocks[len(model.blocks) // 2 :]
        return model

    return dataclasses.replace(task, build_optimizer=_adamw, batch_size=8, variants={"half": half})


JOBS: dict[str, Callable[[], Task]] = {
    "char GPT": _char_gpt,
    "GPT-2": lambda: Task(_gpt2, _words, _loss_of_words, build_optimizer=_adamw, batch_size=1),
    "ResNet-50": lambda: Task(
        lambda: _resnet(3, 4, 6, 3),
        lambda: _images(_classes),
        _loss_of_images,
        build_optimizer=_adamw,
        batch_size=8,
        variants={"half": lambda: _resnet(2, 2, 2, 2)},
    ),
    "U-Net": lambda: Task(UNet, lambda: _images(_masks), _loss_of_images, build_optimizer=_adamw, batch_size=4),
    "ViT": lambda: Task(
        vit,
        lambda: _images(_classes),
        _loss_of_images,
        build_optimizer=_adamw,
        batch_size=2,
        variants={"half": lambda: vit(3)},
    ),
    "embedding": lambda: Task(
        embeddings.Classifier,
        lambda: embeddings.sentences(512),
        embeddings.loss_of,
        build_optimizer=_adamw,
        batch_size=embeddings.SENTENCES[0],
    ),
}
"""Each builds its task, whose ``batch_size`` is the stock step's."""
