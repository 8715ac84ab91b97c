"""What is known of a task before any trial: the result of inspecting it once, in a child process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_FULL, _MARKS = 0.75, 1.1
"""Least and most that the fullest of a script's token batches has of the tokens that its flag states."""

InTf32 = Literal["matrix products", "convolutions"]
"""Of fp32, what may compute in TF32 on CUDA; with convolutions go recurrent layers."""

AttentionBy = Literal["sdpa", "eager", "flex_attention"]
"""``scaled_dot_product_attention``, or the separate operations or the compiled kernel of transformers' models."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Device(_Frozen):
    """The device that trials run on."""

    type: Literal["cpu", "cuda"]
    """torch's device type."""
    name: str
    """As the vendor calls it."""
    memory_bytes: int
    """All of the device's memory (of the machine, for a CPU)."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    is_amd: bool = False
    """Whether it is AMD's, which torch calls ``cuda`` as well."""
    bf16: bool
    """Whether the device computes in bfloat16 natively."""
    driver: str | None = None
    """The driver's version."""


class ReadLoader(_Frozen):
    """A DataLoader that a script trains on, as it is recognised in a job."""

    place: int
    """Of its dataset among those that the script reads, from 0, in the order in which it first does."""
    dataset: str
    """The dataset's class."""
    length: int | None = None
    """Its samples; None of a stream that does not say."""


class Identity(_Frozen):
    """What a task is, in words that tell it from another; the fingerprint tells that it is another, and not in what."""

    model: str
    """Blocks, parameters, how many of them are frozen, tensors and dtypes."""
    names: str
    """Hash of the parameters' names in their order."""
    batch: str
    """Dtype and shape of each tensor of a batch, ``*`` where sizes vary; empty for a stream, which is not read."""
    loaders: tuple[ReadLoader, ...] | None = None
    """Of a script: those that it trains on, the first of them first; a row of data loading is for these."""


class Longest(_Frozen):
    """How the largest batch was found that samples can make: by reading lengths alone."""

    read: int = Field(gt=0)
    """Samples whose lengths were read."""
    samples: int = Field(gt=0)
    """In the dataset."""
    stretch: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """How many times as long as the longest of these a sample is thought of."""
    risk: float = Field(default=0.0, ge=0, le=1)
    """The chance that one is longer still: it was not read, or is another at each reading."""

    def words(self) -> str:
        """``the largest batch that 1,437 samples, whose lengths were all read, can make``."""
        if not self.risk:
            return f"the largest batch that {self.samples:,} samples, whose lengths were all read, can make"
        times = f", {self.stretch:.2f} times as long" if self.stretch > 1 else ""
        alone = f"; of {self.unseen:.1%} that one unlike them all was not read" if self.unseen else ""
        return (
            f"the largest batch of {self.read:,} samples of {self.samples:,}, whose lengths were read{times}: a chance "
            f"of {self.risk:.1%} that another is longer, if they are of one law{alone}"
        )

    @property
    def unseen(self) -> float:
        """The chance that a given sample was not read."""
        return 1 - self.read / self.samples


class Lengths(Longest):
    """Which samples make the largest batch."""

    longest: int
    """The longest that was read."""
    places: tuple[tuple[int, ...], ...]
    """Indices of samples, the longest first; one row for each size in which samples differ, and one for their sum."""
    in_tokens: bool
    """Whether they differ in one length alone, so that a batch is as large as its longest sample times their number."""

    @property
    def how(self) -> Longest:
        """Without the samples."""
        return Longest(read=self.read, samples=self.samples, stretch=round(self.stretch, 3), risk=round(self.risk, 4))

    @property
    def largest(self) -> tuple[int, ...]:
        """Of each row the first."""
        return tuple(dict.fromkeys(row[0] for row in self.places))

    def batches(self, micro: int) -> list[list[int]]:
        """The largest that so many samples can make. A batch with the first of each row is as large as any, in each
        size; where there is no room for all, the first of each."""
        sizes = self.places[:-1] or self.places
        if micro < len(sizes):
            return [list(row[:micro]) for row in self.places]
        mixed = list(dict.fromkeys(place for ranked in zip(*sizes, strict=True) for place in ranked))
        return [[mixed[number % len(mixed)] for number in range(micro)]]


