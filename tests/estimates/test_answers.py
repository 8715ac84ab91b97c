"""What fake tensors are told, beside torch's own general answer."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing import fake_ops as module
from autotune.estimates.tracing.fake_ops import answers
from autotune.estimates.tracing.grad_accumulation import Accumulation
from autotune.measure.profiling.tracer import tensors_of
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.testing.zoo import ZOO

ADD = torch.ops.aten.add.Tensor
QUICK = module._LIKE | module._VIEWS | module._INTO | module._IN_PLACE


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Of each operation, how often it was asked; each answer is held against torch's."""
    asked: Counter[Any] = Counter()
    own = module._Answers._answer

    def answer(self: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        results = own(self, func, types, args, kwargs)
        if func in QUICK and not (func is ADD and results is args[0]):  # which is where backward adds up in place
            asked[func] += 1
            with unset_fake_temporarily():
                expected = self._fakes.dispatch(func, types, args, kwargs)
            given = tensors_of((args, kwargs))
            assert type(results) is type(expected)
            assert said_of(results, given) == said_of(expected, given)
            if func not in module._LIKE | module._VIEWS:
                assert [results is one for one in given] == [expected is one for one in given]
        return results

    monkeypatch.setattr(module._Answers, "_answer", answer)
    return asked


def said_of(results: Any, given: Any) -> list[Any]:
    """Of each tensor what there is to know: strides of sides of 1 mean nothing."""
    return [
        (
            one.shape,
            [stride for side, stride in zip(one.shape, one.stride(), strict=True) if side != 1],
            one.storage_offset(),
            one.dtype,
            one.device,
            one.untyped_storage().nbytes(),
            [one.untyped_storage()._cdata == other.untyped_storage()._cdata for other in given],
        )
        for one in tensors_of(results)
    ]


@pytest.mark.medium
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "token_loss"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": {"kind": "bf16"}, "checkpointing": {"kind": "blocks"}},
        {"layers": {"kind": "rounding"}, "memory_format": {"kind": "channels_last"}},
    ],
    ids=["stock", "bf16-blocks", "layers"],
)
def test_what_is_answered_without_torch_is_what_torch_would_say(
    name: str, settings: Any, target: Any, compared: Counter[Any]
):
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))
    fit_memory_model(plan, ZOO[name], accumulates=True, target=target, few=4)
    assert sum(compared.values()) > 200


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t().mul(x.t()),
        lambda x: x + x[:1],
        lambda x: x[:1] + x,
        lambda x: x + x.double(),
        lambda x: x * 2j,
        lambda x: x.int() / x.int(),
        lambda x: x.to(torch.bfloat16) * torch.tensor(2.0),
        lambda x: torch.zeros_like(x.t(), memory_format=torch.contiguous_format),
        lambda x: torch.zeros_like(x, dtype=torch.bool),
        lambda x: torch.zeros_like(x, device="meta"),
        lambda x: torch.ones(4, 3, 1, 1).to(memory_format=torch.channels_last).neg(),
        lambda x: torch.tensor(2.0).view(1) + x,
        lambda x: x.unbind(1),
        lambda x: x.mul_(x[:1]).add_(x[0], alpha=2).lerp_(x[:, :1].expand(3, 4), 0.5),
        lambda x: torch.add(x, x[0], out=torch.empty(3, 4)),
        lambda x: torch.mul(x, 2, out=torch.empty(4, 3).t()),
        lambda x: torch.add(x, x, out=torch.empty(3, 4, dtype=torch.float64)),
        lambda x: torch.add(*x.to(torch.uint8).unbind()[:2], alpha=16, out=torch.empty(4, dtype=torch.uint8)),
        lambda x: torch.add(x.int(), x.int(), out=torch.empty(3, 4)),
        lambda x: torch.mul(x.int(), 2.5, out=torch.empty(3, 4)),
        lambda x: x.expand(5, 3, 4).permute(2, 0, 1)[1:, ..., 2],
    ],
)
def test_odd_arguments(make: Any, compared: Counter[Any]):
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, answers("cpu", fakes):
        make(torch.empty(3, 4))
    assert compared


