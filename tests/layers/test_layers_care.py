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


@pytest.mark.parametrize("values", [(-torch.inf, -torch.inf), (torch.inf, 1.0), (0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("padding", [0, 1])
def test_of_a_pooling_windows_equal_elements_the_first_has_the_gradient(padding: int, values: tuple[float, float]):
    stock, converted = nn.MaxPool2d(3, 2, padding), convert(nn.MaxPool2d(3, 2, padding))
    image = torch.randn(1, 1, 9, 9)
    image[..., :4, :4] = torch.tensor(values).repeat(4, 2)
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


INPLACE: dict[str, Callable[[], nn.Module]] = {
    "a linear layer's": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(inplace=True)),
    "a flattened tensor's": lambda: nn.Sequential(nn.Flatten(1), nn.Dropout(0.5, inplace=True), nn.Linear(256, 4)),
}


@pytest.mark.parametrize("name", INPLACE)
def test_an_output_may_be_worked_on_in_place(name: str):
    stock, ours = twins(INPLACE[name])
    x = torch.randn(TOKENS)
    assert_same(run(ours, x), run(stock, x))


class Hooked(nn.Module):
    """A hook on logits that are gone when the loss is formed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x.bfloat16())
        logits.register_hook(torch.zeros_like)
        logits = logits.float()
        return F.cross_entropy(logits, torch.arange(len(x)) % 256)


def test_a_hook_is_called_though_the_logits_are_gone():
    stock, ours = twins(lambda: Hooked().bfloat16())
    x = torch.randn(1024, 16)
    found = run(ours, x)
    assert_same(found, run(stock, x))
    assert found.gradients[0] is not None
    assert not found.gradients[0].any()


class Rotated(nn.Module):
    """A norm's output as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(self.norm(x).unflatten(-1, (16, 2))) * self.turn)


def test_a_view_as_complex_numbers():
    stock, ours = twins(Rotated)
    x = torch.randn(TOKENS)
    assert_same(run(ours, x), run(stock, x))


@pytest.mark.parametrize("sizes", [(8, 0), (0, 4)])
def test_a_linear_layer_without_weights(sizes: tuple[int, int]):
    stock, ours = twins(lambda: nn.Linear(*sizes))
    x = torch.randn(3, sizes[0], requires_grad=True)
    for model in (stock, ours):
        model(x).sum().backward()


def test_an_example_is_not_worked_on_in_place():
    example = torch.randn(4, 8)
    before = example.clone()
    convert(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), example)
    assert torch.equal(example, before)


def test_attention_of_values_in_a_larger_batch():
    query, key, value = torch.randn(1, 3, 5, 4), torch.randn(1, 3, 6, 4), torch.randn(2, 3, 6, 4)

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query * x, key * x, value * x, dropout_p=0.5)

    stock, ours = twins(Attention)
    x = torch.randn(1)
    assert_same(run(ours, x), run(stock, x))


@pytest.mark.parametrize("build", [lambda: nn.ReLU(), lambda: nn.MaxPool2d(3, 2, 1), lambda: nn.MaxPool2d(2)])
def test_an_input_of_several_pieces_has_the_values_and_the_gradient_of_stock(build):
    """22 rows in turns of 3, and 1,379,840 elements in pieces of 2^19: the last turn and piece are smaller."""
    image = torch.randn(22, 20, 56, 56)
    found = []
    for layer in (build(), convert(build())):
        x = image.clone().requires_grad_()
        output = layer(x)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
        found += [(output, x.grad)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
