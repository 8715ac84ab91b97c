"""``compile``: its contract on a CPU's compiler, what it keeps for backward, what it takes, and what it goes with."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from line_task import floats, line, training_of
from search_tables import facts
from torch import nn
from torch.utils.data import Subset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.estimates import Prediction
from autotune.measure import MeasureOptions
from autotune.measure.run import measure
from autotune.plan import Plan
from autotune.searches.predicted.predictions import _Foresight
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile, _recorded, lacking_compiler
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.testing.runs import relative_difference, run_applied, run_by_hand, without_dropout
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

needs_compiler = pytest.mark.skipif(lacking_compiler("cpu") is not None, reason=str(lacking_compiler("cpu")))
BLOCKS, MODEL = Compile(kind="blocks"), Compile(kind="model")
GRAPHS, AUTOTUNED = Compile(kind="model", mode="reduce-overhead"), Compile(kind="model", mode="max-autotune")
MLP = dataclasses.replace(ZOO["mlp"], build_optimizer=ZOO["gpt"].build_optimizer)


pytestmark = pytest.mark.usefixtures("one_thread_only")


class TestCompile(TechniqueContract):
    """On a CPU it offers nothing, so that this compiles nothing: those below do."""

    technique = Compile
    lacking = (BLOCKS, GRAPHS)


@pytest.fixture
def compiled(monkeypatch):
    """The programs that torch hands to a compiler, which here is none: they run operation by operation."""
    graphs, compile = [], torch.compile

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def stand_in(entry, fullgraph=False, **_):
        return compile(entry, backend=keep, fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", stand_in)
    return graphs


def whole_batches(name: str) -> autotune.Task:
    """A job of the zoo without dropout, and without its tail of 6, for which programs are compiled once more."""
    task = ZOO[name]
    return without_dropout(dataclasses.replace(task, build_dataset=lambda: Subset(task.build_dataset(), range(16))))


@pytest.mark.medium
@needs_compiler
@pytest.mark.parametrize(
    ("choice", "task"),
    [(BLOCKS, whole_batches("gpt")), (MODEL, MLP), pytest.param(AUTOTUNED, MLP, marks=pytest.mark.slow)],
    ids=["blocks", "model", "max-autotune"],
)
def test_a_compiled_model_trains_what_a_stock_one_does(choice, task):
    """A GPT's blocks; an MLP, with a tail: losses, gradients and trained parameters up to the order of additions; keys
    of ``state_dict`` stay."""
    stock = run_by_hand(task)
    compiled = run_applied(task, Settings(batch=Batch(micro=8), compile=choice))
    pairs = zip(compiled.losses, stock.losses, strict=True)
    assert all(float((a - b).abs()) <= 2e-5 * abs(float(b)) for a, b in pairs)
    assert relative_difference(compiled.gradients, stock.gradients) <= 2e-5
    assert relative_difference(compiled.state, stock.state) <= 2e-5
    assert compiled.state.keys() == stock.state.keys()


@needs_compiler
def test_the_optimizer_steps_within_a_compiled_models_backward():
    """Two techniques at once: each parameter is updated as its gradient comes out of the program."""
    compiled = run_applied(
        MLP, Settings(batch=Batch(micro=8), compile=MODEL, optimizer_step=OptimizerStep(kind="in_backward"))
    )
    assert relative_difference(compiled.state, run_by_hand(MLP).state) <= 2e-5


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "kind", "kept"), [(BLOCKS, "blocks", 0), (MODEL, "blocks", 0), (BLOCKS, "selective", 64 * (64 + 16))]
)
def test_recomputed_blocks_are_compiled_and_keep_their_inputs_alone(choice, kind, kept):
    """Gradients and running statistics are those of stock torch. Of two blocks, each 64 rows of 16 values through 64
    hidden ones, the inputs and parameters are kept, and none of the hidden; or what the two products give."""
    torch.manual_seed(0)
    stock, x = nn.Sequential(Wide(), Wide()), torch.randn(64, 16)
    fresh = copy.deepcopy(stock.state_dict())
    recomputing = Settings(compile=choice, checkpointing=Checkpointing(kind=kind))
    model = autotune.apply_to_model(Plan(settings=recomputing), copy.deepcopy(stock))
    least, parameters = 2 * (x.nbytes + 4 * kept), sum(p.nbytes for p in model.parameters())
    assert least <= saved_bytes(model, x) <= least + parameters
    for one in (stock, model):
        one.load_state_dict(fresh)
        one(x).square().sum().backward()
    assert relative_difference(gradients_of(model), gradients_of(stock)) <= 2e-5
    assert relative_difference(dict(model.named_buffers()), dict(stock.named_buffers())) <= 2e-5


class Wide(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


class Dropped(nn.Module):
    """A block that drops half of its input, times a weight of 1."""

    def __init__(self, prints: bool = False) -> None:
        super().__init__()
        self.weight, self.prints = nn.Parameter(torch.ones(())), prints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.prints:
            print("here")
        return nn.functional.dropout(torch.tanh(x * self.weight), 0.5, self.training) * self.weight


@needs_compiler
@pytest.mark.medium
def test_a_compiled_block_drops_the_same_when_it_is_computed_again():
    """Of y = 2 m tanh(w x) w, where a mask m of zeros and ones drops, and w = 1, the derivative by w is
    2 m (tanh x + x (1 - tanh² x)); y tells the mask."""
    recomputing = Settings(compile=BLOCKS, checkpointing=Checkpointing(kind="blocks"))
    model, x = autotune.apply_to_model(Plan(settings=recomputing), nn.Sequential(Dropped())), torch.rand(64) + 0.1
    y = model(x)
    y.sum().backward()
    kept = 2 * (y.detach() != 0)
    assert 0 < int((kept == 0).sum()) < 64
    expected = kept * (x.tanh() + x * (1 - x.tanh() ** 2))
    torch.testing.assert_close(model[0].weight.grad, expected.sum())


@needs_compiler
@pytest.mark.usefixtures("compiled")
def test_a_recomputed_block_that_is_no_program_is_an_error():
    """Not run in pieces, in which its buffers would change twice; without checkpointing it is."""
    for recomputes in (False, True):
        settings = Settings(compile=BLOCKS, checkpointing=Checkpointing(kind="blocks" if recomputes else "none"))
        model = autotune.apply_to_model(Plan(settings=settings), nn.Sequential(Dropped(prints=True)))
        said = pytest.raises(RuntimeError, match="Failed to trace builtin operator") if recomputes else nullcontext()
        with said:
            model(torch.ones(2))


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What a forward keeps for backward, the model's own parameters included."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum()
    return sum(sizes)


class Wave(nn.Module):
    """Eight sines, each of which keeps its input of 4 KiB for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x) @ torch.eye(32)
        return x


