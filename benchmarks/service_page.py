"""The page with a search of many trials, in headless Chromium: the time until it shows, and pictures of it.

    python -m benchmarks.service_page [--trials 10000] [--pictures FOLDER] [--keep]

Bars: it shows within 3 s, nothing holds it up for longer than 1 s, and no error is in its console.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.service.findings import Documents, Summary
from autotune.service.service import open_database
from autotune.service.spec import SearchSpec
from autotune.service.store.leases import Leases
from autotune.service.store.searches import Searches
from autotune.service.store.states import State

from .chromium import Page
from .rows import save_rows
from .service_place import Server

__all__ = ["fill"]

WINDOWS = {"desktop": (1280, 900, False), "phone": (390, 844, False), "dark": (1280, 900, True)}
SHOWN_S, LONGEST_S = 3.0, 1.0
LIMIT = 8 * 2**30
WATCH = (
    "window.longest = 0; new PerformanceObserver(list => { for (const each of list.getEntries()) "
    "longest = Math.max(longest, each.duration); }).observe({ type: 'longtask', buffered: true });"
)
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began))))"


def main() -> None:
    """Show it at each size, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/service-page-cpu.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotune-page-") as folder:
        search_id = fill(Path(folder, "state"), arguments.trials)
        server = Server(Path(folder, "state"))
        try:
            rows = [_measure(server.url, search_id, arguments, name) for name in WINDOWS]
        finally:
            server.end()
    print("\n".join(map(json.dumps, rows)))
    if arguments.keep:
        print(save_rows("service-page", "cpu", rows))
    sys.exit(not all(row["holds"] for row in rows))


def _measure(url: str, search_id: str, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    width, height, dark = WINDOWS[name]
    with Page(width, height, dark=dark) as page:
        page.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        began = time.monotonic()
        page.ask("Page.navigate", url=f"{url}/#/{search_id}")
        page.until("document.querySelectorAll('tbody tr').length > 0 && document.querySelector('pre')?.textContent")
        shown_s = time.monotonic() - began
        _take(page, arguments.pictures, name, "top")
        redraw_ms = page.evaluate(
            "{ const began = performance.now(); [...document.querySelectorAll('button')]"
            f".find(each => each.textContent === 'Show more').click(); {FRAME} }}"
        )
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        longest_ms = page.evaluate("longest")
        page.evaluate("document.querySelector('table').scrollIntoView()")
        _take(page, arguments.pictures, name, "trials")
        page.ask("Page.navigate", url=f"{url}/#/")
        page.until("document.querySelectorAll('.card').length > 1")
        _take(page, arguments.pictures, name, "list")
        complaints = page.complaints
    holds = shown_s < SHOWN_S and max(longest_ms, redraw_ms) < LONGEST_S * 1000 and overflow <= 0 and not complaints
    return {
        "window": name,
        "trials": arguments.trials,
        "shown_s": round(shown_s, 2),
        "longest_task_ms": round(longest_ms),
        "redraw_ms": round(redraw_ms),
        "pixels_too_wide": overflow,
        "complaints": complaints,
        "load_average": round(os.getloadavg()[0], 1),
        "holds": holds,
    }


def _take(page: Page, folder: Path | None, window: str, part: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        page.picture(folder / f"{window}-{part}.png")


def fill(state: Path, num_trials: int) -> str:
    """A state folder with one search of so many trials, one of each other end, and one that waits after a failure; the
    first's id."""
    database, _ = open_database(state, None, alone=False)
    searches, leases = Searches(database), Leases(database, "elsewhere", 3600.0)
    ends = {
        State.NOTHING_FITS: "nothing fits into 1 GiB: the smallest takes 1.4 GiB",
        State.ERROR: "its driver was lost",
    }
    for state_, words in {**ends, State.FAILED: "model.py: no function build() was found"}.items():
        searches.submit(SearchSpec(task="model.py", folder="/jobs", name=f"train {len(words)}"), "bob", None)
        if lease := leases.claim():
            leases.begin(lease, 1, 1)
            leases.finish(lease, state_, words)
    spec = SearchSpec(task="train.py:gpt2", folder="/jobs", name="gpt2-medium on one card", budget="8GiB")
    search_id = searches.submit(spec, "ann", None)[0].id
    lease = leases.claim()
    assert lease is not None
    leases.begin(lease, 1, 1)
    summary = Summary()
    rows = [*_events(num_trials)]
    for first in range(0, len(rows), 500):
        part = rows[first : first + 500]
        for row in part:
            summary.take(row)
        leases.record(lease, part, first + 1, summary.as_json())
    plan = "schema: autotune/plan@1\nsettings: {}\n"
    report = "\n".join(["gpt2-medium: 41.2 samples/s, 7.61 GiB", *(f"  line {n} of the report" for n in range(8))])
    leases.finish(lease, State.SUCCEEDED, "", Documents(plan, report))
    searches.submit(SearchSpec(task="model.py", folder="/jobs", name="train later"), "bob", None)
    if lease := leases.claim():
        leases.give_back(lease, "the Ray cluster at head:6379 has died.", is_failure=True)
    database.close()
    return search_id


def _events(num_trials: int) -> list[dict[str, Any]]:
    random_ = random.Random(0)
    started = {"event": "search_started", "study": "s-1", "num_trials": num_trials, "limit_bytes": LIMIT, "resumed": []}
    rows, best = [started], 0.0
    for number in range(num_trials):
        batch = 2 ** random_.randrange(7)
        peak = int(2**30 * (1.2 + 0.16 * batch * random_.uniform(0.6, 1.1)))
        speed = 45 * batch / (batch + 6) * random_.uniform(0.7, 1.0)
        fits, failed = peak <= LIMIT, random_.random() < 0.05
        is_best = fits and not failed and speed > best
        best = speed if is_best else best
        words = f"{speed:.1f} samples/s, {peak / 2**30:.2f} GiB" + ("" if fits else ", over the budget")
        row = {
            "event": "trial_ended",
            "number": number,
            "settings": f"batch {batch}, checkpoint every {1 + number % 4}, bf16, fused AdamW, channels last",
            "outcome": "crashed" if failed else "measured",
            "fits": fits and not failed,
            "is_best": is_best,
            "words": "crashed: CUDA error: an illegal memory access was encountered" if failed else words,
            "seconds": 4.0,
        }
        rows.append(row if failed else {**row, "samples_per_s": speed, "peak_bytes": peak})
    bought = {None: {"samples_per_s": 41.2}, "precision": {"samples_per_s": 20.6}, "batch": {"words": "out of memory"}}
    rows += [{"event": "ablation_ended", "without": name, "round": 1, **said} for name, said in bought.items()]
    return rows


if __name__ == "__main__":
    main()
