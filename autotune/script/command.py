"""The command that starts a script: its Python found, the launcher put in front, the plan's batch filled in."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ..distribution import requirement
from ..errors import UserError
from ..techniques import TECHNIQUES, Settings
from ..techniques.batch import Batch
from .distributed_launch import MODULE, is_python, launch_of

BATCH = ("batch.micro", "batch.accumulate")
"""Placeholders of what a script trains on, in braces."""
TOKENS = "batch.tokens"
"""Of the tokens of a forward pass, where a script makes its batches by these."""
EVALUATION = "evaluation.batch"
"""Of the samples that it evaluates at once, in each process."""
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\.([a-z_]+)(?:=(\d+))?\}")
ADD_PATH = "--add-path"
"""Tells the launcher to put the script's folder first on ``sys.path``, as Python does."""
FENCES = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Variables of a script's trials, where the user sets no other: what trackers and hubs would be told stays here."""
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "srun", "fabric", "composer")
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.", "deepspeed.")
_WITH_VALUE = ("W", "X")
"""Python's own options of one letter that take a value."""
_FIRST_LINE = 512
"""Bytes of a file's first line, which names what runs it."""


def under_launcher(command: Sequence[str]) -> list[str] | None:
    """The command with the launcher between Python and the script: ``python -u train.py`` becomes ``python -u -P -m
    autotune.script train.py``; what stands before Python (``numactl``, ``uv run``) stays there. So does a script whose
    first line names Python: ``./train.py``, ``litgpt pretrain``. torchrun and ``accelerate launch`` start each process
    under the launcher.

    Args:
        command: as the user starts it.

    Returns:
        None where the command runs no script or module by Python.

    Raises:
        UserError: it starts several processes in another way, or its Python has no autotune.
    """
    if (launched := _each_under_launcher(command)) is not None:
        return launched
    _refuse_several(command)
    if not any(map(is_python, command)):
        command = [*_by_first_line(command[0]), *command[1:]]
    start = next((place for place, word in enumerate(command) if is_python(word)), None)
    if start is None:
        return None
    python, words = command[start], list(command[start + 1 :])
    options = _own_options(words)
    rest = words[len(options) :]
    if not rest or rest[0] in ("-c", "-") or (rest[0].startswith("-") and rest[0] != "-m"):
        return None
    if rest[0] == "-m" and len(rest) > 1:
        _check_is_one(rest[1], f"{rest[1]}.".startswith(_LAUNCHER_MODULES))
    _check_has_autotune(python, tuple(options))
    safe = [] if any(option in ("-P", "-I") for option in options) else [ADD_PATH]
    return [*command[:start], python, *options, "-P", "-m", "autotune.script", *safe, *rest]


def _each_under_launcher(command: Sequence[str]) -> list[str] | None:
    """``torchrun --nproc-per-node 2 train.py`` with the launcher in each process; None for any other command."""
    launch = launch_of(command)
    if launch is None:
        return None
    launch.check_is_known()
    before, after = command[: launch.script], command[launch.script :]
    script = ["-m", *after[1:]] if after[0] in MODULE else after
    name = command[launch.place]
    starter = next((word for word in before if is_python(word)), command[launch.place - (name == "launch")])
    beside = os.path.join(os.path.dirname(shutil.which(starter) or ""), "python")
    python = beside if os.path.isfile(beside) else sys.executable
    _check_has_autotune(python, ())
    each = [launch.no_python, python, "-u", "-P", "-m", "autotune.script", ADD_PATH]
    return [*before, *each, *script]


def _by_first_line(word: str) -> list[str]:
    """A file that is run by itself, behind the Python that its first line names; any other program as it is."""
    found = shutil.which(word)
    if found is None:
        return [word]
    with open(found, "rb") as file:
        line = file.readline(_FIRST_LINE)
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    while words and os.path.basename(words[0]) in ("env", "-S"):
        words = words[1:]
    return [*words, found] if words and is_python(words[0]) else [word]


