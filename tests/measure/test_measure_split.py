"""Whether a split changes the gradient: measured, by the same arithmetic as a job's."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.errors import TaskError
from autotune.measure.checks.split import measure_split
from autotune.measure.errors import NonFiniteLoss
from autotune.randomness import seed_everything
from autotune.task import Task
from autotune.techniques.batch import SPLIT_TOLERANCE
from autotune.testing.zoo import ZOO

CPU = torch.device("cpu")
CHANGES = {"cnn", "resnet"}


def _measure(task, num_samples=16):
    seed_everything(0)
    model, dataset = task.build_model(), task.build_dataset()
    samples = list(dataset) if task is ZOO["stream"] else [dataset[index] for index in range(len(dataset))]
    return measure_split(task, model, samples[:num_samples], CPU), model


@pytest.mark.parametrize("name", sorted(ZOO.keys() - CHANGES))
def test_a_split_without_batch_statistics_is_exact(name):
    assert _measure(ZOO[name])[0].error < 1e-5


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_split_under_batch_norm_changes_the_gradient(name):
    assert _measure(ZOO[name])[0].error > 10 * SPLIT_TOLERANCE


def _under(context):
    """The zoo's text model, whose loss turns autocast on by itself."""

    def compute_loss(model, batch):
        with context():
            return ZOO["gpt"].compute_loss(model, batch)

    return dataclasses.replace(ZOO["gpt"], compute_loss=compute_loss)


@contextlib.contextmanager
def _turned_on_by_hand():
    torch.set_autocast_enabled("cpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


OWN = {
    "block": lambda: torch.autocast("cpu", torch.bfloat16),
    "amp": lambda: torch.amp.autocast("cpu"),
    "older name": lambda: torch.cpu.amp.autocast(),
    "by hand": _turned_on_by_hand,
}


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast")
@pytest.mark.parametrize("how", OWN)
def test_the_rounding_of_a_models_own_autocast_is_no_changed_gradient(how):
    """bf16 alone changes the gradient by 0.2 %, above the tolerance of a split; without it the split is exact."""
    found, _ = _measure(_under(OWN[how]))
    assert found.own_autocast
    assert found.error < 1e-5
    assert not found.rounded


def test_autocast_that_decorates_forward_is_the_models_own_too():
    def build_model():
        model = ZOO["mlp"].build_model()
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    found, _ = _measure(dataclasses.replace(ZOO["mlp"], build_model=build_model))
    assert (found.own_autocast, found.error < 1e-5) == (True, True)


def test_autocast_that_is_turned_off_or_is_another_devices_is_none():
    """As transformers turns it off around rotary embeddings."""
    for context in (lambda: torch.autocast("cpu", enabled=False), lambda: torch.autocast("cuda", enabled=False)):
        assert not _measure(_under(context))[0].own_autocast
    assert not _measure(ZOO["gpt"])[0].own_autocast


def test_batch_norm_under_an_autocast_of_its_own_still_changes_the_gradient():
    def compute_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return ZOO["cnn"].compute_loss(model, batch)

    found, _ = _measure(dataclasses.replace(ZOO["cnn"], compute_loss=compute_loss))
    assert found.own_autocast
    assert found.error > 10 * SPLIT_TOLERANCE


def test_a_model_whose_types_need_autocast_is_compared_under_it():
    """Inputs in bf16 on weights in fp32: without autocast that raises."""

    def compute_loss(model, batch):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x.bfloat16()).float(), y)

    found, _ = _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert (found.own_autocast, found.rounded) == (True, True)
    assert SPLIT_TOLERANCE < found.error < 0.01


def test_a_model_in_half_precision_rounds():
    """0.2 to 0.3 % by rounding alone."""

    def compute_loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    task = dataclasses.replace(
        ZOO["mlp"], build_model=lambda: ZOO["mlp"].build_model().bfloat16(), compute_loss=compute_loss
    )
    found, _ = _measure(task)
    assert (found.own_autocast, found.rounded) == (False, True)
    assert SPLIT_TOLERANCE < found.error < 0.01


def test_autocast_is_as_it_was_afterwards():
    before = torch.set_autocast_enabled
    _measure(_under(OWN["block"]))
    assert torch.set_autocast_enabled is before
    assert not torch.is_autocast_enabled("cpu")


