"""``attention``: its contract on the zoo, which kernel computes, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.plan import Budget, Plan
from autotune.search_spaces import load_space
from autotune.techniques import Device, Settings
from autotune.techniques.attention import Attention, ways
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
from autotune.testing.facts import BARE, facts_of
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

MATH, FLASH, EFFICIENT, CUDNN = (Attention(kind=kind) for kind in ("math", "flash", "efficient", "cudnn"))
BATCH, HEADS, LENGTH, HEAD = 2, 2, 64, 8
WIDTH = HEADS * HEAD
FLASH_NODE = "ScaledDotProductFlashAttentionForCpuBackward0"


class TestAttention(TechniqueContract):
    technique = Attention
    lacking = (MATH, Attention(kind="eager"))


class Block(nn.Module):
    """Causal attention, which notes what autograd calls its kernel at each run."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.p = nn.Linear(WIDTH, 3 * WIDTH), p
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        self.seen.append(mixed.grad_fn.name() if mixed.grad_fn else "none")
        return x + mixed.transpose(1, 2).flatten(2).sin()  # keeps its input: recomputation comes so far


def blocks(num: int = 2, p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(p) for _ in range(num)))


def of(model: nn.Module, **settings: Any) -> nn.Module:
    return autotune.apply_to_model(Plan(settings=Settings(**settings)), model)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(x).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def inputs() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def task(p: float = 0.0, length: int = LENGTH, batch_size: int = BATCH) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: blocks(p=p),
        build_dataset=lambda: list(torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=batch_size,
    )


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"checkpointing": Checkpointing(kind="blocks")},
        {"checkpointing": Checkpointing(kind="selective")},
        {"layers": Layers(kind="exact")},
    ],
    ids=["alone", "blocks", "selective", "layers"],
)
@pytest.mark.parametrize("setting", [MATH, FLASH], ids=["math", "flash"])
def test_the_kernel_computes_each_run_of_the_block(setting, others):
    """Recomputation in backward too: torch's own checkpoint would notice another kernel by what it saves."""
    stock, applied = blocks(), of(blocks(), attention=setting, **others)
    for ours, theirs in zip(gradients(applied, inputs()), gradients(stock, inputs()), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert set(stock[0].seen) == {FLASH_NODE}
    assert len(applied[0].seen) == (2 if "checkpointing" in others else 1)
    assert all((name == FLASH_NODE) == (setting is FLASH) for name in applied[0].seen)


def test_math_draws_the_dropout_that_torch_falls_back_to():
    applied, stock = of(blocks(p=0.5), attention=MATH), blocks(p=0.5)
    assert all(map(torch.equal, gradients(applied, inputs()), gradients(stock, inputs())))


def test_torch_chooses_again_outside_of_the_block():
    """Also after an error within it."""
    model = of(blocks(p=0.5), attention=FLASH)
    with pytest.raises(PlanError), pytest.warns(UserWarning, match=r"(?i)flash|dropout"):
        model(inputs().requires_grad_())
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).grad_fn.name() != FLASH_NODE
    assert F.scaled_dot_product_attention(q, q, q).grad_fn.name() == FLASH_NODE


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_the_kernel_does_not_compute_is_refused_before_a_trial():
    """A prediction runs the choice with all its conditions, over fake tensors."""
    plan = Plan(settings=Settings(attention=FLASH), budget=Budget(device="cpu"))
    with pytest.raises(PlanError, match=r"settings.attention.kind: flash does not compute the attention of Block: .*"):
        fit_memory_model(plan, task(p=0.5)).peak_bytes(BATCH)
    assert fit_memory_model(plan, task()).peak_bytes(BATCH) > 0


def test_another_error_of_the_block_is_its_own():
    model = of(blocks(), attention=FLASH)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(1, 2, 3))


def predicted(setting: Attention, target: Any) -> int:
    """Bytes at the peak of an optimizer step of 256 positions."""
    plan = Plan(settings=Settings(attention=setting), budget=Budget(device="cpu"))
    return fit_memory_model(plan, task(length=256), target=target).peak_bytes(BATCH)


@pytest.mark.parametrize(("target", "taken"), [("cpu", FLASH), ("cuda", EFFICIENT)])
def test_predicted_is_the_matrix_that_math_keeps(target, taken):
    """At least the weights of both blocks, 2 samples of 2 heads of 256 by 256 in fp32: 2 MiB."""
    weights = 2 * BATCH * HEADS * 256 * 256 * 4
    assert predicted(Attention(), target) == predicted(taken, target) < predicted(MATH, target) - weights


