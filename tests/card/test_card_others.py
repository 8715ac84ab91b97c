"""A card that others use: waited for, named, and held against no configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stand_in import Card
from told import GIB, Process

from autotune.errors import TrialsLost
from autotune.measure import MeasureOptions, others
from autotune.measure.measurement import TurnOptions
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers import Lost, MeasureRequest, OutOfMemory
from autotune.workers._base import result_of
from autotune.workers.outcome import Outcome
from autotune.workers.pool import done
from autotune.workers.trial import child
from autotune.workers.trial.folder import TrialFolder

BUDGET = Budget(limit=8 * GIB, device="cuda")
TASK = """
import torch
from torch.utils.data import TensorDataset
build_model = lambda: torch.nn.Linear(4, 1)
build_dataset = lambda: TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
batch_size = 8
def compute_loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
REFUSED = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 40.00 GiB"


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "_began_with", None)


def trial(tmp_path: Path, enforce: bool = True, turns: bool = False) -> Outcome:
    """What a trial's process answers."""
    task = tmp_path / "model.py"
    task.write_text(TASK)
    folder = TrialFolder(tmp_path / "trial")
    folder.make()
    options = MeasureOptions(
        parity_batch=None, enforce=enforce, turns=TurnOptions(folder=str(tmp_path)) if turns else None
    )
    plan = Plan(settings=Settings(), budget=BUDGET)
    asked = MeasureRequest(id="1", task=str(task), device="cuda", plan=plan, options=options)
    return child._answer(lambda: child._run(asked, folder, 0.0), asked.device)


def fails_while(card: Card, change: Callable[[], None], text: str = REFUSED) -> None:
    """Memory runs out at the next matrix product; meanwhile something happens."""

    class Refused(torch.OutOfMemoryError):
        def __str__(self) -> str:
            change()
            return text

    card.fails["matmul"] = Refused(text)


def test_a_card_whose_memory_others_hold_is_lost_and_they_are_named(card: Card, tmp_path: Path) -> None:
    """40 GiB, 33 of them held: 7 are no 8, less 3 %."""
    card.processes = (Process(1, 33 * GIB), Process(2, 100 * MIB, is_graphics=True))
    began_s = card.now_s
    outcome = trial(tmp_path)
    assert isinstance(outcome, Lost)
    assert "(pid 1) 33 GiB, " in outcome.message
    assert "of a budget of 8 GiB it can have 6.9 GiB" in outcome.message
    assert card.now_s - began_s == pytest.approx(others._PATIENCE_S, abs=1.0)
    with pytest.raises(TrialsLost) as raised:
        result_of(done(outcome))
    assert raised.value.exit_code == 2


def test_who_holds_it_may_be_unknown(card: Card, tmp_path: Path) -> None:
    """In a container."""
    card.processes, card.pids_hidden = (Process(1, 33 * GIB),), True
    outcome = trial(tmp_path)
    assert isinstance(outcome, Lost)
    assert "The driver does not show who." in outcome.message


@pytest.mark.parametrize("hidden", [{}, {"pids_hidden": True}, {"has_nvml": False}])
def test_memory_that_comes_back_is_waited_for(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: dict[str, bool]
) -> None:
    """As that of a trial that has just been ended."""
    vars(card).update(hidden)
    card.processes = (Process(1, 39 * GIB),)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            card.processes = ()

    monkeypatch.setattr(others.time, "sleep", sleep)
    others.wait_for_room(BUDGET)
    assert len(waited) == 3


@pytest.mark.parametrize("enforce", [True, False])
def test_a_card_that_is_full_to_the_last_is_lost(card: Card, tmp_path: Path, enforce: bool) -> None:
    """Not even a context can be opened."""
    card.processes = (Process(1, 40 * GIB - 10 * MIB),)
    outcome = trial(tmp_path, enforce)
    assert isinstance(outcome, Lost)
    assert "not even CUDA's context fits. On the device: " in outcome.message
    assert "(pid 1) 39.99 GiB" in outcome.message


def test_a_card_that_has_room_beside_others_is_taken_at_once(card: Card) -> None:
    card.processes, began_s = (Process(1, 32 * GIB),), card.now_s
    others.wait_for_room(BUDGET)
    assert card.now_s - began_s < 0.1


def test_a_budget_that_is_all_of_a_card_with_a_display_is_not_waited_for(card: Card) -> None:
    card.processes, began_s = (Process(1, 300 * MIB, is_graphics=True),), card.now_s
    others.wait_for_room(Budget(limit=40 * GIB, device="cuda"))
    assert card.now_s - began_s < 0.1


def test_two_that_take_turns_hold_memory_beside_each_other(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.processes = (Process(1, 33 * GIB),)
    monkeypatch.setattr(child, "_measure", lambda *_: "measured")
    assert trial(tmp_path, turns=True) == "measured"


@pytest.mark.parametrize("hidden", [False, True])
def test_what_others_take_in_mid_trial_is_their_doing(card: Card, tmp_path: Path, hidden: bool) -> None:
    """39.5 of 40 GiB: of 2 GiB that were asked for, within the cap, 1 GiB and more was short."""
    card.pids_hidden = hidden
    taken = Process(7, 39 * GIB)
    fails_while(card, lambda: setattr(card, "processes", (taken,)))
    outcome = trial(tmp_path)
    assert isinstance(outcome, Lost)
    assert "the device was short by 1" in outcome.message
    assert ("(pid 7) 39 GiB" in outcome.message) is not hidden


def test_a_library_that_found_no_memory_is_alike(card: Card, tmp_path: Path) -> None:
    text = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    fails_while(card, lambda: setattr(card, "processes", (Process(7, 39 * GIB + 600 * MIB),)), text)
    assert isinstance(trial(tmp_path), Lost)


def test_what_the_cap_refuses_is_the_configurations_doing(card: Card, tmp_path: Path) -> None:
    """10 GiB within a budget of 8, whatever others have come to hold."""
    text = REFUSED.replace("2.00", "10.00")
    fails_while(card, lambda: setattr(card, "processes", (Process(7, 39 * GIB),)), text)
    assert isinstance(trial(tmp_path), OutOfMemory)


def test_others_that_were_there_before_have_no_part_in_what_the_cap_refuses(card: Card, tmp_path: Path) -> None:
    """Memory runs out in a library, which does not say how much it asked for."""
    card.processes = (Process(7, 31 * GIB + 700 * MIB),)
    fails_while(card, lambda: None, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert isinstance(trial(tmp_path), OutOfMemory)


def test_a_reference_that_would_fit_without_others_is_not_too_large(card: Card, tmp_path: Path) -> None:
    """It may take all of the card, of which they held 39 GiB all the time."""
    card.processes = (Process(7, 39 * GIB),)
    fails_while(card, lambda: None)
    outcome = trial(tmp_path, enforce=False)
    assert isinstance(outcome, Lost)
    assert "(pid 7) 39 GiB" in outcome.message


@pytest.mark.parametrize("beside", [Process(7, 2 * GIB, is_graphics=True), Process(7, 300 * MIB), Process(7, 30 * GIB)])
def test_a_reference_that_does_not_fit_beside_a_desktop_or_without_others_is_too_large(
    card: Card, tmp_path: Path, beside: Process
) -> None:
    """A display stays, a little is none of the reasons, and 50 GiB do not fit the card."""
    card.processes = (beside,)
    fails_while(card, lambda: None, REFUSED.replace("2.00", "50.00"))
    assert isinstance(trial(tmp_path, enforce=False), OutOfMemory)
