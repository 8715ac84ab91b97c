"""``Task``: what the user supplies."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from .errors import Caught, TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

SIGNATURES = {
    "build_model": "def build_model() -> torch.nn.Module",
    "build_dataset": "def build_dataset() -> torch.utils.data.Dataset",
    "compute_loss": "def compute_loss(model, batch) -> torch.Tensor  # a mean, or (loss_sum, count)",
    "build_optimizer": "def build_optimizer(parameters) -> torch.optim.Optimizer  # or build_optimizer(model)",
    "build_scheduler": "def build_scheduler(optimizer, num_steps) -> torch.optim.lr_scheduler.LRScheduler",
    "collate": "def collate(samples: list) -> batch",
    "length": "def length(sample) -> int  # in tokens, of a sample of build_dataset's",
    "pack": "def pack(samples: list) -> batch  # one row, without padding",
    "build_sampler": "def build_sampler(dataset) -> torch.utils.data.Sampler",
    "build_loader": "def build_loader(batch_size) -> torch.utils.data.DataLoader  # in place of build_dataset",
    "after_backward": "def after_backward(model) -> None  # gradients are whole and true, and not clipped yet",
    "after_step": "def after_step(model) -> None  # the optimizer has stepped",
    "infer": "def infer(model, batch) -> outputs  # nested tensors, of `autotune search --inference`",
    "evaluate": "def evaluate(model) -> float  # higher is better; or (value, error); or scores; may take a batch_size",
}
"""The functions a task file may define, with the signature each must have."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""What a job may say that it computes in."""

