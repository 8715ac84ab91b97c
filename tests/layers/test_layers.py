"""Memory-saving layers: what each keeps, as multiples of its input, and that values and gradients are stock torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from kept_bytes import kept_bytes
from layer_runs import IMAGES, TOKENS, VOLUME, assert_same, run, twins
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autotune.layers import convert, restore


def norm_act_conv() -> nn.Module:
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *copy.deepcopy(layers), nn.Conv2d(8, 8, 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4),
    )  # fmt: skip


# (layer, shape of its input, kept when all of it trains, kept when it is frozen; None is whatever stock keeps)
KEPT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float | None, float | None]] = {
    "linear": (lambda: nn.Linear(32, 32), TOKENS, 1, 0),
    "conv1d": (lambda: nn.Conv1d(8, 8, 3), TOKENS, 1, 0),
    "conv2d": (lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1), IMAGES, 1, 0),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3), VOLUME, 1, 0),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), IMAGES, 1, 0),
    "dilated": (lambda: nn.Conv2d(8, 8, 3, stride=3, dilation=2), IMAGES, 1, 0),
    "same": (lambda: nn.Conv2d(8, 8, 3, padding="same"), IMAGES, 1, 0),
    "same, even kernel": (lambda: nn.Conv2d(8, 8, 4, padding="same"), IMAGES, None, None),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1), IMAGES, 1, 0),
    "batch_norm, training": (lambda: nn.BatchNorm2d(8), IMAGES, None, None),
    "batch_norm, eval": (lambda: nn.BatchNorm2d(8).eval(), IMAGES, None, 0),
    "batch_norm1d, eval": (lambda: nn.BatchNorm1d(8).eval(), TOKENS, None, 0),
    "layer_norm": (lambda: nn.LayerNorm(32), TOKENS, None, None),
    "group_norm": (lambda: nn.GroupNorm(2, 8), IMAGES, None, None),
    "instance_norm": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGES, None, None),
    "rms_norm": (lambda: nn.RMSNorm(32), TOKENS, 1 + 1 / 32, 1 + 1 / 32),
    "relu": (nn.ReLU, IMAGES, 1 / 32, 1 / 32),
    "leaky_relu": (nn.LeakyReLU, IMAGES, 1 / 32, 1 / 32),
    "relu6": (nn.ReLU6, IMAGES, 1 / 32, 1 / 32),
    "hardtanh": (nn.Hardtanh, IMAGES, 1 / 32, 1 / 32),
    "gelu": (nn.GELU, IMAGES, 1, 1),
    "silu": (nn.SiLU, IMAGES, 1, 1),
    "hardswish": (nn.Hardswish, IMAGES, 1, 1),
    "softplus": (nn.Softplus, IMAGES, 1, 1),
    "dropout": (lambda: nn.Dropout(0.3), IMAGES, 1 / 32, 1 / 32),
    "max_pool2d, 2": (lambda: nn.MaxPool2d(2), IMAGES, 1 / 64, 1 / 64),
    "max_pool2d, 3 by 2": (lambda: nn.MaxPool2d(3, 2, 1), IMAGES, 1 / 32, 1 / 32),
    "max_pool2d, ceil": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), IMAGES, 1 / 32, 1 / 32),
    "max_pool2d, dilated": (lambda: nn.MaxPool2d(2, 1, dilation=3), IMAGES, (13 / 16) ** 2 / 16, (13 / 16) ** 2 / 16),
    "max_pool1d": (lambda: nn.MaxPool1d(4), TOKENS, 1 / 64, 1 / 64),
    "max_pool3d": (lambda: nn.MaxPool3d(2), VOLUME, 1 / 64, 1 / 64),
    "avg_pool1d": (lambda: nn.AvgPool1d(2), TOKENS, 0, 0),
    "avg_pool1d, padded": (lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False), TOKENS, 0, 0),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), IMAGES, 0, 0),
    "avg_pool2d, divided": (lambda: nn.AvgPool2d(3, 1, 1, divisor_override=5), IMAGES, 0, 0),
    "avg_pool3d": (lambda: nn.AvgPool3d(2), VOLUME, 0, 0),
    "adaptive_avg_pool1d": (lambda: nn.AdaptiveAvgPool1d(3), TOKENS, 0, 0),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d((3, None)), IMAGES, 0, 0),
    "adaptive_avg_pool2d, 1": (lambda: nn.AdaptiveAvgPool2d(1), IMAGES, 0, 0),
    "adaptive_avg_pool3d": (lambda: nn.AdaptiveAvgPool3d(3), VOLUME, 0, 0),
    # Each convolution's input but the first's, and the second's and third's are had again from the norms' own: 3 of 5.
    "norm, relu, conv": (norm_act_conv, IMAGES, 3 + 2 / 32 + 4 * 8 / 2048 / 4, 2 + 2 / 32 + 4 * 8 / 2048 / 4),
    # The norm's input and two statistics a row, GELU's input (4), and dropout's bits (4 / 32), of stock's 14.
    "mlp": (mlp, TOKENS, 1 + 2 / 32 + 4 + 4 / 32, 1 + 2 / 32 + 4 + 4 / 32),
}


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_that_values_and_gradients_are_stocks(name: str, trains: bool):
    build, shape, *multiples = KEPT[name]
    stock, ours = twins(build, trains)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    limit = multiples[0] if trains else multiples[1]
    assert found.kept <= wanted.kept
    if limit is not None:
        assert found.kept == pytest.approx(limit * x.numel() * 4, abs=8)


MODELS = {"norm_act_conv": (norm_act_conv, IMAGES), "mlp": (mlp, TOKENS), "vgg": (vgg, IMAGES)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_other_types(name: str, trains: bool, dtype: torch.dtype):
    build, shape = MODELS[name]
    stock, ours = (model.to(dtype) for model in twins(build, trains))
    x = torch.randn(shape, dtype=dtype)
    assert_same(run(ours, x), run(stock, x), 1e-9 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_no_copy_of_a_weight_is_kept(name: str, trains: bool):
    build, shape = MODELS[name]
    stock, ours = twins(build, trains)
    x = torch.randn(shape)
    wanted, found = (run(model, x, dtype=torch.bfloat16) for model in (stock, ours))
    assert_same(found, wanted, 2e-2)
    assert found.kept < wanted.kept


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", ["norm_act_conv", "vgg"])
def test_channels_last(name: str, trains: bool):
    build, shape = MODELS[name]
    stock, ours = (model.to(memory_format=torch.channels_last) for model in twins(build, trains))
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    assert_same(run(ours, x), run(stock, x), 1e-4)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        lambda: nn.BatchNorm2d(8, affine=False),
        lambda: nn.BatchNorm2d(8, momentum=None),
        lambda: nn.BatchNorm2d(8, track_running_stats=False),
        lambda: nn.LeakyReLU(-0.2),
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.LeakyReLU(0.2, inplace=True)),
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.2, inplace=True)),
        lambda: nn.MultiheadAttention(16, 2),
    ],
    ids=[
        "circular",
        "reflect",
        "no affine",
        "cumulative",
        "no statistics",
        "negative",
        "in place",
        "drop",
        "attention",
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_the_published_layers_get_wrong(build: Callable[[], nn.Module], trains: bool):
    stock, ours = twins(build, trains)
    if isinstance(stock, nn.MultiheadAttention):
        x = torch.randn(4, 2, 16)
        stock, ours = (nn.Sequential(_SelfAttention(model)) for model in (stock, ours))
    else:
        x = torch.randn(IMAGES)
    assert_same(run(ours, x), run(stock, x))
    for a, b in zip(ours.buffers(), stock.buffers(), strict=True):
        assert torch.equal(a, b)


class _SelfAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_without_recomputation_a_norm_that_trains_is_stocks():
    """A ReLU behind it adds no bits to what the convolution keeps in any case."""
    stock, _ = twins(norm_act_conv)
    ours = convert(copy.deepcopy(stock))
    x = torch.randn(IMAGES)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert found.kept == wanted.kept


def test_infinities_and_nans_pass_a_relu_as_they_pass_stocks():
    x = torch.tensor([float("-inf"), float("nan"), float("inf"), -1.0, 0.0, 1.0])
    gradient = torch.tensor([float("inf"), 1.0, 2.0, float("nan"), 4.0, 5.0])
    found = []
    for model in twins(nn.ReLU):
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        output.backward(gradient)
        found.append((output.detach(), leaf.grad))
    for ours, stock in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, stock, equal_nan=True)


def test_unbatched_inputs():
    for build, shape in ((lambda: nn.Conv2d(8, 8, 3), IMAGES[1:]), (lambda: nn.MaxPool2d(2), IMAGES[1:])):
        for trains in (True, False):
            stock, ours = twins(build, trains)
            x = torch.randn(shape)
            assert_same(run(ours, x), run(stock, x))


@pytest.mark.medium
def test_gradients_by_finite_differences():
    """In fp64, of a chain that uses every mechanism: bits, rematerialization, frozen convolutions and pooling."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.LeakyReLU(0.1),
        nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2), nn.RMSNorm(2),
    ).double()  # fmt: skip
    model[3].requires_grad_(False)
    convert(model)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda *_: model(x), (x, *parameters))