def test_a_number_of_steps_has_no_value_while_an_optimizer_steps():
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        with answers("cpu", fakes, is_optimizer=True):
            steps = torch.tensor(3.0)
        with answers("cpu", fakes):
            other = torch.tensor(3.0)
    assert (steps.constant, other.constant) == (None, 3.0)
    assert said_of((steps,), ()) == said_of((other,), ())


def summed_in_place(loss: Any) -> list[bool]:
    """Of each sum that backward makes, whether it goes where its first argument is."""
    found: list[bool] = []

    def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        if func is ADD and not torch.is_grad_enabled():
            found.append(results is args[0])

    with FakeTensorMode() as fakes, answers("cpu", fakes, sees=sees):
        x = torch.empty(4, 4, requires_grad=True)
        loss(x * 2).backward()
    return found


class Doubled(torch.autograd.Function):
    """Its backward adds what it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] * 1) + grads[0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: (x * x.detach()).sum() + x.sin().sum(), [True]),
        (lambda x: (x * x.detach()).sum() + x.sin().sum() + x.cos().sum(), [True, True]),
        (lambda x: x.sin().sum() + x.sum(), [False]),
        (lambda x: (Doubled.apply(x) * x.detach()).sum(), [False]),
        (lambda x: torch.prod(torch.stack(torch.var_mean(x, -1))).sum(), [False]),
        (lambda x: (x * x).sum(), [True]),
        (lambda x: checkpoint(lambda y: y + y.sin(), x * x.detach(), use_reentrant=False).sum(), [False]),
    ],
    ids=[
        "both are its own",
        "three",
        "one stands for many",
        "a backward's own sum",
        "a formula's own",
        "twice of one",
        "one was repeated before",
    ],
)
def test_autograd_adds_gradients_up_in_place_of_one_that_it_alone_has(loss: Any, expected: list[bool]):
    assert summed_in_place(loss) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, layer: layer(x), [True]),
        (lambda x, layer: x @ layer.weight.t() + layer.bias, [False]),
        (lambda x, layer: layer(x.contiguous()), []),
    ],
    ids=["a layer", "the same by hand", "in order"],
)
def test_a_linear_layer_adds_its_bias_in_place_where_its_input_does_not_lie_in_order(call: Any, expected: list[bool]):
    found: list[bool] = []

    def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        if func is ADD:
            found.append(results is args[0])

    with FakeTensorMode() as fakes, answers("cpu", fakes, sees=sees):
        layer = torch.nn.Linear(4, 5)
        assert call(torch.empty(3, 4, 2).transpose(1, 2), layer).shape == (3, 2, 5)
    assert found == expected


def test_what_is_added_up_is_not_there_thrice(monkeypatch: pytest.MonkeyPatch):
    """Two gradients of 4 KiB are two at once, where torch runs without a mode; were their sum apart, three."""

    def loss_of(x: Tensor) -> Tensor:
        y = x * 2
        return (y * y.detach()).sum() + (y * y.detach()).sum()

    loss = loss_of(torch.randn(1024, requires_grad=True))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss.backward()
    sizes = [one.nbytes() for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    real = max(itertools.accumulate(sizes))

    def peak() -> int:
        live: Counter[int] = Counter()
        most = [0]

        def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
            for one in tensors_of(results):
                storage = one.untyped_storage()
                if storage._cdata not in live:
                    live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, live.pop, storage._cdata)
                    most[0] = max(most[0], live.total())

        with FakeTensorMode() as fakes:
            loss = loss_of(torch.empty(1024, requires_grad=True))
            with answers("cpu", fakes, sees=sees):
                loss.backward()
        return most[0]

    assert peak() == pytest.approx(real, abs=512)
    monkeypatch.setattr(Accumulation, "is_in_place", lambda self, args, kwargs: False)
    assert peak() == pytest.approx(real + 4096, abs=512)


def made_by(target: str, run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Names and bytes of what operations over fake tensors make, in order."""
    found: list[tuple[str, int]] = []

    def sees(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        given = {one.untyped_storage()._cdata for one in tensors_of((args, kwargs))}
        made = [one.untyped_storage() for one in tensors_of(results)]
        found.extend((str(func), one.nbytes()) for one in made if one._cdata not in given)

    fakes = FakeTensorMode()
    with fakes, answers(target, fakes, sees=sees):
        run()
    return found


SELECTED = [
    lambda x, places: x.gather(1, places),
    lambda x, places: x[places],
    lambda x, places: x.max(1).values,
    lambda x, places: x.topk(3).values,
    lambda x, places: x.index_select(0, places[0]),
]


@pytest.mark.parametrize("select", SELECTED, ids=["gather", "index", "max", "topk", "index_select"])
def test_the_gradient_of_selected_elements_is_written_into_zeros(select: Any):
    """16 rows of 8 numbers: backward makes them once, where a dispatch mode sees zeros and then another 512 bytes."""

    def run() -> None:
        leaf = torch.empty(16, 8, requires_grad=True)
        places = torch.zeros(16, 8, dtype=torch.long)
        select(leaf, places).sum().backward()

    made = [name for name, num_bytes in made_by("cuda", run) if num_bytes == 512]
    assert made.count("aten.new_zeros.default") == 1
    assert not any("scatter" in name or "index_put" in name or "index_add" in name for name in made)


class Placed(torch.autograd.Function):
    """Whose backward keeps the zeros that it writes beside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        zeros = torch.zeros_like(grad)
        return zeros + zeros.scatter_add(1, torch.zeros(16, 8, dtype=torch.long), grad)


def test_what_a_users_backward_writes_apart_is_apart():
    def run() -> None:
        Placed.apply(torch.empty(16, 8, requires_grad=True)).sum().backward()

    assert ("aten.scatter_add.default", 512) in made_by("cuda", run)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_log_of_summed_exponentials_holds_them_all(target: str):
    """16 by 32 by 64 of them, before the 16 by 32 results are there; torch's own memory events say the same of a
    CPU."""
    made = [row for row in made_by(target, lambda: torch.logsumexp(torch.empty(16, 32, 64), -1, True)) if row[1] > 512]
    largest, found = 4 * 16 * 32, 4 * 16 * 32
    assert [num_bytes for _, num_bytes in made][-4:] == [largest, largest, 64 * largest, found]

    x = torch.randn(16, 32, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        torch.logsumexp(x, -1, True)
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    taken = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()) if one.nbytes() > 512]
    assert taken[-4:] == [largest, largest, 64 * largest, found]


def test_an_lstm_keeps_gates_and_cells_of_each_step_on_a_card():
    """37 sequences of 32 steps, 64 states of each: four gates and the cell."""

    def run() -> None:
        torch.nn.LSTM(24, 64)(torch.empty(32, 37, 24))

    assert ("aten.mkldnn_rnn_layer.default", 5 * 32 * 37 * 64 * 4) in made_by("cuda", run)


def test_what_follows_from_positions_is_known():
    """As transformers asks whether a batch is of several sequences, which it does not over fake tensors."""
    from transformers.utils import import_utils

    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        positions = torch.arange(64)[None]
        assert (torch.diff(positions, dim=-1) == 1).all()
        assert not import_utils.is_tracing(positions)
        assert import_utils.is_tracing(torch.empty(64, dtype=torch.long))
        with pytest.raises(RuntimeError):
            bool(positions[0, 0] == torch.empty((), dtype=torch.long))
        assert not isinstance(torch.arange(2**22).constant, Tensor)
    assert before == fake_tensor.CONSTANT_NUMEL_LIMIT
    with FakeTensorMode():
        assert import_utils.is_tracing(torch.arange(64))


def test_many_values_are_not_computed():
    """Distances of positions: 2000 by 2000 of 2000."""
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        positions = torch.arange(2000)
        distances = positions[None] - positions[:, None]
        assert distances.shape == (2000, 2000)
        assert distances.constant is None
        assert positions.add_(1)[0].item() == 1
        assert torch.arange(2**40).constant is None
        assert torch.nn.functional.one_hot(positions, 2000).constant is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_multiplied_in_any_precision(dtype: torch.dtype):
    """Six tokens of two experts, and backward."""

    def products() -> list[tuple[Any, ...]]:
        tokens = torch.ones(6, 8, dtype=dtype, requires_grad=True)
        weights = torch.ones(2, 8, 16, dtype=dtype, requires_grad=True)
        ends = torch.tensor([4, 6], dtype=torch.int32)
        y = torch._grouped_mm(tokens, weights, offs=ends)
        y.square().sum().backward()
        return [(one.shape, one.stride(), one.dtype) for one in (y, tokens.grad, weights.grad) if one is not None]

    expected = products()
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        assert products() == expected
    assert len(expected) == 3


def images(dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    made = torch.ones(4, 8, 6, 6, dtype=dtype)
    return made.to(memory_format=torch.channels_last) if last else made


def normed(x: Tensor, layer: torch.nn.Module, grad: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradient of the input."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    y.backward(torch.ones_like(y) if grad is None else grad)
    assert leaf.grad is not None
    return [y, leaf.grad]


def group_normed(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels of a norm of two groups return, forward and backward."""
    weight, sizes = torch.ones(8), (4, 8, 36, 2)
    y, mean, deviation = torch.native_group_norm(x, weight, weight, *sizes, 1e-5)
    mean, deviation = (one.float() for one in (mean, deviation))
    backward = torch.ops.aten.native_group_norm_backward(y, x, mean, deviation, weight, *sizes, [True, True, True])
    return list(torch.native_group_norm(x, weight, weight, *sizes, 1e-5)), list(backward)


@pytest.mark.parametrize(
    "call",
    [
        lambda: normed(torch.ones(4, 6, 8).transpose(1, 2), torch.nn.BatchNorm1d(8)),
        lambda: normed(images(), torch.nn.BatchNorm2d(8)),
        lambda: normed(images(last=True), torch.nn.BatchNorm2d(8)),
        lambda: normed(images(last=True), torch.nn.BatchNorm2d(8), images()),
        lambda: normed(images().transpose(2, 3), torch.nn.BatchNorm2d(8)),
        lambda: normed(images(torch.bfloat16, last=True), torch.nn.GroupNorm(2, 8)),
        lambda: normed(images(torch.bfloat16), torch.nn.LayerNorm(6)),
        lambda: torch.native_layer_norm(images(torch.bfloat16), [6], torch.ones(6), torch.ones(6), 1e-5),
        lambda: torch.native_layer_norm(images(torch.bfloat16), [6], None, None, 1e-5),
        lambda: group_normed(images(torch.bfloat16, last=True))[0],
        lambda: group_normed(images(torch.bfloat16, last=True))[1],
        lambda: [torch.nn.functional.mse_loss(images(), torch.ones(6, 6))],
        lambda: [torch.nn.functional.smooth_l1_loss(images(), images(), reduction="sum")],
        lambda: [torch.nn.functional.mse_loss(images(), images(), reduction="none")],
        lambda: [torch.ops.aten.mse_loss_backward(torch.ones(()), images(last=True), images(last=True), 1)],
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_kernels_return_is_told_without_values(call: Any):
    """Layout, precision and storage, which torch's own answers have otherwise."""

    def said() -> list[Any]:
        return [(one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in call()]

    expected = said()
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, answers("cpu", fakes):
        assert said() == expected


def test_a_value_that_torch_remembers_is_still_known_of_a_view_of_it():
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        assert torch.tensor(3).view(1).item() == 3


def test_where_torch_would_raise_it_does():
    with FakeTensorMode() as fakes, answers("cpu", fakes):
        x = torch.empty(3, 4)
        other = torch.empty(3, 4, device="meta")
        for wrong in (lambda: x.view(5), lambda: x + x.t(), lambda: x.expand(2, 4), lambda: x + other):
            with pytest.raises(RuntimeError):
                wrong()
        assert isinstance(x + 1, Tensor)
