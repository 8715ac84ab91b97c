"""Does ``autotune.fit`` fit where its peers miss, and is its choice slower than theirs?

    python -m benchmarks.fit_peers --keep

Budgets lie below the measured peak of the stock step: less 25, 50 and 75 % of what recomputing every block saves, as
measured. Peers:

- every k-th block recomputed: of all k the one with the least counted work that is *measured* to fit, which nobody
  knows before.
- torch's ``activation_memory_budget`` under ``torch.compile``: the largest of three values that is measured to fit. The
  backend is ``aot_eager``, whose partitioner obeys it; inductor has the same one, and had not compiled GPT-2's first
  step within 200 s of a busy machine. Compiling takes memory: in its favour, what counts is the peak of later steps,
  less what an empty process takes more once it has compiled a step. The process's own stands beside it.
- ckptplan 0.1.0rc1 (PyPI), where it is there: it plans on CUDA alone. Beside what it says here stands what it chooses
  from bytes counted for it, of the tensors that each block saves, for a budget less by what the stock step takes too
  much.

A process each trains for five steps. ``fit`` chooses in another one. Peaks are VmHWM. Steps of all take turns: ratios
by round, with their spread. Work is counted by torch's ``FlopCounterMode``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import autotune
from autotune.errors import NothingFits
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.processes import count_anew, kib_fields, own_peak_bytes
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing, find_blocks
from autotune.units import MIB, size

from .estimate import task_of
from .fit import MODELS
from .rows import save_rows
from .steps import ratios_of, take_turns

Row = dict[str, Any]
_DEFAULT = ("bert", "gpt2", "vit", "convnext", "qwen3", "swin")
_SAVES, _MOST_SAMPLES = 200 * MIB, 64
"""What recomputing every block is traced to save at least, for the smallest power of two of samples that is taken: from
run to run a peak differs by some 30 MiB."""
_SHARES = (0.25, 0.5, 0.75)
"""Of what recomputing every block saves."""
_PARTS = (0.5, 0.25, 0.0)
"""Values of ``activation_memory_budget``."""
_MOST_KS = 4
_FIRST, _LATER = 3, 2
"""Steps before which a process has yet to grow, and those after."""
_SLOWER = 1.02
_SETTINGS: dict[str, Row] = {
    "stock": {},
    **{f"every {k}": {"checkpointing": {"kind": "blocks", **({"every": k} if k > 1 else {})}} for k in range(1, 64)},
}
"""Of trainings that are started by themselves."""


class Child:
    """A process of its own that trains, or chooses; asked in turns."""

    def __init__(self, case: Row) -> None:
        command = [sys.executable, "-m", "benchmarks.fit_peers", "--child", json.dumps(case)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._answer()
        """What it said once it was there."""

    def ask(self, what: str) -> Any:
        """Seconds of a ``step``, or its ``flops``."""
        assert self._process.stdin is not None, "it is a pipe"
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["found"]
        raise RuntimeError(f"{self._process.args}: ended with {self._process.wait()}")


def main() -> None:
    """Print a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help=f"default: {', '.join(_DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=5, help="of a step of each")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/fit-peers-cpu.jsonl")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _serve(**json.loads(arguments.child))
        return
    for name in arguments.model or _DEFAULT:
        for row in _rows(name, arguments.rounds, arguments.backend):
            print(_told(row), flush=True)
            if arguments.keep:
                save_rows("fit-peers", "cpu", [row])


def _num_samples(task: Task) -> int:
    """Of the batch."""
    stock, every = (
        fit_memory_model(Plan.model_validate({"settings": _SETTINGS[key], "budget": {"device": "cpu"}}), task)
        for key in ("stock", "every 1")
    )
    num_samples = 2
    while num_samples < _MOST_SAMPLES and stock.peak_bytes(num_samples) - every.peak_bytes(num_samples) < _SAVES:
        num_samples *= 2
    return num_samples


