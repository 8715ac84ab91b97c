"""Out of memory at run time: half the micro-batch, twice the passes, the same optimizer steps."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import autotune
from autotune.errors import PlanError
from autotune.nested import rows_of
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers.optimizer_step import OptimizerStep

pytestmark = pytest.mark.usefixtures("one_thread_only")


class Limited(torch.autograd.Function):
    """What runs out of memory in its backward pass, above a number of samples."""

    @staticmethod
    def forward(context, x, most, error):
        context.most, context.error = most, error
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if len(gradient) > context.most:
            raise context.error
        return gradient, None, None


class Device:
    """Memory for so many samples, from its n-th forward pass on."""

    def __init__(self, most=10**9, begins_at=0, in_backward=False, error=None):
        self.most, self.begins_at, self.in_backward = most, begins_at, in_backward
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.passes = []

    def __call__(self, model, batch):
        x, y = batch
        self.passes.append(len(x))
        most = self.most if len(self.passes) > self.begins_at else 10**9
        if not self.in_backward and len(x) > most:
            raise self.error
        hidden = model[0](x)
        if self.in_backward:
            hidden = Limited.apply(hidden, most, self.error)
        return nn.functional.mse_loss(model[1](hidden), y)


def training(micro, accumulate, device=None, loss=None, on=True, calm_steps=100, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    plan = Plan(settings=Settings(batch=Batch(micro=micro, accumulate=accumulate), **settings))
    pieces = {"model": model, "dataset": data, "loss": loss or device or Device(), "batch_size": micro * accumulate}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return autotune.apply(plan, optimizer=optimizer, halve_when_out_of_memory=on, calm_steps=calm_steps, **pieces)


def trained(one, num_epochs=2):
    """The loss of each optimizer step, and the parameters after all of them."""
    losses, total, weight = [], 0.0, 0.0
    for batch in itertools.chain.from_iterable(one.loader for _ in range(num_epochs)):
        result = one.step(batch)
        total, weight = total + float(result.loss) * result.weight, weight + result.weight
        if result.stepped:
            losses.append(total / weight)
            total = weight = 0.0
    return losses, [parameter.detach().clone() for parameter in one.model.parameters()]


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_job_goes_on_as_if_it_had_had_the_halved_batch_from_the_start(in_backward):
    """Memory runs out in the second micro-batch of the third optimizer step: to the bit."""
    device = Device(most=4, begins_at=5, in_backward=in_backward)
    halved = training(8, 2, device)
    with pytest.warns(UserWarning, match=r"out of memory \(CUDA out of memory.*takes 4 samples in place of 8"):
        losses, parameters = trained(halved)
    expected, wanted = trained(training(4, 4))
    before, _ = trained(training(8, 2))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[:2] == before[:2]
    assert len(losses) == len(expected) == 4
    for mine, theirs in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert device.passes[4:8] == [8, 8, 4, 4]
    assert (halved.batch, halved.times_halved) == (Batch(micro=4, accumulate=4), 1)


@pytest.mark.medium
def test_from_the_first_step_on_it_is_the_same_to_the_bit():
    with pytest.warns(UserWarning, match="out of memory"):
        losses, parameters = trained(training(8, 2, Device(most=3)))
    expected, wanted = trained(training(2, 8))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(map(torch.equal, parameters, wanted))


def test_sums_over_counts_stay_exact():
    def summed(model, batch):
        x, y = batch
        if len(x) > 4:
            raise RuntimeError("CUDA error: out of memory")
        kept = y[:, 0] > 0
        return ((model(x) - y)[kept] ** 2).sum(), kept.sum()

    with pytest.warns(UserWarning, match="CUDA error: out of memory"):
        losses, _ = trained(training(8, 1, loss=summed))
    expected, _ = trained(training(4, 2, loss=summed))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_the_state_has_it():
    first = training(8, 2, Device(most=4))
    batches = iter(first.loader)
    with pytest.warns(UserWarning, match="out of memory"):
        first.step(next(batches))
    state = copy.deepcopy(first.state_dict())
    assert state["halved"]["times"] == 1
    second = training(8, 2, Device(most=4), on=False)
    second.load_state_dict(state)
    assert second.batch == Batch(micro=4, accumulate=4)
    assert float(second.step(next(iter(second.loader))).loss) == float(first.step(next(batches)).loss)
    assert all(map(torch.equal, second.model.parameters(), first.model.parameters()))


def micros(one, num_epochs=8):
    """Samples in a forward pass, after each optimizer step."""
    found = []
    for batch in itertools.chain.from_iterable(one.loader for _ in range(num_epochs)):
        if one.step(batch).stepped:
            found.append(one.batch.micro)
    return found


def test_it_grows_back_after_calm_steps_and_trains_as_a_static_split_does():
    """A neighbour takes memory in the second of 16 steps, and has gone by the third."""
    device = Device()

    def crowded(model, batch, loss=device):
        loss.most = 4 if 3 <= len(loss.passes) < 6 else 10**9
        return loss(model, batch)

    growing = training(8, 2, loss=crowded, calm_steps=3)
    said = "no lack of memory in 3 optimizer steps: a forward pass takes 8 samples again"
    with pytest.warns(UserWarning, match=said):
        losses, parameters = trained(growing, num_epochs=8)
    expected, wanted = trained(training(4, 4), num_epochs=8)
    assert growing.times_halved == 0
    assert len(losses) == 16
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:out of memory", "ignore:no lack")
def test_what_lacks_for_good_is_tried_ever_less_often():
    """Memory for 4: halved in step 1; the step after 2 calm ones tries 8 in vain, then after 4, then after 8."""
    device = Device(most=4)
    one = training(8, 2, device, calm_steps=2)
    assert micros(one, num_epochs=9) == [4, 8, *[4] * 3, 8, *[4] * 7, 8, *[4] * 4]
    assert [device.passes.count(samples) for samples in (8, 4)] == [1 + 3, 4 * 18]


@pytest.mark.filterwarnings("ignore:out of memory", "ignore:no lack")
def test_a_lack_long_after_it_grew_back_is_a_new_one():
    """In steps 1 and 8: each is over after 2 calm steps, since the second is 5 calm steps after the first."""
    device = Device()

    def crowded(model, batch, loss=device):
        loss.most = 4 if len(loss.passes) in (0, 19) else 10**9
        return loss(model, batch)

    assert micros(training(8, 2, loss=crowded, calm_steps=2), num_epochs=5) == [4, *[8] * 6, 4, 8, 8]


@pytest.mark.filterwarnings("ignore:out of memory", "ignore:no lack")
def test_a_resumed_job_grows_back_when_it_would_have():
    first = training(8, 2, Device(most=4), calm_steps=5)
    batches = iter(first.loader)
    for _ in range(4):
        first.step(next(batches))
    second = training(8, 2, calm_steps=5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert micros(second, num_epochs=3)[:4] == [4, 4, 8, 8]


def test_calm_steps_are_at_least_one():
    with pytest.raises(PlanError, match="calm_steps: at least 1 optimizer step"):
        training(8, 2, calm_steps=0)


def test_without_being_asked_for_it_ends():
    with pytest.raises(torch.OutOfMemoryError):
        trained(training(8, 2, Device(most=4), on=False))


@pytest.mark.medium
def test_what_cannot_be_helped_is_raised_with_the_reason():
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError) as ended:
        trained(training(8, 2, Device(most=0)))
    assert ended.value.__notes__ == ["autotune: the micro-batch cannot be halved: one sample does not fit."]

    with pytest.raises(ValueError, match="no memory"):
        trained(training(8, 2, Device(most=4, error=ValueError("no memory of that"))))


def test_a_step_within_the_backward_pass_cannot_be_made_again():
    with pytest.raises(PlanError, match="cannot be made again"):
        training(8, 1, Device(), optimizer_step=OptimizerStep(kind="in_backward"))


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]


def test_samples_are_cut_out_of_nested_batches():
    batch = {"record": Record(torch.arange(6).reshape(3, 2), ["a", "b", "c"]), "scale": torch.ones(2), "n": 3}
    part = rows_of(batch, 3, slice(1, 3))
    assert part["record"].x.tolist() == [[2, 3], [4, 5]]
    assert part["record"].names == ["b", "c"]
    assert part["scale"].tolist() == [1, 1]
    assert batch["record"].names == ["a", "b", "c"]
    images = [torch.ones(3, 1), torch.ones(2, 2), torch.ones(4, 4)]
    with pytest.raises(ValueError, match="3 tensors of 3 rows"):
        rows_of([torch.ones(3, 1)] * 3, 3, slice(0, 1))
    assert [len(one) for one in rows_of([torch.ones(2, 1), torch.ones(2)], 2, slice(0, 1))] == [1, 1]
    assert rows_of(images[1:] + images[1:2], 3, slice(0, 1)) == images[1:2]
