"""Does each pair of techniques work together, or is it refused in words?

    python -m benchmarks.technique_pairs  # --leave-out compile, whose pairs take most of the time

Each kind of each technique with each kind of each other one, on a transformer, a ResNet and a model that has a part for
each technique, without dropout: an epoch of both together, through ``apply``, beside an epoch of what they should come
to: the stock loop, or, where one changes the function, that one alone. Losses, first gradients and trained state agree
within what both are said to be: exact (2e-5), rounding. Sparse gradients take an optimizer of their own, and compiled
programs are tried on the transformer alone. Not tried: what takes another process (``parallel``, ``allocator``), what
is for inference (``quantization``), and kinds that these models cannot have.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, get_args

import torch
from pydantic import ValidationError

from autotune.errors import Caught, PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.task import Task
from autotune.techniques import TECHNIQUES, Exactness, Facts, Settings, Technique
from autotune.techniques.batch import Batch
from autotune.testing.facts import facts_of
from autotune.testing.runs import Run, relative_difference, run_applied, without_dropout
from autotune.testing.zoo import BATCH_SIZE, ZOO

from .pair_models import everything
from .rows import save_rows

MODELS: dict[str, Task] = {
    "gpt": ZOO["gpt"],
    "resnet": ZOO["resnet"],
    "everything": everything(partial(torch.optim.AdamW, lr=0.01, eps=1e-3)),
    "everything, Adagrad": everything(partial(torch.optim.Adagrad, lr=0.01)),
}
ONLY = {"everything, Adagrad": "sparse_gradients"}
"""Models on which pairs with one technique alone are tried."""
HOW = ("works", "refused", "raised", "differs")
_ELSEWHERE = ("parallel", "allocator", "quantization")
_ON_GPT = ("compile",)
_LARGEST: dict[Exactness, dict[str, float]] = {
    "exact": {"losses": 2e-5, "gradients": 2e-5, "state": 2e-5},
    "rounding": {"losses": 0.02, "gradients": 0.35, "state": 0.02},
}
"""Relative L2 differences: those of the contract of one technique, and somewhat more, since two may round."""


def settings_of(kind: type[Technique], facts: Facts) -> Iterator[Technique]:
    """Of a technique, one setting of each kind that the model can have, beside the user's own."""
    if kind is Batch:
        yield Batch(micro=BATCH_SIZE // 2, accumulate=2)
        return
    if "kind" not in kind.model_fields:
        yield from kind.choices(facts)[1:2]
        return
    for name in get_args(kind.model_fields["kind"].annotation):
        for rest in ({}, {"blocks": (0,)}):
            try:
                one = kind.model_validate({"kind": name, **rest})
            except ValidationError:
                continue
            if one != kind() and one.unavailable(facts) is None:
                yield one
            break


class Model:
    """One model, with each combination that was asked for."""

    def __init__(self, name: str) -> None:
        known = facts_of(MODELS[name])
        worth = {"frozen_bytes": known.frozen_bytes and 2**30}  # small weights are refused as not worth it
        self.facts = known.model_copy(update={"allow_lossy": True, **worth})
        self._task: Task = without_dropout(MODELS[name])
        self.run: Callable[[Settings], Run] = cache(self._run)

    def pair(self, one: Technique, other: Technique) -> tuple[str, str]:
        """What became of two, and why, in words."""
        both = Settings(batch=Batch(micro=BATCH_SIZE)).having(one, other)
        if (reason := both.conflict()) is not None:
            return "refused", reason
        try:
            with Caught() as caught:
                found = self.run(both)
            if caught.error is not None:
                raise caught.error
        except PlanError as error:
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001 - whatever a pair raises is its result
            return "raised", f"{type(error).__name__}: {error}"
        lossy = [each for each in (one, other) if each.exactness(self.facts) == "lossy"]
        if not all(loss.isfinite() for loss in found.losses):
            return "differs", "a loss is not finite"
        if len(lossy) == 2:
            return "works", ""
        wanted = self.run(Settings(batch=Batch(micro=BATCH_SIZE)).having(*lossy))
        others = [each for each in (one, other) if each not in lossy]
        in_fewer_bits = any(each.has_context for each in lossy)  # where reordered sums round otherwise
        rounds = in_fewer_bits or any(each.exactness(self.facts) == "rounding" for each in others)
        return self._compared(found, wanted, others, rounds)

    def _compared(self, found: Run, wanted: Run, others: list[Technique], rounds: bool) -> tuple[str, str]:
        largest = _LARGEST["rounding" if rounds else "exact"]
        losses = ({str(n): loss for n, loss in enumerate(run.losses)} for run in (found, wanted))
        far = {"losses": relative_difference(*losses), "state": relative_difference(found.state, wanted.state)}
        if not any(each.frees_gradients for each in others):
            far["gradients"] = relative_difference(found.gradients, wanted.gradients)
        over = {name: value for name, value in far.items() if value > largest[name]}
        words = ", ".join(f"{name} by {value:.2g}" for name, value in over.items())
        return ("differs" if over else "works"), words

    def _run(self, settings: Settings) -> Run:
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_applied(self._task, settings)


def main() -> None:
    """Try each pair, and print those that neither work nor are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--only", choices=TECHNIQUES, help="pairs with this one alone")
    parser.add_argument("--leave-out", choices=TECHNIQUES, action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="add the rows to results/technique-pairs-cpu.jsonl")
    arguments = parser.parse_args()
    rows = [tried(name, arguments) for name in arguments.model or MODELS]
    if arguments.keep:
        save_rows("technique-pairs", "cpu", rows)


def tried(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All pairs on a model."""
    model, only = Model(name), arguments.only or ONLY.get(name)
    left_out = {*_ELSEWHERE, *arguments.leave_out, *(() if name == "gpt" else _ON_GPT)}
    kinds = {key: [*settings_of(kind, model.facts)] for key, kind in TECHNIQUES.items() if key not in left_out}
    cells: dict[str, Counter[str]] = {}
    bad = []
    for one, other in itertools.combinations(kinds, 2):
        for pair in itertools.product(kinds[one], kinds[other]) if only in (None, one, other) else ():
            how, why = model.pair(*pair)
            cells.setdefault(f"{one} {other}", Counter())[how] += 1
            if how in ("raised", "differs"):
                bad.append([*map(repr, pair), why])
                print(f"{name}: {pair[0]!r} with {pair[1]!r} {how}: {why}", flush=True)
    counted = {how: sum(cell[how] for cell in cells.values()) for how in HOW}
    print(f"{name}: {', '.join(f'{number} {how}' for how, number in counted.items())}", flush=True)
    absent = [*sorted(left_out), *sorted(key for key, row in kinds.items() if not row)]
    return {"model": name, **counted, "bad": bad, "not_tried": absent, "cells": cells}


def matrix(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Of each technique, its name, and a letter for it with each one before it, over the rows of all models: ``w`` all
    kinds work, ``r`` all are refused in words, ``s`` some of both, ``x`` some do neither, ``-`` not tried."""
    cells: dict[str, Counter[str]] = {}
    for row in rows:
        for pair, found in row["cells"].items():
            cells.setdefault(pair, Counter()).update(found)
    names = [name for name in TECHNIQUES if any(name in pair.split() for pair in cells)]
    for number, name in enumerate(names):
        yield name, "".join(_letter(cells.get(f"{before} {name}", Counter())) for before in names[:number])


def _letter(found: Counter[str]) -> str:
    if found["raised"] or found["differs"]:
        return "x"
    return {(True, True): "s", (True, False): "w", (False, True): "r"}.get(
        (found["works"] > 0, found["refused"] > 0), "-"
    )


if __name__ == "__main__":
    main()
