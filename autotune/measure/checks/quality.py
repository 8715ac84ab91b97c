"""Quality: the task's ``evaluate`` after further training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ...errors import Caught, TaskError, UserError
from ...randomness import undisturbed
from ...ranks import of_first
from ...task import SIGNATURES, Task
from ...techniques.support.replica import within
from ...training.training import Training
from ...training.weights import save_kept
from ..measurement import Quality, QualityOptions
from ..steps import Steps
from .blind import check_sees, noise_of
from .rates import Rates
from .scores import FARTHEST, Judged, judged_by

_STATISTICS = 10
"""Micro-batches that BatchNorm's statistics are averaged over before recovery."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a value."""
_PART = 2**20
"""Values that are summed at once."""
_WANTED = "Wanted: a finite number, or (number, standard error), or a list or 1-D tensor with a score for each example."
_NOT_FINITE = {math.inf: "infinity, or beyond the largest float", -math.inf: "-infinity, or beyond the largest float"}
_FEWEST_SCORES = 2
_MAY_BE_LEFT_OUT = "Trials call it for the memory that it takes: see to that, or leave evaluate out of the task."
_NEEDS_GRADIENTS = (
    "It is called without gradients (torch.no_grad): put what needs them under `with torch.enable_grad():`, and leave "
    "none in the model (model.zero_grad())."
)


@dataclass(frozen=True)
class NoQuality:
    """What an ``evaluate`` returns that has nothing to judge a model by: trials measure its memory all the same."""

    reason: str
    """With what to do."""


def measure_quality(training: Training, task: Task, options: QualityOptions) -> Quality:
    """Train further and evaluate: after a quarter of the samples and, unless that rules the configuration out, after
    all.

    A pruned model recovers meanwhile. The reference trains on the same samples, so that pruning is not credited with
    what the training alone brings. For both, BatchNorm's statistics are measured anew first, and learning rates go as
    :class:`Rates` has them.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from; it has ``evaluate``.
        options: how many samples, and what rules it out.

    Raises:
        TaskError: ``evaluate`` raised, returned no number, or changed the model.
        NonFiniteLoss: a loss was NaN or infinite.
    """
    began_s = perf_counter()
    recovery = Recovery(training, task, options)
    recovery.until(1 / 4)
    found = recovery.evaluate()
    early = found.value
    if options.least_early is not None and early < options.least_early:
        return Quality(**found._asdict(), early=early, is_whole=False, seconds=perf_counter() - began_s)
    recovery.until(1.0)
    found = recovery.evaluate()
    noise = recovery.look(found.value == early) if options.looks else None
    words, seconds = recovery.words, perf_counter() - began_s
    return Quality(**found._asdict(), early=early, noise=noise, recovered=words, seconds=seconds)


def keep_weights(training: Training, options: QualityOptions) -> Iterator[str]:
    """Write the weights that were asked for; where that fails, say why: what was measured is worth no less."""
    if options.keep is None:
        return
    try:
        save_kept(training.model, Path(options.keep))
    except (UserError, OSError, RuntimeError) as error:  # torch's of a full disk is the last
        yield f"--keep-weights: {options.keep}: the recovered weights cannot be written: {error}"


class Recovery:
    """The training before quality is judged, in parts."""

    def __init__(self, training: Training, task: Task, options: QualityOptions) -> None:
        """
        Args:
            training: fresh from :func:`autotune.apply`.
            task: what it was built from.
            options: how many samples, and at what rates.
        """
        _measure_statistics(training, task)
        self.training = training
        self._task, self._options, self._rates = task, options, Rates(training, task, options)
        self._steps, self._num_samples = Steps(training), 0

    def step(self) -> None:
        """One optimizer step, unless all are made."""
        if self._num_samples >= self._options.num_samples:
            return
        done = self._num_samples / self._options.num_samples
        self._num_samples += self._rates.step(self._steps, done).num_samples

    def until(self, share: float) -> None:
        """Steps until this share of the samples was seen.

        Raises:
            NonFiniteLoss: a loss was NaN or infinite.
        """
        while self._num_samples < share * self._options.num_samples:
            self.step()
        self._steps.settle()

    @property
    def words(self) -> str:
        """How the steps so far were taken."""
        return self._rates.words

    def evaluate(self) -> Judged:
        """The quality now.

        Raises:
            TaskError: ``evaluate`` raised, returned no number, or changed the model.
        """
        training, task = self.training, self._task
        context = evaluation_context(training, task)
        found: Judged = of_first(evaluate(task, within(training.model), training.evaluation_batch, context))
        return found

    def look(self, is_suspect: bool) -> float:
        """How far ``evaluate`` scatters by itself.

        Args:
            is_suspect: whether recovery changed nothing of what it says.

        Raises:
            TaskError: it does not see the model.
        """
        training, task = self.training, self._task
        model = within(training.model)

        def judge() -> Judged:
            return evaluate(task, model, training.evaluation_batch, evaluation_context(training, task))

        return look(task, model, judge, is_suspect)


