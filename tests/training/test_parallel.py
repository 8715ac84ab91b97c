"""Several processes: the same training as one, `parallel` as a technique, and what each process may not do alone."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import run_as_two, told_by
from line_task import Stream, floats, line
from search_tables import facts
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, RandomSampler

import autotune
from autotune.data.cut import Cut
from autotune.errors import PlanError, TaskError
from autotune.plan import Plan
from autotune.ranks import Ranks, world_size
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.optimizers.trained_weights import TrainedWeights
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.testing.techniques import TechniqueContract
from autotune.training.together import check_can_halve

DDP, FSDP = Parallel(kind="ddp", processes=2), Parallel(kind="fsdp", processes=2)
HALF = DDP.model_copy(update={"comm_hook": "fp16_compress"})
IN_BF16 = DDP.model_copy(update={"comm_hook": "bf16_compress"})
KEPT = FSDP.model_copy(update={"reshard": False})
ON_HOST = FSDP.model_copy(update={"cpu_offload": True})
BATCH = Batch(micro=4, accumulate=4)
KINDS = {"ddp": DDP, "fsdp": FSDP, "on host": ON_HOST}


class TestParallel(TechniqueContract):
    """It offers one process; the others are a space's to name."""

    technique = Parallel
    lacking = (Parallel(kind="ddp", processes=4096),)


class Net(nn.Module):
    """Blocks that checkpointing and sharding find."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples(count: int = 40) -> list[tuple[Tensor, int]]:
    """The second of each is how many of its outputs count."""
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
    return [(row, number % 5) for number, row in enumerate(rows)]


def mean(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Weighted by the numbers that come with the samples, which differ from rank to rank."""
    return (model(batch[0]).square().sum(1) * batch[1]).sum(), batch[1].sum()


def task(**pieces: Any) -> autotune.Task:
    given = {"build_model": Net, "compute_loss": mean, "max_grad_norm": 0.5, "batch_size": 16, **pieces}
    return autotune.Task(build_dataset=samples, **given)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "counts": ({"compute_loss": counted}, {}),
    "uneven": ({"batch_size": 14}, {"batch": Batch(micro=4, accumulate=4, effective=14)}),
    "layers and checkpoints": ({}, {"layers": Layers(kind="exact"), "checkpointing": Checkpointing(kind="blocks")}),
}
"""Tasks and settings, which train the same in one process and in two: three epochs of two steps and a tail of 8."""


def trained(rank: int, name: str, parallel: Parallel) -> list[list[float]]:
    """Of each optimizer step: its loss over all ranks, then some of the parameters."""
    pieces, settings = CASES[name]
    plan = Plan(settings=Settings(**{"batch": BATCH, "parallel": parallel, **settings}))
    training = autotune.apply(plan, task(**pieces), seed=5)
    found = []
    for _ in range(3):
        totals = torch.zeros(2)
        for batch in training.loader:
            result = training.step(batch)
            totals += torch.tensor([float(result.loss) * result.weight, result.weight])
            if result.stepped:
                if parallel.kind != "none":
                    dist.all_reduce(totals)
                found.append([float(totals[0] / totals[1]), *some_parameters(training.model)])
                totals = torch.zeros(2)
    return found


CODES = {"8bit": "codes8", "4bit": "codes4", "factored": "codes8", "bf16 weights": "float32"}


def in_fewer_bits(parallel: Parallel, kind: str) -> list[float]:
    """Some of the parameters after an epoch, of an optimizer whose state is kept so."""
    of_kind = {"trained_weights": TrainedWeights(kind="bf16")}
    if kind != "bf16 weights":
        of_kind = {"optimizer_state": OptimizerState(kind=kind)}
    settings = Settings(batch=BATCH, parallel=parallel, **of_kind)
    pieces = {"build_model": lambda: nn.Linear(8, 512), "build_optimizer": torch.optim.AdamW}
    training = autotune.apply(Plan(settings=settings), task(**pieces), seed=5)
    for _ in range(3):
        for batch in training.loader:
            training.step(batch)
    (state, _) = training.optimizer.state.values()
    return [*some_parameters(training.model), *map(float, state[f"exp_avg.{CODES[kind]}"])]


def some_parameters(model: nn.Module) -> list[float]:
    state = model.state_dict()
    whole = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.values())
    return [float(value) for one in whole for value in one.flatten()[:2]]