def test_what_is_kept_follows_what_trains_at_each_forward():
    """Progressive unfreezing: a frozen convolution keeps nothing, and its input once it trains."""
    layer = convert(nn.Conv2d(8, 8, 3).requires_grad_(False))
    x = torch.randn(IMAGES, requires_grad=True)
    kept = []
    for trains in (False, True, False):
        layer.requires_grad_(trains)
        kept.append(kept_bytes(lambda: layer(x * 1.0), layer)[0])
    assert kept == [0, x.numel() * 4, 0]


def test_a_relu_before_a_convolution_that_trains_adds_no_bits():
    """The convolution keeps the output in any case: a mask would come on top."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    stock, ours = twins(lambda: model)
    x = torch.randn(IMAGES)
    assert run(ours, x).kept == run(stock, x).kept
    ours[2].requires_grad_(False)
    assert run(ours, x).kept == x.numel() * 4 + x.numel() // 8


def test_within_a_checkpoint_no_more_is_kept_than_stock_keeps():
    """Six times convolution, norm and ReLU in one checkpoint: the input alone."""
    layers = [copy.deepcopy(norm_act_conv()) for _ in range(3)]
    for model in twins(lambda: nn.Sequential(*layers)):
        x = torch.randn(IMAGES, requires_grad=True)
        kept, output = kept_bytes(lambda m=model, x=x: checkpoint(m, x * 1.0, use_reentrant=False), model)
        output.sum().backward()
        assert kept == x.numel() * 4


class Functional(nn.Module):
    """Calls torch's functions itself, one of them within a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.inner(x)), 0.1, self.training)
        hidden = self.outer(hidden)
        return checkpoint(lambda h: F.relu(h) * F.silu(h), hidden, use_reentrant=False).relu()


