"""A Lightning job's validation as its task's ``evaluate``: the loop that a Trainer runs between two training steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics import Metric

from ...errors import TaskError
from ...measure.checks.quality import NoQuality
from ...measure.evaluation import tell_of_batch
from ...nested import samples_in
from ...training.data_loader import has_own_batches, rebatched
from .hooks import batch_hook, is_own, logging_to


def held_out_loaders(made: Any) -> list[Any]:
    """The loaders of what a ``val_dataloader`` returned, in Lightning's order."""
    if isinstance(made, CombinedLoader):
        warnings.warn("validation is not in trials, nor in their peak: it is of a CombinedLoader.", stacklevel=4)
        return []
    if isinstance(made, Mapping):
        return list(made.values())
    return list(made) if isinstance(made, (list, tuple)) else [made] if made is not None else []


def evaluation_of(loaders: Sequence[Any], data: Any, trainer: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What validates a LightningModule.

    Args:
        loaders: for validation.
        data: the datamodule, or None.
        trainer: arguments of the Trainer that the job has today; ``limit_val_batches`` and the callbacks'
            ``monitor`` bear on it.

    Returns:
        ``evaluate(model, batch_size)``; ``evaluate(model)`` where the loaders have no batch size, or several; None
        where the job does not validate.
    """
    limit = trainer.get("limit_val_batches")
    if not loaders or limit == 0:
        return None
    validation = _Validation(loaders, data, trainer)
    sizes = {None if has_own_batches(loader) else loader.batch_size for loader in loaders}
    own = sizes.pop()
    if sizes or own is None:
        return lambda model: validation.run(model, None)

    def evaluate(model: Any, batch_size: int = own) -> Any:
        return validation.run(model, None if batch_size == own else batch_size)

    return evaluate


class _Validation:
    """The validation loop, with the hooks of module and datamodule in Lightning's order, and no callbacks."""

    def __init__(self, loaders: Sequence[Any], data: Any, trainer: Mapping[str, Any]) -> None:
        self._own, self._data, self._trainer = list(loaders), data, trainer
        self._rebatched: tuple[int | None, list[Any]] = (None, self._own)

    def run(self, module: Any, batch_size: int | None) -> Any:
        """Validate, and return what the job judges its model by, so that higher is better.

        Raises:
            TaskError: the module needs its Trainer for it.
        """
        if not is_own(module, "validation_step"):
            return NoQuality(f"{type(module).__name__} has no validation_step")
        if batch_size != self._rebatched[0]:
            changed = self._own if batch_size is None else [rebatched(one, batch_size) for one in self._own]
            self._rebatched = (batch_size, changed)
        logged = _Logged()
        try:
            with logging_to(module, logged), torch.no_grad():  # as within fit, whatever inference_mode says
                self._validate(module, self._rebatched[1], logged)
                values = logged.values()
        except RuntimeError as error:
            if "is not attached to a `Trainer`" not in str(error):
                raise
            raise TaskError(
                f"{type(module).__name__} needs its Trainer to validate, which trials have not ({error}). Have it do "
                "without, or leave validation out of the peak: autotune.from_lightning(..., evaluate=None)."
            ) from error
        finally:
            logged.reset()
        return self._judged(values)

    def _validate(self, module: Any, loaders: Sequence[Any], logged: _Logged) -> None:
        if is_own(module, "on_validation_model_eval"):
            module.on_validation_model_eval()
        else:  # Lightning's own asks the Trainer
            module.eval()
        module.on_validation_start()
        module.on_validation_epoch_start()
        for number, loader in enumerate(loaders):
            logged.suffix = f"/dataloader_idx_{number}" if len(loaders) > 1 else ""
            for batch_idx, batch in enumerate(islice(loader, _limit(loader, self._trainer))):
                self._step(module, batch, batch_idx, number, logged)
        logged.suffix, logged.num_samples = "", 1
        module.on_validation_epoch_end()
        module.on_validation_end()

    def _step(self, module: Any, batch: Any, batch_idx: int, number: int, logged: _Logged) -> None:
        batch = batch_hook(module, self._data, "on_before_batch_transfer")(batch, number)
        batch = batch_hook(module, self._data, "transfer_batch_to_device")(batch, module.device, number)
        batch = batch_hook(module, self._data, "on_after_batch_transfer")(batch, number)
        tell_of_batch(batch)
        logged.num_samples = samples_in(batch, 1)
        place = (batch, batch_idx, *((number,) if logged.suffix else ()))
        module.on_validation_batch_start(*place)
        takes = inspect.signature(module.validation_step).parameters
        output = module.validation_step(*(place if len(takes) > 1 else place[:1]))
        module.on_validation_batch_end(output, *place)

    def _judged(self, values: Mapping[str, float]) -> Any:
        callbacks = self._trainer.get("callbacks") or ()
        watching = callbacks if isinstance(callbacks, Iterable) else (callbacks,)
        found = (one for one in watching if isinstance(getattr(one, "monitor", None), str))
        watched = next(found, None)
        name, mode = ("val_loss", "min") if watched is None else (watched.monitor, watched.mode)
        if name in values:
            return values[name] if mode == "max" else -values[name]
        return NoQuality(
            f"validation logs no {name!r}, but {', '.join(sorted(values)) or 'nothing'}. Name what the model is judged "
            "by as the job does, by a callback with monitor= and mode= among the trainer's callbacks, or log val_loss"
        )


def _limit(loader: Any, trainer: Mapping[str, Any]) -> int | None:
    """Most batches of a loader."""
    limit = trainer.get("limit_val_batches")
    if isinstance(limit, float):
        return None if limit == 1 else int(limit * len(loader))
    return limit


class _Logged:
    """In the place of ``LightningModule.log``: means over an epoch, as Lightning takes them."""

    def __init__(self) -> None:
        self.num_samples, self.suffix = 1, ""
        """Of the batch that is validated, and what the names of its loader end in."""
        self._sums: dict[str, Any] = {}
        self._metrics: dict[str, Metric] = {}

    def __call__(
        self, name: str, value: Any, *_: Any, batch_size: int | None = None, add_dataloader_idx: bool = True, **__: Any
    ) -> None:
        """Take a value, or a metric, which is computed in the end."""
        name += self.suffix if add_dataloader_idx else ""
        if isinstance(value, Metric):
            self._metrics[name] = value
        elif isinstance(value, (torch.Tensor, int, float)):
            count = batch_size or self.num_samples
            value = value.detach() if isinstance(value, torch.Tensor) else value
            total, num = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value * count, num + count

    def values(self) -> dict[str, float]:
        """All that was logged, by its name."""
        sums = {name: float(total / num) for name, (total, num) in self._sums.items()}
        return sums | {name: float(metric.compute()) for name, metric in self._metrics.items()}

    def reset(self) -> None:
        """As Lightning leaves the metrics."""
        for metric in self._metrics.values():
            metric.reset()
