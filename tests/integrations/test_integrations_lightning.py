"""A plan in Lightning's Trainer trains as ``apply`` and ``Training`` do, or says why it cannot."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

import autotune
from autotune.errors import PlanError, TaskError
from autotune.files import hash_of
from autotune.integrations.checks import TRIED
from autotune.integrations.lightning import trainer_arguments, written
from autotune.measure import InspectOptions, MeasureOptions
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import EvaluationOptions
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Budget, KeptWeights, Plan, TaskRef
from autotune.randomness import seed_everything
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing, find_blocks
from autotune.techniques.compile import Compile, lacking_compiler
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.models.variant import Variant
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.techniques.support.recomputed import recomputed
from autotune.testing.zoo import ZOO
from autotune.training.fingerprint import identify
from autotune.training.weights import save_kept
from autotune.workers import Measured, MeasureRequest

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy

from autotune.integrations.lightning import PlanCallback, PlanPrecision
from autotune.integrations.lightning.checks import check_job

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
JOBS = ("resnet", "gpt")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Job(pl.LightningModule):
    """A job of the zoo, which notes what it trains with."""

    def __init__(self, name: str = "gpt") -> None:
        super().__init__()
        self.task = ZOO[name]
        self.net = self.task.build_model()
        self.losses: list[torch.Tensor] = []
        self.seen: set[tuple[int, bool, bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        on = torch.is_autocast_enabled("cpu")
        self.seen.add((len(batch[0]), on, torch.is_autocast_cache_enabled()))
        loss = self.task.compute_loss(self, batch)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(name: str = "gpt", count: int = 16) -> Subset:
    return Subset(ZOO[name].build_dataset(), range(count))


def loader(name: str = "gpt", count: int = 16, **options) -> DataLoader:
    return DataLoader(samples(name, count), **{"batch_size": 8, **options})


def trainer(plan: Plan, folder: Path, callbacks=(), **arguments) -> pl.Trainer:
    given = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": folder, **QUIET, **trainer_arguments(plan)}
    return pl.Trainer(callbacks=[PlanCallback(plan), *callbacks], **{**given, **arguments})


def fitted(plan: Plan, folder: Path, module: pl.LightningModule, data=None, **arguments) -> pl.Trainer:
    made = trainer(plan, folder, **arguments)
    made.fit(module, data if data is not None else loader())
    return made


def of(**settings) -> Plan:
    return Plan(settings=Settings(**settings))


EVERYTHING = of(
    batch=Batch(micro=4, accumulate=2),
    precision=Precision(kind="bf16"),
    layers=Layers(kind="exact"),
    checkpointing=Checkpointing(kind="blocks", every=2),
    optimizer=Optimizer(kind="fused"),
    data_loading=DataLoading(num_workers=1, prefetch_factor=3, persistent_workers=True),
)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(of(), id="nothing"),
        pytest.param(of(batch=Batch(micro=2, accumulate=4), precision=Precision(kind="fp32")), id="accumulation"),
        pytest.param(
            of(
                batch=Batch(micro=8),
                layers=Layers(kind="rounding"),
                memory_format=MemoryFormat(kind="channels_last"),
                optimizer_step=OptimizerStep(kind="in_backward"),
                data_loading=DataLoading(num_workers=0, cache="host"),
            ),
            id="in backward",
        ),
    ],
)
def test_losses_are_those_of_training_to_the_bit(name, plan, tmp_path):
    """Dropout included; clipped, where gradients are there to be clipped."""
    clip = None if plan.settings.optimizer_step.kind == "in_backward" else 0.5
    seed_everything(0)
    module = Job(name)
    fitted(plan, tmp_path, module, loader(name), gradient_clip_val=clip)

    stated = {"gradient_clip_val": clip}
    task = autotune.from_lightning(functools.partial(Job, name), functools.partial(loader, name), stated)
    training = autotune.apply(plan, task)
    expected = [training.step(batch).loss for batch in training.loader]
    assert len(expected) == 16 // (plan.settings.batch.micro if plan.settings.batch else 8)
    assert torch.equal(torch.stack(module.losses), torch.stack(expected))
    assert all(map(torch.equal, module.parameters(), training.model.parameters()))


@pytest.mark.parametrize("name", JOBS)
def test_all_of_a_plan_is_in_force_and_said_in_one_line(name, tmp_path, capsys):
    module = Job(name)
    made = fitted(EVERYTHING, tmp_path, module, loader(name))
    assert module.seen == {(4, True, True)}
    assert (made.accumulate_grad_batches, made.global_step) == (2, 2)
    blocks = find_blocks(Job(name))
    held = [m for m in module.modules() if getattr(vars(m).get("forward"), "func", None) is recomputed]
    assert [type(one).__name__ for one in held] == [type(one).__name__ for one in blocks[::2]]
    assert any("_autotune_site" in vars(one) for one in module.net.modules())
    assert made.optimizers[0].param_groups[0]["fused"] is True
    data = made.train_dataloader
    assert (data.num_workers, data.prefetch_factor, data.persistent_workers, data.batch_size) == (1, 3, True, 4)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune: ")]
    assert line == (
        "autotune: applied by Lightning: micro-batch 4 × 2, bf16, memory-saving layers, checkpoint every 2nd of "
        "the blocks, 1 loader worker (prefetch 3, persistent), fused optimizer"
    )


@pytest.mark.parametrize(
    "row", [Pruning(kind="structured", ratio=0.5), LowRank(kind="svd", least_features=4)], ids=["pruning", "low_rank"]
)
def test_a_smaller_model_is_there_before_its_optimizer(row, tmp_path, capsys):
    """What takes parameters away is put on the module before ``configure_optimizers``."""
    module, stock = Job("gpt"), Job("gpt")
    made = fitted(Plan(settings=Settings().having(row)), tmp_path, module, loader("gpt"))
    sizes = [sum(p.numel() for p in one.parameters()) for one in (module, stock)]
    assert sizes[0] < sizes[1]
    held = {id(p) for group in made.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in module.parameters()}
    assert made.global_step == 2
    assert f"applied by Lightning: {row.describe()}" in capsys.readouterr().err


class BuiltFused(Job):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def test_lightnings_own_bf16_keeps_no_casts_which_is_said(tmp_path, capsys):
    """Why there is a plugin."""
    module = Job()
    fitted(of(precision=Precision(kind="bf16")), tmp_path, module, plugins=[MixedPrecision("bf16-mixed", "cpu")])
    assert module.seen == {(8, True, False)}
    assert "casts weights at each use" in capsys.readouterr().err


class Gradients(Job):
    """Notes how many gradients there are as each forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.num_gradients: list[int] = []

    def training_step(self, batch, batch_idx):
        self.num_gradients.append(sum(one.grad is not None for one in self.parameters()))
        return super().training_step(batch, batch_idx)


