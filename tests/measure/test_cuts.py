"""The quality process: which candidates go on, what they come to, and a process that goes on where another died."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from autotune.errors import TaskError
from autotune.measure.checks.scores import judged_by
from autotune.measure.cuts.choose import (
    Layer,
    Standing,
    between,
    cost_of,
    going_on,
    halfway,
    provable,
    ratios_for,
    rise_at,
)
from autotune.measure.cuts.judge import judge
from autotune.measure.cuts.kept import Kept
from autotune.measure.cuts.scan import layers_of
from autotune.measure.cuts.table import lines_of
from autotune.measure.cuts.types import JudgeOptions
from autotune.measure.measurement import Quality, QualityOptions
from autotune.measure.profiling.profile import profile
from autotune.measure.profiling.types import ProfileOptions
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan
from autotune.pruning import groups
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.training.apply_pieces import on_two_samples
from autotune.training.apply_plan import apply

REFERENCE = Settings(batch=Batch(micro=16))
NUM_SAMPLES = 256
ALLOWED = 1 / 80


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def pruned(ratio: float) -> Settings:
    return REFERENCE.having(Pruning(kind="structured", ratio=ratio))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def data() -> TensorDataset:
    """Points of four quadrants."""
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def quality(model: nn.Module) -> float:
    """Share that is right."""
    x, y = data().tensors
    return (model(x).argmax(1) == y).float().mean().item()


def task(**changes: object) -> Task:
    pieces = {
        "build_model": build_model,
        "build_dataset": data,
        "compute_loss": loss,
        "build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "evaluate": quality,
        "batch_size": 16,
    }
    return Task(**{**pieces, **changes})


def options(*candidates: Settings, **changes: object) -> JudgeOptions:
    recovery = QualityOptions(num_samples=NUM_SAMPLES)
    return JudgeOptions(**{"recovery": recovery, "seeds": (0, 1), "candidates": candidates, **changes})


def test_what_is_worth_most_goes_on_with_the_safest():
    """Six after an eighth. The 10x has lost 3 allowed drops: ln 10 / 3 = 0.77; 3.8x 0.5 of one: 1.33; 1.9x 0.2: 0.64;
    1.25x nothing: 0.22; 30x 20: ln 30 / 20 = 0.17; 2x is slower than 3.8x, and loses 1.5: beaten. Three go on."""
    rows = [(0, 10, 3.0), (1, 3.8, 0.5), (2, 1.9, 0.2), (3, 1.25, 0.0), (4, 2.0, 1.5), (5, 30, 20.0)]
    standings = [Standing(number, 1 / speed, lost) for number, speed, lost in rows]
    assert standings[0].worth == pytest.approx(math.log(10) / 3)
    assert going_on(standings, rung=0, most=2) == [0, 1, 3]


def test_no_fewer_go_on_than_may_come_to_the_end():
    standings = [Standing(number, 1 / (2 + number), number / 10) for number in range(4)]
    assert going_on(standings, rung=0, most=3) == [0, 2, 3]  # the fastest three, and the safest in place of the last
    assert going_on(standings, rung=0, most=4) == [0, 1, 2, 3]


def test_what_lies_between_what_is_kept_and_what_is_not_is_worth_a_trial_after_all():
    """2x is kept and 6x is not. Of 8x, 4x, 3x and 1.5x that ended before, 4x and 3x lie between: 4x had lost 3 allowed
    drops, ln 4 / 3 = 0.46, and 3x one and a half: 0.73. Where 2x is not kept either, 1.5x alone does."""
    two, six = Standing(0, 1 / 2, 0.5), Standing(1, 1 / 6, 1.1)
    left = [
        Standing(number, 1 / speed, lost) for number, speed, lost in [(2, 8, 1), (3, 4, 3), (4, 3, 1.5), (5, 1.5, 1)]
    ]
    assert between([two], [six], left) == 4
    assert between([], [two, six], left) == 5
    assert between([two], [six], left[:1]) is None


def test_at_each_rung_less_may_be_lost():
    """After an eighth of the recovery, a handful of steps, anything; after a quarter 10 allowed drops, not 20; after a
    half 3."""
    standings = [Standing(number, 0.5, lost) for number, lost in enumerate((3.0, 5.5, 10.0, 20.0))]
    for rung, able in enumerate(([0, 1, 2, 3], [0, 1, 2], [0])):
        assert [one.number for one in standings if going_on([one], rung, most=3)] == able


def test_all_that_was_asked_for_is_judged_from_every_seed_beside_the_reference():
    """What is cut has its record; the seeds train on other samples."""
    found = judge(task(), Plan(settings=REFERENCE), options(pruned(0.5), seeds=(0, 1, 2)))
    (cut,) = found.cuts
    assert len(cut.qualities) == len(found.reference.qualities) == 3
    assert cut.settings.pruning.record is not None
    assert len({one.value for one in found.reference.qualities}) > 1
    assert found.reference.settings == REFERENCE


@pytest.mark.medium
def test_candidates_are_halved_and_timed_and_a_cut_is_found_once_for_all_that_have_it():
    """Five candidates, of which at most one comes to the end: at the first rung three go on."""
    ranks = REFERENCE.having(LowRank(kind="svd", least_features=8))
    both = pruned(0.5).having(ranks.low_rank)
    asked = options(pruned(0.25), pruned(0.5), both, ranks, pruned(0.9), allowed=0.5, most=1)
    found = judge(task(), Plan(settings=REFERENCE), asked)
    assert all(cut.step for cut in found.cuts)
    assert found.cuts[1].settings.pruning == found.cuts[2].settings.pruning
    assert sum(len(cut.rungs) > 1 for cut in found.cuts) <= 3
    ended = [cut for cut in found.cuts if cut.ended]
    assert len(ended) >= 3
    assert all("of the allowed drop lost after" in cut.ended for cut in ended)
    (kept,) = [cut for cut in found.cuts if not cut.ended][-1:]
    assert len(kept.qualities) == 2


def test_steps_are_compared_on_one_thread_and_the_rest_has_all_of_them():
    """Threads that wait for each other count as the processor's time: by it a perceptron with half of its widths took
    0.2 to 0.9 of the whole one's step on two threads, and 0.42 to 0.44 on one."""
    threads: list[int] = []

    def watched(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return loss(model, batch)

    torch.set_num_threads(2)
    judge(task(compute_loss=watched), Plan(settings=REFERENCE), options(pruned(0.5), allowed=1.0))
    timed = 2 * 6
    assert threads[:timed] == [1] * timed
    assert {*threads[timed:]} == {2}


def test_a_candidate_that_cannot_be_had_ends_alone():
    """One of a module that is not there; the other is judged."""
    wrong = REFERENCE.having(Pruning(kind="structured", untouchable=("attention",)))
    found = judge(task(), Plan(settings=REFERENCE), options(wrong, pruned(0.5)))
    assert "the model has no module attention" in found.cuts[0].ended
    assert found.cuts[1].ended is None
    assert len(found.cuts[1].qualities) == 2


def test_what_the_job_as_it_stands_raises_goes_up():
    with pytest.raises(TaskError, match="returned nan"):
        judge(task(evaluate=lambda model: math.nan), Plan(settings=REFERENCE), options(pruned(0.5)))


LOOKS = QualityOptions(num_samples=NUM_SAMPLES, looks=True)


@pytest.mark.parametrize(
    "how", [{}, {"allowed": 0.5}, {"allowed": 0.5, "targets": (0.5,)}], ids=["all", "front", "scan"]
)
def test_an_evaluation_that_does_not_see_the_model_ends_the_process(how, tmp_path):
    """It judges another model of the same kind. What another process would go on from has no quality of it."""
    other = build_model()
    asked = options(pruned(0.5), recovery=LOOKS, keep=str(tmp_path / "cuts.json"), **how)
    with pytest.raises(TaskError, match="it does not see the model that it is given"):
        judge(task(evaluate=lambda model: quality(other)), Plan(settings=REFERENCE), asked)
    assert Kept(asked).found.reference.qualities == ()


def test_what_an_evaluation_draws_is_looked_at_once():
    """With the job as it stands, from the first seed."""
    drawn = task(evaluate=lambda model: quality(model) + torch.rand(()).item())
    found = judge(drawn, Plan(settings=REFERENCE), options(pruned(0.5), recovery=LOOKS))
    first, second = found.reference.qualities
    assert first.noise > 0
    assert [one.noise for one in (second, *found.cuts[0].qualities)] == [None] * 3


class _Killed(BaseException):
    """In place of a signal."""


def test_a_process_goes_on_from_what_a_killed_one_kept(tmp_path):
    """The first dies as the cut begins with its second seed: of the evaluations that an unbroken run makes, those of
    that seed alone are left. Both come to the same."""
    calls = []

    def counted(model: nn.Module) -> float:
        calls.append(model)
        return quality(model)

    def note(doing: str) -> None:
        if doing == "cut 1 of 1 recovers, from seed 1":
            raise _Killed

    asked = options(pruned(0.5), keep=str(tmp_path / "kept" / "cuts.json"))
    with pytest.raises(_Killed):
        judge(task(evaluate=counted), Plan(settings=REFERENCE), asked, note)
    calls.clear()
    found = judge(task(evaluate=counted), Plan(settings=REFERENCE), asked)
    assert len(calls) == 1  # in the end
    calls.clear()
    whole = judge(task(evaluate=counted), Plan(settings=REFERENCE), options(pruned(0.5)))
    assert len(calls) == 5  # each from two seeds, and the job as it stands after a quarter
    assert [one.value for one in found.cuts[0].qualities] == [one.value for one in whole.cuts[0].qualities]
    assert [one.value for one in found.reference.qualities] == [one.value for one in whole.reference.qualities]


def test_the_weights_that_are_kept_are_those_that_the_first_seed_was_judged_by(tmp_path):
    """Of the cut, not of the job as it stands; it says how they were recovered."""
    keep = tmp_path / "weights.pt"
    recovery = QualityOptions(num_samples=NUM_SAMPLES, keep=str(keep))
    found = judge(task(), Plan(settings=REFERENCE), options(pruned(0.5), recovery=recovery))
    (cut,) = found.cuts
    training = apply(Plan(settings=cut.settings), task())
    training.model.load_state_dict(torch.load(keep))
    assert quality(training.model) == cut.qualities[0].value != cut.qualities[1].value
    assert cut.qualities[0].recovered == "16 steps, learning rate falling to 0"
    assert found.notes == ()


def test_what_another_request_kept_is_not_taken(tmp_path):
    """Of other candidates, or a file that is none."""
    path = tmp_path / "cuts.json"
    judge(task(), Plan(settings=REFERENCE), options(pruned(0.5), keep=str(path)))
    other = judge(task(), Plan(settings=REFERENCE), options(pruned(0.25), keep=str(path)))
    assert other.cuts[0].settings.pruning.ratio == 0.25
    path.write_text("{")
    again = judge(task(), Plan(settings=REFERENCE), options(pruned(0.25), keep=str(path)))
    assert [one.value for one in again.cuts[0].qualities] == [one.value for one in other.cuts[0].qualities]
    assert Path(path).read_text().startswith('{"options"')


def test_nothing_is_begun_once_the_time_is_up():
    """What was found until then is told."""
    found = judge(task(), Plan(settings=REFERENCE), options(pruned(0.5), most_s=1e-9))
    assert found.cuts[0].qualities == found.reference.qualities == ()
    assert found.notes == ("the time for judging cuts was up before all of them were judged",)


def test_data_and_weights_are_read_once():
    read = []

    def weights() -> dict[str, torch.Tensor]:
        read.append("weights")
        return task().build_model().state_dict()

    def dataset() -> TensorDataset:
        read.append("data")
        return data()

    judge(task(weights=weights, build_dataset=dataset), Plan(settings=REFERENCE), options(pruned(0.5)))
    assert sorted(read) == ["data", "weights"]


def test_time_is_bought_where_it_costs_least():
    """Two layers of 4 s and a rest of 2 s. The first goes by group a, the second by both. The loss hangs on b ten times
    as much. To 0.7 of 10 s, a goes alone: at three eighths 5 + 2 = 7 s. To 0.4 it goes to three quarters: 4 s."""
    layers = [Layer(4.0, ("a",)), Layer(4.0, ("a", "b")), Layer(2.0)]
    rises = {"a": [(0.25, 0.1), (0.5, 0.2), (0.75, 0.3)], "b": [(0.25, 1.0), (0.5, 2.0), (0.75, 3.0)]}
    found = ratios_for((0.7, 0.4), layers, rises)
    assert found == [{"a": 0.375, "b": 0.0}, {"a": 0.75, "b": 0.0}]
    assert [cost_of(layers, one) for one in found] == [7.0, 4.0]


def test_what_cannot_be_had_is_left_out():
    """With all of both at nine tenths a step takes 0.4 + 0.04 + 2 s: a fifth of the time cannot be had."""
    layers = [Layer(4.0, ("a",)), Layer(4.0, ("a", "b")), Layer(2.0)]
    rises = {name: [(0.25, 0.1), (0.5, 0.2), (0.75, 0.3)] for name in "ab"}
    assert len(ratios_for((0.5, 0.2), layers, rises)) == 1


def test_a_rise_between_ratios_is_on_a_straight_line_and_beyond_them_twice_as_steep():
    rises = [(0.25, 0.1), (0.5, 0.1), (0.75, 0.6)]
    assert [rise_at(ratio, rises) for ratio in (0.0, 0.125, 0.375, 0.75)] == pytest.approx([0.0, 0.05, 0.1, 0.6])
    assert rise_at(0.9, rises) == pytest.approx(0.6 + 2 * 2.0 * 0.15)


class Half(nn.Module):
    """Of its second hidden layer three quarters do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 40), nn.Linear(40, 40), nn.Linear(40, 4)
        with torch.no_grad():
            for tensor in (self.second.weight[:30], self.second.bias[:30], self.last.weight[:, :30]):
                tensor.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


@pytest.mark.medium
def test_the_layer_whose_channels_are_dead_is_cut_and_the_other_is_not(tmp_path):
    """The loss does not change without dead channels, and it does without others. What was found of groups is kept, and
    lines tell of it."""
    asked = options(pruned(0.5), targets=(0.97,), keep=str(tmp_path / "cuts.json"))
    found = judge(task(build_model=Half), Plan(settings=REFERENCE), asked)
    first, second = found.groups
    assert (first.first, second.first) == ("first", "second")
    assert min(first.rises) > max(second.rises) == pytest.approx(0.0, abs=1e-6)
    uniform, own = found.cuts
    ratios = dict(own.settings.pruning.ratios)
    assert (ratios["first"], ratios["second"] > 0) == (0.0, True)
    assert own.settings.pruning.record is not None
    assert uniform.settings.pruning.record not in (None, own.settings.pruning.record)
    assert len(own.qualities) == 2
    text = "\n".join(lines_of(found))
    assert "second  40" in text
    assert "prune 0% to" in text
    assert Kept(asked).found == found


def test_between_two_cuts_ratios_are_halfway_in_sixteenths():
    """Of groups that both name. Between neighbours there is none."""
    assert halfway({"a": 0.375, "b": 0.25, "c": 0.5}, {"a": 0.5, "b": 0.25}) == {"a": 0.4375, "b": 0.25}
    assert halfway({"a": 0.0}, {"a": 0.9}) == {"a": 0.4375}
    assert halfway({"a": 0.5}, {"a": 0.5625}) is None


def pair_of(*wrong: int) -> tuple[Quality, Quality]:
    """Of a cut that has these of 400 examples wrong, beside one that has all of them right."""
    scores = [float(number not in wrong) for number in range(400)]
    return Quality(**judged_by(scores)._asdict()), Quality(**judged_by([1.0] * 400)._asdict())


def test_what_can_be_proven_leaves_room_for_what_chance_makes_of_examples():
    """Where 40 of 400 are wrong the differences have a standard error of 0.015, and 1.645 of these are 0.82 of an
    allowed drop of 0.03. The same examples from another seed tell nothing more; others have a say in half of it each.
    Where none is wrong, 12 would be at the limit. A number alone tells nothing of examples: three tenths are left to
    seeds."""
    once, error = pair_of(*range(40)), math.sqrt(0.1 * 0.9 / 399)
    assert provable([once], 0.03) == pytest.approx(1 - 1.645 * error / 0.03, rel=1e-4)
    assert provable([once, once], 0.03) == pytest.approx(1 - 1.645 * error / 0.03, rel=1e-4)
    other = math.sqrt((80 * 0.5**2 - 400 * 0.1**2) / 399 / 400)
    assert provable([once, pair_of(*range(40, 80))], 0.03) == pytest.approx(1 - 1.645 * other / 0.03, rel=1e-4)
    assert provable([pair_of()], 0.03) == pytest.approx(1 - 1.645 * math.sqrt(0.03 / 400) / 0.03, rel=1e-4)
    assert provable([once], 0.01) == 0.0
    assert provable([(Quality(value=0.5), Quality(value=1.0))], 1.0) == 0.7


def test_what_a_layer_holds_goes_by_its_parameters_and_by_what_is_saved_of_it():
    """Of 16 samples and 40 channels a ReLU saves 2,560 bytes. Linear layers of 360, 1,640 and 164 parameters take 16
    bytes for each; what they make is not saved. The first group has both sides of the second layer, with the other."""
    build = task()
    run = on_two_samples(build.build_dataset(), default_collate, build.compute_loss)
    training = apply(Plan(settings=REFERENCE), build)
    found = profile(training, build, ProfileOptions(num_timed_steps=0))
    *layers, rest = layers_of(found, groups(build.build_model(), run), by_bytes=True)
    named = [(one.cost, one.groups) for one in layers if one.cost]
    assert named == [(5760, ("0",)), (2560, ("0",)), (26240, ("0", "2")), (2560, ("2",)), (2624, ("2",))]
    assert rest.cost == max(found.peak.num_bytes - sum(one.cost for one in layers), 0)


@pytest.mark.medium
def test_a_cut_is_made_between_one_that_can_be_proven_and_the_next_that_cannot():
    """An eighth of the channels is kept and nine tenths are not: a half comes next, in sixteenths; then what lies on
    the other side of the limit. By bytes, which no clock changes."""
    least, most = (
        REFERENCE.having(Pruning(kind="structured", ratios=(("0", share), ("2", share)))) for share in (0.125, 0.9)
    )
    asked = options(least, most, allowed=0.02, by_bytes=True, seeds=(0,))
    found = judge(task(), Plan(settings=REFERENCE), asked)
    one, other, *made = found.cuts
    assert len(one.qualities) == 1
    assert "of the allowed drop lost in the end" in other.ended
    ratios = [{*dict(cut.settings.pruning.ratios).values()} for cut in made]
    lost = found.reference.qualities[0].value - made[0].qualities[0].value
    assert ratios[:2] == [{0.5}, {0.6875 if lost <= 0.7 * 0.02 else 0.3125}]
    assert all(other.peak < cut.peak < one.peak and cut.qualities for cut in made)


@pytest.mark.medium
def test_what_is_worth_most_is_judged_first():
    """A quarter of the channels, and a half, which is the smaller, and loses more than its memory is worth: where
    the time is up, the safe one was judged. By bytes, which no clock changes."""
    said: list[str] = []
    asked = options(pruned(0.5), pruned(0.25), allowed=ALLOWED, by_bytes=True)
    found = judge(task(), Plan(settings=REFERENCE), asked, said.append)
    end, rungs = found.reference.qualities[0].value, found.reference.rungs
    deep, safe = (
        Standing(number, cut.peak, (rungs[-1] - cut.rungs[-1] - max(end - rungs[-1], 0.0)) / ALLOWED)
        for number, cut in enumerate(found.cuts[:2])
    )
    assert deep.step < safe.step
    assert deep.worth < safe.worth
    first = [line for line in said if line.endswith("from seed 0")]
    assert first[1].startswith("cut 2 of 2")  # after the job as it stands


@pytest.mark.medium
def test_where_memory_counts_cuts_are_chosen_by_the_peak_of_a_step():
    """Each has its own over the reference's; the deeper it cuts, the less."""
    asked = options(pruned(0.25), pruned(0.75), allowed=0.9, by_bytes=True)
    found = judge(task(), Plan(settings=REFERENCE), asked)
    less, more = found.cuts
    assert more.peak < less.peak < 1
    assert [less.cost, more.cost] == [less.peak, more.peak]
    assert "peak" in "\n".join(lines_of(found))