class Tried:
    """What was started of a model's trainings, by name: ``stock``, ``every 2``, ``compiled 0.5``, or of what was chosen
    the settings' own words. Those that no row needs are ended, for the memory's sake."""

    def __init__(self, case: Row, compiled_adds: int) -> None:
        self._case, self._compiled_adds = case, compiled_adds
        self.alive: dict[str, Child] = {}
        self.peaks: dict[str, int] = {}
        """From a process's start."""
        self.charged: dict[str, int] = {}
        """What is held against a budget."""
        self.flops: dict[str, int] = {}

    def start(self, key: str, case: Row) -> int:
        """What a training is charged; it lives on."""
        if key not in self.charged:
            child = self.alive[key] = Child(self._case | case)
            print(f"{self._case['name']}, {key}: {child.first}", file=sys.stderr, flush=True)
            is_compiled = case["kind"] == "compiled"
            self.peaks[key] = child.first["peak_bytes"]
            self.charged[key] = child.first["later_bytes"] - self._compiled_adds if is_compiled else self.peaks[key]
            if not is_compiled:
                self.flops[key] = child.ask("flops")
        return self.charged[key]

    def first_that_fit(self, cases: Mapping[str, Row], budgets: Sequence[int]) -> list[str | None]:
        """For each budget the first that fits; what is none's is ended."""
        found: list[str | None] = [None] * len(budgets)
        for key, case in cases.items():
            if None not in found:
                break
            charged = self.start(key, case)
            found = [one or (key if charged <= budget else None) for one, budget in zip(found, budgets, strict=True)]
            if key not in found:
                self.alive.pop(key).end()
        return found

    def settings(self, settings: Row | None) -> str | None:
        """The name of a training with settings that were chosen, which is started."""
        if settings is None:
            return None
        key = next((key for key in self.charged if _SETTINGS.get(key) == settings), json.dumps(settings))
        if key in self.charged and key not in self.alive:
            del self.charged[key]
        self.start(key, {"kind": "settings", "settings": settings})
        return key


def _rows(name: str, rounds: int, backend: str) -> Iterator[Row]:
    task = task_of(name)
    case = {"name": name, "num_samples": _num_samples(task)}
    num_blocks = len(find_blocks(task.build_model()))
    empty, compiled_empty = (_alone({**case, "kind": "empty", "backend": one}) for one in (None, backend))
    tried = Tried(case, compiled_empty - empty)
    every = {f"every {k}": _of_settings(_SETTINGS[f"every {k}"]) for k in reversed(_ks(num_blocks))}
    stock = tried.start("stock", _of_settings({}))
    saved = stock - tried.start("every 1", every["every 1"])
    budgets = [round(stock - share * saved) for share in _SHARES]
    compiled = {f"compiled {part}": {"kind": "compiled", "part": part, "backend": backend} for part in _PARTS}
    best_every, best_compiled = tried.first_that_fit(every, budgets), tried.first_that_fit(compiled, budgets)
    planned = _alone({**case, "kind": "ckptplan", "over": [stock - budget for budget in budgets]})
    rows = []
    for number, (share, budget) in enumerate(zip(_SHARES, budgets, strict=True)):
        chosen = _alone({**case, "kind": "fit", "budget": budget})
        found = {
            "fit": chosen | {"is": tried.settings(chosen["settings"])},
            "every": {"is": best_every[number]},
            "compiled": {"is": best_compiled[number], "backend": backend},
            "ckptplan": planned[number] | {"is": tried.settings(planned[number]["settings"])},
        }
        known = {"model": name, "batch": case["num_samples"], "num_blocks": num_blocks, "share": share}
        charged = {"budget_bytes": budget, "empty_bytes": empty, "empty_compiled_bytes": compiled_empty}
        rows.append(known | charged | found)
    seconds = take_turns({key: _asking(child) for key, child in tried.alive.items()}, rounds, lambda: _clock[0])
    for child in tried.alive.values():
        child.end()
    for row in rows:
        row |= {
            "charged": tried.charged,
            "compiled_peaks": {key: tried.peaks[key] for key in compiled.keys() & tried.peaks},
        }
        for key in ("fit", "every", "compiled", "ckptplan"):
            if (own := row[key]["is"]) is not None:
                row[key] |= _measured(own, tried, seconds, row["budget_bytes"], row["fit"]["is"])
        yield row


