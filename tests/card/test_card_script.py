"""What is measured of a script on a card is what a job of it does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import Card
from told import GIB

from autotune.device_memory import cap
from autotune.measure import InspectOptions, MeasureOptions
from autotune.measure.timing.loading import LoaderRates
from autotune.plan import Budget, Plan
from autotune.script.plan.applied import InScript
from autotune.script.plan.hooks import ScriptHooks
from autotune.script.plan.job import ScriptJob
from autotune.script.trial.look import Look
from autotune.script.trial.timing import ScriptTiming
from autotune.script.trial.trial import ScriptTrial
from autotune.techniques import Settings
from autotune.training.apply_pieces import hold_to_budget
from autotune.units import MIB
from autotune.workers import Inspected, InspectRequest, Measured, MeasureRequest
from autotune.workers.trial.folder import TrialFolder

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def collate(samples):
    card.host(host_s)
    return torch.stack([x for x, in samples])

model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
loader = DataLoader(TensorDataset(torch.ones(4 * num_batches, 4)), batch_size=4, collate_fn=collate, pin_memory=True)
for epoch in range(num_epochs):
    model.train()
    for batch in loader:
        loss = model(batch.cuda(non_blocking=True)).pow(2).mean()
        card.work(device_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if evaluates:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(4, 4, device="cuda"))
                card.work(1.0)
torch.cuda.synchronize()
"""
"""A step takes ``host_s`` to load, and ``device_s`` on the card."""


@pytest.fixture
def run(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the script here; watched, until there is an outcome, where an observer is given."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(path)])

    def run(observe: Callable[..., Any] | None = None, plan: Plan | None = None, **names: Any) -> Any:
        given = {"num_batches": 16, "num_epochs": 10**6, "evaluates": False, "lr": 0.01, **names, "card": card}
        if observe is None and plan is None:
            return runpy.run_path(str(path), given, "__main__")
        found: list[Any] = []

        def answer(outcome: Any) -> Any:
            found.append(outcome)
            raise SystemExit(0)

        in_script = InScript(plan or Plan(settings=Settings()), Path("plan.yaml"))
        hooks = ScriptHooks(in_script)
        hooks.observer = observe(in_script, answer) if observe is not None else None
        hooks.install()
        try:
            if observe is None:
                return runpy.run_path(str(path), given, "__main__")
            with pytest.raises(SystemExit):
                runpy.run_path(str(path), given, "__main__")
        finally:
            hooks.remove()
        return found[0]

    return run


def _timing(card: Card) -> Callable[..., Any]:
    options = MeasureOptions(trial_time_s=20, precision=0.01, parity_batch=None)
    request = MeasureRequest(id="x", task="train.py", device="cuda", plan=Plan(settings=Settings()), options=options)
    return lambda in_script, answer: ScriptTiming(request, card.now_s, answer, lambda said: None)


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "evaluates"), [(20, 100, False), (20, 100, True), (60, 30, False), (60, 30, True)], ids=str
)
def test_a_script_is_as_fast_as_without_being_measured(
    card: Card, run: Callable[..., Any], host_ms: int, device_ms: int, evaluates: bool
) -> None:
    """Evaluations are left out: 3 s on the card after every 16 steps. Of those, the first waits for its batch, and
    the last for the card."""
    times = {"host_s": host_ms / 1000, "device_s": device_ms / 1000}
    found = run(_timing(card), **times, evaluates=evaluates)
    assert isinstance(found, Measured), found
    began_s = card.now_s
    run(**times, num_batches=64, num_epochs=1)
    truth = 4 * 64 / (card.now_s - began_s)
    assert truth == pytest.approx(4000 / max(host_ms, device_ms), rel=0.02)
    alone_s = min(host_ms, device_ms) / 1000 if evaluates else 0.0
    assert found.measurement.samples_per_s.value == pytest.approx(4 * 16 / (4 * 16 / truth + alone_s), rel=0.01)


