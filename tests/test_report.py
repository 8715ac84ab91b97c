"""Words, the display and its plain lines, from scripted events."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from autotune.measure import Measurement, Parity
from autotune.plan import Budget, Evidence, Gain, Peak, Plan, Speed
from autotune.report.lines import facts_words, line
from autotune.report.live import draw, watching
from autotune.report.progress import Progress
from autotune.report.show import summary
from autotune.report.words import outcome_words, purpose, rate, remark, settings_words, size
from autotune.search import events
from autotune.search.options import SearchOptions
from autotune.techniques import TECHNIQUES, Device, Facts, Settings
from autotune.units import MIB
from autotune.workers import Crashed, Failed, Measured, NonFinite, Outcome, OutOfMemory, TimedOut

BUDGET = Budget(limit=512 * MIB)
REFERENCE = Settings.model_validate({"batch": {"micro": 256}})
SPLIT = Settings.model_validate(
    {
        "batch": {"micro": 64, "accumulate": 4},
        "precision": {"kind": "bf16"},
        "checkpointing": {"kind": "blocks", "every": 2},
        "memory_format": {"kind": "channels_last"},
        "data_loading": {"num_workers": 4, "prefetch_factor": 2, "persistent_workers": True},
        "optimizer": {"kind": "fused"},
        "allocator": {"kind": "tcmalloc"},
    }
)
FACTS = Facts(
    fingerprint="sha256:" + "0" * 64,
    device=Device(type="cpu", name="Some CPU", memory_bytes=16 * 1024 * MIB, bf16=True),
    torch_version="2.13.0",
    num_threads=2,
    host_memory_bytes=16 * 1024 * MIB,
    num_parameters=1_234_567,
    num_trainable=1_234_567,
    num_blocks=12,
    block_name="Block",
    conv_dims=(),
    dataset_length=5000,
    dataset_kind="map",
    dataset_bytes=MIB,
    dataset_deterministic=True,
    stackable=True,
    shapes_vary=False,
    shards_by_worker=False,
    loader_options={},
    loader_samples_per_s={0: 1e5},
    effective_batch=256,
    effective_batch_held=True,
    effective_batch_assumed=False,
    split_error=0.0,
    allow_split=False,
    optimizer="AdamW",
    optimizer_implementations=("foreach",),
    allocators=("tcmalloc",),
)


def measured(per_s: float, mib: int, *, strayed_at: int | None = None, leak: float | None = None) -> Measured:
    measurement = Measurement(
        samples_per_s=Speed(value=per_s, low=per_s * 0.99, high=per_s * 1.01),
        peak=Peak(process=mib * MIB),
        parity=Parity(losses=(1.0,), strayed_at=strayed_at),
        num_steps=10,
        num_windows=3,
        loader_wait=0.0,
        epoch_start_s=0.0,
        leak_bytes_per_step=leak,
        phases_s={},
    )
    return Measured(measurement=measurement, seconds=10.0)


def ended(number: int, settings: Settings, outcome: Outcome, is_best: bool = False) -> events.TrialEnded:
    feasible = isinstance(outcome, Measured) and remark(outcome, BUDGET) is None
    return events.TrialEnded(number, settings, outcome, feasible, is_best)


SCRIPT: list[events.Event] = [
    events.Inspected(FACTS),
    events.SearchStarted("model-1", 96, 24),
    events.TrialStarted(0, REFERENCE),
    ended(0, REFERENCE, measured(352.0, 802)),
    events.Warned("jemalloc is not installed: apt-get install libjemalloc2"),
    events.TrialStarted(1, SPLIT),
    ended(1, SPLIT, OutOfMemory(peak_bytes=640 * MIB, message="the watchdog ended it")),
    events.TrialStarted(2, SPLIT),
    ended(2, SPLIT, measured(812.4, 471), is_best=True),
    events.TrialStarted(3, SPLIT),
]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(script: list[events.Event], clock: Clock, **options: float) -> Progress:
    asked = SearchOptions(task="model.py", budget_bytes=BUDGET.limit, **options)
    progress = Progress(asked, clock)
    for event in script:
        progress.observe(event)
    return progress


def panel(progress: Progress, width: int = 80, max_rows: int = 10) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(progress, max_rows))
    return console.file.getvalue()


def test_settings_in_words():
    assert settings_words(SPLIT, FACTS) == (
        "micro-batch 64 × 4, bf16, checkpoint every 2nd of 12 blocks, channels_last, "
        "4 loader workers (prefetch 2, persistent), fused optimizer, tcmalloc"
    )
    assert settings_words(REFERENCE) == "batch 256"


@pytest.mark.parametrize(
    ("blocks", "words"), [((0, 2, 5), "checkpoint blocks 0, 2 and 5 of 12"), ((3,), "checkpoint block 3 of 12")]
)
def test_blocks_that_are_named_are_named_in_words(blocks, words):
    assert settings_words(Settings(checkpointing={"kind": "chosen", "blocks": blocks}), FACTS) == words


def test_an_uneven_batch_says_how_many_samples_there_are():
    uneven = Settings.model_validate({"batch": {"micro": 3, "accumulate": 4, "effective": 10}})
    assert settings_words(uneven) == "micro-batch 3 × 4 (the last smaller, 10 in all)"


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_has_a_purpose(name):
    technique = TECHNIQUES[name]
    choice = technique.choices(FACTS)[-1]
    assert purpose(choice).endswith(".")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (measured(812.4, 471), "812 samples/s ± 1.0 %, 471 MiB"),
        (measured(812.4, 500), "812 samples/s ± 1.0 %, 500 MiB: over the budget"),  # 500 * 1.03 = 515
        (measured(81.24, 471, strayed_at=3), "81.2 samples/s ± 1.0 %, 471 MiB: loss strays at step 3"),
        (measured(0.8124, 471, leak=2.5 * MIB), "0.812 samples/s ± 1.0 %, 471 MiB: leaks 2.5 MiB a step"),
        (OutOfMemory(peak_bytes=640 * MIB, message="the watchdog"), "out of memory at 640 MiB: the watchdog"),
        (TimedOut(deadline_s=30), "timed out after 30 s"),
        (Crashed(message="Segmentation fault (SIGSEGV)\nthe stack"), "crashed: Segmentation fault (SIGSEGV)"),
        (NonFinite(step=7), "loss not finite at step 7"),
        (Failed(message="ValueError: no", traceback="a\nb"), "failed: ValueError: no"),
    ],
)
def test_outcomes_in_words_on_one_line(outcome, words):
    assert outcome_words(outcome, BUDGET) == words


def test_numbers_for_people():
    assert [rate(x) for x in (12345.6, 812.4, 81.24, 8.124, 0.8124)] == ["12,346", "812", "81.2", "8.12", "0.812"]
    assert [size(x * MIB) for x in (3, 605, 4096, 7793)] == ["3.0 MiB", "605 MiB", "4 GiB", "7.61 GiB"]


def test_the_job_that_a_task_states_is_repeated():
    assert "batch 256 (64 × 4), in bf16, clipped at 1; on Some CPU" in facts_words(
        FACTS.model_copy(update={"micro_batch": 64, "precision": "bf16", "max_grad_norm": 1.0})
    )
    assert "batch 256 (100 × 2, then 56)" in facts_words(FACTS.model_copy(update={"micro_batch": 100}))


def test_each_event_is_one_plain_line():
    clock = Clock()
    progress = Progress(SearchOptions(task="model.py", budget_bytes=BUDGET.limit), clock)
    said = []
    for event in SCRIPT:
        clock.now += 1
        progress.observe(event)
        said.append(line(event, progress))
    assert all("\n" not in text for text in said)
    assert said[0] == ("[1 s] task: 1.23 M parameters, 12 blocks of Block, 5,000 samples, batch 256; on Some CPU (cpu)")
    assert said[3] == "[4 s] reference: 352 samples/s ± 1.0 %, 802 MiB: over the budget"
    assert said[6] == "[7 s] trial 1: out of memory at 640 MiB: the watchdog ended it"
    assert said[8] == "[9 s] trial 2: 812 samples/s ± 1.0 %, 471 MiB · 2.31x the reference (best so far)"


def test_the_panel_shows_the_best_the_budget_what_runs_and_what_was():
    clock = Clock()
    progress = watched(SCRIPT, clock)
    clock.now = 75.0
    said = panel(progress)
    for words in (
        "model.py · 1 min 15 s",
        "3 of 24",
        "471 MiB of 512 MiB, best so far",
        "812 samples/s · 2.31x the reference",
        "trial 3, 1 min 15 s: micro-batch 64 × 4",
        "out of memory: micro-batch",
    ):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_its_terminal(width):
    assert max(map(len, panel(watched(SCRIPT, Clock()), width).splitlines())) <= width


def test_the_panel_keeps_its_rows():
    many = [*SCRIPT, *(ended(n, SPLIT, measured(500.0, 471)) for n in range(3, 40))]
    shown = panel(watched(many, Clock()), max_rows=5)
    assert shown.count("500   1.42x") == 5


def test_time_left_is_the_median_trial_times_those_left():
    script = [*SCRIPT[:2], *(ended(n, SPLIT, measured(500.0, 471)) for n in range(4))]
    assert watched(script, Clock()).trials_left_s == 20 * 10.0


def test_time_left_never_passes_the_time_asked_for():
    clock = Clock()
    script = [*SCRIPT[:2], *(ended(n, SPLIT, measured(500.0, 471)) for n in range(4))]
    progress = watched(script, clock, max_time_s=100.0)
    clock.now = 70.0
    assert progress.trials_left_s == 30.0


def test_rows_say_what_tells_them_apart():
    """Both have a batch of 256; the one that is bf16 besides says so, and no more."""
    other = REFERENCE.model_copy(update={"precision": SPLIT.precision})
    script = [*SCRIPT[:2], ended(0, REFERENCE, measured(500.0, 471)), ended(1, other, measured(600.0, 471))]
    (row,) = [line for line in panel(watched(script, Clock())).splitlines() if line.startswith("trial 1")]
    assert row.split()[-1] == "bf16"
    assert "batch" not in row


def test_a_gain_within_the_spread_is_no_gain_in_the_headline():
    evidence = [
        Evidence(samples_per_s=Speed(value=v, low=0.5 * v, high=1.5 * v), peak={"process": MIB}) for v in (2.0, 1.0)
    ]
    plan = Plan(settings=Settings(), measured=evidence[0], reference=evidence[1], gain=Gain(speed=2.0, memory=1.0))
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(plan, Path("plan.yaml")))
    said = console.file.getvalue()
    assert "2.00x the reference's speed (within the spread: no gain in speed is proven)" in said


def test_a_resumed_study_counts_what_was_done_before():
    before = tuple(ended(n, SPLIT, measured(500.0, 471)) for n in range(5))
    script = [SCRIPT[0], events.SearchStarted("model-1", 96, 24, before), ended(5, SPLIT, measured(500.0, 471))]
    progress = watched(script, Clock())
    assert progress.num_trials_ended == 6
    assert progress.reference is not None


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_without_a_terminal_or_colour_there_are_plain_lines(environment, monkeypatch):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    console = Console(file=io.StringIO(), width=80, force_terminal=bool(environment))
    with watching(SearchOptions(task="model.py", budget_bytes=BUDGET.limit), console) as display:
        for event in SCRIPT:
            display.observe(event)
    said = console.file.getvalue()
    assert len(said.splitlines()) == len(SCRIPT)
    assert "\x1b" not in said