class Extent(_Frozen):
    """Something that a script's batches are as large as, while their samples are now more, now fewer."""

    usual: float
    """Of a batch, at the median."""
    most: float
    """Of a batch that has several samples: a longer one alone may be any size."""
    stretch: float = Field(default=1.0, gt=0)
    """How many times a sample's longest side it counts of the sample: more than 1 where it adds several up."""

    in_order: bool = False
    """Whether batches come by length, so that the first of them are unlike the others."""

    def is_held_to(self, tokens: int) -> bool:
        """Whether so many tokens are what it stays below: most batches are at least half full, and the fullest nearly.
        A mark at the start or end of each sample may not count."""
        return _FULL * tokens <= self.most <= _MARKS * tokens and self.usual >= tokens / 2


class TokenBatches(_Frozen):
    """What a script's batches are seen to be, where it may make them by tokens."""

    micro: int = Field(gt=0)
    """Samples in a forward pass, at the mean."""
    extents: tuple[Extent, ...]
    """What may be the same of them, in tokens."""
    lengths: Lengths | None = None
    """Of the samples, where they can be read."""

    def held_to(self, tokens: int) -> Extent | None:
        """What stays below so many tokens, and comes near them."""
        return next((one for one in self.extents if one.is_held_to(tokens)), None)

    def exceeds(self, tokens: int) -> bool:
        """Whether all that was seen is more."""
        return bool(self.extents) and min(one.most for one in self.extents) > _MARKS * tokens


class TokenFlag(_Frozen):
    """A script's flag for the tokens of its batches."""

    flag: str
    """As it is written."""
    tokens: int = Field(gt=0)
    """In one forward pass, at most."""


