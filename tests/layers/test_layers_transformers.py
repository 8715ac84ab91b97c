"""Hugging Face models, unedited: the same loss and gradients, and never more kept than stock keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_bytes import kept_bytes
from torch import Tensor, nn

from autotune.layers import answered, convert

transformers = pytest.importorskip("transformers")

WIDTH, LAYERS, HEADS, INNER, WORDS, LENGTH = 32, 2, 2, 64, 512, 16
KINDS = {"exact": {}, "rounding": {"rounding": True}, "recompute": {"recompute": True}}


def tokens() -> dict[str, Tensor]:
    words = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words, "labels": words}


def images() -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def gpt2() -> nn.Module:
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": INNER}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_attention_heads=HEADS))


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS}
    config = transformers.T5Config(**sizes, num_heads=HEADS, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=HEADS))


def vit() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=INNER, image_size=32, patch_size=8, hidden_dropout_prob=0.1
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2])
    return transformers.ResNetForImageClassification(config)


def efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(width_coefficient=0.2, depth_coefficient=0.2, hidden_dim=256)
    return transformers.EfficientNetForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], float]] = {
    "gpt2": (gpt2, tokens, 0.6),
    "bert": (bert, tokens, 0.7),
    "t5": (t5, tokens, 0.6),
    "llama": (llama, tokens, 0.8),
    "vit": (vit, images, 0.7),
    "resnet": (resnet, images, 1.0),
    "efficientnet": (efficientnet, images, 1.0),
}
"""What builds it, what it is called with, and the share of stock's kept bytes that is left at most when all trains."""


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, int]:
    torch.manual_seed(1)
    kept, output = kept_bytes(lambda: model(**inputs), model)
    return output.loss, kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_stocks_and_less_is_kept(name: str, kind: str):
    build, inputs, share = MODELS[name]
    torch.manual_seed(0)
    stock = build().train()
    ours = convert(copy.deepcopy(stock), inputs(), **KINDS[kind])
    found: list[tuple[Tensor, int, list[Any]]] = []
    for model in (stock, ours):
        with answered() if model is ours else torch.enable_grad():
            loss, kept = loss_of(model, inputs())
        loss.backward()
        found.append((loss.detach(), kept, [p.grad for p in model.parameters()]))
    (wanted, most, expected), (value, kept, gradients) = found
    assert torch.allclose(value, wanted, rtol=1e-5)
    assert kept <= share * most
    largest = max(float(gradient.abs().max()) for gradient in expected if gradient is not None)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert float((mine - theirs).abs().max()) <= (1e-2 if kind == "rounding" else 1e-4) * largest


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_whatever_trains_no_more_is_kept_than_stock_keeps(name: str):
    """Everything frozen but every third layer, and the norms alone; with and without the model's own checkpointing."""
    build, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    stock = build().train()
    layers = [module for module in stock.modules() if any(True for _ in module.parameters(recurse=False))]
    for chosen in (layers[::3], [layer for layer in layers if "Norm" in type(layer).__name__]):
        stock.requires_grad_(False)
        for layer in chosen:
            layer.requires_grad_(True)
        for checkpoints in (False, True) if stock.supports_gradient_checkpointing else (False,):
            model = copy.deepcopy(stock)
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            _, most = loss_of(model, inputs())
            for kind in KINDS.values():
                loss, kept = loss_of(convert(copy.deepcopy(model), inputs(), **kind), inputs())
                assert kept <= most
                loss.backward()
