"""Memory asked for 1,000 jobs of a simulated cluster, by what `POST /v1/predict` answers, and by habit.

    python -m benchmarks.admission --keep        # out of memory and waste; two minutes
    python -m benchmarks.admission --latency     # of the route, over HTTP, with 2,000 finished searches

Jobs are milabench's on four types of cards (`benchmarks/cards/measured/milabench.csv`): a job at a batch on a card, a
place, with one of its rows as what it takes. A place with one row varies as its job's other places do on cards of one
make: its row times one of their rows, over that place's median. Left out are rows below a model's weights in half
precision, which are no training's; torchatari with another `cpu` is another job, since that is its number of
environments. Each asks for memory of its card; where that was too little, it dies and asks for the whole card. Waste is
what was asked for and not used; what died has wasted all that it asked for. Asked for is

- what the service's own code answers of the job at this batch on this card: measured by a search, which each place on
  a CUDA card has after its first run (three runs; what the search itself took is not counted); else the upper end of
  what is predicted (`benchmarks/results/cards-cpu.jsonl`). Where nothing is known there are two ways, with a waste for
  each: what habit asks for at the same batch, since the webhook then lets a job through as it is; and the whole card;
- by predictions alone: the upper end, of jobs of which something is predicted; those of models that the predictor was
  not developed on (held out) once more apart;
- by habit: what the job's last run on such a card took, times 1.2, the whole card at first: its last run at the same
  batch, and its last run at any.

Bars: out of memory 0.1 % from kept measurements, 5 % from predictions alone; half of the waste of habit at the same
batch; 2 s at the
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

from autotune.estimates.cards import Card, find_cards, option_name
from autotune.estimates.types import Estimate, Fit, Interval
from autotune.plan import Plan, load_plan
from autotune.service.predictions import known_on
from autotune.units import MIB

from .rows import HERE, load_rows, save_rows

NUM_JOBS, HABIT, SEEDS, NUM_REPEATS = 1000, 1.2, 10, 3
OUT_BAR, PREDICTED_BAR, WASTE_BAR, LATENCY_BAR_S = 0.001, 0.05, 0.5, 2.0

CARDS = {card.name.removesuffix("X"): card for card in find_cards("h100,h200,l40s,mi325x")}
"""By their names in milabench's rows."""
KNOWN = tuple(name for name, card in CARDS.items() if not card.is_amd)
LEAST_MIB = {"diffusion-single": 2 * 1289.95e6 / MIB}
"""Of a training, by its parameters. Others have no row below."""
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
    for name, cards in (("four types of cards", [*CARDS]), ("the three of CUDA", [*KNOWN])):
        for seed in range(SEEDS):
            own = {place: row for place, row in runs.items() if place[1] in cards}
            found.append({"cards": name, "seed": seed, **Cluster(own, predicted, seed).run()})
            yield found[-1]
        tell(name, [row for row in found if row["cards"] == name])


