"""A job that ends at any step and is resumed from its state trains as one that never ended, to the bit."""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from line_task import Stream, floats, line, training_of
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import autotune
from autotune.errors import PlanError, TaskError
from autotune.plan import Plan
from autotune.randomness import seed_everything
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.precision import Precision
from autotune.training.training import Training

EPOCHS = 3


pytestmark = pytest.mark.usefixtures("one_thread_only")


class Augmented(Dataset[Any]):
    """Twenty-two samples with noise of three generators."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3) + random.random() + float(numpy.random.rand())
        return torch.full((3,), index / 22) + 0.1 * noise, index % 2


class Numbers(IterableDataset[Any]):
    """Twenty-two samples as a stream, in an order that is shuffled as it begins."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(22).tolist():
            yield torch.full((3,), index / 22), index % 2


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def build(dataset: type = Augmented, task: dict[str, Any] | None = None, **settings: Any) -> Training:
    """Steps of 4 + 4 samples (a tail of 4 + 2), as a job that starts builds them."""
    settings = {"batch": Batch(micro=4, accumulate=2), **settings}
    job = autotune.Task(build_model, dataset, compute_loss, build_optimizer=build_optimizer, **(task or {}))
    return autotune.apply(Plan(settings=Settings(**settings)), job)


def train(training: Training) -> Iterator[Tensor]:
    """The loss of each micro-batch; the job may end, or save, after any."""
    for _ in range(training.epoch, EPOCHS):
        for batch in training.loader:
            yield training.step(batch).loss


def saved(training: Training) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(training.state_dict(), file)
    file.seek(0)
    return file


def resumed(make: Callable[[], Training], file: io.BytesIO) -> Training:
    """As another process would: built anew, and whatever was random by then is not what it was."""
    training = make()
    seed_everything(987)
    training.load_state_dict(torch.load(file, weights_only=True))
    return training


def assert_goes_on(make: Callable[[], Training], ends: Any, loop: Callable[[Training], Iterator[Tensor]] = train):
    """A job that ends after each of these micro-batches loses nothing."""
    whole = make()
    losses = list(loop(whole))
    for end in ends:
        first = make()
        running = loop(first)
        begun = list(itertools.islice(running, end))
        again = resumed(make, saved(first))
        running.close()
        assert torch.equal(torch.stack([*begun, *loop(again)]), torch.stack(losses)), f"after {end}"
        for one, other in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
            assert torch.equal(one, other)


EVERYWHERE = range(19)
"""Before, between, and after the three epochs' six micro-batches."""
FEW = (0, 1, 4, 6, 7, 9, 12, 17)

JOBS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"batch": Batch(micro=8)},
    "fp16": {"precision": Precision(kind="fp16")},
    "uneven": {"batch": Batch.of(8, 3)},
    "torch's own shuffle": {"task": {"build_sampler": RandomSampler}},
    "with replacement": {"task": {"build_sampler": lambda data: WeightedRandomSampler([1.0] * 22, 22)}},
    "a loader's generator": {"task": {"loader_options": {"generator": torch.Generator()}}},
    "a dropped tail": {"task": {"loader_options": {"drop_last": True}}},
    "a cache": {"data_loading": DataLoading(num_workers=0, cache="host")},
}


@pytest.mark.medium
def test_a_job_may_end_after_any_micro_batch():
    assert_goes_on(build, EVERYWHERE)


@pytest.mark.parametrize("name", JOBS)
def test_every_kind_of_job_goes_on(name):
    assert_goes_on(lambda: build(**JOBS[name]), FEW)


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 4}], ids=str)
def test_loader_workers_go_on_with_what_they_would_have_drawn(options):
    """The dataset's noise is drawn in two workers."""
    assert_goes_on(lambda: build(data_loading=DataLoading(num_workers=2, **options)), (0, 3, 6, 10))


def test_persistent_workers_go_on_in_the_first_epoch():
    setting = DataLoading(num_workers=2, persistent_workers=True)
    training = build(data_loading=setting)
    losses = list(itertools.islice(train(training), 6))
    first = build(data_loading=setting)
    running = train(first)
    begun = list(itertools.islice(running, 3))
    again = resumed(lambda: build(data_loading=setting), saved(first))
    assert torch.equal(torch.stack([*begun, *itertools.islice(train(again), 3)]), torch.stack(losses))


class Plain(Augmented):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index / 22), index % 2


