"""Batch size: how many samples, or tokens, one forward pass sees, and how many such passes make one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, PositiveInt, model_validator

from .support.base import Effect, Exactness, FileKind, Stage, Technique
from .support.facts import Facts, ScriptFacts

SPLIT_TOLERANCE = 1e-3
"""Relative L2 difference of the gradient above which a split changes the optimization: fp32 reordering stays
below 1e-5, BatchNorm and token-averaged losses are at 1e-2 and more."""
_ROUNDED_TOLERANCE = 1e-2
"""The same where it could only be computed in bf16, whose rounding alone comes to 0.002 to 0.004 (fp16's to 0.0003 to
0.0008); BatchNorm's to 0.1 and more."""

BY_TOKENS = "batch.tokens: batches are made of samples by their lengths, which the job's own loader does not do."

_MASK_ITEMSIZE = 4
"""Bytes of each element of a mask that attention adds."""

OTHER_TOKENS = "batches of other tokens put other samples into an optimizer step; --allow-split permits it"
"""Why a script's are left alone."""

_LEAST_OF_LONGEST = 4
"""Of the longest samples, how many a batch of other tokens has room for at least: of fewer, what is left empty grows,
and a flag can't be seen to be kept."""

_FREE_GROWTH = (1, 2, 4, 8, 16)
"""Times the assumed batch that a free one may be."""


