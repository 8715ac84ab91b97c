"""``autotune show plan.yaml --for …``: what to write in another framework's job."""

from __future__ import annotations

import json
import sys

import pytest
from conformance import plan_of

from autotune.integrations import flags
from autotune.integrations.transformers import written
from autotune.script.command import own_batch
from autotune.script.flags import with_placeholders
from autotune.script.parsers import NANOGPT, TIMM, TRAINING_ARGUMENTS

PLAN = plan_of(
    precision={"kind": "bf16"},
    checkpointing={"kind": "blocks", "every": 2},
    data_loading={"num_workers": 2},
    optimizer={"kind": "fused"},
)


@pytest.fixture
def shown(here, tmp_path):
    PLAN.save(tmp_path / "plan.yaml")

    def show(*options: str) -> str:
        done = here("show", "plan.yaml", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return show


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning", "ray_train"])
def test_code_for_a_framework(framework, shown):
    text = shown("--for", framework)
    assert framework in text
    accumulates = {"lightning": "accumulate_grad_batches=3", "ray_train": "number % 3 == 0"}
    assert accumulates.get(framework, "gradient_accumulation_steps=3") in text
    compile(text, "job.py", "exec")


def test_flags_of_known_parsers():
    lines = flags.written(PLAN).splitlines()
    assert (
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 3 --bf16 True "
        "--activation_checkpointing True "
        """--activation_checkpointing_kwargs '{"every_n_layers": 2}' --optim adamw_torch_fused"""
    ) in lines
    assert "--gradient_accumulation_steps 3 --mixed_precision bf16" in lines
    assert "--batch-size 2 --grad-accum-steps 3 --amp --amp-dtype bfloat16 --workers 2" in lines
    assert "--batch_size=2 --gradient_accumulation_steps=3 --dtype=bfloat16 --compile=False" in lines


@pytest.mark.parametrize("parser", [TRAINING_ARGUMENTS, TIMM, NANOGPT])
def test_what_is_written_for_a_parser_is_read_again(parser):
    words = " ".join(parser.flags(PLAN.settings.batch)).split()
    found = with_placeholders([sys.executable, "train.py", *words])
    assert found is not None
    assert own_batch(found) == PLAN.settings.batch


def test_flags_of_several_processes_are_each_ones():
    """timm's ``--batch-size`` is one process's, as TrainingArguments' is."""
    text = flags.written(plan_of(batch={"micro": 2, "accumulate": 6}, parallel={"kind": "ddp", "processes": 2}))
    assert "--batch-size 2 --grad-accum-steps 3" in text
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 3" in text


def test_as_json(shown):
    found = json.loads(shown("--for", "transformers", "--json"))
    assert (found["for"], found["written"]) == ("transformers", written(PLAN))
