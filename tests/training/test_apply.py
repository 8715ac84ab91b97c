"""``apply``: the one path from a plan and a task to a training, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from line_task import Line, Stream, floats, line, mean_loss, step_gradients, training_of
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

import autotune
from autotune.errors import PlanError, TaskError
from autotune.plan import Budget, Environment, Plan, SearchRecord, TaskRef
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.techniques.support.facts import difference
from autotune.testing.runs import relative_difference, run_applied, run_by_hand, without_dropout
from autotune.testing.zoo import ZOO
from autotune.training.apply_plan import reference_batch
from autotune.training.fingerprint import fingerprint, identify

STOCK = Plan(settings=Settings())


pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.mark.parametrize("name", ["partly_eval", "gpt", "token_loss", "frozen"])
def test_all_techniques_together_train_the_stock_state(name):
    """Split batches, bf16, checkpointing, channels_last, a fused optimizer and a cache in one plan: after an epoch the
    parameters are the hand-written loop's to within rounding."""
    task = without_dropout(ZOO[name])
    settings = Settings(
        batch=Batch.of(8, 3),
        precision=Precision(kind="bf16"),
        checkpointing=Checkpointing(kind="blocks", every=2),
        memory_format=MemoryFormat(kind="channels_last"),
        optimizer=Optimizer(kind="fused"),
        data_loading=DataLoading(num_workers=0, cache="host"),
    )
    assert relative_difference(run_applied(task, settings).state, run_by_hand(task).state) < 0.01


def test_pieces_are_as_good_as_a_task():
    """model, dataset and loss, with an optimizer built or to be built, train the task's weights bit for bit."""
    task = ZOO["frozen"]
    expected = run_by_hand(task).state
    for build in (lambda model: task.make_optimizer(model), None):
        torch.manual_seed(0)
        model = task.build_model()
        optimizer = build(model) if build else task.build_optimizer
        training = autotune.apply(
            STOCK, model=model, dataset=task.build_dataset(), loss=task.compute_loss, optimizer=optimizer, batch_size=8
        )
        assert training.model is model
        for batch in training.loader:
            training.step(batch)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def stock_steps(precision, max_grad_norm, build_optimizer):
    """The zoo's text model, 3 + 3 + 2 samples a step, as people write it; its parameters after two steps."""
    task = without_dropout(ZOO["gpt"])
    torch.manual_seed(0)
    model, data = task.build_model(), task.build_dataset()
    optimizer = build_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for step in range(2):
        for start, size in ((0, 3), (3, 3), (6, 2)):
            first = 8 * step + start
            batch = torch.utils.data.default_collate([data[index] for index in range(first, first + size)])
            half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = task.compute_loss(model, batch) * (size / 8)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


def two_groups(model):
    """Those that decay first, which is not the model's order."""
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_job_that_is_stated_trains_as_its_own_loop_bit_for_bit(precision, in_pieces):
    """Accumulation, autocast, the loss scaler and clipping, all in the task: two clipped steps, by ``step`` or in
    pieces; without clipping the weights are others."""
    task = dataclasses.replace(
        without_dropout(ZOO["gpt"]), build_optimizer=two_groups, build_sampler=SequentialSampler, batch_size=8
    )
    stated = dataclasses.replace(task, micro_batch_size=3, precision=precision, max_grad_norm=0.1)
    training = autotune.apply(STOCK, stated)
    assert (training.batch.micro, training.batch.accumulate) == (3, 3)
    num_steps = 0
    for batch in training.loader:
        if in_pieces:
            with training.forward_context():
                loss = stated.compute_loss(training.model, batch)
            training.backward(loss)
            num_steps += training.optimizer_step()
        else:
            num_steps += training.step(batch).stepped
        if num_steps == 2:
            break
    applied = training.model.state_dict()
    clipped, free = (stock_steps(precision, norm, two_groups) for norm in (0.1, None))
    assert all(torch.equal(value, clipped[name]) for name, value in applied.items())
    assert not all(torch.equal(value, free[name]) for name, value in applied.items())