def test_for_a_card_flash_and_cudnn_take_half_precision_alone():
    for setting in (FLASH, CUDNN):
        plan = Plan(settings=Settings(attention=setting), budget=Budget(device="cpu"))
        with pytest.raises(PlanError, match="half precision alone"):
            fit_memory_model(plan, task(), target="cuda").peak_bytes(BATCH)
        half = plan.model_copy(update={"settings": plan.settings.having(Precision(kind="bf16"))})
        assert fit_memory_model(half, task(), target="cuda").peak_bytes(BATCH) > 0


def alias(x: Tensor) -> Tensor:
    return attend(x, x, x)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return alias(x)


class Inherits(ByHelper):
    pass


class Closure(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: F.scaled_dot_product_attention(y, y, y))(x)


def test_who_calls_attention_is_found_by_the_code_of_its_class():
    encoder = nn.TransformerEncoderLayer(8, 2)
    for model in (ByHelper(), Inherits(), Closure(), nn.Sequential(ByHelper()), encoder):
        assert ways(model) == ("sdpa",)
    assert ways(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))) == ()


def test_a_forward_of_the_instance_is_run_and_put_back():
    model, calls = blocks(1), []
    own = model[0].forward
    model[0].forward = mine = lambda x: (calls.append(1), own(x))[1]
    of(model, attention=MATH)(inputs().requires_grad_())
    assert calls == [1]
    assert model[0].seen[-1] != FLASH_NODE
    assert of(model)[0].forward is mine


def test_it_is_taken_off_and_copied_and_pickled():
    model = of(blocks(), attention=MATH)
    for one in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert all(map(torch.equal, gradients(one, inputs()), gradients(model, inputs())))
        assert FLASH_NODE not in one[0].seen
    gradients(of(model), inputs())
    assert model[0].seen[-1] == FLASH_NODE
    assert "forward" not in vars(model[0])


def test_a_compiled_program_is_refused():
    """Where it breaks within such a forward, torch 2.13 computes the rest by the kernel of its own choice."""
    settings = Settings(attention=MATH)
    assert "attention: a compiled program" in settings.having(Compile(kind="model")).conflict()
    assert settings.having(Checkpointing(kind="blocks"), Layers(kind="exact")).conflict() is None


def test_a_device_has_its_kernels():
    known = facts_of(ZOO["gpt"])
    assert Attention.choices(known) == (Attention(), MATH)  # flash is what torch takes on a CPU
    assert "a CPU has the kernels math and flash" in EFFICIENT.unavailable(known)
    assert "only models of transformers" in Attention(kind="eager").unavailable(known)
    card = Device(type="cuda", name="card", memory_bytes=2**34, bf16=True, capability=(9, 0))
    assert Attention.choices(known.model_copy(update={"device": card})) == (Attention(), MATH, EFFICIENT, FLASH, CUDNN)
    old = known.model_copy(update={"device": card.model_copy(update={"capability": (7, 5)})})
    assert Attention.choices(old) == (Attention(), MATH, EFFICIENT)
    assert "compute capability 8.0" in FLASH.unavailable(old)


def test_presets_leave_it_out_until_it_is_listed():
    for name in ("default", "lossy"):
        assert load_space(name).choices(facts_of(ZOO["gpt"]))["attention"] == (Attention(),)
    assert "attention" not in load_space("exact").choices(facts_of(ZOO["gpt"]))


def test_a_model_without_attention_is_refused():
    with pytest.raises(PlanError, match=r"settings.attention.kind: math needs modules .* Leave attention out"):
        autotune.apply(Plan(settings=Settings(attention=MATH)), ZOO["mlp"])


def test_it_is_said():
    assert (MATH.describe(), Attention().describe()) == ("attention by math", "attention as torch chooses")


def configured(by: str, **others: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=11, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_implementation=by, **others,
    )  # fmt: skip


def gpt2(config: Any) -> Any:
    from transformers import GPT2Model

    torch.manual_seed(0)
    return GPT2Model(config)


def gradients_of_gpt2(model: Any) -> list[Tensor]:
    torch.manual_seed(1)  # dropout behind the attention
    loss = model(torch.arange(22).remainder(11).view(2, 11)).last_hidden_state.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize(("own", "kind"), [("eager", "flash"), ("eager", "math"), ("sdpa", "eager"), ("sdpa", "math")])
def test_a_model_of_transformers_is_switched_alone_and_back(own: str, kind: str):
    """Another of the same configuration stays as it was."""
    config = configured(own)
    stock, model = gpt2(config), gpt2(config)
    assert ways(model)[0] == own
    of(model, attention=Attention(kind=kind))
    found, wanted = gradients_of_gpt2(model), gradients_of_gpt2(stock)
    assert ways(stock)[0] == own
    assert ways(model)[0] == ("eager" if kind == "eager" else "sdpa")
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(map(torch.equal, gradients_of_gpt2(of(model)), wanted))
    assert ways(model)[0] == own


