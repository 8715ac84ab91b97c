"""A character-level GPT on the source text of Python's own standard library. Nothing is downloaded.

``autotune search model.py`` reads the names below; the file itself needs nothing but torch.
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SEQUENCE = 96
WIDTH = 192
NUM_BLOCKS = 4
NUM_HEADS = 6
DROPOUT = 0.1
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
TRAINED_ON = ["_pydecimal", "argparse", "ast", "configparser", "doctest", "inspect", "mailbox", "optparse", "pickle"]
TRAINED_ON += ["pickletools", "pydoc", "subprocess", "tarfile", "threading", "turtle", "typing", "urllib/request"]
HELD_OUT = ["heapq", "random", "shutil"]

batch_size = 32  # what one optimizer step sees; a search holds it fixed


def read_source(modules: list[str]) -> Tensor:
    """The text of these modules as indices into VOCABULARY; characters outside it count as spaces."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in modules)
    index = {character: i for i, character in enumerate(VOCABULARY)}
    return torch.tensor([index.get(character, index[" "]) for character in text])


class Windows(Dataset[Tensor]):
    """Stretches of SEQUENCE characters and the one that follows, end to end."""

    def __init__(self, modules: list[str]) -> None:
        self.text = read_source(modules)

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * SEQUENCE : (index + 1) * SEQUENCE + 1]


class Block(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Embedding, blocks, and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(VOCABULARY), WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    return GPT()


def build_dataset() -> Dataset[Tensor]:
    return Windows(TRAINED_ON)


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def evaluate(model: nn.Module) -> float:
    """Minus the mean loss on modules that are not trained on, in batches of the same size as in training."""
    batches = DataLoader(Windows(HELD_OUT), batch_size, drop_last=True)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.no_grad():
        losses = [compute_loss(model, batch.to(device)) for batch in batches]
    model.train(training)
    return -torch.stack(losses).mean().item()
