"""Packing: the samples of a batch as one row, without padding; and whether a model keeps them apart in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..errors import Caught, PlanError
from ..nested import to_device
from ..randomness import seed_everything, undisturbed
from ..techniques import Settings
from ..techniques.support.comparable import state_kept, without_dropout
from ..techniques.support.tf32 import without_tf32
from .loader import Loader

IGNORED = -100
"""The label that torch's cross entropy, and so transformers, leaves out."""
FEW = 3
"""Samples that are computed both ways."""
_CHANGED = 2e-3
"""Relative difference of a parameter's gradient, padded and packed, above which it is another, beyond rounding: that is
up to twice the difference of the same samples one by one. Measured in fp32, under autocast and in bf16: nothing is left
where samples are kept apart. Where one of 300 tokens sees any of another, 0.05 and more is, however little comes of it;
of 1,000 tokens, 0.03 and more."""
_ROUNDED = 4e-2
"""Relative difference that may be rounding; it was 0.014 at most."""
_SMALL = 1e-4
"""The share of the whole gradient below which a parameter's is small: it may be rounding alone, as that of the biases
of keys, which is 0. Its difference is taken relative to such a share."""
_OTHER_LOSS = 1e-2
"""Relative difference of a mean loss above which it is another: one in bf16 is rounded by 0.4 %."""
_SCALE = 2.0**10
"""Of losses, so that small gradients are not 0 in fp16; exact."""
_SHAKEN = 0.02
"""Standard deviation of what takes the place of zeros: transformers' of initial weights."""
_INSTEAD = "use tokens without packed"
_IN_A_ROW = {"input_ids", "labels", "attention_mask", "length"}
"""What a sample may have for :func:`in_one_row`, which leaves the last two out: they say nothing more."""