REQUIRED = ("build_model", "build_dataset", "compute_loss")
"""``build_loader`` may take the place of ``build_dataset``."""
REQUIRED_OF_INFERENCE = ("build_model", "build_dataset", "infer")
"""The same of a task whose plan is for inference."""
_OF_DATASET = ("build_dataset", "collate", "length", "pack", "build_sampler", "loader_options", "shards_by_worker")
"""What a task that builds its loaders itself has no use for."""
_LOADER_OPTIONS = {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout", "worker_init_fn"}
_LOADER_OPTIONS |= {"multiprocessing_context", "generator", "drop_last"}


def _not_given(*_: Any) -> Any:
    raise AssertionError("a task without it is refused")


@dataclass(frozen=True)
class _OfLoader:
    """The ``build_dataset`` of a task that builds its loaders itself."""

    build_loader: Callable[[int], Any]
    source: str

    def __call__(self) -> Any:
        from .data.own_loader import OwnLoader

        return OwnLoader(self.build_loader, self.source or "task")


def _join(samples: list[Any]) -> Any:
    """Its ``collate``."""
    from .data.own_loader import join

    return join(samples)


@dataclass(frozen=True)
class _Evaluating:
    """The ``build_model`` of a task for inference: in eval mode."""

    build_model: Callable[[], Any]

    def __call__(self) -> Any:
        model = self.build_model()
        return model.eval() if hasattr(model, "eval") else model


def _in_order(dataset: Any) -> Any:
    """Its ``build_sampler``."""
    from torch.utils.data import SequentialSampler

    return SequentialSampler(dataset)


@dataclass(frozen=True)
class _Declaring:
    """The ``build_model`` of a task that says which blocks are reversible."""

    build: Callable[[], nn.Module]
    paths: Sequence[str]

    def __call__(self) -> nn.Module:
        """
        Raises:
            TaskError: a path names no module, or one without ``f`` and ``g``.
        """
        from torch import nn

        from .techniques.support.reversible.pair import declare

        model = self.build()
        if isinstance(model, nn.Module):
            declare(model, self.paths)
        return model


@dataclass(frozen=True)
class Task:
    """A training job: how to build the model, the data, the loss, and what is optional.

    Raises:
        TaskError: a piece is not callable with the arguments that it is called with, a number is none or does not go
            with the others, or ``loader_options`` names what this package decides itself.
    """

    build_model: Callable[[], nn.Module]
    """Called once, after everything is seeded."""
    build_dataset: Callable[[], Any] = _not_given
    """Map-style or iterable dataset; of a task with ``build_loader``, what that makes of it."""
    compute_loss: Callable[[nn.Module, Any], Any] = _not_given
    """(model, batch) -> the batch's mean loss, or (loss_sum, count), which makes splitting exact for such losses."""
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Receives all parameters in order, or the model if that is what its argument is called. None is AdamW."""
    collate: Callable[[list[Any]], Any] | None = None
    """DataLoader's collate_fn."""
    length: Callable[[Any], int] | None = None
    """How long a sample is, in tokens: of several lengths the longest. Batches are made by it, and the largest found.
    None is by the shapes that samples collate to alone."""
    pack: Callable[[list[Any]], Any] | None = None
    """Collates samples to one row without padding, for ``batch.packed``. None is transformers'
    DataCollatorWithFlattening of samples that are dicts with ``input_ids`` and ``labels``."""
    build_sampler: Callable[[Any], Any] | None = None
    """The order of samples; None is a seeded shuffle."""
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    """DataLoader keywords that the user trains with today."""
    build_loader: Callable[[int], Any] | None = None
    """In place of ``build_dataset``: batches of so many samples, by the user's own DataLoader or another iterable."""
    after_backward: Callable[[nn.Module], Any] | None = None
    """Called once an optimizer step's gradients are the true ones, before they are clipped at ``max_grad_norm``."""
    after_step: Callable[[nn.Module], Any] | None = None
    """Called once the optimizer has stepped and the gradients are cleared: for a weight average. Not where a loss
    scaler skips the step."""
    build_scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None
    """(optimizer, num_steps) -> the schedule of the job's learning rates over so many optimizer steps, or None. What is
    judged by ``evaluate`` is trained by it first; the job's own loop makes and steps its own."""
    evaluate: Callable[..., float | tuple[float, float] | Sequence[float] | torch.Tensor] | None = None
    """(model) or (model, batch_size) -> quality on data held out, higher is better; or (quality, standard error); or a
    list or 1-D tensor with the score of each example, always in the same order, whose mean is the quality: that proves
    most. Trials run it once, for their peak; lossy techniques are judged by it. A default of ``batch_size`` is what the
    job has today."""
    infer: Any = None
    """(model, batch) -> outputs: tensors, nested as you like. What a plan for inference is for; training, which may
    have something else of that name, leaves it alone."""
    infers: bool = False
    """Whether this is the job of inference: :meth:`for_inference`."""
    evaluates_in_context: bool = False
    """Whether the job evaluates in the precision that it trains in, as frameworks do; False leaves that to
    ``evaluate``."""
    weights: str | Path | Callable[[], Mapping[str, torch.Tensor]] | None = None
    """What the job trains on from: a state dict's file (relative to the task's), or a function that returns a state
    dict; None is the model as ``build_model`` leaves it."""
    variants: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    """Smaller models that may do as well, by name: functions that build one. ``weights`` is not loaded into them."""
    batch_size: int | None = None
    """The effective batch that the user trains with, held fixed; None leaves it free."""
    micro_batch_size: int | None = None
    """Samples in one forward pass today, of which ``batch_size`` is accumulated. None is all of it at once."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None
    """What the job runs in today: bf16 and fp16 by autocast around forward and loss, fp16 with a loss scaler. None is
    the model as it stands."""
    max_grad_norm: float | None = None
    """The gradients' global norm, beyond which they are scaled down to it before each optimizer step; None never."""
    blocks: Sequence[str] = ()
    """Module paths of the blocks that checkpointing chooses from (or of their containers); empty finds them."""
    reversible_blocks: Sequence[str] = ()
    """Module paths of blocks (or of their containers) with modules ``f`` and ``g`` whose forward takes ``(x1, x2)`` and
    returns ``(y1, y2)``: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``. None are reversible where it is empty."""
    shards_by_worker: bool = False
    """Whether an iterable dataset splits itself between loader workers."""
    even_batches: bool = False
    """Whether what the plan is for takes micro-batches of one size alone, as other trainers' accumulation does."""
    source: str = ""
    """Where it was loaded from."""

    def __post_init__(self) -> None:
        problems = [*self._wrong_data()]
        problems += [
            f"{name} must be a function, but got {type(value).__name__}. Wanted: {signature}"
            for name, signature in self._signatures()
            if (value := getattr(self, name)) is not None and not callable(value)
        ]
        problems += self._wrong_arguments()
        problems += self._wrong_job()
        problems += self._wrong_weights()
        problems += self._wrong_variants()
        if not isinstance(self.loader_options, Mapping):
            problems.append(f"loader_options must be a dict, but got {type(self.loader_options).__name__}")
        elif unknown := sorted(map(str, set(self.loader_options) - _LOADER_OPTIONS)):
            problems.append(
                f"loader_options may hold {', '.join(sorted(_LOADER_OPTIONS))}, but got {', '.join(unknown)}. "
                "Batching, order and collation have their own entries: batch_size, build_sampler, collate"
            )
        if not isinstance(self.shards_by_worker, bool):
            problems.append(f"shards_by_worker must be True or False, but got {self.shards_by_worker!r}")
        for name, paths in (("blocks", self.blocks), ("reversible_blocks", self.reversible_blocks)):
            if isinstance(paths, str) or not isinstance(paths, Sequence) or not all(isinstance(p, str) for p in paths):
                problems.append(f"{name} must be a list of module paths, but got {paths!r}")
        if problems:
            raise TaskError("\n".join(f"{self.source or 'task'}: {problem}." for problem in problems))
        build = self.build_model.build if isinstance(self.build_model, _Declaring) else self.build_model
        if self.reversible_blocks:
            build = _Declaring(build, self.reversible_blocks)
        object.__setattr__(self, "build_model", build)

    def _wrong_data(self) -> Iterator[str]:
        """Pieces that are missing, or too many; loaders of the task's own become its data."""
        if self.build_loader is not None and self.collate is not _join:
            stock = {f.name: f.default for f in fields(self)} | {"loader_options": {}}
            if given := [name for name in _OF_DATASET if getattr(self, name) != stock[name]]:
                yield (
                    f"build_loader yields whole batches, so that nothing is left for {', '.join(given)}. Give "
                    "build_loader alone, or a dataset without it"
                )
            object.__setattr__(self, "collate", _join)
            object.__setattr__(self, "build_dataset", _not_given)
        if self.build_loader is not None and (
            self.build_dataset is _not_given or isinstance(self.build_dataset, _OfLoader)
        ):
            object.__setattr__(self, "build_dataset", _OfLoader(self.build_loader, self.source))
        for name in REQUIRED_OF_INFERENCE if self.infers or self.infer is not None else REQUIRED:
            if (given := getattr(self, name)) is _not_given or (given is None and name == "infer"):
                yield f"{name} is missing. Wanted: {SIGNATURES[name]}"

    def _signatures(self) -> Iterator[tuple[str, str]]:
        """Of the functions that are called."""
        aside = "compute_loss" if self.infers else "infer"
        return ((name, wanted) for name, wanted in SIGNATURES.items() if name != aside)

    def _wrong_arguments(self) -> Iterator[str]:
        """Functions that cannot be called as they will be."""
        for name, signature in self._signatures():
            value = getattr(self, name)
            if not callable(value):
                continue
            try:
                takes = inspect.signature(value)
            except (TypeError, ValueError):  # some builtins do not say
                continue
            called = signature.partition("(")[2].partition(")")[0]
            batch = takes.parameters.get("batch_size") if name == "evaluate" else None
            if batch is not None and batch.default is not batch.empty and not _is_count(batch.default):
                yield f"evaluate's batch_size must be a whole number of samples, at least 1, but is {batch.default!r}"
            try:
                takes.bind(*filter(None, called.split(",")), **({"batch_size": 1} if batch else {}))
            except TypeError:
                yield f"{name} takes {takes}, but is called with ({called}). Wanted: {signature}"

    def _wrong_weights(self) -> Iterator[str]:
        if self.weights is not None and not (isinstance(self.weights, str | Path) or callable(self.weights)):
            yield (
                "weights must be the path of a state dict's file, or a function that returns a state dict, but got "
                f"{type(self.weights).__name__}"
            )

    def _wrong_variants(self) -> Iterator[str]:
        """No names of functions that build a model."""
        if not isinstance(self.variants, Mapping):
            yield (
                "variants must be a dict of names and functions that build a model, but got "
                f"{type(self.variants).__name__}"
            )
            return
        taken = {"none": "none"}
        for name, build in self.variants.items():
            if not isinstance(name, str) or not name.strip():
                yield f"variants: a name in text was expected, but got {name!r}"
                continue
            if (other := taken.setdefault(name.strip().lower(), name)) is not name or name == "none":
                yield f"variants: {name!r} would be taken for {other!r}. Use another name"
            if not callable(build):
                yield f"variants[{name!r}] must be a function that builds a model, but got {type(build).__name__}"
            elif _wants_arguments(build):
                yield f"variants[{name!r}] takes arguments, but is called without any, as build_model is"

    def _wrong_job(self) -> Iterator[str]:
        """Numbers that say how the job trains today, and do not say it."""
        size, micro, norm = self.batch_size, self.micro_batch_size, self.max_grad_norm
        if size is not None and not _is_count(size):
            yield f"batch_size must be a whole number of samples, at least 1, but got {size!r}"
        if micro is not None and not _is_count(micro):
            yield f"micro_batch_size must be a whole number of samples, at least 1, but got {micro!r}"
        elif micro is not None and size is None:
            yield (
                f"micro_batch_size is {micro}, but there is no batch_size. Set it to the samples of an optimizer step, "
                "which are accumulated"
            )
        elif micro is not None and _is_count(size) and micro > size:
            yield (
                f"micro_batch_size must be at most batch_size, the {size} samples of an optimizer step, but got {micro}"
            )
        if self.precision not in (None, *PRECISIONS):
            yield f"precision must be one of {', '.join(PRECISIONS)}, but got {self.precision!r}"
        if norm is not None and not (_is_number(norm) and 0 < norm < math.inf):
            yield f"max_grad_norm must be a number above 0, but got {norm!r}"

    def for_inference(self) -> Task:
        """The job of inference: the model in eval mode, ``infer`` over the samples in their order, and nothing that
        trains.

        Raises:
            TaskError: there is no ``infer``, or it does not take a model and a batch.
        """
        if self.infers:
            return self
        trains = ("build_optimizer", "after_backward", "after_step", "build_scheduler", "max_grad_norm")
        nothing: dict[str, Any] = dict.fromkeys(trains)
        return replace(
            self,
            infers=True,
            build_model=_Evaluating(self.build_model),
            compute_loss=self.infer,
            build_sampler=None if self.build_loader is not None else _in_order,
            loader_options={name: value for name, value in self.loader_options.items() if name != "drop_last"},
            micro_batch_size=None,
            variants={},
            **nothing,
        )

    def check_trains(self) -> None:
        """
        Raises:
            TaskError: it has no ``compute_loss``, and is for inference alone.
        """
        if self.compute_loss is _not_given:
            raise TaskError(
                f"{self.source or 'task'}: compute_loss is missing. Wanted: {SIGNATURES['compute_loss']}. For "
                "inference, search with --inference."
            )

    def call(self, name: Literal["after_backward", "after_step"], model: nn.Module, advice: str = "") -> None:
        """Call the user's function of that name, if there is one; ``advice`` is told where it raises.

        Raises:
            TaskError: it raised.
            torch.OutOfMemoryError, MemoryError: memory ran out in it.
        """
        import torch

        function: Callable[[nn.Module], Any] | None = getattr(self, name)
        if function is None:
            return
        with Caught(MemoryError, torch.OutOfMemoryError, frames=True) as raised:
            function(model)
        if raised.error is not None:
            said = f"{type(raised.error).__name__}: {raised.error}"
            raise TaskError(f"{self.source or 'task'}: {name}(model) raised {said}.{advice}") from raised.take()

    def evaluation_batch(self, micro: int) -> int | None:
        """The ``batch_size`` that ``evaluate`` has today: its default, or ``micro``; None where it takes none."""
        try:
            batch = inspect.signature(self.evaluate).parameters.get("batch_size") if self.evaluate else None
        except (TypeError, ValueError):  # some builtins do not say
            return None
        return None if batch is None else micro if batch.default is batch.empty else int(batch.default)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer over the model, or AdamW with torch's defaults."""
        import torch

        if self.infers:  # nothing to step, which torch takes in a group alone
            return torch.optim.SGD([{"params": []}], lr=0.0)
        if self.build_optimizer is None:
            return torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        first = next(iter(inspect.signature(self.build_optimizer).parameters), None)
        optimizer = self.build_optimizer(model if first == "model" else list(model.parameters()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(
                f"{self.source or 'task'}: build_optimizer returned {type(optimizer).__name__}. "
                f"Wanted: {SIGNATURES['build_optimizer']}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TaskError(
                f"{self.source or 'task'}: LBFGS evaluates the loss several times a step, through a closure, which is "
                "not supported. Use an optimizer whose step() takes none."
            )
        return optimizer

    def make_scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """The schedule of the job's learning rates, stepped after each of so many optimizer steps; None where the task
        has none.

        Raises:
            TaskError: ``build_scheduler`` returned something else.
        """
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        scheduler = self.build_scheduler(optimizer, num_steps) if self.build_scheduler is not None else None
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler | None):
            raise TaskError(
                f"{self.source or 'task'}: build_scheduler returned {type(scheduler).__name__}. Wanted: "
                f"{SIGNATURES['build_scheduler']}, whose step() takes nothing; or None."
            )
        return scheduler


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except ValueError:  # some builtins do not say
        return False
    except TypeError:
        return True
    return False