@needs_compiler
def test_a_budget_of_nothing_keeps_a_programs_inputs_alone():
    """4 KiB of ``x``, where a whole budget keeps each sine's input; the gradient is the same."""
    x = torch.randn(32, 32, requires_grad=True)
    kept, gradients = {}, {}
    for budget in (1.0, 0.0):
        plan = Plan(settings=Settings(compile=Compile(kind="model", activation_memory_budget=budget)))
        model = autotune.apply_to_model(plan, Wave())
        kept[budget] = saved_bytes(model, x)
        (gradients[budget],) = torch.autograd.grad(model(x).sum(), x)
    assert kept[1.0] >= 8 * 4096
    assert kept[0.0] <= 2 * 4096
    torch.testing.assert_close(gradients[0.0], gradients[1.0])


@pytest.mark.medium
@needs_compiler
def test_compiling_is_measured_and_is_no_part_of_the_speed():
    """A training that compiles for seconds says so; no timed window has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = training_of(ZOO["mlp"], compile=MODEL)
        found = measure(training, ZOO["mlp"], MeasureOptions(trial_time_s=0.3, parity_batch=None))
    windows_s = found.num_steps * ZOO["mlp"].batch_size / found.samples_per_s.value
    assert found.compile_s > 0
    assert windows_s + found.compile_s <= found.phases_s["warmup"] + found.phases_s["timed"]


@needs_compiler
def test_what_is_too_slow_compiles_no_other_program_than_it_trains(compiled):
    """Losses are compared without dropout, by a program of its own: only of a configuration that may win."""
    task, num_programs = ZOO["mlp"], []
    task = dataclasses.replace(task, build_dataset=lambda: Subset(ZOO["mlp"].build_dataset(), range(16)))
    task = dataclasses.replace(task, build_model=lambda: nn.Sequential(ZOO["mlp"].build_model(), nn.Dropout(0.1)))
    for to_beat in (None, 1e12):
        compiled.clear()
        options = MeasureOptions(trial_time_s=0.2, parity_batch=8, to_beat=to_beat)
        found = measure(training_of(task, batch=Batch(micro=8), compile=MODEL), task, options)
        num_programs.append(len(compiled))
        assert bool(found.parity.losses) == (to_beat is None)
    assert num_programs == [2, 1]


@needs_compiler
@pytest.mark.usefixtures("compiled")
def test_where_a_model_is_in_pieces_is_in_its_measurement():
    """Each place once, by file and line, with torch's reason; those of another model before it are not."""
    settings = {"batch": Batch(micro=8), "compile": MODEL}
    task = dataclasses.replace(MLP, build_model=lambda: nn.Sequential(MLP.build_model(), Dropped(prints=True)))
    options = MeasureOptions(trial_time_s=0.1, parity_batch=None)
    (told,) = measure(training_of(task, **settings), task, options).graph_breaks
    assert re.fullmatch(r'test_technique_compile.py, line \d+: print\("here"\) \(Failed to trace builtin .*\)', told)
    assert measure(training_of(MLP, **settings), MLP, options).graph_breaks == ()


