"""Which LLaMA-like model trains whole on a card of 24 GiB, by texts of 2,048 tokens? Predictions: nothing runs.

    python -m benchmarks.largest --keep   # minutes for each

Models have the width of LLaMA-7B and up to its 32 blocks, and take one text at a time. A peak is what a card is
charged, with its interval: by tracing a step of AdamW over fake tensors, as ``autotune estimate`` does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from autotune import Task
from autotune.estimates import PredictOptions
from autotune.estimates.predict import predict
from autotune.techniques import Settings

from .rows import save_rows

_GIB = 2**30
CARD_GIB, LENGTH = 24, 2048
DEPTHS = (32, 28, 8)
_ROWS: dict[str, Any] = {"batch": {"micro": 1}}
_LEAST = {
    "checkpointing": {"kind": "blocks"},
    "optimizer_step": {"kind": "in_backward"},
    "tiles": {"kind": "feed_forward"},
}
PLANS: dict[str, dict[str, Any]] = {
    "as it stands": {},
    "blocks, in_backward, tiles": _LEAST,
    "the same, 8bit": {**_LEAST, "optimizer_state": {"kind": "8bit"}},
    "the same, 4bit": {**_LEAST, "optimizer_state": {"kind": "4bit"}},
    "the same, 4bit, weights in bf16": {
        **_LEAST,
        "optimizer_state": {"kind": "4bit"},
        "trained_weights": {"kind": "bf16"},
    },
    "the same, weights and state on the host": {
        **_LEAST,
        "offload": {"kind": "parameters", "to": "host", "trained": True},
    },
}


def _llama(num_blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(use_cache=False, num_hidden_layers=num_blocks)).train()
    return model


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def _row(num_blocks: int, words: str) -> dict[str, Any]:
    texts = torch.zeros(2, LENGTH, dtype=torch.long)
    task = Task(
        lambda: _llama(num_blocks),
        lambda: TensorDataset(texts),
        _loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=1,
    )
    settings = Settings.model_validate({**_ROWS, **PLANS[words]})
    (found,) = predict(task, PredictOptions(settings=(settings,), target="cuda")).predictions
    with torch.device("meta"):
        parameters = sum(one.numel() for one in _llama(num_blocks).parameters())
    assert found is not None, "nothing bounds its time"
    assert found.high_bytes is not None, "a traced step has an interval"
    fits = found.high_bytes <= CARD_GIB * _GIB
    row = {
        "blocks": num_blocks,
        "parameters": parameters,
        "plan": words,
        "predicted_gib": round(found.peak_bytes / _GIB, 2),
        "high_gib": round(found.high_bytes / _GIB, 2),
        "fits": fits,
    }
    print(
        f"{parameters / 1e9:.2f} G parameters, {words}: predicted {row['predicted_gib']} GiB, at most "
        f"{row['high_gib']}: {'fits' if fits else 'does not fit'} {CARD_GIB} GiB",
        flush=True,
    )
    return row


def main() -> None:
    """Predict each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, action="append", help=f"default: {DEPTHS}")
    parser.add_argument("--plan", choices=PLANS, action="append", help="default: all")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/largest-cpu.jsonl")
    arguments = parser.parse_args()
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # traces are stored there
        for blocks, words in itertools.product(arguments.blocks or DEPTHS, arguments.plan or PLANS):
            row = _row(blocks, words)
            if arguments.keep:
                save_rows("largest", "cpu", [row])
        os.chdir(here)


if __name__ == "__main__":
    main()
