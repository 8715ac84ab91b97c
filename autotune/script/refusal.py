"""What a script's user is told, and how a script ends that is theirs to change."""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

from ..ranks import this_rank

PREPARE = "`autotune.prepare(model, optimizer, loader)`, with None for the loader where there is none"
"""The line by which a script names what a plan is for."""
_NO_MODEL = (
    f"no module was called that holds what the optimizer steps. Name it, once it is built: {PREPARE}; several as one: "
    "`autotune.prepare(nn.ModuleList([encoder, decoder]), optimizer, loader)`."
)
_CALLED_COMPILED = (
    "the script calls its model within a function that torch.compile compiles, where no plan can be put on it. Compile "
    "the model there, or leave compiling to the plan."
)


def why_no_model() -> str:
    """Why no call of a model was seen, though an optimizer steps."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _CALLED_COMPILED if dynamo is not None and dynamo.counters["frames"]["ok"] else _NO_MODEL


def is_success(error: BaseException | None) -> bool:
    """Whether a script came to its end as it should."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


class Refused(SystemExit):
    """The script ends, since it is the user's to change something."""

    def __init__(self, reason: str) -> None:
        super().__init__(2)
        self.reason = reason


def say(message: str) -> None:
    """Say something to the script's user, as the first of its processes."""
    if this_rank().rank == 0:
        print(f"autotune: {message}", file=sys.stderr, flush=True)


def refuse(reason: str) -> NoReturn:
    """End the script, and say why."""
    say(reason)
    raise Refused(reason)


@functools.cache
def tell_once(message: str) -> None:
    """Say something of a job that goes on."""
    say(message)
