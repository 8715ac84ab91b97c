"""A plan in a script that knows nothing of it: what is applied, to the object and to the bit; what is refused."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from command_line import autotune
from script_lines import run_here
from torch import nn

import autotune as package
from autotune.bundle import device_name
from autotune.plan import Budget, Environment, Plan, TaskRef
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.models.variant import Variant
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.techniques.support.facts import Identity
from autotune.techniques.support.recomputed import recomputed

SCRIPTS = Path(__file__).parents[1] / "scripts"


pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.fixture
def run(monkeypatch):
    """Run a script here, with a plan or just watched, and have what it defined."""
    return lambda script, *arguments, **given: run_here(script, monkeypatch, *arguments, **given)


HEAD = (
    "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
    "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.randn(8, 4)\n"
)


@pytest.fixture
def script(write):
    return write


def computes_in(model, layer, *inputs):
    """The dtype of a layer's output within the model."""
    seen = []
    taken_off = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.no_grad():
        model(*inputs)
    taken_off.remove()
    return seen[0]


def losses(said):
    return [line.split()[1] for line in said.splitlines() if line.startswith("loss")]


def plain(monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("call", ["optimizer.step(closure)", "optimizer.step(closure=closure)"])
def test_a_step_is_held_against_the_plan_once_its_closure_has_made_the_gradients(call, run, script, capsys):
    """As Lightning steps: forward and backward passes are within the optimizer's step."""
    body = (
        "seen = []\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n    loss = model(x).square().mean()\n    seen.append(loss.dtype)\n"
        "    loss.backward()\n    return loss\n"
        f"for _ in range(3):\n    {call}\n"
    )
    found = run(script(body), batch=Batch(micro=8), precision=Precision(kind="bf16"))
    assert len(found["seen"]) == 3
    assert "applied: batch 8, bf16" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(script(body), batch=Batch(micro=4, accumulate=2))
    assert "the script on 8 × 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mlp.py", "gpt.py"])
def test_a_plan_that_changes_nothing_changes_no_bit(name, run, monkeypatch, capsys):
    plain(monkeypatch, SCRIPTS / name)
    expected = losses(capsys.readouterr().out)
    run(SCRIPTS / name)
    assert losses(capsys.readouterr().out) == expected
    assert len(expected) > 4


def test_the_plans_techniques_are_in_force_in_the_scripts_own_objects(run, capsys):
    found = run(
        SCRIPTS / "gpt.py",
        "--batch_size",
        4,
        "--gradient_accumulation_steps",
        2,
        batch=Batch(micro=4, accumulate=2),
        precision=Precision(kind="bf16"),
        layers=Layers(kind="exact"),
        checkpointing=Checkpointing(kind="blocks", every=2),
        optimizer=Optimizer(kind="fused"),
    )
    model = found["model"]
    recomputing = [
        n for n, block in enumerate(model.blocks) if isinstance(vars(block).get("forward"), functools.partial)
    ]
    assert recomputing == [0, 2]
    assert model.blocks[0].forward.func is recomputed
    assert type(model.head) is not nn.Linear
    assert isinstance(model.head, nn.Linear)
    assert {group["fused"] for group in found["optimizer"].param_groups} == {True}
    assert {id(p) for p in model.parameters()} == {
        id(p) for group in found["optimizer"].param_groups for p in group["params"]
    }
    assert computes_in(model, model.head, *found["batch"](4)) is torch.bfloat16
    assert capsys.readouterr().err == (
        "autotune: applied: micro-batch 4 × 2, bf16, memory-saving layers, checkpoint every 2nd of the blocks, fused "
        "optimizer (plan.yaml)\n"
    )


def test_exact_techniques_leave_the_losses_as_they_were(run, capsys):
    """By as much as sums in another order may differ."""
    run(SCRIPTS / "gpt.py")
    expected = [float(loss) for loss in losses(capsys.readouterr().out)]
    run(SCRIPTS / "gpt.py", layers=Layers(kind="exact"), checkpointing=Checkpointing(kind="blocks"))
    assert [float(loss) for loss in losses(capsys.readouterr().out)] == pytest.approx(expected, rel=1e-5)


