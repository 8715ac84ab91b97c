"""What ``autotune export`` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..measure.exports.types import Dimension, ExportedFile, most_from_plan
from ..plan import Plan
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
        "tolerance_from_plan": most_from_plan(plan),
        "batch_sizes": list(found.sizes),
        "shapes": {
            name: [[one.least, one.most] for one in shape]
            for name, shape in zip(found.inputs, found.shapes, strict=True)
        },
        "conditions": list(found.conditions),
        "refused": [{"shapes": [list(shape) for shape in run.shapes], "why": run.refused} for run in found.refused],
        "kept": [one.name for one in plan.settings.chosen() if one.not_in_file(to) is None],
        "left_out": {one.name: why for one in plan.settings.chosen() if (why := one.not_in_file(to)) is not None},
    }


def explain(found: ExportedFile, plan: Plan, file: Path, to: FileKind) -> RenderableType:
    """The file, how it compares, and how it is run."""
    own = plan.inference.tolerance if plan.inference is not None else None
    allowed = f" ({own:.2%} is allowed)" if own is not None else ""
    rows = [
        (
            "outputs",
            f"{_most(found, 'from_plan'):.2%} from those of the plan's model at most ({most_from_plan(plan):.2%} is "
            f"allowed), {_most(found, 'from_reference'):.2%} from those of the job as it stands{allowed}",
        ),
        ("batches", _batches(found)),
        *([("only where", "; ".join(found.conditions))] if found.conditions else []),
        *(("input", f"{name}: {_shape(found, place)}") for place, name in enumerate(found.inputs)),
        *_settings(plan, to),
        ("run it", _how(found, file, to)),
    ]
    return Group(Text(f"{file}: {size(found.num_bytes)}", style="bold"), rows_table(rows))


def _most(found: ExportedFile, name: str) -> float:
    return max(float(getattr(run, name)) for run in found.runs if run.refused is None)


def _batches(found: ExportedFile) -> str:
    """The sizes that were run, whether others may be, and what did not run."""
    first = next((shape[0] for shape in found.shapes if shape), Dimension())
    run = f"{_listed(found.sizes)} {'were' if len(found.sizes) > 1 else 'was'} run"
    said = [f"{run}; the first dimension is {_sizes(first)}"]
    for shapes, why in {run.shapes: run.refused for run in found.refused}.items():
        said.append(f"{' and '.join(str(list(shape)) for shape in shapes)} did not run: {why}")
    return "; ".join(said)


def _shape(found: ExportedFile, place: int) -> str:
    """An input's dimensions, with the sizes that were run of those that ``_batches`` does not tell."""
    said = []
    for dim, one in enumerate(found.shapes[place]):
        sizes = sorted({run.shapes[place][dim] for run in found.runs if run.refused is None})
        is_told = dim == 0 or one.least == one.most
        said.append(_sizes(one) + ("" if is_told else f" (run: {', '.join(map(str, sizes))})"))
    return f"[{', '.join(said)}]"


def _sizes(one: Dimension) -> str:
    if one.least == one.most:
        return str(one.least)
    if one.most is not None:
        return f"{one.least} to {one.most}"
    return "open" if one.least <= 1 else f"open from {one.least}"


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def _settings(plan: Plan, to: FileKind) -> Iterator[tuple[str, str]]:
    kept = [one.describe() for one in plan.settings.chosen() if one.not_in_file(to) is None]
    yield "of the plan", ", ".join(kept) or "nothing beside the model, as the task has it"
    for one in plan.settings.chosen():
        if (why := one.not_in_file(to)) is not None:
            yield "left out", f"{one.describe()}: {why}"


def _how(found: ExportedFile, file: Path, to: FileKind) -> str:
    if to == "pt2":
        return f'torch.export.load("{file}").module()({found.given}), without gradients'
    inputs = ", ".join(f'"{name}": …' for name in found.inputs)
    return f'onnxruntime.InferenceSession("{file}").run(None, {{{inputs}}}), of NumPy arrays'
