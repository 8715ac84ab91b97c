"""Applies a plan in an unedited script: finds its model, optimizer and loader, and changes them in place
before they are first used, through the same functions as everywhere."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PlanError
from ...plan import Plan
from ...ranks import world_size
from ...techniques import Settings, Stage
from ...techniques.batch import Batch
from ...techniques.data_loading import DataLoading
from ...techniques.parallel import Parallel
from ...techniques.support.facts import ScriptFacts
from ...training.drift import Difference, here, is_strict, other_model, other_shapes, tell
from ..flags import states_tokens
from ..refusal import refuse, tell_once, why_no_model
from ..shards import mismatch, shared_by, unwrapped, wrappers

if TYPE_CHECKING:
    from .loaders import Loaders
    from .undivided import Undivided

_OWN_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of a module that recomputes its blocks: of transformers' and diffusers', of timm's."""


class InScript:
    """Which parts of a plan are applied in a script, and which are still to be applied."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan, self.path = plan, path
        self.model: Any = None
        self.optimizer: Any = None
        self.loader: Any = None
        """That the first optimizer step is of; None after it."""
        self._other_shapes: Difference | None = None
        """Of its batches, than the plan was found with."""
        self.first_step: tuple[tuple[int, ...], int] = ((), 0)
        """What may have been the samples of a pass, and the backward passes to the first optimizer step."""
        self.batch_size: int | None = None
        self.own_autocast: set[str] = set()
        """Devices for which the script turns autocast on itself."""
        self.is_compiled = False
        """Whether the script compiles its model itself."""
        self.recomputes = False
        """Whether its model recomputes blocks by itself."""
        self.is_in_parts = False
        """Whether the script calls parts of its model one by one, and not the model."""
        self.is_split_unseen = False
        """Whether the plan splits the batch otherwise than the job, and nothing has compared the two."""
        self._losses: Undivided | None = None
        """Of the first step, where the split is unseen."""
        self.wants_model = any(
            technique.stage not in (Stage.PROCESS, Stage.LOADER) and technique.model_dump(exclude_defaults=True)
            for technique in plan.settings.techniques()
        )
        self.wants_loader = plan.settings.affect("loader")

    @functools.cached_property
    def data(self) -> Loaders:
        """The loaders that the script reads."""
        from .loaders import Loaders

        return Loaders(self.plan)

    def check_ranks(self) -> None:
        """End the script if it trains in another number of processes than the plan is for."""
        if (differs := self.plan.settings.parallel.other_size(world_size())) is not None:
            refuse(f"{self.path}: {differs}")

    def put_on_model(self, model: Any, run: Callable[[Any], Any] | None) -> None:
        """The model's own stages, and its optimizer's, before the first forward pass that trains.

        Args:
            model: the script's root module, whose parameters the optimizer has.
            run: a forward of the model that it is given, as the script is about to make; None where it makes none of
                the whole.
        """
        from ...training.apply_pieces import apply_to_model

        own = unwrapped(model)
        beyond = (one.beyond_script() for one in self.plan.settings.techniques())
        if (reason := next(filter(None, beyond), None)) is not None:  # unless the script had applied the plan by now
            raise PlanError(reason)
        self._check(model, own)
        if (reason := mismatch(self.plan.settings, model)) is not None:
            raise PlanError(reason)
        settings = self.plan.settings.having(Parallel())  # which is the script's own to do
        plan = self.plan.model_copy(update={"settings": settings})
        if shared_by(model) != "fsdp":  # which no row for a model follows, as was seen to
            try:
                apply_to_model(plan, own, run=run)
            except PlanError:
                apply_to_model(Plan(settings=Settings()), own)
                raise
        self.model = model
        self.put_on_optimizer()

    def put_on_optimizer(self) -> None:
        """The optimizer's stage, before its first step."""
        from ...training.apply_pieces import apply_to_optimizer

        apply_to_optimizer(self.plan, self.optimizer)

    def _check(self, model: Any, own: Any) -> None:
        import torch

        device = next(p.device.type for p in own.parameters())
        if self.plan.budget.device not in (None, device):
            raise PlanError(f"the plan is for {self.plan.budget.device}, but the script trains on {device}.")
        self.is_compiled = own._compiled_call_impl is not None or any(
            getattr(one, "_orig_mod", None) is not None for one in wrappers(model)
        )
        self.recomputes = any(getattr(one, name, False) is True for one in own.modules() for name in _OWN_CHECKPOINTING)
        does = self.does_itself().model_copy(update={"autocasts": torch.is_autocast_enabled(device)})
        if (reason := self._left_to(does)) is not None:
            raise PlanError(reason)
        if (differs := other_model(self.plan, own)) is not None:
            raise PlanError(differs)

    def does_itself(self) -> ScriptFacts:
        """What has been seen of the script, as its model was found."""
        return ScriptFacts(compiles=self.is_compiled, recomputes=self.recomputes, in_parts=self.is_in_parts)

    def _left_to(self, does: ScriptFacts) -> str | None:
        """What the script does that a row of the plan does too, in words, and what to do; None where there is none."""
        for row in self.plan.settings.chosen():
            if (reason := row.left_to(does)) is not None:
                return (
                    f"{reason}, and {row.name} would not be applied as the plan has it. Change that in the script, or "
                    "leave the row out of the plan."
                )
        return None

    def train_on(self, loader: Any) -> None:
        """A loader is iterated over, before the first optimizer step: of several, the first that the plan was found
        with is trained on, or the last."""
        if loader is self.loader or self.data.is_first(self.loader):
            return
        self.loader, self._other_shapes = loader, other_shapes(self.plan, loader)
        self.batch_size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size

    def check_step(self, num_backwards: int, sizes: tuple[int, ...]) -> None:
        """Before the first optimizer step: all of the plan is applied, or the script ends.

        Args:
            num_backwards: backward passes that made its gradients.
            sizes: of the first two dimensions of the model's inputs.
        """
        if self.wants_model and self.model is None:
            refuse(f"{why_no_model()} So the plan could not be applied.")
        if (reason := self._left_to(ScriptFacts(autocasts=bool(self.own_autocast)))) is not None:
            refuse(reason)
        if self.wants_loader and self.loader is None:
            refuse(
                "data_loading: the script iterates over no torch.utils.data.DataLoader. Leave the row out of "
                f"{self.path}."
            )
        if self.wants_loader and not self.data.is_in_force:
            tell_once(
                "data_loading is not applied: it is put on the loaders that the plan was found with, where their "
                "datasets give the same again, and the script reads none of these."
            )
        batch, whole = self.plan.settings.batch, self.batch_size
        self.first_step = (whole, *sizes) if whole else sizes, num_backwards
        if batch is None:
            return
        batch = batch.share(self.plan.settings.parallel.num_shares)
        if batch.flag is not None:
            self._check_tokens(batch, num_backwards)
            return
        is_cut = batch.accumulate > 1 and whole == batch.num_samples  # a loader's batch, by the script itself
        seen = (whole,) if whole and not is_cut else sizes
        if (seen and batch.micro not in seen) or num_backwards != batch.accumulate:
            drew = f"{seen[0] if seen else '?'} × {num_backwards}"
            refuse(
                f"the plan trains on {batch.describe()}, but the script on {drew} (samples × backward passes to an "
                "optimizer step). Give its own flags the plan's: `autotune run plan.yaml -- python train.py "
                "--batch-size {batch.micro} --grad-accum {batch.accumulate}`."
            )
        if self._losses is not None:
            self._check_split(self._losses, num_backwards)

    def _check_tokens(self, batch: Batch, num_backwards: int) -> None:
        """The script makes its batches by a flag, which is to state what the plan does."""
        if not states_tokens(sys.orig_argv, batch) or num_backwards != batch.accumulate:
            times = f"{num_backwards} backward passes" if num_backwards > 1 else "one backward pass"
            refuse(
                f"the plan trains on {batch.describe()}, and the script was not told so, or makes {times} to an "
                f"optimizer step. Give it the plan's: `autotune run plan.yaml -- python train.py {batch.flag} "
                "{batch.tokens} --grad-accum {batch.accumulate}`."
            )
        if self._losses is not None:
            self._check_split(self._losses, num_backwards)

    @contextmanager
    def passing_back(self, loss: Any) -> Iterator[None]:
        """A loss is passed back within the block: those of the first step may tell what is wrong with a split."""
        if not self.is_split_unseen:
            yield
            return
        from .undivided import Undivided

        self._losses = self._losses or Undivided()
        with self._losses.passing_back(loss, self._parameters):
            yield

    def _check_split(self, losses: Undivided, num_backwards: int) -> None:
        from .undivided import DIVIDE

        self.is_split_unseen = False
        if losses.are_sure(self._parameters()):
            refuse(
                f"{self.path}: the plan splits the batch otherwise than the command, and the script passes back "
                f"{num_backwards} losses to a step that are divided by nothing, so that its gradient is "
                f"{num_backwards} times that of their mean. In the script, {DIVIDE}; or leave batch out of the plan."
            )
        tell_once(
            "nothing has compared the plan's split of the batch with the job as it stands (a search does). See that "
            f"the script does two things: {DIVIDE}, and make no learning rate of the batch flag alone."
        )

    def _parameters(self) -> Iterator[Any]:
        """Of the model that is trained; none until it is known."""
        return iter(()) if self.model is None else self.model.parameters()

    def tell_drift(self) -> None:
        """Before the first optimizer step: what differs from where the plan was measured; an error if that was asked
        for."""
        found = [*here(self.plan, self.plan.budget.device or "cpu")]
        if self._other_shapes is not None:
            found.append(self._other_shapes)
        if found and is_strict():
            refuse(tell(found, strict=True))
        if found:
            print(f"autotune: {tell(found, strict=False)}", file=sys.stderr, flush=True)

    def describe(self) -> str:
        """What is applied, in a line."""
        settings = self.plan.settings
        if not self.data.is_in_force:
            settings = settings.having(DataLoading())
        changed = [one.describe() for one in settings.techniques() if one.model_dump(exclude_defaults=True)]
        return f"applied: {', '.join(changed) or 'nothing but the job as it is'} ({os.path.relpath(self.path)})"