def _measured(own: str, tried: Tried, seconds: Mapping[str, list[float]], budget: int, of_fit: str | None) -> Row:
    ratios = ratios_of(seconds[own], seconds["stock"])
    found = {
        "charged_bytes": tried.charged[own],
        "fits": tried.charged[own] <= budget,
        "work": tried.flops[own] / tried.flops["stock"] if own in tried.flops else None,
        "time_ratio": statistics.median(ratios),
        "time_spread": [min(ratios), max(ratios)],
    }
    if of_fit is not None and own != of_fit:
        beside = ratios_of(seconds[of_fit], seconds[own])
        found["fit_over_this"] = [min(beside), statistics.median(beside), max(beside)]
    return found


def _of_settings(settings: Row) -> Row:
    return {"kind": "settings", "settings": settings}


_clock = [0.0]
"""Seconds that children said their steps took, all together."""


def _asking(child: Child) -> Callable[[], None]:
    """A step in it, as what takes turns here."""

    def step() -> None:
        _clock[0] += child.ask("step")

    return step


def _alone(case: Row) -> Any:
    """What a child said, once it has ended."""
    child = Child(case)
    child.end()
    return child.first


def _ks(num_blocks: int) -> list[int]:
    """Of those that recompute as many blocks the first."""
    counts = {len(range(0, num_blocks, k)): k for k in range(num_blocks, 0, -1)}
    return sorted(counts.values())[:_MOST_KS]