def look(task: Task, model: nn.Module, judge: Callable[[], Judged], is_suspect: bool) -> float:
    """How far ``judge``, of the task's ``evaluate`` and this model, scatters by itself.

    Raises:
        TaskError: it scatters, or is suspected, and does not see the model.
    """
    noise = noise_of(judge)
    if noise or is_suspect:
        check_sees(model, judge, _where(task))
    return noise


def evaluation_context(training: Training, task: Task) -> AbstractContextManager[Any]:
    """What the job evaluates in: the plan's precision, where the task says so; else ``evaluate`` itself sees to it."""
    return training.settings.forward_context(training.device.type) if task.evaluates_in_context else nullcontext()


def _measure_statistics(training: Training, task: Task) -> None:
    """Average BatchNorm's statistics over some micro-batches, without training: those of the model before a cut are not
    those after it."""
    kinds = nn.modules.batchnorm._BatchNorm
    norms = [one for one in training.model.modules() if isinstance(one, kinds) and one.track_running_stats]
    norms = [one for one in norms if one.training]
    if not norms:
        return
    momenta = [one.momentum for one in norms]
    for one in norms:
        one.reset_running_stats()
        one.momentum = None  # torch's word for an average over all batches
    with torch.no_grad():
        for batch in itertools.islice(training.loader, _STATISTICS):
            with training.forward_context():
                task.compute_loss(training.model, batch)
    for one, momentum in zip(norms, momenta, strict=True):
        one.momentum = momentum


def evaluate(
    task: Task,
    model: nn.Module,
    batch: int | None = None,
    context: AbstractContextManager[Any] | None = None,
) -> Judged:
    """The task's judgement of a model.

    Args:
        task: whose ``evaluate`` it is.
        model: what is judged.
        batch: its ``batch_size``; None where it takes none.
        context: in which it is called; of :func:`evaluation_context`.

    Raises:
        TaskError: :func:`call_evaluate` raised it, or what it returned is no quality.
        torch.OutOfMemoryError, MemoryError: memory ran out in it.
    """
    return _checked(call_evaluate(task, model, batch, context), _where(task))


def call_evaluate(
    task: Task,
    model: nn.Module,
    batch: int | None = None,
    context: AbstractContextManager[Any] | None = None,
) -> Any:
    """What the task's ``evaluate`` returns, whatever that is: its arguments are :func:`evaluate`'s.

    Train and eval modes, and everything random, are afterwards as they were before. Next to no memory is taken beside
    what ``evaluate`` itself takes.

    Raises:
        TaskError: there is no ``evaluate``, or it raised, changed the model, or left gradients in it.
        torch.OutOfMemoryError, MemoryError: memory ran out in it.
    """
    where = _where(task)
    if task.evaluate is None:
        raise TaskError(f"{task.source or 'task'}: evaluate is missing. Wanted: {SIGNATURES['evaluate']}.")
    before = {name: bits_of(tensor) for name, tensor in model.state_dict().items()}
    had = _with_gradients(model)
    takes_batch = task.evaluation_batch(1) is not None and batch is not None
    with _modes_kept(model), undisturbed(), torch.no_grad(), context or nullcontext():
        with Caught(MemoryError, torch.OutOfMemoryError, frames=True) as raised:
            said = task.evaluate(model, batch_size=batch) if takes_batch else task.evaluate(model)
        if raised.error is not None:
            advice = _NEEDS_GRADIENTS if "require grad" in str(raised.error) else _MAY_BE_LEFT_OUT
            raise TaskError(
                f"{where} raised {type(raised.error).__name__}: {raised.error}. {advice}"
            ) from raised.take()
    after = model.state_dict()
    changed = [name for name, bits in before.items() if bits_of(after[name]) != bits]
    if changed:
        raise TaskError(
            f"{where} changed the model: {_first(changed)}. A BatchNorm in train mode does: call model.eval() first; "
            "modes are put back afterwards."
        )
    left = [f"{name}.grad" for name in _with_gradients(model) if name not in had]
    if left:
        raise TaskError(
            f"{where} left gradients in the model: {_first(left)}. The job's next step would add to them: call "
            "model.zero_grad() before it returns."
        )
    return said


