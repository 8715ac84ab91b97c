"""What ``autotune export`` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..measure.exports.types import ExportedFile
from ..plan import TOLERANCE, Plan
from ..techniques import FileKind
from ..units import size
from .tables import rows_table


def as_json(found: ExportedFile, plan: Plan, to: FileKind) -> dict[str, Any]:
    """Plain data."""
    return {
        "bytes": found.num_bytes,
        "inputs": list(found.inputs),
        "outputs": list(found.outputs),
        "from_plan": _most(found, "from_plan"),
        "from_reference": _most(found, "from_reference"),
        "tolerance": plan.inference.tolerance if plan.inference is not None else None,
        "batch_sizes": list(found.sizes),
        "refused_batch_sizes": list(found.refused),
        "kept": [one.name for one in plan.settings.chosen() if one.not_in_file(to) is None],
        "left_out": {one.name: why for one in plan.settings.chosen() if (why := one.not_in_file(to)) is not None},
    }


def explain(found: ExportedFile, plan: Plan, file: Path, to: FileKind) -> RenderableType:
    """The file, how it compares, and how it is run."""
    own = plan.inference.tolerance if plan.inference is not None else None
    allowed = f"{own:.2%} is allowed" if own is not None else f"{TOLERANCE:.2%} from the plan's is allowed"
    rows = [
        (
            "outputs",
            f"{_most(found, 'from_plan'):.2%} from those of the plan's model at most, "
            f"{_most(found, 'from_reference'):.2%} from those of the job as it stands; {allowed}",
        ),
        ("batches", _batches(found)),
        *_settings(plan, to),
        ("run it", _how(found, file, to)),
    ]
    return Group(Text(f"{file}: {size(found.num_bytes)}", style="bold"), rows_table(rows))


def _most(found: ExportedFile, name: str) -> float:
    return max(float(getattr(run, name)) for run in found.runs if run.refused is None)


def _batches(found: ExportedFile) -> str:
    sizes = _listed(found.sizes)
    if not found.refused:
        return f"of any size: {sizes} were run" if len(found.sizes) > 1 else f"of {sizes}, which was run"
    why = next(run.refused for run in found.runs if run.refused is not None)
    return f"of {sizes} alone, and not of {_listed(found.refused)}: {why}"


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def _settings(plan: Plan, to: FileKind) -> Iterator[tuple[str, str]]:
    kept = [one.describe() for one in plan.settings.chosen() if one.not_in_file(to) is None]
    yield "of the plan", ", ".join(kept) or "nothing beside the model: it is in fp32, as the task has it"
    for one in plan.settings.chosen():
        if (why := one.not_in_file(to)) is not None:
            yield "left out", f"{one.describe()}: {why}"


def _how(found: ExportedFile, file: Path, to: FileKind) -> str:
    if to == "pt2":
        return f'torch.export.load("{file}").module()(batch), without gradients'
    inputs = ", ".join(f'"{name}": …' for name in found.inputs)
    return f'onnxruntime.InferenceSession("{file}").run(None, {{{inputs}}}), of NumPy arrays'