def _serve(kind: str, name: str, num_samples: int, **options: Any) -> None:
    """A child's whole life."""
    if kind == "empty":
        _say(_empty(options["backend"]))
        return
    task = task_of(name)
    torch.manual_seed(0)
    model, dataset = task.build_model(), task.build_dataset()
    batch = (task.collate or default_collate)([dataset[number % len(dataset)] for number in range(num_samples)])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if kind == "fit":
        _say(_chosen(model, batch, task, optimizer, options["budget"]))
        return
    if kind == "ckptplan":
        _say(_planned(model, lambda: task.compute_loss(model, batch), options["over"]))
        return
    context: Callable[[], Any] = nullcontext
    run = model
    if kind == "settings":
        plan = Plan.model_validate({"settings": options["settings"], "budget": {"device": "cpu"}})
        autotune.apply_to_model(plan, model, run=lambda own: task.compute_loss(own, batch))
        optimizer = autotune.apply_to_optimizer(plan, optimizer)
        context = lambda: plan.settings.forward_context("cpu")  # noqa: E731
    else:
        run = _compiled(model, options["part"], options["backend"])

    def step() -> None:
        optimizer.zero_grad()
        with context():
            loss = task.compute_loss(run, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(_FIRST):
        step()
    count_anew()
    for _ in range(_LATER):
        step()
    _say({"peak_bytes": own_peak_bytes(), "later_bytes": kib_fields(Path("/proc/self/status"))["VmHWM"]})
    for line in sys.stdin:
        if line.strip() == "flops":
            with FlopCounterMode(display=False) as counter:
                step()
            _say(counter.get_total_flops())
        else:
            began_s = time.perf_counter()
            step()
            _say(time.perf_counter() - began_s)


def _say(found: Any) -> None:
    print(json.dumps({"found": found}), flush=True)


def _compiled(model: nn.Module, part: float, backend: str) -> nn.Module:
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = part
    compiled: Any = torch.compile(model, backend=backend)
    return compiled  # type: ignore[no-any-return]


def _empty(backend: str | None) -> int:
    """What a process takes that has trained next to nothing."""
    model = nn.Linear(4, 4)
    run = model if backend is None else _compiled(model, 0.5, backend)
    optimizer = torch.optim.AdamW(model.parameters())
    run(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return own_peak_bytes()


def _chosen(model: nn.Module, batch: Any, task: Task, optimizer: Any, budget: int) -> Row:
    began_s = time.perf_counter()
    try:
        fitted = autotune.fit(model, batch, budget, loss=task.compute_loss, optimizer=optimizer, dry_run=True)
    except NothingFits as error:
        return {"settings": None, "refused": str(error)}
    return {
        "settings": fitted.settings.model_dump(mode="json", exclude_defaults=True),
        "predicted_bytes": fitted.peak.value,
        "high_bytes": fitted.peak.high,
        "fit_s": time.perf_counter() - began_s,
    }


def _planned(model: nn.Module, loss: Callable[[], Any], over: Sequence[int]) -> list[Row]:
    """Of ckptplan, for each of several numbers of bytes that the stock step takes too much: what it says, and its
    choice from bytes that are counted for it."""
    try:
        import ckptplan
    except ImportError:
        return [
            {"settings": None, "refused": "not found: pip install --no-deps --pre ckptplan==0.1.0rc1"} for _ in over
        ]
    blocks = find_blocks(model)
    given: list[Any] = []
    saved: list[dict[int, int]] = [{} for _ in blocks]
    own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    inside: list[int] = []
    hooks = [block.register_forward_pre_hook(lambda *_, n=n: inside.append(n)) for n, block in enumerate(blocks)]
    hooks += [block.register_forward_hook(lambda *_: inside.clear()) for block in blocks]
    hooks.append(blocks[0].register_forward_pre_hook(lambda _, *a: given.append(a), with_kwargs=True))

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in own:
            saved[inside[-1]][storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda one: one):
        held = loss()  # storages are not freed, so that no two have one address
    num_bytes = [sum(one.values()) for one in saved]
    del held
    for hook in hooks:
        hook.remove()
    arguments, keywords = given[0]
    try:
        declared = ckptplan.declare_blocks(model, [(str(n), block) for n, block in enumerate(blocks)])
        profiles = ckptplan.profile_blocks(declared, arguments, keywords, device="cpu", num_warmup=1, num_trials=2)
    except Exception as error:  # noqa: BLE001 - whatever it raises is its result
        return [{"settings": None, "refused": _first_line(error), "at": "profile"} for _ in over]
    counted = [
        dataclasses.replace(one, timing_only=False, activation_bytes_estimate=number)
        for one, number in zip(profiles, num_bytes, strict=True)
    ]
    found = []
    for bytes_over in over:
        target = {"target_kind": "activation_budget_bytes", "target_value": sum(num_bytes) - bytes_over}
        row: Row = {"settings": None}
        try:
            ckptplan.plan_checkpoints(profiles, declared, **target)
        except Exception as error:  # noqa: BLE001 - as above
            row |= {"refused": _first_line(error), "at": "plan"}
        try:
            plan = ckptplan.plan_checkpoints(counted, declared, **target)
            chosen = tuple(n for n, one in enumerate(plan.decisions) if one.checkpointed)
            settings = Settings(checkpointing=Checkpointing.of(chosen, len(blocks)))
            row["settings"] = settings.model_dump(mode="json", exclude_defaults=True)
        except Exception as error:  # noqa: BLE001 - as above
            row["refused_counted"] = _first_line(error)
        found.append(row)
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _told(row: Row) -> str:
    empty, stock = row["empty_bytes"], row["charged"]["stock"]
    lines = [
        f"{row['model']}, {row['batch']} samples, {row['num_blocks']} blocks; above an empty process: "
        f"budget {size(row['budget_bytes'] - empty)}, stock {size(stock - empty)}"
    ]
    for key in ("fit", "every", "compiled", "ckptplan"):
        one = row[key]
        said = one.get("refused_counted") or one.get("refused") or "none fits"
        if one.get("is") is None:
            lines.append(f"{key:10}{said}")
            continue
        work = "" if one["work"] is None else f", work {one['work']:.3f}"
        low, high = one["time_spread"]
        beside = ""
        if "fit_over_this" in one:
            least, middle, most = one["fit_over_this"]
            word = (
                "slower" if least > _SLOWER else "faster" if most < 1 else "as fast" if middle <= _SLOWER else "unsure"
            )
            beside = f"; fit over it {middle:.2f} ({least:.2f} to {most:.2f}): {word}"
        lines.append(
            f"{key:10}{one['is']}: {size(one['charged_bytes'] - empty)}, {'fits' if one['fits'] else 'OVER'}{work}, "
            f"time {one['time_ratio']:.2f} ({low:.2f} to {high:.2f}){beside}"
        )
    return "\n    ".join(lines)


if __name__ == "__main__":
    main()