@pytest.mark.medium
@pytest.mark.parametrize("sampler", [None, RandomSampler])
def test_persistent_workers_of_a_dataset_without_chance_go_on_anywhere(sampler):
    """Their processes are seeded once, in the first epoch: a resumed job draws no seed in another."""
    setting = DataLoading(num_workers=2, persistent_workers=True)
    assert_goes_on(lambda: build(Plain, {"build_sampler": sampler}, data_loading=setting), (0, 5, 6, 9, 12))


@pytest.mark.medium
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on(workers):
    assert_goes_on(lambda: build(Numbers, data_loading=DataLoading(num_workers=workers)), (0, 1, 4, 6, 7, 12, 13))


def ahead(training: Training) -> Iterator[Tensor]:
    """Fetches two batches before it trains on the first, also beyond an epoch's end."""
    batches = itertools.chain.from_iterable(training.loader for _ in range(training.epoch, EPOCHS))
    waiting = list(itertools.islice(batches, 2))
    while waiting:
        yield training.step(waiting.pop(0)).loss
        waiting += itertools.islice(batches, 1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_fetches_ahead_goes_on(workers):
    """What was fetched and not trained on is fetched again."""
    assert_goes_on(lambda: build(Plain, data_loading=DataLoading(num_workers=workers)), range(0, 18, 3), ahead)


def test_an_epoch_that_was_listed_goes_on():
    """The loader is through with it, and the training is not."""

    def listed(training: Training) -> Iterator[Tensor]:
        for _ in range(training.epoch, EPOCHS):
            batches = list(training.loader)
            while batches:
                yield training.step(batches.pop(0)).loss

    assert_goes_on(lambda: build(Plain), FEW, listed)


def test_pieces_of_a_loop_go_on():
    def in_pieces(training: Training) -> Iterator[Tensor]:
        for _ in range(training.epoch, EPOCHS):
            for batch in training.loader:
                with training.forward_context():
                    loss = compute_loss(training.model, batch)
                training.backward(loss)
                training.optimizer_step()
                yield loss.detach()

    assert_goes_on(build, FEW, in_pieces)


def test_an_epoch_that_a_loop_has_left_goes_on():
    """As where a job saves once it has its steps, or was interrupted: the for loop is over, and the epoch is not."""
    losses = list(train(build()))
    first = build()
    begun = list(itertools.islice(train(first), 9))
    assert first.epoch == 1
    assert torch.equal(torch.stack([*begun, *train(resumed(build, saved(first)))]), torch.stack(losses))


def test_the_epoch_of_the_next_micro_batch():
    training = build()
    epochs = []
    for _ in train(training):
        epochs.append(training.epoch)
    assert epochs == [0] * 6 + [1] * 6 + [2] * 6
    assert training.epoch == 3


def test_a_state_that_was_loaded_is_the_state():
    """Saved again at once, or resumed twice, it is the same."""
    first = build()
    list(itertools.islice(train(first), 9))
    state = saved(first)
    rest = list(train(resumed(build, state)))
    state.seek(0)
    again = list(train(resumed(build, saved(resumed(build, state)))))
    assert len(rest) == 9
    assert torch.equal(torch.stack(rest), torch.stack(again))


def test_a_state_is_mapped_to_no_device_by_chance():
    """Random states belong on the CPU, wherever a checkpoint was mapped to."""
    training = build()
    state = torch.load(saved(training), weights_only=True, map_location="meta")
    assert state["random"]["torch"].device.type == "meta"
    assert training.state_dict()["random"]["torch"].device.type == "cpu"


def test_a_count_on_the_device_is_kept_in_the_middle_of_a_step():
    """(loss_sum, count): 0 + 1 of 2, then 2 + 3 of 2: the whole step's mean is 1.5, resumed in its middle."""

    def make() -> Training:
        return training_of(line(floats(4), compute_loss=total), batch=Batch(micro=2, accumulate=2))

    def total(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).sum(), torch.tensor(len(batch))

    first = make()
    batches = iter(first.loader)
    first.step(next(batches))
    again = resumed(make, saved(first))
    assert [again.step(batch).stepped for batch in again.loader] == [True]
    assert again.model.weight.item() == 1.0 - 1.5


# Killed


KILLED: dict[str, dict[str, Any]] = {
    "two workers, fp16": {"data_loading": DataLoading(num_workers=2), "precision": Precision(kind="fp16")},
    "a stream": {"dataset": Numbers, "data_loading": DataLoading(num_workers=1)},
}


def job(kind: str, path: Path, driver: socket.socket) -> None:
    """Goes on where it was; says each loss once its state is saved, and waits to be told to go on."""
    seed_everything(987)
    training = build(**KILLED[kind])
    if path.exists():
        training.load_state_dict(torch.load(path, weights_only=True))
    for loss in train(training):
        torch.save(training.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)
        driver.sendall(f"{loss.item().hex()}\n".encode())
        driver.recv(1)
    driver.sendall(b"\n")


def run_until(kind: str, path: Path, num: int | None) -> list[str]:
    """Losses that a job, in a process of its own, said before it was killed; or all that were left."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            job(kind, path, theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    losses = []
    with ours, ours.makefile() as said:
        while line := said.readline().strip():
            losses.append(line)
            if len(losses) == num:
                os.kill(pid, signal.SIGKILL)
                break
            ours.sendall(b".")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if num else 0)
    return losses


@pytest.mark.medium
@pytest.mark.parametrize("kind", KILLED)
def test_a_killed_job_goes_on(kind, tmp_path):
    """Killed in the middle of a step, and at the end of one in the next epoch."""
    whole = [loss.item().hex() for loss in train(build(**KILLED[kind]))]
    path = tmp_path / "job.pt"
    killed = [loss for num in (3, 5) for loss in run_until(kind, path, num)]
    assert killed + run_until(kind, path, None) == whole
    assert len(whole) == 18


# What does not belong together


def refused(training: Training, state: Any) -> str:
    """The message; nothing is changed."""
    before = torch.load(saved(training), weights_only=True)
    with pytest.raises(PlanError) as raised:
        training.load_state_dict(state)
    after = torch.load(saved(training), weights_only=True)
    pairs = zip(torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    return str(raised.value)


def test_other_settings_are_refused():
    training = build()
    list(itertools.islice(train(training), 3))
    message = refused(training, build(batch=Batch(micro=8), precision=Precision(kind="bf16")).state_dict())
    assert 'batch {"micro": 8} → {"accumulate": 2, "micro": 4}' in message
    assert 'precision {"kind": "bf16"} → "as it stands"' in message
    assert "Apply the plan that it was saved under" in message


def other(**pieces: Any) -> Training:
    job = {"build_model": build_model, "build_dataset": Augmented, "build_optimizer": build_optimizer}
    task = autotune.Task(**{**job, "compute_loss": compute_loss, **pieces})
    return autotune.apply(Plan(settings=Settings(batch=Batch(micro=4, accumulate=2))), task)


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 2))


def deeper() -> nn.Module:
    return nn.Sequential(*build_model(), nn.Linear(2, 2))


OTHERS = {
    "a wider model": ({"build_model": wider}, "another model: 0.weight float32 [9, 3] → float32 [8, 3], 0.bias"),
    "a deeper model": ({"build_model": deeper}, "another model: it has 4.weight, 4.bias too"),
    "an optimizer": (
        {"build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
        "another optimizer: only one of them has amsgrad, betas, capturable, 5 more",
    ),
    "groups": (
        {"build_optimizer": lambda parameters: torch.optim.AdamW([{"params": [p]} for p in parameters])},
        "another optimizer: parameters in its groups [1, 1, 1, 1, 1, 1] → [6]",
    ),
    "a dataset": ({"build_dataset": lambda: floats(7)}, "other data: samples in an epoch 7 → 22"),
    "an order": (
        {"build_sampler": torch.utils.data.SequentialSampler},
        "other data: generators that the order of samples comes from 0 → 1",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_built_otherwise_is_refused(name):
    pieces, expected = OTHERS[name]
    assert expected in refused(build(), other(**pieces).state_dict())


@pytest.mark.parametrize("state", [{}, None, 3, {"model": {}}, {0: 1}], ids=str)
def test_what_is_no_state_is_refused(state):
    message = refused(build(), state)
    assert message.startswith("load_state_dict takes what Training.state_dict() of this version returned, but got")


def test_a_states_own_model_is_refused_as_one():
    assert "A model's own state goes to training.model" in refused(build(), build_model().state_dict())


def test_a_step_that_is_whole_and_not_taken_is_no_place_to_end():
    training = training_of(line(floats(4)), batch=Batch(micro=4))
    for batch in training.loader:
        training.backward(training.model(batch).mean())
    with pytest.raises(TaskError, match=r"and training.optimizer_step\(\). Call it after that"):
        training.state_dict()


def test_a_stream_that_ends_before_its_place_is_an_error():
    def of(count: int) -> Training:
        return training_of(line(Stream(floats(count))), batch=Batch(micro=1))

    first = of(6)
    batches = iter(first.loader)
    for _ in range(4):
        first.step(next(batches))
    again = resumed(lambda: of(3), saved(first))
    with pytest.raises(TaskError, match="has 3 micro-batches, but 4 of it were trained on"):
        next(iter(again.loader))
