"""``sparse_gradients`` and ``lazy_adam``: their contracts, which rows are updated, and what they are refused for."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from line_task import training_of
from search_tables import facts
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers.lazy_adam import LazyAdam
from autotune.techniques.optimizers.sparse_gradients import SparseGradients
from autotune.techniques.support import rows
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO
from autotune.training.training import Training

SPARSE, LAZY = SparseGradients(kind="sparse", least_rows=2), LazyAdam(kind="rows", least_rows=2)
NUM_ROWS = 500
pytestmark = pytest.mark.usefixtures("one_thread_only")


class Words(nn.Module):
    """A table, read as sequences or as bags, a block of two layers, and a head."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        x = self.table(words)
        x = x if x.dim() == 2 else x.mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TABLES = {
    "words": lambda: nn.Embedding(NUM_ROWS, 8),
    "padded": lambda: nn.Embedding(NUM_ROWS, 8, padding_idx=3),
    "bags": lambda: nn.EmbeddingBag(NUM_ROWS, 8),
}
PLAIN = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.5, foreach=True, maximize=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}
ADAMS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adam, fused, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.0}]),
}


def loss(model, batch):
    words, labels = batch
    return F.cross_entropy(model(words), labels)


def task_of(build_optimizer, table="words", num_words=6) -> Task:
    """Batches of 8 of 22; word 7 is in every sample, word 3 in some, most words in none."""
    words = torch.randint(0, NUM_ROWS, (22, num_words), generator=torch.Generator().manual_seed(1))
    words[:, 0], words[:5, 1] = 7, 3
    data = torch.utils.data.TensorDataset(words, words.sum(1) % 3)
    return Task(lambda: Words(TABLES[table]()), lambda: data, loss, build_optimizer=build_optimizer, batch_size=8)


def trained(task: Task, **settings) -> Training:
    training = training_of(task, **settings)
    for batch in training.loader:
        training.step(batch)
    return training


def off(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def tasks_of(build) -> dict[str, Task]:
    return {**{table: task_of(build, table) for table in TABLES}, **{name: ZOO[name] for name in ("gpt", "mlp")}}


class _OfTables(TechniqueContract):
    """Over tasks that have tables, beside some of the zoo that have none."""

    refuses = {
        "clipping": "torch does not clip the norm of sparse gradients",
        "loss scaler": "the loss scaler was not tried with gradients of rows",
    }

    @pytest.fixture(autouse=True)
    def _every_table(self, monkeypatch):
        for one in ("LEAST_ROWS", "_LEAST_BYTES"):
            monkeypatch.setattr(rows, one, 2)

    def _choices(self, task):
        return tuple(one if one == self.default() else self.lacking[0] for one in super()._choices(task))


class TestSparseGradients(_OfTables):
    technique = SparseGradients
    lacking = (SPARSE,)
    tasks = tasks_of(PLAIN["SGD"])


class TestLazyAdam(_OfTables):
    technique = LazyAdam
    lacking = (LAZY,)
    tasks = tasks_of(ADAMS["AdamW"])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("optimizer", PLAIN)
def test_plain_updates_are_the_stock_ones(optimizer, table):
    """Also of micro-batches whose gradients add up, and of a tail."""
    task, batch = task_of(PLAIN[optimizer], table), Batch(micro=4, accumulate=2)
    one, other = trained(task, batch=batch, sparse_gradients=SPARSE), trained(task, batch=batch)
    assert one.model.table.sparse
    assert off(one.model, other.model) < 1e-6


@pytest.mark.parametrize("optimizer", ADAMS)
def test_where_each_batch_uses_each_row_lazy_adam_is_adam(optimizer):
    def whole(task):
        return dataclasses.replace(task, build_model=lambda: Words(nn.Embedding(4, 8)))

    words = torch.utils.data.TensorDataset(torch.arange(4).repeat(16, 1), torch.arange(16) % 3)
    task = dataclasses.replace(whole(task_of(ADAMS[optimizer])), build_dataset=lambda: words)
    assert off(trained(task, lazy_adam=LAZY).model, trained(task).model) < 1e-5


@pytest.mark.parametrize("optimizer", ADAMS)
def test_rows_that_no_batch_used_stay_to_the_bit(optimizer):
    """Their averages too; the others move, and the layers behind go by their own groups."""
    task = task_of(ADAMS[optimizer])
    training, start = training_of(task, lazy_adam=LAZY), Words(TABLES["words"]())
    start.load_state_dict(training.model.state_dict())
    used = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for batch in training.loader:
        used[batch[0].flatten()] = True
        training.step(batch)
    weight, state = training.model.table.weight, training.optimizer.state[training.model.table.weight]
    assert torch.equal((weight != start.table.weight).any(1), used)
    assert all(torch.equal(state[name].any(1), used) for name in state if name != "step")
    assert state["step"] == 3


def test_learning_rates_of_a_schedule_hold():
    """At a rate of 0 nothing moves."""
    training = training_of(task_of(PLAIN["SGD"]), sparse_gradients=SPARSE)
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0 if step == 0 else 0.0)
    seen = []
    for batch in training.loader:
        training.step(batch)
        schedule.step()
        seen.append(training.model.table.weight.detach().clone())
    assert torch.equal(seen[0], seen[1])
    assert schedule.get_last_lr() == [0.0]


