"""Memory asked for 1,000 jobs of a simulated cluster, by what `POST /v1/predict` answers, and by habit.

    python -m benchmarks.admission --keep        # out of memory and waste; seconds
    python -m benchmarks.admission --latency     # of the route, over HTTP, with 2,000 finished searches

Jobs are milabench's on four types of cards (`benchmarks/cards/measured/milabench.csv`): a job at a batch on a card,
drawn with its row's memory as what it takes. Rows that were measured again tell by how much runs differ. Each asks for
memory of its card; where that was too little, it dies and asks for the whole card. Waste is what was asked for and not
used; what died has wasted all that it asked for. Asked for is

- by measurements that are kept: a search measured it before, with the largest of three runs, and above it 3 % or twice
  what the three differ by; before that, the upper end of what is predicted (`benchmarks/results/cards-cpu.jsonl`), and
  the whole card where nothing is, as of the MI325, which `predict` does not know;
- by predictions alone: the upper end, of jobs of which something is predicted;
- by habit: what the job's last run on such a card took, whatever its batch was, times 1.2; the whole card at first.

Bars: out of memory 0.1 % from kept measurements, 5 % from predictions alone; half of the waste of habit; 2 s at the
95th percentile for a known fingerprint.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.plan import Peak
from autotune.units import MIB

from .rows import HERE, load_rows, save_rows

NUM_JOBS, MARGIN, HABIT, SEEDS, NUM_REPEATS = 1000, 0.03, 1.2, 5, 3
CARDS_MIB = {"H100": 81_009, "H200": 143_221, "L40S": 45_466, "MI325": 262_128}
"""What a card has; of the MI325, 256 GiB by its vendor, less what its largest row leaves."""
OUT_BAR, PREDICTED_BAR, WASTE_BAR, LATENCY_BAR_S = 0.001, 0.05, 0.5, 2.0

KNOWN = ("H100", "H200", "L40S")
Place = tuple[str, str, int]
"""A job, a card, and a batch."""


@dataclass
class Tally:
    """What a way of asking comes to."""

    asked: Counter[str] = field(default_factory=Counter)
    """Jobs by what the answer was from."""
    died: Counter[str] = field(default_factory=Counter)
    """Those that ran out of memory."""
    wasted_mib: float = 0.0
    used_mib: float = 0.0

    def run(self, source: str, asked_mib: float, took_mib: float, whole_mib: float) -> None:
        """One job, for as long as any other."""
        asked_mib = min(asked_mib, whole_mib)
        self.asked[source] += 1
        self.used_mib += took_mib
        if took_mib > asked_mib:
            self.died[source] += 1
            self.wasted_mib += asked_mib
            asked_mib = whole_mib
        self.wasted_mib += asked_mib - took_mib


def main() -> None:
    """Simulate, or measure the route."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", action="store_true", help="of the route, in place of the simulation")
    parser.add_argument("--searches", type=int, default=2000, help="with --latency: that the database has")
    parser.add_argument("--requests", type=int, default=200, help="with --latency")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/admission-cpu.jsonl")
    arguments = parser.parse_args()
    rows = [latency(arguments.searches, arguments.requests)] if arguments.latency else [*simulated()]
    if arguments.keep:
        save_rows("admission", "cpu", rows)


def simulated() -> Iterator[dict[str, Any]]:
    """A row for each order of jobs, which is printed; then what they come to together."""
    runs, predicted = measured_runs(), predictions()
    found = []
    for name, cards in (("four types of cards", [*CARDS_MIB]), ("the three that are known", [*KNOWN])):
        for seed in range(SEEDS):
            own = {place: row for place, row in runs.items() if place[1] in cards}
            found.append({"cards": name, "seed": seed, **simulate(own, predicted, seed)})
            yield found[-1]
        tell(name, [row for row in found if row["cards"] == name])