def test_what_compiles_nothing_takes_no_time():
    """Seconds of compiling are zero without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure(training_of(ZOO["mlp"]), ZOO["mlp"], MeasureOptions(trial_time_s=0.1, parity_batch=None))
    assert found.compile_s == 0.0


@needs_compiler
def test_blocks_of_torchs_own_classes_are_compiled_and_share_a_program_where_they_are_alike():
    """Three ``nn.Sequential`` in a row, which ``nn.Module.compile`` leaves as they are without a word: two widths, two
    programs, although torch may keep but one for each piece of code."""
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    blocks = [nn.Sequential(nn.Linear(*widths), nn.ReLU()) for widths in ((5, 5), (5, 5), (5, 3))]
    model = autotune.apply_to_model(Plan(settings=Settings(compile=BLOCKS)), nn.Sequential(*blocks))
    counters.clear()
    with config.patch(recompile_limit=1), torch.no_grad():  # of backward there would be as many
        model(torch.ones(2, 5))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@needs_compiler
def test_a_later_process_finds_what_an_earlier_one_compiled(tmp_path, monkeypatch):
    """Inductor's cache on disk: of the same program, the second process compiles none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # for two kernels it takes longer
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # which it would try by compiling
    code = (
        "import torch, autotune\n"
        "from autotune.plan import Plan\n"
        "from autotune.techniques import Settings\n"
        "from autotune.techniques.compile import Compile\n"
        "plan = Plan(settings=Settings(compile=Compile(kind='model', activation_memory_budget=0.5)))\n"
        "model = autotune.apply_to_model(plan, torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))\n"
        "model(torch.ones(2, 3)).sum().backward()\n"
        "from torch._dynamo.utils import counters\n"
        "print(counters['inductor']['fxgraph_cache_hit'] + counters['aot_autograd']['autograd_cache_hit'])\n"
    )
    first, second = (
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert (first, second > 0) == (0, True)


def test_an_earlier_plans_compiling_is_taken_off_and_the_users_own_stays():
    """``apply_to_model`` twice on one model; a module that the user compiled is left alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].compile(backend="eager")
    own = model[0]._compiled_call_impl
    applied = autotune.apply_to_model(Plan(settings=Settings(compile=MODEL)), model)
    assert applied is model
    assert model._compiled_call_impl is not None
    assert copy.deepcopy(model)._compiled_call_impl is None
    autotune.apply_to_model(Plan(settings=Settings()), model)
    assert model._compiled_call_impl is None
    assert model[0]._compiled_call_impl is own


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"layers": Layers(kind="exact")}, "memory-saving layers would not be applied"),
        ({"compile": GRAPHS, "batch": Batch(micro=4, accumulate=2)}, "use mode default or max-autotune-no-cudagraphs"),
    ],
)
def test_what_it_does_not_go_with_is_said(other, said):
    """Two settings of which one would not be applied."""
    with pytest.raises(ValueError, match=said):
        Plan(settings=Settings(**{"compile": MODEL, **other}))


def on_cuda(**changes):
    """Facts of a model of two blocks on a card, with a compiler."""
    cuda = facts().device.model_copy(update={"type": "cuda"})
    return facts(**{"num_blocks": 2, "device": cuda, "no_compiler": None, **changes})


@pytest.mark.parametrize(
    ("samples", "modes"),
    [
        ({"effective_batch": 64}, ("default", "reduce-overhead", "max-autotune")),
        ({"effective_batch": 8}, ("reduce-overhead", "default", "max-autotune")),
        ({"effective_batch": 64, "micro_batch": 4}, ("reduce-overhead", "default", "max-autotune")),
    ],
)
def test_on_a_card_every_mode_is_offered_the_likeliest_first(samples, modes):
    """CUDA graphs, where a forward pass has few samples; of a model without blocks, the whole model alone."""
    every = [(one.kind, one.mode) for one in Compile.choices(on_cuda(**samples))]
    assert every == [("none", "default"), *((kind, mode) for mode in modes for kind in ("blocks", "model"))]
    bare = Compile.choices(on_cuda(**samples, num_blocks=0))
    assert [(one.kind, one.mode) for one in bare[1:]] == [("model", mode) for mode in modes]
    assert len({one.describe() for one in Compile.choices(on_cuda())}) == 7


def test_without_a_compiler_it_is_not_offered(monkeypatch):
    """The reason is told."""
    bare = on_cuda(no_compiler="there is no C++ compiler here")
    assert Compile.choices(bare) == (Compile(),)
    assert MODEL.unavailable(bare) == "there is no C++ compiler here"
    monkeypatch.setenv("PATH", "")
    assert "apt-get install g++" in str(lacking_compiler("cpu"))
    with pytest.raises(PlanError, match=r"no C\+\+ compiler .* Use kind: none here"):
        autotune.apply_to_model(Plan(settings=Settings(compile=MODEL)), nn.Linear(1, 1))


@pytest.mark.parametrize(("field", "value"), [("activation_memory_budget", 0.5), ("mode", "max-autotune")])
def test_what_says_how_to_compile_is_refused_without_compiling(field, value):
    """A budget bounds what a compiled program keeps."""
    with pytest.raises(ValueError, match=rf"{field}: kind none compiles nothing, but got {value}\. Use kind: blocks"):
        Compile(**{field: value})


def test_a_mode_is_a_field_of_a_plan_that_earlier_plans_lack():
    """Read back as it was written; a row without one is of torch's default mode."""
    plan = Plan(settings=Settings(compile=GRAPHS))
    assert "  compile: {kind: model, mode: reduce-overhead}\n" in plan.to_yaml()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_yaml(Plan(settings=Settings(compile=MODEL)).to_yaml()).settings.compile.mode == "default"


def test_cuda_graphs_are_refused_on_a_cpu():
    """In a search by a reason, in a plan by an error that says what to use."""
    assert "there are none on a CPU" in GRAPHS.unavailable(facts())
    assert AUTOTUNED.unavailable(facts()) is None
    with pytest.raises(PlanError, match=r"but the model is on a cpu\. Use mode: default here"):
        autotune.apply_to_model(Plan(settings=Settings(compile=GRAPHS)), nn.Linear(1, 1))


def test_a_step_may_be_there_twice_where_graphs_have_a_pool_of_their_own():
    """All that it needs for a moment, on a card, in the modes that record."""
    cuda, mode = on_cuda(), {"kind": "model"}
    assert [Settings(compile=one).may_hold(5, cuda) for one in (MODEL, GRAPHS, AUTOTUNED, Compile())] == [0, 5, 5, 0]
    assert Settings(compile=Compile(**mode, mode="max-autotune-no-cudagraphs")).may_hold(5, cuda) == 0
    assert Settings(compile=AUTOTUNED).may_hold(5, facts()) == 0


@pytest.mark.parametrize(("mode", "high"), [("default", 110), ("reduce-overhead", 150)])
def test_the_pool_of_graphs_is_in_the_upper_end_of_what_is_predicted(mode, high):
    """Of 100 bytes, 40 of them a step's: they may be there twice."""
    budget = SimpleNamespace(elapsed_s=lambda: 0.0)
    foresight = _Foresight(SimpleNamespace(options=SimpleNamespace(max_time=None), time_budget=budget, facts=on_cuda()))
    settings = Settings(batch=Batch(micro=8), compile=Compile(kind="model", mode=mode))
    foresight.known[foresight.key(settings).canonical()] = Prediction(peak_bytes=100, high_bytes=110, step_bytes=40)
    assert foresight.predict(settings) == Prediction(peak_bytes=100, high_bytes=high, step_bytes=40)


class Lent(torch.autograd.Function):
    """A product whose gradient lies in memory that the next forward overwrites, as CUDA graphs have it."""

    memory = torch.zeros(())

    @staticmethod
    def forward(ctx, weight, x):
        Lent.memory.fill_(torch.nan)
        ctx.save_for_backward(x)
        return weight * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        Lent.memory.copy_((gradient * x).sum())
        return Lent.memory.view(()), None


def weight_after_an_epoch(task):
    training = training_of(task, batch=Batch(micro=2, accumulate=2))
    for batch in training.loader:
        training.step(batch)
    return float(training.model.weight.detach())


def test_gradients_that_graphs_lend_are_copied_before_more_are_added(monkeypatch):
    """Samples 0 to 3 by twos: gradients of 0.25 and of 1.25, where losses are compared at another batch than the
    plan's. Without a copy the first is gone."""
    task = line(floats(4), compute_loss=lambda model, x: Lent.apply(model.weight, x).mean())
    with pytest.raises(TaskError, match="gradients of an optimizer step were cleared or changed"):
        weight_after_an_epoch(task)
    monkeypatch.setattr(Compile, "lends_gradients", True)
    assert weight_after_an_epoch(task) == 1.0 - 1.5


def test_on_a_card_what_trains_is_recorded_and_what_evaluates_is_not(monkeypatch):
    """By the options that torch's mode stands for."""
    model, asked = nn.Linear(1, 1), []
    parameter = SimpleNamespace(device=torch.device("cuda"), shape=(), dtype=torch.float32, requires_grad=True)
    monkeypatch.setattr(model, "parameters", lambda: iter([parameter]), raising=False)
    monkeypatch.setattr("autotune.techniques.compile.lacking_compiler", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda entry, options, **_: lambda: asked.append(options))
    AUTOTUNED.on_model(model, ())
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    model()
    with torch.no_grad():
        model()
    assert asked == [{**tuned, "triton.cudagraphs": True}, tuned]


def test_numbers_are_copied_out_of_graphs_and_evaluation_does_without():
    """A loss that a loop keeps; tensors are handed on as they are."""
    loss, logits = torch.ones((), requires_grad=True), torch.ones(2)
    call = _recorded(lambda: {"loss": loss, "logits": logits}, lambda: "plain")
    found = call()
    assert found["loss"] is not loss
    assert torch.equal(found["loss"], loss)
    assert found["logits"] is logits
    with torch.no_grad():
        assert call() == "plain"
