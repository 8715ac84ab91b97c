"""``autotune estimate --card``: which cards are asked about, and what a row says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answering import Answering
from command_line import Ended
from screen import printed

from autotune.commands.cards import estimate_on_each
from autotune.commands.estimate import estimate_task, what_to_estimate
from autotune.errors import UserError
from autotune.estimates import Estimate, Fill, Fit, Interval
from autotune.estimates.cards import CARDS, find_cards
from autotune.report.cards import as_json, explain, line
from autotune.results import CardsEstimation
from autotune.techniques import Facts
from autotune.testing.facts import BARE
from autotune.units import MIB
from autotune.workers import Crashed, Estimated, Executor, Inspected, Outcome

TASKS = Path(__file__).parents[1] / "tasks"
FACTS = BARE.model_copy(update={"dataset_length": 4096, "effective_batch_held": False})


@pytest.fixture
def run(here: Callable[..., Ended], tmp_path: Path) -> Callable[..., Ended]:
    shutil.copy(TASKS / "healthy.py", tmp_path)
    return lambda *options: here("estimate", *options, cwd=tmp_path)


def estimate(limit_bytes: int, context: Interval) -> Estimate:
    """A sample takes 1 GiB, of which three quarters are activations."""
    micro = (limit_bytes - context.value) // 2**30

    def fit(micro: int) -> Fit:
        tensors = micro * 2**30
        own = Interval(low=tensors, value=tensors, high=tensors)
        return Fit(micro=micro, accumulate=1, tensors=own, process=own.plus(context.value))

    return Estimate(
        how="traced",
        base_bytes=context.value,
        largest=fit(micro) if micro else None,
        smallest=None if micro else fit(1),
        surely=micro - 1 or None,
        reference=fit(8),
        phase="backward",
        module="",
        fills=(
            Fill(kind="activation", module="a", num_bytes=2 * 2**30),
            Fill(kind="parameter", module="", num_bytes=2**30),
            Fill(kind="activation", module="b", num_bytes=2**30),
        ),
        seconds=1.0,
    )


class Says(Answering):
    """Answers for each card that is asked about."""

    def __init__(self, **facts: Any) -> None:
        self.facts: Facts = FACTS.model_copy(update=facts)
        self.inspected: list[str] = []
        self.asked: list[Any] = []

    def answer(self, request: Any) -> Outcome:
        if request.kind == "inspect":
            self.inspected.append(request.device)
            return Inspected(facts=self.facts)
        options = request.options
        self.asked.append(options)
        first, *others = [estimate(one.limit_bytes, one.context) for one in (options, *options.others)]
        return Estimated(estimate=first, others=tuple(others))


def on(card: str, executor: Executor | None = None, **options: Any) -> CardsEstimation:
    return estimate_on_each(what_to_estimate("model.py", card=card, **options), executor or Says(), lambda event: None)


def words(found: CardsEstimation, width: int) -> str:
    return printed(explain(found), width)


def test_cards_of_one_capability_are_asked_of_one_process_and_told_in_the_order_given():
    executor = Says()
    found = on("l40s,h100,rtx4090,h200", executor)
    assert [row.card.name for row in found.rows] == ["L40S", "H100", "RTX 4090", "H200"]
    assert [(one.capability, len(one.others)) for one in executor.asked] == [((8, 9), 1), ((9, 0), 1)]
    limits = {one.limit_bytes // MIB for options in executor.asked for one in (options, *options.others)}
    assert limits == {45_466, 81_009, 24_176, 143_221}


def test_a_row_has_what_binds_it_and_what_the_card_computes_in():
    """Of 14,909 MiB on a T4 and 81,009 on an H100, 512 and 650 are a context's."""
    found = on("t4,h100")
    assert [line(row) for row in found.rows] == ["T4: 14", "H100: 78"]
    said = words(found, 80)
    assert "kept activations 75%  fp16" in said
    assert "kept activations 75%  tf32 bf16 fp16" in said
    assert "no room for" not in said
    (t4, h100) = as_json(found)["cards"]
    assert (t4["precisions"], h100["capability"]) == (["fp32", "fp16"], [9, 0])
    assert t4["estimate"]["largest"]["micro"] == 14


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_all_cards_has_room_in_a_terminal(width: int):
    lines = words(on("all"), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "no room for" not in "".join(lines)
    assert sum(any(row.startswith(card.name) for card in CARDS) for row in lines) == len(CARDS)


def test_a_budget_binds_every_card():
    executor = Says()
    said = words(on("t4,h100,h200", executor, budget_bytes=20 * 2**30), 80)
    assert "of the job as it stands within 20 GiB" in said
    limits = {one.limit_bytes // MIB for options in executor.asked for one in (options, *options.others)}
    assert limits == {14_909, 20_480}


def test_the_dataset_may_bind_and_where_nothing_fits_the_least_is_told():
    assert "the dataset's length" in words(on("h100,h200", Says(dataset_length=10)), 80)
    said = words(on("t4,h100", budget_bytes=2**30), 80)
    assert "1 takes 1536 MiB" in " ".join(said.split())


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ("tf32", "tf32, which these lack: T4. State fp32, which takes as much there"),
        ("bf16", "bf16, which these lack: T4. State fp16, which takes as much, or fp32 there"),
    ],
)
def test_a_card_that_lacks_what_the_task_states_is_named(stated: str, told: str):
    """Of AMD's, TF32 is another switch than torch's."""
    assert ("lack: MI325X" in words(on("mi325x,h100", Says(precision=stated)), 200)) is (stated == "tf32")
    assert told in " ".join(words(on("t4,h100", Says(precision=stated)), 200).split())
    assert "lack" not in words(on("l4,h100", Says(precision=stated)), 200)


