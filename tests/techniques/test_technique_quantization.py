"""``quantization``: its contract, its products by hand, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import autotune
from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.search_spaces import load_space
from autotune.techniques import Settings
from autotune.techniques.compile import Compile
from autotune.techniques.frozen_weights import FrozenWeights
from autotune.techniques.quantization import Quantization
from autotune.techniques.support.bits.frozen_weight import FrozenWeight
from autotune.techniques.support.bits.int8_linear import Int8Linear
from autotune.testing.facts import BARE, facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO
from autotune.units import MIB

INT8 = Plan(settings=Settings(quantization=Quantization(kind="int8")))


def of_inference(task):
    return facts_of(task).model_copy(update={"inference": True, "linear_numbers": 4096})


class TestQuantization(TechniqueContract):
    """Its words and plans; nothing trains with it, and what inference does is below."""

    technique = Quantization
    tasks = {"mlp": ZOO["mlp"]}
    lacking = (Quantization(kind="int8"),)

    @pytest.fixture(autouse=True)
    def _inference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("techniques", "in_use"):
            monkeypatch.setattr(f"autotune.testing.{module}.facts_of", of_inference)

    def _others(self, task):
        return ()


def linear(*shape: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*shape, bias=bias).eval()


def test_a_product_by_hand():
    """Weights of 127 and 1 with a scale of 1, an input of 254 and 2, whose scale is 2."""
    layer = linear(32, 32, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0], layer.weight[0, 1] = 127, 1
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1] = 254, 2
    assert float(Int8Linear(layer)(row)[0, 0]) == 127 * 254 + 2


@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 40), (2, 5, 40), (0, 40)])
def test_outputs_are_close_in_any_shape(shape):
    stock, row = linear(40, 56), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, wanted = Int8Linear(stock)(row), stock(row).detach()
    assert found.shape == wanted.shape
    assert float((found - wanted).norm()) <= 0.02 * float(wanted.norm())


def test_a_sample_does_not_depend_on_the_others_in_its_batch():
    layer, rows = Int8Linear(linear(40, 56)), torch.randn(4, 40)
    loud = torch.cat([rows[:1], rows[1:] * 1000])
    assert torch.equal(layer(rows)[0], layer(loud)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_narrow_weights_products_are_as_close_as_of_wide_ones(dtype):
    """Every bf16 number from 1 to 2, large and negated: a scale in the weight's own type takes half of them to 128."""
    largest = torch.linspace(1, 2, 129)[:128]
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).clamp(-0.9, 0.9) * largest[:, None]
    weight[:, 0] = largest
    stock = linear(64, 128).to(dtype)
    with torch.no_grad():
        stock.weight.copy_(weight)
    layer, rows = Int8Linear(stock), (torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert int(layer.codes.min()) >= -127
    assert (layer.codes[0] == 127).all()
    assert layer.weight.dtype is dtype
    with torch.no_grad():
        found = layer(rows)
    wanted = nn.functional.linear(rows.double(), stock.weight.double(), stock.bias.double()).detach()
    assert found.dtype is dtype
    assert float((found.double() - wanted).norm() / wanted.norm()) < 0.02


def test_under_autocast_outputs_are_of_its_type_as_stock_layers_are():
    stock = linear(40, 56)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for rows in (torch.ones(2, 40), torch.ones(0, 40), torch.ones(2, 40, dtype=torch.bfloat16)):
            assert Int8Linear(stock)(rows).dtype is stock(rows).dtype is torch.bfloat16


def _with_forward(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda rows: rows * 0
    return layer


def _with(register: str, hook) -> nn.Linear:
    layer = linear(64, 64)
    getattr(layer, register)(hook)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: _with("register_forward_hook", lambda *called: None),
        lambda: _with("register_forward_pre_hook", lambda *called: None),
        lambda: _with_forward(linear(64, 64)),
        lambda: nn.utils.weight_norm(linear(64, 64)),
        lambda: nn.utils.spectral_norm(linear(64, 64)),
        lambda: nn.utils.parametrizations.weight_norm(linear(64, 64)),
        lambda: prune.l1_unstructured(linear(64, 64), "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_that_does_more_than_multiply_is_left_alone(make):
    other = make()
    model = nn.Sequential(linear(64, 64), other).eval()
    applied = autotune.apply_to_model(INT8, model)
    assert type(applied[0]) is Int8Linear
    assert applied[1] is other


def test_nan_and_infinity_stay_seen():
    layer, rows = Int8Linear(linear(32, 32)), torch.ones(3, 32)
    rows[0, 0], rows[1, 0] = torch.nan, torch.inf
    found = layer(rows)
    assert not found[:2].isfinite().any()
    assert found[2].isfinite().all()


def test_codes_take_the_place_of_weights_and_are_saved_copied_and_put_on_again():
    model = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 8)).eval()
    wanted = model[0].weight.detach().clone()
    applied = autotune.apply_to_model(INT8, model)
    assert [type(one) for one in applied] == [Int8Linear, nn.ReLU, nn.Linear]  # the last is not worth it
    assert applied[0].codes.dtype is torch.int8
    assert applied.state_dict()["0.codes"].nbytes == 64 * 64
    row = torch.randn(2, 64)
    for other in (copy.deepcopy(applied), pickle.loads(pickle.dumps(applied))):
        assert torch.equal(other(row), applied(row))
    assert float((applied[0].weight - wanted).abs().max()) <= float(wanted.abs().max()) / 127 / 2 * 1.001
    codes = applied[0].codes.clone()
    assert torch.equal(autotune.apply_to_model(INT8, applied)[0].codes, codes)


WEIGHTS = {"int8_weights": 8, "int4_weights": 4}
OF_WEIGHTS = pytest.mark.parametrize("kind", WEIGHTS)


def of_weights(model: nn.Module, kind: str) -> nn.Module:
    return autotune.apply_to_model(Plan(settings=Settings(quantization=Quantization(kind=kind))), model)


def coded(model: nn.Module) -> list[FrozenWeight]:
    return [one for one in model.parameters() if isinstance(one, FrozenWeight)]


@OF_WEIGHTS
def test_weights_take_a_quarter_or_an_eighth_and_a_scale_for_each_block(kind):
    """Of 128 x 256 numbers: a scale of 4 bytes for each 256 of 8 bits, and for each 128 of 4 bits."""
    model = nn.Sequential(nn.Embedding(128, 256), linear(256, 128)).eval()
    known = Quantization.facts_of(model, torch.optim.SGD(model.parameters()), "cpu")
    assert known == {"linear_numbers": 128 * 256, "codable_bytes": 2 * 128 * 256 * 4}
    applied = of_weights(model, kind)
    bits, block = (8, 256) if kind == "int8_weights" else (4, 128)
    wanted = 2 * (128 * 256 * bits // 8 + 128 * 256 // block * 4)
    assert sum(one.untyped_storage().nbytes() for one in coded(applied)) == wanted
    assert [type(one) for one in applied] == [nn.Embedding, nn.Linear]
    assert not any(one.requires_grad for one in coded(applied))


@OF_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_numbers_that_the_codes_stand_for_in_the_jobs_type(kind, dtype):
    model = of_weights(nn.Sequential(linear(256, 64)).to(dtype).eval(), kind)
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        found = model(rows)
        assert torch.equal(found, nn.functional.linear(rows, model[0].weight.numbers(), model[0].bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(rows).dtype is torch.bfloat16
    assert found.dtype is dtype


@OF_WEIGHTS
def test_codes_of_weights_are_saved_in_full_copied_and_put_on_again(kind):
    model = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 8)).eval()
    model[2].requires_grad_(False)
    applied = of_weights(model, kind)
    row, numbers = torch.randn(2, 64), applied[0].weight.numbers()
    for other in (copy.deepcopy(applied), pickle.loads(pickle.dumps(applied))):
        assert torch.equal(other(row), applied(row))
        assert len(coded(of_weights(other, kind))) == 2
    state = applied.state_dict()
    assert torch.equal(state["0.weight"], numbers)
    again = of_weights(applied, kind)
    assert torch.equal(again[0].weight.numbers(), numbers)
    stock = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 8))
    stock.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(stock(row), again(row))


