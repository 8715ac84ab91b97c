"""The facts of a script: what its first steps tell of its model, its data and its optimizer."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from ...errors import Caught
from ...measure.dataset import DatasetFacts, inspect_dataset
from ...measure.facts import build_facts
from ...measure.lengths import find_lengths
from ...measure.memory import Charge
from ...measure.timing.loading import LoaderRates, loader_rates
from ...nested import tensors_in
from ...ranks import world_size
from ...task import Task
from ...techniques import TECHNIQUES, Facts, LoaderSpec, Settings, lost_techniques
from ...techniques.batch import Batch
from ...techniques.parallel import Parallel
from ...techniques.support.facts import TokenBatches, num_processors
from ...training.data_loader import OPTIONS
from ...training.fingerprint import identify
from ...workers import Failed, Outcome
from ...workers.request import InspectRequest
from ..observer import Observer
from ..plan.applied import InScript
from ..refusal import why_no_model
from ..scratch import made_in, made_words
from ..shards import shared_by, unwrapped
from .boundary import Boundary
from .extents import Passes, extents_of

_NUM_STEPS = 3
"""Optimizer steps that are observed; the first is slower than the others."""
_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Look(Observer):
    """Observes some optimizer steps, then answers with the script's facts."""

    def __init__(
        self,
        request: InspectRequest,
        found: InScript,
        num_started: int,
        answer: Callable[[Outcome], NoReturn],
        scratch: Path | None = None,
        obstacle: str | None = None,
    ) -> None:
        """
        Args:
            request: the device, and what the user said.
            found: the script's model and its loaders, once they are.
            num_started: processes that the command has started.
            answer: takes the outcome, and ends the script.
            scratch: the folder that it runs in; None is the user's.
            obstacle: why its epoch is not ended early, to see the next; None where it may be.
        """
        super().__init__()
        self._request, self._found, self._answer, self._num_started = request, found, answer, num_started
        on_cpu = request.device == "cpu"
        self._process_bytes = Charge(torch.device("cpu")).peak().process if on_cpu else None
        self._before: Any = None
        self._after: Any = None
        """The random generators, as a forward pass found and left them."""
        self._draws = self._draws_between = False
        self._per_step: list[int] = []
        self._num_passes = 0
        """Backward passes since the first step."""
        self._began_s, self._began_with, self._began_seen, self._began_drawn = 0.0, 0, 0, 0
        self._scratch = scratch
        self._hooks: list[Any] = []
        self._is_time_first = False
        self._made: str | None = None
        """What each trial is going to make anew before its first step, in words."""
        self._boundary = Boundary(found.data, answer, obstacle)
        self._shapes = Passes()
        self._known: tuple[Sequence[Any], Facts, float] | None = None
        """The loaders and facts of the last step that they are made of, and when that was."""

    def forward(self, inputs: Any) -> None:
        """Whether the script has drawn random numbers since the last."""
        super().forward(inputs)
        if self._request.options.in_tokens:
            self._shapes.add(inputs)
        self._watch_recurrent(inputs)
        self._before = self._generators()
        self._draws_between = self._draws_between or self._after not in (None, self._before)

    def _watch_recurrent(self, inputs: Any) -> None:
        """Whether recurrent layers are called with what the model is called with, time first."""
        first = next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 1), None)
        while self._hooks:
            self._hooks.pop().remove()
        if self._found.model is None or first is None or self._boundary.is_awaited:
            return

        def look(module: nn.RNNBase, args: tuple[Any, ...]) -> None:
            is_alike = isinstance(args[0], torch.Tensor) and args[0].shape[:2] == first.shape[:2]
            self._is_time_first = self._is_time_first or (is_alike and not module.batch_first)

        layers = (module for module in self._found.model.modules() if isinstance(module, nn.RNNBase))
        self._hooks = [layer.register_forward_pre_hook(look) for layer in layers]

    def forward_ended(self, outputs: Any) -> None:
        """Whether the model has drawn random numbers."""
        self._after = self._generators()
        self._draws = self._draws or self._after != self._before

    def epoch(self, iterator: Any, loader: Any) -> None:
        """Which draws a seed, once."""
        super().epoch(iterator, loader)
        self._after = None

    def epoch_begins(self, loader: Any) -> None:
        """The next: the script has done what it does between two."""
        self._boundary.begins(loader)

    def ends_early(self, loader: Any) -> bool:
        """Each epoch does, once all else is known."""
        return self._boundary.ends(loader)

    def _generators(self) -> tuple[Any, ...]:
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._request.device == "cuda" else [])]
        numpy = sys.modules.get("numpy")
        _, keys, place, *_ = numpy.random.get_state() if numpy is not None else (None, None, None)
        return *(state.tolist() for state in states), random.getstate(), keys if keys is None else keys.tolist(), place

    def backward(self, loss: Any) -> None:
        """Count it."""
        super().backward(loss)
        self._num_passes += 1

    def stepped(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
        """The last of them tells."""
        super().stepped(optimizer, num_backwards)
        if self._boundary.is_awaited:
            return
        self._per_step.append(num_backwards)
        read, self.drawn_from = self.drawn_from, []
        if self.num_steps == 1:
            self._made = made_words(made_in(self._scratch)) if self._scratch is not None else None
            self._began_s, self._began_with, self._num_passes = self._now_s(), self.num_samples, 0
            self._began_seen, self._began_drawn = self._seen, self._drawn
        if self.num_steps >= _NUM_STEPS and self._known is None:
            trained_on = self._trained(read)
            self._known = trained_on, self._facts(optimizer, trained_on), self._now_s()
        if self._known is None:
            return
        trained_on, facts, since_s = self._known
        if not (self._request.options.in_tokens and self._shapes.may_tell_more(self._now_s() - since_s)):
            self._boundary.await_next(trained_on, self._with_tokens(facts))

    def _trained(self, read: Sequence[Any]) -> Sequence[Any]:
        """The loaders that are trained on, of those that were read in a step; without a model and backward passes it
        tells why, and ends the script."""
        if self._found.model is None:
            self._refuse(why_no_model())
        if not self._num_passes:
            self._refuse(
                "the script's optimizer steps without a backward pass. Gradients are seen to be made by "
                "loss.backward() or torch.autograd.backward, not by torch.autograd.grad or torch.func.grad: use one of "
                "the first two."
            )
        if len(trained_on := self._found.data.in_order(read)) > 0:
            self._found.train_on(trained_on[0])
        return trained_on

    def finish(self) -> Outcome | None:
        """What is known where the script ends by itself, or takes long, before its next epoch; None where that is too
        little."""
        if self._known is not None and not self._boundary.is_awaited:
            trained_on, facts, _ = self._known
            self._boundary.hold(trained_on, self._with_tokens(facts))
        return self._boundary.finish()

    def _facts(self, optimizer: torch.optim.Optimizer, trained_on: Sequence[Any]) -> Facts:
        request, model = self._request, unwrapped(self._found.model)
        ranks, parallel = world_size(), self._shared_out()
        device = self._device_of(model)
        rate = (self.num_samples - self._began_with) / (self._now_s() - self._began_s)
        loader = self._found.loader
        passes = self._passes()
        accumulate = self._per_step[-1] // passes
        micro = self._micro(accumulate, passes)
        task = self._task(model)
        dataset, collate = task.build_dataset(), task.collate
        options = {name: getattr(loader, name) for name in OPTIONS} if loader is not None else {}
        data = _NO_DATA if loader is None else _read(task, dataset)
        spec = LoaderSpec(dataset, collate, dict(task.loader_options), torch.device(device), user_dataset=dataset)
        batch = Batch(micro=micro, accumulate=accumulate * ranks)
        is_read = bool(data.samples)
        has_rates = is_read and not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None
        rates = self._loader_rates(task, spec, batch.share(ranks), rate, data) if has_rates else LoaderRates()
        fingerprint, identity = identify(model, dataset if is_read else (), collate)
        has_norm = any(isinstance(module, _NORMS) and module.training for module in model.modules())
        return build_facts(
            model,
            dataset,
            data,
            optimizer,
            batch,
            request.options,
            request.device,
            fingerprint=fingerprint,
            identity=identity,
            num_threads=self._num_threads(parallel),
            process_bytes=self._process_bytes and self._process_bytes * ranks,
            shapes_vary=False,  # what the script draws is what is measured
            shards_by_worker=options.get("num_workers", 0) > 1,
            loader_options={k: v for k, v in options.items() if isinstance(v, (int, bool))},
            loader_samples_per_s=rates.by_workers,
            loader_bytes=rates.bytes_by_workers,
            step_samples_per_s=rate,
            effective_batch_held=True,
            effective_batch_assumed=False,
            batch_varies=self._varies(micro),
            passes=passes,
            draws_between_passes=self._draws_between,
            own_autocast=self._request.device in self._found.own_autocast,
            split_error=None if has_norm else 0.0,
            allow_lossy=False,
            left_out=self._left_out(loader, micro, passes),
            even_batches=True,
            ranks=ranks,
            shared_by=parallel.kind,
            first_losses=(losses := self._first_losses()),
            not_comparable=self._not_comparable(not is_read or data.deterministic, losses),
            warnings=(*self._warnings(trained_on), *rates.notes),
        )

    def _task(self, model: nn.Module) -> Task:
        loader = self._found.loader
        dataset = loader.dataset if loader is not None else ()
        collate = None if loader is None or loader.collate_fn is default_collate else loader.collate_fn
        options = {name: getattr(loader, name) for name in OPTIONS} if loader is not None else {}
        return Task(
            build_model=lambda: model,
            build_dataset=lambda: dataset,
            compute_loss=lambda model, batch: batch,
            collate=collate,
            loader_options={name: value for name, value in options.items() if value is not None},
        )

    def _with_tokens(self, facts: Facts) -> Facts:
        """The facts with what is seen of batches by tokens, where that is asked for."""
        if not self._request.options.in_tokens:
            return facts
        loader, model, lengths = self._found.loader, unwrapped(self._found.model), None
        extents = (*(extents_of(loader) if loader is not None else ()), *self._shapes.extents())
        seen = (self.num_samples - self._began_with) / (self._num_passes * world_size())
        if extents and loader is not None:
            with Caught():  # a user's dataset raises what it likes
                lengths = find_lengths(self._task(model), loader.dataset, facts.dataset_deterministic)
        found = TokenBatches(micro=max(1, round(seen)), extents=extents, lengths=lengths)
        return facts.model_copy(update={"token_batches": found})

    def _now_s(self) -> float:
        """Once the device has done what was asked of it."""
        if self._request.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def _device_of(self, model: nn.Module) -> str:
        found = next(p.device.type for p in model.parameters())
        if found != self._request.device:
            self._answer(Failed(message=f"the script trains on {found}, but --device is {self._request.device}."))
        return found

    def _passes(self) -> int:
        """How often the model is called with each sample that a loader has drawn, where each call is passed back."""
        drawn, called = self._drawn - self._began_drawn, self._seen - self._began_seen
        times = called // drawn if drawn else 1
        is_alike = times > 1 and called == times * drawn and self._per_step[-1] % times == 0
        return times if is_alike else 1

    def _micro(self, accumulate: int, passes: int) -> int:
        """Samples of a backward pass: of a loader's batch, or of a part of it, if the script cuts that itself."""
        seen = round(passes * (self.num_samples - self._began_with) / (self._num_passes * world_size()))
        whole = self._found.batch_size
        return seen if whole in (None, seen * accumulate) else whole

    def _shared_out(self) -> Parallel:
        """What the script's processes share its model by."""
        ranks, kind = world_size(), shared_by(self._found.model)
        if ranks == 1:
            return Parallel()
        found = num_processors() if self._request.device == "cpu" else torch.cuda.device_count()
        if ranks != self._num_started:
            self._refuse(
                f"the script starts {ranks - 1} other processes itself, and is measured in those that its command "
                f"starts. Have torchrun start them: `torchrun --nproc-per-node {ranks} train.py`."
            )
        if kind != "ddp":
            found_kind = "fully_shard, which techniques for a model must come before" if kind == "fsdp" else "no such"
            self._refuse(
                f"the script trains in {ranks} processes, and a search wants their DistributedDataParallel(model), but "
                f"got {found_kind}. Use it there, or give a task file, with `parallel` in a space."
            )
        if ranks > found:
            what = "processors" if self._request.device == "cpu" else "CUDA devices"
            self._refuse(f"the command starts {ranks} processes, but a trial has {found} {what} here. Start fewer.")
        return Parallel(kind="ddp", processes=ranks)

    def _refuse(self, reason: str) -> NoReturn:
        self._answer(Failed(message=reason))

    def _num_threads(self, parallel: Parallel) -> int:
        """That torch computes with in the trials of a plan: of several processes, what the plan sets."""
        own = self._request.environment
        if parallel.kind == "none" or str(torch.get_num_threads()) != os.environ.get("OMP_NUM_THREADS"):
            return torch.get_num_threads()  # the script's own word
        return int(Settings(parallel=parallel).environment(own)["OMP_NUM_THREADS"])

    def _loader_rates(self, task: Task, spec: LoaderSpec, share: Batch, rate: float, data: DatasetFacts) -> LoaderRates:
        ranks = world_size()
        most_workers = 0 if data.on_device else max(1, num_processors() // ranks)
        found = loader_rates(task, spec, share, most_workers, rate / ranks)
        return found._replace(by_workers={count: value * ranks for count, value in found.by_workers.items()})

    def _first_losses(self) -> tuple[float, ...]:
        """Of each optimizer step, what the backward passes were of, in all: no split of a batch changes it."""
        losses = self.losses.look()()
        found = [0.0] * self.num_steps if losses else []
        for step, loss in losses:
            found[step - 1] += loss
        return tuple(found)

    def _not_comparable(self, reads_alike: bool, losses: Sequence[float]) -> str | None:
        if not losses or not all(map(math.isfinite, losses)):
            return "the script makes no backward pass of a finite loss"
        if self._draws:
            return "its model draws random numbers as it trains (dropout), others in each split of a batch"
        if not reads_alike:
            return "its dataset returns other values each time (augmentation), which hang on the number of workers"
        return None

    def _varies(self, micro: int) -> bool:
        """Whether its optimizer steps see now more samples, now fewer."""
        sizes, num_backwards = self._found.first_step
        return {*self._per_step, num_backwards} != {num_backwards} or (bool(sizes) and micro not in sizes)

    def _warnings(self, trained_on: Sequence[Any]) -> Iterator[str]:
        if self._made is not None:
            yield self._made
        if len(trained_on) > 1:
            sizes = " and ".join(str(loader.batch_size) for loader in trained_on)
            yield (
                f"an optimizer step draws from {len(trained_on)} loaders, in batches of {sizes}: the batch is that of "
                "the first, and samples/s count what all of them draw"
            )
        if self._is_time_first and not self._drawn:
            yield (
                "the model is called with time first, as its recurrent layers are: the batch and samples/s count time "
                "steps, not sequences"
            )

    def _left_out(self, loader: Any, micro: int, passes: int) -> dict[str, str]:
        seen = {"has_loader": loader is not None, "batch_varies": self._varies(micro), "passes": passes}
        does = self._found.does_itself().model_copy(update=seen)
        reasons = {name: one.not_in_scripts or one.left_to(does) for name, one in TECHNIQUES.items()}
        return lost_techniques() | {name: reason for name, reason in reasons.items() if reason is not None}


_NO_DATA = DatasetFacts([], None, None, False, False, False)


def _read(task: Task, dataset: Any) -> DatasetFacts:
    """Nothing where no sample can be read alone: a sampler may yield other than numbers, and a collate want several."""
    with Caught():  # a user's dataset may raise anything at what it was not written for
        return inspect_dataset(task, dataset)
    return _NO_DATA
