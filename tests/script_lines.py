"""Runs a script in this process, under the launcher's hooks: with a plan, or looked at as a search does first."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from autotune.estimates import CheapestOptions
from autotune.measure import InspectOptions
from autotune.plan import Plan
from autotune.script.plan.applied import InScript
from autotune.script.plan.hooks import ScriptHooks
from autotune.script.refusal import Refused
from autotune.script.trial.choosing import Choosing
from autotune.script.trial.look import Look
from autotune.techniques import Settings
from autotune.workers import Failed, InspectRequest
from autotune.workers.request import PredictRequest

TWICE = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
"""
"""Lines of a script: an operation that no recorder of a pass sees."""


def run_here(path, monkeypatch, *arguments, observe=None, plan=None, task=None, **settings):
    """What the script defined."""
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    in_script = InScript(plan or Plan(settings=Settings(**settings), task=task), Path("plan.yaml"))
    hooks = ScriptHooks(in_script)
    hooks.observer = observe and observe(in_script)
    hooks.install()
    try:
        return runpy.run_path(str(path), run_name="__main__")
    finally:
        hooks.remove()


def look_here(path, monkeypatch, **options):
    """The script's facts, or why it is refused."""
    found, looks = [], []

    def answer(outcome):
        found.append(outcome)
        raise SystemExit(0)

    def observe(in_script):
        request = InspectRequest(id="x", task="script.py", device="cpu", options=InspectOptions(**options))
        looks.append(Look(request, in_script, 1, answer))
        return looks[0]

    try:
        run_here(path, monkeypatch, observe=observe)
    except Refused as refused:
        return refused.reason
    except SystemExit:
        pass
    except Exception:
        if (held := looks[0].finish()) is None:
            raise
        return held.facts
    return found[0].facts if found else looks[0].finish().facts


def choose_here(path, monkeypatch, limit_bytes=2**40):
    """What fits the script and what is noted of it, or why nothing can be said."""
    monkeypatch.setattr(sys, "argv", [str(path)])
    found = []

    def answer(outcome):
        found.append(outcome)
        raise SystemExit(0)

    in_script = InScript(Plan(settings=Settings()), Path("plan.yaml"))
    hooks = ScriptHooks(in_script)
    options = CheapestOptions(
        limit_bytes=limit_bytes, combinations=(Settings(),), choices=(Settings(checkpointing={"kind": "blocks"}),)
    )
    request = PredictRequest(id="x", task="script.py", device="cpu", options=options)
    hooks.observer = Choosing(request, in_script, answer, hooks.remove)
    hooks.install()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Refused as refused:
        return refused.reason
    except SystemExit:
        pass
    finally:
        hooks.remove()
    return found[0].message if isinstance(found[0], Failed) else found[0]
