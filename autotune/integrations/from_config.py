"""``task_of_config``: fine-tuning of a model that a configuration of ``transformers`` describes, as a task."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..errors import TaskError
from ..task import Task

_HEADS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""What builds a model with each head, and which classes have that head, by ``transformers``' own names."""
_ONE_LABEL = ("AutoModelForSequenceClassification", "AutoModelForImageClassification")
"""Heads that give a sample one label, and not one for each token."""
_IMAGES = "AutoModelForImageClassification"
_CHOSEN = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", _IMAGES)
"""Of a configuration that names no head: the first of these that its models have; of a decoder, not the masked one."""
_NUM_SAMPLES = 2**16
_ADAPTED = frozenset(
    {"q_proj", "v_proj", "query", "value", "q", "v", "q_lin", "v_lin", "c_attn", "query_key_value", "qkv_proj", "Wqkv"}
)
"""Projections of queries and values in attention, which ``peft`` adapts by default, by the names that models give."""
_CLASSIFIERS = ("classifier", "score")
"""Heads that ``peft`` trains beside the adapters."""
_POSITIONS = ("rope_parameters", "relative_attention_num_buckets", "alibi")
"""Fields of configurations whose models have no table of positions, so that their samples may be longer."""


def task_of_config(path: str, sequence: int, lora: int | None = None) -> Task:
    """The task of training all of a model, or adapters of it, by AdamW.

    The weights have the type that the configuration states, fp32 where it states none, as ``from_pretrained`` of
    transformers 5 has it. They are never downloaded. Sequences are full, without padding.

    Args:
        path: of a ``config.json``.
        sequence: tokens in a sample, >= 1.
        lora: the rank of LoRA's adapters of the query and value projections, everything else being frozen but a
            classifier; None trains the whole model.

    Raises:
        TaskError: no configuration that transformers knows, or no head or projection that is known here.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise TaskError("--hf needs transformers. Install it: pip install transformers.") from None
    config = _config(Path(path), transformers)
    head = _head(path, config)
    longest = getattr(config, "max_position_embeddings", None)
    has_table = not any(getattr(config, name, None) for name in _POSITIONS)
    if head != _IMAGES and isinstance(longest, int) and has_table and sequence > longest:
        raise TaskError(f"{path}: this model has {longest:,} positions, but --sequence is {sequence:,}. Give fewer.")

    def build_model() -> nn.Module:
        model: nn.Module = getattr(transformers, head).from_config(copy.deepcopy(config))
        return model if lora is None else _adapted(model, lora, path)

    return Task(build_model, lambda: _Samples(_sample(config, head, sequence)), _loss)


def _config(path: Path, transformers: Any) -> Any:
    """The configuration, with what training sets."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read as JSON: {error}") from None
    kind = read.get("model_type") if isinstance(read, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        said = f"its model_type is {kind!r}" if kind else "it has no model_type"
        raise TaskError(
            f"{path}: a configuration that transformers {transformers.__version__} knows was expected, but {said}. For "
            "a model of your own, write a task file: `autotune init`."
        )
    if read.get("quantization_config"):
        raise TaskError(
            f"{path}: its weights are quantized, and what those take is not known here. Take quantization_config out "
            "for the model as it was before."
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(read)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(f"{path}: transformers {transformers.__version__} refuses it: {error}") from None
    config.use_cache = False
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def _head(path: str, config: Any) -> str:
    """What builds the model that the configuration names or, without one, its usual head."""
    from transformers.models.auto import modeling_auto

    classes = {head: _class_names(getattr(modeling_auto, mapping)) for head, mapping in _HEADS.items()}
    named = (config.architectures or [None])[0]
    for head, names in classes.items():
        if named in names.values():
            return head
    if named is None or named in _class_names(modeling_auto.MODEL_MAPPING_NAMES).values():
        for head in _CHOSEN:
            is_decoder = head == "AutoModelForMaskedLM" and getattr(config, "is_decoder", False)
            if config.model_type in classes[head] and not is_decoder:
                return head
    raise TaskError(
        f"{path}: {named or config.model_type}: a head of causal, masked or sequence-to-sequence language models was "
        "expected, or of classifying sequences, tokens or images. For any other, write a task file: `autotune init`."
    )


def _class_names(mapping: Any) -> dict[str, str]:
    """Of each type of model, the first where there are several."""
    return {kind: names[0] if isinstance(names, (tuple, list)) else names for kind, names in mapping.items()}


def _sample(config: Any, head: str, sequence: int) -> dict[str, Any]:
    tokens = torch.ones(sequence, dtype=torch.long)
    labels: Any = 0 if head in _ONE_LABEL else torch.zeros(sequence, dtype=torch.long)
    if head != _IMAGES:
        return {"input_ids": tokens, "labels": labels}
    side = config.image_size
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return {"pixel_values": torch.zeros(getattr(config, "num_channels", 3), height, width), "labels": labels}


class _Samples(Dataset[Any]):
    """So many of one."""

    def __init__(self, sample: dict[str, Any]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _adapted(model: nn.Module, rank: int, path: str) -> nn.Module:
    """The model, frozen, with adapters."""
    found = [name for name, module in model.named_modules() if name.rpartition(".")[2] in _ADAPTED and _sides(module)]
    if not found:
        raise TaskError(
            f"{path}: --lora adapts attention's projections of queries and values, called "
            f"{', '.join(sorted(_ADAPTED))}, but {type(model).__name__} has no such layers. Leave --lora out, or write "
            "a task file with peft."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in _CLASSIFIERS for part in name.split(".")))
    for name in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _Adapted(model.get_submodule(name), rank))
    return model


def _sides(module: nn.Module) -> tuple[int, int] | None:
    """Features that go in and come out of a layer that is one matrix product; GPT-2's has its weight transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    first, second = weight.shape
    return (first, second) if type(module).__name__ == "Conv1D" else (second, first)


class _Adapted(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices, which have at least fp32's precision.

    Source: Hu et al. 2021, arXiv:2106.09685; the order of operations and the types are those of ``peft``'s.
    """

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        sides = _sides(layer)
        assert sides is not None, "the caller sees to it"
        self.layer = layer
        self.down = nn.Linear(sides[0], rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, sides[1], bias=False, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        self._scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own type comes out."""
        found: Tensor = self.layer(x)
        added: Tensor = found + self.up(self.down(x.to(self.down.weight.dtype))) * self._scale
        return added.to(found.dtype)
