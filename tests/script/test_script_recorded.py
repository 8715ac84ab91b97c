"""A script's forward pass, recorded: it gives the same loss and gradients again, of a copy and of other data."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from autotune.script.trial.recorded import Recorder


def recorded(script, model, *batch):
    """What a loop makes of its model and its batch, as a function, with the recorder."""
    recorder = Recorder()

    def call(*args, **kwargs):
        recorder.called(model, (args, kwargs))
        outputs = model(*args, **kwargs)
        recorder.returned(outputs)
        return outputs

    loss = script(call, *batch)
    found = recorder.passed_back(loss)
    assert torch.overrides._get_current_function_mode() is None
    return found, recorder


def classified(call, x, y):
    return F.cross_entropy(call(x), y) / 2


def penalized(call, x, y):
    return nn.CrossEntropyLoss()(call(x), y) + 0.5 * MODEL.weight.square().sum()


def summed_in_place(call, x, y):
    loss = call(x).logsumexp(1).mean()
    loss += call(2 * x).square().mean()
    return loss


def written_into(call, x, y):
    parts = torch.zeros(2)
    out = call(x)
    parts[0], parts[1] = out.mean(), out[:, 0].max()
    return parts.sum()


def in_bf16(call, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(call(x), y)


MODEL = nn.Linear(6, 3)


@pytest.mark.parametrize("script", [classified, penalized, summed_in_place, written_into, in_bf16])
def test_a_copy_has_the_scripts_loss_and_gradients(script):
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    expected = torch.autograd.grad(script(MODEL, x, y), [*MODEL.parameters()])
    found, _ = recorded(script, MODEL, x, y)
    other = copy.deepcopy(MODEL)
    again = torch.autograd.grad(found(other, found.batch), [*other.parameters()])
    assert all(torch.equal(one, its) for one, its in zip(again, expected, strict=True))


def test_other_values_in_the_batch_have_their_own_loss():
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    found, _ = recorded(classified, MODEL, x, y)
    assert [tensor.shape for tensor in found.batch] == [(5, 6), (5,)]
    assert found(MODEL, (3 * x, y)).item() == classified(MODEL, 3 * x, y).item()


def test_only_what_leads_to_the_loss_is_made_again():
    """What is logged is not, nor what needs no gradient: that is of the batch."""
    teacher = nn.Linear(6, 3)

    def distilled(call, x):
        out = call(x)
        print((out.argmax(1) == 0).float().mean().item(), out.norm().item())
        with torch.no_grad():
            wanted = teacher(x).tanh()
        return (out - wanted).square().mean()

    x = torch.randn(5, 6)
    found, _ = recorded(distilled, MODEL, x)
    assert [one.run and one.run.__name__ for one in found.operations] == [None, "sub", "square", "mean"]
    assert torch.equal(found.batch[1], teacher(x).tanh().detach())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (lambda call, x: Doubled.apply(call(x)).sum(), "its loss goes by what is not seen (DoubledBackward)"),
        (lambda call, x: Doubled.apply(call(x).sum()), "its loss goes by what is not seen (DoubledBackward)"),
        (lambda call, x: MODEL.weight.sum(), "no loss of a call of its model is passed back"),
    ],
)
def test_what_cannot_be_recorded_is_told(script, why):
    found, recorder = recorded(script, MODEL, torch.randn(5, 6))
    assert found is None
    assert recorder.why == why


def test_what_the_script_holds_of_a_pass_is_left_to_it_and_held_again_until_backward():
    names = []

    def keeps_outputs(call, x):
        names.append(call(x))
        return (names[0] * 2).square().mean()

    found, recorder = recorded(keeps_outputs, MODEL, torch.randn(5, 6))
    held = tuple(recorder.held())
    assert held == found.operations[0].writes
    assert recorder.held()[held[0]] is names[0]
    assert names[0].shape == (5, 3)
    made = []
    model = copy.deepcopy(MODEL)
    model.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    loss = replace(found, held=held)(model, found.batch)
    assert made[0]() is not None
    assert replace(found, held=())(model, found.batch) is not None
    assert made[1]() is None
    del loss
    assert made[0]() is None


def test_a_block_that_ends_within_a_pass_is_told():
    """It takes the recorder off in its own place: what comes after is not seen."""
    recorder, x = Recorder(), torch.randn(5, 6)
    with torch.device("cpu"):
        recorder.called(MODEL, ((x,), {}))
        outputs = MODEL(x)
        recorder.returned(outputs)
    assert recorder.passed_back(outputs.square().mean()) is None
    assert recorder.why == "a `with` block that is not of autotune ends in a pass"
    assert recorder.lost_elements == torch.inf
    assert torch.overrides._get_current_function_mode() is None


class Wide(nn.Module):
    """Takes twice as many numbers as it is called with, and once more."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.is_seen = []

    def forward(self, x):
        self.is_seen.append(_get_current_dispatch_mode() is not None)
        return (self.one * x + 1).sum()


def test_what_a_call_without_gradients_takes_is_taken_again_at_its_place():
    """Before a pass as that begins; afterwards the next pass's. Calls of one shape are looked into once."""
    recorder, x, teacher = Recorder(), torch.randn(5, 6), Wide()

    def call_teacher(size):
        inputs = torch.ones(size)
        with torch.no_grad(), recorder.beside(teacher, inputs):
            teacher(inputs)

    found = []
    for before, within, after in ((0, (), 0), (0, (90, 40), 0), (50, (), 50), (0, (), 90)):
        if before:
            call_teacher(before)
        recorder.called(MODEL, ((x,), {}))
        outputs = MODEL(x)
        recorder.returned(outputs)
        for size in within:
            call_teacher(size)
        loss = outputs.square().mean()
        if after:
            call_teacher(after)
        found.append(recorder.passed_back(loss))
    assert all([one.run and one.run.__name__ for one in each.operations] == [None, "square", "mean"] for each in found)
    beside = [{number: taken for number, taken in each.beside.items() if taken} for each in found]
    assert beside == [{}, {1: 90 * 8}, {0: 50 * 8, 3: 50 * 8}, {3: 90 * 8}]
    assert teacher.is_seen == [True, True, True, False, False]
    plain, *others = found
    for each in others:
        made = []
        with MadeBytes(made):
            assert torch.equal(each(MODEL, each.batch), plain(MODEL, plain.batch))
        assert made == [taken for taken in each.beside.values() if taken]


class MadeBytes(TorchDispatchMode):
    """Notes what ``new_empty`` makes."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default:
            self.made.append(found.nbytes)
        return found


@pytest.mark.parametrize("passes_back", [lambda out: [out.mean(), out.sum()], lambda out: out.sum(1)])
def test_what_is_not_one_number_is_told(passes_back):
    recorder, x = Recorder(), torch.randn(5, 6)
    recorder.called(MODEL, ((x,), {}))
    outputs = MODEL(x)
    recorder.returned(outputs)
    assert recorder.passed_back(passes_back(outputs)) is None
    assert (recorder.lost_elements, recorder.why) == (5 * 6, "what is passed back is not one number")


def test_a_pass_of_others_is_none_that_was_lost():
    """A discriminator's, of what a generator has made."""
    recorder, x = Recorder(), torch.randn(5, 6)
    other = nn.Linear(3, 1)
    recorder.called(MODEL, ((x,), {}))
    outputs = MODEL(x)
    recorder.returned(outputs)
    assert recorder.passed_back(other(outputs.detach()).mean()) is None
    assert recorder.lost_elements < 0