def test_gradients_are_clipped_once_a_step():
    """Samples 0 and 4 in two micro-batches: their gradient of 2 is clipped to 1; each clipped by itself gives 0.5."""
    training = training_of(
        line([torch.tensor(0.0), torch.tensor(4.0)], max_grad_norm=1.0), batch=Batch(micro=1, accumulate=2)
    )
    assert step_gradients(training) == [pytest.approx(1.0, abs=1e-5)]


def test_what_the_optimizer_has_beside_the_model_is_clipped_too():
    """A trained input: its gradient of 4 is clipped to 1."""
    extra = torch.nn.Parameter(torch.ones(()))
    task = line(
        [torch.tensor(4.0)],
        compute_loss=lambda model, x: (x * extra).mean(),
        build_optimizer=lambda parameters: torch.optim.SGD([extra], lr=1.0),
        max_grad_norm=1.0,
    )
    training = training_of(task)
    training.step(next(iter(training.loader)))
    assert extra.item() == pytest.approx(0.0, abs=1e-5)


def test_pieces_state_the_job_too():
    training = autotune.apply(
        STOCK,
        model=Line(),
        dataset=floats(8),
        loss=mean_loss,
        batch_size=4,
        micro_batch_size=2,
        precision="bf16",
        max_grad_norm=1.0,
    )
    assert (training.batch, training.settings.precision.kind) == (Batch(micro=2, accumulate=2), "bf16")
    with pytest.raises(TaskError, match="micro_batch_size must be at most batch_size"):
        autotune.apply(STOCK, model=Line(), dataset=floats(8), loss=mean_loss, batch_size=4, micro_batch_size=8)


def test_missing_pieces_are_named_together():
    with pytest.raises(TaskError, match="missing: dataset, loss"):
        autotune.apply(STOCK, model=Line())


def test_a_piece_that_is_none_of_a_tasks_is_an_error():
    with pytest.raises(TaskError, match="lr_scheduler"):
        autotune.apply(STOCK, model=Line(), dataset=floats(2), loss=mean_loss, lr_scheduler=None)


def test_pieces_beside_a_task_are_an_error():
    """They would be ignored in silence."""
    with pytest.raises(TaskError, match="takes a task, or pieces of one, but got both: batch_size"):
        autotune.apply(STOCK, line(floats(2)), batch_size=3)


def test_the_seed_decides_weights_and_order():
    """The plan's seed unless another is given; the same seed trains the same, another does not."""
    searched = SearchRecord(trials=1, seconds=1, stopped="", study="", sampler="", seed=7)
    plan = Plan(settings=Settings(), search=searched)
    first = [
        (training.model[0].weight.detach(), next(iter(training.loader))[0])
        for training in (autotune.apply(plan, ZOO["cnn"]), autotune.apply(STOCK, ZOO["cnn"], seed=7))
    ]
    assert all(map(torch.equal, *first))
    other = autotune.apply(STOCK, ZOO["cnn"])
    assert not torch.equal(other.model[0].weight, first[0][0])
    assert not torch.equal(next(iter(other.loader))[0], first[0][1])


def plan_for(task: autotune.Task) -> Plan:
    found = fingerprint(task.build_model(), task.build_dataset(), task.collate)
    return Plan(settings=Settings(), task=TaskRef(source="model.py", fingerprint=found))


