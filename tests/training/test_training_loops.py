"""A user's loop, in the shapes that people write: it trains as a stock loop does, or it says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from line_task import Stream, floats, line, training_of
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

import autotune
from autotune.data.positions import Position, Positions
from autotune.errors import TaskError
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.precision import Precision
from autotune.training.training import Training

EPOCHS = 3
MICRO, ACCUMULATE = 4, 2


pytestmark = pytest.mark.usefixtures("one_thread_only")


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def build_dataset() -> TensorDataset:
    """28 samples: three whole steps of 8, and a tail of 4."""
    inputs = torch.randn(28, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


TASK = autotune.Task(
    build_model, build_dataset, compute_loss, build_optimizer=build_optimizer, build_sampler=SequentialSampler
)


def applied(task: autotune.Task = TASK, **settings: Any) -> Training:
    batch = settings.pop("batch", Batch(micro=MICRO, accumulate=ACCUMULATE))
    return autotune.apply(Plan(settings=Settings(batch=batch, **settings)), task)


def stock() -> tuple[list[Tensor], list[Tensor]]:
    """The micro-batches' losses and the parameters in the end, of torch alone."""
    torch.manual_seed(0)
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    inputs, targets = build_dataset().tensors
    losses = []
    for _, start in itertools.product(range(EPOCHS), range(0, len(inputs), MICRO * ACCUMULATE)):
        samples = range(start, min(start + MICRO * ACCUMULATE, len(inputs)))
        for first in samples[::MICRO]:
            loss = compute_loss(model, (inputs[first : first + MICRO], targets[first : first + MICRO]))
            (loss * (MICRO / len(samples))).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, list(model.parameters())