def _own_options(words: list[str]) -> list[str]:
    """Python's own, up to the script or ``-m``."""
    found: list[str] = []
    while len(found) < len(words) and words[len(found)].startswith("-"):
        word = words[len(found)]
        if word in ("-", "-c", "-m"):
            break
        takes = (word[1:2] in _WITH_VALUE and len(word) == 2) or word == "--check-hash-based-pycs"
        found.extend(words[len(found) : len(found) + 1 + takes])
    return found


def _refuse_several(command: Sequence[str]) -> None:
    for word in command:
        name = os.path.basename(word)
        if not name.isidentifier() or is_python(name):
            return
        _check_is_one(name, name in _LAUNCHERS)


def _check_is_one(name: str, starts_several: bool) -> None:
    if starts_several:
        raise UserError(
            f"{name} starts several processes, and is not known. Those of torchrun and `accelerate launch` are: start "
            "the script by one of them, or in one process by `python train.py`; or give a task file, whose trials may "
            "have several (`parallel`, in a space)."
        )


@functools.cache
def _check_has_autotune(python: str, options: tuple[str, ...]) -> None:
    found = shutil.which(python)
    if found is None or os.path.abspath(found) == os.path.abspath(sys.executable):
        return
    tried = subprocess.run([found, *options, "-P", "-c", "import autotune.script"], capture_output=True, text=True)
    if tried.returncode != 0:
        reason = (tried.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise UserError(
            f"{python}: this Python cannot import autotune ({reason}), which applies the plan in the script's process. "
            f"Install it there: `{python} -m pip install {requirement()}`."
        )


def placeholders(command: Sequence[str]) -> frozenset[str]:
    """Of :data:`BATCH` and :data:`EVALUATION`, what the command has in braces, with the job's own value or without:
    ``{batch.micro=32}``.

    Raises:
        UserError: it has another technique's in braces.
    """
    known = {*BATCH, TOKENS, EVALUATION}
    found = {match for word in command for match in _PLACEHOLDER.findall(word)}
    names = {f"{part}.{key}" for part, key, _ in found if part in (*TECHNIQUES, "evaluation")}
    if unknown := sorted(names - known):
        raise UserError(
            f"{{{unknown[0]}}}: a command may have {', '.join(f'{{{name}}}' for name in sorted(known))} in it, which "
            "a script's own flags take. Everything else is applied without a flag: leave it out."
        )
    return frozenset(names)


def _stated(command: Sequence[str]) -> dict[str, int]:
    """The job's own values, of the placeholders that have one."""
    pairs = (match for word in command for match in _PLACEHOLDER.findall(word))
    return {f"{part}.{key}": int(value) for part, key, value in pairs if value}


def own_evaluation(command: Sequence[str]) -> int | None:
    """The job's own evaluation batch, as its placeholder states it: ``{evaluation.batch=64}``; None without one.

    Raises:
        UserError: it states none.
    """
    if EVALUATION not in placeholders(command):
        return None
    if not (own := _stated(command).get(EVALUATION)):
        raise UserError(
            "{evaluation.batch}: how many samples does the job evaluate at once today? Write it into the braces: "
            "{evaluation.batch=64}."
        )
    return own


def own_batch(command: Sequence[str], effective: int | None = None) -> Batch | None:
    """The job's own batch, as its placeholders state it: ``{batch.micro=32}``; None where there are none.

    Args:
        command: with its placeholders.
        effective: samples in an optimizer step, where that is said elsewhere.

    Raises:
        UserError: they state none.
    """
    if not (names := placeholders(command) & {*BATCH, TOKENS}):
        return None
    stated = _stated(command)
    micro, accumulate = stated.get("batch.micro"), stated.get("batch.accumulate", 1)
    if TOKENS in names:
        if not (tokens := stated.get(TOKENS)):
            if effective is not None:
                return None
            raise UserError(
                "{batch.tokens}: how many tokens has a batch of the job today, at most? Write it into the braces: "
                "{batch.tokens=4096}."
            )
        return Batch(micro=1, accumulate=accumulate, tokens=tokens, flag=token_flag(command))
    if "batch.micro" in names and micro is None:
        if effective is None:
            raise UserError(
                "{batch.micro}: what does the job train with today? Write it into the braces, {batch.micro=32}, and "
                "{batch.accumulate=4} where it accumulates; or give --effective-batch."
            )
        micro = effective // accumulate
    return Batch(micro=micro or 1, accumulate=accumulate)


def token_flag(command: Sequence[str]) -> str:
    """The flag that has the placeholder of tokens: ``--max-tokens``."""
    place = next(place for place, word in enumerate(command) if TOKENS in placeholders([word]))
    before = command[place].partition("{")[0]
    return before.removesuffix("=") or command[place - 1]


def script_name(command: Sequence[str]) -> str:
    """Name of the script that a command runs, for messages and file names: ``train.py``.

    Raises:
        UserError: no script or module that Python runs.
    """
    launched = under_launcher(command)
    _check_is_on_one_machine(command)
    if launched is None:
        raise UserError(
            f"{' '.join(command)}: no script that Python runs. Write `autotune search -- python train.py --its "
            "--flags`; `autotune search model.py` is for a task file."
        )
    rest = launched[launched.index("autotune.script") + 1 :]
    words = rest[1:] if rest[0] == ADD_PATH else rest
    return words[1] if words[0] == "-m" else words[0]


def _check_is_on_one_machine(command: Sequence[str]) -> None:
    launch = launch_of(command)
    if launch is not None and launch.num_machines not in ("", "1", "1:1"):
        raise UserError(
            f"{' '.join(command)}: a trial runs on one machine, and this starts processes on {launch.num_machines}. "
            "Search with as many processes as fit on one; `autotune run` takes a plan of as many as there are in all."
        )


def own_share(settings: Settings) -> Batch | None:
    """What each process of a script is told of a plan's batch; None where the plan states none."""
    batch, parallel = settings.batch, settings.parallel
    if batch is None or batch.effective is not None or parallel.effective is not None:  # no flags say these
        return batch
    return batch.share(parallel.num_shares)


def filled(command: Sequence[str], batch: Batch | None, evaluation: int | None = None) -> list[str]:
    """The command with a plan's batch in place of its placeholders.

    Args:
        command: with its placeholders.
        batch: of one process.
        evaluation: samples that it evaluates at once; None is what the placeholder states.

    Raises:
        UserError: the plan has no batch, or one that a script cannot be told of.
    """
    values = {EVALUATION: evaluation or own_evaluation(command)}
    if names := placeholders(command) & {*BATCH, TOKENS}:
        values |= _values_of(batch, TOKENS in names)

    def value(match: re.Match[str]) -> str:
        return str(values.get(f"{match[1]}.{match[2]}", match[0]))

    return [_PLACEHOLDER.sub(value, word) for word in command]


def _values_of(batch: Batch | None, in_tokens: bool) -> dict[str, int | None]:
    if batch is None:
        raise UserError("the command has {batch.micro} or {batch.accumulate} in it, but the plan states no batch.")
    if in_tokens != (batch.flag is not None):
        states = "tokens by a flag" if batch.flag is not None else "samples"
        raise UserError(
            f"the plan states {states} ({batch.describe()}), and the command has "
            f"{'{batch.tokens}' if in_tokens else '{batch.micro} or {batch.accumulate} without {batch.tokens}'} in it. "
            "Write the flags as they stood in the search: the plan's notes have them."
        )
    if batch.effective is not None:
        raise UserError(
            f"the plan's last micro-batch is smaller ({batch.describe()}), which {{batch.micro}} and "
            "{batch.accumulate} cannot say. Search again with a batch size that is a power of two."
        )
    return {"batch.micro": batch.micro, "batch.accumulate": batch.accumulate, TOKENS: batch.tokens}
