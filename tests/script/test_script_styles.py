"""Styles of training scripts: closures, batches that vary, models in parts, nested epochs, optimizers by hand."""

from __future__ import annotations

import sys

import pytest
import torch
from command_line import autotune
from search_tables import facts, options, run_search
from torch import nn

from autotune.measure import InspectOptions, MeasureOptions
from autotune.plan import Plan
from autotune.script.command import under_launcher
from autotune.script.plan.job import ScriptJob
from autotune.searches.events import Warned
from autotune.searches.requests import reference_settings
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.words import settings_words
from autotune.workers import Failed, Inspected, InspectRequest, Measured, MeasureRequest

HEAD = (
    "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\ntorch.manual_seed(0)\n"
)
TWO_PARTS = (
    "encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 4)\nx = torch.randn(8, 4)\n"
    "optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)\n"
    "import autotune\nautotune.prepare(nn.ModuleList([encoder, decoder]), optimizer)\nseen = []\n"
    "for part in (encoder, decoder): part.register_forward_hook(lambda one, given, found: seen.append(found.dtype))\n"
    "hidden = encoder(x)\nout = decoder(hidden)\nloss = (out - x).square().mean()\nloss.backward(); optimizer.step()\n"
)
BY_HAND = (
    "model = nn.Linear(4, 2)\nx = torch.randn(8, 4)\nfor _ in range(1000):\n    model(x).square().mean().backward()\n"
    "    with torch.no_grad():\n        for p in model.parameters(): p -= 0.1 * p.grad\n"
)
NO_BACKWARD = (
    "model, x = nn.Linear(4, 2), torch.randn(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "while True:\n    gradients = torch.autograd.grad(model(x).sum(), model.parameters())\n"
    "    for p, gradient in zip(model.parameters(), gradients): p.grad = gradient\n    optimizer.step()\n"
)
COMPILED = (
    "model, x = nn.Linear(4, 2), torch.randn(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "@torch.compile(backend='eager')\ndef loss_of(x):\n    return model(x).sum()\n"
    "loss_of(x).backward(); optimizer.step()\n"
)
OWN_AUTOCAST = (
    "class Net(nn.Linear):\n    @torch.autocast('cpu', dtype=torch.bfloat16)\n"
    "    def forward(self, x):\n        return super().forward(x)\n"
    "model, x = Net(4, 2), torch.randn(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(3):\n    model(x).float().square().mean().backward(); optimizer.step()\n"
)
FABRIC = (
    "from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu')\n"
    "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())\n"
    "model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
    "out = model(torch.randn(8, 4))\nfabric.backward(out.square().mean()); optimizer.step()\n"
)
CUT = (
    "loader, model = DataLoader(TensorDataset(torch.randn(64, 4)), 8), nn.Linear(4, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor (x,) in loader:\n"
    "    for part in x.split(4): model(part).square().mean().backward()\n    optimizer.step(); optimizer.zero_grad()\n"
)
PAIRS = (
    "def pairs(samples):\n    assert len(samples) % 2 == 0\n    return torch.stack([x for (x,) in samples])\n"
    "model, data = nn.Linear(4, 2), TensorDataset(torch.randn(64, 4))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x in DataLoader(data, 8, collate_fn=pairs):\n"
    "    model(x).square().mean().backward(); optimizer.step()\n"
)
CLOSURE = (
    "model = nn.Linear(4, 2)\nx = torch.randn(8, 4)\noptimizer = torch.optim.LBFGS(model.parameters())\n"
    "def closure():\n    optimizer.zero_grad()\n    loss = (model(x) - x[:, :2].exp()).square().mean()\n"
    "    loss.backward()\n    return loss\nwhile True: optimizer.step(closure)\n"
)
VARYING = (
    "model = nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n"
    "    for size in (3, 5, 9, 2, 7):\n        model(torch.randn(size, 4)).square().mean().backward()\n"
    "        optimizer.step(); optimizer.zero_grad()\n"
)
NESTED = (
    "data = TensorDataset(torch.arange(32.0).reshape(16, 2))\nloader = DataLoader(data, 4, shuffle=True)\n"
    "model = nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.0)\nread = []\n"
    "for epoch in range(2):\n    for (x,) in loader:\n        read.append(x[:, 0].tolist())\n"
    "        model(x).sum().backward(); optimizer.step()\n        with torch.no_grad():\n"
    "            for (y,) in loader:\n                break\n"
)
TWICE = (
    "loader = DataLoader(TensorDataset(torch.randn(64, 4)), 8)\nmodel = nn.Linear(4, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n    for (x,) in loader:\n"
    "        model(x).square().mean().backward()\n        model(x + 0.1).square().mean().backward()\n"
    "        optimizer.step(); optimizer.zero_grad()\n"
)
TWO_LOADERS = (
    "few, many = (DataLoader(TensorDataset(torch.randn(64, 4)), size) for size in (2, 6))\nmodel = nn.Linear(4, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n    for (x,), (y,) in zip(few, many):\n"
    "        model(torch.cat([x, y])).square().mean().backward()\n        optimizer.step(); optimizer.zero_grad()\n"
)
TIME_FIRST = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.embedding, self.rnn = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first={})\n"
    "    def forward(self, x):\n        return self.rnn(self.embedding(x))[0]\n"
    "model, x = Net(), torch.randint(9, (6, 3))\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n"
    "    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
)
EVALUATES_FIRST = (
    "data = TensorDataset(torch.randn(16, 4))\nloader, validation = DataLoader(data, 4), DataLoader(data, 8)\n"
    "model = nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor (x,) in validation:\n"
    "    with torch.no_grad(): model(x)\nfor (x,) in loader:\n    model(x).sum().backward(); optimizer.step()\n"
)
STAGES = (
    "backbone, head, x = nn.Linear(4, 8), nn.Linear(8, 2), torch.randn(8, 4)\nmodel = nn.Sequential(backbone, head)\n"
    "def train(parameters):\n    optimizer = torch.optim.SGD(parameters, lr=0.1)\n    for _ in range(2):\n"
    "        loss = model(x).square().mean(); loss.backward(); optimizer.step()\n"
    "    return optimizer\n"
    "first = train(head.parameters())\nsecond = train(model.parameters())\n"
    "model, seen = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), []\n"
    "for layer in model: layer.register_forward_hook(lambda one, given, found: seen.append(found.dtype))\n"
    "third = train(model.parameters())\n"
)
TWO_OF_ONE = (
    "model, x = nn.Linear(4, 2), torch.randn(8, 4)\nmatrices = torch.optim.SGD([model.weight], lr=0.1)\n"
    "biases = torch.optim.AdamW([model.bias], lr=0.1)\nimport autotune\nautotune.prepare(model, biases)\n"
    "for _ in range(3):\n    model(x).sum().backward(); matrices.step(); biases.step()\n"
)