def test_the_last_steps_gradients_are_not_beside_forwards_activations(tmp_path):
    """A trial clears them as its step ends, and its peak is the job's limit. What is accumulated stays."""
    whole, split = Gradients(), Gradients()
    fitted(of(), tmp_path, whole)
    assert whole.num_gradients == [0] * 2
    fitted(of(batch=Batch(micro=4, accumulate=2)), tmp_path, split)
    num_all = len([*split.parameters()])
    assert split.num_gradients == [0, num_all] * 2


def test_gradients_are_clipped_before_an_optimizer_that_was_built_fused(tmp_path):
    """Which Lightning's own plugin refuses; of one that a plan made fused it does not know."""
    plan, stock = of(precision=Precision(kind="bf16")), MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(plan, tmp_path, BuiltFused(), plugins=[stock], gradient_clip_val=1.0)
    assert fitted(plan, tmp_path, BuiltFused(), gradient_clip_val=1.0).global_step == 2
    fused = of(precision=Precision(kind="bf16"), optimizer=Optimizer(kind="fused"))
    assert fitted(fused, tmp_path, Job(), plugins=[stock], gradient_clip_val=1.0).global_step == 2


def test_a_short_window_is_divided_by_the_whole_ones_micro_batches(tmp_path):
    """The one difference: Lightning's last step of 4 + 2 samples is (g4 + g2) / 2, that of ``Training``
    (4 g4 + 2 g2) / 6."""
    plan = of(batch=Batch(micro=4, accumulate=2))
    data = TensorDataset(torch.arange(6.0)[:, None], torch.ones(6, 1))

    class Line(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 1))

        def training_step(self, batch):
            return (batch[0] @ self.weight - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Line()
    fitted(plan, tmp_path, module, DataLoader(data, batch_size=6))
    g4, g2 = -2 * (0 + 1 + 2 + 3) / 4, -2 * (4 + 5) / 2
    assert module.weight.item() == pytest.approx(-(g4 + g2) / 2)
    task = autotune.from_lightning(Line, lambda: DataLoader(data, batch_size=6))
    training = autotune.apply(plan, task)
    for batch in training.loader:
        training.step(batch)
    assert training.model.weight.item() == pytest.approx(-(4 * g4 + 2 * g2) / 6)


class OwnData(Job):
    """A module with its loader, built in ``setup``, which comes after callbacks'."""

    def setup(self, stage):
        self.data = samples()

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8)


