"""Six public training scripts, as they stand and with the plan of a default search.

    python -m benchmarks.public_scripts.prepare --folder FOLDER     # once; it says what FOLDER must hold
    python -m benchmarks.public_scripts --folder FOLDER [--only NAME]... [--steps 1000] [--max-time TIME] [--keep]

For each script: `autotune search -- python train.py …`, `autotune verify`, and then so many optimizer steps of the
script as it stands and with the plan, in turn, by `autotune run`. A recorder on torch's own objects, which knows
nothing of autotune, sees samples, losses, learning rates, time and peak, and ends the script after its last step;
evaluation and checkpoints on the way are in the time. Nothing of a script is changed but the lines that `scripts.py`
names.
Exits with 1 where a script trained otherwise with its plan, or failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.plan import Plan, load_plan

from ..rows import save_rows
from .compare import compared, summary
from .run import Failure, Place, without_folders
from .scripts import SCRIPTS, Script

_HEADER = "| script | plan | search | plan says | `verify` | {steps:,} steps | peak | samples | losses |"


def main() -> None:
    """Try the scripts, print the table, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the repositories lie, prepared")
    parser.add_argument("--only", action="append", choices=[script.name for script in SCRIPTS], help="default: all")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs as it stands and with the plan, in turn")
    parser.add_argument("--max-time", help="of each search; default: no limit")
    parser.add_argument("--plans", type=Path, help="plans and logs are kept here; a plan that is here is used again")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results, as they end")
    arguments = parser.parse_args()
    scripts = [script for script in SCRIPTS if not arguments.only or script.name in arguments.only]
    began_s, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="autotune-public-") as name:
        kept = (arguments.plans or Path(name)).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        for script in scripts:
            rows.append(without_folders(tried(script, Place(script, arguments.folder.resolve(), kept), arguments)))
            print(f"{line(rows[-1])}  {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
            if arguments.keep:
                save_rows("public-scripts", "cpu", rows[-1:])
    header = _HEADER.format(steps=arguments.steps)
    print("\n".join([header, "|---" * (header.count("|") - 1) + "|", *map(line, rows)]))
    wrong = [f"{row['script']}: {fault}" for row in rows for fault in row["faults"]]
    print("\n".join(wrong))
    sys.exit(bool(wrong))


def tried(script: Script, place: Place, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of a script."""
    row: dict[str, Any] = {"script": f"{script.repository}@{script.commit}", "words": script.words, "faults": []}
    try:
        if not place.plan.exists():
            row |= {"search_s": round(place.search(arguments.max_time), 1), "max_time": arguments.max_time}
        plan = load_plan(place.plan)
        row |= stated(plan)
        row["verified"] = place.verify()
        num_passes = plan.settings.batch.accumulate if plan.settings.batch is not None else None
        row["rounds"] = [round_of(place, arguments.steps, number, num_passes) for number in range(arguments.rounds)]
    except (Failure, AutotuneError) as failure:
        row["faults"] = [str(failure)]
        return row
    row["faults"] = list(dict.fromkeys(fault for one in row["rounds"] for fault in one["faults"]))
    return row


def stated(plan: Plan) -> dict[str, Any]:
    """What a plan says of itself."""
    return {
        "plan": ", ".join(technique.describe() for technique in plan.settings.chosen()) or "the job itself",
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "gain": plan.gain.model_dump(exclude_none=True) if plan.gain else None,
        "checked": plan.checked,
        "notes": list(plan.notes),
        "trials": plan.search.trials if plan.search else None,
    }


def round_of(place: Place, num_steps: int, number: int, num_passes: int | None) -> dict[str, Any]:
    """Both trainings; which is first changes from round to round."""
    found = {is_planned: place.train(num_steps, is_planned) for is_planned in (number % 2 == 1, number % 2 == 0)}
    (plain, _), (planned, said) = found[False], found[True]
    return {"plain": summary(plain), "planned": summary(planned), "said": said, **compared(plain, planned, num_passes)}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [row["script"], row.get("plan", "none"), f"{row['search_s']:.0f} s" if "search_s" in row else "–"]
    gain = row.get("gain")
    cells.append(_gain_words(gain) if gain else "–")
    if "rounds" not in row:
        return f"| {' | '.join([*cells, *['–'] * 4, 'FAILED'])} |"
    verified = row["verified"]
    over = verified["measured"]["samples_per_s"]["value"] / verified["stated"]["samples_per_s"]["value"]
    cells.append(f"{over:.2f} of it{'' if verified['holds'] else ', does NOT hold'}")
    for what, digits in (("steps_per_s", 2), ("peak_bytes", 2)):
        cells.append(
            f"{statistics.median(one['planned'][what] / one['plain'][what] for one in row['rounds']):.{digits}f}x"
        )
    one = row["rounds"][0]
    cells.append(one["samples"])
    own, got = one["plain"]["losses"], one["planned"]["losses"]
    cells.append(f"first ten within {one['first_losses']:.1e}; {own[0]:.3f} to {own[-1]:.3f}, with it {got[-1]:.3f}")
    return f"| {' | '.join(cells)} |"


def _gain_words(gain: dict[str, Any]) -> str:
    interval = f" ({gain['low']:.2f} to {gain['high']:.2f})" if "low" in gain else ""
    return f"{gain['speed']:.2f}x{interval}{', unproven' if 'unproven' in gain else ''}"


if __name__ == "__main__":
    main()
