"""The flags by which well-known scripts take their batch: one table, by which commands are read and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..techniques.batch import Batch


@dataclass(frozen=True)
class Parser:
    """How a script's parser calls micro-batch, accumulation, evaluation batch and tokens of a batch, with its dashes;
    ``=`` at the end joins the value."""

    micro: tuple[str, ...] = ()
    """The first is the one that is written."""
    accumulate: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    takes_both: bool = False
    """Whoever takes the one takes the other too, which is 1 where it is left out."""

    def flags(self, batch: Batch | None) -> Iterator[str]:
        """What states a batch, of one process, to this parser."""
        if batch is not None:
            yield from (_stated(name, batch.micro) for name in self.micro[:1])
            yield from (_stated(name, batch.accumulate) for name in self.accumulate[:1])


TRAINING_ARGUMENTS = Parser(
    ("--per_device_train_batch_size",),
    ("--gradient_accumulation_steps",),
    ("--per_device_eval_batch_size",),
    takes_both=True,
)
ACCELERATE = Parser((), ("--gradient_accumulation_steps",))
TIMM = Parser(("--batch-size", "-b"), ("--grad-accum-steps",), ("--validation-batch-size", "-vb"))
NANOGPT = Parser(("--batch_size=",), ("--gradient_accumulation_steps=",))
_LIGHTNING = Parser(("--data.batch_size",), ("--trainer.accumulate_grad_batches",))
_OTHERS = Parser(
    (
        *("--batch", "--batchsize", "--bs", "--bsz", "--batch-size-per-device", "--batch-size-per-gpu"),
        *("--device-batch-size", "--local-batch-size", "--micro-batch-size", "--per-device-batch-size"),
        *("--per-gpu-batch-size", "--per-gpu-train-batch-size", "--train-batch-size"),
    ),
    (
        *("--acc-steps", "--accum", "--accum-count", "--accum-grad", "--accum-iter", "--accum-steps", "--accumulate"),
        *("--accumulate-steps", "--accumulation-steps", "--grad-acc-steps", "--grad-accum", "--grad-accum-every"),
        *("--grad-accumulation-steps", "--gradient-accumulate-every", "--gradient-accumulation", "--update-freq"),
    ),
    ("--eval-batch-size", "--val-batch-size", "--test-batch-size"),
    (
        *("--max-tokens", "--max-tokens-per-batch", "--max-batch-tokens", "--batch-tokens", "--tokens-per-batch"),
        *("--token-batch-size", "--max-frames", "--batch-bins"),
    ),
)
_PARSERS = (TRAINING_ARGUMENTS, ACCELERATE, TIMM, NANOGPT, _LIGHTNING, _OTHERS)
_KIND = "batch_type"
"""The flag that says what OpenNMT's batch size counts."""
_TOTALS = ("--effective-batch-size", "--global-batch-size", "--total-batch-size")
"""Of scripts that accumulate up to a total: more passes as the micro-batch gets smaller."""


def bare(flag: str) -> str:
    """A flag's name in small letters, without dashes or plus signs, ``-`` as ``_``, and less what stands before a dot:
    parsers differ in that alone."""
    return flag.removesuffix("=").rpartition(".")[2].lstrip("-+").replace("-", "_").lower()


_MEANINGS = {
    **{bare(flag): "batch.micro" for parser in _PARSERS for flag in parser.micro},
    **{bare(flag): "batch.accumulate" for parser in _PARSERS for flag in parser.accumulate},
    **{bare(flag): "evaluation.batch" for parser in _PARSERS for flag in parser.evaluation},
    **{bare(flag): "batch.tokens" for parser in _PARSERS for flag in parser.tokens},
}
_BOTH = {bare(flag): parser for parser in _PARSERS if parser.takes_both for flag in parser.micro}
_IS_TOTAL = {bare(flag) for flag in _TOTALS}


def stands_for(flag: str) -> str | None:
    """``batch.micro``, ``batch.accumulate``, ``batch.tokens`` or ``evaluation.batch``; None for a flag that is not
    known."""
    return _MEANINGS.get(bare(flag))


def has_both(flag: str) -> str | None:
    """The flag for accumulation that is there beside this one for the micro-batch, in any case; None for others."""
    parser = _BOTH.get(bare(flag))
    return parser.accumulate[0] if parser is not None else None


def makes_up_total(words: Iterable[str]) -> bool:
    """Whether the flags of a command have a script accumulate up to a total, whatever its micro-batch."""
    return any(bare(word.partition("=")[0]) in _IS_TOTAL for word in words)


def counts_tokens(words: Sequence[str]) -> bool:
    """Whether the flags of a command say that the number of its batch is one of tokens: ``--batch_type tokens``."""
    pairs = [word.partition("=") for word in words]
    said = [
        (bare(flag), value if equals else (*words[place + 1 :], "")[0])
        for place, (flag, equals, value) in enumerate(pairs)
    ]
    return any(flag == _KIND and value.startswith("tok") for flag, value in said)


def _stated(name: str, value: int) -> str:
    return f"{name}{value}" if name.endswith("=") else f"{name} {value}"