class Sized(OwnData):
    def __init__(self):
        super().__init__()
        self.batch_size = 8

    def train_dataloader(self):
        return DataLoader(self.data, batch_sampler=Blocks(SequentialSampler(self.data), self.batch_size, False))


class Blocks(BatchSampler):
    """One that is not torch's."""


class Data(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader(batch_size=self.hparams.batch_size)


@pytest.mark.parametrize("kind", ["loader", "module", "attribute", "datamodule"])
def test_the_micro_batch_reaches_the_loader(kind, tmp_path):
    """Whoever has it; a batch sampler of one's own goes by the attribute."""
    plan = of(batch=Batch(micro=2, accumulate=2), layers=Layers(kind="exact"))
    module = {"module": OwnData, "attribute": Sized}.get(kind, Job)()
    given = loader()
    made = trainer(plan, tmp_path)
    if kind == "loader":
        made.fit(module, given)
    else:
        made.fit(module, datamodule=Data(8) if kind == "datamodule" else None)
    assert {size for size, *_ in module.seen} == {2}
    assert given.batch_size == 8
    assert made.global_step == 4
    if kind == "attribute":
        assert module.batch_size == 2
    if kind == "datamodule":
        assert made.datamodule.hparams.batch_size == 2


def test_a_batch_sampler_that_cannot_be_told_is_refused(tmp_path):
    data = samples()
    own = DataLoader(data, batch_sampler=Blocks(SequentialSampler(data), 8, False))
    with pytest.raises(PlanError, match=r"micro-batches of 2, but .* \(Blocks, batches of 8\)"):
        fitted(of(batch=Batch(micro=2)), tmp_path, Job(), own)


def test_a_module_that_builds_itself_is_changed_before_its_optimizer(tmp_path):
    class Late(Job):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            self.net = self.net or self.task.build_model()

    module = Late()
    fitted(of(checkpointing=Checkpointing(kind="blocks"), layers=Layers(kind="exact")), tmp_path, module)
    assert sum("forward" in vars(one) for one in module.modules()) == 3
    assert "configure_model" not in vars(module)


def test_fitting_again_changes_nothing_and_another_plan_takes_the_first_off(tmp_path):
    module = Job()
    classes = [type(one) for one in module.modules()]
    callback = PlanCallback(EVERYTHING)
    arguments = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **QUIET}
    for _ in range(2):
        pl.Trainer(callbacks=[callback], **arguments, **trainer_arguments(EVERYTHING)).fit(module, loader())
        held = [m.forward for m in module.modules() if "forward" in vars(m)]
        assert [one.func for one in held] == [recomputed, recomputed]
        assert not any(hasattr(one.args[0], "func") for one in held)
    assert "training_step" not in vars(module)
    fitted(of(), tmp_path, module)
    assert [type(one) for one in module.modules()] == classes
    assert not any("forward" in vars(one) for one in module.modules())