def in_half(rank: int) -> dict[str, list[bool]]:
    """Whether the gradients of a step, once exchanged, are numbers that fp16 has, and bf16. gloo sums bf16, though
    torch's check of hooks asks for NCCL."""
    found = {}
    for parallel in (DDP, HALF, IN_BF16):
        training = autotune.apply(Plan(settings=Settings(batch=BATCH, parallel=parallel)), task(), seed=5)
        for batch in training.loader:
            with training.forward_context():
                loss = mean(training.model, batch)
            if training.backward(loss):
                break
        gradients = [p.grad for p in training.model.parameters()]
        found[parallel.comm_hook] = [
            all(torch.equal(one, one.to(dtype).float()) for one in gradients) for dtype in (torch.half, torch.bfloat16)
        ]
    return found


def checked_by_nobody(act: Callable[[int], Any], rank: int) -> Any:
    """Without torch's check of what a hook of gradients needs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.parallel.DistributedDataParallel, "_check_comm_hook", lambda self, hook: None)
        return act(rank)


def drawn(rank: int) -> dict[str, Any]:
    """What one rank draws for itself, and what it shares."""
    plan = Plan(settings=Settings(batch=BATCH, parallel=DDP))
    training = autotune.apply(plan, task(build_sampler=RandomSampler), seed=5)
    first = some_parameters(training.model)
    order = [value for batch in training.loader for value in batch[0][:, 0].tolist()]
    return {
        "initial": first,
        "samples": order,
        "dropout": torch.rand(3).tolist(),
        "keys": [*training.model.state_dict()],
    }


def in_pieces(rank: int) -> list[float]:
    """A loop of one's own: gradients of the first step, whether averaged between micro-batches."""
    training = autotune.apply(
        Plan(settings=Settings(batch=Batch(micro=1, accumulate=4), parallel=DDP)), line(floats(4))
    )
    seen = []
    for batch in training.loader:
        with training.forward_context():
            loss = mean_of_line(training.model, batch)
        is_whole = training.backward(loss)
        seen.append(float(training.model.weight.grad))
        if is_whole:
            training.optimizer_step()
    return seen


def resumed(rank: int) -> list[list[float]]:
    """Parameters after an epoch, of one training and of another that goes on from the middle of its second step."""
    plan = Plan(settings=Settings(batch=BATCH, parallel=DDP))
    first, second = autotune.apply(plan, task(), seed=5), autotune.apply(plan, task(), seed=6)
    batches = iter(first.loader)
    for _ in range(3):
        first.step(next(batches))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches:
        first.step(batch)
    for batch in second.loader:
        second.step(batch)
    return [some_parameters(one.model) for one in (first, second)]


