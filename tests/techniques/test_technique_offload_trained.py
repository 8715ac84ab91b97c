"""``offload`` of parameters that train: its contract, what is written where, and what is in memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
from functools import partial
from typing import Any

import pytest
import torch
from search_tables import facts
from torch import nn

import autotune
from autotune.errors import PlanError, SpaceError, UserError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.types import TimeLaw
from autotune.measure.feed import repeated
from autotune.measure.profiling.tracer import Tracer
from autotune.measure.profiling.watch import watched_step
from autotune.plan import Budget, Plan
from autotune.task import Task
from autotune.techniques import Settings, Technique, offload
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.optimizers.trained_weights import TrainedWeights
from autotune.techniques.precision import Precision
from autotune.techniques.support.disk import offloading
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.testing.facts import facts_of
from autotune.testing.runs import run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.training.training import Training
from autotune.units import MIB

TRAINED = Offload(kind="parameters", trained=True)
IN_BACKWARD = OptimizerStep(kind="in_backward")
FEATURES, SAMPLES = 512, 16

pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.mark.usefixtures("_everything")
class TestOffloadOfWhatTrains(TechniqueContract):
    technique = Offload
    bitwise = True
    beside = (IN_BACKWARD,)
    keeps_gradients = False
    lacking = (TRAINED,)
    refuses = {
        "accumulation": "accumulation adds them up",
        "clipping": r"the norm of all gradients is to be clipped at 0\.1",
        "loss scaler": "before the loss scaler has seen all gradients",
    }

    @pytest.fixture
    def _everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors of any size: the zoo's are small."""
        for module in (offload, offloading):
            monkeypatch.setattr(module, "_LEAST_BYTES", 1)

    def _choices(self, task: Task) -> tuple[Technique, ...]:
        """Nobody is offered it, since it takes ``optimizer_step``."""
        return tuple(one for one in (Offload(), TRAINED) if one.unavailable(facts_of(task)) is None)


def block() -> nn.Module:
    """Two weights of 1 MiB, and biases that stay in memory."""
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES))


BUILDS = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW with amsgrad": partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "foreach Adam": partial(torch.optim.Adam, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": partial(torch.optim.Muon, lr=0.1),
}


