"""The techniques: one file each, one line each in :class:`Settings`. Field order is the order of display."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ConfigDict

from ..internals import lost
from .allocator import Allocator
from .attention import Attention
from .batch import Batch
from .checkpointing import Checkpointing
from .compile import Compile
from .data_loading import DataLoading
from .frozen_weights import FrozenWeights
from .layers import Layers
from .memory_format import MemoryFormat
from .models.low_rank import LowRank
from .models.pruning import Pruning
from .models.variant import Variant
from .offload import Offload
from .optimizers.lazy_adam import LazyAdam
from .optimizers.optimizer import Optimizer
from .optimizers.optimizer_state import OptimizerState
from .optimizers.optimizer_step import OptimizerStep
from .optimizers.sparse_gradients import SparseGradients
from .optimizers.trained_weights import TrainedWeights
from .parallel import Parallel
from .precision import Kind, Precision
from .quantization import Quantization
from .reversible import Reversible
from .support.base import Effect, Exactness, FileKind, LoaderSpec, Program, Stage, Technique
from .support.environment import joined
from .support.facts import Device, Facts
from .tiles import Tiles

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "TECHNIQUES",
    "Device",
    "Effect",
    "Exactness",
    "Facts",
    "FileKind",
    "LoaderSpec",
    "Settings",
    "Stage",
    "Technique",
    "lost_techniques",
    "not_in_inference",
]


class Settings(BaseModel):
    """One choice per technique; what is left at the user's own setting has no row in YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: Batch | None = None
    precision: Precision = Precision()
    variant: Variant = Variant()
    pruning: Pruning = Pruning()
    low_rank: LowRank = LowRank()
    frozen_weights: FrozenWeights = FrozenWeights()
    quantization: Quantization = Quantization()
    attention: Attention = Attention()
    layers: Layers = Layers()
    tiles: Tiles = Tiles()
    reversible: Reversible = Reversible()
    checkpointing: Checkpointing = Checkpointing()
    offload: Offload = Offload()
    memory_format: MemoryFormat = MemoryFormat()
    compile: Compile = Compile()
    parallel: Parallel = Parallel()
    data_loading: DataLoading = DataLoading()
    optimizer: Optimizer = Optimizer()
    optimizer_state: OptimizerState = OptimizerState()
    trained_weights: TrainedWeights = TrainedWeights()
    optimizer_step: OptimizerStep = OptimizerStep()
    sparse_gradients: SparseGradients = SparseGradients()
    lazy_adam: LazyAdam = LazyAdam()
    allocator: Allocator = Allocator()

    def techniques(self) -> Iterator[Technique]:
        """Every technique with its chosen setting, in field order; the batch only where it is set."""
        return (value for name in type(self).model_fields if (value := getattr(self, name)) is not None)

    def having(self, *others: Technique) -> Settings:
        """These settings, and each of the others in the place of its own technique's."""
        return self.model_copy(update={one.name: one for one in others})

    def chosen(self) -> Iterator[Technique]:
        """Those that are not at the user's own setting."""
        return (one for one in self.techniques() if one.model_dump(exclude_defaults=True))

    def at(self, stage: Stage) -> Iterator[Technique]:
        """Those that come into force then."""
        return (technique for technique in self.techniques() if technique.stage is stage)

    def stock(self, *affecting: Effect) -> Settings:
        """With the user's own setting of every technique that affects nothing beside these; one that affects nothing at
        all is among them, since there is nothing to tell its settings apart by."""
        stock = Settings()
        others = (name for name, one in TECHNIQUES.items() if one.affects <= {*affecting})
        return self.model_copy(update={name: getattr(stock, name) for name in others})

    def affect(self, effect: Effect) -> bool:
        """Whether any setting that is not the user's own affects this."""
        return any(effect in one.affects for one in self.chosen())

    def on_task(self, task: Any) -> Any:
        """The task with these applied, as far as they bear on what it builds.

        Raises:
            PlanError: it does not build what they ask for.
        """
        for one in self.techniques():
            task = one.on_task(task)
        return task

    def part(self, effect: Effect) -> Settings:
        """The settings that affect this alone, everything else as the user has it."""
        return Settings(**{one.name: one for one in self.techniques() if effect in one.affects})

    def as_predicted(self, facts: Facts) -> Settings:
        """As far as predictions of memory and work tell configurations apart."""
        return self.model_copy(update={one.name: one.as_predicted(facts) for one in self.techniques()})

    def written(self) -> dict[str, Any]:
        """Plain data as a plan's file has them: without what lies in :meth:`files` beside it."""
        beside = {one.name: {*one.kept_beside} for one in self.techniques() if one.kept_beside}
        return self.model_dump(mode="json", exclude_defaults=True, exclude=beside)

    def files(self) -> dict[str, bytes]:
        """What is written beside a plan's file, by name."""
        return {name: content for one in self.techniques() for name, content in one.files().items()}

    def with_files(self, folder: Path) -> Settings:
        """With what lies beside their plan.

        Raises:
            PlanError: it does not lie there, or is another.
        """
        return self.model_copy(update={one.name: one.with_files(folder) for one in self.techniques()})

    def as_applied(self, model: nn.Module) -> Settings:
        """With all that was decided when these were put on a model."""
        return self.model_copy(update={one.name: one.as_applied(model) for one in self.techniques()})

    @property
    def reads_values(self) -> bool:
        """Whether what they do depends on the values of parameters."""
        return any(one.reads_values for one in self.techniques())

    def cached_bytes(self, facts: Facts) -> int:
        """What these keep on the device for as long as the process lives, beside the tensors of a step."""
        return sum(one.cached_bytes(facts) for one in self.techniques())

    def host_cached_bytes(self, facts: Facts) -> int:
        """The same in the host's memory, where that is not the device's."""
        return sum(one.host_cached_bytes(facts) for one in self.techniques())

    def num_loading(self, facts: Facts) -> int:
        """Processes that load data beside the training."""
        return sum(one.num_loading(facts) for one in self.techniques())

    def num_ready(self, facts: Facts) -> int:
        """Batches that these hold ready."""
        return sum(one.num_ready(facts) for one in self.techniques())

    def may_hold(self, step_bytes: int, facts: Facts) -> int:
        """What these may hold beyond what is predicted: :meth:`Technique.may_hold`."""
        return sum(one.may_hold(step_bytes, facts) for one in self.techniques())

    def times_charged(self, facts: Facts) -> int | None:
        """How many times the memory of one process is charged; None where it cannot be told from that."""
        times = [one.times_charged(facts) for one in self.techniques()]
        return None if None in times else math.prod(filter(None, times))

    def in_force(self, precision: Kind | None) -> Settings:
        """What these come to in a task that states a precision of its own."""
        return self.model_copy(update={"precision": self.precision.in_force(precision)})

    def conflict(self) -> str | None:
        """The first two that do not go together, in words; None where all do."""
        found = ((one.name, one.conflicts(self)) for one in self.techniques())
        return next((f"{name}: {reason}" for name, reason in found if reason is not None), None)

    def in_file(self, kind: FileKind) -> Settings:
        """Those that are part of a file of the model's program; everything else as the user has it."""
        stock = Settings()
        others = (one.name for one in self.chosen() if one.not_in_file(kind) is not None)
        return self.model_copy(update={name: getattr(stock, name) for name in others})

    def needs_training(self) -> str | None:
        """The first that a plan for inference cannot have, and why; None where it can have all."""
        found = ((one.name, one.beyond_inference()) for one in self.chosen())
        return next((f"{name}: {reason}, and the plan is for inference." for name, reason in found if reason), None)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """The variables that these settings need before the process starts, for a trial as for a job.

        Args:
            own: what the process starts with otherwise; its part of the same variables stays in them.

        Raises:
            PlanError: a library is not installed here, or two of them, or one and ``own``, ask for different values.
        """
        asked = ((f"settings.{technique.name}", technique.environment()) for technique in self.techniques())
        return joined(asked, own)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """What a forward pass and its loss run in."""
        stack = ExitStack()
        for technique in self.techniques():
            stack.enter_context(technique.forward_context(device_type))
        return stack

    def options_of(self, program: Program) -> dict[str, Any]:
        """A program's own options for these, by name: :meth:`Technique.options_of`."""
        return {name: value for one in self.techniques() for name, value in one.options_of(program).items()}

    def prior_gains(self) -> dict[str, tuple[float, float]]:
        """By technique, as far as anything is believed of it: :meth:`Technique.prior_gain`."""
        return {one.name: gain for one in self.techniques() if any(gain := one.prior_gain())}

    def canonical(self) -> str:
        """The same text for the same configuration: what a result is looked up by."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


def _techniques() -> Iterator[tuple[str, type[Technique]]]:
    for name, field in Settings.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Technique):
                yield name, kind


TECHNIQUES: dict[str, type[Technique]] = dict(_techniques())


def not_in_inference() -> dict[str, str]:
    """Those that a plan for inference leaves out, and why."""
    return {name: one.not_in_inference for name, one in TECHNIQUES.items() if one.not_in_inference is not None}


def lost_techniques() -> dict[str, str]:
    """Those that cannot be had with the libraries that this process has loaded, and why."""
    needs = {name: one.goes_by for name, one in TECHNIQUES.items() if one.goes_by is not None}
    return {name: reason for name, feature in needs.items() if (reason := lost(feature)) is not None}


"""Every technique by its name, in the order of :class:`Settings`."""