def ahead(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """So many batches are fetched before the first of them is handed out."""
    waiting = deque(itertools.islice(batches, count))
    for batch in batches:
        waiting.append(batch)
        yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def in_lists(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while chunk := list(itertools.islice(batches, 3)):
        yield from chunk


def in_a_thread(loader: Any) -> Iterator[Any]:
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fetch() -> None:
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    while (batch := waiting.get()) is not None:
        yield batch
    thread.join()


class Bar:
    """As tqdm wraps an iterable."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def of_epochs(one: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    return lambda loader: itertools.chain.from_iterable(one(loader) for _ in range(EPOCHS))


LOOPS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "plain": of_epochs(iter),
    "one ahead": of_epochs(lambda loader: ahead(iter(loader), 1)),
    "three ahead": of_epochs(lambda loader: ahead(iter(loader), 3)),
    "one ahead of the epoch's end": lambda loader: ahead(of_epochs(iter)(loader), 1),
    "in lists": of_epochs(in_lists),
    "a whole epoch": of_epochs(lambda loader: iter(list(loader))),
    "all epochs at once": lambda loader: iter([batch for _ in range(EPOCHS) for batch in loader]),
    "a progress bar": of_epochs(lambda loader: iter(Bar(loader))),
    "enumerate": of_epochs(lambda loader: (batch for _, batch in enumerate(loader))),
    "zip": of_epochs(lambda loader: (batch for batch, _ in zip(loader, itertools.count(), strict=False))),
    "tee": of_epochs(lambda loader: (batch for batch, _ in zip(*itertools.tee(loader), strict=True))),
    "a thread": of_epochs(in_a_thread),
    "another container": of_epochs(lambda loader: (tuple(batch) for batch in loader)),
}


def by_step(training: Training, batches: Iterator[Any]) -> list[Tensor]:
    return [training.step(batch).loss for batch in batches]


def in_pieces(training: Training, batches: Iterator[Any]) -> list[Tensor]:
    losses = []
    for batch in batches:
        with training.forward_context():
            loss = compute_loss(training.model, batch)
        training.backward(loss)
        training.optimizer_step()
        losses.append(loss.detach())
    return losses


def fetching_before_backward(training: Training, batches: Iterator[Any]) -> list[Tensor]:
    """The next batch takes the last one's name while the device still computes."""
    losses = []
    batch = next(batches)
    while batch is not None:
        with training.forward_context():
            loss = compute_loss(training.model, batch)
        batch = next(batches, None)
        training.backward(loss)
        training.optimizer_step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("train", [by_step, in_pieces, fetching_before_backward])
@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop_trains_to_the_bit_as_a_stock_loop(loop, train):
    """However far ahead it fetches: every loss, and every parameter after three epochs with a tail each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = applied()
        losses = train(training, LOOPS[loop](training.loader))
    expected_losses, expected = stock()
    assert len(losses) == len(expected_losses)
    assert all(map(torch.equal, losses, expected_losses))
    assert all(map(torch.equal, training.model.parameters(), expected))


@pytest.mark.parametrize(
    "settings", [{"data_loading": DataLoading(num_workers=2, persistent_workers=True)}, {}], ids=str
)
def test_workers_that_fetch_ahead_change_nothing(settings):
    """Uneven micro-batches, 7 a step as 3 + 3 + 1: a loop that fetches ahead is the plain one to the bit."""
    plain, fetching = (applied(batch=Batch.of(7, 3), **settings) for _ in range(2))
    losses = by_step(plain, LOOPS["plain"](plain.loader))
    assert all(map(torch.equal, in_pieces(fetching, LOOPS["three ahead"](fetching.loader)), losses))
    assert all(map(torch.equal, fetching.model.parameters(), plain.model.parameters()))


def test_a_stream_may_be_fetched_ahead():
    """7 samples, 2 x 2 a step: means of 0 to 3, then of 4 to 6."""
    training = training_of(line(Stream(floats(7))), batch=Batch(micro=2, accumulate=2))
    for batch in ahead(iter(training.loader), 2):
        training.step(batch)
    assert training.model.weight.item() == 1.0 - 1.5 - 5.0


class Sentences:
    """A batch of a class of its own, without a tensor that can be seen."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def mean(self) -> Tensor:
        return torch.stack(self._values).mean()


COLLATED = {
    "a dict": lambda samples: {"x": torch.stack(samples), "texts": ["a", "b"]},
    "an object": Sentences,
    "numbers": lambda samples: [float(sample) for sample in samples],
    "the same mask in each": lambda samples: (MASK, torch.stack(samples)),
    "the very samples": lambda samples: samples,
}
MASK = torch.ones(())


def mean_of(model: nn.Module, batch: Any) -> Tensor:
    """Takes its batch apart, as losses do that pop the labels."""
    if isinstance(batch, dict):
        return model(batch.pop("x").mean())
    if isinstance(batch, Sentences):
        return model(batch.mean())
    return model(batch[1].mean() if isinstance(batch, tuple) else torch.as_tensor(batch).mean())


@pytest.mark.parametrize("kind", COLLATED)
def test_batches_of_any_kind_may_be_fetched_ahead(kind):
    """0 to 6 at 5 a step, as 2 + 2 + 1 and 2: the weight loses the means 2 and 5.5."""
    task = line(floats(7), collate=COLLATED[kind], compute_loss=mean_of)
    for loop in ("plain", "three ahead", "a whole epoch"):
        training = training_of(task, batch=Batch.of(5, 2))
        for batch in itertools.islice(LOOPS[loop](training.loader), 4):
            training.step(batch)
        assert training.model.weight.item() == pytest.approx(1.0 - 2.0 - 5.5), loop


def test_batches_in_another_order_keep_their_sizes():
    """``step`` knows each by its tensors."""
    training = training_of(line(floats(5)), batch=Batch.of(5, 2))
    assert [training.step(batch).count for batch in reversed(list(training.loader))] == [1, 2, 2]


def test_a_loop_of_ones_own_can_say_which_batch_a_loss_is_of():
    """0 to 4 as 2 + 2 + 1, the second left out with all of them at hand: the step's mean is that of 0, 1 and 4."""
    training = training_of(line(floats(5)), batch=Batch.of(5, 2))
    batches = list(training.loader)
    for batch in (batches[0], batches[2]):
        training.backward(training.model(batch).mean(), batch)
        training.optimizer_step()
    assert training.model.weight.item() == pytest.approx(1.0 - 5 / 3)


def test_a_batch_that_is_left_out_leaves_its_step_smaller():
    """0 to 7 in steps of 2 + 2; the loop leaves 0, 1 out: 2, 3 is a step of its own, and 4 to 7 the next."""
    for own in (True, False):
        training = training_of(line(floats(8)), batch=Batch(micro=2, accumulate=2))
        stepped = []
        for number, batch in enumerate(training.loader):
            if number == 0:
                continue
            if own:
                with training.forward_context():
                    loss = training.model(batch).mean()
                training.backward(loss)
                stepped.append(training.optimizer_step())
            else:
                stepped.append(training.step(batch).stepped)
        assert stepped == [True, False, True]
        assert training.model.weight.item() == 1.0 - 2.5 - 5.5


def test_a_loop_that_leaves_every_last_micro_batch_out_steps_all_the_same():
    """Two of each step's three are taken: after three of them, whosever they are, there is a step."""
    training = training_of(line(floats(18)), batch=Batch(micro=1, accumulate=3))
    stepped = [training.step(batch).stepped for number, batch in enumerate(training.loader) if number % 3 != 2]
    assert sum(stepped) == 4


def test_a_pass_over_the_loader_that_trains_nothing_is_forgotten():
    """For statistics, say; what follows are the positions of the batches that are trained on."""
    training = training_of(line(floats(5)), batch=Batch.of(5, 2))
    assert sum(batch.sum().item() for batch in training.loader) == 10.0
    next(iter(training.loader))
    in_own_pieces(training)
    assert training.model.weight.item() == pytest.approx(1.0 - 2.0)


def in_own_pieces(training: Training) -> None:
    for batch in training.loader:
        training.backward(training.model(batch).mean())
        training.optimizer_step()


def test_a_batch_that_is_kept_from_a_first_look_does_not_shift_the_others():
    """``sample = next(iter(loader))`` for a drawing of the model, and then the epoch: 0 to 4 is one step."""
    training = training_of(line(floats(5)), batch=Batch.of(5, 2))
    sample = next(iter(training.loader))
    in_own_pieces(training)
    assert training.model.weight.item() == pytest.approx(1.0 - 2.0)
    assert sample.tolist() == [0.0, 1.0]


def test_two_iterations_at_once_know_their_own_batches():
    """With one micro-batch a step they train in turn; the tails are tails: 0, 1 | 0, 1 | 2 | 2."""
    training = training_of(line(floats(3)), batch=Batch(micro=2))
    for one, other in zip(training.loader, training.loader, strict=True):
        assert training.step(one).count == training.step(other).count == len(one)
    assert training.model.weight.item() == 1.0 - 0.5 - 0.5 - 2.0 - 2.0


def test_steps_made_of_two_iterations_are_an_error():
    training = training_of(line(floats(8)), batch=Batch(micro=2, accumulate=2))
    batches = itertools.chain.from_iterable(zip(training.loader, training.loader, strict=True))
    with pytest.raises(TaskError, match="iterated twice at once, and optimizer steps of 2 micro-batches are made of"):
        by_step(training, batches)


def test_persistent_workers_serve_one_iteration():
    setting = DataLoading(num_workers=1, persistent_workers=True)
    training = training_of(line(floats(8)), batch=Batch(micro=2), data_loading=setting)
    first = iter(training.loader)
    next(first)
    next(iter(training.loader))
    with pytest.raises(TaskError, match="persistent workers serve one iteration at a time"):
        next(first)


def test_no_batch_is_kept():
    """Neither by the loader nor by what knows the batches again: once the loop lets go of it, it is gone."""
    training = training_of(line(floats(4)), batch=Batch(micro=2))
    batches = iter(training.loader)
    batch = next(batches)
    gone = weakref.ref(batch)
    del batch
    assert gone() is None


def test_positions_of_batches_that_nobody_trains_on_do_not_pile_up():
    positions = Positions()
    for _ in range(5000):
        positions.put(torch.zeros(1), Position(1, True))
    assert len(positions._waiting) < 2000


# What would train otherwise than it reads


def run(training: Training, *, before: Any = None, after: Any = None, steps: bool = True) -> None:
    """A loop of one's own, with something before or after each backward pass."""
    for loss in losses_of(training):
        if before:
            before(training)
        whole = training.backward(loss)
        if after:
            after(training, whole)
        if steps:
            training.optimizer_step()


def losses_of(training: Training) -> Iterator[Tensor]:
    for batch in training.loader:
        with training.forward_context():
            yield training.model(batch).mean()


@pytest.fixture(params=["fp32", "fp16"])
def training(request) -> Training:
    """Eight samples, four micro-batches of two, two of them a step; the loss is scaled under fp16."""
    return training_of(line(floats(8)), batch=Batch(micro=2, accumulate=2), precision=Precision(kind=request.param))


CLEAR = {
    "optimizer.zero_grad()": lambda training: training.optimizer.zero_grad(),
    "zeros in place": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda training: training.model.zero_grad(),
    "parameters": lambda training: [setattr(p, "grad", None) for p in training.model.parameters()],
}


@pytest.mark.parametrize("how", CLEAR)
def test_clearing_gradients_between_micro_batches_is_an_error(how, training):
    """A habit everywhere; it threw the earlier micro-batches away."""
    with pytest.raises(TaskError, match=r"would lose the earlier ones. Leave optimizer.zero_grad\(\) out"):
        run(training, before=CLEAR[how])


@pytest.mark.parametrize("how", CLEAR)
def test_clearing_gradients_between_steps_is_harmless(how, training):
    """Before a step's first micro-batch there are none."""
    for number, loss in enumerate(losses_of(training)):
        if number % 2 == 0:
            CLEAR[how](training)
        training.backward(loss)
        training.optimizer_step()
    assert training.model.weight.item() == 1.0 - 1.5 - 5.5


def test_clearing_gradients_before_the_step_is_an_error(training):
    with pytest.raises(TaskError, match=r"would step on nothing. Leave optimizer.zero_grad\(\) out"):
        run(training, after=lambda training, whole: whole and training.optimizer.zero_grad())


def clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def test_clipping_whole_gradients_is_right(training):
    """``backward`` says when they are whole: 1.5 and 5.5 are clipped to 1, whatever the loss scale."""
    run(training, after=lambda training, whole: whole and clip(training))
    assert training.model.weight.item() == pytest.approx(-1.0, abs=1e-4)


def test_clipping_parts_of_gradients_is_an_error(training):
    """It would clip sums of some micro-batches, scaled by the loss scaler."""
    with pytest.raises(TaskError, match=r"change gradients once they are whole: `if training.backward\(loss\)"):
        run(training, after=lambda training, whole: clip(training))


def test_hooks_on_gradients_are_no_change_of_them(training):
    """They run within backward: one that doubles, one that writes where a gradient has been added."""

    def keep(parameter: Tensor) -> None:
        parameter.grad.mul_(1.0)

    (weight,) = training.model.parameters()
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(keep)
    run(training)
    assert training.model.weight.item() == 1.0 - 3.0 - 11.0


def test_a_step_that_is_never_taken_is_an_error(training):
    """``backward`` alone trained nothing, without a word."""
    with pytest.raises(TaskError, match=r"the last optimizer step was not taken. Call training.optimizer_step\(\)"):
        run(training, steps=False)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("also", [True, False])
def test_the_optimizers_own_step_is_an_error(accumulate, also):
    """It would step on a part, or twice where ``optimizer_step`` is called too."""
    training = training_of(line(floats(8)), batch=Batch(micro=2, accumulate=accumulate))
    with pytest.raises(TaskError, match=r"Call training.optimizer_step\(\) in its place"):
        run(training, after=lambda training, whole: training.optimizer.step(), steps=also)


def test_a_step_before_training_makes_state_and_is_no_error():
    """As people do before they load a checkpoint, or to quiet a scheduler."""
    training = training_of(line(floats(4)), batch=Batch(micro=2, accumulate=2))
    training.optimizer.step()
    in_own_pieces(training)
    assert training.model.weight.item() == 1.0 - 1.5


def test_a_loop_that_never_gets_through_a_step_is_an_error():
    """``next(iter(loader))`` begins an epoch each time, and each time the step's first micro-batch was dropped."""
    training = training_of(line(floats(8)), batch=Batch(micro=2, accumulate=2))
    with pytest.raises(TaskError, match=r"no optimizer step is ever taken: .* after 1 of the 2 micro-batches"):
        by_step(training, (next(iter(training.loader)) for _ in range(3)))


def test_a_backward_pass_that_fails_leaves_no_half_gradient():
    """A loop that goes on after an error (out of memory) begins its step anew: 4 to 7, and nothing of 0 to 3."""

    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError("no room")

    training = training_of(line(floats(8)), batch=Batch(micro=2, accumulate=2))
    for number, batch in enumerate(training.loader):
        loss = training.model(batch)
        if number == 1:
            loss.register_hook(fails)
        with contextlib.suppress(RuntimeError):
            training.backward(loss.mean(), batch)
            training.optimizer_step()
    assert training.model.weight.item() == 1.0 - 5.5