@OF_WEIGHTS
def test_weights_that_were_rounded_are_not_taken_for_the_model_as_it_was(kind):
    applied = of_weights(nn.Sequential(linear(64, 64).requires_grad_(False)).eval(), kind)
    for other in (Quantization(), Quantization(kind="int8")):
        with pytest.raises(PlanError, match=rf"weights to int{WEIGHTS[kind]}, .* Build the model anew"):
            autotune.apply_to_model(Plan(settings=Settings(quantization=other)), copy.deepcopy(applied))


@OF_WEIGHTS
def test_a_plan_that_is_refused_leaves_codes_and_what_is_known_of_them(kind):
    applied = of_weights(nn.Sequential(linear(64, 64)).eval(), kind)
    weight, other = applied[0].weight, {"int8_weights": "int4_weights", "int4_weights": "int8_weights"}[kind]
    for refused in (other, "int8", "none"):
        with pytest.raises(PlanError, match="Build the model anew"):
            of_weights(applied, refused)
    with pytest.raises(PlanError, match="in training mode"):
        of_weights(applied.train(), kind)
    assert applied[0].weight is weight
    with pytest.raises(PlanError, match="Build the model anew"):
        of_weights(copy.deepcopy(applied), "none")


def test_after_int8_there_are_no_weights_to_keep_as_codes():
    applied = autotune.apply_to_model(INT8, nn.Sequential(linear(64, 64)).eval())
    with pytest.raises(PlanError, match="weights to int8"):
        of_weights(applied, "int8_weights")


