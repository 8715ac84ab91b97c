"""Layers that are split between processes: the training of one process, and what cannot be split."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_pair import run_as_two, told_by
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import autotune
from autotune.errors import PlanError, TaskError
from autotune.measure.steps import Steps
from autotune.plan import Plan
from autotune.ranks import world_size
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.support.feed_forward import find_pairs
from autotune.techniques.tiles import Tiles
from autotune.training.together import check_can_halve

BATCH = Batch(micro=4, accumulate=3, effective=11)
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}


def tensor(processes: int = 2) -> Parallel:
    return Parallel(kind="tensor", processes=processes)


class Gated(nn.Module):
    """Two layers beside each other, then one; a norm that is inside and no pair's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act, self.norm, self.wide, self.last = nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(self.act(self.gate(x)) * self.up(x)))
        return self.last(torch.relu(self.wide(x)))


class Net(nn.Module):
    """Blocks of a user's own, with dropout outside of what is split."""

    def __init__(self, inner: int = 32, rate: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8)) for _ in range(2)
        )
        self.gated, self.drop, self.head = Gated(), nn.Dropout(rate), nn.Linear(8, 60)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(self.gated(x))


def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **changes}))


def qwen() -> nn.Module:
    """Its norms of queries and keys are whole, and see some of the heads each."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))


def samples() -> list[tuple[Tensor, int]]:
    """Words, and how many of them count: 29 samples are two steps of 11, and a tail."""
    rows = torch.randint(1, 60, (29, 6), generator=torch.Generator().manual_seed(3))
    return [(row, 1 + number % 5) for number, row in enumerate(rows)]


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    ids, num = batch
    found = model(ids)
    logits = found if isinstance(found, Tensor) else found.logits
    losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    counts = torch.arange(5)[None] < num[:, None]
    return (losses.view(len(ids), 5) * counts).sum(), counts.sum()


def task(build_model: Callable[[], nn.Module], **changes: Any) -> autotune.Task:
    pieces = {"build_dataset": samples, "compute_loss": counted, "max_grad_norm": 0.3, "batch_size": 11}
    return autotune.Task(build_model=build_model, **{**pieces, **changes})


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "own plan": (llama, {}),
    "own plan, one table": (lambda: llama(tie_word_embeddings=True), {}),
    "own plan, norms of heads": (qwen, {}),
    "pairs": (Net, {}),
    "recomputed": (llama, {"checkpointing": Checkpointing(kind="blocks")}),
}
PARTS = {"own plan": 16, "own plan, one table": 14, "own plan, norms of heads": 16, "pairs": 18, "recomputed": 16}
"""Of the parameters, those that are split: each layer's seven matrices, table and head; biases too."""


def whole(one: Any) -> Tensor:
    return one.full_tensor() if hasattr(one, "full_tensor") else one


def flat(model: nn.Module) -> Tensor:
    """All parameters, whole."""
    return torch.cat([whole(p).detach().flatten() for p in model.parameters()])


def trained(name: str, parallel: Parallel) -> dict[str, Any]:
    """Of an epoch: losses; of its first optimizer step, which clips, all gradients before; then all parameters."""
    build, settings = CASES[name]
    plan = Plan(settings=Settings(**{"batch": BATCH, "parallel": parallel, **settings}))
    training = autotune.apply(plan, task(build), seed=5)
    losses, gradients = [], []
    for batch in training.loader:
        with training.forward_context():
            total, count = counted(training.model, batch)
        losses.append(float(total.detach() / count))
        if training.backward((total, count)):
            gradients = gradients or [whole(p.grad).flatten().clone() for p in training.model.parameters()]
            training.optimizer_step()
    return {
        "losses": losses,
        "gradients": torch.cat(gradients).tolist(),
        "parameters": flat(training.model).tolist(),
        "parts": sum(hasattr(p, "full_tensor") for p in training.model.parameters()),
    }


def resumed() -> list[list[float]]:
    """Parameters after an epoch, of one training and of another that goes on from the middle of its second step."""
    plan = Plan(settings=Settings(batch=BATCH, parallel=tensor()))
    first, second = (autotune.apply(plan, task(Net), seed=seed) for seed in (5, 6))
    batches = iter(first.loader)
    for _ in range(4):
        first.step(next(batches))
    state = copy.deepcopy(first.state_dict())
    for batch in batches:
        first.step(batch)
    second.load_state_dict(state)
    for batch in second.loader:
        second.step(batch)
    return [flat(one.model).tolist() for one in (first, second)]


def counted_once() -> int:
    """Samples of an optimizer step, by which speed is measured."""
    plan = Plan(settings=Settings(batch=BATCH, parallel=tensor()))
    steps = Steps(autotune.apply(plan, task(Net), seed=5))
    steps.feed.open()
    return steps.step().num_samples


