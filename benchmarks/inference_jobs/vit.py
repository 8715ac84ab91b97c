"""A vision transformer: 384 features, eight layers, 64 patches of 8 pixels and a class token; random weights."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

batch_size = 8


def build_model() -> nn.Module:
    size = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 8}
    return ViTForImageClassification(ViTConfig(**size, image_size=64, patch_size=8, num_labels=1000))


def build_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(512, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


def infer(model: nn.Module, batch: list[Tensor]) -> Tensor:
    outputs: Tensor = model(pixel_values=batch[0]).logits
    return outputs