def test_losses_are_those_of_apply(run):
    """The same settings through a task file's way: the CNN, the same seed, the same order of samples."""
    settings = {
        "precision": Precision(kind="bf16"),
        "layers": Layers(kind="exact"),
        "memory_format": MemoryFormat(kind="channels_last"),
        "data_loading": DataLoading(num_workers=0),
        "optimizer": Optimizer(kind="foreach"),
    }
    found = run(SCRIPTS / "cnn.py", **settings)
    in_script = found["losses"] if "losses" in found else found["main"].__globals__["losses"]
    torch.manual_seed(0)
    order = torch.utils.data.DataLoader(range(64), 16, shuffle=True)
    globals_ = found["main"].__globals__
    model = globals_["build_model"]()
    task = package.Task(
        build_model=lambda: model,
        build_dataset=globals_["Images"],
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=16,
    )
    plan = Plan(settings=Settings(batch=Batch(micro=16), **settings))
    state = torch.get_rng_state()
    training = package.apply(plan, task)
    torch.set_rng_state(state)
    expected = []
    for number in range(2):
        for indices in order:
            images, labels = torch.utils.data.default_collate([task.build_dataset()[int(i)] for i in indices])
            with training.forward_context():
                loss = task.compute_loss(training.model, (images, labels))
            expected.append(loss.item())
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
        if number == 0:  # as the script does: its validation iterates a loader, which draws a seed
            iter(torch.utils.data.DataLoader(range(64), 16))
    assert in_script == expected


def test_the_training_loader_has_the_plans_options_and_validations_stays(run):
    found = run(SCRIPTS / "cnn.py", data_loading=DataLoading(num_workers=2, prefetch_factor=4, persistent_workers=True))
    names = found["main"].__globals__
    loader, validation = names["loader"], names["validation"]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)
    assert (validation.num_workers, validation.prefetch_factor) == (0, None)
    assert all(weight.is_contiguous(memory_format=torch.contiguous_format) for weight in names["model"].parameters())


def test_a_cached_epoch_gives_the_same_losses(run, capsys):
    run(SCRIPTS / "mlp.py")
    expected = losses(capsys.readouterr().out)
    found = run(SCRIPTS / "mlp.py", data_loading=DataLoading(cache="host"))
    assert losses(capsys.readouterr().out) == expected
    assert found["loader"].dataset is not found["data"]


def test_a_copy_of_the_model_and_its_pickle_are_without_the_plans_contexts(run, script):
    found = run(script("model(x).sum().backward(); optimizer.step()\n"), precision=Precision(kind="bf16"))
    model, x = found["model"], found["x"]
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert computes_in(model, model[0], x) is torch.bfloat16
    assert computes_in(copied, copied[0], x) is torch.float32
    assert computes_in(unpickled, unpickled[0], x) is torch.float32
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


CALLS = (
    "seen = []\nmodel[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))\n"
    "y = model(x)\nin_loss = torch.is_autocast_enabled('cpu')\ny.sum().backward(); optimizer.step()\n"
    "with torch.no_grad():\n    model(x).numpy()\n    evaluated = torch.is_autocast_enabled('cpu')\n"
)


def test_autocast_is_of_the_models_call_alone(run, script):
    """What it returns is as without: numpy, some losses and other models take no bf16."""
    found = run(script(CALLS), precision=Precision(kind="bf16"))
    assert found["seen"] == [torch.bfloat16] * 2
    assert (found["in_loss"], found["evaluated"], found["y"].dtype) == (False, False, torch.float32)


RETURNED = {
    "dict": ("{'y': y, 'n': 1}", "['y']"),
    "tuple": ("(None, [y])", "[1][0]"),
    "dataclass": ("Output(y)", ".y"),
    "what tells what it is": ("types.MappingProxyType({'y': y})", "['y']"),
}


