"""The largest batch of timm's ladder that trains on a card: measured beside predicted."""

from __future__ import annotations

import csv
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

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
from autotune.training.skip_init import skip_init
from autotune.units import MIB

from ..rows import load_rows, save_rows
from .casts import LastingCastsSGD, keep_casts
from .jobs import has_convolutions
from .known import OLDER_CUDNN, RTX_3090, Known
from .samples import Samples
from .vision import timm_model

Row = dict[str, Any]
_MEASURED = Path(__file__).parent / "measured" / "timm-3090.csv"
_ROWS = "cards-rungs"
_LIMIT = RTX_3090.memory_mib * MIB
_EAGER = 976 * MIB
"""What a context took more before CUDA loaded kernels only as they are used (11.7): with torch's for CUDA 11.0 it was
1,488 MiB on an RTX 3090 (pytorch/pytorch#49877: 1,644 MiB with a tensor of 156)."""
_FIRST = 512
"""The ladder begins there."""
_BAR = 0.95
_ALIKE = 0.006
"""Share that parameters may differ by: more is another model by the same name."""
DEVELOPED_ON = frozenset(
    {
        "beit_base_patch16_224", "convnext_base", "densenet121", "efficientnet_b3", "inception_v3", "mixer_b16_224",
        "mobilevit_s", "poolformer_s24", "regnety_160", "res2net50_26w_4s", "resnet101", "seresnet50",
        "swin_tiny_patch4_window7_224", "tf_efficientnetv2_s", "vgg16", "vit_base_patch16_224",
        "vit_large_patch16_224", "wide_resnet50_2",
    }
)  # fmt: skip
"""Models whose rungs were looked at while the predictor was developed."""
SEEN = frozenset(
    {
        "convnext_tiny_384_in22ft1k", "hrnet_w40", "mixnet_s", "regnetx_006", "regnety_120", "repvgg_b1g4",
        "resnetv2_101x3_bitm", "rexnet_200", "xception65p", "xcit_small_24_p16_224",
    }
)  # fmt: skip
"""Models that were held out, and looked at since."""


def print_rungs(models: Sequence[str] | None, most: int, keep: bool) -> None:
    """Print each model's largest batch, and how many are right.

    Args:
        models: timm's names; None takes them in :func:`in_turn`.
        most: so many of those that can be built, with those that are kept.
        keep: keep each row as soon as it is there; rows that are kept are printed, and not made again.
    """
    kept = {(row["model"], row["layout"]): row for row in (load_rows(_ROWS, "cpu") if keep else ())}
    rows: list[Row] = []
    for one in _named(models) if models else in_turn(_measured()):
        row = kept.get((one["model"], one["layout"]))
        if row is None:
            row = _row(one)
            if keep:
                save_rows(_ROWS, "cpu", [row])
        rows.append(row)
        print(_told(row), flush=True)
        if sum("off" in row for row in rows) == most:
            break
    for known in get_args(Known):
        found = [row for row in rows if _known(row["model"]) == known]
        if found:
            print(f"{known}, {_verdict(found)}")


def in_turn(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Each model once, in an order that its result has no say in: families in turn, and within one by the hash of the
    name, which also says whether it is measured in planes or channels last."""
    families: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    for row in rows:
        family = re.split(r"[_0-9]", row["model"], maxsplit=1)[0]
        families.setdefault(family, {}).setdefault(row["model"], {})[row["layout"]] = row
    queues = ([one[name] for name in sorted(one, key=_hash)] for _, one in sorted(families.items()))
    for turn in itertools.zip_longest(*queues):
        for layouts in filter(None, turn):
            wanted = ("nchw", "nhwc")[_hash(next(iter(layouts.values()))["model"]) % 2]
            yield layouts.get(wanted) or next(iter(layouts.values()))


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def _measured() -> list[dict[str, str]]:
    with _MEASURED.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def _named(models: Sequence[str]) -> list[dict[str, str]]:
    return [one for one in _measured() if one["model"] in models]


def _known(model: str) -> Known:
    return "developed on" if model in DEVELOPED_ON else "seen since" if model in SEEN else "held out"


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
        task = _task(one)
        _check(task, float(one["million_parameters"]))
        job = _predictor(task, one)
        found = next((rung for rung in rungs if _fits(job, rung, _settings(one))), 0)
    except (Untraceable, RuntimeError, ImportError, ValueError) as error:
        return row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return row | {"predicted": found, "off": _place(rungs, row["measured"]) - _place(rungs, found)}


def _fits(job: Predictor, batch: int, settings: Settings) -> bool:
    """Whether a batch fits; where its tensors alone do not, the allocator need not be asked."""
    return job.may_fit(batch, _LIMIT) and job.process(batch, settings).value <= _LIMIT


def _check(task: Task, million_parameters: float) -> None:
    found = sum(one.numel() for one in skip_init(task).build_model().parameters()) / 1e6
    if abs(found - million_parameters) > max(_ALIKE * million_parameters, 0.01):
        raise ValueError(f"{found:.2f} million parameters, but the model that was measured has {million_parameters}")


def _place(rungs: Sequence[int], batch: int) -> int:
    return rungs.index(batch) if batch in rungs else len(rungs)


def _settings(one: dict[str, str]) -> Settings:
    kind = "channels_last" if one["layout"] == "nhwc" else "contiguous"
    return Settings(memory_format=MemoryFormat(kind=kind))  # type: ignore[arg-type] - one of its kinds


def _task(one: dict[str, str]) -> Task:
    side = int(one["img_size"])

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        keep_casts()
        found = model(batch[0])
        return F.cross_entropy(found[0] if isinstance(found, tuple) else found, batch[1])

    return Task(
        build_model=lambda: timm_model(one["model"], fuses_attention=False),
        build_dataset=lambda: Samples(lambda: (torch.zeros(3, side, side), 0)),
        compute_loss=compute_loss,
        build_optimizer=lambda parameters: LastingCastsSGD(parameters, lr=1e-4, momentum=0.9, nesterov=True),
        precision="fp16",
    )


def _predictor(task: Task, one: dict[str, str]) -> Predictor:
    """Every kernel is loaded, so that cuDNN's trying each of them takes no more."""
    convolves = has_convolutions(task)
    device = on_device(RTX_3090.device, convolves)
    options = EstimateOptions(
        settings=_settings(one),
        reference_batch=2**20,
        is_held=True,
        limit_bytes=_LIMIT,
        **device | {"context": device["context"].plus(_EAGER + OLDER_CUDNN * convolves)},
    )
    return Predictor(task, options)


def _told(row: Row) -> str:
    said = row.get("error") or f"predicted {row['predicted']}"
    return f"{row['model']} {row['layout']}: {row['measured']}, {said}"
