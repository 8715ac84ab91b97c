"""Tasks of transformers' configurations: the head, the samples, and LoRA's adapters, by hand arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from autotune.errors import TaskError
from autotune.estimates import EstimateOptions
from autotune.estimates.max_batch import estimate
from autotune.estimates.memory_model import BATCHES, fit_memory_model
from autotune.integrations.from_config import task_of_config
from autotune.plan import Budget, Plan
from autotune.techniques import Settings

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
BERT = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}
T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"n_positions": 8}
VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT |= {"image_size": 8, "patch_size": 4}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(fields: dict[str, Any], *architectures: str) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields | ({"architectures": architectures} if architectures else {})))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("fields", "named", "built"),
    [
        (GPT2, "GPT2LMHeadModel", "GPT2LMHeadModel"),
        (GPT2, "GPT2ForSequenceClassification", "GPT2ForSequenceClassification"),
        (BERT, "BertForMaskedLM", "BertForMaskedLM"),
        (BERT, "BertForTokenClassification", "BertForTokenClassification"),
        (BERT, "BertModel", "BertForMaskedLM"),
        (BERT, None, "BertForMaskedLM"),
        (BERT | {"is_decoder": True}, None, "BertLMHeadModel"),
        (LLAMA, "LlamaForCausalLM", "LlamaForCausalLM"),
        (T5, None, "T5ForConditionalGeneration"),
        (VIT, "ViTForImageClassification", "ViTForImageClassification"),
    ],
)
def test_a_model_has_the_head_that_it_names_and_trains(written, fields, named, built):
    """The loss of two samples is a number that reaches the first parameter that trains."""
    task = task_of_config(written(fields, *filter(None, [named])), sequence=4)
    model = task.build_model()
    assert type(model).__name__ == built
    dataset = task.build_dataset()
    batch = default_collate([dataset[0], dataset[len(dataset) - 1]])
    loss = task.compute_loss(model, batch)
    loss.backward()
    assert loss.dim() == 0
    assert next(one for one in model.parameters() if one.requires_grad).grad is not None


def test_samples_are_full_sequences_and_images_of_the_models_size(written):
    (sample,) = [task_of_config(written(GPT2), sequence=12).build_dataset()[0]]
    assert {name: tuple(one.shape) for name, one in sample.items()} == {"input_ids": (12,), "labels": (12,)}
    sample = task_of_config(written(VIT), sequence=12).build_dataset()[0]
    assert tuple(sample["pixel_values"].shape) == (3, 8, 8)


def test_weights_have_the_type_that_the_configuration_states(written):
    types = {one.dtype for one in task_of_config(written(LLAMA), 4).build_model().parameters()}
    assert types == {torch.bfloat16}
    assert {one.dtype for one in task_of_config(written(GPT2), 4).build_model().parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        (LLAMA, 2 * 4 * ((16 + 16) + (16 + 8))),
        (GPT2, 2 * 4 * (8 + 24)),
        (BERT, 4 * 2 * (8 + 8)),
        (T5, 3 * 4 * 2 * (8 + 8)),
    ],
)
def test_lora_trains_two_thin_matrices_beside_queries_and_values(written, fields, trained):
    """Of rank 4: 4 x (in + out) for each projection: two layers of 16 to 16 and, with half the heads, 16 to 8; GPT-2's
    three in one, 8 to 24; BERT's one layer; T5's one attention in the encoder and two in the decoder."""
    model = task_of_config(written(fields), 4, lora=4).build_model()
    adapters = [one for one in model.parameters() if one.requires_grad]
    assert sum(one.numel() for one in adapters) == trained
    assert {one.dtype for one in adapters} == {torch.float32}


def test_adapters_change_nothing_before_they_are_trained(written):
    path = written(LLAMA)
    torch.manual_seed(0)
    whole = task_of_config(path, 4).build_model()
    adapted = task_of_config(path, 4, lora=2).build_model()
    names = {name.replace(".layer.", "."): value for name, value in adapted.state_dict().items()}
    tokens = torch.arange(4)[None]
    whole.load_state_dict({name: names[name] for name in whole.state_dict()})
    assert torch.equal(whole(tokens).logits, adapted(tokens).logits)
    assert adapted(tokens).logits.dtype == torch.bfloat16


def test_lora_trains_a_classifier_too(written):
    model = task_of_config(written(BERT, "BertForSequenceClassification"), 4, lora=2).build_model()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {"classifier.weight", "classifier.bias"} < trained
    assert all("classifier" in name or ".down." in name or ".up." in name for name in trained)


@pytest.mark.medium
@pytest.mark.parametrize("lora", [None, 4])
def test_it_is_traced_for_a_card(written, lora):
    """Nothing reads a value. Adapters keep the optimizer's state and the gradients of all other weights away."""
    options = EstimateOptions(target="cuda", limit_bytes=2**30)
    found = estimate(task_of_config(written(GPT2), 8, lora), options)
    held = {fill.kind: fill.num_bytes for fill in found.fills}
    trained = 2 * 4 * (8 + 24) if lora else sum(p.numel() for p in model_of(written).parameters())
    assert found.how == "traced"
    assert held["optimizer_state"] >= 2 * 4 * trained
    assert held["optimizer_state"] < 2 * 4 * trained + 4096


@pytest.mark.medium
def test_long_sequences_need_no_mask_however_many_there_are(written):
    """At 256 x 512 tokens as at 2: what is traced at three batches serves all."""
    plan = Plan(settings=Settings(), budget=Budget(device="cpu"))
    found = fit_memory_model(plan, task_of_config(written(LLAMA), 512), target="cuda")
    assert (found.batches, found.is_traced_at_each_batch) == (BATCHES, False)


def model_of(written: Callable[..., str]) -> nn.Module:
    return task_of_config(written(GPT2), 8).build_model()


@pytest.mark.parametrize(
    ("fields", "sequence", "lora", "told"),
    [
        ({"model_type": "mine"}, 4, None, r"knows was expected, but its model_type is 'mine'\. .*`autotune init`"),
        ({"hidden_size": 8}, 4, None, "knows was expected, but it has no model_type"),
        (GPT2, 33, None, "this model has 32 positions, but --sequence is 33"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, 4, None, "a head of causal"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, 4, None, "its weights are quantized"),
    ],
)
def test_what_cannot_be_built_is_said(written, fields, sequence, lora, told):
    path = written(fields)
    with pytest.raises(TaskError, match=told) as error:
        task_of_config(path, sequence, lora)
    assert path in str(error.value)


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TaskError, match=r"config\.json: cannot be read as JSON"):
        task_of_config(str(tmp_path / "config.json"), 4)


def test_positions_that_are_computed_have_no_end(written):
    assert len(task_of_config(written(LLAMA), 64).build_dataset()[0]["input_ids"]) == 64
    assert len(task_of_config(written(T5), 64).build_dataset()[0]["input_ids"]) == 64


def test_a_model_without_such_layers_has_no_adapters(written):
    convolutions = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "image_size": 32}
    with pytest.raises(TaskError, match="but ResNetForImageClassification has no such layers"):
        task_of_config(written(convolutions), 4, lora=4).build_model()
