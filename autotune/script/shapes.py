"""Whether a script's batches have the shapes that its plan was found with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..drift import Difference
from ..plan import Plan

__all__ = ["other_shapes"]


def other_shapes(plan: Plan, loader: Any) -> Difference | None:
    """What differs in a training loader's batches; None too where that cannot be read."""
    from torch.utils.data import default_collate

    from ..fingerprint import batch_words, sample_shapes

    known = plan.task.identity if plan.task is not None else None
    if known is None or not known.batch:
        return None
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    found = ""
    with suppress(Exception):  # a dataset may take other than numbers
        found = batch_words(sample_shapes(loader.dataset, collate))
    if found in ("", known.batch):
        return None
    what = f"the plan was found with batches of {known.batch}, and the script's are {found}"
    return Difference(what, "its speed and its peak are of those")
