"""What is said of configurations before they are measured, by hand arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.estimates import Calibration, EstimateOptions, Prediction, PredictOptions
from autotune.estimates.max_batch import estimate
from autotune.estimates.predict import predict
from autotune.estimates.types import CONTEXT, Interval
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing


class Values(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(8)


def task(model: type[nn.Module] | None = None) -> Task:
    return Task(
        build_model=model or (lambda: nn.Sequential(nn.Linear(8, 4, bias=False))),
        build_dataset=Values,
        compute_loss=lambda model, x: model(x).mean(),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def settings(micro: int, accumulate: int = 1, **others: Any) -> Settings:
    return Settings.model_validate({"batch": {"micro": micro, "accumulate": accumulate}, **others})


def predicted(*every: Settings, model: type[nn.Module] | None = None) -> list[Prediction]:
    found = predict(task(model), PredictOptions(settings=every)).predictions
    assert all(found)
    return [one for one in found if one is not None]


def test_a_linear_layer_takes_two_products_a_sample():
    """2 x 8 x 4 operations forward, as many for the gradient of the weight; its input needs none."""
    assert [one.flops_per_sample for one in predicted(settings(2), settings(7))] == [128, 128]


def test_accumulation_multiplies_no_work():
    """A sample is computed once, however an optimizer step is split."""
    whole, split = predicted(settings(8), settings(4, 2))
    assert whole.flops_per_sample == split.flops_per_sample == 128


def test_what_the_task_states_is_predicted_where_the_settings_say_nothing():
    """The job's own bf16 is a plan's bf16, to the byte of its tensors; its fp32 is the model as it stands."""

    def tensors(stated: Any, row: str) -> int:
        combination = Settings.model_validate({"precision": {"kind": row}})
        asked = EstimateOptions(settings=combination, reference_batch=8, reference_micro=8)
        found = estimate(replace(task(), precision=stated), asked)
        return found.reference.tensors.value

    assert tensors("bf16", "default") == tensors(None, "bf16") != tensors(None, "default")
    assert tensors("bf16", "fp32") == tensors(None, "default")


@pytest.mark.parametrize(("stated", "row"), [("tf32", "default"), (None, "tf32")])
def test_tf32_is_traced_where_no_card_is_and_takes_what_fp32_does(stated: Any, row: str):
    """It rounds what matrix products read, and no tensor."""

    def process(stated: Any, row: str) -> int:
        combination = Settings.model_validate({"precision": {"kind": row}})
        asked = EstimateOptions(settings=combination, target="cuda", capability=(8, 0))
        return estimate(replace(task(), precision=stated), asked).reference.process.value

    assert process(stated, row) == process("fp32", "default")


def test_the_jobs_own_micro_batch_is_the_one_that_is_estimated():
    options = EstimateOptions(reference_batch=32, reference_micro=8, is_held=True)
    fit = estimate(task(), options).reference
    assert (fit.micro, fit.accumulate) == (8, 4)


def test_loader_workers_come_on_top():
    """As many MiB for each, whoever is asked for first."""
    first, none, second = predicted(
        settings(2, data_loading={"num_workers": 1}), settings(2), settings(2, data_loading={"num_workers": 2})
    )
    assert [first.peak_bytes - none.peak_bytes, second.peak_bytes - none.peak_bytes] == [36 * 2**20, 72 * 2**20]


def test_recomputing_adds_one_forward():
    """The product of the forward, once more: 3/2 of the operations."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    plain, recomputed = predicted(settings(4), settings(4, checkpointing={"kind": "blocks"}), model=Twice)
    assert plain.flops_per_sample == 2 * 128 + 128 + 256  # forward; the first block's weight; the second's two
    assert recomputed.flops_per_sample == plain.flops_per_sample + 2 * 128


def test_what_trials_have_taught_moves_the_process_and_what_fits():
    """1 TiB more than was thought is more than there is."""
    more = Calibration(constant_bytes=2.0**40, share=0.0, widened=1.0, num_trials=1)
    asked = [EstimateOptions(limit_bytes=2**40, reference_batch=1000, calibration=by) for by in (None, more)]
    before, after = (estimate(task(), options) for options in asked)
    added = [one.reference.process.value - one.base_bytes for one in (before, after)]
    assert added[1] - added[0] == 2**40
    assert after.reference.tensors == before.reference.tensors
    assert before.largest is not None
    assert after.largest is None


