"""milabench's training of Stable Diffusion 2's UNet, from the published configurations of its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotune import Task

from .samples import Samples

_SIDE, _NUM_WORDS, _VOCABULARY = 512, 77, 49_408
_NUM_TIMES = 1000
_WIDTHS = [128, 256, 512, 512]
_UNET: dict[str, Any] = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
_VAE: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": _WIDTHS,
    "layers_per_block": 2,
    "sample_size": 768,
}
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}


class _Diffusion(nn.Module):
    """What encodes images and texts is frozen, in bfloat16, and outside autocast."""

    def __init__(self) -> None:
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel

        super().__init__()
        self.unet = UNet2DConditionModel(**_UNET)
        self.vae = AutoencoderKL(**_VAE).to(torch.bfloat16).requires_grad_(False)
        self.text = CLIPTextModel(CLIPTextConfig(**_TEXT)).to(torch.bfloat16).requires_grad_(False)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            latents = self.vae.encode(images.to(torch.bfloat16)).latent_dist.sample() * 0.18215
            noise = torch.randn_like(latents)
            times = torch.randint(0, _NUM_TIMES, (len(latents),), device=latents.device)
            noisy = 0.7 * latents + 0.7 * noise
            texts = self.text(words, return_dict=False)[0]
        found = self.unet(noisy, times, texts, return_dict=False)[0]
        return F.mse_loss(found.float(), noise.float())


def _sample() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, _SIDE, _SIDE), torch.zeros(_NUM_WORDS, dtype=torch.long)


def diffusion() -> Task:
    """The loss is the model's own."""
    return Task(
        build_model=_Diffusion,
        build_dataset=lambda: Samples(_sample),
        compute_loss=lambda model, batch: model(*batch),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        precision="bf16",
    )
