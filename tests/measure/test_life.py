"""The phases of a job's life: what piles up in an evaluation and what it comes to, an epoch's last batch, saving."""

from __future__ import annotations

import pytest
import torch
from fresh_process import in_fresh_process
from line_task import floats, line, training_of
from search_tables import measurement
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.measure.evaluation import EvaluationRecord, measure_evaluations
from autotune.measure.life.growth import Law, Pile, Witness, law
from autotune.measure.life.other_phases import last_batch_size, measure_saving, state_bytes
from autotune.measure.measurement import Evaluated, EvaluationOptions, Growth, LifeOptions, MeasureOptions
from autotune.measure.memory import Charge
from autotune.measure.run import measure
from autotune.plan import Budget, Peak, PhasePeak, Plan
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.words import growth_words
from autotune.workers import Measured

MIB = 2**20


class Memory:
    """Bytes in use, and the most that were."""

    def __init__(self) -> None:
        self.live = self.high = 100 * MIB

    def take(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.high = max(self.high, self.live)


def pile_of(memory: Memory) -> Pile:
    return Pile(Witness(lambda: memory.live, smallest=4096, fewest=4), lambda: memory.high)


def test_what_piles_up_is_extended_to_all_batches():
    """1 MiB for each of 10 batches of 300, on 100 MiB: 109 MiB once the tenth begins, and 290 more. The end is known to
    8 MiB in 10, which is 240 in 300."""
    memory = Memory()
    pile = pile_of(memory)
    for _ in range(10):
        pile.add()
        memory.take(MIB)
    found = pile.found(all_batches=300)
    assert found is not None
    assert (found.bytes_per_batch, found.num_batches, found.seen_bytes) == (MIB, 10, 109 * MIB)
    assert found.whole_bytes == 399 * MIB
    assert (found.low_bytes, found.high_bytes) == (399 * MIB, (399 + 240) * MIB)


def test_what_joins_all_of_it_at_the_end_grows_with_it():
    """10 MiB have piled up, and joining them took 11 MiB more, so it takes them once: 300 of all, on 99 MiB, and 300 to
    join them."""
    memory = Memory()
    pile = pile_of(memory)
    for _ in range(10):
        pile.add()
        memory.take(MIB)
    found = pile.found(all_batches=300, at_end=11 * MIB)
    assert found is not None
    assert found.whole_bytes == (399 + 300) * MIB
    assert (found.low_bytes, found.high_bytes) == ((399 + 90) * MIB, (399 + 570) * MIB)


def test_what_is_joined_anew_with_each_batch_is_there_twice():
    """10 MiB in use, and 11 more while the last batch was joined to them: 290 batches add 2 MiB each."""
    memory = Memory()
    pile = pile_of(memory)
    for _ in range(10):
        pile.add()
        memory.take(MIB)
    found = pile.found(all_batches=300, at_end=MIB, usual=11 * MIB)
    assert found is not None
    assert (found.bytes_per_batch, found.whole_bytes) == (2 * MIB, (109 + 580) * MIB)


def test_an_allocator_that_warms_up_is_no_growth():
    """30 MiB in the first two batches, 6 in the next two, and no more."""
    warming = [0, 20, 30, 33, 36, *[36] * 12]
    assert law([(n, (100 + mib) * MIB) for n, mib in enumerate(warming)], smallest=4096, fewest=4) is None


def test_a_cache_that_fills_slower_and_slower_is_no_growth():
    filling = [(n, round((100 + 50 * (1 - 0.7**n)) * MIB)) for n in range(20)]
    assert law(filling, smallest=4096, fewest=4) is None


def test_noise_is_no_growth_and_widens_the_interval_of_what_is():
    noise = [0, 3, -2, 1, 4, -3, 2, 0, -1, 3, 1, -2]
    still = [(n, 100 * MIB + 1000 * one) for n, one in enumerate(noise)]
    assert law(still, smallest=4096, fewest=4) is None
    found = law([(n, value + n * MIB) for n, value in still], smallest=4096, fewest=4)
    assert found is not None
    assert found.low < MIB < found.high
    assert found.high - found.low < 0.01 * MIB


def test_a_straight_line_has_no_width():
    assert law([(n, 7 * MIB + n * 8192) for n in range(10)], smallest=4096, fewest=4) == Law(8192, 8192, 8192)


def test_it_says_after_how_many_batches_memory_runs_out():
    """Of 400 MiB less 3 %, 388 MiB: 109 after 10 batches, and 279 more."""
    growth = Growth(bytes_per_batch=MIB, num_batches=10, all_batches=300, seen_bytes=109 * MIB, whole_bytes=399 * MIB)
    budget = Budget(limit=400 * MIB, margin=0.03)
    assert growth_words(growth, budget) == "after about 289 of 300 batches"
    assert growth_words(growth, Budget(limit=500 * MIB)) == ""


HELD = TensorDataset(torch.ones(256, 8))


def judging(keeps: bool, num_batches: int | None = None):
    """Evaluates 256 batches of one sample, and keeps 256 KiB of each, or not."""

    def evaluate(model: nn.Module) -> float:
        kept = []
        for (inputs,) in DataLoader(HELD, 1):
            model(inputs[0, :1])
            kept.append(torch.zeros(2**16) if keeps else None)
        return float(len(kept))

    return line(floats(4), batch_size=2, evaluate=evaluate)


def each_call_takes_a_second(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvaluationRecord, "seconds", lambda record: float(record.num_calls))


@pytest.fixture
def by_calls(monkeypatch):
    """Each call of the model takes a second."""
    each_call_takes_a_second(monkeypatch)


def evaluated(task: autotune.Task, most_s: float) -> tuple[Evaluated, Charge]:
    training = training_of(task)
    charge = Charge(training.device)
    options = MeasureOptions(parity_batch=None, evaluation=EvaluationOptions(most_s=most_s))
    (found,) = measure_evaluations(training, task, options, charge)
    return found, charge


def evaluated_in_part() -> tuple[Evaluated, PhasePeak]:
    with pytest.MonkeyPatch.context() as patch:
        each_call_takes_a_second(patch)
        found, charge = evaluated(judging(keeps=True), most_s=19.5)
    return found, charge.peak().phases["evaluation"]


def test_a_real_evaluation_is_seen_in_part_and_extended():
    """256 KiB of each of 256 batches: 64 MiB. In its time 5 MiB pile up, too little to tell what becomes of them, so it
    has four times as much."""
    found, row = in_fresh_process(evaluated_in_part)
    assert found.growth is not None
    assert not found.is_whole
    assert (found.growth.all_batches, found.growth.num_batches) == (256, 80)
    assert found.growth.bytes_per_batch == pytest.approx(2**18, rel=0.05)
    grows = (256 - found.growth.num_batches) * 2**18
    assert found.needed_bytes == row.process == pytest.approx(found.growth.seen_bytes + grows, rel=0.05)
    assert (row.low or 0) <= row.process <= (row.high or 0)


def test_a_whole_evaluation_is_what_was_measured(by_calls):
    found, charge = evaluated(judging(keeps=True), most_s=1000.0)
    assert found.is_whole
    assert found.growth is not None
    assert found.growth.whole_bytes is None
    assert charge.peak().phases["evaluation"].low is None


def test_what_keeps_nothing_is_stopped_and_extended_by_nothing(by_calls):
    found, _ = evaluated(judging(keeps=False), most_s=19.5)
    assert (found.growth, found.kept_bytes, found.is_whole) == (None, None, False)


def test_an_evaluation_that_never_ends_is_stopped_and_told(by_calls):
    """Of calls without a loader, nobody knows how many there are."""
    kept = []

    def evaluate(model: nn.Module) -> float:
        while True:
            kept.append(torch.zeros(2**18))
            model(torch.ones(1))

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    asked = EvaluationOptions(most_s=19.5)
    options = MeasureOptions(trial_time_s=0.01, parity_batch=None, evaluation=asked, enforce=False)
    whole = measure(training_of(task), task, options)
    (found,) = whole.evaluations
    assert found.growth is not None
    assert found.growth.all_batches is None
    assert any("how many there are is not known" in said for said in whole.warnings)
    kept.clear()


def test_what_an_evaluation_leaves_behind_is_told_where_the_next_adds_to_it(by_calls):
    """A list that is never cleared: 64 MiB of each evaluation."""
    log = []

    def evaluate(model: nn.Module) -> float:
        for (inputs,) in DataLoader(HELD, 1):
            model(inputs[0, :1])
            log.append(torch.zeros(2**16))
        return 0.0

    found, _ = evaluated(line(floats(4), batch_size=2, evaluate=evaluate), most_s=1000.0)
    assert found.kept_bytes == pytest.approx(64 * MIB, rel=0.05)
    log.clear()
    found, _ = evaluated(judging(keeps=True), most_s=1000.0)
    assert found.kept_bytes is None


@pytest.mark.parametrize(("num_samples", "batch", "last"), [(10, 4, 2), (12, 4, None), (3, 4, None)])
def test_the_last_batch_of_an_epoch_is_smaller_where_samples_are_left(num_samples, batch, last):
    assert last_batch_size(training_of(line(floats(num_samples), batch_size=batch))) == last


def test_a_last_batch_that_is_dropped_is_none():
    task = line(floats(10), batch_size=4, loader_options={"drop_last": True})
    assert last_batch_size(training_of(task)) is None


def test_saving_writes_what_a_job_resumes_from(tmp_path):
    task = line(floats(8), batch_size=4)
    training, charge = training_of(task), Charge(torch.device("cpu"))
    for batch in training.loader:
        training.step(batch)
    measure_saving(training, charge, LifeOptions(most_s=60, state=str(tmp_path / "state.pt")))
    again = training_of(task)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert "saving" in charge.peak().phases
    assert state_bytes(again) == state_bytes(training)


def test_what_is_likely_to_take_too_long_is_not_saved(tmp_path):
    training, charge = training_of(line(floats(8), batch_size=4)), Charge(torch.device("cpu"))
    measure_saving(training, charge, LifeOptions(most_s=1e-9, state=str(tmp_path / "state.pt")))
    assert not (tmp_path / "state.pt").exists()
    assert "saving" not in charge.peak().phases


def bytes_of_a_copy() -> int:
    """That a phase takes more than the one after it, if it copies 64 MiB of weights."""
    charge = Charge(torch.device("cpu"))
    weights = torch.ones(64 * MIB // 4)
    charge.enter("saving")
    copied = weights.clone()
    del copied
    charge.enter(None)
    return charge.peak().phases["saving"].process - charge.phase_bytes()


def test_a_save_that_copies_the_weights_takes_them_once_more():
    assert in_fresh_process(bytes_of_a_copy) == pytest.approx(64 * MIB, rel=0.1)


PHASES = {"training": PhasePeak(process=300 * MIB), "saving": PhasePeak(process=420 * MIB)}


def test_the_largest_phase_is_the_peak_and_binds():
    peak = Peak(process=300 * MIB).with_phases(PHASES)
    assert (peak.process, peak.binds) == (420 * MIB, "saving")


def test_a_budget_that_training_is_within_is_held_against_the_largest_phase():
    peak = Peak(process=300 * MIB).with_phases(PHASES)
    outcome = Measured(measurement=measurement(100.0).model_copy(update={"peak": peak}))
    verdict = judge(outcome, Budget(limit=400 * MIB, margin=0.0), 2**40)
    assert verdict.over_memory
    assert verdict.reason == "over the budget by 20 MiB, margin included, in saving"


def test_a_trial_of_a_task_has_a_row_for_each_phase(tmp_path):
    """On ten samples in batches of four, the last is of two."""
    task = line(floats(10), batch_size=4, evaluate=lambda model: 0.0)
    options = MeasureOptions(
        trial_time_s=0.01, parity_batch=None, evaluation=EvaluationOptions(most_s=1), life=LifeOptions(most_s=60)
    )
    training = autotune.apply(Plan(settings=Settings(), budget=Budget(device="cpu")), task)
    peak = measure(training, task, options).peak
    assert {*peak.phases} >= {"first_step", "training", "evaluation", "saving"}
    assert peak.binds is not None