def tell(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what several orders come to."""

    def of(*keys: str) -> float:
        return sum(row[key] for row in rows for key in keys)

    print(f"{name}, {len(rows)} orders of {NUM_JOBS} jobs:")
    ways = {"measured": OUT_BAR, "again": OUT_BAR, "alone": PREDICTED_BAR, "held_out": PREDICTED_BAR}
    said = {
        "measured": "kept measurements",
        "again": "of these, of jobs that were measured again at some batch",
        "alone": "predictions alone",
        "held_out": "of these, of jobs that the predictor was not developed on",
    }
    for what, bar in ways.items():
        died, asked = of(f"{what}_died"), of(f"{what}_asked")
        print(f"  {said[what]}: {died:.0f} of {asked:.0f} ran out of memory, {died / asked:.2%} (bar {bar:.1%})")
    places = Counter[str]()
    for row in rows:
        places.update(row["died_of"])
    print("  of kept measurements: " + "; ".join(f"{place}: {died}" for place, died in places.most_common()))
    print(f"  nothing known: {of('unknown_asked'):.0f}, of which {of('unknown_died'):.0f} ran out of memory")
    used, at_batch, at_any = of("used_mib"), of("batch_habit_wasted_mib"), of("habit_wasted_mib")
    for ask, waste in (("what habit asks for", of("wasted_mib")), ("the whole card", of("whole_wasted_mib"))):
        print(
            f"  waste, where nothing is known with {ask}: {waste / used:.2f} of what jobs used; of habit's at the same "
            f"batch {waste / at_batch:.2f} (bar {WASTE_BAR}), at any {waste / at_any:.2f}"
        )
    for habit, waste, died in (("the same", at_batch, of("batch_habit_died")), ("any", at_any, of("habit_died"))):
        print(f"  habit, the last run at {habit} batch: waste {waste / used:.2f}, and {died:.0f} ran out of memory")


def measured_runs() -> dict[Place, list[float]]:
    """MiB that each run was charged, without what a driver keeps, in the order in which they were made."""
    found: dict[Place, list[tuple[float, float]]] = defaultdict(list)
    path = HERE / "cards" / "measured" / "milabench.csv"
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        card, job = CARDS[row["card"]], row["job"]
        mib = float(row["mib"]) - card.driver_mib
        if LEAST_MIB.get(job, 0.0) <= mib <= card.memory_mib:
            job += f", {row['cpu']} environments" if job == "torchatari" else ""
            found[job, row["card"], int(row["batch"])].append((float(row["time"] or 0), mib))
    return {place: [mib for _, mib in sorted(row)] for place, row in found.items()}


def predictions() -> dict[Place, tuple[Interval, bool]]:
    """What is predicted by the newest rows, and whether the predictor was not developed on its model."""
    found = {}
    for row in load_rows("cards", "cpu"):
        driver_bytes = CARDS[row["card"]].driver_mib * MIB
        sizes = (row[key] - driver_bytes for key in ("low_bytes", "predicted_bytes", "high_bytes"))
        one = Interval(**dict(zip(("low", "value", "high"), sizes, strict=True)))
        found[row["job"], row["card"], row["batch"]] = one, row["known"] == "held out"
    return found


class Cluster:
    """One order of jobs, and what is known of them."""

    def __init__(
        self, runs: Mapping[Place, list[float]], predicted: Mapping[Place, tuple[Interval, bool]], seed: int
    ) -> None:
        self._runs, self._predicted, self._generator = runs, predicted, random.Random(seed)
        self._by_job: dict[str, list[Place]] = defaultdict(list)
        self._ratios: dict[tuple[str, bool], list[float]] = defaultdict(list)
        """Of a job on cards of one make: of each place with several rows, these over their median."""
        for place, row in runs.items():
            self._by_job[place[0]].append(place)
            if len(row) > 1:
                self._ratios[self._of_make(place)] += [mib / statistics.median(row) for mib in row]
        self._plans: dict[str, list[tuple[str, Plan]]] = defaultdict(list)
        self._golden = load_plan(HERE.parent / "tests" / "golden" / "plan.yaml")
        self._searched: set[Place] = set()

    def run(self) -> dict[str, Any]:
        """What each way of asking comes to."""
        service, whole_card, again, alone, held_out, batch_habit, habit = (Tally() for _ in range(7))
        died_of = Counter[str]()
        last: dict[tuple[str, ...] | Place, float] = {}
        for _ in range(NUM_JOBS):
            place = self._generator.choice(self._by_job[self._generator.choice(sorted(self._by_job))])
            took, whole = self._draw(place), float(CARDS[place[1]].memory_mib)
            by_habit = HABIT * last.get(place, whole)
            how, asked = self._ask(place)
            service.run(how, by_habit if asked is None else asked, took, whole)
            whole_card.run(how, whole if asked is None else asked, took, whole)
            if how == "measured" and asked is not None:
                if self._of_make(place) in self._ratios:
                    again.run("again", asked, took, whole)
                died_of.update(["{} on {}, batch {}".format(*place)] * (took > min(asked, whole)))
            if place in self._predicted:
                one, is_held_out = self._predicted[place]
                alone.run("alone", one.high / MIB, took, whole)
                if is_held_out:
                    held_out.run("held_out", one.high / MIB, took, whole)
            batch_habit.run("batch_habit", by_habit, took, whole)
            habit.run("habit", HABIT * last.get(place[:2], whole), took, whole)
            self._search(place)
            last[place] = last[place[:2]] = took
        found: dict[str, Any] = {
            "wasted_mib": service.wasted_mib,
            "whole_wasted_mib": whole_card.wasted_mib,
            "used_mib": service.used_mib,
            "batch_habit_wasted_mib": batch_habit.wasted_mib,
            "habit_wasted_mib": habit.wasted_mib,
            "died_of": died_of,
        }
        for tally, names in (
            (service, ("measured", "predicted", "unknown")),
            (again, ("again",)),
            (alone, ("alone",)),
            (held_out, ("held_out",)),
            (batch_habit, ("batch_habit",)),
            (habit, ("habit",)),
        ):
            for name in names:
                found |= {f"{name}_asked": tally.asked[name], f"{name}_died": tally.died[name]}
        return found

    def _draw(self, place: Place) -> float:
        """MiB that a run takes."""
        row = self._runs[place]
        ratios = self._ratios.get(self._of_make(place), [1.0]) if len(row) == 1 else [1.0]
        return min(self._generator.choice(row) * self._generator.choice(ratios), CARDS[place[1]].memory_mib)

    def _ask(self, place: Place) -> tuple[str, float | None]:
        """How much is known of it, and MiB to ask for; None where nothing is."""
        job, card, batch = place[0], CARDS[place[1]], place[2]
        estimates = {}
        if place in self._predicted:  # an archive is asked about at its batch
            estimates = {option_name(card): _estimate(batch, self._predicted[place][0])}
        known = known_on(card, None, self._plans[job], estimates, batch)
        return known.how, None if known.high_bytes is None else known.high_bytes / MIB

    def _search(self, place: Place) -> None:
        """A search measures the job there, if none has."""
        job, card, batch = place[0], CARDS[place[1]], place[2]
        if not card.is_amd and place not in self._searched:
            self._searched.add(place)
            sizes = [round(self._draw(place) * MIB) for _ in range(NUM_REPEATS)]
            self._plans[job].append(("0" * 16, self._plan(card, batch, sizes)))

    def _plan(self, card: Card, batch: int, sizes: Sequence[int]) -> Plan:
        """The golden plan, as if it had been measured so."""
        plan = self._golden
        assert plan.measured is not None
        assert plan.environment is not None
        assert plan.settings.batch is not None
        spread = {"process": max(sizes), "spread": max(sizes) - min(sizes) or None}
        measured = plan.measured.model_copy(update={"peak": plan.measured.peak.model_copy(update=spread)})
        settings = plan.settings.model_copy(update={"batch": plan.settings.batch.model_copy(update={"micro": batch})})
        environment = plan.environment.model_copy(update={"device": card.name})
        return plan.model_copy(update={"measured": measured, "settings": settings, "environment": environment})

    def _of_make(self, place: Place) -> tuple[str, bool]:
        return place[0], CARDS[place[1]].is_amd


def _estimate(batch: int, process: Interval) -> Estimate:
    fit = Fit(micro=batch, accumulate=1, tensors=process, process=process)
    more = {"base_bytes": 0, "largest": fit, "smallest": None, "surely": batch, "phase": "", "module": "", "fills": ()}
    return Estimate(how="traced", reference=fit, seconds=0.0, **more)


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