def task(number: int = 3, build: Any = torch.optim.AdamW, is_biased: bool = True) -> Task:
    def model() -> nn.Module:
        made = nn.Sequential(*(block() for _ in range(number)))
        for one in made.modules() if not is_biased else ():
            if isinstance(one, nn.Linear):
                one.bias = None
        return made

    return Task(
        build_model=model,
        build_dataset=lambda: list(torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: (model(batch) - batch).square().mean(),
        build_optimizer=lambda parameters: build(parameters),
        batch_size=SAMPLES,
    )


def of(setting: Offload = TRAINED, **others: Any) -> Settings:
    settings = {"batch": Batch(micro=SAMPLES), "optimizer_step": IN_BACKWARD, **others}
    return Settings(offload=setting, **settings)


def trained(number: int = 3, steps: int = 1, **others: Any) -> Training:
    training = autotune.apply(Plan(settings=of(**others)), task(number))
    for batch, _ in zip(training.loader, range(steps), strict=False):
        training.step(batch)
    return training


def weights_of(training: Training) -> list[Any]:
    return [one for one in training.model.parameters() if one.dim() == 2]


@pytest.mark.parametrize("name", BUILDS)
def test_every_class_trains_as_stock_does(name):
    """Losses, weights and biases, to the bit."""
    ours, stock = (
        run_applied(task(build=BUILDS[name], is_biased=name != "Muon"), of(one)) for one in (TRAINED, Offload())
    )
    assert ours.equals(stock)


@pytest.mark.parametrize(
    "others",
    [
        {"precision": Precision(kind="bf16")},
        {"checkpointing": Checkpointing(kind="blocks")},
        {"layers": Layers(kind="exact")},
        {"optimizer_state": OptimizerState(kind="8bit")},
        {"optimizer_state": OptimizerState(kind="factored")},
    ],
    ids=["bf16", "checkpointing", "layers", "8bit", "factored"],
)
def test_it_trains_beside_others_as_they_do_alone(others):
    """To the bit, with the noise that 8 bits are rounded by."""
    ours, stock = (run_applied(task(), of(one, **others)) for one in (TRAINED, Offload()))
    assert ours.equals(stock)


def test_weights_and_state_are_in_the_file_and_not_in_memory():
    """AdamW has two averages of each of six weights of 1 MiB; biases, of 2 KiB, stay."""
    training = trained()
    rows = training.optimizer.state
    for one in weights_of(training):
        kept = [one, rows[one]["exp_avg"], rows[one]["exp_avg_sq"]]
        assert all(isinstance(tensor, OffloadedWeight) and tensor._content._held is None for tensor in kept)
    there = [*training.model.parameters(), *(value for row in rows.values() for value in row.values())]
    assert sum(one.untyped_storage().nbytes() for one in there) == 3 * 6 * 4 * FEATURES + 4 * len(rows)
    assert weights_of(training)[0].store.file().end == 3 * 6 * MIB


def test_an_update_is_made_in_the_file():
    """Where the numbers are, of which none is had anew."""
    training = trained()
    (weight, *_), batch = weights_of(training), next(iter(training.loader))
    (before, end), numbers = (weight._content._place, weight.store.file().end), weight.numbers().clone()
    training.step(batch)
    assert weight._content._place is before
    assert weight.store.file().end == end
    assert not torch.equal(weight.numbers(), numbers)


def test_other_blocks_keep_theirs_and_frozen_weights_go_too():
    training = trained(setting=Offload(kind="parameters", trained=True, blocks=(1,)))
    moved = [isinstance(one, OffloadedWeight) for one in weights_of(training)]
    assert moved == [False, False, True, True, False, False]
    model = nn.Sequential(block(), block())
    model[0].requires_grad_(False)
    model = autotune.apply_to_model(Plan(settings=of()), model)
    assert [one.requires_grad for one in model.parameters() if isinstance(one, OffloadedWeight)] == [False] * 2 + [
        True
    ] * 2
    with pytest.raises(PlanError, match="its gradient is asked for now"):
        model[0].requires_grad_()
    assert model[1].requires_grad_(False).requires_grad_()[0].weight.requires_grad


def test_state_dicts_have_tensors_of_torchs():
    """Stock's model and optimizer read them, and go on to the same numbers."""
    ours = trained()
    stock = autotune.apply(Plan(settings=Settings(batch=Batch(micro=SAMPLES))), task())
    state, rows = ours.model.state_dict(), ours.optimizer.state_dict()
    assert {type(one) for row in rows["state"].values() for one in row.values()} == {torch.Tensor}
    assert {type(one) for one in state.values()} == {torch.Tensor}
    stock.model.load_state_dict(copy.deepcopy(state))
    stock.optimizer.load_state_dict(copy.deepcopy(rows))
    for batch in ours.loader:
        assert torch.equal(ours.step(batch).loss, stock.step(batch).loss)
    assert all(map(torch.equal, ours.model.parameters(), stock.model.parameters()))


def test_an_optimizer_without_it_has_its_state_in_memory():
    training = trained()
    plain = autotune.apply_to_optimizer(Plan(settings=Settings()), training.optimizer)
    assert {type(one) for row in plain.state.values() for one in row.values()} == {torch.Tensor}


def test_a_copy_trains_by_itself():
    training = trained(1)
    for one in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        weight, origin = one[0][0].weight, training.model[0][0].weight
        assert weight.requires_grad
        one(torch.ones(2, FEATURES)).sum().backward()
        assert weight.grad is not None
        assert origin.grad is None
        with torch.no_grad():
            weight.zero_()
        assert origin.any()


def test_a_forked_process_reads_what_was_there():
    """Its parent updates another place from then on."""
    training = trained(1)
    weight, batch = weights_of(training)[0], next(iter(training.loader))
    before = weight.numbers()[0, 0].item()
    (go, let_go), (told, tell) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.read(go, 1)
        found = weight.numbers()[0, 0].item()
        with weight.lent() as numbers:
            numbers.zero_()
        os.write(tell, str(found).encode())
        os._exit(0)
    training.step(batch)
    after = weight.numbers()[0, 0].item()
    os.write(let_go, b"!")
    os.waitpid(child, 0)
    assert float(os.read(told, 99)) == before != after
    assert weight.numbers()[0, 0].item() == after
    for one in (go, let_go, told, tell):
        os.close(one)


def _in_files() -> int:
    """Bytes of the files without a name that this process has open."""
    gc.collect()
    there = [
        one for one in os.scandir("/proc/self/fd") if one.is_file() and os.readlink(one.path).endswith("(deleted)")
    ]
    return sum(one.stat().st_size for one in there)


def test_files_do_not_grow_as_processes_are_forked():
    """Workers of a DataLoader, in each epoch: what they could read is freed once they have gone and it has moved."""
    others = _in_files()
    training = trained(1)
    batch, start = next(iter(training.loader)), _in_files() - others
    for _ in range(4):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        training.step(batch)
    assert start >= 3 * 2 * MIB
    assert _in_files() - others <= 2 * start


@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks")}], ids=["alone", "checkpointing"]
)
def test_predicted_is_what_a_step_takes(others):
    """Without six weights of 1 MiB and their twelve averages, but for those of one, and what its update takes."""
    plans = [Plan(settings=of(one, **others), budget=Budget(device="cpu")) for one in (Offload(), TRAINED)]
    stock, ours = (fit_memory_model(plan, task()).peak_bytes(SAMPLES) for plan in plans)
    assert 18 * MIB - 3 * MIB <= stock - ours <= 18 * MIB
    training = autotune.apply(plans[1], task())
    batch = next(iter(training.loader))
    for _ in range(2):  # the optimizer has its state from the first
        tracer = Tracer(training.model, training.optimizer, torch.device("cpu"))
        watched_step(training, task(), repeated(training.loader, batch), tracer)
    assert tracer.trace().peak_bytes() == ours