class Batch(Technique):
    """Micro-batches of ``micro`` samples, ``accumulate`` of them to one optimizer step."""

    name: ClassVar[str] = "batch"
    stage: ClassVar[Stage] = Stage.LOADER
    affects: ClassVar[frozenset[Effect]] = frozenset({"samples"})
    ordered: ClassVar[bool] = True

    micro: PositiveInt = Field(strict=True)
    """Samples in one forward pass, >= 1."""
    accumulate: PositiveInt = Field(default=1, strict=True)
    """Forward passes in one optimizer step, >= 1, of all processes together."""
    effective: PositiveInt | None = Field(default=None, strict=True)
    """Samples in one optimizer step where the last micro-batch is smaller; micro * accumulate otherwise."""
    tokens: PositiveInt | None = Field(default=None, strict=True)
    """Most tokens in one forward pass, padding counted: the longest of its samples times their number. An optimizer
    step's samples, as many as ever, are cut by length; ``micro`` is then how many of the longest that are known a pass
    takes, and ``accumulate`` the most passes. ``{tokens: 4096, effective: 64}`` leaves both open. None is ``micro``
    samples, whatever their length."""
    packed: bool = Field(default=False, strict=True)
    """Whether the samples of a forward pass are one row of at most ``tokens``, one after the other without padding, for
    models that keep them apart by ``position_ids``. Each time it is applied, a few samples are computed both ways:
    where their gradient is another, since they see each other or count otherwise, it is refused."""
    flag: str | None = None
    """Of a script that makes its batches by tokens itself: the flag that states them. A pass then has about ``micro``
    samples, and a step ``accumulate`` passes. None of any other job."""

    @model_validator(mode="before")
    @classmethod
    def _open_tokens(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "tokens" not in data or "micro" in data or data["tokens"] is None:
            return data
        if "effective" not in data or "accumulate" in data:
            raise ValueError(
                "write how many samples an optimizer step sees beside the tokens of a forward pass: "
                f"{{tokens: {data['tokens']}, effective: 64}}"
            )
        rest = {name: value for name, value in data.items() if name != "effective"}
        return {**rest, "micro": 1, "accumulate": data["effective"]}

    @model_validator(mode="after")
    def _check_packed(self) -> Batch:
        if self.packed and self.tokens is None:
            raise ValueError(
                "packed: write how many tokens a row has at most, and how many samples an optimizer step sees: "
                "{packed: true, tokens: 4096, effective: 64}"
            )
        return self

    @model_validator(mode="after")
    def _check_flag(self) -> Batch:
        if self.flag is not None and (self.tokens is None or self.effective is not None):
            raise ValueError(f"flag: {self.flag} states tokens, and no samples: write tokens, and leave effective out.")
        return self

    @model_validator(mode="after")
    def _check_effective(self) -> Batch:
        full = self.micro * self.accumulate
        if self.effective is not None and not full - self.micro < self.effective < full:
            raise ValueError(
                f"effective: {self.accumulate} micro-batches of {self.micro} hold {full - self.micro + 1} to "
                f"{full - 1} samples when the last is smaller, but got {self.effective}. "
                f"Leave it out for {full}."
            )
        return self

    def describe(self, facts: Facts | None = None) -> str:
        """``micro-batch 64 × 4``."""
        if self.flag is not None:
            times = f" × {self.accumulate}" if self.accumulate > 1 else ""
            return f"batches of at most {self.tokens:,} tokens{times}, by {self.flag}"
        if self.tokens is not None:
            return f"batch {self.num_samples} in {'packed ' if self.packed else ''}passes of {self.tokens:,} tokens"
        if self.accumulate == 1:
            return f"batch {self.micro}"
        whole = f" (the last smaller, {self.effective} in all)" if self.effective else ""
        return f"micro-batch {self.micro} × {self.accumulate}{whole}"

    def purpose(self) -> str:
        """What its numbers are."""
        if self.packed:
            return "Samples in one optimizer step, and how many tokens, without padding, a forward pass takes in a row."
        if self.flag is not None:
            return "Tokens in one forward pass, and how many such passes make one optimizer step."
        if self.tokens is not None:
            return "Samples in one optimizer step, and how many tokens, padding counted, a forward pass takes of them."
        return "Samples in one forward pass, and how many such passes make one optimizer step."

    @property
    def num_samples(self) -> int:
        """Samples in one optimizer step."""
        return self.effective or self.micro * self.accumulate

    @classmethod
    def of(cls, effective: int, micro: int) -> Batch:
        """``effective`` samples an optimizer step in micro-batches of at most ``micro``."""
        micro = min(micro, effective)
        accumulate = -(-effective // micro)
        return cls(micro=micro, accumulate=accumulate, effective=effective if effective % micro else None)

    def with_samples(self, effective: int) -> Batch:
        """So many samples an optimizer step, in micro-batches like these."""
        return Batch.of(effective, self.micro).model_copy(update={"tokens": self.tokens, "packed": self.packed})

    def sizes(self) -> list[int]:
        """Samples in each forward pass of an optimizer step."""
        return [min(self.micro, self.num_samples - start) for start in range(0, self.num_samples, self.micro)]

    def share(self, processes: int) -> Batch:
        """Of one of so many processes, which take the micro-batches of an optimizer step in turn."""
        if processes == 1:
            return self
        return self.model_copy(update={"accumulate": -(-self.accumulate // processes), "effective": None})

    @classmethod
    def reference(cls, facts: Facts) -> Batch:
        """The job's own."""
        own = cls.of(facts.effective_batch, facts.micro_batch or facts.effective_batch)
        return own if facts.token_flag is None else own.model_copy(update=facts.token_flag.model_dump())

    @classmethod
    def choices(cls, facts: Facts) -> tuple[Batch, ...]:
        """Small to large: halves of a held effective batch, and what the job has; powers of two times the assumed one
        otherwise. On a card the halves of its third too: the fastest is often between two halves there
        (``benchmarks.cards --speed``). Each in as many tokens also packed, where samples can be, on a card: on a CPU
        that was slower (``benchmarks.lengths``), and is tried where a space lists it."""
        effective, length = facts.effective_batch, facts.dataset_length
        if facts.token_flag is not None:
            found = list(cls._by_flag(facts))
        elif facts.effective_batch_held:
            own = cls.reference(facts).micro
            held = {effective, own, *_parts(effective, facts.device.type)} if _may_split(facts) else {own}
            found = [cls._held(facts, micro) for micro in held - {own}]
            if facts.device.type != "cpu" and facts.no_packed_batches() is None:
                found += [cls._in_tokens(facts, micro, packed=True) for micro in held]
            found = sorted([*found, cls.of(effective, own)], key=lambda batch: (batch.micro, batch.packed))
        else:
            sizes = {*_parts(effective, facts.device.type), *(effective * times for times in _FREE_GROWTH)}
            found = [cls(micro=micro) for micro in sorted(sizes) if length is None or micro <= max(length, effective)]
        return tuple(batch for batch in found if batch.unavailable(facts) is None)

    @classmethod
    def may_pack(cls, facts: Facts) -> bool:
        """Whether packed batches are available, if a model keeps their samples apart."""
        return facts.no_token_batches() is None and _may_split(facts)

    @classmethod
    def _by_flag(cls, facts: Facts) -> Iterator[Batch]:
        """Of a script: as many tokens in an optimizer step, in twice or half as many passes and so on, while some
        of the longest samples fit into one; where no lengths are known, in fewer alone. Small to large."""
        own = cls.reference(facts)
        assert own.tokens is not None, "it has a flag for them"
        held = own.tokens * own.accumulate
        lengths = facts.lengths
        least = own.tokens if lengths is None else math.ceil(_LEAST_OF_LONGEST * lengths.longest * lengths.stretch)
        passes = [own.accumulate]
        while passes[-1] % (2 * facts.ranks) == 0:
            passes.append(passes[-1] // 2)
        passes.sort()
        while held % (2 * passes[-1]) == 0 and held // (2 * passes[-1]) >= least:
            passes.append(2 * passes[-1])
        for number in reversed(passes):
            tokens = held // number
            micro = max(1, round(own.micro * tokens / own.tokens))
            yield cls(micro=micro, accumulate=number, tokens=tokens, flag=own.flag)

    @classmethod
    def _held(cls, facts: Facts, micro: int) -> Batch:
        """The held batch in such micro-batches; where lengths are known, in as many tokens as these may have: no more
        passes, each with less padding."""
        if facts.no_token_batches() is not None or micro == facts.effective_batch:
            return cls.of(facts.effective_batch, micro)
        return cls._in_tokens(facts, micro)

    @classmethod
    def _in_tokens(cls, facts: Facts, micro: int, packed: bool = False) -> Batch:
        assert facts.lengths is not None, "or they could not be had"
        tokens = {"tokens": micro * facts.lengths.longest, "packed": packed}
        return cls.of(facts.effective_batch, micro).model_copy(update=tokens)

    def exactness(self, facts: Facts) -> Exactness:
        """Measured: another split than the job's own is lossy where the gradient of a split batch differs from the
        whole batch's. A script puts other samples together where its flag states other tokens."""
        if self.flag is not None and not self._splits_as(facts):
            return "lossy"
        return "exact" if self._splits_as(facts) or _split_is_exact(facts) else "lossy"

    def unavailable(self, facts: Facts) -> str | None:
        """A held batch stays; splits that change the gradient, and other tokens of a script's, need ``--allow-split``;
        streams, equal micro-batches."""
        if facts.token_flag is not None:
            if (reason := self._unlike(self.reference(facts))) is not None:
                return reason
        elif facts.effective_batch_held and self.num_samples != facts.effective_batch:
            return (
                f"an optimizer step would see {self.num_samples} samples, but the task's batch of "
                f"{facts.effective_batch} is held; --effective-batch holds another"
            )
        if self == self.reference(facts):
            return None
        if self.flag is not None and facts.token_flag is None:
            return f"batch.flag: {self.flag} was not seen to make the job's batches"
        if self.flag is not None and not facts.allow_split:
            return OTHER_TOKENS
        if self.flag is None and self.tokens is not None and (reason := facts.no_token_batches()) is not None:
            return reason
        if not self._splits_as(facts) and not _may_split(facts):
            return (
                f"splitting a batch changes this model's gradient by {facts.split_error:.1%} "
                "(BatchNorm in training, or a loss averaged over varying counts); --allow-split permits it"
                if facts.split_error is not None
                else "whether splitting a batch changes the gradient could not be measured; --allow-split permits it"
            )
        if self.packed and (reason := facts.no_packed_batches()) is not None:
            return reason
        if self.effective is not None and facts.dataset_kind == "iterable":
            return f"an iterable dataset cannot be cut into {self.accumulate} uneven micro-batches"
        if self.effective is not None and facts.even_batches:
            return f"{self.accumulate} uneven micro-batches cannot be said where the plan goes"
        return None

    def _unlike(self, own: Batch) -> str | None:
        """Why a script's own step is another, by its tokens; None where it is not."""
        found, held = ((one.tokens or 0) * one.accumulate for one in (self, own))
        if self.flag is None:
            return f"the script makes its batches by {own.flag}, and not of so many samples"
        if (self.flag, found) == (own.flag, held):
            return None
        return f"an optimizer step would see {found:,} tokens by {self.flag}, but {held:,} by {own.flag} are held"

    @classmethod
    def left_to(cls, script: ScriptFacts) -> str | None:
        """A plan states one number of samples, each passed back once."""
        if script.passes > 1:
            return f"the script passes each batch back {script.passes} times in an optimizer step"
        return "the script's optimizer steps see now more samples, now fewer" if script.batch_varies else None

    def beyond_script(self) -> str | None:
        """A script makes its batches itself."""
        return (
            None
            if self.tokens is None or self.flag is not None
            else f"{BY_TOKENS} Train by autotune.apply, or leave tokens out."
        )

    def not_in_file(self, kind: FileKind) -> str | None:
        """Whoever runs it chooses."""
        return "whoever runs the file chooses the batch"

    def may_hold(self, step_bytes: int, facts: Facts) -> int:
        """Of a packed row, whose prediction is that of padded samples, a mask of all its tokens by all."""
        return _MASK_ITEMSIZE * self.tokens**2 if self.packed and self.tokens is not None else 0

    def _splits_as(self, facts: Facts) -> bool:
        """Whether a forward pass sees what the job's own sees, whatever that is where the batch is free."""
        own = self.reference(facts)
        if self.tokens is not None:
            return self == own
        return self.micro == own.micro if facts.effective_batch_held else self.accumulate == own.accumulate == 1


def refused_split(facts: Facts) -> str | None:
    """Why other micro-batches are not tried, where the batch is held; None where they are."""
    own = Batch.reference(facts)
    if not facts.effective_batch_held or own.num_samples == 1:
        return None
    other = -(-own.micro // 2) if own.micro > 1 else own.num_samples
    reason = Batch.of(own.num_samples, other).unavailable(facts)
    which = "smaller micro-batches" if own.accumulate == 1 else f"micro-batches other than the job's {own.micro}"
    return reason and f"{which} are not tried: {reason}"


def _parts(effective: int, device: str) -> Iterator[int]:
    """Smaller batches: halves, and on a card the third and its halves."""
    yield from _halves(effective)
    if device == "cuda" and effective > 1:
        third = -(-effective // 3)
        yield third
        yield from _halves(third)


def _halves(effective: int) -> Iterator[int]:
    """effective / 2, / 4, … rounded up, down to 1."""
    size = effective
    while size > 1:
        size = -(-size // 2)
        yield size


def _split_is_exact(facts: Facts) -> bool:
    tolerance = _ROUNDED_TOLERANCE if facts.split_rounded else SPLIT_TOLERANCE
    return facts.split_error is not None and facts.split_error <= tolerance


def _may_split(facts: Facts) -> bool:
    return facts.allow_split or _split_is_exact(facts)