@OF_WEIGHTS
def test_a_weight_in_two_places_is_one_of_codes_and_what_trains_is_refused(kind):
    embedding, head = nn.Embedding(64, 64), linear(64, 64, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"table": embedding, "head": head}).eval()
    applied = of_weights(model, kind)
    assert applied["table"].weight is applied["head"].weight
    assert isinstance(applied["head"].weight, FrozenWeight)
    with pytest.raises(PlanError, match=f"{kind} has no gradients, and the model is in training mode"):
        of_weights(nn.Sequential(linear(64, 64)).train(), kind)
    with pytest.raises(PlanError, match="no linear layer or embedding with weights of its own"):
        of_weights(nn.Sequential(nn.Conv2d(3, 3, 1)).eval(), kind)


def test_frozen_weights_leave_4_bits_in_inference_to_it():
    able = BARE.model_copy(update={"inference": True, "allow_lossy": True, "frozen_bytes": 64 * MIB})
    assert "int4_weights" in (FrozenWeights(kind="4bit").unavailable(able) or "")
    assert FrozenWeights(kind="4bit").unavailable(able.model_copy(update={"inference": False})) is None
    on_card = able.model_copy(update={"device": able.device.model_copy(update={"type": "cuda"})})
    assert FrozenWeights(kind="4bit").unavailable(on_card) == "4 bits were not tried in inference on a card"


def test_what_is_said_of_codes_names_no_setting_that_the_plan_may_not_have():
    model = of_weights(nn.Sequential(linear(64, 64)).eval(), "int8_weights")
    for ask in (model[0].weight.data_ptr, model.requires_grad_):
        with pytest.raises(PlanError, match=r"^settings: .* codes"):
            ask()


def test_what_compiles_would_keep_weights_in_full():
    with pytest.raises(ValueError, match="a compiled program reads weights by itself"):
        Plan(settings=Settings(quantization=Quantization(kind="int8_weights"), compile=Compile(kind="model")))


def test_what_was_rounded_is_not_taken_for_the_model_as_it_was():
    applied = autotune.apply_to_model(INT8, nn.Sequential(linear(64, 64)).eval())
    with pytest.raises(PlanError, match=r"rounded this model's weights to int8, .* Build the model anew"):
        autotune.apply_to_model(Plan(settings=Settings()), applied)


def test_a_plan_written_by_hand_is_refused_on_a_card():
    model = nn.Sequential(linear(64, 64))
    with pytest.raises(PlanError, match="int8 is for a CPU, and the model goes to cuda"):
        autotune.apply_to_model(INT8, model, device="cuda")
    assert type(model[0]) is nn.Linear


def test_a_layer_in_two_places_stays_one_and_a_tied_weight_stays_with_its_other_owner():
    shared = linear(64, 64)
    embedding, head = nn.Embedding(64, 64), linear(64, 64, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"a": shared, "b": shared, "table": embedding, "head": head}).eval()
    applied = autotune.apply_to_model(INT8, model)
    assert applied["a"] is applied["b"]
    assert isinstance(applied["table"].weight, nn.Parameter)
    assert isinstance(applied["head"], Int8Linear)


def test_torchs_own_transformer_layers_are_left_alone():
    """Their fast path reads weights without calling the layers."""
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)).eval()
    with pytest.raises(PlanError, match="no linear layer"):
        autotune.apply_to_model(INT8, model)


def test_it_is_offered_to_inference_on_a_cpu_alone():
    int8, own = Quantization(kind="int8"), Quantization()
    able = BARE.model_copy(update={"inference": True, "linear_numbers": 4096})
    assert Quantization.choices(able) == (own, int8)
    large = able.model_copy(update={"codable_bytes": 8 * MIB, "allow_lossy": False})
    assert [one.kind for one in Quantization.choices(large)] == ["none", "int8", "int8_weights"]
    judged = large.model_copy(update={"allow_lossy": True})
    assert [one.kind for one in Quantization.choices(judged)] == ["none", "int8", "int8_weights", "int4_weights"]
    assert Quantization(kind="int8_weights").exactness(large) == "rounding"
    assert "3 MiB, which is not worth it" in (
        Quantization(kind="int8_weights").unavailable(able.model_copy(update={"codable_bytes": 3 * MIB})) or ""
    )
    assert Quantization.choices(BARE.model_copy(update={"linear_numbers": 4096})) == (own,)
    assert "linear layer" in (int8.unavailable(BARE.model_copy(update={"inference": True})) or "")
    on_card = able.model_copy(update={"device": able.device.model_copy(update={"type": "cuda"})})
    assert int8.unavailable(on_card) == "it was not tried on a card"
    assert int8.exactness(able) == "lossy"
    assert load_space("default").choices(able.model_copy(update={"left_out": {}}))["quantization"] == (own, int8)
