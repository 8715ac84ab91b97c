"""torchrun and ``accelerate launch``: found in a command, and what they start by its options and their config file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import UserError

MODULE = ("-m", "--module")
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?)?(\.exe)?")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ENGINES = {"use_deepspeed": "DeepSpeed", "use_fsdp": "FSDP", "use_megatron_lm": "Megatron-LM", "tpu": "a TPU"}
"""By accelerate's flags."""
_KINDS = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "XLA": "a TPU", "TPU": "a TPU"}
"""By the ``distributed_type`` of its config file."""
_ONE_PROCESS = ("NO", "MULTI_CPU")


class Launch(NamedTuple):
    """A command that starts a script through torchrun or ``accelerate launch``."""

    place: int
    """In the command, of the word that their options follow."""
    script: int
    """In the command, of the script, or of ``-m``."""
    is_accelerate: bool
    options: Mapping[str, str]
    """``num_processes``: ``2``, as written, without dashes; empty for a flag without a value."""
    config: Mapping[str, Any]
    """Accelerate's own file: what its options leave open."""

    @property
    def no_python(self) -> str:
        """The flag that has it start any program."""
        return "--no_python" if self.is_accelerate else "--no-python"

    @property
    def num_machines(self) -> str:
        """As the user has it; empty where nothing is said."""
        by_option = self.options.get("num_machines" if self.is_accelerate else "nnodes")
        return by_option or str(self.config.get("num_machines") or "")

    def check_is_known(self) -> None:
        """
        Raises:
            UserError: it starts something else than Python processes that share a model by DistributedDataParallel.
        """
        if "no_python" in self.options:
            raise UserError(
                f"{self.no_python}: the script has to run under autotune's own Python launcher. Leave it out."
            )
        if "mpirun_hostfile" in self.options or self.config.get("mpirun_config"):
            raise UserError(
                "accelerate starts mpirun here, which is not known. Have torchrun start the processes: "
                "`ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 train.py`."
            )
        if (engine := self._engine()) is not None:
            raise UserError(
                f"accelerate trains with {engine} here, which changes the model and the optimizer itself, so that a "
                "plan could not be held to. Search with DistributedDataParallel (`--multi_gpu`, torchrun), or without "
                "the config file; or give a task file, with `parallel: {kind: fsdp, processes: 2}` in a space."
            )

    def _engine(self) -> str | None:
        if not self.is_accelerate or "cpu" in self.options:  # with which accelerate leaves engines aside
            return None
        named = next((name for flag, name in _ENGINES.items() if flag in self.options), None)
        kind = str(self.config.get("distributed_type", "")).upper()
        is_elsewhere = str(self.config.get("compute_environment")).upper() == "AMAZON_SAGEMAKER"
        return named or ("SageMaker" if is_elsewhere else _KINDS.get(kind))


def launch_of(command: Sequence[str]) -> Launch | None:
    """What a command starts its script by; None where that is neither torchrun nor ``accelerate launch``.

    Raises:
        UserError: no script was found behind it, or accelerate's config file cannot be read.
    """
    place = next((place for place, word in enumerate(command) if _starts_ranks(command[:place], word)), None)
    if place is None:
        return None
    name, words = command[place], command[place + 1 :]
    at = next((n for n, word in enumerate(words) if word in MODULE or word.endswith(".py")), None)
    if at is None or (words[at] in MODULE and at + 1 == len(words)):
        raise UserError(f"{' '.join(command)}: no script was found behind {name}. Name a file that ends in .py, or -m.")
    is_accelerate = "accelerate" in os.path.basename(name) or name == "launch"
    options = _options(words[:at])
    config = _config(options) if is_accelerate else {}
    found = Launch(place, place + 1 + at, is_accelerate, options, config)
    if name == "torch.distributed.launch" and "use_env" not in options:
        raise UserError(
            f"{name} gives the script --local-rank, which autotune's launcher does not pass on. Use torchrun, or add "
            "--use-env, and read LOCAL_RANK in the script."
        )
    return found


def num_processes(command: Sequence[str]) -> int | None:
    """How many a command starts on GPUs: one for each that there is where it states no number, which is None here.

    Raises:
        UserError: as :func:`launch_of`.
    """
    launch = launch_of(command)
    if launch is None:
        return 1
    if not launch.is_accelerate:
        stated = launch.options.get("nproc_per_node", "1")
    elif str(launch.config.get("distributed_type", "")).upper() in _ONE_PROCESS or "cpu" in launch.options:
        stated = "1"
    else:
        stated = launch.options.get("num_processes") or str(launch.config.get("num_processes") or "")
    return int(stated) if stated.isdecimal() else None


def other_than_asked(command: Sequence[str]) -> str | None:
    """Where ``accelerate launch`` starts one process though it was given a number of them: on a CPU; else None."""
    launch = launch_of(command)
    if launch is None or not launch.is_accelerate or "multi_gpu" in launch.options:
        return None
    asked = launch.options.get("num_processes") or str(launch.config.get("num_processes") or "")
    kind = str(launch.config.get("distributed_type", "")).upper()
    if not asked.isdecimal() or int(asked) < 2 or not ("cpu" in launch.options or kind in _ONE_PROCESS):
        return None
    return (
        f"`accelerate launch` starts one process on a CPU, whatever --num_processes says (here {asked}). For "
        f"{asked} of them: `ACCELERATE_USE_CPU=1 torchrun --nproc-per-node {asked} train.py`."
    )


def _starts_ranks(before: Sequence[str], word: str) -> bool:
    """Whether the options of torchrun, or of ``accelerate launch``, follow this word; both are modules too."""
    if word in _MODULES:
        return [*before[-1:]] == ["-m"]
    if any(is_python(one) for one in before):
        return False  # an argument of a script's
    names = [os.path.basename(one) for one in (*before[-1:], word)]
    return names[-1] in ("torchrun", "accelerate-launch") or names == ["accelerate", "launch"]


def _options(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        after = words[place + 1] if place + 1 < len(words) else ""
        found[flag.lstrip("-").replace("-", "_")] = value or ("" if after.startswith("-") else after)
    return found


def _config(options: Mapping[str, str]) -> dict[str, Any]:
    """Accelerate's: the file that is named, or, but with ``--cpu``, the one that ``accelerate config`` has written."""
    named = options.get("config_file")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "huggingface")
    own = [Path(os.environ.get("HF_HOME", cache), "accelerate", f"default_config.{end}") for end in ("yaml", "json")]
    path = Path(named) if named else next((one for one in own if one.is_file() and "cpu" not in options), None)
    if path is None:
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON as well
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: accelerate's config file cannot be read: {reason}.") from None
    return data if isinstance(data, dict) else {}


def is_python(word: str) -> bool:
    """Whether it is what Python is called: ``/usr/bin/python3.11``."""
    return _PYTHON.fullmatch(os.path.basename(word)) is not None
