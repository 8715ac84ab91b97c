"""What a technique is: a frozen config and the hooks by which it changes a training stack.

Hooks import torch inside the function, so that reading a plan, or driving a search, needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    import torch
    from torch import nn

    from . import Settings
    from .facts import Facts

__all__ = ["Effect", "Exactness", "LoaderSpec", "Run", "Stage", "Technique"]

Run = Callable[["nn.Module"], Any]
"""Runs a model."""
Effect = Literal["tensors", "layout", "code", "samples", "update", "loader", "process", "function"]
"""``tensors``: which tensors a step makes, and how long they are kept. ``layout``: the order of their elements.
``code``: memory of the kernels and modules that are in use. ``samples``: how many a forward pass sees. ``update``: how
long the optimizer's step takes, and what it needs for a moment. ``loader``: how long data take, and what loads them.
``process``: what is charged beside all this. ``function``: what the model computes, so that its quality is held against
the reference's."""
Exactness = Literal["exact", "rounding", "lossy"]
"""``exact``: same arithmetic up to reordering. ``rounding``: lower precision. ``lossy``: changes the function."""


class Stage(IntEnum):
    """When a technique comes into force: ``apply`` goes through these in order."""

    PROCESS = auto()
    """Before the process starts."""
    MODEL = auto()
    """The task builds another model."""
    PRUNING = auto()
    """Parameters go."""
    LOW_RANK = auto()
    """Weights that are left become products of two."""
    LAYERS = auto()
    """Layers become others."""
    CHECKPOINTING = auto()
    """Blocks, with the layers that they have now, are wrapped."""
    DEVICE = auto()
    """The model is moved to its device, then the order of its tensors' elements changes."""
    PRECISION = auto()
    """What is computed in."""
    COMPILE = auto()
    """Whatever the model is by now becomes one program."""
    OPTIMIZER = auto()
    """It has been built from the model's parameters."""
    LOADER = auto()
    """What feeds it all."""


@dataclass(frozen=True)
class LoaderSpec:
    """What a DataLoader is about to be built from; ``on_loader`` returns a changed copy."""

    dataset: Any
    """Map-style or iterable dataset."""
    collate: Callable[[list[Any]], Any] | None
    """The user's collate function; None is torch's default_collate."""
    options: dict[str, Any]
    """DataLoader keywords other than dataset, batching, sampler and collate_fn."""
    device: torch.device
    """Where batches go."""
    user_dataset: Any
    """The dataset as the user built it, which a sampler is built from; ``dataset`` may be a cache of it."""