@pytest.fixture
def looked_at(write, local_executor):
    """The facts of such a script, or why there are none."""

    def look(body):
        command = tuple(under_launcher((sys.executable, str(write(body)))))
        request = InspectRequest(
            id="inspect", task="script.py", command=command, device="cpu", options=InspectOptions()
        )
        outcome = local_executor.submit(request).result()
        assert isinstance(outcome, Inspected | Failed), outcome
        return outcome.facts if isinstance(outcome, Inspected) else outcome.message

    return look


@pytest.mark.slow
def test_a_step_that_calls_its_closure_often_is_of_one_pass(looked_at, run, capsys):
    found = looked_at(CLOSURE)
    assert (found.effective_batch, found.micro_batch, found.batch_varies) == (8, None, False)
    assert found.optimizer == "LBFGS"
    run(CLOSURE.replace("while True", "for _ in range(2)"), batch=Batch(micro=8))
    assert "applied: batch 8" in capsys.readouterr().err


@pytest.mark.slow
def test_steps_of_now_more_samples_now_fewer_are_measured_without_a_batch(looked_at, write, local_executor):
    found = looked_at(VARYING)
    assert found.batch_varies
    assert "now more samples, now fewer" in found.left_out["batch"]
    request = MeasureRequest(
        id="trial",
        task="script.py",
        command=tuple(under_launcher((sys.executable, str(write(VARYING))))),
        device="cpu",
        plan=Plan(settings=Settings()),
        options=MeasureOptions(trial_time_s=0.5, parity_batch=None),
        deadline_s=600.0,
    )
    assert isinstance(local_executor.submit(request).result(), Measured)