def _with_gradients(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def _first(names: list[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _where(task: Task) -> str:
    return f"{task.source or 'task'}: evaluate(model)"


def _checked(said: Any, where: str) -> Judged:
    """It as a quality.

    Raises:
        TaskError: it is none.
    """
    if isinstance(said, NoQuality):
        raise TaskError(f"{where} has nothing to judge a model by: {said.reason}.")
    if isinstance(said, list) or getattr(said, "ndim", 0) > 0:
        return _of_scores(said, where)
    if not isinstance(said, tuple) or len(said) != 2:
        return Judged(_number(said, where))
    value, error = _number(said[0], where, "number"), _number(said[1], where, "standard error")
    if error < 0:
        raise TaskError(f"{where} returned {(value, error)}. Wanted: (number, error), its standard error at least 0.")
    return Judged(value, error)


def _number(said: Any, where: str, part: str | None = None) -> float:
    """A finite number: all that was returned, or this part of a pair."""
    value = _as_float(said)
    if value is None:
        what = f"a tuple of {len(said)}" if isinstance(said, tuple) else _kind(said)
        hint = " Use .item()." if isinstance(said, torch.Tensor) else ""
    elif math.isnan(value) or math.isinf(value):
        what, hint = _NOT_FINITE.get(value, "nan"), ""
    else:
        return value
    what = what if part is None else f"(number, standard error), but its {part} is {what}"
    raise TaskError(f"{where} returned {what}. {_WANTED}{hint}")


def _of_scores(said: Any, where: str) -> Judged:
    """A score for each example, in a list, a tensor or an array."""
    if getattr(said, "ndim", 1) != 1:
        raise TaskError(f"{where} returned {type(said).__name__} of shape {tuple(said.shape)}. {_WANTED}")
    if len(said) < _FEWEST_SCORES:
        raise TaskError(f"{where} returned scores of {len(said)} examples, too few to tell their error. {_WANTED}")
    each = [_as_float(one, takes_bool=True) for one in (said if isinstance(said, list) else said.tolist())]
    wrong = [index for index, one in enumerate(each) if one is None or not math.isfinite(one)]
    if wrong:
        one = each[wrong[0]]
        what = _kind(said[wrong[0]]) if one is None else _NOT_FINITE.get(one, "nan")
        others = f", and {len(wrong) - 1} more are no finite numbers" if len(wrong) > 1 else ""
        raise TaskError(f"{where} returned scores of which that at index {wrong[0]} is {what}{others}. {_WANTED}")
    scores = [one for one in each if one is not None]
    if max(scores) - min(scores) > FARTHEST:
        raise TaskError(f"{where} returned scores that are more than {FARTHEST:g} apart. {_WANTED}")
    return judged_by(scores)


def _kind(said: Any) -> str:
    return "None" if said is None else type(said).__name__


def _as_float(said: Any, takes_bool: bool = False) -> float | None:
    """None of what is no number; infinity of one beyond the largest float."""
    if takes_bool and getattr(said, "ndim", None) == 0:
        said = said.item()
    if not isinstance(said, Real) or (isinstance(said, bool) and not takes_bool):
        return None
    number: Any = said
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def bits_of(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits, read as whole numbers: another where a value is, without a copy of them. Of a tensor
    that is sharded over ranks, of this one's part."""
    values = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    whole = values.reshape(-1).view(_WHOLE[values.element_size()])
    return sum([int(part.sum()) for part in torch.split(whole, _PART)])


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
