"""Spaces that leave open which blocks are recomputed: what is tried and what a plan says, over a table and for real."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest
from real_search import search_until_a_trial
from search_tables import MIB, REFERENCE, facts, options, row, run_search

from autotune.estimates import Prediction
from autotune.plan import Budget, load_plan
from autotune.search_spaces import load_space
from autotune.searches.events import Warned
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace, Foreseen
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator, installed_allocators
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import BlocksToChoose, Checkpointing
from autotune.techniques.layers import Layers
from autotune.workers import Executor
from autotune.workers.table import Row

SPACE = "schema: autotune/space@1\nbatch: auto\ncheckpointing: [{kind: none}, {kind: chosen}]\n"
LIMIT = 500 * MIB
NUM_BLOCKS = 12
BATCHES = [Batch.of(64, micro) for micro in (1, 2, 4, 8, 16, 32, 64)]
BEST = Settings(batch=Batch(micro=32, accumulate=2), checkpointing=Checkpointing(kind="chosen", blocks=(0, 1)))


pytestmark = pytest.mark.usefixtures("in_memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)


def peak(batch: Batch, num_recomputed: int) -> int:
    """200 MiB, and 10 for each sample of a micro-batch, of which a recomputed block frees a fifteenth."""
    return round((200 + 10 * batch.micro * (1 - num_recomputed / 15)) * MIB)


def rows() -> list[Row]:
    """Each batch with the first n blocks recomputed: a sample takes 10 ms and 0.1 for each, a micro-batch 20 ms."""
    found = []
    for batch in BATCHES:
        for number in range(NUM_BLOCKS + 1):
            seconds = 64 * (0.010 + 0.0001 * number) + 0.020 * batch.accumulate
            settings = Settings(batch=batch, checkpointing=Checkpointing.of(tuple(range(number)), NUM_BLOCKS))
            found.append(row(settings, samples_per_s=(64 / seconds,), peak_bytes=(peak(batch, number),)))
    return found


def predict(settings: Settings) -> Prediction:
    """The peak to the byte."""
    return Prediction(peak_bytes=peak(settings.batch, len(settings.checkpointing.numbers(NUM_BLOCKS))))


def choose(settings: Settings, _: object = ()) -> Prediction:
    """The fewest first blocks that fit."""
    fitting = [number for number in range(NUM_BLOCKS + 1) if peak(settings.batch, number) * 1.03 <= LIMIT]
    number = min(fitting, default=NUM_BLOCKS)
    chosen = Settings(checkpointing=Checkpointing.of(tuple(range(number)), NUM_BLOCKS))
    return Prediction(peak_bytes=peak(settings.batch, number), chosen=chosen)


def run(**changes):
    return run_search(options(budget=LIMIT, **changes), rows=rows(), predict=predict, choose=choose)


@pytest.mark.parametrize("sampler", ["gain", "tpe"])
def test_the_best_is_found_with_its_blocks_named(sampler):
    """At 64 samples 9 blocks must go: 718 ms a step. At 32 it is 2: 693 ms. At 16 none: 720 ms."""
    found = run(trials=20, sampler=sampler)
    assert found.plan.settings == BEST
    assert found.plan.measured.fits
    assert "checkpointing: {kind: chosen, blocks: [0, 1]}" in Path("plan.yaml").read_text()
    assert load_plan("plan.yaml") == found.plan


def test_a_choice_of_no_blocks_is_stock_and_not_tried_again():
    """Seven batches as they stand; of the choices, those of 64 and of 32 samples alone recompute anything."""
    measured = run(trials=50, sampler="tpe").measured
    assert len({settings.canonical() for settings in measured}) == len(measured)
    recomputing = {settings.batch.micro for settings in measured if settings.checkpointing.kind != "none"}
    assert recomputing <= {32, 64}
    assert len(measured) <= 9


def test_the_sampler_sees_the_spaces_own_words(in_memory):
    run(trials=20)
    (storage,) = in_memory.values()
    trials = optuna.load_study(study_name="model-1", storage=storage).trials
    (best,) = [one for one in trials if one.user_attrs.get("settings") == json.loads(BEST.canonical())]
    assert best.params == {"batch": 5, "checkpointing": '{"kind": "chosen"}'}


def test_a_resumed_search_goes_on_with_the_choices_that_were_made():
    run(trials=3)
    resumed = run_search(options(budget=LIMIT, trials=20, resume=True), rows=rows())
    assert all(request.kind != "predict" for request in resumed.executor.requests)
    assert resumed.plan.settings == BEST
    assert run_search(options(budget=LIMIT, trials=20, resume=True), rows=rows()).measured == []


@pytest.mark.parametrize("sampler", ["gain", "random"])
def test_where_blocks_cannot_be_chosen_all_are_recomputed_and_it_is_said(sampler):
    found = run_search(options(budget=LIMIT, trials=20, sampler=sampler), rows=rows())
    assert {settings.checkpointing.kind for settings in found.measured} == {"none", "blocks"}
    (said,) = [event.message for event in found.seen(Warned) if "recompute" in event.message]
    assert "For 7 of 7 configurations it will be all: what each block keeps could not be traced." in said


def test_a_torch_that_predictions_were_not_tried_with_is_said_once():
    found = run_search(options(budget=LIMIT, trials=2), rows=rows(), known=facts(torch_version="2.14.0"))
    (said,) = [event.message for event in found.seen(Warned) if "tried with torch" in event.message]
    assert "this is 2.14.0" in said


def test_a_choice_that_is_another_of_the_space_has_its_name():
    """Of four blocks, every second is 0 and 2."""
    found = Settings(checkpointing=Checkpointing(kind="chosen", blocks=(0, 2)))
    Path("space.yaml").write_text(SPACE.replace("{kind: none}", "{kind: none}, {kind: blocks, every: 2}"))
    known = facts(num_blocks=4)
    space = ConfigurationSpace(load_space("space.yaml").choices(known), reference_settings(known), 4)
    space = space.foretold(Foreseen(chosen=lambda settings: found))
    point = {"batch": BATCHES[0], "checkpointing": BlocksToChoose(kind="chosen")}
    assert space.resolved(point).checkpointing == Checkpointing(kind="blocks", every=2)
    assert len(list(space.shuffled("all"))) == 2 * 7


def test_the_predict_request_carries_the_budget_without_its_margin():
    requests = [one for one in run(trials=3).executor.requests if one.kind == "predict"]
    assert {request.options.limit_bytes for request in requests} == {int(LIMIT / 1.03)}


MODEL = """\
import torch
from torch import nn