def test_a_copy_of_a_module_in_training_has_its_own_methods(tmp_path):
    """Weight averages copy it as a job is set up, and as it trains."""
    copies = []

    class Copying(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            copies.append(copy.deepcopy(pl_module))

        def on_train_batch_end(self, trainer, pl_module, *_):
            copies.append(copy.deepcopy(pl_module))

    module = OwnData()
    trainer(of(layers=Layers(kind="exact")), tmp_path, callbacks=[Copying()]).fit(module)
    for one in copies:
        methods = one.training_step, one.train_dataloader, one.configure_model
        assert all(method.__self__ is one for method in methods)


def test_a_resumed_optimizer_is_the_plans_too(tmp_path):
    """A checkpoint has the flags that the optimizer was saved with, and loading it brings them back."""
    first = fitted(of(optimizer=Optimizer(kind="foreach")), tmp_path, Job())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    made = trainer(of(optimizer=Optimizer(kind="fused")), tmp_path, max_epochs=2)
    made.fit(Job(), loader(), ckpt_path=tmp_path / "saved.ckpt")
    assert made.global_step == 4
    assert (made.optimizers[0].param_groups[0]["fused"], made.optimizers[0].param_groups[0]["foreach"]) == (True, False)


def test_what_would_set_the_batch_as_well_is_removed(tmp_path, capsys):
    others = [BatchSizeFinder(), GradientAccumulationScheduler({0: 3})]
    module = Sized()
    made = trainer(of(batch=Batch(micro=4, accumulate=2)), tmp_path, callbacks=others)
    made.fit(module)
    assert {size for size, *_ in module.seen} == {4}
    assert made.global_step == 2
    assert not set(others) & set(made.callbacks)
    assert "BatchSizeFinder removed: the batch is the plan's, GradientAccumulationScheduler removed" in (
        capsys.readouterr().err
    )


class Gan(Job):
    def configure_optimizers(self):
        return []


class Watching(Job):
    def on_before_optimizer_step(self, optimizer):
        assert optimizer is not None


def manual() -> Job:
    module = Job()
    module.automatic_optimization = False
    return module


REFUSED = {
    "manual": (of(), manual, {}, "optimizes manually"),
    "no optimizer": (of(), Gan, {}, "one optimizer, but configure_optimizers made"),
    "variant": (of(variant=Variant(kind="small")), Job, {}, r"settings\.variant: it makes another model"),
    "precision": (of(precision=Precision(kind="bf16")), Job, {"plugins": None}, r'bf16, but .* "32-true"'),
    "device": (Plan(budget=Budget(device="cuda"), settings=Settings()), Job, {}, "for cuda, but the Trainer .* cpu"),
    "clipping": (
        of(optimizer_step=OptimizerStep(kind="in_backward")),
        Job,
        {"gradient_clip_val": 1.0},
        "before the Trainer clips",
    ),
    "hook": (of(optimizer_step=OptimizerStep(kind="in_backward")), Watching, {}, r"Watching\.on_before_optimizer_step"),
    "two": (of(), Job, {"callbacks": [PlanCallback(of())]}, "two PlanCallbacks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_in_force_is_an_error_with_the_reason(what, tmp_path):
    plan, build, arguments, message = REFUSED[what]
    with pytest.raises(PlanError, match=message):
        fitted(plan, tmp_path, build(), **arguments)


def test_a_strategy_that_cuts_the_model_is_refused():
    """Without the process group that it would start."""
    made = SimpleNamespace(strategy=ModelParallelStrategy(1, 1), world_size=1)
    with pytest.raises(PlanError, match=r'ModelParallelStrategy cuts or moves the model.*strategy="auto"'):
        check_job(of(), made, Job())


def test_one_of_several_ranks_is_refused():
    made = SimpleNamespace(strategy=None, world_size=2)
    with pytest.raises(PlanError, match="in one process of Lightning so far, but got 2"):
        check_job(of(), made, Job())


def test_a_plan_for_another_model_is_refused(tmp_path):
    fingerprint, identity = identify(Job("resnet"), ())
    plan = Plan(task=TaskRef(source="x.py", fingerprint=fingerprint, identity=identity), settings=Settings())
    fitted(plan, tmp_path, Job("resnet"), loader("resnet"))
    with pytest.raises(PlanError, match=r"another model: .*Search again"):
        fitted(plan, tmp_path, Job("gpt"))


@pytest.mark.parametrize("settings", [{"batch": Batch(micro=2)}, {"data_loading": DataLoading(num_workers=0)}])
def test_loaders_that_are_not_one_dataloader_are_refused(settings, tmp_path):
    with pytest.raises(PlanError, match="one torch DataLoader, but the training loader is a dict"):
        fitted(of(**settings), tmp_path, Job(), {"a": loader(), "b": loader()})


def test_uneven_micro_batches_are_refused_by_the_arguments():
    with pytest.raises(PlanError, match=r"Lightning weighs all micro-batches .* alike"):
        trainer_arguments(of(batch=Batch(micro=4, accumulate=2, effective=7)))


@pytest.mark.medium
@pytest.mark.skipif(lacking_compiler("cpu") is not None, reason=str(lacking_compiler("cpu")))
def test_a_compiled_model_that_is_never_called_is_an_error(tmp_path):
    class Aside(Job):
        def training_step(self, batch, batch_idx):
            return self.task.compute_loss(self.net, batch)

    with pytest.raises(PlanError, match=r"settings\.compile: Aside\.training_step does not call self"):
        fitted(of(compile=Compile(kind="model")), tmp_path, Aside())


def test_a_version_that_was_not_tried_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setitem(TRIED, "lightning", "2.5")
    with pytest.warns(UserWarning, match=r"lightning 2\.6.* was tried with 2\.5"):
        fitted(of(), tmp_path, Job())
    with warnings.catch_warnings(record=True) as said:
        fitted(of(), tmp_path, Job())
    assert not any("was tried" in str(one.message) for one in said)


def test_the_arguments_leave_to_the_job_what_the_plan_does():
    assert trainer_arguments(of()) == {}
    assert trainer_arguments(of(precision=Precision(kind="tf32"))) == {"precision": "32-true"}
    (plugin,) = trainer_arguments(of(precision=Precision(kind="fp16")))["plugins"]
    assert isinstance(plugin, PlanPrecision)
    assert (plugin.precision, plugin.scaler is not None) == ("16-mixed", True)


def test_what_to_write_runs_as_it_is_written():
    """It is Python, and says what the arguments come to."""
    text = written(EVERYTHING)
    compile(text, "written", "exec")
    assert '# trainer_arguments: accumulate_grad_batches=2, precision="bf16-mixed"' in text
    assert "# PlanCallback: batches of 4, memory-saving layers" in text


FILE = Path(__file__).parents[1] / "tasks" / "lightning_job.py"


@pytest.mark.medium
def test_the_reference_of_a_task_is_the_job_with_its_trainers_arguments():
    facts = inspect_task(autotune.load_task(str(FILE)), InspectOptions(), "cpu")
    assert (facts.effective_batch, facts.micro_batch, facts.precision, facts.max_grad_norm) == (8, 4, "bf16", 1.0)
    assert facts.even_batches
    assert facts.optimizer == "AdamW"


@pytest.mark.medium
def test_a_task_of_a_lightning_job_is_measured(local_executor):
    """In a process that imports its file again."""
    request = MeasureRequest(
        id="measure",
        task=str(FILE),
        device="cpu",
        plan=of(batch=Batch(micro=8), checkpointing=Checkpointing(kind="blocks"), layers=Layers(kind="exact")),
        options=MeasureOptions(trial_time_s=0.2, parity_batch=8, evaluation=EvaluationOptions(most_s=10)),
        deadline_s=600.0,
    )
    outcome = local_executor.submit(request).result()
    assert isinstance(outcome, Measured), outcome
    (validation,) = outcome.measurement.evaluations
    assert (validation.batch, validation.num_samples) == (4, 64)


class ByAnyName(Job):
    def training_step(self, batch, _):
        return super().training_step(batch, _)


class ByPlace(Job):
    def training_step(self, *args):
        batch, number = args
        return super().training_step(batch, number)


class WithoutNumber(Job):
    def training_step(self, batch):
        return super().training_step(batch, 0)


@pytest.mark.parametrize("kind", [ByAnyName, ByPlace, WithoutNumber])
def test_a_step_is_given_what_a_trainer_gives_it(kind):
    """Lightning gives the batch's number to whatever the second argument is called."""
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", **QUIET)
    module = kind()
    trainer.fit(module, loader())
    training = autotune.apply(of(), autotune.from_lightning(kind, loader))
    training.step(next(iter(training.loader)))
    assert len(module.losses) == len(training.model.losses) == 1


class Several(Job):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(2)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


@pytest.mark.parametrize(
    ("build", "data", "stated", "message"),
    [
        (Job, lambda: [1], {}, "build_data made list"),
        (Job(), loader, {}, "build_module must be a function"),
        (Job, loader, {"precision": "bf16-true"}, "precision must be one of"),
        (Job, loader, {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, "clipped by value"),
        (Job, lambda: loader(batch_size=None), {}, "other sizes cannot be tried"),
        (lambda: nn.Linear(1, 1), loader, {}, "Wanted: a LightningModule"),
        (manual, loader, {}, "optimizes manually"),
        (Several, loader, {}, "made 2 optimizers"),
    ],
)
def test_what_is_no_task_is_refused(build, data, stated, message):
    with pytest.raises(TaskError, match=message):
        autotune.apply(of(), autotune.from_lightning(build, data, stated))


def test_a_schedule_that_begins_at_zero_does_not_keep_a_trial_from_training():
    """Trials step no schedule: the learning rate is the one that the schedule scales."""

    class Warmed(Job):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    training = autotune.apply(of(), autotune.from_lightning(Warmed, loader))
    assert training.optimizer.param_groups[0]["lr"] == 0.1


def test_a_stream_and_an_order_of_ones_own_stay():
    task = autotune.from_lightning(Job, lambda: DataLoader(Stream(), batch_size=8))
    assert task.build_sampler is None
    ordered = autotune.from_lightning(Job, loader)
    assert isinstance(ordered.build_sampler(ordered.build_dataset()), SequentialSampler)
    assert autotune.from_lightning(Job, functools.partial(loader, shuffle=True)).build_sampler is None


def test_hooks_that_trials_leave_out_are_named():
    class Averaging(Job):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    with pytest.warns(UserWarning, match="Averaging has on_train_batch_end, which trials do not call"):
        autotune.apply(of(), autotune.from_lightning(Averaging, loader))


@pytest.mark.parametrize(("interval", "rates"), [("step", [0.0, 0.01, 0.02]), ("epoch", None), (None, None)])
def test_a_schedule_by_steps_is_the_tasks(interval, rates):
    """What a model is judged after goes by it, from its beginning; one by epochs, which is Lightning's default, is
    constant within one."""

    class Warmed(Job):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)}
            return [optimizer], [schedule | ({"interval": interval} if interval else {})]

    task = autotune.from_lightning(Warmed, loader)
    training = autotune.apply(of(), task)
    assert training.optimizer.param_groups[0]["lr"] == 0.1
    schedule = task.make_scheduler(training.optimizer, 3)
    assert (schedule is None) == (rates is None)
    for rate in rates or ():
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        training.optimizer.step()
        schedule.step()


@pytest.mark.medium
def test_a_job_that_is_resumed_has_its_checkpoints_weights_and_not_the_plans(tmp_path):
    """It begins with what recovery made; a checkpoint of its own is read after that."""
    made = Job()
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.5)
    save_kept(made, tmp_path / "made.pt")
    weights = KeptWeights(hash=hash_of(tmp_path / "made.pt"), quality=0.0, seed=1, path=str(tmp_path / "made.pt"))
    plan = Plan(settings=Settings(batch=Batch(micro=8)), weights=weights)
    seen = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            seen.append(torch.cat([one.detach().flatten() for one in module.parameters()]))

    first = fitted(plan, tmp_path, module := Job(), callbacks=[Watch()])
    first.save_checkpoint(tmp_path / "one.ckpt")
    trained = torch.cat([one.detach().flatten() for one in module.parameters()])
    again = trainer(plan, tmp_path, callbacks=[Watch()], max_epochs=2)
    again.fit(Job(), loader(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    began, resumed = seen
    assert began.eq(0.5).all()
    assert torch.equal(resumed, trained)
    assert not torch.equal(resumed, began)
