"""A plan as flags of well-known scripts."""

from __future__ import annotations

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
        "# Flags say a part. All of the plan is in force by",
        "#     autotune run plan.yaml -- python train.py …",
        "# with the flags of the batch alone" + (f"; it applies {rows} itself." if rows else "."),
    ]
    return "\n".join(lines) + "\n"


def _of_transformers(plan: Plan) -> Iterator[str]:
    without_batch = plan.settings.model_copy(update={"batch": None})
    arguments = transformers.arguments(plan.model_copy(update={"settings": without_batch}))
    yield from (f"--{name} {value}" for name, value in arguments.items() if value is not None and value is not False)
    if plan.settings.optimizer.kind == "fused":
        yield "--optim adamw_torch_fused"
    if plan.settings.checkpointing.kind == "blocks":
        yield "--activation_checkpointing True"
        yield f"""--activation_checkpointing_kwargs '{{"every_n_layers": {plan.settings.checkpointing.every}}}'"""


def _of_accelerate(settings: Settings) -> Iterator[str]:
    if settings.precision.kind in ("bf16", "fp16"):
        yield f"--mixed_precision {settings.precision.kind}"


def _of_timm(plan: Plan) -> Iterator[str]:
    settings = plan.settings
    if plan.evaluation is not None and plan.evaluation.batch is not None:
        yield f"{TIMM.evaluation[0]} {plan.evaluation.batch}"
    if settings.precision.kind in ("bf16", "fp16"):
        yield f"--amp --amp-dtype {'bfloat16' if settings.precision.kind == 'bf16' else 'float16'}"
    if settings.memory_format.kind == "channels_last":
        yield "--channels-last"
    if settings.checkpointing.kind == "blocks" and settings.checkpointing.every == 1:
        yield "--grad-checkpointing"
    if settings.data_loading.num_workers is not None:
        yield f"--workers {settings.data_loading.num_workers}"


def _of_nanogpt(settings: Settings) -> Iterator[str]:
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if (dtype := dtypes.get(settings.precision.kind)) is not None:
        yield f"--dtype={dtype}"
    yield f"--compile={settings.compile.kind != 'none'}"