batch_size = 128


def build_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), *(nn.Tanh() for _ in range(4))) for _ in range(8)))


def build_dataset():
    return [torch.ones(512, 32)] * 256


def compute_loss(model, batch):
    return model(batch).square().mean()
"""


TOGETHER = Settings(batch=Batch.of(64, 64), layers=Layers(kind="exact", spared=(11,)))
"""Of all that fits, the fastest."""


def blocks_peak(settings: Settings) -> int:
    """200 MiB, and 50 for each block, of which recomputing it frees 40, and layers 25."""
    recomputed = {*settings.checkpointing.numbers(NUM_BLOCKS)}
    saving = {*settings.layers.numbers(NUM_BLOCKS)} - recomputed
    return (200 + 50 * NUM_BLOCKS - 40 * len(recomputed) - 25 * len(saving)) * MIB


def blocks_row(settings: Settings) -> Row:
    """A step takes 1 s, and 28 ms for each block that is recomputed, 15 for each with layers."""
    recomputed, saving = settings.checkpointing.numbers(NUM_BLOCKS), settings.layers.numbers(NUM_BLOCKS)
    seconds = 1 + 0.028 * len(recomputed) + 0.015 * len(saving)
    return row(settings, samples_per_s=(64 / seconds,), peak_bytes=(blocks_peak(settings),))


def blocks_prediction(settings: Settings) -> Prediction:
    """The peak to the byte, and a third more work where everything is recomputed."""
    work = 1e9 * (1 + len(settings.checkpointing.numbers(NUM_BLOCKS)) / 36)
    return Prediction(peak_bytes=blocks_peak(settings), flops_per_sample=work, bytes_per_sample=work)


def choose_in_blocks(settings: Settings, choices: tuple[Settings, ...]) -> Prediction:
    """Layers in all blocks but one, where both may be chosen; else the fewest blocks recomputed that fit."""
    if len(choices) > 1:
        chosen = Settings(layers=TOGETHER.layers)
        return blocks_prediction(settings.having(Checkpointing(), *chosen.chosen())).model_copy(
            update={"chosen": chosen}
        )
    every = (Checkpointing.of(tuple(range(number)), NUM_BLOCKS) for number in range(NUM_BLOCKS + 1))
    fitting = next(one for one in every if blocks_peak(settings.having(one)) * 1.03 <= 570 * MIB)
    chosen = Settings(checkpointing=fitting)
    return blocks_prediction(settings.having(fitting)).model_copy(update={"chosen": chosen})


def run_together(**changes):
    """250 MiB must go: seven blocks recomputed take 1.196 s, layers everywhere 1.18 s, in eleven blocks 1.165 s."""
    Path("space.yaml").write_text(SPACE.replace("batch: auto", "layers: [{kind: none}, {kind: exact}]"))
    some = [Checkpointing.of(tuple(range(number)), NUM_BLOCKS) for number in range(NUM_BLOCKS + 1)]
    layers = [Layers(), Layers(kind="exact")]
    every = [REFERENCE.having(one, other) for one in layers for other in some]
    made = [blocks_row(settings) for settings in (*every, TOGETHER)]
    asked = options(budget=570 * MIB, **changes)
    return run_search(asked, rows=made, predict=blocks_prediction, choose=choose_in_blocks)


def test_where_the_job_does_not_fit_the_search_begins_with_what_was_chosen_together():
    found = run_together(trials=20)
    assert found.measured[:2] == [REFERENCE, TOGETHER]
    assert found.plan.settings == TOGETHER
    assert "layers: {kind: exact, spared: [11]}" in Path("plan.yaml").read_text()
    assert len({settings.canonical() for settings in found.measured}) == len(found.measured)


def test_what_was_chosen_together_is_one_of_the_spaces_configurations(in_memory):
    """Its speed tells the sampler of others."""
    run_together(trials=2)
    (storage,) = in_memory.values()
    trials = optuna.load_study(study_name="model-1", storage=storage).trials
    (best,) = [one for one in trials if one.user_attrs.get("settings") == json.loads(TOGETHER.canonical())]
    assert best.params == {"layers": '{"kind": "exact"}', "checkpointing": '{"kind": "chosen"}'}


def test_layers_that_the_space_spares_in_some_blocks_are_one_of_its_configurations():
    """Whatever is chosen beside them."""
    spared = Layers(kind="exact", spared=(0,))
    choices = {"layers": (Layers(), spared), "checkpointing": (Checkpointing(), BlocksToChoose(kind="chosen"))}
    some = Settings(checkpointing=Checkpointing(kind="chosen", blocks=(1, 2)))
    for foreseen in (Foreseen(), Foreseen(chosen=lambda settings: some)):
        space = ConfigurationSpace(choices, reference_settings(facts()), NUM_BLOCKS, foreseen)
        for point in (
            {"layers": one, "checkpointing": other} for one in choices["layers"] for other in choices["checkpointing"]
        ):
            assert space.settings(space.params(space.resolved(point))) == space.resolved(point)


def test_a_guess_is_not_taken_for_chosen():
    """All blocks, where none could be chosen."""
    choices = {"checkpointing": (Checkpointing(), BlocksToChoose(kind="chosen"))}
    space = ConfigurationSpace(choices, reference_settings(facts()), NUM_BLOCKS)
    guess = space.resolved({"checkpointing": BlocksToChoose(kind="chosen")})
    assert space.params(guess) is not None
    assert not space.is_chosen(guess)
    some = Settings(checkpointing=Checkpointing(kind="chosen", blocks=(1, 2)))
    known = space.foretold(Foreseen(chosen=lambda settings: some))
    assert known.is_chosen(known.resolved({"checkpointing": BlocksToChoose(kind="chosen")}))


def test_a_resumed_search_asks_for_nothing_chosen_together_again():
    run_together(trials=2)
    resumed = run_together(trials=20, resume=True)
    assert all(request.kind != "predict" for request in resumed.executor.requests)
    assert resumed.plan.settings == TOGETHER
    assert TOGETHER not in resumed.measured


@pytest.mark.slow
@pytest.mark.skipif("tcmalloc" not in installed_allocators(), reason="tcmalloc is not installed")
def test_a_real_search_names_blocks_that_fit(local_executor: Executor):
    """Eight blocks keep 32 MiB each, or 8 of input where they are recomputed. The budget is two thirds of the way from
    all to none of them recomputed. With tcmalloc, of which it is known what it adds."""
    Path("model.py").write_text(MODEL)
    Path("space.yaml").write_text(SPACE.replace("batch: auto", "allocator: [{kind: tcmalloc}]"))
    asked = SearchOptions(task="model.py", space="space.yaml", trials=2, trial_time=0.2)
    known = inspect(asked, local_executor, TimeBudget(0.2, None))
    stock = reference_settings(known).model_copy(update={"allocator": Allocator(kind="tcmalloc")})
    every = stock.model_copy(update={"checkpointing": Checkpointing(kind="blocks")})
    requests = Requests("model.py", 0, Budget(limit=None, device="cpu"), known)
    predicted = local_executor.ask(requests.predict_request((every, stock), None, 600.0)).predictions
    low, high = (one.peak_bytes for one in predicted)
    plan, _ = search_until_a_trial(asked.model_copy(update={"budget": low + (high - low) * 2 // 3}), local_executor)
    assert plan.settings.checkpointing.kind == "chosen"
    assert 0 < len(plan.settings.checkpointing.blocks) < 8
    assert plan.measured.fits
    assert not plan.reference.fits


def test_all_blocks_are_another_choice_than_all_but_for_their_products():
    """A choice of all blocks stands for itself where the space has the latter alone."""
    choices = (Checkpointing(), Checkpointing(kind="selective"), BlocksToChoose(kind="chosen"))
    foreseen = Foreseen(chosen=lambda settings: Settings(checkpointing=Checkpointing(kind="blocks")))
    space = ConfigurationSpace({"checkpointing": choices}, reference_settings(facts()), NUM_BLOCKS, foreseen)
    chosen = [space.resolved({"checkpointing": choice}).checkpointing for choice in choices]
    assert chosen == [*choices[:2], Checkpointing(kind="blocks")]
