"""Plans by hand of one technique each, and how exactly a training with one must be the training without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.techniques.allocator import installed_allocators

from .styles import Style

_EXACT, _ROUNDED = 1e-4, 0.1
"""Largest difference of a step's loss, as a share of it: sums in another order; bf16, and derivatives in 8 bits."""


@dataclass(frozen=True)
class Pair:
    """A script without a plan and with one."""

    style: Style
    technique: str
    settings: Mapping[str, Any]
    """Of the plan."""
    tolerance: float
    """Largest difference of a step's loss, as a share."""
    draws_alike: bool = True
    """Whether all random numbers are the same: those of loader workers and of compiled programs are others."""
    split: int = 1
    """Backward passes for each of the script's own."""


_ROWS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "nothing": ({}, 0.0),
    "layers": ({"layers": {"kind": "exact"}}, _EXACT),
    "layers rounding": ({"layers": {"kind": "rounding"}}, _ROUNDED),
    "layers recompute": ({"layers": {"kind": "recompute"}}, _EXACT),
    "checkpointing": ({"checkpointing": {"kind": "blocks"}}, _EXACT),
    "bf16": ({"precision": {"kind": "bf16"}}, _ROUNDED),
    "channels_last": ({"memory_format": {"kind": "channels_last"}}, _EXACT),
    "compile": ({"compile": {"kind": "model"}}, _EXACT),
    "foreach": ({"optimizer": {"kind": "foreach"}}, _EXACT),
    "fused": ({"optimizer": {"kind": "fused"}}, _EXACT),
    "cache": ({"data_loading": {"num_workers": 0, "cache": "host"}}, _EXACT),
    "no workers": ({"data_loading": {"num_workers": 0}}, _EXACT),
    "workers": ({"data_loading": {"num_workers": 2}}, _EXACT),
    "workers that stay": ({"data_loading": {"num_workers": 2, "persistent_workers": True}}, _EXACT),
    "allocator": ({"allocator": {"kind": "tcmalloc"}}, _EXACT),
}
_OF_IMAGES = ("layers recompute", "channels_last")
NAMES = (*_ROWS, "batch")


def pairs_of(style: Style) -> Iterator[Pair]:
    """All that are tried of a style: images alone have a memory format; there must be workers to do without, an
    installed library, and flags for a batch."""
    for technique, (settings, tolerance) in _ROWS.items():
        if technique in _OF_IMAGES and not style.has_images:
            continue
        if technique == "no workers" and not style.has_workers:
            continue
        if technique == "allocator" and "tcmalloc" not in installed_allocators():
            continue
        others_draw = (technique == "compile" and style.model_draws) or (
            technique.startswith("workers") and style.dataset_draws
        )
        yield Pair(style, technique, settings, tolerance, draws_alike=not others_draw)
    if style.batch is not None:
        micro, accumulate = style.batch // 2, 2
        settings = {"batch": {"micro": micro, "accumulate": accumulate}}
        yield Pair(style, "batch", settings, 1e-3, draws_alike=not style.model_draws, split=accumulate)
