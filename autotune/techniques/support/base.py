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

    from .. import Settings
    from .facts import Facts, ScriptFacts

Run = Callable[["nn.Module"], Any]
"""Runs a model."""
Effect = Literal["tensors", "layout", "code", "samples", "update", "loader", "process", "function"]
"""``tensors``: which tensors a step makes, and how long they live. ``layout``: the order of their elements. ``code``:
memory of the kernels and modules in use. ``samples``: samples in a forward pass. ``update``: duration of the
optimizer's step, and memory that it needs for a moment. ``loader``: how fast data come, and from what. ``process``:
memory of the process beside all this. ``function``: what the model computes, so that its quality is compared with the
reference's."""
Exactness = Literal["exact", "rounding", "lossy"]
"""``exact``: same arithmetic up to reordering. ``rounding``: lower precision. ``lossy``: changes the function."""

Program = Literal["Trainer", "TrainingArguments", "Accelerator", "Lightning", "timm", "nanoGPT"]
"""Who has options for some settings: transformers' Trainer (its arguments, and flags of a script that parses them),
Accelerate's Accelerator, Lightning's Trainer, and the scripts of timm and nanoGPT."""

FileKind = Literal["onnx", "pt2"]
"""Files of a model's program: ONNX, and what ``torch.export.save`` writes."""