class Facts(_Frozen):
    """A task's properties, measured without any technique applied."""

    fingerprint: str
    """``sha256:…`` of parameter names, shapes, dtypes, trainable flags, and batch shapes."""
    identity: Identity | None = None
    """The same in words; absent in a study of an earlier version."""
    device: Device
    torch_version: str
    num_threads: int
    """Threads that torch computes with on the CPU."""
    host_memory_bytes: int
    """Host memory available when the task was inspected."""
    process_bytes: int | None = None
    """What the device charged the process before the model was built, which no configuration undercuts; None where
    unknown."""

    num_parameters: int
    num_trainable: int
    num_blocks: int
    """Repeated blocks (or the root's children) that checkpointing can choose from."""
    block_name: str
    """Class of the repeated blocks, for people."""
    block_bytes: int = 0
    """Of the parameters of the largest of them."""
    outside_bytes: int = 0
    """Of the parameters outside of blocks."""
    buffer_bytes: int = 0
    """Of the model's buffers."""
    conv_dims: tuple[int, ...]
    """Spatial dimensions of the model's convolutions: (2,) for an image model, () for none."""
    tries_kernels: bool = False
    """Whether the job has cuDNN try every kernel of a convolution (``torch.backends.cudnn.benchmark``)."""
    channels_last_fault: str | None = None
    """Why convolutions that read channels last would be at fault on this device; None where nothing is known."""
    pruning_obstacle: str | None = None
    """Why the model cannot be pruned at all, where that is known without a cut."""
    linear_features: int = 0
    """The smaller side of the linear layer where that is largest, of those that can be factorised."""
    frozen_bytes: int = 0
    """Of the weights of linear layers and embeddings that do not train."""
    linear_numbers: int = 0
    """Weights of linear layers that could multiply integers."""
    float8_numbers: int = 0
    """Weights of linear layers in blocks that could multiply float8 numbers."""
    codable_bytes: int = 0
    """Of the weights of linear layers and embeddings, whether they train or not."""
    num_feed_forwards: int = 0
    """Modules of it that compute each position of a sequence by itself, and are wider inside."""
    reversible_blocks: tuple[str, ...] = ()
    """Paths of the blocks that the task says are reversible."""
    attention: tuple[AttentionBy, ...] = ()
    """How its attention can be computed: as it is today, then what it can be switched to."""
    variants: dict[str, int] = {}
    """Parameters of each variant that the task offers, by name."""
    refused: dict[str, str] = {}
    """Why settings that change the function cannot be had, by their JSON: they were tried on the model."""

    dataset_length: int | None
    """None for an iterable dataset without a length."""
    dataset_kind: Literal["map", "iterable"]
    dataset_bytes: int | None
    """Bytes of the whole dataset's tensors, from one sample; None when unknown."""
    dataset_deterministic: bool
    """Whether reading a sample twice gives the same values, so that an epoch may be cached."""
    epochs_differ: str | None = None
    """Of a script: why its dataset may be another in the next epoch, so that neither is an epoch cached nor are workers
    kept; None where it was seen to stay the same."""
    stackable: bool
    """Whether all samples collate by default_collate to one shape, so that an epoch can lie on the device."""
    shapes_vary: bool
    """Whether batch shapes differ between batches."""
    lengths: Lengths | None = None
    """Of its samples, where they differ and can be read."""
    no_packing: str | None = "samples are known to be rows of tokens in a task alone"
    """Why the samples of a batch cannot be one row without padding, in words; None where a few were computed both ways,
    with the same gradient."""
    samples_on_device: bool = False
    """Whether batches are on the device as they are collated, which only the training process can do."""
    shards_by_worker: bool
    """Whether an iterable dataset says that it splits itself between loader workers."""
    own_loader: bool = False
    """Whether the task builds its loaders itself, so that only the size of their batches is ours."""
    loader_options: dict[str, int | bool]
    """The user's DataLoader keywords of today."""
    loader_samples_per_s: dict[int, float]
    """Samples per second of the loader alone, by number of workers."""
    loader_bytes: dict[int, int] = {}
    """What its workers took of the host's memory meanwhile, beside the process, by their number."""

    step_samples_per_s: float | None = None
    """Samples per second of the reference batch's forward and backward, run once; None where the model was not run."""

    effective_batch: int
    """Samples in one optimizer step of the reference."""
    effective_batch_held: bool
    """Whether the effective batch is the user's and stays fixed."""
    effective_batch_assumed: bool
    """Whether it was given nowhere."""
    micro_batch: int | None = None
    """Samples in one forward pass of the reference; None is all of an optimizer step."""
    batch_varies: bool = False
    """Whether its optimizer steps see now more samples, now fewer, so that these numbers are rough."""
    token_batches: TokenBatches | None = None
    """Of a script whose command may state tokens: changes nothing before :meth:`by_flag`."""
    token_flag: TokenFlag | None = None
    """Of a script: the flag that was seen to make its batches, so that the numbers of samples are rough."""
    passes: int = 1
    """Of a script: how often each sample is passed back in an optimizer step (SAM: twice)."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None
    """What the task says that the job runs in."""
    tf32: tuple[InTf32, ...] | None = None
    """What of fp32 computes in TF32 by torch's flags, as the task leaves them; None where the device has none."""
    max_grad_norm: float | None = None
    """The norm that the task says it clips gradients at."""
    acts_after_step: bool = False
    """Whether the task has an ``after_step``, which may average weights."""
    own_autocast: bool = False
    """Whether the model or its loss turns autocast on by itself."""
    split_error: float | None
    """Relative L2 difference of the gradient when a batch is split in two; None where it could not be measured."""
    split_rounded: bool = False
    """Whether that was computed in half precision, so that rounding is part of it."""
    allow_lossy: bool = True
    """Whether the user allows techniques that change what the model computes."""
    inference: bool = False
    """Whether the job is inference."""
    evaluates: bool = False
    """Whether the task says how good a model is."""
    evaluation_batch: int | None = None
    """Samples that it evaluates at once today; None where it does not let that be chosen."""
    allow_split: bool
    """Whether the user allows splits that change the gradient."""

    optimizer: str
    """The optimizer's class."""
    optimizer_implementations: tuple[str, ...]
    """Of ``for_loop``, ``foreach``, ``fused``: what the class supports here."""
    optimizer_implementation: str | None = None
    """The one of them that the user's own takes; None where its groups differ."""
    optimizer_states: int = 0
    """Tensors of a parameter's size that it keeps for each parameter, as far as its class is known."""
    moves_rows: str | None = None
    """Why it also moves what has a gradient of 0, in words; None where it does not."""
    table_numbers: int = 0
    """Numbers in tables of embeddings whose gradient could be sparse."""
    no_table: str | None = None
    """Why there are none of these, in words."""
    allocators: tuple[str, ...]
    """Of ``tcmalloc``, ``jemalloc``: what is installed where trials run."""
    no_compiler: str | None = None
    """Why torch.compile cannot run where trials run, in words; None where it can."""
    left_out: dict[str, str] = {}
    """Techniques that the job is searched without, by name, and why: a script may not be told of them."""
    num_devices: int = 1
    """Devices that a trial has; of a CPU, processors."""
    ranks: int = 1
    """Of a script: processes that its command starts, in which it trains one model."""
    shared_by: Literal["none", "ddp", "fsdp"] = "none"
    """How these share it."""
    even_batches: bool = False
    """Whether micro-batches must be of one size: a script's flags, and other trainers, say no other."""
    first_losses: tuple[float, ...] = ()
    """Of a script: the losses of its first optimizer steps, which tell whether its runs are alike."""
    draws_between_passes: bool = False
    """Of a script: whether it draws random numbers between forward passes (noise), others in each split of a batch."""
    not_comparable: str | None = None
    """Of a script: why the losses of its runs are not compared, where its first steps tell."""
    warnings: tuple[str, ...] = ()
    """What the user should hear before the search starts."""

    def no_token_batches(self) -> str | None:
        """Why batches cannot be made by lengths, in words; None where they can."""
        found = self.lengths
        if self.even_batches:
            return "batch.tokens: batches of other sizes cannot be said where the plan goes"
        if found is None or not found.in_tokens:
            return "batch.tokens: samples have no one length; length(sample) in the task would give it"
        if found.read < found.samples:
            return f"batch.tokens: only {found.read:,} of {found.samples:,} samples' lengths could be read in time"
        if found.risk:
            return "batch.tokens: a sample has another length when it is read again"
        return None

    def no_packed_batches(self) -> str | None:
        """Why batches by length cannot be packed, in words; None where they can."""
        reason = self.no_token_batches()
        return reason or (f"batch.packed: {self.no_packing}" if self.no_packing is not None else None)

    def by_flag(self, flag: str, tokens: int, is_proven: bool = False) -> Facts | None:
        """The facts of a script whose batches have so many tokens by this flag; None where they were seen not to, or,
        of a flag that a search has proven, to have more."""
        seen = self.token_batches
        if seen is None or self.passes > 1:
            return None
        found = seen.held_to(tokens)
        if found is None and (not is_proven or seen.exceeds(tokens)):
            return None
        lengths, reasons = seen.lengths, {name: why for name, why in self.left_out.items() if name != "batch"}
        if lengths is not None and found is not None:
            lengths = lengths.model_copy(update={"longest": math.ceil(found.stretch * lengths.longest)})
        passes = self.effective_batch // (self.micro_batch or self.effective_batch)
        update = {
            "token_flag": TokenFlag(flag=flag, tokens=tokens),
            "batch_varies": True,
            "micro_batch": seen.micro,
            "effective_batch": seen.micro * passes,
            "lengths": lengths,
            "left_out": reasons,
        }
        return self.model_copy(update=update)

    @property
    def states_batch(self) -> bool:
        """Whether a plan says the batch: as many samples, or tokens, in each optimizer step, and each of them passed
        back once."""
        return self.passes == 1 and (self.token_flag is not None or not self.batch_varies)

    @property
    def rounds(self) -> bool:
        """Whether the job as it stands computes in less than fp32: sums in another order show in its losses."""
        tf32 = self.tf32 or ()
        is_in_tf32 = "matrix products" in tf32 or ("convolutions" in tf32 and bool(self.conv_dims))
        return self.own_autocast or self.split_rounded or self.precision not in (None, "fp32") or is_in_tf32