def in_one_row(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of one row.

    Args:
        samples: each with ``input_ids`` and ``labels`` of its length. A model predicts a label from the tokens before
            it, so that a sample's first is left out: it would be predicted from another sample.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, which begin at 0 in each sample; all of shape (1, tokens).

    Source: transformers, DataCollatorWithFlattening
    """
    tokens = [_in_row(sample["input_ids"]) for sample in samples]
    labels = [_in_row(sample["labels"]).clone() for sample in samples]
    for one in labels:
        one[:1] = IGNORED
    positions = torch.cat([torch.arange(len(one)) for one in tokens])
    return {"input_ids": torch.cat(tokens)[None], "labels": torch.cat(labels)[None], "position_ids": positions[None]}


def few(lengths: Sequence[int], tokens: int) -> list[int]:
    """Samples that fit in one row together, of unlike lengths; none where no two do."""
    ranked = sorted(range(len(lengths)), key=lambda place: lengths[place])
    fitting = sum(1 for place in ranked if 0 < lengths[place] * FEW <= tokens)
    some = [place for place in ranked if lengths[place]][:fitting]
    if len(some) >= FEW:
        return [some[-1], some[len(some) // 2], some[0]]
    pair = [place for place in ranked if lengths[place]][:2]
    return pair if len(pair) == 2 and sum(lengths[place] for place in pair) <= tokens else []


@dataclass(frozen=True)
class Packing:
    """How a task's samples are packed, and what they are without."""

    collate: Callable[[list[Any]], Any] | None
    """Of the task: makes padded batches."""
    pack: Callable[[list[Any]], Any] | None
    """Of the task; None is :func:`in_one_row`."""
    compute_loss: Callable[[nn.Module, Any], Any]
    """Of the task."""

    @property
    def row_of(self) -> Callable[[list[Any]], Any]:
        """Makes packed batches."""
        return self.pack or in_one_row

    def check(self, model: nn.Module, loader: Loader, settings: Settings) -> None:
        """See to it that a model keeps samples of a loader apart, and counts them as it would padded.

        Args:
            model: on its device, with these settings.
            loader: of packed batches.
            settings: in force.

        Raises:
            PlanError: it does not.
            Exception: whatever the user's dataset raises.
        """
        lengths, tokens = loader.spec.lengths, loader.batch.tokens
        places = few(lengths, tokens) if lengths is not None and tokens is not None else []
        with undisturbed():
            samples = [loader.spec.user_dataset[place] for place in places]
        has_context = any(technique.has_context for technique in settings.techniques())
        context = partial(settings.forward_context, loader.device.type) if has_context else nullcontext
        accumulates = settings.batch is None or settings.batch.accumulate > 1
        if samples and (reason := self.obstacle(model, samples, loader.device, context, accumulates)) is not None:
            raise PlanError(f"settings.batch.packed: {reason}.")

    def obstacle(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        accumulates: bool = True,
    ) -> str | None:
        """Why a model is not to be trained on packed batches, in words; None where it can be.

        Nothing is taken from what a model says of itself: the gradient of a few samples padded is compared with theirs
        packed, without dropout, in the model's own modes. A sample that sees another changes the gradient of what lets
        it, however little it changes the loss. How far rounding goes is seen with the padded samples one by one, added
        up as those of an optimizer step are; a loss that counts otherwise then is refused too.

        The model itself is run. A copy of it would be a second model in memory, and what techniques have put around or
        into it cannot always be copied.

        Args:
            model: on its device, as it is trained. Its parameters, buffers and the numbers on its modules are
                afterwards what they were, and gradients are not touched.
            samples: two or more that go into one row.
            device: where the model is.
            context: of forward and loss.
            accumulates: whether an optimizer step may have several rows.

        Raises:
            MemoryError: and torch.OutOfMemoryError.
        """
        if self.pack is None and (reason := _not_for_a_row(samples)) is not None:
            return reason
        run = partial(_Pass.of, model, self.compute_loss, device, context)
        with Caught(MemoryError, torch.OutOfMemoryError) as raised, _undisturbed(model):
            padded = run(self.collate or default_collate, [samples])
            by_one = padded.counts or accumulates
            noise = run(self.collate or default_collate, [[one] for one in samples] if by_one else [samples[::-1]])
            apart = padded.distances(noise)
            if (reason := padded.unknown(apart, by_one)) is not None:
                return reason
            return _changes(padded, apart, run(self.row_of, [samples]), by_one)
        error = raised.take()
        return f"a row of samples, or the same padded, raises {type(error).__name__}: {str(error).strip()[:200]}"


@dataclass(frozen=True)
class _Pass:
    """Of some samples, in one forward pass or several."""

    loss: float
    """Their mean."""
    weight: float
    """What it is over: what the task counts, or samples."""
    counts: bool
    """Whether the task counts."""
    gradients: list[Tensor | None]
    """Of the mean, by each parameter that is trained; on the host, which has more memory."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        compute_loss: Callable[[nn.Module, Any], Any],
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        make: Callable[[list[Any]], Any],
        rows: Sequence[Sequence[Any]],
    ) -> _Pass:
        """Of rows, the mean of their means by what each is over, as of the micro-batches of an optimizer step."""
        trained = [one for one in model.parameters() if one.requires_grad]
        total: list[Tensor | None] = [None] * len(trained)
        loss, whole, counts = 0.0, 0.0, False
        for row in rows:
            seed_everything(0)  # what is random anew in each pass is the same in all of them
            with context():
                found = compute_loss(model, to_device(make([*row]), device))
            value, count = found if isinstance(found, tuple) else (found, None)
            counts = count is not None
            weight = float(len(row) if count is None else count)
            mean = value / (weight or 1.0) if counts else value
            loss, whole = loss + float(mean.detach()) * weight, whole + weight
            gradients: list[Tensor | None] = [*torch.autograd.grad(mean * _SCALE, trained, allow_unused=True)]
            for place, before in enumerate(total):
                if (one := gradients[place]) is not None:
                    gradients[place] = None  # one by one: they are held once
                    one = one.detach().to("cpu", torch.float32).to_dense() * (weight / _SCALE)
                    total[place] = one if before is None else before + one
        means = [None if one is None else one / (whole or 1.0) for one in total]
        return cls(loss / whole if whole else math.nan, whole, counts, means)

    def norms(self) -> list[float]:
        """Of each gradient."""
        return [0.0 if one is None else float(one.norm()) for one in self.gradients]

    def distances(self, other: _Pass) -> list[float]:
        """Of each gradient to the other's; what has none has zeros."""
        found = []
        for a, b in zip(self.gradients, other.gradients, strict=True):
            difference = a - b if a is not None and b is not None else a if b is None else b
            found.append(0.0 if difference is None else float(difference.norm()))
        return found

    def unknown(self, noise: Sequence[float], by_one: bool) -> str | None:
        """Why nothing can be compared with it, in words; None where that can be.

        Args:
            noise: how far its gradients are from those of the same samples one by one, or in another order.
            by_one: which of the two.
        """
        whole = math.hypot(*self.norms())
        if not (math.isfinite(self.loss) and math.isfinite(whole) and whole):
            return f"no parameter gets a gradient, or none that is finite, of a few samples; {_INSTEAD}"
        if (differs := math.hypot(*noise) / whole) <= _ROUNDED:
            return None
        return (
            f"what packing changes cannot be told: {'one by one' if by_one else 'in another order'}, a few padded "
            f"samples have a gradient that differs by {differs:.0%} from theirs together. Something is random in each "
            "pass, or samples see their padding, or the loss is a mean over what varies, which is to be returned as "
            f"(loss_sum, count); else {_INSTEAD}"
        )

    def __str__(self) -> str:
        return f"{self.loss:.5g} over {self.weight:g}"


def _changes(padded: _Pass, noise: Sequence[float], packed: _Pass, by_one: bool) -> str | None:
    """What packing changes, in words; None where that is rounding alone.

    Args:
        padded: of some samples.
        noise: how far its gradients are from those of the same samples one by one, or in another order.
        packed: of the same samples.
        by_one: which of the two; rounding is seen with the first alone.
    """
    norms, apart = padded.norms(), padded.distances(packed)
    whole, changed = math.hypot(*norms), []
    for norm, a, b in zip([whole, *norms], [math.hypot(*apart), *apart], [math.hypot(*noise), *noise], strict=True):
        scale = norm + _SMALL * whole
        changed.append((a - min(2 * b if by_one else math.inf, _ROUNDED * scale)) / scale)
    most = max(changed)  # not a number where the first is not
    if packed.weight == padded.weight and not most <= _CHANGED:
        return (
            f"packing changes this model's gradient by {most:.1%}: samples see each other, or have other "
            "positions, or its loss counts otherwise. Models of transformers keep samples apart by position_ids, "
            f"without an attention_mask and without a cache (config.use_cache = False); else {_INSTEAD}"
        )
    if packed.weight == padded.weight and abs(packed.loss - padded.loss) <= _OTHER_LOSS * abs(padded.loss):
        return None
    return (
        f"packing changes the loss: of the same samples it is {packed} packed, and {padded} padded. Samples count "
        f"otherwise in a row; {_INSTEAD}"
    )


def _in_row(values: Any) -> Tensor:
    found = torch.as_tensor(values)
    return found if found.numel() else found.long()  # an empty list says no type


def _not_for_a_row(samples: Sequence[Any]) -> str | None:
    """Why samples are not for :func:`in_one_row`, in words; None where they are."""
    wanted = "samples are packed that are dicts with input_ids and labels of one length"
    own = "by the task's own pack(samples)"
    for sample in samples:
        if not isinstance(sample, Mapping) or not {"input_ids", "labels"} <= sample.keys():
            return f"{wanted}, or {own}"
        shapes = [torch.as_tensor(sample[name]).shape for name in ("input_ids", "labels")]
        if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            return f"{wanted}, or {own}"
        if others := sorted(str(name) for name in sample.keys() - _IN_A_ROW):
            return f"{wanted} and nothing else, but these have {', '.join(others)} too. Pack them {own}"
        if not torch.as_tensor(sample.get("attention_mask", [])).all():
            return f"{wanted} and an attention_mask of ones at most, but one has zeros in it. Pack them {own}"
    return None


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Within the block, passes of a model are comparable, and leave no traces.

    Parameters that are zero, as the last ones of blocks are at times before training, would hide what comes to them:
    here they are not.
    """
    zeros = [one for one in model.parameters() if type(one) is nn.Parameter and one.is_floating_point()]
    zeros = [one for one in zeros if one.numel() and not one.is_meta and not one.any()]
    with torch.enable_grad(), undisturbed(), without_tf32(), without_dropout(model), state_kept(model):
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                for one in zeros:
                    one.normal_(std=_SHAKEN)
            yield
        finally:
            with torch.no_grad():
                for one in zeros:
                    one.zero_()
