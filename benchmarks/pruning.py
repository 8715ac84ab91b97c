"""Which models pruning can cut, and what that saves: parameters and the time of a step, or why it is refused.

    python -m benchmarks.pruning [--ratio 0.25] [--model NAME] [--rounds 5] [--batch 2]

Times are processor seconds of a forward and backward pass on one thread, whole and cut model in turns; their ratio is
the median over rounds, with the smallest and the largest. Beside other work on the machine they vary by some 15 %.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autotune.errors import PlanError
from autotune.pruning import How, cut, rebuild

from .layer_models import MODELS, Built, loss_of
from .rows import environment, save_rows

__all__ = ["main"]

Row = dict[str, Any]


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 128), nn.Linear(256, 1000)
        self.lstm = nn.LSTM(128, 256, 2, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.lstm(self.embedding(input_ids))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, 1000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.encoder(self.embedding(input_ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _mobilenet() -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    images = torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return MobileNetV2ForImageClassification(MobileNetV2Config()), {
        "pixel_values": images,
        "labels": torch.arange(8) % 2,
    }


def _llama() -> Built:
    """Grouped queries: two key and value heads for eight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, num_hidden_layers=6, hidden_size=384, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(8000)


def _tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (4, 128), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


_BUILDS: dict[str, Callable[[], Built]] = {
    **MODELS,
    "mobilenet": _mobilenet,
    "llama": _llama,
    "torch-encoder": lambda: (_Encoder(), _tokens(1000)),
    "lstm": lambda: (_Tagger(), _tokens(1000)),
}


def main() -> None:
    """Print the table, and keep its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.25, help="share of widths that goes")
    parser.add_argument("--model", action="append", choices=_BUILDS, help="this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{environment('cpu')}\nratio {arguments.ratio:g}, batch {arguments.batch}; times vary by some 15 %")
    print(
        f"{'model':15}{'parameters':>12}{'left':>7}{'time':>7}{'':>16}  cut in, what was not cut or why it is refused"
    )
    for row in _rows(arguments):
        print(_line(row), flush=True)
        save_rows("pruning", "cpu", [row])


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for name in arguments.model or _BUILDS:
        torch.manual_seed(0)
        model, inputs = _BUILDS[name]()
        inputs = {key: value[: arguments.batch] for key, value in inputs.items()}
        loss = functools.partial(loss_of, inputs=inputs, case="as built")
        whole = sum(p.numel() for p in model.parameters())
        row = {"model": name, "ratio": arguments.ratio, "batch": arguments.batch, "parameters": whole}
        began_s = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record = cut(model, loss, How(arguments.ratio))
        except PlanError as refused:
            yield {**row, "refused": str(refused)}
            continue
        cut_s = time.perf_counter() - began_s
        smaller = copy.deepcopy(model)
        rebuild(smaller, record)
        times = [[_step_s(one, loss) for one in (model, smaller)] for _ in range(arguments.rounds)]
        yield {
            **row,
            "parameters_left": sum(p.numel() for p in smaller.parameters()),
            "record_bytes": len(record.compressed()),
            "left": record.left,
            "cut_s": cut_s,
            "processor_s": times,
        }


def _step_s(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> float:
    model.zero_grad()
    began_s = time.process_time()
    loss(model).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - began_s


def _line(row: Row) -> str:
    head = f"{row['model']:15}{row['parameters']:12,}"
    if "refused" in row:
        return f"{head}{'refused':>14}{'':>16}  {row['refused'].removeprefix('settings.pruning: ')}"
    ratios = sorted(cut_s / whole_s for whole_s, cut_s in row["processor_s"])
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return (
        f"{head}{row['parameters_left'] / row['parameters']:7.2f}{statistics.median(ratios):7.2f}{spread:>16}"
        f"  {row['cut_s']:.1f} s{''.join(f'; {one}' for one in row['left'])}"
    )


if __name__ == "__main__":
    main()