class ScriptFacts(_Frozen):
    """What an unedited script does by itself, as far as it is known: techniques say by it what they leave to it."""

    compiles: bool = False
    """Whether it compiles its model."""
    recomputes: bool = False
    """Whether its model recomputes blocks."""
    in_parts: bool = False
    """Whether it calls parts of its model one by one, and not the model."""
    autocasts: bool = False
    """Whether it turns autocast on."""
    has_loader: bool = True
    """Whether it iterates over a DataLoader."""
    batch_varies: bool = False
    """Whether its optimizer steps see now more samples, now fewer."""
    passes: int = 1
    """How often each sample is passed back in an optimizer step."""


def num_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def difference(then: Identity | None, now: Identity | None) -> str:
    """What tells two tasks of other fingerprints apart, in words; all that it could be where that is not known."""
    if then is None or now is None:
        return "its parameters, their shapes, dtypes or trainable flags, or the batch shapes differ"
    return "; ".join(_differences(then, now)) or "a parameter's shape, dtype or trainable flag differs"


def _differences(then: Identity, now: Identity) -> Iterator[str]:
    before, after = then.model.split(", "), now.model.split(", ")
    changed = [f"{a} → {b}" for a, b in zip(before, after, strict=False) if a != b]
    if changed:
        yield f"the model: {', '.join(changed)}"
    elif then.names != now.names:
        yield "the model: parameters of the same number and size have other names, or stand in another order"
    if then.batch != now.batch:
        yield f"batch shapes: {then.batch or 'not read'} → {now.batch or 'not read'}"
