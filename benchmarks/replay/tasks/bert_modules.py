"""A small BERT of transformers' that tells from which of Python's own modules a stretch of source text is."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

LENGTH = 64
MODULES = ["argparse", "ast", "configparser", "doctest", "inspect", "mailbox", "optparse", "pickle", "pydoc", "typing"]


class Stretches(Dataset[dict[str, Tensor]]):
    """Stretches of LENGTH bytes of the modules' texts, end to end, and the module's number."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        texts = [torch.tensor(list((folder / f"{name}.py").read_bytes())) for name in MODULES]
        rows = [text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH) for text in texts]
        self.texts = torch.cat(rows)
        self.modules = torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.modules[index]}


def build_model() -> nn.Module:
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
    return BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=LENGTH, num_labels=len(MODULES))
    ).train()


def build_dataset() -> Dataset[dict[str, Tensor]]:
    return Stretches()


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