@pytest.mark.parametrize("build", [ADAMS["AdamW"], PLAIN["Adagrad"]])
def test_state_dicts_are_the_classs_own(build):
    """Saved with rows, loaded without, and the other way round."""
    row = {"lazy_adam": LAZY} if build is ADAMS["AdamW"] else {"sparse_gradients": SPARSE}
    kinds = [row, {}]
    for first, then in (kinds, kinds[::-1]):
        saved = trained(task_of(build), **first)
        file = io.BytesIO()
        torch.save(saved.optimizer.state_dict(), file)
        file.seek(0)
        loaded = training_of(task_of(build), **then)
        loaded.optimizer.load_state_dict(torch.load(file, weights_only=True))
        other = trained(task_of(build), **then)
        assert {*loaded.optimizer.state_dict()["state"][0]} == {*other.optimizer.state_dict()["state"][0]}
        for batch in loaded.loader:
            loaded.step(batch)
        assert loaded.optimizer.state_dict()["state"][0]["step"] == 6


def test_a_next_plan_takes_it_off():
    model = Words(TABLES["words"]())
    optimizer = ADAMS["AdamW"]([*model.parameters()])
    for settings, is_sparse in ((Settings(lazy_adam=LAZY), True), (Settings(), False)):
        autotune.apply_to_model(Plan(settings=settings), model)
        autotune.apply_to_optimizer(Plan(settings=settings), optimizer)
        loss(model, (torch.ones(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long))).backward()
        assert model.table.weight.grad.is_sparse == is_sparse
        optimizer.step()
        optimizer.zero_grad()
    assert "_init_group" not in vars(optimizer)


def test_a_table_that_is_multiplied_by_as_well_trains_as_ever():
    """Where its module does not show it: the sum of both gradients is dense."""

    class Both(Words):
        def forward(self, words):
            x = self.table(words).mean(1)
            return (x @ self.table.weight.T)[:, :3]

    task = task_of(ADAMS["AdamW"])
    task = dataclasses.replace(task, build_model=lambda: Both(TABLES["words"]()))
    assert off(trained(task, lazy_adam=LAZY).model, trained(task).model) == 0


def test_tables_that_cannot_are_left_as_they_are():
    """One of two is tied."""
    model = nn.ModuleDict({"tied": nn.Embedding(50, 8), "table": nn.Embedding(50, 8), "head": nn.Linear(8, 50)})
    model["head"].weight = model["tied"].weight
    autotune.apply_to_model(Plan(settings=Settings(sparse_gradients=SPARSE)), model)
    assert (model["tied"].sparse, model["table"].sparse) == (False, True)


REFUSED = {
    "shares its weight with another layer": lambda: Tied(),
    "has max_norm": lambda: Words(nn.Embedding(NUM_ROWS, 8, max_norm=1.0)),
    "has scale_grad_by_freq": lambda: Words(nn.Embedding(NUM_ROWS, 8, scale_grad_by_freq=True)),
    "has mode: max": lambda: Words(nn.EmbeddingBag(NUM_ROWS, 8, mode="max")),
    "table is frozen": lambda: Words(nn.Embedding(NUM_ROWS, 8).requires_grad_(False)),
    "table is sparse already": lambda: Words(nn.Embedding(NUM_ROWS, 8, sparse=True)),
    "has 500 rows, fewer than least_rows = 10,000": lambda: Words(TABLES["words"]()),
    "the model has no embedding that trains": lambda: nn.Linear(2, 2),
}


class Tied(Words):
    def __init__(self):
        super().__init__(TABLES["words"]())
        self.head.weight = self.table.weight


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_whose_gradients_stay_dense_is_refused(reason):
    row = SparseGradients(kind="sparse") if "fewer" in reason else SPARSE
    with pytest.raises(PlanError, match=f"^settings.sparse_gradients: .*{reason}.*. Leave that row out.$"):
        autotune.apply_to_model(Plan(settings=Settings(sparse_gradients=row)), REFUSED[reason]())


