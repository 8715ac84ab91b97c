"""The page in headless Chromium, light and dark, at three widths: the time until a search of many trials shows, and
pictures of it, of the list, and of one that runs, one that waits and one of each bad end.

    python -m benchmarks.service_page [--trials 10000] [--pictures FOLDER] [--keep]

Bars: it shows within 3 s, nothing holds it up for longer than 1 s, and no error is in its console.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.service.service import open_database
from autotune.service.store.tokens import Tokens
from tests.chromium import Page
from tests.filled_service import fill

from .rows import save_rows
from .service_place import Server

WINDOWS = {
    "desktop": (1280, 900, False),
    "tablet": (768, 1024, False),
    "phone": (390, 844, False),
    "dark": (1280, 900, True),
    "dark-phone": (390, 844, True),
}
SHOWN_S, LONGEST_S = 3.0, 1.0
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
        state = Path(folder, "state")
        search_id = fill(state, arguments.trials)
        database, _ = open_database(state, None, alone=False)
        token = Tokens(database).create("page", "read", 3600.0)[1]
        database.close()  # SQLite's locks are not to be had across a fork
        server = Server(state)
        try:
            rows = [_measure(server.url, token, search_id, arguments, name) for name in WINDOWS]
        finally:
            server.end()
    print("\n".join(map(json.dumps, rows)))
    if arguments.keep:
        print(save_rows("service-page", "cpu", rows))
    sys.exit(not all(row["holds"] for row in rows))


def _measure(url: str, token: str, search_id: str, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    width, height, dark = WINDOWS[name]
    with Page(width, height, dark=dark) as page:
        page.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        page.ask("Page.navigate", url=f"{url}/#token={token}")
        page.until("document.querySelectorAll('.card').length > 1")
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
        for number, link in enumerate(
            page.evaluate("[...document.querySelectorAll('.card a')].map(each => each.hash)")
        ):
            page.ask("Page.navigate", url=f"{url}/{link}")
            page.until("document.querySelector('tbody td') !== null && document.querySelector('.card') === null")
            overflow = max(overflow, page.evaluate("document.documentElement.scrollWidth - innerWidth"))
            _take(page, arguments.pictures, name, f"search-{number}")
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


if __name__ == "__main__":
    main()