def _with_hook(register, hook):
    def build_optimizer(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        getattr(optimizer, register)(hook)
        return optimizer

    return dataclasses.replace(ZOO["mlp"], build_optimizer=build_optimizer)


def test_a_hook_that_returns_something_is_found_before_a_step_is():
    """``lambda *_: clip(...)`` returns the norm, which torch refuses at the first step."""
    task = _with_hook("register_step_pre_hook", lambda *_: torch.tensor(1.0))
    with pytest.raises(TaskError, match=r"step pre-hook of the optimizer.*returned Tensor.*set max_grad_norm"):
        _measure(task)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_with_other_arguments_is_found_before_a_step_is(register):
    task = _with_hook(register, lambda: None)
    with pytest.raises(TaskError, match=r"takes \(\), but torch calls it with \(optimizer, args, kwargs\)"):
        _measure(task)


def test_hooks_that_torch_can_call_see_gradients_once():
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append(all(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    assert _measure(_with_hook("register_step_pre_hook", hook))[0].error < 1e-5
    assert seen == [True]


def test_what_the_task_clips_does_not_hide_what_a_split_changes():
    """Clipped to a millionth, two gradients differ as much as they did."""
    whole, clipped = (_measure(dataclasses.replace(ZOO["cnn"], max_grad_norm=norm))[0].error for norm in (None, 1e-6))
    assert clipped == whole


def test_a_mean_over_tokens_changes_where_lengths_vary():
    """The same loss as (loss_sum, count) does not."""

    def mean_over_tokens(model, batch):
        loss, count = ZOO["token_loss"].compute_loss(model, batch)
        return loss / count

    averaged = dataclasses.replace(ZOO["token_loss"], compute_loss=mean_over_tokens)
    assert _measure(averaged)[0].error > 10 * SPLIT_TOLERANCE


def test_the_difference_by_hand():
    """loss = mean(x)^2 w: gradient 4 for (0, 3, 3); 2/3 * 1.5^2 + 1/3 * 3^2 = 4.5 in parts of 2 and 1: 12.5 % more."""
    model = nn.Linear(1, 1, bias=False)

    def compute_loss(model, batch):
        return batch.mean().square() * model.weight.sum()

    samples = [torch.tensor([0.0]), torch.tensor([3.0]), torch.tensor([3.0])]
    task = Task(lambda: model, lambda: samples, compute_loss)
    assert measure_split(task, model, samples, CPU).error == pytest.approx(0.125, rel=1e-6)


def test_parameters_statistics_and_gradients_are_left_as_they_were():
    seed_everything(0)
    before = ZOO["cnn"].build_model().state_dict()
    _, model = _measure(ZOO["cnn"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_one_sample_cannot_be_split():
    found, _ = _measure(ZOO["mlp"], num_samples=1)
    assert (found.error, found.reason) == (None, "one sample cannot be split")


def test_a_model_of_one_batch_size_cannot_be_split():
    def compute_loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.reshape(16, 6)), y)

    found, _ = _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert found.error is None
    assert "RuntimeError on part of a batch" in found.reason


def test_a_loss_that_is_not_a_number_is_found_at_the_first_step():
    def compute_loss(model, batch):
        return ZOO["mlp"].compute_loss(model, batch) * float("inf")

    with pytest.raises(NonFiniteLoss) as caught:
        _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert caught.value.step == 1


def test_a_loss_that_is_no_scalar_is_named():
    def compute_loss(model, batch):
        return model(batch[0])

    with pytest.raises(TaskError, match=r"scalar tensor.*shape \(16, 3\)"):
        _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))


def test_a_loss_without_a_gradient_has_nothing_to_compare():
    model = nn.Linear(1, 1)
    samples = [torch.ones(1)] * 4
    spare = nn.Parameter(torch.zeros(1))
    task = Task(
        lambda: model, lambda: samples, lambda m, b: m(b).mean(), build_optimizer=lambda _: torch.optim.SGD([spare])
    )
    found = measure_split(task, model, samples, CPU)
    assert found.error is None
    assert found.reason == "no parameter of the optimizer gets a gradient"
