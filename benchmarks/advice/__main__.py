"""What the advice of two guides and a paper does to the peak and the time of a training step, on six jobs.

    python -m benchmarks.advice --keep
    python -m benchmarks.advice --only blocks --model ViT

Each row is a plan of autotune's or torch's own call, applied to a job; its optimizer step takes turns with the stock
step. The peak is that of all tensors: weights, gradients, the optimizer's state, what backward needs. Then the tables
of docs/evidence/advice.md are printed from all kept rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.measure.timing.disturbance import one_thread

from ..rows import save_rows
from ..tables import drawn
from .jobs import JOBS
from .known import ADVICE
from .measure import Job
from .other import OTHERS
from .page import TABLES


def main() -> None:
    """Measure what is asked for, print its rows, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*ADVICE, *OTHERS), action="append", metavar="ROW", help=", ".join(ADVICE))
    parser.add_argument("--model", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/advice-cpu.jsonl")
    arguments = parser.parse_args()
    keys = arguments.only or (*ADVICE, *OTHERS)
    for name in arguments.model or JOBS:
        with one_thread():
            for row in _rows(name, keys):
                print(row, flush=True)
                if arguments.keep:
                    save_rows("advice", "cpu", [row])
    for table in TABLES:
        print(f"\n{drawn(table)}")


def _rows(name: str, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Of one job."""
    job = Job(name)
    for key in keys:
        if key in ADVICE and name in ADVICE[key].models:
            yield job.measure(key)
        elif key in OTHERS and name in OTHERS[key][1]:
            yield OTHERS[key][0](name)


if __name__ == "__main__":
    main()
