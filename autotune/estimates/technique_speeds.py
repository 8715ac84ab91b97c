"""``with_techniques``: what some techniques take that no trace tells, measured through their own code, in a law."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, UserError
from ..task import Task
from ..techniques import Settings, Stage, Technique
from ..techniques.offload import Offload
from ..techniques.optimizers.optimizer_state import OptimizerState
from ..techniques.support.apart import step_unseen
from ..techniques.support.bits.kept_state import LEAST
from ..techniques.support.disk.saved_to_disk import Disk
from ..training.apply_plan import build_model
from ..training.skip_init import skip_init
from .time_law import SHARE, copied_bytes, least_s, power_of_two, where_of
from .tracing.fake_ops import Target
from .types import StepLaw, TimeLaw

_MOST_S = 0.02
"""Of each figure, seconds after which no further run is begun: there are several of each setting."""
_FEW, _MANY = LEAST, 8
"""Elements of small parameters, and how many are stepped at once."""
_COLUMNS = 64
_LARGE: dict[Target, int] = {"cpu": 2**16, "cuda": 2**24}
"""Most elements of a large one. On a CPU so few, as bytes of a file's piece, that no allocator takes new pages for
them: those are counted apart."""
_PIECE_BYTES = 2**19
_BYTES_EACH = 16
"""An element in fp32 with its gradient and two averages."""


def with_techniques(law: TimeLaw, target: Target, task: Task, choices: Sequence[Technique], peak_bytes: int) -> TimeLaw:
    """A law with the speeds of a file, where offload is among the choices, and with what each way to step the optimizer
    takes more than its own. Each is measured once in a process, in tens of milliseconds, several
    times that on a busy machine.

    Args:
        law: of this machine.
        target: the device.
        task: whose optimizer is stepped; its model is built without values.
        choices: of techniques that add up.
        peak_bytes: of the job's tensors: what is measured takes less.
    """
    if any(isinstance(one, Offload) and one.to == "disk" for one in choices):
        write_s, read_s = file_speeds(copied_bytes("cpu", peak_bytes))
        law = law.model_copy(update={"write_byte_s": write_s, "read_byte_s": read_s})
    ways = [one for one in choices if one.stage is Stage.OPTIMIZER]
    if not ways:
        return law
    optimizer = task.make_optimizer(build_model(skip_init(task)))
    return law.model_copy(update={"steps": tuple(step_laws(target, optimizer, ways, peak_bytes))})


@cache
def file_speeds(num_bytes: int) -> tuple[float, float]:
    """Seconds for a byte that offload writes to its file, and for one that it reads, as long as the system keeps the
    file in memory that is free; 0 where there can be none.

    Args:
        num_bytes: that are written at once, in pieces.
    """
    pieces = [torch.ones(_PIECE_BYTES, dtype=torch.uint8) for _ in range(num_bytes // _PIECE_BYTES)]
    pack, numbers = Disk().saving(nn.Module()), itertools.cycle(range(len(pieces)))

    def write() -> None:
        number = next(numbers)
        packed[number] = None  # its place in the file is free
        packed[number] = pack(pieces[number])

    try:
        packed = list(map(pack, pieces))
        write_s = least_s(write, "cpu", _MOST_S)
        read_s = least_s(lambda: packed[next(numbers)].tensor(), "cpu", _MOST_S)
    except (UserError, OSError):  # the disk is full, or there is none to write to
        return 0.0, 0.0
    return write_s / _PIECE_BYTES, read_s / _PIECE_BYTES


def step_laws(
    target: Target, optimizer: torch.optim.Optimizer, ways: Iterable[Technique], peak_bytes: int
) -> Iterable[StepLaw]:
    """What each of these settings adds to a step of an optimizer, of those that it can have.

    Args:
        target: the device.
        optimizer: its class and options count.
        ways: of techniques that change its step.
        peak_bytes: as :func:`with_techniques`.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    largest = max(trained, key=torch.Tensor.numel, default=None)
    if largest is None:
        return
    elements = min(_LARGE[target], largest.numel(), peak_bytes // SHARE // _BYTES_EACH)
    group = max(optimizer.param_groups, key=lambda one: sum(p.numel() for p in one["params"]))
    options = {name: value for name, value in group.items() if name != "params"}
    total = sum(p.numel() for p in trained)
    bare = copy.copy(optimizer)  # its class and hooks of none; a cache keeps it, and the model is to go
    bare.state, bare.param_groups = defaultdict(dict), []
    sample = _Sample(bare, options, repr(options), type(optimizer), largest.dtype, target, where_of(target), total)
    sizes = (_FEW, max(4 * _FEW, power_of_two(elements)))
    for one in ways:
        with suppress(PlanError, RuntimeError):  # SparseAdam takes no dense gradients
            with_it = Settings().having(one)
            few, large = (
                step_seconds(sample, with_it, size) - step_seconds(sample, Settings(), size) for size in sizes
            )
            element_s = max(0.0, (large - few) / (sizes[1] - sizes[0]))
            yield StepLaw(
                settings=with_it,
                parameter_s=max(0.0, few - _FEW * element_s),
                element_s=element_s,
                least=LEAST if isinstance(one, OptimizerState) else 0,
            )


@dataclass(frozen=True)
class _Sample:
    """Parameters to be stepped by an optimizer like a job's."""

    optimizer: torch.optim.Optimizer = field(compare=False)
    options: dict[str, Any] = field(compare=False)
    """Of its parameters."""
    named: str
    """The same in words."""
    kind: type[torch.optim.Optimizer]
    dtype: torch.dtype
    target: Target
    where: int
    total: int
    """Elements of all that it trains, by which the size goes of what is stepped at once."""

    def stepped(self, settings: Settings, size: int, many: int) -> Callable[[], None]:
        """A step of so many parameters of so many elements, backward of a product with each included.

        Raises:
            PlanError: the optimizer cannot have these settings.
        """
        made = copy.copy(self.optimizer)
        numbers = torch.ones(size, dtype=self.dtype, device=self.target)
        weights = [nn.Parameter(numbers.view(-1, _COLUMNS).clone()) for _ in range(many)]
        others = nn.Parameter(numbers[:1].expand(self.total))  # never stepped
        made.state, made.param_groups = defaultdict(dict), [{**self.options, "params": [*weights, others]}]
        for one in settings.chosen():
            made = one.on_optimizer(made)

        def run() -> None:
            for weight in weights:
                (weight.view(-1) @ numbers).backward()  # type: ignore[no-untyped-call]
            step_unseen(made)
            made.zero_grad()

        run()  # makes the state
        return run


@cache
def step_seconds(sample: _Sample, settings: Settings, size: int) -> float:
    """Seconds for a parameter of so many elements.

    Raises:
        PlanError: the optimizer cannot have these settings.
    """
    many = _MANY if size == _FEW else 1
    with torch.enable_grad(), torch.autocast(sample.target, enabled=False):
        return least_s(sample.stepped(settings, size, many), sample.target, _MOST_S) / many