def llama(by: str, **others: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **others}
    config = transformers.LlamaConfig(**sizes, vocab_size=11, use_cache=False, attn_implementation=by)
    return transformers.LlamaModel(config)


def test_a_search_offers_a_switched_model_what_it_does_not_do_today():
    inference = {"inference": True}
    card = {"device": BARE.device.model_copy(update={"type": "cuda", "capability": (7, 0)})}
    for own, others, kinds in (
        ("eager", {}, ["math", "flash"]),
        ("sdpa", {}, ["math", "eager"]),
        ("sdpa", inference, ["math", "eager", "flex"]),
        ("sdpa", card, ["math", "efficient", "eager", "flex"]),
        ("flex_attention", inference, ["math", "flash", "eager"]),
    ):
        model = llama(own) if others else gpt2(configured(own))  # transformers' GPT-2 cannot be switched to flex
        facts = BARE.model_copy(update={"attention": ways(model), **others})
        assert [one.kind for one in Attention.choices(facts)] == ["default", *kinds]


FLEX = Attention(kind="flex")


def test_flex_needs_a_compiler_a_card_that_triton_knows_or_inference():
    known = BARE.model_copy(update={"attention": ("sdpa", "flex_attention"), "inference": True})
    assert FLEX.unavailable(known) is None
    assert FLEX.unavailable(known.model_copy(update={"no_compiler": "no g++"})) == "no g++"
    assert "no backward on a CPU" in FLEX.unavailable(known.model_copy(update={"inference": False}))
    old = known.device.model_copy(update={"type": "cuda", "capability": (6, 1)})
    assert "compute capability 7.0" in FLEX.unavailable(known.model_copy(update={"device": old}))
    assert "not all" in FLEX.unavailable(known.model_copy(update={"attention": ("sdpa",)}))
    assert "attention: a compiled program" in Settings(attention=FLEX).having(Compile(kind="model")).conflict()


def test_flex_is_predicted_for_a_card_as_what_keeps_no_weights():
    """Of grouped heads in fp32 too, which torch's fused kernels do not take."""
    peaks = {}
    for kind in ("default", "eager", "flex"):
        plan = Plan(settings=Settings(attention=Attention.model_validate({"kind": kind})), budget=Budget(device="cpu"))
        of_llama = autotune.Task(
            build_model=lambda: llama("sdpa", num_key_value_heads=1),
            build_dataset=lambda: list(torch.zeros(8, 256, dtype=torch.long)),
            compute_loss=lambda model, batch: model(batch).last_hidden_state.square().mean(),
            batch_size=BATCH,
        )
        peaks[kind] = fit_memory_model(plan, of_llama, target="cuda").peak_bytes(BATCH)
    weights = 2 * BATCH * 2 * 256 * 256 * 4
    assert peaks["flex"] + weights < peaks["default"] == peaks["eager"]


@pytest.mark.slow  # it is compiled
def test_flex_computes_what_the_model_does_in_inference_and_is_refused_in_training_on_a_cpu():
    model, words = llama("sdpa").eval(), torch.arange(22).remainder(11).view(2, 11)
    with torch.no_grad():
        wanted = model(words).last_hidden_state
        found = of(model, attention=FLEX)(words).last_hidden_state
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert ways(model)[0] == "flex_attention"
    with pytest.raises(PlanError, match=r"flex does not compute .* of LlamaAttention: .* no backward on a CPU"):
        model(words)
    with torch.no_grad():
        assert torch.equal(of(model)(words).last_hidden_state, wanted)


def test_a_model_that_shows_its_weights_stays_eager():
    assert ways(gpt2(configured("eager", output_attentions=True))) == ("eager",)


class TwoModels(nn.Module):
    """Of transformers, side by side."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.first, self.second = gpt2(configured(by)), gpt2(configured(by))


@pytest.mark.parametrize(("own", "kind", "switched"), [("sdpa", "eager", "eager"), ("eager", "math", "sdpa")])
def test_models_side_by_side_are_all_switched_and_back(own: str, kind: str, switched: str):
    model = TwoModels(own)
    by = lambda: [one.config._attn_implementation for one in (model.first, model.second)]  # noqa: E731
    of(model, attention=Attention.model_validate({"kind": kind}))
    assert by() == [switched] * 2
    of(model)
    assert by() == [own] * 2


def test_what_a_forward_takes_stays_known():
    """A Trainer reads from it which columns of a dataset a model wants."""
    model, block = gpt2(configured("sdpa")), blocks(1)
    names = [*inspect.signature(model.forward).parameters]
    of(model, attention=MATH)
    assert "forward" not in vars(model)
    assert [*inspect.signature(model.forward).parameters] == names
    assert [*inspect.signature(of(block, attention=MATH)[0].forward).parameters] == ["x"]
