"""torchrun and `accelerate launch`, by their options and config file: what they start, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest

from autotune.errors import UserError
from autotune.script.command import script_name, under_launcher
from autotune.script.distributed_launch import other_than_asked

CONFIG = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}


@pytest.fixture(autouse=True)
def _no_config_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


@pytest.fixture
def config(tmp_path):
    """Options that name a config file of accelerate's."""

    def write(**fields):
        path = tmp_path / f"{sum(1 for _ in tmp_path.iterdir())}.yaml"
        path.write_text(json.dumps(CONFIG | fields))  # JSON is YAML
        return ("--config_file", str(path))

    return write


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (("--use_deepspeed", "--zero_stage", "2"), "DeepSpeed"),
        (("--use-fsdp",), "FSDP"),
        (("--use_megatron_lm",), "Megatron-LM"),
        (("--tpu",), "a TPU"),
    ],
)
def test_what_changes_model_and_optimizer_itself_is_refused(options, engine):
    with pytest.raises(UserError, match=f"accelerate trains with {engine} here"):
        under_launcher(["accelerate", "launch", *options, "train.py"])


@pytest.mark.parametrize(("kind", "engine"), [("DEEPSPEED", "DeepSpeed"), ("FSDP", "FSDP"), ("XLA", "a TPU")])
def test_so_it_is_where_the_config_file_says_it(config, kind, engine):
    options = config(distributed_type=kind)
    with pytest.raises(UserError, match=f"accelerate trains with {engine} here"):
        under_launcher(["accelerate", "launch", *options, "train.py"])
    under_launcher(["accelerate", "launch", "--cpu", *options, "train.py"])  # where accelerate leaves it aside
    under_launcher(["accelerate", "launch", *config(), "train.py"])


def test_sagemaker_mpirun_and_other_programs_are_refused(config):
    for options, reason in (
        (config(compute_environment="AMAZON_SAGEMAKER"), "SageMaker"),
        (("--cpu", "--mpirun_hostfile", "hosts"), "accelerate starts mpirun here"),
        (config(mpirun_config={"mpirun_ccl": "1"}, distributed_type="MULTI_CPU"), "accelerate starts mpirun here"),
        (("--no_python", "python"), "--no_python: the script has to run under autotune's own"),
    ):
        with pytest.raises(UserError, match=reason):
            under_launcher(["accelerate", "launch", *options, "train.py"])


def test_the_config_file_that_accelerate_has_written_itself_is_read(tmp_path):
    """But with --cpu, as by accelerate."""
    own = tmp_path / "huggingface" / "accelerate"
    own.mkdir(parents=True)
    (own / "default_config.yaml").write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(UserError, match="DeepSpeed"):
        under_launcher(["accelerate", "launch", "train.py"])
    under_launcher(["accelerate", "launch", "--cpu", "train.py"])


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    for name in ("bad.yaml", "none.yaml"):
        with pytest.raises(UserError, match=f"{name}: accelerate's config file cannot be read"):
            under_launcher(["accelerate", "launch", "--config_file", str(tmp_path / name), "train.py"])


def test_several_machines_in_a_config_file_are_for_run_alone(config):
    command = ["accelerate", "launch", *config(num_machines=2), "train.py"]
    with pytest.raises(UserError, match="a trial runs on one machine"):
        script_name(command)
    under_launcher(command)


def test_a_scripts_own_options_are_none_of_the_launchers():
    assert script_name(["torchrun", "--nproc-per-node=2", "train.py", "--nnodes", "3", "--no-python"]) == "train.py"


def test_local_rank_as_an_argument_is_refused_with_what_to_do():
    before = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    with pytest.raises(UserError, match="Use torchrun, or add --use-env"):
        under_launcher([*before, "train.py"])
    assert script_name([*before, "--use_env", "train.py"]) == "train.py"


def test_the_one_process_that_accelerate_starts_on_a_cpu_is_told(config):
    """Whatever number it is given."""
    launch = ["accelerate", "launch"]
    for command in (
        [*launch, "--cpu", "--num_processes", "2", "train.py"],
        ["accelerate-launch", "--cpu", "--num-processes=2", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu", "train.py"],
        [*launch, *config(distributed_type="MULTI_CPU"), "train.py"],
    ):
        assert "starts one process on a CPU, whatever --num_processes says (here 2)" in other_than_asked(command)
    for command in (
        [*launch, "--cpu", "train.py"],
        [*launch, "--cpu", "--num_processes", "1", "train.py"],
        [*launch, "--multi_gpu", "--num_processes", "2", "train.py"],
        [*launch, *config(), "train.py"],
        ["torchrun", "--nproc-per-node", "2", "train.py"],
        ["python", "train.py", "--cpu", "--num_processes", "2"],
    ):
        assert other_than_asked(command) is None
