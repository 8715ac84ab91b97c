"""Training jobs whose time, memory or failure is known, and processes that use the card beside them."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from autotune import Task

BATCH = 8
STEP_S = 0.12
"""The card's time of a long step."""
SHORT_STEP_S = 0.02
COLLATE_S, STARVED_S = 0.02, 0.06
"""The host's time for a batch."""


@functools.cache
def _cycles_per_s() -> float:
    """How many cycles ``torch.cuda._sleep`` spins in a second, measured on this card."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return 1e8 / (begin.elapsed_time(end) / 1000)


def _dataset(num_samples: int = 4096) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(0)))


def _mean(model: nn.Module, batch: Sequence[Tensor], seconds: float) -> Tensor:
    """The loss, after the card was busy for so long."""
    if seconds:
        torch.cuda._sleep(int(seconds * _cycles_per_s()))
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def _sum(model: nn.Module, batch: Sequence[Tensor], seconds: float) -> tuple[Tensor, Tensor]:
    """(loss_sum, count), as of a loss over tokens."""
    loss = _mean(model, batch, seconds)
    count = (batch[0] > -9).sum()
    return loss * count, count


def _collated(samples: list[tuple[Tensor]], seconds: float) -> tuple[Tensor]:
    time.sleep(seconds)
    return (torch.stack([sample[0] for sample in samples]),)


def _timed(compute_loss: Callable[..., Any], step_s: float, collate_s: float = 0.0) -> Task:
    """A task whose step takes the card and the host so long."""
    return Task(
        build_model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))),
        build_dataset=_dataset,
        compute_loss=partial(compute_loss, seconds=step_s),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=BATCH,
        collate=partial(_collated, seconds=collate_s) if collate_s else None,
    )


launch_bound = _timed(_mean, 0.0)
short_steps = _timed(_mean, SHORT_STEP_S)
long_steps = _timed(_mean, STEP_S, COLLATE_S)
starved = _timed(_mean, SHORT_STEP_S, STARVED_S)
sums = _timed(_sum, SHORT_STEP_S, COLLATE_S / 4)


class _Words(nn.Module):
    """A small transformer over words."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(256, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, 256)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.words(words)
        for block in self.blocks:
            found = block(found)
        logits: Tensor = self.head(found)
        return logits


class _Sentences(Dataset[Tensor]):
    """Of 1 to 16 times so many words, in no order."""

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        length = self.unit * int(torch.randint(1, 17, (), generator=generator))
        return torch.randint(0, 256, (length,), generator=generator)


def _padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def _next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _sentences(unit: int, compute_loss: Callable[..., Any] = _next_word) -> Task:
    return Task(
        build_model=_Words,
        build_dataset=partial(_Sentences, unit),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=BATCH,
        collate=_padded,
    )


varying, few_varying = _sentences(16), _sentences(4)


def _failing(fail: Callable[[nn.Module], Any]) -> Task:
    """One whose third step fails."""
    steps = [0]

    def compute_loss(model: nn.Module, words: Tensor) -> Tensor:
        steps[0] += 1
        if steps[0] == 3:
            fail(model)
        return _next_word(model, words)

    return _sentences(4, compute_loss)


def _tensor(model: nn.Module) -> None:
    torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")


def _convolution(model: nn.Module) -> None:
    """What its input and output take fits, and what its gradients take does not."""
    usable = torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1]
    side = int((usable * 0.4 / 4 / 64) ** 0.5) // 32 * 32
    images = torch.zeros(1, 64, side, side, device="cuda", requires_grad=True)
    output = F.conv2d(images, torch.zeros(64, 64, 3, 3, device="cuda", requires_grad=True), padding=1)
    output.sum().backward()  # type: ignore[no-untyped-call]


def _host(model: nn.Module) -> None:
    bytearray(2**60)


def _killed(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


out_of_memory = _failing(_tensor)
out_of_memory_in_convolution = _failing(_convolution)
out_of_host_memory = _failing(_host)
killed = _failing(_killed)


class _Huge(Dataset[Tensor]):
    """A batch of these is more than ``/dev/shm`` holds, where a loader's worker puts it."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        there = os.statvfs("/dev/shm")
        return torch.empty(there.f_blocks * there.f_frsize // BATCH + 2**20, dtype=torch.uint8)  # nothing is touched


out_of_shared_memory = Task(
    build_model=lambda: nn.Linear(1, 1),
    build_dataset=_Huge,
    compute_loss=lambda model, batch: model(batch[:, :1].float()).mean(),
    batch_size=BATCH,
    loader_options={"num_workers": 1},
)


class _Dropping(nn.Module):
    """A block that is called by keyword and draws dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(self.linear(hidden), 0.5)


class _Nested(nn.Module):
    """A stack of them, called by position, by keyword, or in blocks of two."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Dropping() for _ in range(4))
        self.how = how

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden=hidden) if self.how == "keyword" else block(hidden)
        return hidden


def dropping(how: str, precision: Any = "fp32") -> Task:
    """A task with dropout in blocks that can be recomputed."""
    return Task(
        build_model=lambda: _Nested(how),
        build_dataset=_dataset,
        compute_loss=partial(_mean, seconds=0.0),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=BATCH,
        precision=precision,
    )


def words() -> Task:
    """The small transformer, on sentences of one length."""
    return Task(
        build_model=_Words,
        build_dataset=lambda: TensorDataset(torch.randint(0, 256, (512, 64))),
        compute_loss=lambda model, batch: _next_word(model, batch[0]),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=BATCH,
    )


few_words = words()


class _Writer(nn.Module):
    """A GPT of 124 million parameters: twelve blocks of width 768 over 1,024 of 50,257 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50_257, 768), nn.Embedding(1024, 768)
        block = partial(nn.TransformerEncoderLayer, 768, 12, 3072, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(12))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50_257, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.places.weight[: words.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Counting(Dataset[Tensor]):
    """1,024 words that follow one another."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(1024) * (1 + index % 7) + index) % 50_257


writer = Task(
    build_model=_Writer,
    build_dataset=_Counting,
    compute_loss=_next_word,
    build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    batch_size=32,
    precision="bf16",
)


class _Convolutions(nn.Module):
    """Without BatchNorm, so that a split batch has the whole one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3 if at == 0 else 32, 32, 3, padding=1) for at in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = F.relu(layer(images))
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


convolutions = Task(
    build_model=_Convolutions,
    build_dataset=lambda: TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))),
    compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=BATCH,
)


_held: list[Tensor] = []


def hold(share: float, computes: bool) -> Iterator[int]:
    """Hold a share of the card's free memory in place of what this process held, and say how many bytes; if asked,
    compute from then on until this process is ended."""
    _held.clear()
    torch.cuda.empty_cache()
    num_bytes = int(torch.cuda.mem_get_info()[0] * share)
    _held.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    yield num_bytes
    if computes:
        factor = torch.zeros(2048, 2048, device="cuda")
        while True:
            factor @ factor