@pytest.mark.slow
def test_a_batch_that_is_passed_back_twice_is_the_loaders_and_stays(looked_at):
    """As sharpness-aware minimization does: 8 samples to a step, not 16, nor twice 4."""
    found = looked_at(TWICE)
    assert (found.effective_batch, found.passes, found.batch_varies) == (8, 2, False)
    assert "passes each batch back 2 times" in found.left_out["batch"]
    assert reference_settings(found).batch is None


@pytest.mark.slow
def test_of_two_loaders_that_are_read_in_turn_it_is_said_whose_batch_is_stated(looked_at):
    found = looked_at(TWO_LOADERS)
    assert found.effective_batch == 2
    assert "draws from 2 loaders, in batches of 2 and 6: the batch is that of the first" in found.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [False, True])
def test_where_time_comes_first_it_is_said_what_the_batch_counts(looked_at, batch_first):
    found = looked_at(TIME_FIRST.format(batch_first))
    assert found.effective_batch == 6
    assert [" ".join(said.split()[:7]) for said in found.warnings] == ["the model is called with time first,"][
        batch_first:
    ]


def test_a_plan_for_a_batch_that_varies_states_none(tmp_path, monkeypatch, in_memory):
    monkeypatch.chdir(tmp_path)
    known = facts(batch_varies=True, left_out={"batch": "of now more samples"})
    command = (sys.executable, "train.py", "--batch-size", "64", "--grad-accum", "1")
    run = run_search(options(task="train.py", command=command, trials=6), known=known)
    assert {settings.batch for settings in run.measured} == {None}
    assert run.plan.settings.batch is None
    assert settings_words(Settings()) == "as it stands"
    assert "batch stays as it is: of now more samples." in [e.message for e in run.events if isinstance(e, Warned)]


def test_a_model_by_name_may_be_called_in_parts(run, capsys):
    """Each part's call is under autocast."""
    found = run(TWO_PARTS, precision=Precision(kind="bf16"), layers=Layers(kind="exact"))
    assert found["seen"] == [torch.bfloat16] * 2
    assert found["hidden"].dtype is found["out"].dtype is torch.float32
    assert type(found["encoder"]) is not nn.Linear
    assert isinstance(found["decoder"], nn.Linear)
    assert "applied: bf16, memory-saving layers" in capsys.readouterr().err


@pytest.mark.slow
def test_parts_are_not_compiled_as_one(run, looked_at, capsys):
    with pytest.raises(SystemExit):
        run(TWO_PARTS, compile=Compile(kind="model"))
    assert "one by one, and compile would not be applied" in capsys.readouterr().err
    found = looked_at(TWO_PARTS + "while True:\n    decoder(encoder(x)).sum().backward(); optimizer.step()\n")
    assert "one by one" in found.left_out["compile"]
    assert found.effective_batch == 8


@pytest.mark.slow
def test_autocast_within_the_models_forward_is_the_scripts_own(run, looked_at, capsys):
    """As Accelerate and Fabric put it there: nothing tells of it before the first call."""
    with pytest.raises(SystemExit):
        run(OWN_AUTOCAST, precision=Precision(kind="bf16"))
    assert "the script turns autocast on itself" in capsys.readouterr().err
    run(OWN_AUTOCAST, optimizer=Optimizer(kind="foreach"))
    assert looked_at(OWN_AUTOCAST).own_autocast


def test_a_model_in_fabrics_wrapper_has_the_plan(run, capsys):
    found = run(FABRIC, layers=Layers(kind="exact"), optimizer=Optimizer(kind="foreach"))
    assert type(found["net"][0]) is not nn.Linear
    assert found["model"].module is found["net"]
    assert "applied: memory-saving layers, foreach optimizer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_recomputes_its_blocks_itself_is_not_recomputed_twice(run, looked_at, capsys):
    body = (
        "model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)\n"
        "model.gradient_checkpointing = True\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    model(x).square().mean().backward(); optimizer.step()\n"
    )
    with pytest.raises(SystemExit):
        run(body, checkpointing=Checkpointing(kind="blocks"))
    assert "turns gradient checkpointing on itself" in capsys.readouterr().err
    assert "gradient checkpointing on itself" in looked_at(body).left_out["checkpointing"]


