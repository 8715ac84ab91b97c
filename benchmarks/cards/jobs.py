"""milabench's training jobs, written anew: model, batch, loss, optimizer and precision of each.

What they do beyond a plain step is said where it is emulated: the transformers' jobs never clear their gradients and
hold the model's outputs until the step's end; timm's prefetcher holds the next batch on the device; Lightning clears
gradients between forward and backward, so that as much is held in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import Dataset

from autotune import Task
from autotune.training.skip_init import skip_init

from .vision import timm_model, torchvision_model

_SIDE = 224
_CLASSES = 1000
_NUM_SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """One of milabench's."""

    task: Task
    num_parameters: float
    """In millions, as published: a model that has another number is another model."""
    has_gradients_in_forward: bool = False
    """Whether the last step's gradients are still there when the next forward begins."""
    is_held_out: bool = False
    """Whether its rows were not looked at while the predictor was developed."""


class Samples(Dataset[Any]):
    """So many of one kind."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._make()


def _image(dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.zeros(3, _SIDE, _SIDE, dtype=dtype), 0


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _torchvision(name: str, precision: Any) -> Task:
    """Images are moved in the precision that is computed in."""
    dtype = torch.float16 if precision == "fp16" else torch.float32
    return Task(
        build_model=partial(torchvision_model, name),
        build_dataset=lambda: Samples(partial(_image, dtype)),
        compute_loss=_classify,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        precision=precision,
    )


def _lightning() -> Task:
    last: list[Tensor] = []

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        last[:] = [torch.empty_like(parameter) for parameter in model.parameters()]
        loss = _classify(model, batch)
        last.clear()
        return loss

    return Task(
        build_model=partial(torchvision_model, "resnet152"),
        build_dataset=lambda: Samples(partial(_image, torch.float32)),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        precision="bf16",
    )


def _focalnet() -> Task:
    ahead: list[Tensor] = []

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ahead[:] = [torch.empty_like(batch[0])]
        return _classify(model, batch)

    return Task(
        build_model=partial(timm_model, "focalnet_base_lrf"),
        build_dataset=lambda: Samples(partial(_image, torch.float32)),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        precision="bf16",
    )


def _transformers(build_model: Callable[[], nn.Module], sample: Callable[[], dict[str, Any]], precision: Any) -> Task:
    held: list[Any] = []

    def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        held.clear()
        held.append(model(**batch))
        loss: Tensor = held[0].loss
        return loss

    return Task(
        build_model=build_model,
        build_dataset=lambda: Samples(sample),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        precision=precision,
    )


def _words(vocabulary: int, length: int) -> dict[str, Tensor]:
    words = torch.randint(0, vocabulary, (length,))
    return {"input_ids": words, "labels": words.clone()}


def _bert(precision: Any) -> Task:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    return _transformers(lambda: BertForMaskedLM(config), partial(_words, config.vocab_size, 512), precision)


def _t5() -> Task:
    """t5-small, which is its configuration's default. The version that was measured wrote its attention out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0, attn_implementation="eager")
    return _transformers(lambda: T5ForConditionalGeneration(config), partial(_words, config.vocab_size, 1024), "fp16")


def _reformer() -> Task:
    from transformers import ReformerConfig, ReformerForMaskedLM

    config = ReformerConfig(num_buckets=128, is_decoder=False)
    return _transformers(lambda: ReformerForMaskedLM(config), partial(_words, config.vocab_size, 4096), "fp16")


def _whisper() -> Task:
    """whisper-tiny, which is its configuration's default."""
    from transformers import WhisperConfig, WhisperForAudioClassification

    config = WhisperConfig()

    def sample() -> dict[str, Any]:
        return {"input_features": torch.zeros(config.num_mel_bins, 3000), "labels": 0}

    return _transformers(lambda: WhisperForAudioClassification(config), sample, "fp16")


def has_convolutions(task: Task) -> bool:
    """Whether its model has any, so that cuDNN is loaded."""
    return any(isinstance(module, _ConvNd) for module in skip_init(task).build_model().modules())


JOBS: dict[str, Callable[[], Job]] = {
    "bert-fp32": lambda: Job(_bert("fp32"), 109.51, True),
    "bert-tf32": lambda: Job(_bert("tf32"), 109.51, True),
    "bert-fp16": lambda: Job(_bert("fp16"), 109.51, True),
    "bert-tf32-fp16": lambda: Job(_bert("fp16"), 109.51, True),
    "convnext_large-fp32": lambda: Job(_torchvision("convnext_large", "fp32"), 197.77),
    "convnext_large-tf32": lambda: Job(_torchvision("convnext_large", "tf32"), 197.77),
    "convnext_large-fp16": lambda: Job(_torchvision("convnext_large", "fp16"), 197.77),
    "convnext_large-tf32-fp16": lambda: Job(_torchvision("convnext_large", "fp16"), 197.77),
    "focalnet": lambda: Job(_focalnet(), 88.75),
    "lightning": lambda: Job(_lightning(), 60.19, is_held_out=True),
    "reformer": lambda: Job(_reformer(), 5.98, True, is_held_out=True),
    "regnet_y_128gf": lambda: Job(_torchvision("regnet_y_128gf", "fp16"), 644.81),
    "resnet50": lambda: Job(_torchvision("resnet50", "fp16"), 25.56),
    "t5": lambda: Job(_t5(), 60.51, True),
    "whisper": lambda: Job(_whisper(), 8.31, True),
}
"""What builds each, by its name in milabench."""