def test_functional_calls_are_answered_and_a_modules_own_checkpoint_recomputes_what_it_ran():
    stock, ours = twins(Functional)
    x = torch.randn(TOKENS)
    wanted, found = run(stock, x), run(ours, x)
    assert_same(found, wanted)
    assert found.kept < 0.7 * wanted.kept


def test_hooks_sharing_flags_and_state_stay_and_restoring_leaves_no_trace():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Dropout(0.5).eval())
    seen = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    convert(model)
    assert model[0] is model[2]
    assert [p is q for p, q in zip(model.parameters(), parameters, strict=True)] == [True, True]
    assert list(model.state_dict()) == keys
    assert (type(shared).__name__, isinstance(shared, nn.Linear)) == ("Linear", True)
    assert [module.training for module in model] == [True, True, True, False]
    model(torch.randn(2, 32)).sum().backward()
    assert seen == [1, 1]
    restore(model)
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear, nn.Dropout]
    assert set(vars(shared)) == set(vars(nn.Linear(1, 1)))


def test_copies_and_pickles_are_converted_too():
    stock, ours = twins(norm_act_conv, trains=False)
    x = torch.randn(IMAGES)
    kept = run(ours, x).kept
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert run(copied, x).kept == kept < run(stock, x).kept
        assert copied[0].weight is not ours[0].weight


def test_parametrized_layers_are_converted_and_subclasses_left_alone():
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def build() -> nn.Module:
        parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
        return nn.Sequential(parametrized, Doubled(8, 8, 3))

    stock, ours = twins(build, trains=False)
    x = torch.randn(IMAGES)
    assert_same(run(ours, x), run(stock, x))
    assert type(ours[1]) is Doubled
    assert type(ours[0]) is not type(stock[0])


def test_second_derivatives_are_refused_aloud():
    _, ours = twins(nn.ReLU)
    x = torch.randn(IMAGES, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_transforms_and_compiled_models_are_stock():
    stock, ours = twins(lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)), trains=False)
    x = torch.randn(8, 32)
    for model_of in (
        lambda m: torch.func.vmap(torch.func.grad(lambda row: m(row).sum()))(x),
        lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)(x),
        lambda m: torch.func.jacfwd(lambda row: m(row))(x[0]),
    ):
        torch.testing.assert_close(model_of(ours), model_of(stock))