def test_of_an_amd_card_convolutions_are_said_to_be_unsure():
    """What they take beside CUDA's is asked about as well."""
    executor = Says(conv_dims=(2,))
    assert "MI325X: what convolutions take there differs" in words(on("mi325x,h100", executor), 200)
    assert {one.capability: one.workspaces for one in executor.asked} == {(9, 4): (0.8, 1.5), (9, 0): (0.0, 0.0)}
    for cards, dims in (("mi325x", ()), ("h100", (2,))):
        assert "differs" not in words(on(cards, Says(conv_dims=dims)), 200)


def test_one_card_is_looked_at_with_each_technique():
    """It has its own capability, memory and context; another of which only the memory is known has none."""
    for given, capability, context in (({"card": "t4"}, (7, 5), 512), ({"device_memory_bytes": 2**34}, None, 512)):
        executor = Says()
        found = estimate_task(what_to_estimate("model.py", **given), executor, lambda event: None)
        assert {one.capability for one in executor.asked} == {capability}
        assert {one.context.value // MIB for one in executor.asked} == {context}
        assert len(found.combinations) > 1
    assert find_cards("t4")[0].device.memory_bytes == 14_909 * MIB


def test_compiled_models_are_not_asked_about():
    """They are traced operation by operation, as others are: each would say the same, or that there is no card."""
    executor = Says()
    estimate_task(what_to_estimate("model.py", card="h100"), executor, lambda event: None)
    assert {one.settings.compile.kind for one in executor.asked} == {"none"}


def test_the_card_that_is_here_is_planned_for_without_saying_more(monkeypatch):
    """It is inspected there, so that its memory, name and capability are its own."""
    monkeypatch.setattr("autotune.commands.estimate.default_device", lambda: "cuda")
    device = find_cards("h100")[0].device.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 2**36})
    executor = Says(device=device)
    found = estimate_task(what_to_estimate("model.py"), executor, lambda event: None)
    assert (executor.inspected, found.limit_bytes) == (["cuda"], 2**36)
    assert {(one.capability, one.context.value // MIB) for one in executor.asked} == {((9, 0), 650)}
    assert what_to_estimate("model.py", card="t4").is_here is False


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"card": "h100", "device_memory_bytes": 2**34}, "Leave one of them out"),
        ({"card": "h100", "device": "cpu"}, "--card is of a CUDA device, but --device is cpu"),
        ({"card": "h1000"}, "no card is known as 'h1000'"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], told: str):
    with pytest.raises(UserError, match=told):
        what_to_estimate("model.py", **given)


def test_a_task_that_crashes_is_told_as_the_tasks():
    class Crashes(Says):
        def answer(self, request: Any) -> Outcome:
            return super().answer(request) if request.kind == "inspect" else Crashed(message="SIGSEGV")

    with pytest.raises(UserError, match="SIGSEGV"):
        on("t4,h100", Crashes())


# The command


def test_an_unknown_card_exits_with_2_and_the_nearest_names(run):
    ended = run("healthy.py", "--card", "a100")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "The nearest: a100-40gb, a100-80gb." in ended.stderr
    document = json.loads(run("healthy.py", "--json", "--card", "a100").stdout)
    assert document["exit_code"] == 2


@pytest.mark.parametrize(
    "words", [("healthy.py", "--card", "--space", "exact"), ("--card", "healthy.py", "--space=exact")]
)
def test_card_alone_is_all_of_them(words, run):
    """Which are compared as the job stands, whatever the space."""
    ended = run(*words)
    assert ended.returncode == 2
    assert "--space and --storage are for one card" in ended.stderr


@pytest.mark.slow
def test_a_table_is_printed_for_cards_that_are_not_here(run):
    ended = run("healthy.py", "--card", "h100,t4")
    assert ended.returncode == 0, ended.stderr
    assert "H100: 64\nT4: 64\n" in ended.stderr
    assert ended.stdout.count("the dataset's length") == 2
