"""A plan in a script never makes another training of it: what comes later, what is traced, what steps."""

from __future__ import annotations

import pytest
import torch
from script_lines import look_here
from torch import nn

from autotune.measure.timing.disturbance import one_thread
from autotune.plan import TaskRef
from autotune.script.refusal import tell_once
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.training.fingerprint import identify

HEAD = (
    "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, Dataset, TensorDataset\n"
    "torch.manual_seed(0)\n"
    "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.randn(8, 4)\n"
    "def train(model=model, optimizer=optimizer):\n"
    "    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()\n"
)


@pytest.fixture(autouse=True)
def _one_thread():
    tell_once.cache_clear()
    with one_thread():
        yield


@pytest.fixture
def looked_at(write, monkeypatch):
    """Why such a script is refused by the look at its first steps, or its facts."""
    return lambda body: look_here(write(body), monkeypatch)


def _weights(found):
    return torch.cat([p.detach().flatten() for p in found["model"].parameters()])


def _told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "autotune: applied: " not in line]


PROBE = (
    "for epoch in range(4):\n    train()\n    if epoch % 2:\n        probe = nn.Linear(4, 2)\n"
    "        theirs = torch.optim.AdamW(probe.parameters())\n        for _ in range(2): train(probe, theirs)\n"
)


def test_a_model_that_is_trained_later_is_left_alone(run, capsys):
    """A linear probe with an optimizer of its own, every other epoch: the plan was found for the model."""
    torch.manual_seed(0)
    fingerprint, identity = identify(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), ())
    task = TaskRef(source="script.py", fingerprint=fingerprint, identity=identity)
    expected = run(PROBE)
    capsys.readouterr()
    tell_once.cache_clear()
    found = run(PROBE, task=task, layers=Layers(kind="exact"), optimizer=Optimizer(kind="foreach"))
    assert _weights(found).tolist() == pytest.approx(_weights(expected).tolist(), rel=1e-5)
    assert type(found["probe"]) is nn.Linear
    assert found["theirs"].defaults["foreach"] is None
    model, optimizer = _told(capsys)
    assert "a model that is trained later is left as the script has it: task.identity" in model
    assert optimizer == "autotune: the script steps another optimizer too (AdamW), which is left alone."


LATER = {
    "a critic's optimizer": (
        "critic = nn.Linear(2, 1); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "train()\ncritic(model(x)).sum().backward(); theirs.step(); train()\n",
        {"optimizer": Optimizer(kind="foreach")},
        "the script steps another optimizer too (SGD), which is left alone.",
    ),
    "a model of fewer blocks": (
        "train()\nmodel = nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train(model, optimizer)\n",
        {"checkpointing": Checkpointing(kind="blocks", every=3)},
        "a model that is trained later is left as the script has it: ",
    ),
    "a loader that makes no batches": (
        "for y in DataLoader(x, 4): train()\nfor y in DataLoader(x, batch_size=None): train()\n",
        {"data_loading": DataLoading(cache="host")},
        "a DataLoader that was made later is left as the script has it: ",
    ),
    "a plan of its own": (
        "train()\nimport autotune\nfrom autotune.plan import Plan\nfrom autotune.techniques import Settings\n"
        "autotune.apply_to_optimizer(Plan(settings=Settings()), optimizer)\ntrain()\n",
        {"optimizer": Optimizer(kind="foreach")},
        "the script applies a plan itself, after steps with this one, of which no more is put on.",
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_nothing_ends_a_job_after_its_first_step(what, run, capsys):
    body, settings, said = LATER[what]
    found = run(body + "came_to_its_end = True\n", **settings)
    assert found["came_to_its_end"]
    line, *_ = _told(capsys)
    assert line.startswith(f"autotune: {said}")


TRACED = {
    "jit.trace": "torch.jit.trace(model, x)\n",
    "add_graph": (
        "from torch.utils.tensorboard import SummaryWriter\nSummaryWriter(f'{__file__}.graph').add_graph(model, x)\n"
    ),
    "export": "torch.export.export(model, (x,))\n",
    "after training too": "train(); train()\ntraced = torch.jit.trace(model, x)\nassert traced(x).dtype is x.dtype\n",
}


@pytest.mark.parametrize("what", TRACED)
def test_nothing_is_applied_to_a_model_that_is_traced(what, run, capsys):
    """The plan comes with the first call that trains."""
    if what == "add_graph":
        pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    settings = {
        "layers": Layers(kind="exact"),
        "precision": Precision(kind="bf16"),
        "checkpointing": Checkpointing(kind="blocks", every=1),
    }
    trace = f"{TRACED[what]}after = [type(one) for one in model]\nautocast = torch.is_autocast_enabled('cpu')\n"
    found = run(f"{trace}train()\n", **settings)
    assert found["autocast"] is False
    if what != "after training too":
        assert found["after"] == [nn.Linear, nn.ReLU, nn.Linear]
    assert type(found["model"][0]) is not nn.Linear
    assert "applied: bf16, memory-saving layers" in capsys.readouterr().err


SAM = (
    "class SAM(torch.optim.Optimizer):\n    def __init__(self, parameters, base, **options):\n"
    "        super().__init__(parameters, options)\n        self.base_optimizer = base(self.param_groups, **options)\n"
    "    def second_step(self):\n        self.base_optimizer.step()\n"
    "sam = SAM(model.parameters(), torch.optim.AdamW, lr=0.1)\ndel optimizer\n"
    "def train_flat():\n    sam.zero_grad(); model(x).square().mean().backward(); sam.second_step()\n"
    "train.__defaults__ = ()\n"
)


def test_of_several_optimizers_the_refusal_tells_which_step(looked_at):
    said = looked_at(f"{SAM}while True: train_flat()\n")
    assert (
        "2 optimizers have parameters of the same model, and a plan is for one: SAM of 58 parameters never stepped, "
        in said
    )
    assert "AdamW (the base_optimizer of SAM) of 58 parameters stepped 10 times. Name the one that steps" in said


def test_naming_the_optimizer_that_never_steps_is_told_soon(looked_at):
    """After ten steps of the other, which has the same parameters."""
    said = looked_at(f"{SAM}import autotune\nautotune.prepare(model, sam)\nwhile True: train_flat()\n")
    assert "the optimizer that autotune.prepare names makes no step: " in said
    assert "AdamW (the base_optimizer of SAM) of 58 parameters stepped 10 times, SAM of 58 parameters never" in said


def test_an_optimizer_of_other_parameters_may_step_often_before_the_named_one(looked_at):
    """A critic's, twenty times."""
    body = (
        "import autotune\nautotune.prepare(model, optimizer)\n"
        "critic = nn.Linear(4, 2); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "for _ in range(20): train(critic, theirs)\nwhile True: train()\n"
    )
    assert looked_at(body).optimizer == "SGD"


def test_two_optimizers_of_two_models_are_told_by_class_and_size(looked_at):
    body = (
        "critic = nn.Linear(4, 2); theirs = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "while True:\n    train(); train(critic, theirs)\n"
    )
    said = looked_at(body)
    assert "several optimizers (SGD of 58 parameters stepped once, SGD of 10 parameters stepped once), and" in said
