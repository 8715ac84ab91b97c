"""Stands in for ``python -m autotune`` where a test of the service needs a driver that takes no time.

What the task's file says, as JSON: ``trials``, ``seconds`` of each, ``exit_code``, ``dies_at`` a trial (once), whether
it is ``deaf`` to SIGTERM, how many bytes it prints in a ``flood``, and where it ``holds_at``, once, until there is a
file ``go``; what the first ``reference`` comes to; held, it takes memory without end where there is a file ``takes``.
It keeps a study, and adds a line to a proof file for each trial that it measures, and one to
where measurements are kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

options = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[2:] if each.startswith("--") and "=" in each)
script = json.loads(Path(sys.argv[-1].partition(":")[0]).read_text())
study = Path(options["storage"].removeprefix("sqlite:///"))
asked: list[int] = []
with open(options["measurements"].removeprefix("sqlite:///"), "a") as kept:
    kept.write(f"{study.parent.name}\n")


with open(study.with_name("options"), "a") as told:
    told.write(" ".join(sys.argv[2:]) + "\n")


def hear(number: int, frame: object) -> None:
    asked.append(number)
    if len(asked) > 1:
        end(130, error="stopped")


def end(code: int, **document: object) -> None:
    print(json.dumps({"exit_code": code, **document}), flush=True)
    os._exit(code)


def say(event: str, **data: object) -> None:
    with open(options["progress"], "a") as file:
        file.write(json.dumps({"event": event, "time": time.time(), **data}) + "\n")


def point(name: str) -> None:
    if script.get("holds_at") == name and not study.with_name("held").exists():
        study.with_name("held").touch()
        hoard = []
        while not study.with_name("go").exists():
            while study.with_name("takes").exists():
                hoard.append(b"x" * 2**20)
            time.sleep(0.01)


def trial(number: int) -> dict[str, object]:
    speed = {"samples_per_s": 100.0 + number, "samples_per_s_low": 99.0 + number, "samples_per_s_high": 101.0 + number}
    return {
        "number": number,
        "settings": f"batch {8 << number % 6}",
        "fits": True,
        "is_best": True,
        "outcome": "measured",
        "words": f"{100 + number} samples/s, 300 MiB",
        "seconds": 0.1,
        "peak_bytes": 300 * 2**20 + number,
        **speed,
    }


signal.signal(signal.SIGTERM, signal.SIG_IGN if script.get("deaf") else hear)
print("the driver speaks", file=sys.stderr, flush=True)
for _ in range(script.get("flood", 0) // 2**20):
    sys.stderr.write("x" * 2**20)
    sys.stderr.flush()
    time.sleep(script.get("flood_s", 0.0))
if "daemon" in script and os.fork() == 0:
    os.setsid()
    time.sleep(3600)
point("starting")
if "error" in script:
    end(script.get("exit_code", 2), error=script["error"], kind=script.get("kind", "TaskError"))
done: list[int] = json.loads(study.read_text()) if study.exists() and "--resume" in sys.argv else []
say("inspected", words="49 parameters")
point("inspecting")
say(
    "search_started",
    study="s-1",
    num_configurations=100,
    num_trials=script.get("trials", 3),
    limit_bytes=2**30,
    resumed=[trial(n) for n in done],
)
for number in range(len(done), script.get("trials", 3)):
    if asked:
        break
    say("trial_started", number=number, round=None, settings="batch 8")
    if number == 0 and "reference" in script and "--resume" not in sys.argv:
        say("trial_ended", **{**trial(0), "outcome": script["reference"], "fits": False, "is_best": False})
        end(2, error="the job as it stands did not end", kind="TaskError")
    point("reference" if number == 0 else "trial")
    time.sleep(script.get("seconds", 0.05 if script.get("holds_at") == "cancelling" else 0.01))
    with open(study.with_name("proof"), "a") as proof:
        proof.write(f"{number}\n")
    done.append(number)
    study.write_text(json.dumps(done))
    if number == 1:
        point("storing")
    if script.get("dies_at") == number and not study.with_name("died").exists():
        study.with_name("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    say("trial_ended", **trial(number))
    if number == 0:
        say("prediction_started", words="predicting memory")
        point("predicting")
        say("prediction_ended", words="memory predicted")
say("stopped", words="all trials were measured")
point("cancelling" if asked else "finalists")
if asked and not done:
    end(130, error="Interrupted before any usable configuration was measured.")
code = 130 if asked else script.get("exit_code", 0)
if code in (0, 130):
    if script.get("holds_at") == "writing":
        Path(options["output"]).write_text("schema: auto")
        point("writing")
    Path(options["output"]).write_text("schema: autotune/plan@1\nsettings: {}\n")
    print(f"next  autotune show {options['output']}", file=sys.stderr, flush=True)
    point("ending")
end(code, **({} if code in (0, 130) else {"error": "nothing fits"}))