def test_an_optimizer_that_moves_other_rows_is_refused():
    class Mine(torch.optim.SGD):
        pass

    (weight,) = (nn.Parameter(torch.ones(4, 2)),)
    for optimizer, row, reason in (
        (torch.optim.SGD([weight], momentum=0.9), SPARSE, "momentum moves rows that a batch does not use"),
        (torch.optim.SGD([weight], weight_decay=0.1), SPARSE, "weight_decay moves rows"),
        (torch.optim.Adagrad([weight], weight_decay=0.1), SPARSE, "weight_decay moves rows"),
        (torch.optim.AdamW([weight]), SPARSE, "it takes torch's SGD or Adagrad, but got AdamW"),
        (Mine([weight]), SPARSE, "but got Mine"),
        (torch.optim.SGD([weight]), LAZY, "it takes torch's Adam or AdamW, but got SGD"),
    ):
        plan = Plan(settings=Settings(**{row.name: row}))
        with pytest.raises(PlanError, match=f"settings.{row.name}: .*{reason}.* Leave that row out"):
            autotune.apply_to_optimizer(plan, optimizer)
    with pytest.raises(PlanError, match="torch does not clip the norm of sparse gradients"):
        autotune.apply_to_optimizer(
            Plan(settings=Settings(sparse_gradients=SPARSE)), torch.optim.SGD([weight]), max_grad_norm=1.0
        )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"parallel": {"kind": "ddp", "processes": 2}}, "exchange dense gradients"),
        ({"parallel": {"kind": "fsdp", "processes": 2}}, "exchange dense gradients"),
        ({"optimizer_step": {"kind": "in_backward"}}, "use kind: after_backward"),
        ({"optimizer_state": {"kind": "8bit"}}, "state in fewer bits is of whole tables"),
        ({"precision": {"kind": "fp16"}}, "the loss scaler was not tried"),
    ],
)
def test_settings_that_want_dense_gradients_are_refused(other, reason):
    for row in (SPARSE, LAZY):
        assert reason in (Settings.model_validate({**other, row.name: row}).conflict() or "")


@pytest.mark.parametrize(
    "other",
    [
        {"precision": {"kind": "bf16"}},
        {"layers": {"kind": "exact"}},
        {"checkpointing": {"kind": "blocks"}},
        {"optimizer": {"kind": "fused"}},
        {"optimizer": {"kind": "foreach"}},
        {"optimizer": {"kind": "for_loop"}},
    ],
)
def test_other_settings_go_with_it(other):
    """The losses of an epoch are those of the same settings without it."""
    settings = Settings.model_validate(other)
    for build, row, limit in ((PLAIN["SGD"], SPARSE, 1e-6), (ADAMS["AdamW"], LAZY, None)):
        task = task_of(build)
        one, stock = (trained(task, **dict(settings.having(*with_it))) for with_it in ((row,), ()))
        assert one.model.table.weight.grad is None
        assert off(one.model, stock.model) < limit if limit else bool(one.model.head.weight.isfinite().all())


def test_they_are_offered_for_tables_of_32_mib():
    sgd = {"table_numbers": 2**23, "optimizer": "SGD"}
    adam = {**sgd, "optimizer": "AdamW", "moves_rows": "it takes torch's SGD or Adagrad, but got AdamW"}
    assert SparseGradients.choices(facts(**sgd)) == (SparseGradients(), SparseGradients(kind="sparse"))
    assert LazyAdam.choices(facts(**adam, allow_lossy=True)) == (LazyAdam(), LazyAdam(kind="rows"))
    assert LazyAdam.choices(facts(**adam, allow_lossy=False)) == (LazyAdam(),)
    assert LazyAdam.choices(facts(**sgd, allow_lossy=True)) == (LazyAdam(),)
    for changed in ({"moves_rows": "momentum"}, {"table_numbers": 2**22}, {"max_grad_norm": 1.0}, {"shared_by": "ddp"}):
        assert SparseGradients.choices(facts(**sgd | changed)) == (SparseGradients(),)
    assert LazyAdam(kind="rows").exactness(facts(**adam)) == "lossy"
    assert SparseGradients(kind="sparse").exactness(facts(**sgd)) == "exact"


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(("row", "build", "tables"), [(SPARSE, PLAIN["SGD"], 1), (LAZY, ADAMS["AdamW"], 3)])
def test_the_memory_model_has_no_gradient_of_the_table(row, build, tables, padding):
    """A table of 8 MiB, and with AdamW its two averages; as real steps take it, also where gradients add up."""
    task = task_of(build, num_words=16)
    task = dataclasses.replace(task, build_model=lambda: Words(nn.Embedding(2**18, 8, padding_idx=padding)))
    for batch in (Batch(micro=8), Batch(micro=4, accumulate=2)):
        plan = Plan(settings=Settings(batch=batch, **{row.name: row}))
        traced = fit_memory_model(plan, task).peak_bytes(batch.micro)
        assert tables * 2**23 < traced < (tables + 0.1) * 2**23
        assert traced == pytest.approx(fit_probed_model(plan, task).peak_bytes(batch.micro), rel=0.01)