def tell(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what several orders come to."""

    def of(*keys: str) -> float:
        return sum(row[key] for row in rows for key in keys)

    print(f"{name}, {len(rows)} orders of {NUM_JOBS} jobs:")
    ways = {"kept": OUT_BAR, "again": OUT_BAR, "alone": PREDICTED_BAR}
    said = {
        "kept": "kept measurements",
        "again": "of these, whose rows were measured again",
        "alone": "predictions alone",
    }
    for what, bar in ways.items():
        died, asked = of(f"{what}_died"), of(f"{what}_asked")
        print(f"  {said[what]}: {died:.0f} of {asked:.0f} ran out of memory, {died / asked:.2%} (bar {bar:.1%})")
    places = Counter[str]()
    for row in rows:
        places.update(row["died_of"])
    print("  of kept measurements: " + "; ".join(f"{place}: {died}" for place, died in places.most_common()))
    print(f"  nothing known, the whole card asked for: {of('nothing_asked'):.0f}")
    waste, habit = of("wasted_mib"), of("habit_wasted_mib")
    print(
        f"  waste: {waste / of('used_mib'):.2f} of what jobs used; by habit {habit / of('used_mib'):.2f}, of which "
        f"{of('habit_died'):.0f} ran out of memory: {waste / habit:.2f} of it (bar {WASTE_BAR})"
    )


def measured_runs() -> dict[Place, list[float]]:
    """MiB of each run, in the order in which they were made."""
    found: dict[Place, list[tuple[float, float]]] = defaultdict(list)
    path = HERE / "cards" / "measured" / "milabench.csv"
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if float(row["mib"]) <= CARDS_MIB[row["card"]]:
            place = row["job"], row["card"], int(row["batch"])
            found[place].append((float(row["time"] or 0), float(row["mib"])))
    return {place: [mib for _, mib in sorted(row)] for place, row in found.items()}


def predictions() -> dict[Place, float]:
    """MiB at the upper end of the interval, by the newest rows."""
    rows = load_rows("cards", "cpu")
    return {(row["job"], row["card"], row["batch"]): row["high_bytes"] / MIB for row in rows}


def simulate(runs: Mapping[Place, list[float]], predicted: Mapping[Place, float], seed: int) -> dict[str, Any]:
    """One order of jobs: what each way of asking comes to."""
    generator = random.Random(seed)
    jobs = sorted({place[0] for place in runs})
    by_job = {job: [place for place in runs if place[0] == job] for job in jobs}
    service, alone, habit = Tally(), Tally(), Tally()
    kept: dict[Place, float] = {}
    died_of = Counter[str]()
    again = Tally()
    """Of those whose runs are known to differ or not: of all others there is but one row."""
    last: dict[tuple[str, str], float] = {}
    for _ in range(NUM_JOBS):
        place = generator.choice(by_job[generator.choice(jobs)])
        took, whole = generator.choice(runs[place]), float(CARDS_MIB[place[1]])
        source = "kept" if place in kept else "predicted" if place in predicted else "nothing"
        of_kept = kept.get(place, 0.0)
        service.run(source, {"kept": of_kept, "predicted": predicted.get(place, whole)}.get(source, whole), took, whole)
        if source == "kept" and len(runs[place]) > 1:
            again.run("again", of_kept, took, whole)
        if source == "kept" and took > of_kept:
            died_of["{} on {}, batch {}".format(*place)] += 1
        if place[1] in KNOWN:
            kept.setdefault(place, _asked_mib([generator.choice(runs[place]) for _ in range(NUM_REPEATS)]))
        if place in predicted:
            alone.run("alone", predicted[place], took, whole)
        habit.run("habit", HABIT * last.get(place[:2], whole), took, whole)
        last[place[:2]] = took
    found: dict[str, Any] = {
        "wasted_mib": service.wasted_mib,
        "used_mib": service.used_mib,
        "habit_wasted_mib": habit.wasted_mib,
    }
    found["died_of"] = died_of
    for tally, names in (
        (again, ("again",)),
        (service, ("kept", "predicted", "nothing")),
        (alone, ("alone",)),
        (habit, ("habit",)),
    ):
        for name in names:
            found |= {f"{name}_asked": tally.asked[name], f"{name}_died": tally.died[name]}
    return found


def _asked_mib(runs: Sequence[float]) -> float:
    """What ``predict`` says to ask for where a search measured these."""
    sizes = [round(mib * MIB) for mib in runs]
    return Peak(process=max(sizes), spread=max(sizes) - min(sizes) or None).next_bytes(MARGIN) / MIB


def latency(num_searches: int, num_requests: int) -> dict[str, Any]:
    """Seconds of an answer for a known fingerprint, over HTTP, beside so many finished searches of other jobs."""
    import httpx
    import uvicorn
    from sqlalchemy import insert

    from autotune.plan import load_plan
    from autotune.service.service import open_service
    from autotune.service.store.tables import SEARCHES
    from autotune.service.supervisor import RunnerOptions
    from autotune.service.web.app import make_app

    golden = load_plan(HERE.parent / "tests" / "golden" / "plan.yaml").to_yaml()
    own = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
    common = {"spec": "{}", "owner": "ann", "state": "SUCCEEDED", "priority": 50, "created_at": 1.0, "name": "job"}
    rows = [
        {"id": f"{number:016x}", "plan": golden.replace(own, f"{number // 4:064x}").replace("A GPU", "NVIDIA L40S")}
        for number in range(num_searches)
    ]
    with tempfile.TemporaryDirectory() as folder:
        service = open_service(Path(folder, "state"), None, RunnerOptions())
        with service.database.writing() as connection:
            connection.execute(insert(SEARCHES), [{**common, **row} for row in rows])
        server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/predict"
        headers = {"Authorization": f"Bearer {service.tokens.make_for_run()}"}
        seconds, how = [], Counter[str]()
        with httpx.Client(headers=headers, timeout=60.0) as client:
            for number in range(num_requests):
                body = {"fingerprint": f"sha256:{number % (num_searches // 4):064x}", "cards": ["l40s", "h100"]}
                began_s = time.perf_counter()
                answer = client.post(address, json=body).raise_for_status()
                seconds.append(time.perf_counter() - began_s)
                how[answer.json()["cards"][0]["how"]] += 1
        server.should_exit = True
        thread.join()
    seconds.sort()
    row = {"searches": num_searches, "requests": num_requests, "how": dict(how)}
    row |= {"median_s": statistics.median(seconds), "p95_s": seconds[int(0.95 * len(seconds))], "most_s": seconds[-1]}
    print(json.dumps(row))
    print(f"{row['p95_s']:.3f} s at the 95th percentile (bar {LATENCY_BAR_S} s)")
    return row


if __name__ == "__main__":
    main()