def test_a_disk_that_is_full_is_told_and_nothing_is_lost():
    training, stock = (autotune.apply(Plan(settings=of(one)), task(1)) for one in (TRAINED, Offload()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + MIB // 2, limits[1]))
    try:
        with pytest.raises(UserError, match=r"settings\.offload: .* cannot be written to .* Set TMPDIR"):
            training.step(next(iter(training.loader)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(map(torch.equal, stock.model.parameters(), training.model.parameters()))


def test_it_is_refused_where_it_cannot_be():
    for other, words in (
        (OptimizerStep(), "use optimizer_step: in_backward"),
        (TrainedWeights(kind="bf16"), "trained_weights rounds those that are in memory"),
    ):
        assert words in (of().model_copy(update={other.name: other}).conflict() or "")
    with pytest.raises(ValueError, match="trained: is of kind parameters"):
        Offload(kind="activations", trained=True)
    assert "leave trained out" in (TRAINED.unavailable(facts(num_blocks=3, inference=True)) or "")
    assert TRAINED not in Offload.choices(facts(num_blocks=3, num_parameters=10**9, num_trainable=10**9))
    assert TRAINED.in_blocks([1], 3) == Offload(kind="parameters", trained=True, blocks=(1,))
    assert TRAINED.describe() == "weights and optimizer state on disk"


@pytest.mark.parametrize("others", [{}, {"optimizer_state": OptimizerState(kind="8bit")}], ids=["stock", "8bit"])
def test_a_cast_is_of_the_numbers_that_were_cast(others):
    training = trained(1, **others)
    weight, batch = weights_of(training)[0], next(iter(training.loader))
    cast, before = weight.detach().to(torch.float64), weight.numbers().double()
    training.step(batch)
    assert torch.equal(cast.clone(), before)
    assert not torch.equal(weight.numbers().double(), before)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_is_refused_before_and_called_after(register):
    model, seen = nn.Sequential(block()), []
    weight = model[0][0].weight
    handle = getattr(weight, register)(lambda _: seen.append("before"))
    with pytest.raises(PlanError, match=r"a weight of \(512, 512\) has a hook .* Register it once the plan is applied"):
        autotune.apply_to_model(Plan(settings=of()), model)
    assert model[0][0].weight is weight
    handle.remove()
    model = autotune.apply_to_model(Plan(settings=of()), model)
    getattr(model[0][0].weight, register)(lambda _: seen.append("after"))
    model(torch.ones(1, FEATURES)).sum().backward()
    assert seen == ["after"]


def _in_a_list(model: nn.Module) -> Any:
    return [model[0][0].weight]


def _in_another_model(model: nn.Module) -> Any:
    other = nn.Linear(1, 1)
    other.weight = model[0][0].weight
    return other


def _in_a_function(model: nn.Module) -> Any:
    return partial(torch.add, model[0][0].weight)


@pytest.mark.parametrize(
    "hold", [_in_a_list, _in_another_model, _in_a_function, lambda model: torch.optim.AdamW(model.parameters())]
)
def test_a_weight_that_is_held_elsewhere_is_refused(hold):
    """What holds it would go on with the one that was. Once that is gone, or only has what does not train, it is
    taken."""
    model = nn.Sequential(block(), block())
    model[1].requires_grad_(False)
    holder = hold(model)
    with pytest.raises(PlanError, match=r"a weight of \(512, 512\) is held by a .* Apply the plan before that is made"):
        autotune.apply_to_model(Plan(settings=of()), model)
    del holder
    frozen = [*model[1].parameters()]
    autotune.apply_to_model(Plan(settings=of()), model)
    assert isinstance(model[0][0].weight, OffloadedWeight)
    assert frozen[0] is not model[1][0].weight


def test_garbage_holds_nothing():
    model = nn.Sequential(block())
    cycle = [model[0][0].weight]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        autotune.apply_to_model(Plan(settings=of()), model)
    finally:
        gc.enable()
    assert isinstance(model[0][0].weight, OffloadedWeight)


@pytest.mark.parametrize("later", [TRAINED, Offload()], ids=["offloaded", "stock"])
def test_an_optimizer_of_weights_that_were_replaced_is_refused(later):
    """It would train what is no longer there."""
    training, plan = trained(1), Plan(settings=of(later))
    model = autotune.apply_to_model(plan, training.model)
    with pytest.raises(PlanError, match="the optimizer has weights in whose place there are others since"):
        autotune.apply_to_optimizer(plan, training.optimizer)
    autotune.apply_to_optimizer(plan, torch.optim.AdamW(model.parameters()))


def test_fit_does_not_take_it():
    model = nn.Sequential(block())
    optimizer = torch.optim.AdamW(model.parameters())
    rows = {"offload": [{"kind": "parameters", "trained": True}], "optimizer_step": [{"kind": "in_backward"}]}
    with pytest.raises(SpaceError, match=r"fit: techniques: offload: the optimizer is built.* Leave trained out"):
        autotune.fit(
            model,
            torch.ones(2, FEATURES),
            budget="8GiB",
            optimizer=optimizer,
            loss=lambda model, batch: model(batch).sum(),
            techniques=rows,
        )


def test_its_time_is_not_counted():
    """By reads alone: what is written, and the state, are not among them."""
    law = TimeLaw(read_byte_s=1e-9, write_byte_s=1e-9)
    assert law.counts(Offload(kind="parameters"))
    assert not law.counts(TRAINED)