def refusals(rank: int) -> dict[str, str]:
    """What each rank says of what it cannot have."""
    plan = Plan(settings=Settings(batch=BATCH, parallel=tensor()))

    def apply(build: Callable[[], nn.Module], **changes: Any) -> Callable[[], Any]:
        return lambda: autotune.apply(plan, task(build, **changes))

    def of_its_own() -> None:
        training = autotune.apply(plan, task(Net, build_dataset=lambda: samples()[rank:]))
        training.step(next(iter(training.loader)))

    def built(kind: str) -> Callable[[], Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shared = Plan(settings=Settings(batch=Batch(micro=4, accumulate=2), parallel=Parallel(kind=kind, processes=2)))
        pieces = {"model": model, "dataset": samples(), "loss": counted, "optimizer": optimizer}
        return lambda: autotune.apply(shared, **pieces)

    def twice() -> None:
        training = autotune.apply(plan, task(Net))
        autotune.apply_to_model(Plan(settings=Settings()), training.model)

    tried: dict[str, Callable[[], Any]] = {
        "nothing": apply(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
        "odd widths": apply(lambda: nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 8))),
        "odd layers": apply(lambda: llama(intermediate_size=51)),
        "heads": apply(lambda: llama(num_key_value_heads=1)),
        "styles": apply(lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=2))),
        "samples": of_its_own,
        "twice": twice,
        "optimizer": built("tensor"),
        "optimizer of shards": built("fsdp"),
    }
    return {name: _said(act) for name, act in tried.items()}


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (PlanError, TaskError) as error:
        return str(error)
    return ""


def found_by(rank: int) -> dict[str, Any]:
    """All that needs several processes, in one group of them."""
    warnings.simplefilter("ignore")
    size = world_size()
    found: dict[str, Any] = {"trained": {name: trained(name, tensor(size)) for name in CASES}}
    if size == 2:
        found |= {"resumed": resumed(), "refusals": refusals(rank), "counted once": counted_once()}
    return found


def check_like_one(found: list[dict[str, Any]], name: str) -> None:
    """Losses and gradients of one process to 2e-5; all processes have the same to the bit."""
    alone = trained(name, Parallel())
    each = [one["trained"][name] for one in found]
    assert all(one == each[0] for one in each)
    assert len(each[0]["losses"]) == 8
    for what in ("losses", "gradients", "parameters"):
        tolerance = 2e-5 if what != "parameters" else 5e-4  # AdamW divides small gradients by their size
        assert torch.allclose(torch.tensor(each[0][what]), torch.tensor(alone[what]), rtol=0, atol=tolerance), what
    assert each[0]["parts"] == PARTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_does(pair, name):
    check_like_one(pair, name)


@pytest.mark.slow
def test_four_processes_train_what_one_does(tmp_path):
    found, _ = told_by(__file__, tmp_path, 4)
    for name in CASES:
        check_like_one(found, name)


@pytest.mark.slow
def test_a_training_goes_on_from_the_middle_of_a_step(pair):
    for one in pair:
        assert one["resumed"][0] == one["resumed"][1]


@pytest.mark.slow
def test_samples_that_all_processes_see_are_counted_once(pair):
    assert [one["counted once"] for one in pair] == [11, 11]


REFUSED = {
    "nothing": "and Sequential has none of them. Use ddp or fsdp",
    "odd widths": "whose inner width 2 divides",
    "odd layers": r"layers.0.mlp.gate_proj is to be split into 2 equal parts \(colwise\), but has \(51, 32\)",
    "heads": "2 processes cannot share num_key_value_heads = 1 in equal parts",
    "styles": r"plan of MixtralForCausalLM splits .*experts.* as \w+, which torch's",
    "samples": "all processes train on the same samples, but their losses of the first micro-batch are",
    "twice": "the model is split already",
    "optimizer": "other parameters than those that the optimizer was built with",
    "optimizer of shards": "other parameters than those that the optimizer was built with",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_split_is_said_in_each(pair, what):
    for one in pair:
        assert re.search(REFUSED[what], one["refusals"][what])


def test_pairs_are_layers_between_which_each_element_stands_for_itself():
    """A chain of three has one pair; a norm over what is split, dropout in it, and a layer that is read twice, none."""
    chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    (pair,) = find_pairs(chain)
    assert (pair.wide, pair.narrow) == ((chain[0],), chain[2])
    gated = Gated()
    assert [(one.wide, one.narrow) for one in find_pairs(gated)] == [
        ((gated.gate, gated.up), gated.down),
        ((gated.wide,), gated.last),
    ]
    for inside in (nn.LayerNorm(8), nn.Dropout(0.1)):
        assert find_pairs(nn.Sequential(nn.Linear(4, 8), inside, nn.Linear(8, 4))) == []

    class Read(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            return self[1](hidden) + hidden

    assert find_pairs(Read(nn.Linear(4, 8), nn.Linear(8, 8))) == []


CONFLICTS = {
    "use for_loop": {"optimizer": Optimizer(kind="fused")},
    "use bf16": {"precision": Precision(kind="fp16")},
    "not tried with layers": {"layers": Layers(kind="exact")},
    "not tried with tiles": {"tiles": Tiles(kind="feed_forward")},
    "not tried with compile": {"compile": Compile(kind="model")},
    "share out parameters and their state": {"optimizer_state": OptimizerState(kind="8bit")},
    "use after_backward": {"optimizer_step": OptimizerStep(kind="in_backward")},
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_what_does_not_go_together_is_said(words):
    assert words in str(Settings(parallel=tensor(), **CONFLICTS[words]).conflict())


def test_each_process_has_the_whole_batch():
    """So three micro-batches are no matter of two processes, nor is a stream of samples."""
    assert Settings(parallel=tensor(), batch=Batch(micro=4, accumulate=3)).conflict() is None
    with pytest.raises(ValueError, match="kind tensor gives each process all samples"):
        Parallel(kind="tensor", processes=2, effective=8)
    with pytest.raises(PlanError, match="tensor exchanges data between ranks"):
        check_can_halve(Settings(parallel=tensor()), Net(), 2)
    assert "is for autotune.apply" in str(tensor().beyond_script())


if __name__ == "__main__":
    run_as_two(found_by)