def test_the_peak_is_what_an_estimate_says_but_for_the_base():
    """Both are base and tensors: between two batches they differ alike."""
    low, high = predicted(settings(1000), settings(64_000))
    found = [estimate(task(), EstimateOptions(reference_batch=micro)) for micro in (1000, 64_000)]
    without_base = [one.reference.process.value - one.base_bytes for one in found]
    assert high.peak_bytes - low.peak_bytes == without_base[1] - without_base[0]


def test_what_a_step_makes_is_told_apart_from_what_is_there():
    """Of 1000 samples the batch, 32 bytes each, and their outputs' gradients, 16; the weight's, 128, and three numbers:
    the weight is there before."""
    (found,) = predicted(settings(1000))
    assert found.step_bytes == 32_000 + 16_000 + 128 + 3 * 4


def test_a_model_that_reads_values_is_probed_and_the_reason_is_given():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y * 2 if y.sum().item() > 0 else y

    found = predict(task(Reads), PredictOptions(settings=(settings(4),)))
    assert found.probed is not None
    assert found.predictions[0] is not None
    assert found.predictions[0].flops_per_sample == 128


def test_without_time_nothing_is_predicted():
    found = predict(task(), PredictOptions(settings=(settings(4),), most_s=1e-9))
    assert found.predictions == (None,)