@pytest.mark.parametrize("what", RETURNED)
def test_what_a_model_returns_is_in_the_dtype_that_it_has_without_a_plan(what, run, script):
    returned, taken = RETURNED[what]
    body = (
        "import types\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass Output:\n    y: torch.Tensor\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        y = super().forward(x)\n"
        f"        self.inside = y.dtype\n        return {returned}\n"
        "model = Net(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"y = model(x){taken}\ny.sum().backward(); optimizer.step()\n"
    )
    found = run(script(body), precision=Precision(kind="bf16"))
    assert (found["model"].inside, found["y"].dtype) == (torch.bfloat16, torch.float32)


GAN = (
    "import autotune\ncritic = nn.Linear(2, 1); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
    "autotune.prepare(model, optimizer)\nseen = []\n"
    "critic.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))\n"
    "for _ in range(2):\n    critic(torch.randn(8, 2)).sum().backward()\n    fake = model(x)\n"
    "    critic(fake.detach()).sum().backward(); theirs.step()\n"
    "    critic(fake).sum().backward(); optimizer.step()\n"
)


def test_another_model_that_takes_what_the_plans_returns_is_as_without_a_plan(run, script):
    """Before the first backward pass and after it, and after a step of its own."""
    found = run(script(GAN), precision=Precision(kind="bf16"))
    assert found["seen"] == [torch.float32] * 6


