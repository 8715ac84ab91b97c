"""milabench's training jobs, written anew: model, batch, loss, optimizer and precision of each.

What they do beyond a plain step is said where it is emulated: the transformers' jobs never clear their gradients and
hold the model's outputs until the step's end; timm's prefetcher holds the next batch on the device, and has cuDNN try
every kernel; torchvision's run backward within autocast; Lightning clears gradients between forward and backward;
ResNet-50 reads its images channels last.

Their versions were torch 2.6.0, transformers 4.49.0, torchvision 0.21.0 and Lightning 2.5.0 (benchmarks/*/requirements.
cuda.txt of March 2025). Later versions of transformers write parts of T5 and Reformer otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from autotune import Task
from autotune.techniques import Settings
from autotune.techniques.memory_format import MemoryFormat
from autotune.training.skip_init import skip_init

from .casts import LastingCastsSGD, keep_casts
from .diffusion import diffusion
from .known import Known
from .samples import Samples
from .vision import timm_model, torchvision_model

_SIDE = 224
_CLASSES = 1000
_CHANNELS_LAST = Settings(memory_format=MemoryFormat(kind="channels_last"))


@dataclass(frozen=True)
class Job:
    """One of milabench's."""

    task: Task
    num_parameters: float
    """In millions, as published: a model that has another number is another model."""
    has_gradients_in_forward: bool = False
    """Whether gradients are never cleared."""
    clears_late: bool = False
    """Whether they are cleared between forward and backward."""
    tries_kernels: bool = False
    """Whether cuDNN tries every kernel."""
    settings: Settings = field(default_factory=Settings)
    """What it runs with beside its precision."""
    known: Known = "developed on"
    """When its rows were looked at."""


def _image(dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.zeros(3, _SIDE, _SIDE, dtype=dtype), 0


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _torchvision(name: str, precision: Any) -> Task:
    """Images are moved in the precision that is computed in."""
    dtype = torch.float16 if precision == "fp16" else torch.float32

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        keep_casts()
        return _classify(model, batch)

    return Task(
        build_model=partial(torchvision_model, name),
        build_dataset=lambda: Samples(partial(_image, dtype)),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: LastingCastsSGD(parameters, lr=0.01),
        precision=precision,
    )


def _lightning() -> Task:
    return Task(
        build_model=partial(torchvision_model, "resnet152"),
        build_dataset=lambda: Samples(partial(_image, torch.float32)),
        compute_loss=_classify,
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

    config = ReformerConfig(num_buckets=128, is_decoder=False, pad_token_id=None)
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
    "diffusion-single": lambda: Job(diffusion(), 1289.95, known="held out"),
    "focalnet": lambda: Job(_focalnet(), 88.75, tries_kernels=True),
    "lightning": lambda: Job(_lightning(), 60.19, clears_late=True, known="seen since"),
    "reformer": lambda: Job(_reformer(), 5.98, True, known="seen since"),
    "regnet_y_128gf": lambda: Job(_torchvision("regnet_y_128gf", "fp16"), 644.81),
    "resnet50": lambda: Job(_torchvision("resnet50", "fp16"), 25.56, settings=_CHANNELS_LAST),
    "t5": lambda: Job(_t5(), 60.51, True),
    "whisper": lambda: Job(_whisper(), 8.31, True),
}
"""What builds each, by its name in milabench."""
LEFT_OUT = {
    "dinov2-giant-single": "a teacher, two heads and FSDP of its own training code, which no library has",
    "llm-lora-single": "each batch is as long as the longest of its texts, which no row tells",
}
"""Held-out benchmarks that are not predicted, and why."""
