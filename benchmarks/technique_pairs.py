"""Does each pair of techniques work together, or is it refused in words?

    python -m benchmarks.technique_pairs --only tiles  # pairs of all, the compiled ones too, take longer

Each kind of each technique with each kind of each other one, on a transformer and a ResNet of a few thousand parameters
without dropout: an epoch of both together, through ``apply``, beside an epoch of what they should come to: the stock
loop, or, where one changes the function, that one alone. Losses, first gradients and trained state agree within what
both are said to be: exact (2e-5), rounding. Not tried: what takes another process (``parallel``, ``allocator``), and
kinds that these models cannot have.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError

from autotune.errors import Caught, PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.task import Task
from autotune.techniques import TECHNIQUES, Exactness, Facts, Settings, Technique
from autotune.techniques.batch import Batch
from autotune.testing.facts import facts_of
from autotune.testing.runs import Run, relative_difference, run_applied, without_dropout
from autotune.testing.zoo import BATCH_SIZE, ZOO

from .rows import save_rows

MODELS = ("gpt", "resnet")
HOW = ("works", "refused", "raised", "differs")
_ELSEWHERE = ("parallel", "allocator")
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
        self.facts = facts_of(ZOO[name]).model_copy(update={"allow_lossy": True})
        self._task: Task = without_dropout(ZOO[name])
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
        return self._compared(found, wanted, [each for each in (one, other) if each not in lossy])

    def _compared(self, found: Run, wanted: Run, others: list[Technique]) -> tuple[str, str]:
        rounds = any(each.exactness(self.facts) == "rounding" for each in others)
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
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--only", choices=TECHNIQUES, help="pairs with this one alone")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/technique-pairs-cpu.jsonl")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.model or MODELS:
        model = Model(name)
        kinds = {key: [*settings_of(kind, model.facts)] for key, kind in TECHNIQUES.items() if key not in _ELSEWHERE}
        found: dict[str, list[tuple[Technique, Technique, str]]] = {how: [] for how in HOW}
        for one, other in itertools.combinations(kinds, 2):
            if arguments.only not in (None, one, other):
                continue
            for pair in itertools.product(kinds[one], kinds[other]):
                how, why = model.pair(*pair)
                found[how].append((*pair, why))
                if how in ("raised", "differs"):
                    print(f"{name}: {pair[0]!r} with {pair[1]!r} {how}: {why}", flush=True)
        counted = {how: len(pairs) for how, pairs in found.items()}
        print(f"{name}: {', '.join(f'{number} {how}' for how, number in counted.items())}", flush=True)
        bad = [[repr(one), repr(other), why] for how in ("raised", "differs") for one, other, why in found[how]]
        absent = sorted(key for key, row in kinds.items() if not row)
        rows.append({"model": name, **counted, "bad": bad, "not_tried": [*_ELSEWHERE, *absent]})
    if arguments.keep:
        save_rows("technique-pairs", "cpu", rows)


if __name__ == "__main__":
    main()