class Stage(IntEnum):
    """Order in which ``apply`` puts techniques into force."""

    PROCESS = auto()
    """Before the process starts."""
    MODEL = auto()
    """The task builds another model."""
    PRUNING = auto()
    """Parameters go."""
    LOW_RANK = auto()
    """Weights that are left become products of two."""
    FROZEN = auto()
    """Weights that do not train, of those that are left, become codes."""
    ATTENTION = auto()
    """Attention is computed another way, which layers are to see."""
    LAYERS = auto()
    """Layers become others."""
    TILES = auto()
    """Parts of blocks, with the layers that they have now, compute some positions at a time."""
    CHECKPOINTING = auto()
    """Blocks, with all that is in them, are wrapped."""
    OFFLOAD = auto()
    """What blocks, recomputed or not, save is elsewhere until backward."""
    DEVICE = auto()
    """The model is moved to its device, then the order of its tensors' elements changes."""
    PRECISION = auto()
    """What is computed in."""
    COMPILE = auto()
    """Whatever the model is by now becomes one program."""
    SHARD = auto()
    """Several processes share the training of whatever the model is by now."""
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
    stock: LoaderSpec | None = None
    """The same without what rests on the dataset's staying as it is (a cache, workers that are kept); None where
    nothing does."""
    lengths: Sequence[int] | None = None
    """Of all samples, by index, where micro-batches are made by them."""
    replaced_workers: int = 0
    """Loader workers of the user's in whose place the training process reads, with their random numbers."""


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
    """What a setting of it changes beside a step's duration. Predictions and searches go by it."""
    ordered: ClassVar[bool] = False
    """Whether ``choices`` are ordered from small to large, so that a sampler may interpolate."""
    trades_time: ClassVar[bool] = False
    """Whether it only trades time for memory: it is no first guess where the reference fits."""
    only_where_listed: ClassVar[bool] = False
    """Whether nobody chooses from it who was not asked to: the presets of a search, and ``fit``, leave it out."""
    adds_up: ClassVar[Literal["blocks", "whole"] | None] = None
    """Whether what a setting saves and costs adds up with what others do, so that all are chosen together: ``blocks``,
    in each of the model's blocks by itself (:meth:`in_blocks`), or as a ``whole``."""
    directive: ClassVar[Technique | None] = None
    """What a search space may list in place of a setting, to let the search find it."""
    purposes: ClassVar[Mapping[str, str]] = {}
    """What a setting does, in one sentence, by its ``kind``."""
    kept_beside: ClassVar[frozenset[str]] = frozenset()
    """Fields that :meth:`files` hold beside a plan's file, which does not."""

    goes_by: ClassVar[str | None] = None
    """The feature of private parts that it cannot do without (``internals.FEATURES``); None where it needs none."""
    rewrites: ClassVar[bool] = False
    """Whether it gives modules another forward, which a model that is compiled already does not come to."""
    not_in_inference: ClassVar[str | None] = None
    """Why a plan for inference leaves it out, in words; None where it may have it."""
    not_in_scripts: ClassVar[str | None] = None
    """Why a search leaves it out of an unedited script, in words; None where it may be tried there."""

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
        """Whether it may change the tensors of a training step."""
        return bool(cls.affects & {"tensors", "layout", "update"})

    @property
    def changes_function(self) -> bool:
        """Whether the model computes something else with this setting, and not only with others of its technique."""
        return "function" in self.affects and self != type(self)()

    @classmethod
    def facts_of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> Mapping[str, Any]:
        """What its choices go by: fields of :class:`Facts`, of a model as built, its optimizer and this machine."""
        return {}

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Self, ...]:
        """Settings worth trying for this model and device: the user's own first, then the most promising."""
        raise NotImplementedError

    def exactness(self, facts: Facts) -> Exactness:
        """How this setting may change the results of this model."""
        return "exact"

    def removed(self, facts: Facts) -> float:
        """Share of the model that it takes away, 0 to 1: the more, the more quality a search expects to lose."""
        return 0.0

    def prior_gain(self) -> tuple[float, float]:
        """The prior of a search for what counted work leaves out: mean and standard deviation of the natural logarithm
        of the speed with this setting over that with the user's own.

        What trades time was measured to take 1.08 times as long at the median (docs/evidence/layers-measured.md).
        """
        return (-0.1, 0.1) if self.trades_time and self != type(self)() else (0.0, 0.0)

    def unavailable(self, facts: Facts) -> str | None:
        """Why this setting cannot be had for this model and device, in words; None when it can."""
        return None

    def beyond_inference(self) -> str | None:
        """Why no plan for inference can have this setting, in words; None where one can."""
        return self.not_in_inference

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """What an unedited script does that stands in the way of this technique, in words; None where nothing does."""
        return "the script compiles its model itself" if cls.rewrites and script.compiles else None

    def beyond_script(self) -> str | None:
        """Why no unedited script can have this setting, in words, and what to do instead; None where one can."""
        return None

    def not_in_file(self, kind: FileKind) -> str | None:
        """Why a file of the model's program (``autotune export``) has nothing of this setting, in words; None where it
        is part of the program."""
        return None

    def options_of(self, program: Program) -> Mapping[str, Any]:
        """A program's own options, by name, that say what this setting does, or that must be off beside it."""
        return {}

    @classmethod
    def extremes(cls, choices: Sequence[Technique]) -> tuple[Technique, ...]:
        """Of these choices of this technique, the user's own included, those whose memory does not lie between others':
        each is worth an estimate of its own."""
        return tuple(choices)

    def in_blocks(self, numbers: Sequence[int], num_blocks: int) -> Self:
        """This setting in some of the model's blocks, and outside them; what it is in all of them is itself. For
        settings that add up by ``blocks``.

        Args:
            numbers: of the blocks, from 0 in the model's order; ascending.
            num_blocks: that there are.
        """
        raise NotImplementedError

    def numbers(self, num_blocks: int) -> tuple[int, ...]:
        """In which of so many blocks this setting is, ascending. For settings that add up by ``blocks``."""
        raise NotImplementedError

    def as_predicted(self, facts: Facts) -> Self:
        """This setting with only what predictions of memory and work depend on."""
        return self

    def cached_bytes(self, facts: Facts) -> int:
        """Bytes that it keeps on the device for the life of the process, beside the tensors of a step."""
        return 0

    def host_cached_bytes(self, facts: Facts) -> int:
        """Bytes that it keeps in the host's memory in the same way, where that is not the device's."""
        return 0

    def fills_host(self, facts: Facts) -> bool:
        """Whether it takes host memory at all where that is not the device's, for good or while a step runs."""
        return self.host_cached_bytes(facts) > 0

    def num_loading(self, facts: Facts) -> int:
        """Processes that load data beside the training."""
        return 0

    def num_ready(self, facts: Facts) -> int:
        """Batches that these hold ready."""
        return 0

    def may_hold(self, step_bytes: int, facts: Facts) -> int:
        """Bytes that it may hold on the device beyond what is predicted, where a step needs ``step_bytes`` for a
        moment."""
        return 0

    def times_charged(self, facts: Facts) -> int | None:
        """How many times the memory of one process is charged; None where what is charged cannot be told from that."""
        return 1

    def samples_per_s(self, facts: Facts) -> float | None:
        """Speed of its own part of a step, as far as it is known without a trial; infinite where nothing is left to
        do."""
        return None

    def takes_processors(self, facts: Facts) -> bool:
        """Whether it computes at the same time as the training, on the same processors."""
        return False

    @property
    def scales_loss(self) -> bool:
        """Whether gradients underflow without a loss scaler."""
        return False

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are gone by the time that backward has ended."""
        return False

    @property
    def lends_gradients(self) -> bool:
        """Whether gradients lie in memory that the next forward pass overwrites."""
        return False

    def conflicts(self, settings: Settings) -> str | None:
        """Why this setting does not go with another one, or what it needs, and what to use instead; in words without
        numbers. None where they go together. ``settings`` are those applied, with the batch where it is known."""
        return None

    def warm_up_steps(self) -> int:
        """Optimizer steps until it runs at its full speed."""
        return 0

    def or_default(self, facts: Facts) -> Self:
        """This setting, or the default where that is the same for this task."""
        return self

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before the process starts."""
        return {}

    def not_in_force(self) -> str | None:
        """Which of :meth:`environment` the running process lacks, in words; None where it has all."""
        return None

    @property
    def runs_model(self) -> bool:
        """Whether :meth:`on_model` runs the model on samples."""
        return False

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
        """This setting with all decisions made when it was applied to this model, so that it can be applied again."""
        return self

    def check_model(self, model: nn.Module, device: torch.device | None) -> None:
        """Refuse a model, with all that an earlier plan put on it, before any of that is undone.

        Args:
            model: the user's, or what an earlier plan made of it.
            device: where it goes; None is where it is.

        Raises:
            PlanError: it cannot have this setting.
        """

    def undo(self, model: nn.Module) -> nn.Module:
        """The model without what an earlier plan's setting of this technique put on it: a notebook applies several
        plans to one model."""
        return model

    def on_task(self, task: Any) -> Any:
        """The :class:`autotune.Task` with this setting applied: the same, or one that builds another model."""
        return task

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """The model with this setting applied: the same, changed in place, or another around it.

        Args:
            model: as the techniques before have left it.
            blocks: its repeated blocks, in forward order.
            run: its forward and loss on two samples, with the model that it is given; None where samples can be read
                only once.
        """
        return model

    def on_inference(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """:meth:`on_model` of a plan for inference, where nothing trains whatever ``requires_grad`` says."""
        return self.on_model(model, blocks, run)

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer with this setting applied: the same, changed in place, or another around it.

        Args:
            optimizer: as the techniques before have left it, or as an earlier plan has.
            max_grad_norm: what the norm of all gradients is clipped at before it steps; None where it is not.
        """
        return optimizer

    def on_loader(self, spec: LoaderSpec) -> LoaderSpec:
        """The changed specification of the loader."""
        return spec

    @property
    def has_context(self) -> bool:
        """Whether :meth:`forward_context` does anything."""
        return False

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """A context around each forward pass and loss."""
        return nullcontext()