def test_under_fake_tensors_as_much_is_kept_as_really_is():
    for build, shape in MODELS.values():
        stock, ours = twins(build)
        real = run(ours, torch.randn(shape)).kept
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.randn(shape, requires_grad=True)
            kept, output = kept_bytes(lambda m=ours, x=x: m(x * 1.0), ours)
            output.sum().backward()
            assert output.shape == stock(x * 1.0).shape
        own = sum(p.numel() * 4 for p in ours.parameters())  # as fakes they are no longer the model's own
        assert real <= kept <= real + own


class WrittenOut(nn.Module):
    """GELU as GPT-2's authors write it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


class WrittenNorm(nn.Module):
    """RMSNorm as LLaMA's authors write it, and with an offset as Gemma's do."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.variance_epsilon = 1e-6
        self.add = lambda weight: weight + offset

    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.add(self.weight) * (hidden * torch.rsqrt(variance + self.variance_epsilon))


@pytest.mark.parametrize(
    ("build", "kept"),
    [(WrittenOut, 1.0), (WrittenNorm, 1 + 1 / 32), (lambda: WrittenNorm(1.0), None)],
    ids=["gelu", "rms_norm", "another norm"],
)
def test_layers_written_out_by_hand_are_recognized_by_what_they_compute(build: Callable[[], nn.Module], kept: float):
    stock, ours = twins(build)
    x = torch.randn(TOKENS)
    wanted, found = run(stock, x), run(ours, x)
    torch.testing.assert_close(found.output, wanted.output)
    for a, b in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert found.kept == (wanted.kept if kept is None else kept * x.numel() * 4)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 16), nn.Linear(16, 512, bias=False)

    def forward(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.head(self.embedding(tokens)).float()
        return F.cross_entropy(logits.view(-1, 512), tokens.view(-1), ignore_index=3, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_models_loss_keeps_gradients_and_no_logits(reduction: str, trains: bool, dtype: torch.dtype):
    """512 tokens of 16 numbers over 512 words: 32 KiB of gradients for the rows and the head, of 1 MiB of logits."""
    stock, ours = twins(LanguageModel)
    tokens = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for model in (stock, ours):
        model.head.requires_grad_(trains)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            kept, loss = kept_bytes(lambda m=model: m(tokens, reduction), model)
        (2 * loss).backward()
        found.append((kept, loss.detach(), model.embedding.weight.grad, model.head.weight.grad))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for a, b in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert found[1][0] < found[0][0] / 4 or not trains


class Biased(LanguageModel):
    """A head with a bias, which torch adds in place where its input has four sides, or three and does not lie in order,
    as after a recurrent layer with the batch first."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.turn = nn.Linear(16, 512), turn

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.turn(self.embedding(tokens)))
        return F.cross_entropy(logits.view(-1, 512), self.turn(tokens[..., None]).flatten())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "turn", [lambda x: x.transpose(0, 1), lambda x: x[..., :16], lambda x: x[:, ::2], lambda x: x.unflatten(0, (2, 4))]
)
def test_a_head_gives_torchs_values_and_keeps_no_more_whatever_its_input_is_a_view_of(
    turn: Callable[[Tensor], Tensor], autocast: bool
):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(turn(torch.empty(8, 64, 32)).shape[-1], 512)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(turn(x))

    stock, ours = twins(Head)
    x = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        wanted, found = run(stock, x), run(ours, x)
    assert torch.equal(found.output, wanted.output)
    assert found.kept <= wanted.kept
    for a, b in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(a, b)


class Changed(LanguageModel):
    """Its logits are changed in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        logits[..., 0] = -9.0
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(
    ("build", "less"),
    [
        (lambda: Biased(lambda x: x.transpose(0, 1)), True),
        (lambda: Biased(lambda x: x.unflatten(0, (2, 4)).clone()), True),
        (Changed, False),
    ],
    ids=["turned", "four sides", "changed"],
)
def test_only_logits_that_somebody_changed_are_kept(build: Callable[[], LanguageModel], less: bool):
    found = []
    for model in twins(build):
        tokens = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(0))
        kept, loss = kept_bytes(lambda m=model, x=tokens: m(x), model)
        loss.backward()
        found.append((kept, loss.detach(), model.embedding.weight.grad, model.head.weight.grad))
    for a, b in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (found[1][0] < found[0][0] / 4) == less
