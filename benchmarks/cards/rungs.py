"""The largest batch of timm's ladder that trains on a card: measured beside predicted."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotune import Task
from autotune.estimates import EstimateOptions
from autotune.estimates.cards import on_device
from autotune.estimates.predictor import Predictor
from autotune.estimates.tracing.fake_step import Untraceable
from autotune.techniques import Settings
from autotune.techniques.memory_format import MemoryFormat
from autotune.units import MIB

from ..rows import save_rows
from .jobs import Samples, has_convolutions
from .known import RTX_3090
from .vision import timm_model

Row = dict[str, Any]
_MEASURED = Path(__file__).parent / "measured" / "timm-3090.csv"
_LIMIT = RTX_3090.memory_mib * MIB
_FIRST = 512
"""The ladder begins there."""
_BAR = 0.95
DEVELOPED_ON = frozenset(
    {
        "beit_base_patch16_224", "convnext_base", "densenet121", "efficientnet_b3", "inception_v3", "mixer_b16_224",
        "mobilevit_s", "poolformer_s24", "regnety_160", "res2net50_26w_4s", "resnet101", "seresnet50",
        "swin_tiny_patch4_window7_224", "tf_efficientnetv2_s", "vgg16", "vit_base_patch16_224",
        "vit_large_patch16_224", "wide_resnet50_2",
    }
)  # fmt: skip
"""Models whose rungs were looked at while the predictor was developed."""


def print_rungs(models: Sequence[str] | None, keep: bool) -> None:
    """Print each model's largest batch, and how many are right."""
    rows = []
    with _MEASURED.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            if models is None or one["model"] in models:
                rows.append(_row(one))
                print(_told(rows[-1]), flush=True)
    for known, is_developed in (("developed on", True), ("held out", False)):
        found = [row for row in rows if (row["model"] in DEVELOPED_ON) == is_developed]
        if found:
            print(f"{known}, {_verdict(found)}")
    if keep:
        print(save_rows("cards-rungs", "cpu", rows))


def _verdict(rows: Sequence[Row]) -> str:
    known = [row for row in rows if "off" in row]
    off = Counter(row["off"] for row in known)
    right = off[0] / len(known) if known else 0.0
    within = right >= _BAR and set(off) <= {-1, 0, 1}
    return (
        f"{len(known)} of {len(rows)} models: {right:.1%} right, "
        + ", ".join(f"{num} off by {rungs:+d}" for rungs, num in sorted(off.items()) if rungs)
        + f": {'within' if within else 'OVER'} the bar of {_BAR:.0%}, the others one rung off"
    )


def ladder() -> Iterator[int]:
    """512, 384, 256, 192, 128, ...: timm's steps down when memory runs out."""
    batch = _FIRST
    while batch >= 1:
        yield batch
        base = 2 ** ((batch - 1).bit_length() - 1) if batch > 1 else 0
        step = max(base // 2, 1)
        batch = base + (batch - base - 1) // step * step if batch > 1 else 0


def _row(one: dict[str, str]) -> Row:
    row: Row = {"model": one["model"], "layout": one["layout"], "measured": int(one["batch"])}
    rungs = [*ladder()]
    try:
        job = _predictor(one)
        found = next((rung for rung in rungs if job.process(rung, _settings(one)).value <= _LIMIT), 0)
    except (Untraceable, RuntimeError, ImportError) as error:
        return row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return row | {"predicted": found, "off": _place(rungs, row["measured"]) - _place(rungs, found)}


def _place(rungs: Sequence[int], batch: int) -> int:
    return rungs.index(batch) if batch in rungs else len(rungs)


def _settings(one: dict[str, str]) -> Settings:
    kind = "channels_last" if one["layout"] == "nhwc" else "contiguous"
    return Settings(memory_format=MemoryFormat(kind=kind))  # type: ignore[arg-type] - one of its kinds


def _predictor(one: dict[str, str]) -> Predictor:
    side = int(one["img_size"])

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = model(batch[0])
        return F.cross_entropy(found[0] if isinstance(found, tuple) else found, batch[1])

    task = Task(
        build_model=lambda: timm_model(one["model"], fuses_attention=False),
        build_dataset=lambda: Samples(lambda: (torch.zeros(3, side, side), 0)),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, nesterov=True),
        precision="fp16",
    )
    device = on_device(RTX_3090.device, has_convolutions(task))
    options = EstimateOptions(
        settings=_settings(one), reference_batch=2**20, is_held=True, limit_bytes=_LIMIT, **device
    )
    return Predictor(task, options)


def _told(row: Row) -> str:
    said = row.get("error") or f"predicted {row['predicted']}"
    return f"{row['model']} {row['layout']}: {row['measured']}, {said}"
