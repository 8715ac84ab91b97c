"""TF32 on a card: set by whichever of torch's names, read, switched off for a check, and put back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from search_tables import facts
from stand_in import Card
from torch import backends

import autotune
from autotune.measure.checks.split import measure_split
from autotune.plan import Budget, Plan
from autotune.randomness import seed_everything
from autotune.report.show import found_rows
from autotune.searches.winner.build_plan import environment_of
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO

_CUDA = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
_PLACES = (*_CUDA, backends.mkldnn.matmul, backends.cudnn, backends.mkldnn, backends)


def _set_flag(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


USERS = {
    "nothing": lambda: None,
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "matmul.allow_tf32": _set_flag(backends.cuda.matmul, "allow_tf32", True),
    "matmul.fp32_precision": _set_flag(backends.cuda.matmul, "fp32_precision", "tf32"),
    "all tf32": _set_flag(backends, "fp32_precision", "tf32"),  # transformers' tf32=True
    "all ieee": _set_flag(backends, "fp32_precision", "ieee"),
    "conv ieee": _set_flag(backends.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn.allow_tf32": _set_flag(backends.cudnn, "allow_tf32", False),
}
"""How a user may have said it before a plan comes."""


@pytest.fixture(params=USERS)
def users_flags(request) -> Iterator[None]:
    """As torch starts, then what the user says; torch's own afterwards."""
    before = [place.fp32_precision for place in _PLACES]
    USERS[request.param]()
    yield
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for place, one in zip(_PLACES, before, strict=True):
        place.fp32_precision = one


def _flags() -> list[object]:
    """What is applied, and which of the older names can be read."""
    found: list[object] = [place.fp32_precision for place in (*_CUDA, backends.mkldnn.matmul)]
    for read in (torch.get_float32_matmul_precision, lambda: backends.cudnn.allow_tf32):
        with contextlib.suppress(RuntimeError):
            found.append(read())
    return found


@pytest.fixture
def ampere(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def test_tf32_goes_with_whichever_names_the_user_has_used(users_flags, ampere):
    """It is applied for matrix products and convolutions, older names can be read, and taking it off leaves what
    computed before in what it computed in."""
    before, model = [place.fp32_precision for place in _PLACES], torch.nn.Linear(1, 1)
    tf32 = Precision(kind="tf32")
    tf32.on_model(model, ())
    assert [place.fp32_precision for place in _CUDA] == ["tf32"] * 3
    assert torch.get_float32_matmul_precision() == "high"
    assert backends.cuda.matmul.allow_tf32
    assert backends.cudnn.allow_tf32
    tf32.undo(model)
    assert [place.fp32_precision for place in _PLACES] == before


def test_a_split_is_checked_without_tf32(users_flags):
    """cuDNN takes other kernels for other batches, and in TF32 these differ by more than a split may. What is timed
    runs as the job does."""
    task, seen, before = ZOO["mlp"], [], _flags()
    seed_everything(0)
    model, dataset = task.build_model(), task.build_dataset()
    model.register_forward_pre_hook(lambda *_: seen.append([place.fp32_precision for place in _CUDA]))
    measure_split(task, model, [dataset[index] for index in range(6)], torch.device("cpu"))
    whole, timed, *parts = seen
    assert timed == before[:3]
    assert all(one == ["ieee"] * 3 for one in (whole, *parts))
    assert _flags()[: len(before)] == before


def _told() -> Plan:
    """A plan for a job on this card."""
    model = ZOO["cnn"].build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    known = facts(**Precision.facts_of(model, optimizer, "cuda"))
    return Plan(settings=Settings(batch=Batch(micro=1)), environment=environment_of(known))


TOLD = {
    "nothing": (("convolutions",), "convolutions of what is in fp32 computes in it, by torch's default"),
    "conv ieee": ((), "nothing of what is in fp32 computes in it, by torch's flags, as the job leaves them"),
    "all tf32": (
        ("matrix products", "convolutions"),
        "matrix products and convolutions of what is in fp32 computes in it, by torch's flags, as the job leaves them",
    ),
}


@pytest.mark.parametrize("users_flags", TOLD, indirect=True)
def test_every_plan_says_what_of_fp32_is_in_tf32(users_flags, card: Card, request):
    """On a card that has it, also where the plan changes no precision: torch's own default has convolutions in it."""
    wanted, words = TOLD[request.node.callspec.params["users_flags"]]
    plan = Plan.from_yaml(_told().to_yaml())
    assert plan.environment.tf32 == wanted
    assert ("TF32", words) in found_rows(plan)["Measured on"]
    card.capability = (7, 5)
    assert _told().environment.tf32 is None
    assert "tf32" not in _told().to_yaml()


def test_fp32_is_described_with_what_is_in_tf32():
    on_card = facts(tf32=("convolutions",))
    assert Precision(kind="fp32").describe(on_card) == "fp32 (convolutions in TF32)"
    assert Precision(kind="fp32").describe(facts(tf32=())) == Precision(kind="fp32").describe(facts()) == "fp32"


def test_losses_of_a_job_that_computes_in_tf32_are_held_to_a_rounding_jobs_limit():
    """cuDNN and cuBLAS may take other kernels for other batches. Of convolutions only where the model has any."""
    assert facts(tf32=("convolutions",), conv_dims=(2,)).rounds
    assert not facts(tf32=("convolutions",), conv_dims=()).rounds
    assert facts(tf32=("matrix products", "convolutions"), conv_dims=()).rounds
    assert not facts(tf32=(), conv_dims=(2,)).rounds


def test_a_job_whose_flags_are_others_than_the_plans_is_told_in_one_line(card: Card):
    """By its own: a plan in TF32 that is applied twice changes none of them. What the card has not is not told."""
    task = ZOO["mlp"]
    environment = environment_of(facts(tf32=("convolutions",))).model_copy(
        update={"torch": torch.__version__, "device": card.name, "threads": None}
    )
    settings = Settings(batch=Batch(micro=4), precision=Precision(kind="tf32"))
    plan = Plan(settings=settings, budget=Budget(device="cuda"), environment=environment)

    def told() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            autotune.apply(plan, task)
        return [str(one.message) for one in seen if "TF32" in str(one.message)]

    before = [place.fp32_precision for place in _PLACES]
    try:
        assert told() == []
        assert told() == []
        Precision().undo(task.build_model())
        torch.set_float32_matmul_precision("high")
        (line,) = told()
        assert "measured with convolutions of fp32 in TF32, and here it is matrix products and convolutions" in line
        assert line.endswith("`autotune verify` measures it here.")
    finally:
        Precision().undo(task.build_model())
        torch.set_float32_matmul_precision("highest")
        for place, one in zip(_PLACES, before, strict=True):
            place.fp32_precision = one