@pytest.mark.slow
def test_a_loaders_batch_that_the_script_cuts_is_that_of_a_step(run, looked_at, capsys):
    found = looked_at(CUT)
    assert (found.effective_batch, found.micro_batch, found.batch_varies) == (8, 4, False)
    run(CUT, batch=Batch(micro=4, accumulate=2))
    assert "applied: micro-batch 4 × 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_collate_may_want_several_samples(looked_at):
    """As mixup does: what one sample tells of the data is then not known."""
    found = looked_at(PAIRS)
    assert (found.effective_batch, found.dataset_kind, found.dataset_bytes) == (8, "map", None)
    assert found.loader_samples_per_s == {}


@pytest.mark.slow
def test_a_model_called_in_a_compiled_function_is_refused(write, tmp_path):
    """In a process of its own: what others have compiled in this one changes what torch.compile sees."""
    (tmp_path / "plan.yaml").write_text("schema: autotune/plan@1\nsettings: {layers: {kind: exact}}\n")
    ended = autotune("run", "plan.yaml", "--", sys.executable, write(COMPILED), cwd=tmp_path)
    assert ended.returncode == 2
    assert "within a function that torch.compile compiles" in ended.stderr


def test_a_script_that_steps_by_hand_is_refused_soon(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run(BY_HAND)
    assert ended.value.code == 2
    assert "100 backward passes and built no torch.optim.Optimizer" in capsys.readouterr().err


@pytest.mark.slow
def test_gradients_that_no_backward_pass_makes_are_refused(looked_at):
    assert "steps without a backward pass" in looked_at(NO_BACKWARD)


def test_a_loader_may_be_read_within_its_own_epoch(run):
    """Workers that stay would begin the epoch anew, which then never ends."""
    expected = run(NESTED)["read"]
    assert len(expected) == 8
    assert run(NESTED, data_loading=DataLoading(num_workers=1, persistent_workers=True))["read"] == expected


def test_workers_that_stay_serve_the_next_epoch(run):
    body = NESTED.replace("for (y,) in loader:\n                break", "pass")
    body += "before = loader._iterator\nfor _ in loader: pass\n"
    found = run(body, data_loading=DataLoading(num_workers=1, persistent_workers=True))
    assert found["loader"]._iterator is not None


def test_of_several_loaders_the_last_before_the_first_step_is_trained_on(run, capsys):
    """A validation whose loop is not within no_grad comes before the training."""
    run(EVALUATES_FIRST, batch=Batch(micro=4))
    assert "applied: batch 4" in capsys.readouterr().err


def test_a_next_stage_and_a_next_model_have_the_plan_too(run):
    """An optimizer that is built once the last has stepped: for all layers after the head, for the next fold."""
    found = run(STAGES, precision=Precision(kind="bf16"), optimizer=Optimizer(kind="foreach"))
    assert [found[name].param_groups[0]["foreach"] for name in ("first", "second", "third")] == [True] * 3
    assert found["seen"] == [torch.bfloat16] * 4


def test_a_step_of_two_optimizers_is_of_the_passes_before_the_first(run, capsys):
    run(TWO_OF_ONE, batch=Batch(micro=8), optimizer=Optimizer(kind="foreach"))
    assert "applied: batch 8" in capsys.readouterr().err


def test_a_job_that_makes_no_step_ends_with_a_word_of_it(tmp_path, capsys):
    (tmp_path / "plan.yaml").write_text("schema: autotune/plan@1\nsettings: {optimizer: {kind: fused}}\n")
    job = ScriptJob(tmp_path / "plan.yaml")
    job.ended(RuntimeError())
    assert capsys.readouterr().err == ""
    job.ended(None)
    assert "ended without an optimizer step in this process" in capsys.readouterr().err
