"""What must not be guessed: tensors changed since, modules that only look like another, gradients of logits."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from layer_runs import TOKENS, assert_same, run, twins
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from autotune.layers import convert, restore


class Changed(nn.Module):
    """A normalisation's output is changed in place, unseen by autograd, before the linear layer takes it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.norm, self.linear, self.change = nn.LayerNorm(32), nn.Linear(32, 32), change

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        with torch.no_grad():
            self.change(x)
        return self.linear(x)


def zero_the_first(x: Tensor) -> None:
    x[:, 0] = 0.0


@pytest.mark.parametrize("change", [lambda x: x.mul_(3), zero_the_first, lambda x: x.view(-1).mul_(2)])
def test_an_output_that_was_changed_in_place_is_kept_itself(change: Callable[[Tensor], object]):
    stock, ours = twins(lambda: Changed(change))
    x = torch.randn(TOKENS)
    assert_same(run(ours, x), run(stock, x))


class Twice(nn.Module):
    """A value that two ways lead to, one of which could be computed within its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.conv(x + F.relu(x))


def test_a_value_that_two_need_is_not_overwritten_by_one():
    stock, ours = twins(Twice)
    x = torch.randn(2, 4, 8, 8)
    assert_same(run(ours, x), run(stock, x))


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + 0.1 * x if self.training else x.relu()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + self.slope * x


LOOKALIKES: dict[str, Callable[[], nn.Module]] = {
    "clipped": lambda: Written(lambda x: x.clamp(0, 20)),
    "no gradient": lambda: Written(lambda x: x.relu().detach() + 0 * x),
    "in training": lambda: Sometimes().eval(),
    "annealed": Annealed,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_module_that_only_looks_like_an_activation_is_its_own(name: str):
    stock, ours = twins(LOOKALIKES[name])
    for model in (stock, ours):
        model.train()
        model.slope = 0.5  # type: ignore[assignment]
    x = 40 * torch.randn(TOKENS)
    assert_same(run(ours, x), run(stock, x))


def test_looking_at_a_module_draws_no_random_numbers_and_calls_no_hook():
    model, calls = Written(lambda x: x + torch.randn_like(x)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls


class Head(nn.Module):
    """A head over a vocabulary, whose logits somebody looks at."""

    def __init__(self, look: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.head, self.look = nn.Linear(16, 256), look

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        self.look(logits)
        return F.cross_entropy(logits, torch.arange(len(x)) % 256)


@pytest.mark.parametrize(
    "look", [lambda logits: logits.register_hook(lambda grad: 3 * grad), lambda logits: logits.retain_grad()]
)
def test_hooks_on_logits_are_called(look: Callable[[Tensor], object]):
    stock, ours = twins(lambda: Head(look))
    x = torch.randn(1024, 16)
    assert_same(run(ours, x), run(stock, x))


@pytest.mark.parametrize("target", [torch.zeros(9, dtype=torch.long), torch.zeros(8, dtype=torch.int32)])
def test_targets_that_stock_refuses_are_refused(target: Tensor):
    class Loss(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return F.cross_entropy(logits, target)

    model = convert(nn.Sequential(nn.Linear(2, 64), Loss()))
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(8, 2))


def test_copies_go_by_what_a_class_says_of_its_state():
    """An LSTM holds weak references, which it leaves out."""
    model = convert(nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x)[0], model(x)[0])


def test_parametrizations_come_and_go():
    x = torch.randn(2, 8)
    before = convert(parametrizations.weight_norm(nn.Linear(8, 8)))
    wanted = before(x)
    parametrize.remove_parametrizations(before, "weight")
    torch.testing.assert_close(before(x), wanted)
    after = parametrizations.weight_norm(convert(nn.Linear(8, 8)))
    wanted = after(x)
    assert torch.equal(restore(after)(x), wanted)


def test_a_class_that_registers_its_subclasses_is_left_alone():
    registry: dict[str, type] = {}

    class Base(nn.Module):
        def __init_subclass__(cls) -> None:
            registry[cls.__name__] = cls

    class Own(Base):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    convert(Own())
    assert registry == {"Own": Own}


@pytest.mark.parametrize("build", [lambda: nn.MaxPool2d(2), lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 8))])
def test_empty_batches(build: Callable[[], nn.Module]):
    ours = convert(build(), recompute=True)
    x = torch.randn(0, 4, 8, 8, requires_grad=True)
    ours(x * 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@functools.lru_cache
def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length).tril()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x)) * causal_mask(4)


def test_what_a_forward_caches_in_the_examples_run_is_real():
    causal_mask.cache_clear()
    model = convert(Masked(), torch.randn(4, 4))
    assert torch.equal(causal_mask(4), torch.ones(4, 4).tril())
    model(torch.randn(4, 4)).sum().backward()


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + torch.rand(4))


def test_an_examples_run_draws_no_random_numbers():
    state = torch.get_rng_state()
    convert(Noisy(), torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("padding", [0, 1])
def test_where_all_of_a_pooling_window_is_minus_infinity_its_gradient_stays_within_the_input(padding: int):
    stock, converted = nn.MaxPool2d(3, 2, padding), convert(nn.MaxPool2d(3, 2, padding))
    image = torch.randn(1, 1, 9, 9)
    image[..., :4, :4] = -torch.inf
    grads = []
    for layer in (stock, converted):
        x = image.clone().requires_grad_()
        output = layer(x)
        output.backward(torch.arange(1.0, output.numel() + 1).view(output.shape))
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_frozen_transposed_convolution_whose_output_is_padded_by_more_than_its_stride():
    layer = nn.ConvTranspose2d(3, 4, 3, stride=1, output_padding=1, dilation=2).requires_grad_(False)
    image = torch.randn(2, 3, 8, 8)
    grads = []
    for one in (layer, convert(copy.deepcopy(layer))):
        x = image.clone().requires_grad_()
        one(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_stocks(layout: torch.layout):
    pieces = [torch.randn(2, 4), torch.randn(3, 4)]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    nested = torch.nested.nested_tensor(pieces, layout=layout, requires_grad=True)
    outputs = []
    for one in (model, convert(copy.deepcopy(model))):
        torch.manual_seed(0)
        outputs.append([part.detach() for part in one(nested).unbind()])
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_sparse_tensors_are_stocks():
    x = torch.randn(3, 4).to_sparse().requires_grad_()
    assert torch.equal(convert(nn.ReLU())(x).to_dense(), x.to_dense().relu())


def test_a_gradient_of_logits_that_are_not_kept_is_refused():
    seen: list[Tensor] = []
    loss = convert(Head(seen.append))(torch.randn(1024, 16))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, seen)


def test_gradients_of_a_batch_of_outputs_through_bits_are_refused():
    x = torch.randn(4, 4, requires_grad=True)
    output = convert(nn.Dropout())(x)
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.autograd.grad(output, x, torch.ones(2, 4, 4), is_grads_batched=True)


def test_a_converted_model_runs_on_the_meta_device():
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()).to("meta"))
    x = torch.randn(2, 3, 8, 8, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