@pytest.mark.parametrize("name", ZOO)
def test_a_plan_of_nothing_leaves_modes_and_flags_alone(name):
    """Keys, shapes and values too, as each technique's contract has it."""
    stock, model = ZOO[name].build_model(), autotune.apply(STOCK, ZOO[name]).model
    pairs = zip(model.named_modules(), stock.named_modules(), strict=True)
    assert all((path, one.training) == (other_path, other.training) for (path, one), (other_path, other) in pairs)
    flags = [[(path, one.requires_grad) for path, one in each.named_parameters()] for each in (model, stock)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("name", ZOO)
def test_a_plan_fits_its_own_task(name):
    autotune.apply(plan_for(ZOO[name]), ZOO[name])


def test_a_plan_for_another_model_is_refused():
    """Another shape, another trainable flag, another batch shape: each is another task."""
    plan = plan_for(ZOO["mlp"])
    for other in ("frozen", "cnn"):
        with pytest.raises(PlanError, match=r"task.fingerprint: the plan was found for model\.py .*Search again"):
            autotune.apply(plan, ZOO[other])
    wider = dataclasses.replace(ZOO["mlp"], build_dataset=lambda: [(torch.zeros(7), 0), (torch.zeros(7), 0)])
    with pytest.raises(PlanError, match="batch shapes"):
        autotune.apply(plan, wider)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def stack(depth: int = 4, width: int = 8, size: int = 8, freeze: bool = False, **pieces) -> autotune.Task:
    """Blocks over vectors; 144 parameters a block of width 8."""

    def build_model() -> nn.Module:
        return nn.Sequential(*(Block(width) for _ in range(depth))).requires_grad_(not freeze)

    vectors = [torch.zeros(size), torch.zeros(size)]
    return autotune.Task(
        **{"build_model": build_model, "build_dataset": lambda: vectors, "compute_loss": None, **pieces}
    )


def renamed() -> nn.Module:
    model = stack().build_model()
    for block in model:
        block.middle = block.first
        del block.first
    return model


OTHERS = {
    "4 blocks of Block → 5 blocks of Block, 576 parameters → 720 parameters, 16 tensors of float32 → 20": {"depth": 5},
    "the model: 576 parameters → 160 parameters. Search again": {"width": 4},
    "the model: none of them frozen → 576 of them frozen. Search again": {"freeze": True},
    "the model: 16 tensors of float32 → 16 tensors of bfloat16. Search": {
        "build_model": lambda: stack().build_model().bfloat16()
    },
    "the model: parameters of the same number and size have other names, or stand in another order": {
        "build_model": renamed
    },
    "batch shapes: float32 [*, 8] → float32 [*, 9]. Search": {"size": 9},
    "batch shapes: float32 [*, 8] → not read": {"build_dataset": lambda: Stream([torch.zeros(8)])},
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_plan_for_another_model_says_what_differs(words):
    """Then and now, and what is the same is left out; an older plan has no more than the hash."""
    found, identity = identify(*stack_pieces(stack()))
    plan = Plan(settings=Settings(), task=TaskRef(source="model.py", fingerprint=found, identity=identity))
    with pytest.raises(PlanError, match=re.escape(words)):
        autotune.apply(Plan.from_yaml(plan.to_yaml()), stack(**OTHERS[words]))
    older = plan.model_copy(update={"task": TaskRef(source="model.py", fingerprint=found)})
    with pytest.raises(PlanError, match="its parameters, their shapes, dtypes or trainable flags, or the batch shapes"):
        autotune.apply(older, stack(**OTHERS[words]))


def stack_pieces(task: autotune.Task) -> tuple[nn.Module, list[torch.Tensor]]:
    return task.build_model(), task.build_dataset()


def test_a_shape_that_changes_no_figure_is_said_to_be_one():
    """2 x 6 for 3 x 4, by the same name."""
    one, other = (nn.ParameterDict({"a": torch.zeros(shape)}) for shape in ((2, 6), (3, 4)))
    then, now = (identify(model, [0.0]) for model in (one, other))
    assert then[0] != now[0]
    assert difference(then[1], now[1]) == "a parameter's shape, dtype or trainable flag differs"


def test_dimensions_that_vary_do_not_count():
    """Sentences of other lengths are the same task; of another dtype they are another."""

    def shapes(*samples):
        return fingerprint(Line(), list(samples))

    assert shapes(torch.zeros(2), torch.zeros(3)) == shapes(torch.zeros(4), torch.zeros(9))
    assert shapes(torch.zeros(2), torch.zeros(2)) != shapes(torch.zeros(2), torch.zeros(3))
    assert shapes(torch.zeros(2)) != shapes(torch.zeros(2).int())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_plan_of_another_torch_is_applied_with_a_warning():
    where = Environment(torch="2.0.0", device="A CPU", autotune="0.1.0", python="3.11.0")
    with pytest.warns(UserWarning, match=r"measured with torch 2\.0\.0, and this is .*autotune verify"):
        autotune.apply(Plan(settings=Settings(), environment=where), line(floats(2)))


def test_a_batch_size_that_is_not_the_plans_is_said():
    with pytest.warns(UserWarning, match="the plan sees 2 samples, and the task's batch size is 4"):
        training_of(line(floats(4), batch_size=4), batch=Batch(micro=2))


def test_a_batch_that_nobody_states_is_said():
    """With pieces, or without a plan's: the job trained with 256, and saw 32 or the plan's 2 without a word."""
    pieces = {"model": Line(), "dataset": floats(40), "loss": mean_loss}
    small = Plan(settings=Settings(batch=Batch(micro=2)))
    for plan, seen in ((STOCK, 32), (small, 2)):
        with pytest.warns(UserWarning, match=f"the optimizer steps on batches of {seen}, and nothing says"):
            autotune.apply(plan, **pieces)
    with pytest.warns(UserWarning, match="batches of 32, and nothing says"):
        autotune.apply(STOCK, line(floats(40)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autotune.apply(STOCK, **pieces, batch_size=8)
        autotune.apply(small, line(floats(40)))


@pytest.fixture
def world(monkeypatch):
    """Sets what torchrun tells a process of the number of ranks."""
    return lambda size: monkeypatch.setenv("WORLD_SIZE", size)


def test_one_of_several_ranks_is_refused(world):
    """The plan is for one process: its batch and its memory would be others."""
    world("2")
    with pytest.raises(PlanError, match=r"plan is for one process, but this is one of 2 ranks .* ddp, processes: 2\}`"):
        autotune.apply(STOCK, line(floats(2)))


@pytest.mark.parametrize("size", ["1", "", "many", "-2", "0"])
def test_a_world_of_one_trains(size, world):
    world(size)
    assert step_gradients(autotune.apply(STOCK, line(floats(2)))) == [0.5]


def test_a_process_group_of_one_is_a_job_alone(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert step_gradients(autotune.apply(STOCK, line(floats(2)))) == [0.5]
    finally:
        dist.destroy_process_group()


def test_a_path_is_no_plan():
    with pytest.raises(PlanError, match=r"takes a Plan, but got str. Use autotune.load_plan"):
        autotune.apply("plan.yaml", line(floats(4)))


def test_a_plan_without_a_device_is_for_the_one_there_is():
    """As a script without a plan trains; a search states its device."""
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert training_of(line(floats(2))).device.type == expected
    assert Plan(settings=Settings()).on("cuda").budget.device == "cuda"
    assert Plan(settings=Settings(), budget=Budget(device="cpu")).on("cuda").budget.device == "cpu"


def test_a_plan_for_cuda_needs_cuda():
    plan = Plan(settings=Settings(), budget=Budget(device="cuda"))
    with pytest.raises(PlanError, match="the plan is for cuda, but torch sees no CUDA device here"):
        autotune.apply(plan, ZOO["mlp"])


WRONG = {
    "build_model returned list. Wanted: def build_model": {"build_model": list},
    "build_optimizer returned float. Wanted: def build_optimizer": {"build_optimizer": lambda parameters: 0.1},
    "an empty dataset": {"build_dataset": list},
    "returned a BatchSampler": {"build_sampler": lambda data: BatchSampler(SequentialSampler(data), 2, False)},
}


@pytest.mark.parametrize("message", WRONG)
def test_pieces_of_the_wrong_kind_are_task_errors(message):
    with pytest.raises(TaskError, match=message):
        autotune.apply(STOCK, dataclasses.replace(line(floats(2)), **WRONG[message]))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model, x: model(x), r"a tensor of shape \(2,\)"),
        (lambda model, x: 1.0, "float"),
        (lambda model, x: None, "NoneType"),
        (lambda model, x: (1.0, 2), "float"),
        (lambda model, x: model(x).sum(dim=0, keepdim=True), None),
    ],
    ids=["vector", "number", "nothing", "number and count", "one element"],
)
def test_a_loss_is_a_scalar_or_a_sum_with_its_count(loss, got):
    """One element in any shape will do."""
    training = training_of(line(floats(2), compute_loss=loss, batch_size=2))
    batch = next(iter(training.loader))
    if got is None:
        assert training.step(batch).stepped
        return
    with pytest.raises(TaskError, match=rf"must return a scalar tensor, or \(loss_sum, count\), but got {got}"):
        training.step(batch)


def test_an_optimizer_may_take_the_model():
    """If that is what its argument is called; parameters otherwise, in order."""
    seen = []

    def build_optimizer(model):
        seen.append(model)
        return torch.optim.SGD(model.parameters(), lr=1.0)

    training = training_of(line(floats(2), build_optimizer=build_optimizer))
    assert seen == [training.model]


def test_without_a_batch_size_it_is_32_and_never_more_than_the_dataset():
    sizes = [reference_batch(line(floats(count)), floats(count)).micro for count in (100, 20)]
    assert sizes == [32, 20]
    held = line(floats(20), batch_size=8)
    assert reference_batch(held, floats(20)).micro == 8
    assert reference_batch(held, floats(20), effective=10).micro == 10
    assert reference_batch(held, floats(5)).micro == 5


def test_the_jobs_own_batch_is_cut_as_it_cuts_it():
    """10 a step as 4 + 4 + 2, also of another effective batch; never more than the dataset."""
    job = line(floats(20), batch_size=10, micro_batch_size=4)
    assert reference_batch(job, floats(20)) == Batch(micro=4, accumulate=3, effective=10)
    assert reference_batch(job, floats(20), effective=8) == Batch(micro=4, accumulate=2)
    assert reference_batch(job, floats(3)) == Batch(micro=3)


def test_a_stream_gets_one_worker_whoever_asks_for_more():
    """Two would read each sample twice; the user's two and the plan's two are cut to one, aloud."""
    for task, setting in (
        (line(Stream(floats(5)), loader_options={"num_workers": 2}), DataLoading()),
        (line(Stream(floats(5))), DataLoading(num_workers=2)),
    ):
        with pytest.warns(
            UserWarning, match=r"2 loader workers on an iterable dataset would read every sample 2 times"
        ):
            training = training_of(task, data_loading=setting)
        assert [value for batch in training.loader for value in batch.tolist()] == [0, 1, 2, 3, 4]


def test_a_stream_that_shards_keeps_its_workers():
    """Every sample once; each worker ends in a short batch of its own, 1, 2, 3 and 10, 20, weighted by what it holds:
    steps of 2 and 15, or one of 36 / 5."""
    samples = [torch.tensor(value) for value in (1.0, 10.0, 2.0, 20.0, 3.0)]
    task = line(Stream(samples, shards=True), shards_by_worker=True)
    two = DataLoading(num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_gradients(training_of(task, batch=Batch(micro=4), data_loading=two)) == [2.0, 15.0]
        whole = step_gradients(training_of(task, batch=Batch(micro=3, accumulate=2), data_loading=two))
    assert whole == [pytest.approx(36 / 5)]


def test_a_micro_batch_beyond_the_dataset_is_the_whole_dataset():
    training = training_of(line(floats(4)), batch=Batch(micro=10))
    assert step_gradients(training) == [1.5]
