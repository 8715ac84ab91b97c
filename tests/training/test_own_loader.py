"""``build_loader``: a task with a DataLoader of its own, of which the search chooses the batch size alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from line_task import Line, mean_loss, training_of
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions, MeasureOptions
from autotune.measure.run import measure
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.training.training import Training

pytestmark = pytest.mark.usefixtures("one_thread_only")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def task_of(build_loader: Any, **pieces: Any) -> autotune.Task:
    return autotune.Task(
        build_model=Line, build_loader=build_loader, compute_loss=mean_loss, build_optimizer=sgd, **pieces
    )


class Batches:
    """No DataLoader: slices of 0 to 7, without a length."""

    def __init__(self, size: int, samples: torch.Tensor) -> None:
        self.size, self.samples = size, samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples.split(self.size))


FLOATS = torch.arange(8.0)
LOADERS = {
    "a DataLoader": lambda batch_size: DataLoader(FLOATS, batch_size=batch_size),
    "with workers": lambda batch_size: DataLoader(FLOATS, batch_size=batch_size, num_workers=2),
    "a list": lambda batch_size: list(FLOATS.split(batch_size)),
    "without a length": lambda batch_size: Batches(batch_size, FLOATS),
}


def train(training: Training) -> list[float]:
    return [training.step(batch).loss.item() for batch in training.loader]


@pytest.mark.parametrize("name", LOADERS)
def test_its_batches_are_accumulated_as_others_are(name):
    """0 to 5 and 6 to 7 in micro-batches of two: gradients of 2.5 and 6.5, twice."""
    training = training_of(task_of(LOADERS[name]), batch=Batch(micro=2, accumulate=3))
    for epoch in (1, 2):
        assert len(train(training)) == 4
        assert training.model.weight.item() == 1.0 - epoch * (2.5 + 6.5)


def test_a_short_last_batch_counts_for_what_it_holds():
    """0 to 2, 3 to 5, and 6 and 7: the tail's step is the mean of both."""
    training = training_of(task_of(LOADERS["a list"]), batch=Batch(micro=3))
    train(training)
    assert training.model.weight.item() == 1.0 - 1.0 - 4.0 - 6.5


def test_it_is_a_piece_too():
    training = autotune.apply(
        Plan(settings=Settings()), model=Line(), build_loader=LOADERS["a list"], loss=mean_loss, batch_size=4
    )
    assert [len(batch) for batch in training.loader] == [4, 4]


def test_it_goes_on_where_it_was_killed():
    """A shuffle of torch's own, in the middle of its second epoch."""

    def make() -> Training:
        shuffled = task_of(lambda batch_size: DataLoader(FLOATS, batch_size=batch_size, shuffle=True))
        return training_of(shuffled, batch=Batch(micro=1, accumulate=2))

    def run(training: Training) -> Iterator[float]:
        for _ in range(training.epoch, 3):
            for batch in training.loader:
                yield training.step(batch).loss.item()

    losses = list(run(make()))
    first = make()
    begun = list(itertools.islice(run(first), 11))
    state = first.state_dict()
    again = make()
    again.load_state_dict(state)
    assert [*begun, *run(again)] == losses


# What a search knows of it


def image_loader(batch_size: int) -> DataLoader[Any]:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, torch.arange(40) % 2), batch_size=batch_size, num_workers=1)