TWO = "other = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
STEP = "model(x).sum().backward(); optimizer.step()\n"
REFUSED = {
    "two optimizers of one model": (TWO + STEP, {"layers": Layers(kind="exact")}, "2 optimizers have parameters"),
    "a GAN": (
        "critic = nn.Linear(2, 1); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "critic(model(x)).sum().backward(); theirs.step(); optimizer.step()\n",
        {"optimizer": Optimizer(kind="foreach")},
        "steps several optimizers",
    ),
    "parts called one by one": (
        "model[2](model[1](model[0](x))).sum().backward(); optimizer.step()\n",
        {"layers": Layers(kind="exact")},
        "no module was called that holds what the optimizer steps",
    ),
    "no DataLoader": (
        STEP,
        {"data_loading": DataLoading(num_workers=2)},
        "iterates over no torch.utils.data.DataLoader",
    ),
    "processes of its own": (
        "torch.multiprocessing.spawn(print, nprocs=2)\n",
        {"optimizer": Optimizer(kind="foreach")},
        "Have torchrun start them",
    ),
    "another batch": (STEP, {"batch": Batch(micro=2, accumulate=4)}, "micro-batch 2 × 4, but the script on 8 × 1"),
    "autocast of its own": (
        "with torch.autocast('cpu', torch.bfloat16):\n    loss = model(x).sum()\nloss.backward(); optimizer.step()\n",
        {"precision": Precision(kind="bf16")},
        "turns autocast on itself",
    ),
    "a compiled model": (
        "model = torch.compile(model)\n" + STEP,
        {"layers": Layers(kind="exact")},
        "layers would not be applied",
    ),
    "an optimizer without that": (
        "optimizer = torch.optim.LBFGS(model.parameters())\nmodel(x).sum().backward(); optimizer.step(lambda: 0.0)\n",
        {"optimizer": Optimizer(kind="fused")},
        "LBFGS supports no choice",
    ),
    "more blocks than there are": (
        STEP,
        {"checkpointing": Checkpointing(kind="blocks", every=9)},
        "at least once, but got 9",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_script_makes_impossible_ends_it_with_the_reason(what, run, script, capsys, monkeypatch):
    """In a process that has compiled nothing, as a script's has that does not compile."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    body, settings, reason = REFUSED[what]
    with pytest.raises(SystemExit) as ended:
        run(script(body), **settings)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_plan_for_another_device_or_model_is_refused(run, script, capsys):
    identity = Identity(model="3 blocks of Linear, 90 parameters", names="0" * 8, batch="")
    task = TaskRef(source="model.py", fingerprint=f"sha256:{'0' * 64}", identity=identity)
    layers = Settings(layers=Layers(kind="exact"))
    for plan, reason in (
        (Plan(settings=layers, budget=Budget(device="cuda")), "the plan is for cuda, but the script trains on cpu"),
        (Plan(settings=layers, task=task), "found for another model: the model: 3 blocks of Linear → "),
    ):
        with pytest.raises(SystemExit):
            run(script(STEP), plan=plan)
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pruning": Pruning(kind="structured", ratio=0.5)}, "pruning takes parameters away"),
        ({"low_rank": LowRank(kind="svd")}, "low_rank takes parameters away"),
        ({"variant": Variant(kind="small")}, "the script builds its own model"),
        ({"optimizer_step": OptimizerStep(kind="in_backward")}, "in_backward frees gradients"),
        ({"precision": Precision(kind="fp16")}, "fp16 needs a loss scaler"),
    ],
)
@pytest.mark.parametrize("applies_itself", [False, True])
def test_what_no_script_can_have_is_refused_unless_it_applies_its_plan_itself(
    applies_itself, settings, reason, run, script, capsys
):
    """Before the first step: what such a row changes must be there before the optimizer is built."""
    own = (
        "import autotune\nfrom autotune.plan import Plan\nfrom autotune.techniques import Settings\n"
        "autotune.apply_to_model(Plan(settings=Settings()), model)\n"
    )
    if applies_itself:
        assert "x" in run(script(own + STEP), **settings)
        return
    with pytest.raises(SystemExit) as ended:
        run(script(STEP), **settings)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_prepare_names_one_of_several(run, script, capsys):
    """A GAN's generator, by name; without a plan applied the line does nothing."""
    line = "import autotune\nnamed = autotune.prepare(model, optimizer)\n"
    body = (
        "critic = nn.Linear(2, 1); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        + line
        + "critic(model(x)).sum().backward(); theirs.step(); optimizer.step()\n"
    )
    found = run(script(body), optimizer=Optimizer(kind="foreach"), layers=Layers(kind="exact"))
    assert found["named"] == (found["model"], found["optimizer"], None)
    assert found["optimizer"].defaults["foreach"] is True
    assert found["theirs"].defaults["foreach"] is None
    assert type(found["critic"]) is nn.Linear
    assert type(found["model"][0]) is not nn.Linear
    model = nn.Linear(2, 2)
    assert package.prepare(model) == (model, None, None)


def test_a_script_that_applies_its_plan_itself_is_left_to_it(run, script, capsys):
    body = (
        "import autotune\nfrom autotune.plan import Plan\nfrom autotune.techniques import Settings\n"
        "autotune.apply_to_model(Plan(settings=Settings()), model)\n" + STEP
    )
    found = run(script(body), layers=Layers(kind="exact"), optimizer=Optimizer(kind="foreach"))
    assert type(found["model"][0]) is nn.Linear
    assert found["optimizer"].defaults["foreach"] is None
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_run_fills_in_the_batch_and_hands_on_the_exit_code(tmp_path):
    """The whole way, in processes of their own: placeholders, environment, launcher, line on stderr."""
    (tmp_path / "plan.yaml").write_text(
        "schema: autotune/plan@1\nsettings:\n  batch: {micro: 8, accumulate: 2}\n  optimizer: {kind: fused}\n"
    )
    flags = ("--batch-size", "{batch.micro=8}", "--grad-accum={batch.accumulate=2}", "--say")
    ended = autotune("run", "plan.yaml", "--", sys.executable, "-u", SCRIPTS / "mlp.py", *flags, cwd=tmp_path)
    assert (ended.returncode, ended.left_behind) == (0, [])
    assert ended.stderr == "autotune: applied: micro-batch 8 × 2, fused optimizer (plan.yaml)\n"
    assert "fused True" in ended.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_a_scripts_plan_is_verified_by_the_command_that_starts_it(tmp_path, here):
    """By the trials of a search: its flags have the plan's batch, and its optimizer is the plan's."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: autotune/plan@1\nsettings:\n  batch: {micro: 8, accumulate: 2}\n  optimizer: {kind: fused}\n"
    )
    flags = ("--batch-size={batch.micro=16}", "--grad-accum={batch.accumulate=1}", "--steps=100000000")
    command = ("verify", "plan.yaml", "--executor=local", "--trial-time=0.2s", "--json", "--")
    ended = here(*command, sys.executable, SCRIPTS / "mlp.py", *flags, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["holds"]
    assert found["warnings"] == []
    assert "micro-batch 8 × 2" in ended.stderr


BATCHES = (
    "data = torch.utils.data.TensorDataset(x)\nbefore = model[0].weight.detach().clone()\n"
    "for (y,) in torch.utils.data.DataLoader(data, 8):\n    model(y).sum().backward(); optimizer.step()\n"
)
MEASURED = Environment(torch=torch.__version__, device=device_name("cpu"), autotune="0.1", python="3", threads=1)
DRIFT = {
    "torch": ({"torch": "1.0"}, "measured with torch 1.0, and this is .*: its speed and its peak may be others"),
    "device": ({"device": "Another"}, "measured with device Another, and this is .*: its speed is another's"),
    "threads": ({"threads": 3}, "measured with 3 threads, and here are 1: its speed is another's"),
    "batch": ({}, r"with batches of float32 \[\*, 5\], and here are float32 \[\*, 4\]: its speed and its peak"),
}


@pytest.mark.parametrize("what", DRIFT)
def test_what_differs_from_where_the_plan_was_measured_is_told_or_refused(what, run, script, capsys, monkeypatch):
    """Another model is refused anyway; the first step is not taken where a difference is."""
    changes, said = DRIFT[what]
    monkeypatch.setattr("autotune.script.plan.applied.other_model", lambda plan, model: None)
    identity = Identity(model="any", names="", batch="float32 [*, 5]" if what == "batch" else "float32 [*, 4]")
    task = TaskRef(source="train.py", fingerprint=f"sha256:{'0' * 64}", identity=identity)
    environment = MEASURED.model_copy(update=changes)
    plan, path = Plan(settings=Settings(), environment=environment, task=task), script(BATCHES)
    found = run(path, plan=plan)
    assert not torch.equal(found["model"][0].weight, found["before"])
    told, in_force = capsys.readouterr().err.splitlines()
    assert re.search(said, told)
    assert told.endswith("`autotune verify` measures it here.")
    assert in_force.startswith("autotune: applied")
    monkeypatch.setenv("AUTOTUNE_STRICT", "1")
    with pytest.raises(SystemExit) as ended:
        run(path, plan=plan)
    assert ended.value.code == 2
    assert "Search again here" in capsys.readouterr().err


class _Pairs:
    """A batch sampler of one's own, which says nothing of its size."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize("sampler", ["torch.utils.data.BatchSampler(range(8), 2, False)", "Pairs()"])
def test_a_batch_sampler_stays_and_its_batches_are_seen(sampler, run, script, monkeypatch):
    monkeypatch.setattr(torch.utils.data, "Pairs", _Pairs, raising=False)
    body = (
        "from torch.utils.data import Pairs\n"
        f"sampler = {sampler}\nloader = torch.utils.data.DataLoader(x, batch_sampler=sampler)\n"
        "for place, y in enumerate(loader):\n    model(y).sum().backward()\n"
        "    if place % 2: optimizer.step(); optimizer.zero_grad()\n"
    )
    batch = {"batch": Batch(micro=2, accumulate=2), "data_loading": DataLoading(num_workers=1, cache="none")}
    found = run(script(body), **batch)
    assert found["loader"].batch_sampler is found["sampler"]
    assert found["loader"].num_workers == 1