def test_a_batch_that_cannot_run_has_no_prediction():
    """A BatchNorm in training wants more than one value for each channel."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    one, four = predict(task(Normed), PredictOptions(settings=(settings(1), settings(4)))).predictions
    assert one is None
    assert four is not None


class Deep(nn.Module):
    """Eight blocks, each of which keeps two tensors of 256 numbers a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Adding(nn.Module):
    """A block of which backward reads the signs of a ReLU, as bits where layers save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.relu(self.linear(x))


class Wide(Deep):
    """Eight of these, in each of which memory-saving layers take less time than computing it again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 1024), nn.ModuleList(Adding() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


MANY = 2**16
TO_CHOOSE = (settings(MANY),)


def chosen(limit_bytes: int | None) -> Prediction:
    """For a CUDA device, whose base is the same each time, and known."""
    context = Interval(low=CONTEXT.value, value=CONTEXT.value, high=CONTEXT.value)
    options = PredictOptions(settings=(), to_choose=TO_CHOOSE, target="cuda", context=context, limit_bytes=limit_bytes)
    (found,) = predict(task(Deep), options).predictions
    assert found is not None
    return found


@pytest.mark.medium
def test_blocks_are_chosen_for_the_limit():
    """None where it fits, some between, all where even those are not enough, and where there is no limit to choose for;
    and the prediction is of that choice."""
    both = (settings(MANY), settings(MANY, checkpointing={"kind": "blocks"}))
    found = predict(task(Deep), PredictOptions(settings=both, target="cuda")).predictions
    stock, every = (one.peak_bytes for one in found if one is not None)
    assert (chosen(2 * stock).chosen, chosen(2 * stock).peak_bytes) == (Settings(), stock)
    some = chosen((stock + every) // 2)
    assert some.chosen is not None
    assert 0 < len(some.chosen.checkpointing.blocks) < 8
    assert every < some.peak_bytes <= (stock + every) // 2
    all_blocks = Settings(checkpointing=Checkpointing(kind="blocks"))
    assert (chosen(every // 2).chosen, chosen(every // 2).peak_bytes) == (all_blocks, every)
    assert (chosen(None).chosen, chosen(None).peak_bytes) == (None, every)


@pytest.mark.medium
def test_no_more_blocks_are_recomputed_than_it_takes_whatever_recomputing_loads(monkeypatch: pytest.MonkeyPatch):
    """The limits are the upper ends with 2, 4 and 6 of the blocks recomputed, and what a process is charged without
    tensors is 64 MiB more as soon as any is."""

    def base_bytes(_: object, asked: Settings) -> int:
        return 2**28 + 2**26 * (asked.checkpointing != Checkpointing())

    monkeypatch.setattr("autotune.estimates.predict._Bases.of", base_bytes)
    some = [settings(MANY, checkpointing={"kind": "chosen", "blocks": [*range(number)]}) for number in (2, 4, 6)]
    for one in predict(task(Deep), PredictOptions(settings=tuple(some))).predictions:
        assert one is not None
        options = PredictOptions(settings=(), to_choose=TO_CHOOSE, limit_bytes=one.high_bytes)
        (found,) = predict(task(Deep), options).predictions
        assert found is not None
        assert (found.peak_bytes, found.high_bytes) == (one.peak_bytes, one.high_bytes)


@pytest.mark.medium
def test_layers_save_memory_in_no_more_blocks_than_it_takes():
    """Chosen together with which blocks are recomputed, for halfway between layers everywhere and nowhere."""
    plain, choices = settings(2**13), ({"checkpointing": {"kind": "blocks"}}, {"layers": {"kind": "exact"}})
    both = (plain, settings(2**13, layers={"kind": "exact"}))
    stock, saving = (one.peak_bytes for one in asked(both) if one is not None)
    limit_bytes = (stock + saving) // 2
    together = tuple(Settings.model_validate(one) for one in choices)
    (found,) = asked((), to_choose=(plain,), choices=together, limit_bytes=limit_bytes)
    assert found is not None
    assert found.chosen is not None
    assert found.chosen.checkpointing == Checkpointing()
    assert 0 < len(found.chosen.layers.spared) < 8
    (again,) = asked((plain.having(found.chosen.layers),))
    assert again is not None
    assert saving < found.peak_bytes == again.peak_bytes <= limit_bytes


def asked(every: tuple[Settings, ...], **options: Any) -> tuple[Prediction | None, ...]:
    """For a CUDA device, whose base is the same each time, and known."""
    context = Interval(low=CONTEXT.value, value=CONTEXT.value, high=CONTEXT.value)
    return predict(task(Wide), PredictOptions(settings=every, target="cuda", context=context, **options)).predictions


@pytest.mark.medium
def test_an_estimate_names_the_blocks_for_the_jobs_own_batch():
    asked = EstimateOptions(target="cuda", limit_bytes=2**40, reference_batch=MANY, most=MANY, choose_blocks=True)
    whole = estimate(task(Deep), asked)
    assert whole.blocks is None
    less = asked.model_copy(update={"limit_bytes": whole.reference.process.value - 1})
    blocks = estimate(task(Deep), less).blocks
    assert blocks is not None
    assert 0 < len(blocks) < 8


def test_where_steps_are_probed_no_blocks_are_chosen_and_the_prediction_is_of_all():
    """The allocations of two batches do not correspond."""

    class Reads(Deep):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            y.sum().item()
            return y * 2 if len(x) > 2 else y

    whole = settings(MANY), settings(MANY, checkpointing={"kind": "blocks"})
    stock, every = predict(task(Reads), PredictOptions(settings=whole, target="cuda")).predictions
    assert stock is not None
    assert every is not None
    limit_bytes = (stock.peak_bytes + every.peak_bytes) // 2
    options = PredictOptions(settings=(), to_choose=TO_CHOOSE, target="cuda", limit_bytes=limit_bytes)
    found = predict(task(Reads), options)
    assert found.predictions == (every,)
    assert every.chosen is None


@pytest.mark.parametrize("forks", [1, 2])
def test_a_combination_that_cannot_be_had_takes_no_other_with_it(forks: int, monkeypatch: pytest.MonkeyPatch):
    """The task has no variant of that name: nothing is said of it but why, wherever it is found out."""
    monkeypatch.setattr("autotune.estimates.forks.num_processors", lambda: forks)
    every = (settings(2), settings(2, variant={"kind": "small"}), settings(2, low_rank={"kind": "svd"}), settings(4))
    found = predict(task(), PredictOptions(settings=every))
    assert [one is not None for one in found.predictions] == [True, False, False, True]
    why = {combination.canonical(): reason for combination, reason in found.refused}
    assert "no variant small" in why[Settings.model_validate({"variant": {"kind": "small"}}).canonical()]
    assert "low_rank" in why[Settings.model_validate({"low_rank": {"kind": "svd"}}).canonical()]


def test_the_tensors_of_a_step_by_hand():
    """Of 32 weights: themselves, their gradient, a batch of 2 x 8 values, an output of 2 x 4, and what a mean makes."""
    (found,) = predicted(settings(2))
    assert 4 * (32 + 32 + 16) <= found.tensor_bytes <= 4 * (32 + 32 + 16 + 8 + 8 + 8 + 8)
    assert found.tensor_bytes >= found.step_bytes
