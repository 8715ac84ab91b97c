"""A small GPT-2 of transformers', built from its configuration, on numbers that follow one another."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH, NUM_SAMPLES = 2000, 128, 512

batch_size = 16


def build_model() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 128, "n_layer": 6, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    return model.train()


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    starts = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (words,) = batch
    return model(input_ids=words, labels=words).loss


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)