class Technique(BaseModel):
    """One way to save memory or time.

    A default instance (``Precision()``) is the user's own setting and does nothing; such a technique has no row in a
    plan. ``Batch`` alone has no default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ClassVar[str]
    """The key in a plan's settings and in a search space."""
    stage: ClassVar[Stage]
    """Its place in ``apply``."""
    affects: ClassVar[frozenset[Effect]]
    """What a setting of it changes beside the time of a step: what predictions and searches go by."""
    ordered: ClassVar[bool] = False
    """Whether ``choices`` lie on a line (small to large), so that a sampler may interpolate."""
    trades_time: ClassVar[bool] = False
    """Whether it only ever buys memory with time: no first guess where the reference fits."""
    directive: ClassVar[Technique | None] = None
    """What a search space may list in place of a setting: that the search finds it."""
    purposes: ClassVar[Mapping[str, str]] = {}
    """What a setting does, in one sentence, by its ``kind``."""
    kept_beside: ClassVar[frozenset[str]] = frozenset()
    """Fields that a plan's file does not hold: :meth:`files` lie beside it."""

    @model_validator(mode="before")
    @classmethod
    def _check_is_mapping(cls, data: Any) -> Any:
        if not isinstance(data, dict | Technique):
            raise ValueError(f"write a mapping: {cls.written(data)}")
        return data

    @classmethod
    def written(cls, value: Any) -> str:
        """How ``value`` is to be written: ``{kind: bf16}``; where it is none of the kinds, each of them."""
        first, field = next(iter(cls.model_fields.items()))
        kinds = (get_args(field.annotation) if first == "kind" else ()) or ("…",)
        return ", ".join(f"{{{first}: {kind}}}" for kind in ([value] if value in kinds else kinds))

    def describe(self, facts: Facts | None = None) -> str:
        """This setting in a few words: its kind, and what else is chosen.

        Args:
            facts: add what only the task knows, such as the number of blocks.
        """
        chosen = self.model_dump(exclude_defaults=True)
        kind = chosen.pop("kind", None)
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items())
        return " ".join(filter(None, [str(kind or self.name.replace("_", " ")), f"({rest})" if rest else ""]))

    def purpose(self) -> str:
        """What this setting does, in one sentence; the class's own first line where nothing better is said."""
        return self.purposes.get(getattr(self, "kind", ""), (type(self).__doc__ or "").strip().splitlines()[0])

    @classmethod
    def is_in_step(cls) -> bool:
        """Whether it may change the tensors of one and the same training step."""
        return bool(cls.affects & {"tensors", "layout", "update"})

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Self, ...]:
        """What is worth trying for this model and device: the user's own setting first, then the most promising."""
        raise NotImplementedError

    def exactness(self, facts: Facts) -> Exactness:
        """How this setting may change the result for this model."""
        return "exact"

    def prior_gain(self) -> tuple[float, float]:
        """What a search believes before it has measured anything, beside counted work: mean and standard deviation of
        the natural logarithm of the speed with this setting over that with the user's own.

        What trades time was measured to take 1.08 times as long at the median (docs/layers-measured.md).
        """
        return (-0.1, 0.1) if self.trades_time and self != type(self)() else (0.0, 0.0)

    def unavailable(self, facts: Facts) -> str | None:
        """Why this setting cannot be had for this model and device, in words; None when it can."""
        return None

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """Of these choices of this technique, those whose memory does not lie between others', the user's own included:
        what is worth an estimate by itself."""
        return tuple(choices)

    def as_predicted(self, facts: Facts) -> Self:
        """This setting as far as predictions of memory and work tell it from others."""
        return self

    def cached_bytes(self, facts: Facts) -> int:
        """What it keeps on the device for as long as the process lives, beside the tensors of a step."""
        return 0

    def samples_per_s(self, facts: Facts) -> float | None:
        """How fast its own part of a step is by itself, as far as that is known without a trial; infinite where nothing
        is left to do."""
        return None

    def takes_processors(self, facts: Facts) -> bool:
        """Whether it computes beside the training, on what that computes on."""
        return False

    @property
    def scales_loss(self) -> bool:
        """Whether gradients underflow without a loss scaler."""
        return False

    def conflicts(self, settings: Settings) -> str | None:
        """What of the other settings this one does not go with, or needs, and what to use, in words without numbers;
        None where they go together. ``settings`` are those in force, with the batch where it is known."""
        return None

    def warm_up_steps(self) -> int:
        """Optimizer steps that it takes until it runs at its own speed, however long they last."""
        return 0

    def or_default(self, facts: Facts) -> Self:
        """This setting, or the default where that is the same for this task."""
        return self

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before the process starts."""
        return {}

    def not_in_force(self) -> str | None:
        """What of :meth:`environment` the running process was started without, in words; None when all is there."""
        return None

    @property
    def reads_values(self) -> bool:
        """Whether what it does depends on the values of parameters, and not only on their shapes."""
        return False

    def files(self) -> dict[str, bytes]:
        """What is written beside a plan's file, by name."""
        return {}

    def with_files(self, folder: Path) -> Self:
        """This setting with what lies beside its plan.

        Raises:
            PlanError: it does not lie there, or is another.
        """
        return self

    def as_applied(self, model: nn.Module) -> Self:
        """This setting with all that was decided when it was put on this model, so that it can be had again."""
        return self

    def undo(self, model: nn.Module) -> nn.Module:
        """The model without what an earlier plan's setting of this technique put on it, whichever that was: a notebook
        applies several plans to one model."""
        return model

    def on_task(self, task: Any) -> Any:
        """The :class:`autotune.Task` with this setting in force: the same, or one that builds another model."""
        return task

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """The model with this setting in force: the same, changed in place, or another around it.

        Args:
            model: as the techniques before have left it.
            blocks: its repeated blocks, in forward order.
            run: its forward and loss on two samples, with the model that it is given; None where samples can be read
                only once.
        """
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer with this setting in force: the same, changed in place, or another around it.

        Args:
            optimizer: as the techniques before have left it, or as an earlier plan has.
            max_grad_norm: what the norm of all gradients is clipped at before it steps; None where it is not.
        """
        return optimizer

    def on_loader(self, spec: LoaderSpec) -> LoaderSpec:
        """What the loader is built from instead."""
        return spec

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Entered around each forward pass and loss."""
        return nullcontext()