def classify(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


IMAGES = autotune.Task(
    build_model=lambda: torch.nn.Linear(3, 2), build_loader=image_loader, compute_loss=classify, batch_size=8
)


def test_it_is_inspected_by_its_batches():
    """Forty samples; splitting a batch changes nothing; data loading is left out, and that is said."""
    facts = inspect_task(IMAGES, InspectOptions(), "cpu")
    assert (facts.dataset_length, facts.effective_batch, facts.shapes_vary, facts.own_loader) == (40, 8, False, True)
    assert facts.split_error == pytest.approx(0.0, abs=1e-5)
    assert facts.loader_options["num_workers"] == 1
    assert DataLoading.choices(facts) == (DataLoading(),)
    assert [batch.micro for batch in Batch.choices(facts)] == [1, 2, 4, 8]
    assert "the task builds its loaders itself (build_loader): data_loading is left as it is there" in facts.warnings


def test_batches_of_several_shapes_are_seen():
    """Padded to the longest of each batch."""

    def padded(batch_size: int) -> list[torch.Tensor]:
        return [torch.zeros(batch_size, 3 + number) for number in range(64 // batch_size)]

    task = dataclasses.replace(IMAGES, build_loader=padded, compute_loss=lambda model, x: model(x[:, :3]).mean())
    assert inspect_task(task, InspectOptions(), "cpu").shapes_vary


@pytest.mark.medium
def test_a_trial_measures_it():
    training = autotune.apply(Plan(settings=Settings(batch=Batch(micro=4, accumulate=2))), IMAGES)
    found = measure(training, IMAGES, MeasureOptions(trial_time_s=0.2, parity_batch=8))
    assert found.samples_per_s.value > 0
    assert len(found.parity.losses) == 10


@pytest.mark.slow
def test_two_ways_to_read_it_have_the_same_losses():
    """Parity over micro-batches of 8, and of 2."""
    losses = []
    for batch in (Batch(micro=8), Batch(micro=2, accumulate=4)):
        training = autotune.apply(Plan(settings=Settings(batch=batch)), IMAGES)
        losses.append(measure(training, IMAGES, MeasureOptions(trial_time_s=0.1, parity_batch=8)).parity.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# What is none


BAD = {
    "nothing": (lambda batch_size: None, r"build_loader\(2\) returned NoneType, which is not iterable"),
    "an iterator": (
        lambda batch_size: iter(FLOATS.split(batch_size)),
        r"build_loader\(2\) returned an iterator \(.*\), which ends with its first epoch",
    ),
    "a generator": (lambda batch_size: (x for x in FLOATS.split(2)), r"returned an iterator \(generator\)"),
    "another size": (
        lambda batch_size: list(FLOATS.split(4)),
        r"build_loader\(2\) must yield batches of 2 samples, .* but it yielded one of 4. Pass batch_size on",
    ),
    "a smaller size": (lambda batch_size: list(FLOATS.split(1)), "but it yielded one of 1. Pass batch_size on"),
    "none": (lambda batch_size: [], r"build_loader\(2\) returned a loader without a batch"),
    "all dropped": (
        lambda batch_size: DataLoader(FLOATS[:1], batch_size=batch_size, drop_last=True),
        r"build_loader\(2\) returned a loader without a batch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_loader_is_an_error_when_it_is_read(name):
    build, message = BAD[name]
    training = training_of(task_of(build, batch_size=2))
    with pytest.raises(TaskError, match=message):
        train(training)


@pytest.mark.parametrize("name", [name for name in BAD if name not in ("a smaller size", "all dropped")])
def test_and_before_anything_is_measured(name):
    message = BAD[name][1].replace("2", r"\d+")
    with pytest.raises(TaskError, match=message):
        inspect_task(task_of(BAD[name][0], batch_size=2), InspectOptions(), "cpu")


def test_batches_that_cannot_be_taken_apart_are_refused_by_a_search():
    graphs = task_of(lambda batch_size: [{"scalar": torch.tensor(1.0)}], batch_size=2)
    with pytest.raises(TaskError, match=r"yields batches \(dict\) without a tensor whose first dimension is the sampl"):
        inspect_task(graphs, InspectOptions(), "cpu")


@pytest.mark.parametrize(
    ("piece", "word"),
    [
        ({"build_dataset": list}, "build_dataset"),
        ({"build_dataset": list, "collate": list}, "build_dataset, collate"),
        ({"build_sampler": list}, "build_sampler"),
        ({"loader_options": {"num_workers": 1}}, "loader_options"),
        ({"shards_by_worker": True}, "shards_by_worker"),
    ],
)
def test_a_dataset_beside_it_is_refused(piece, word):
    with pytest.raises(TaskError, match=f"so that nothing is left for {word}. Give build_loader alone"):
        task_of(LOADERS["a list"], **piece)


def test_one_of_both_is_needed():
    with pytest.raises(TaskError, match=r"build_dataset is missing\. Wanted: def build_dataset"):
        autotune.Task(build_model=Line, compute_loss=mean_loss)


def test_it_takes_the_batch_size():
    with pytest.raises(TaskError, match=r"build_loader takes \(\), but is called with \(batch_size\)"):
        task_of(lambda: None)


def test_a_plan_that_sets_the_loader_is_refused():
    with pytest.raises(PlanError, match=r"the task builds its loaders itself .* got num_workers"):
        training_of(task_of(LOADERS["a list"]), data_loading=DataLoading(num_workers=0))


def test_a_file_may_hold_it(tmp_path):
    text = (
        "from torch import nn\nfrom torch.utils.data import DataLoader\n"
        "def build_model(): return nn.Linear(2, 1)\n"
        "def build_loader(batch_size): return DataLoader([1.0, 2.0], batch_size=batch_size)\n"
        "def compute_loss(model, batch): return model(batch).mean()\n"
    )
    path = tmp_path / "own_loader_model.py"
    path.write_text(text)
    task = autotune.load_task(str(path))
    assert next(iter(task.build_loader(2))).tolist() == [1.0, 2.0]
    assert dataclasses.replace(task, batch_size=2).batch_size == 2
