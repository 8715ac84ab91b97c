"""``FitCallback``: has a Lightning job train within a memory budget, by what is predicted of its first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from ...errors import PlanError
from ...fitting.choices import DEFAULT, Techniques
from ...fitting.fit import fit
from ...fitting.fitted import Fitted
from ...plan import Plan
from ...randomness import undisturbed
from ...techniques import Settings
from .callback import PlanCallback
from .checks import check_job
from .task import PRECISIONS, build_optimizer, training_loss


class FitCallback(PlanCallback):
    """Chooses as ``Trainer.fit`` sets a job up, and applies it as :class:`PlanCallback` does: which blocks are
    recomputed, whether layers save memory and, where gradients are neither clipped nor accumulated, whether the
    optimizer steps within backward. Batch, precision and arithmetic stay.

    Raises, from ``Trainer.fit``:
        NothingFits, UserError, TaskError: as :func:`autotune.fit`.
        PlanError: the job is none that a plan can be applied in.
    """

    fitted: Fitted | None = None
    """What was chosen, once it is."""

    def __init__(
        self, budget: str | int, *, techniques: Techniques | None = None, batch: Any = None, blocks: Sequence[str] = ()
    ) -> None:
        """
        Args:
            budget: what the device may charge the process, ``"8GiB"`` or bytes.
            techniques: to choose from, as :func:`autotune.fit` has them.
            batch: as the training loader collates it, of the largest shapes that will come; None is the first.
            blocks: module paths of the module's blocks.
        """
        super().__init__(Plan(settings=Settings()), blocks=blocks)
        self._budget, self._techniques, self._batch = budget, techniques, batch

    def _choose(self, trainer: Trainer, module: LightningModule) -> None:
        """The module has built itself, and is on its device."""
        if self.fitted is not None:
            return
        if self._batch is None:
            with undisturbed():
                self._batch = next(iter(self._first_loader(trainer)))
        clipped = trainer.gradient_clip_val
        if clipped and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise PlanError("FitCallback: gradients are clipped by value, which is not predicted. Clip by the norm.")
        data, owner = getattr(trainer, "datamodule", None), module.trainer
        module.trainer = None  # which a copy of the module would copy
        try:
            self.fitted = fit(
                module,
                self._batch,
                self._budget,
                loss=lambda model, batch: training_loss(model, batch, data),
                optimizer=build_optimizer,
                techniques=DEFAULT if self._techniques is None else self._techniques,
                accumulate=trainer.accumulate_grad_batches,
                max_grad_norm=float(clipped) if clipped else None,
                precision=PRECISIONS.get(trainer.precision),
                blocks=self.blocks,
                dry_run=True,
            )
        finally:
            module.trainer = owner
        self.plan, self._batch = self.fitted.plan, None
        check_job(self.plan, trainer, module)
