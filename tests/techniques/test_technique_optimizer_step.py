"""``optimizer_step``: its contract, and a step in backward that keeps no gradients and trains what a stock one does."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from line_task import floats, line, training_of
from search_tables import facts
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers import optimizer_step
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.testing.runs import run_applied, without_dropout
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

IN_BACKWARD = OptimizerStep(kind="in_backward")
PLAN = Plan(settings=Settings(optimizer_step=IN_BACKWARD))


pytestmark = pytest.mark.usefixtures("one_thread_only")


class TestOptimizerStep(TechniqueContract):
    technique = OptimizerStep
    keeps_gradients = False
    lacking = (IN_BACKWARD,)
    refuses = {
        "accumulation": "accumulation adds them up",
        "clipping": r"the norm of all gradients is to be clipped at 0\.1",
        "loss scaler": "before the loss scaler has seen all gradients",
    }

    @pytest.fixture(autouse=True)
    def _every_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The zoo's are small."""
        monkeypatch.setattr(optimizer_step, "_LEAST_BYTES", 0)


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


BUILDS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    **{
        name: getattr(torch.optim, name)
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.0}]),
}


def trained(build, settings: Settings, scheduled: bool = False) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Four steps of a plain loop; the learning rate halves after each where that is asked for."""
    parameters = weights((3, 2), (4, 3), (2, 4))
    optimizer = autotune.apply_to_optimizer(Plan(settings=settings), build(parameters))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
    for step in range(4):
        a, b, c = parameters
        loss = (a @ c @ b).tanh().sum() * (step + 1)
        loss.backward()
        if settings.optimizer_step.kind == "in_backward":
            assert all(p.grad is None for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return parameters, optimizer


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_every_class_of_torchs_updates_as_it_does_after_backward(name, scheduled):
    """Parameters and state bit for bit, with the learning rate that a scheduler sets; no gradient is left."""
    (ours, ours_by), (stock, stock_by) = (
        trained(BUILDS[name], settings, scheduled) for settings in (PLAN.settings, Settings())
    )
    assert all(map(torch.equal, ours, stock))
    found, expected = ours_by.state_dict(), stock_by.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, row in expected["state"].items():
        for key, value in row.items():
            assert torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value)), (number, key)


def test_a_state_that_is_loaded_is_gone_on_with():
    """Two steps, a checkpoint, two more from it in a fresh process: as four at once."""

    def steps(training, number):
        batches = iter(training.loader)
        batch = next(batches)
        for _ in range(number):
            training.loader.positions.clear()
            training.step(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, first, second = (training_of(ZOO["mlp"], optimizer_step=IN_BACKWARD) for _ in range(3))
        steps(whole, 4)
        steps(first, 2)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        steps(second, 2)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())


def test_backward_leaves_no_gradient_and_the_step_is_taken():
    """In pieces: the weight moves by its gradient of 0.5 (samples 0 and 1) as backward has it."""
    training = training_of(line(floats(2), batch_size=2), optimizer_step=IN_BACKWARD)
    before = training.model.weight.item()
    (batch,) = training.loader
    with training.forward_context():
        loss = training.model(batch).mean()
    assert training.backward(loss)
    assert training.model.weight.grad is None
    moved = training.model.weight.item()
    assert moved != before
    assert training.optimizer_step()
    assert training.model.weight.item() == moved


@pytest.mark.parametrize("name", ["resnet", "gpt", "tied"])
def test_with_recomputation_it_trains_what_the_same_does_after_backward(name):
    """Blocks that are computed again in backward have the weights that they had in forward; bit for bit."""
    task = without_dropout(ZOO[name])
    ours, stock = (
        run_applied(
            task,
            Settings(
                batch=Batch(micro=8),
                layers=Layers(kind="recompute"),
                checkpointing=Checkpointing(kind="blocks"),
                optimizer_step=OptimizerStep(kind=kind),
            ),
        )
        for kind in ("in_backward", "after_backward")
    )
    assert all(map(torch.equal, ours.losses, stock.losses))
    assert all(torch.equal(value, stock.state[name]) for name, value in ours.state.items())


def test_a_second_plan_steps_once():
    """On the same parameters with the same or another optimizer; and none in backward after the default."""
    (weight,) = weights((1,))
    for _ in range(2):
        optimizer = autotune.apply_to_optimizer(PLAN, torch.optim.SGD([weight], lr=1.0))
        autotune.apply_to_optimizer(PLAN, optimizer)
    before = weight.item()
    weight.sum().backward()
    assert weight.item() == before - 1
    autotune.apply_to_optimizer(Plan(settings=Settings()), optimizer)
    weight.sum().backward()
    assert weight.item() == before - 1
    assert weight.grad.item() == 1


CONFLICTS = {
    "accumulation": {"batch": {"micro": 2, "accumulate": 2}},
    "loss scaler": {"precision": {"kind": "fp16"}},
}


@pytest.mark.parametrize("what", CONFLICTS)
def test_what_needs_all_gradients_is_refused_as_a_plan_is_read(what):
    rows = {"optimizer_step": {"kind": "in_backward"}, **CONFLICTS[what]}
    with pytest.raises(PlanError, match=f"^plan: settings: optimizer_step: in_backward .*{what}"):
        Plan.from_yaml(f"schema: autotune/plan@1\nsettings: {rows}\n")


def test_what_the_task_states_is_refused_as_a_plan_is_applied():
    task = line(floats(8), batch_size=4)
    with pytest.raises(PlanError, match="accumulation"):
        training_of(dataclasses.replace(task, micro_batch_size=2), optimizer_step=IN_BACKWARD)
    with pytest.raises(PlanError, match=r"norm of all gradients is to be clipped at 0\.5"):
        training_of(dataclasses.replace(task, max_grad_norm=0.5), optimizer_step=IN_BACKWARD)


def test_an_optimizer_that_looks_at_all_gradients_is_refused():
    """L-BFGS, a class of one's own, and a hook before the step."""
    (weight,) = weights((1,))

    class Mine(torch.optim.SGD):
        pass

    hooked = torch.optim.SGD([weight])
    hooked.register_step_pre_hook(lambda *_: None)
    for optimizer, reason in (
        (torch.optim.LBFGS([weight]), "but got LBFGS"),
        (Mine([weight]), "but got Mine"),
        (hooked, "step pre-hooks"),
    ):
        with pytest.raises(PlanError, match=f"in_backward: .*{reason}.* Use kind: after_backward"):
            autotune.apply_to_optimizer(PLAN, optimizer)