def test_a_script_s_losses_are_seen_with_the_windows(card: Card, run: Callable[..., Any]) -> None:
    """The first that is infinite or NaN ends it, with the step that it is of: weights of 1e30, squared, are too
    large."""
    found = run(_timing(card), host_s=0.0, device_s=0.1, lr=1e30)
    assert (found.kind, found.step) == ("non_finite", 2)


def test_the_rate_of_a_script_s_first_steps_is_the_card_s(
    card: Card, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has queued them in no time."""
    monkeypatch.setattr("autotune.script.trial.look.loader_rates", lambda *_: LoaderRates())
    request = InspectRequest(id="x", task="train.py", device="cuda", options=InspectOptions())
    found = run(lambda in_script, answer: Look(request, in_script, 1, answer, None, None), host_s=0.0, device_s=0.1)
    assert isinstance(found, Inspected), found
    assert found.facts.step_samples_per_s == pytest.approx(40, rel=0.02)


@pytest.fixture
def arrived(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[MeasureRequest], None]]:
    """A trial whose script has just imported torch."""
    monkeypatch.setattr("autotune.script.trial.trial.work_in", lambda *_, **__: None)
    trials: list[ScriptTrial] = []

    def arrive(request: MeasureRequest) -> None:
        folder = TrialFolder(tmp_path / "trial")
        folder.make()
        folder.write_request(request)
        trials.append(ScriptTrial(tmp_path / "trial"))
        trials[0].arrive()

    yield arrive
    for trial in trials:
        if trial._hooks is not None:
            trial._hooks.remove()


def test_what_a_script_sets_before_it_uses_the_card_is_in_force(card: Card, arrived: Callable[..., None]) -> None:
    """As in the job: ``PYTORCH_ALLOC_CONF`` and ``CUDA_VISIBLE_DEVICES`` are read as CUDA is opened, which importing
    torch does not do. From then on the trial is held to its budget."""
    plan = Plan(settings=Settings(), budget=Budget(limit=8 * GIB, device="cuda"))
    options = MeasureOptions(parity_batch=None)
    arrived(MeasureRequest(id="x", task="train.py", device="cuda", plan=plan, options=options, command=("python",)))
    assert not card.is_open
    torch.zeros(1, device="cuda")
    assert card.is_open
    assert card.fraction == (int(8 * GIB / 1.03) // MIB * MIB - card.context_bytes) / card.total_bytes


@pytest.mark.parametrize("enforce", ["0", "1"])
def test_a_script_s_job_is_held_to_its_plan_s_budget(
    card: Card, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, enforce: str
) -> None:
    """From the first call of its model, and with the context that a step has come to. A script's step cannot be made
    again: the margin of 3 % stays its own, unless the budget is to be kept as in trials."""
    monkeypatch.setenv("AUTOTUNE_ENFORCE", enforce)
    plan = Plan(settings=Settings(), budget=Budget(limit=8 * GIB, device="cuda"))
    run(plan=plan, num_epochs=1, host_s=0.0, device_s=0.0)
    grown = card.own_bytes - card._allocator.reserved_bytes
    assert grown > card.context_bytes
    most = 8 * GIB if enforce == "0" else int(8 * GIB / 1.03) // MIB * MIB
    assert card.fraction == (most - grown) / card.total_bytes
    assert cap.may_stand_aside() == (enforce == "0")


@pytest.mark.parametrize(("limit", "tells"), [(8 * GIB, True), (None, False)])
def test_a_script_s_job_that_runs_out_of_memory_is_told_of_its_budget(
    card: Card, tmp_path: Path, capfd: pytest.CaptureFixture[str], limit: int | None, tells: bool
) -> None:
    path = tmp_path / "plan.yaml"
    Plan(settings=Settings(), budget=Budget(limit=limit, device="cuda")).save(path)
    job = ScriptJob(path)
    job.arrive()
    try:
        hold_to_budget(job._plan.plan, repeats=False)
        torch.zeros(1, device="cuda")
        job.ended(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    finally:
        assert job._hooks is not None
        job._hooks.remove()
    assert ("memory ran out where the job was held to its plan's budget" in capfd.readouterr().err) == tells
