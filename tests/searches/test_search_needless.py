"""What buys memory with time is neither predicted nor tried where no memory is wanting."""

from __future__ import annotations

import pytest
from search_tables import MIB, facts, options, peak, run_search

from autotune.estimates import Prediction
from autotune.searches.events import PredictionEnded
from autotune.searches.sampler.configuration_space import buys_memory, is_needless
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.precision import Precision

LARGEST = Batch(micro=64)
RECOMPUTED = Settings(batch=Batch(micro=32, accumulate=2), checkpointing=Checkpointing(kind="blocks"))


pytestmark = pytest.mark.usefixtures("in_memory", "elsewhere")


def predict(settings: Settings) -> Prediction:
    """To the byte, or so it may be 5 % more."""
    return Prediction(peak_bytes=peak(settings), high_bytes=round(1.05 * peak(settings)))


def test_recomputation_is_needless_where_the_largest_batch_is_sure_to_fit_without():
    """64 samples need 840 MiB, and are sure to fit where a twentieth more would."""
    assert not is_needless(RECOMPUTED, LARGEST, predict, 881 * MIB)
    assert is_needless(RECOMPUTED, LARGEST, predict, 883 * MIB)


def test_what_trades_nothing_is_never_needless():
    stock = Settings(batch=LARGEST, precision=Precision(kind="bf16"))
    assert not buys_memory(stock)
    assert buys_memory(RECOMPUTED)
    assert not is_needless(stock, LARGEST, predict, 2**60)


def test_without_a_prediction_nothing_is_needless():
    assert not is_needless(RECOMPUTED, LARGEST, lambda settings: None, 2**60)


def test_only_what_may_be_of_use_is_predicted_and_tried():
    """Without recomputation 64 samples need 840 and 714 MiB, in bf16 584 and 496, of 600 / 1.03: one is sure to fit."""
    run = run_search(options(budget=600 * MIB, trials=60), predict=predict)
    requests = [request for request in run.executor.requests if request.kind == "predict"]
    asked = [settings for request in requests for settings in request.options.settings]
    combination = {"precision": Precision(kind="bf16"), "allocator": Allocator(kind="tcmalloc")}
    for settings in (*asked, *run.measured):
        trades = settings.checkpointing.kind != "none"
        assert not (trades and all(getattr(settings, name) == one for name, one in combination.items()))
    assert all(request.deadline_s > 600 for request in requests)
    plain, recomputing = (request.options.settings for request in requests)
    assert not any(map(buys_memory, plain))
    assert all(map(buys_memory, recomputing))
    assert len(set(asked)) == len(asked)
    numbers = [len(plain), len(recomputing)]
    assert run.seen(PredictionEnded) == [PredictionEnded(number, number) for number in numbers]


def test_without_a_limit_nothing_that_trades_is_asked_for():
    run = run_search(options(trials=60), known=facts(), predict=predict)
    assert not any(buys_memory(settings) for settings in run.measured)
    assert len([request for request in run.executor.requests if request.kind == "predict"]) == 1