def test_a_loop_of_several_ranks_is_refused_before_anything_is_updated():
    """Averages of DistributedDataParallel would come after each rank had updated by its own gradient."""
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = autotune.apply_to_optimizer(PLAN, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        replica = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(PlanError, match="there are 2 ranks"):
            replica(torch.ones(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()


def test_it_is_offered_where_nothing_wants_all_gradients_and_they_take_32_mib():
    enough = {"num_trainable": 2**23}
    kinds = {"after_backward", "in_backward"}
    assert {choice.kind for choice in OptimizerStep.choices(facts(**enough))} == kinds
    for changed in ({"optimizer": "LBFGS"}, {"max_grad_norm": 1.0}, {"num_trainable": 2**23 - 1}):
        assert OptimizerStep.choices(facts(**{**enough, **changed})) == (OptimizerStep(),)


@pytest.mark.parametrize(("build", "state"), [(lambda p: torch.optim.SGD(p, lr=0.1), 0), (torch.optim.AdamW, 2)])
def test_the_memory_model_knows_that_one_gradient_is_there_at_a_time(build, state):
    """Eight weights of 256 KiB with their state: eight gradients on top after backward, one within it and what its
    update needs; as real steps of the same training take it."""
    weight = 2**18
    samples = [torch.ones(256)] * 64
    task = dataclasses.replace(
        line(samples, batch_size=8, build_optimizer=build),
        build_model=lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))),
    )
    stock, ours = (fit_memory_model(plan, task).peak_bytes(8) / weight for plan in (Plan(settings=Settings()), PLAN))
    assert 8 * (2 + state) <= stock < 8 * (2 + state) + 4
    assert 8 * (1 + state) + 1 <= ours < 8 * (1 + state) + 4
    assert fit_probed_model(PLAN, task).peak_bytes(8) / weight == pytest.approx(ours, rel=0.01)