def mean_of_line(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def refusals(rank: int) -> dict[str, str]:
    """What each rank says of what it cannot have."""

    def frozen() -> nn.Module:
        return Net().requires_grad_(False)

    def beside(model: nn.Module, batch: Any) -> Tensor:
        return model.head(batch[0]).sum()

    def step_beside() -> None:
        training = autotune.apply(plan, task(compute_loss=beside))
        batches = iter(training.loader)
        for _ in range(2):
            training.step(next(batches))

    plan = Plan(settings=Settings(batch=BATCH, parallel=DDP))
    tried: dict[str, Callable[[], Any]] = {
        "size": lambda: autotune.apply(Plan(settings=Settings()), task()),
        "frozen": lambda: autotune.apply(plan, task(build_model=frozen, build_optimizer=sgd_of_nothing)),
        "stream": lambda: autotune.apply(plan, line(Stream(floats(8)))),
        "sampler": lambda: autotune.apply(plan, task(build_sampler=DistributedSampler)),
        "beside": step_beside,
        "bf16": lambda: autotune.apply(Plan(settings=Settings(batch=BATCH, parallel=IN_BF16)), task()),
    }
    return {name: _said(act) for name, act in tried.items()}


def sgd_of_nothing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (PlanError, TaskError) as error:
        return str(error)
    return ""


def found_by(rank: int) -> dict[str, Any]:
    """All that needs two processes, in one pair of them; of more, what they train."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for kind, parallel in KINDS.items():
        of_all = parallel.model_copy(update={"processes": world_size()})
        found[kind] = {name: trained(rank, name, of_all) for name in CASES}
    if world_size() > 2:
        return found
    return found | {
        "fewer bits": {kind: in_fewer_bits(DDP, kind) for kind in CODES},
        "half": trained(rank, "plain", HALF),
        "kept": trained(rank, "plain", KEPT),
        "in half": checked_by_nobody(in_half, rank),
        "drawn": drawn(rank),
        "in pieces": in_pieces(rank),
        "resumed": resumed(rank),
        "refusals": refusals(rank),
    }


def check_like_one(found: list[dict[str, Any]], name: str, kind: str) -> None:
    """Losses and parameters of each step, over three epochs, to rounding; all processes hold the same."""
    alone = trained(0, name, Parallel())
    first, *others = (one[kind][name] for one in found)
    assert all(one == first for one in others)
    assert len(first) == len(alone) == 9
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_does(pair, name, kind):
    check_like_one(pair, name, kind)


@pytest.mark.slow
def test_four_processes_train_what_one_does(tmp_path):
    found, _ = told_by(__file__, tmp_path, 4)
    for kind in KINDS:
        for name in CASES:
            check_like_one(found, name, kind)


@pytest.mark.slow
def test_shards_on_the_host_train_to_the_bit_as_those_on_the_device(pair):
    assert all(one["on host"] == one["fsdp"] for one in pair)


@pytest.mark.slow
def test_gradients_are_exchanged_in_half_the_bytes_where_a_plan_says_so(pair):
    """fp16 has 11 bits: after nine steps losses and parameters are within their rounding, and not equal."""
    expected = {"allreduce": [False, False], "fp16_compress": [True, False]}
    for one in pair:
        in_bf16 = one["in half"].pop("bf16_compress")
        assert one["in half"] == expected
        assert in_bf16[1]
    whole, half = (torch.tensor(one) for one in (pair[0]["ddp"]["plain"], pair[0]["half"]))
    assert pair[0]["half"] == pair[1]["half"]
    assert torch.allclose(whole, half, rtol=0.01, atol=2e-3)
    assert not torch.equal(whole, half)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rtol"), [("8bit", 1e-3), ("4bit", 1e-2), ("factored", 1e-2), ("bf16 weights", 1e-2)])
def test_state_in_fewer_bits_is_the_same_in_both_processes(pair, kind, rtol):
    """What its rounding goes by is the same everywhere; one process trains so too."""
    first, second = (one["fewer bits"][kind] for one in pair)
    assert first == second
    alone = torch.tensor(in_fewer_bits(Parallel(), kind))
    assert torch.allclose(torch.tensor(first)[:4], alone[:4], rtol=rtol, atol=1e-5)


@pytest.mark.slow
def test_parameters_that_stay_gathered_train_the_same(pair):
    assert pair[0]["kept"] == pair[1]["kept"] == pair[0]["fsdp"]["plain"]


@pytest.mark.slow
def test_each_process_draws_its_own_samples_and_dropout(pair):
    """From the same initial weights; together the samples are those of an epoch, in an order that the user's sampler
    draws from what is random in each."""
    first, second = (one["drawn"] for one in pair)
    assert first["initial"] == second["initial"]
    assert first["dropout"] != second["dropout"]
    assert sorted(first["samples"] + second["samples"]) == sorted(float(row[0]) for row, _ in samples())
    assert first["keys"] == [*Net().state_dict()]


@pytest.mark.slow
def test_gradients_are_averaged_with_the_last_micro_batch_alone(pair):
    """Samples 0, 1, 2, 3 of a step, whose mean is 1.5: the first rank has 0 and 2, the second 1 and 3."""
    first, second = (one["in pieces"] for one in pair)
    assert first == [0.0, 1.5]
    assert second == [0.5, 1.5]


def test_a_training_goes_on_from_the_middle_of_a_step(pair):
    """Each process from its own state, with the gradients that it alone had."""
    for one in pair:
        assert one["resumed"][0] == one["resumed"][1]
    assert pair[0]["resumed"] == pair[1]["resumed"]


REFUSED = {
    "size": "the plan is for one process, but this is one of 2 ranks .* processes: 2",
    "frozen": "ddp shares gradients of parameters, and the model trains none",
    "stream": "every process would read the same samples of an iterable dataset",
    "sampler": "returned a DistributedSampler, but samples are shared out",
    "beside": "compute_loss trained without calling the model itself",
    "bf16": "torch refuses bf16_compress here: BF16 all reduce communication hook required",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_several_processes_cannot_have_is_said_in_each(pair, what):
    for one in pair:
        assert re.search(REFUSED[what], one["refusals"][what])


def pieces_of(length: int, batch: Batch, size: int, drop_last: bool = False) -> list[list[list[int]]]:
    """Of each rank, what it trains on."""
    cuts = [Cut(range(length), batch, drop_last, Ranks(rank, size)) for rank in range(size)]
    found = [[*cut] for cut in cuts]
    assert [len(one) for one in found] == [len(cut) for cut in cuts]
    return found


@pytest.mark.parametrize(
    ("length", "batch", "size", "expected"),
    [
        (8, Batch(micro=2, accumulate=4), 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (3, Batch(micro=4, accumulate=2), 2, [[[0, 1]], [[2]]]),
        (5, Batch(micro=2, accumulate=4), 2, [[[0, 1], [3]], [[2], [4]]]),
        (1, Batch(micro=4, accumulate=2), 2, [[], []]),
        (3, Batch(micro=1, accumulate=4), 2, [[[0]], [[1]]]),
    ],
)
def test_a_step_is_shared_out_in_as_many_micro_batches_for_each(length, batch, size, expected):
    """A tail too, which is cut smaller; one sample cannot be shared, and micro-batches of one only in pairs."""
    assert pieces_of(length, batch, size) == expected


def test_bad_numbers_of_processes_are_refused():
    with pytest.raises(ValueError, match="kind none takes 1, but got 2"):
        Parallel(processes=2)
    with pytest.raises(ValueError, match="kind ddp takes 2 or more, but got 1"):
        Parallel(kind="ddp")
    with pytest.raises(ValueError, match="comm_hook: kind fsdp has none"):
        Parallel(kind="fsdp", processes=2, comm_hook="fp16_compress")
    with pytest.raises(ValueError, match="reshard: kind ddp gathers no parameters"):
        Parallel(kind="ddp", processes=2, reshard=False)
    with pytest.raises(ValueError, match="cpu_offload: kind ddp has no shards"):
        Parallel(kind="ddp", processes=2, cpu_offload=True)
    assert ON_HOST.unavailable(facts(num_devices=2)) == (
        "cpu_offload: shards are on the host already, as all of a CPU's job is"
    )
    told = Parallel(kind="ddp", processes=2, comm_hook="bf16_compress").unavailable(facts(num_devices=2))
    assert told == "torch exchanges gradients in bf16 on CUDA only: use fp16_compress"
    told = Parallel(kind="ddp", processes=3).unavailable(facts(num_devices=2))
    assert told == "3 processes take as many processors, and a trial has 2 here"
    assert DDP.unavailable(facts(num_devices=2)) is None


CONFLICTS = {
    "use a multiple of processes": {"batch": Batch(micro=4, accumulate=3), "parallel": DDP},
    "use after_backward": {"optimizer_step": OptimizerStep(kind="in_backward"), "parallel": DDP},
    "not tried with: use ddp": {"compile": Compile(kind="model"), "parallel": FSDP},
    "leave memory_format out": {"memory_format": MemoryFormat(kind="channels_last"), "parallel": FSDP},
    "use bf16": {"precision": Precision(kind="fp16"), "parallel": FSDP},
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_what_does_not_go_together_is_said(words):
    assert words in str(Settings(**CONFLICTS[words]).conflict())


def test_micro_batches_that_are_halved_exchange_gradients_as_they_are():
    with pytest.raises(PlanError, match="not by parallel's comm_hook"):
        check_can_halve(Settings(parallel=HALF), Net(), 2)


def test_the_plan_shares_the_processors_out(monkeypatch):
    """A user who allows a process fewer threads is heeded; torchrun's one thread is said."""
    monkeypatch.setattr("autotune.techniques.parallel.num_processors", lambda: 8)
    settings = Settings(parallel=DDP)
    assert settings.environment({})["OMP_NUM_THREADS"] == "4"
    assert settings.environment({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "4"
    assert settings.environment({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert DDP.not_in_force() == "OMP_NUM_THREADS is 1, and each of the plan's processes computes with 4"


if __name__ == "__main__":
    run_as_two(found_by)
