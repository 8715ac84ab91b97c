"""Attention by transformers' compiled kernel (``attention: {kind: flex}``) in inference on a CPU, beside torch's own.

    python -m benchmarks.flex --keep  # two minutes

Four layers of BERT (8 texts of 128 tokens), LLaMA (one of 4,096) and Mistral (one of 4,096, each token with the 256
before it); random weights, fp32. Passes take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autotune
from autotune import Plan
from autotune.techniques import Settings

from .rows import save_rows
from .steps import ratios_of, take_turns

_FLEX = Plan(settings=Settings.model_validate({"attention": {"kind": "flex"}}))
_SIZES: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 8000}
_LONG: dict[str, Any] = {**_SIZES, "intermediate_size": 1024, "num_key_value_heads": 8, "use_cache": False}


def _bert() -> tuple[nn.Module, Tensor]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_SIZES, intermediate_size=2048)), torch.randint(8000, (8, 128))


def _llama() -> tuple[nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**_LONG)), torch.randint(8000, (1, 4096))


def _mistral() -> tuple[nn.Module, Tensor]:
    from transformers import MistralConfig, MistralModel

    return MistralModel(MistralConfig(**_LONG, sliding_window=256)), torch.randint(8000, (1, 4096))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"bert": _bert, "llama": _llama, "mistral": _mistral}


@torch.no_grad()
def measure(name: str, rounds: int) -> dict[str, Any]:
    """One model: by how much outputs differ, and both ways' processor seconds."""
    torch.manual_seed(0)
    stock, words = MODELS[name]()
    stock = stock.eval()
    flex = autotune.apply_to_model(_FLEX, copy.deepcopy(stock))
    wanted, found = (model(input_ids=words).last_hidden_state for model in (stock, flex))  # flex compiles
    passes = {"stock": lambda: stock(input_ids=words), "flex": lambda: flex(input_ids=words)}
    taken = take_turns(passes, rounds, time.process_time)
    ratios = ratios_of(taken["flex"], taken["stock"])
    return {
        "model": name,
        "threads": torch.get_num_threads(),
        "outputs_differ_by": float((found - wanted).norm() / wanted.norm()),
        "processor_s": {key: [round(one, 3) for one in seconds] for key, seconds in taken.items()},
        "time_ratio": round(statistics.median(ratios), 3),
        "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> None:
    """Measure each model, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of a pass of each")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/flex-cpu.jsonl")
    arguments = parser.parse_args()
    for name in MODELS:
        row = measure(name, arguments.rounds)
        low, high = row["time_spread"]
        print(f"{name}: {row['time_ratio']:.2f} times torch's own attention ({low:.2f} to {high:.2f})", flush=True)
        if arguments.keep:
            save_rows("flex", "cpu", [row])


if __name__ == "__main__":
    main()
