"""A plan as flags of well-known scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from ..plan import Plan
from ..script.parsers import ACCELERATE, NANOGPT, TIMM, TRAINING_ARGUMENTS
from ..techniques import Settings
from . import transformers
from .checks import even_batch


def written(plan: Plan) -> str:
    """The flags of each parser that is known, and what none of them says.

    Raises:
        PlanError: the plan is in uneven micro-batches.
    """
    settings, batch = plan.settings, even_batch(plan, "a script")
    known = {
        "a script that parses transformers.TrainingArguments": (TRAINING_ARGUMENTS, _of_transformers(plan)),
        "accelerate launch (a script that takes both from its Accelerator)": (ACCELERATE, _of_accelerate(settings)),
        "timm's train.py": (TIMM, _of_timm(plan)),
        "nanoGPT's train.py": (NANOGPT, _of_nanogpt(settings)),
    }
    parsers = {name: " ".join([*parser.flags(batch), *others]) for name, (parser, others) in known.items()}
    lines = [line for name, flags in parsers.items() if flags for line in (f"# {name}", flags, "")]
    rows = ", ".join(row.name for row in settings.chosen() if row.name != "batch")
    lines += [
        "# Flags say a part. All of the plan is applied by",
        "#     autotune run plan.yaml -- python train.py …",
        "# with the flags of the batch alone" + (f"; it applies {rows} itself." if rows else "."),
    ]
    return "\n".join(lines) + "\n"


def _of_transformers(plan: Plan) -> Iterator[str]:
    without_batch = plan.settings.model_copy(update={"batch": None})
    arguments = transformers.arguments(plan.model_copy(update={"settings": without_batch}))
    arguments = {name: value for name, value in arguments.items() if value is not None and value is not False}
    for name, value in (arguments | plan.settings.options_of("TrainingArguments")).items():
        yield f"--{name} {shlex.quote(json.dumps(value)) if isinstance(value, dict) else value}"


def _of_accelerate(settings: Settings) -> Iterator[str]:
    yield from (f"--{name} {value}" for name, value in settings.options_of("Accelerator").items() if value != "no")


def _of_timm(plan: Plan) -> Iterator[str]:
    if plan.evaluation_batch is not None:
        yield f"{TIMM.evaluation[0]} {plan.evaluation_batch}"
    for name, value in plan.settings.options_of("timm").items():
        yield f"--{name}" if value is True else f"--{name} {value}"


def _of_nanogpt(settings: Settings) -> Iterator[str]:
    yield from (f"--{name}={value}" for name, value in settings.options_of("nanoGPT").items())
