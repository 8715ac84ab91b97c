"""Words, the display and its plain lines, from scripted events."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from screen import printed
from search_tables import facts, measurement

from autotune.measure import Parity
from autotune.plan import Budget, Evidence, Gain, Plan, Speed
from autotune.report.displays.lines import line, still
from autotune.report.displays.live import draw, watching
from autotune.report.displays.progress import Progress
from autotune.report.preview import explain
from autotune.report.show import summary
from autotune.results import Preview
from autotune.searches import events
from autotune.searches.options import SearchOptions
from autotune.searches.predicted.duration import Expected
from autotune.techniques import Device, Settings
from autotune.units import MIB, size
from autotune.words import facts_words, outcome_words, percent, rate, remark, roughly, settings_words
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
FACTS = facts(
    device=Device(type="cpu", name="Some CPU", memory_bytes=16 * 1024 * MIB, bf16=True),
    host_memory_bytes=16 * 1024 * MIB,
    num_parameters=1_234_567,
    num_trainable=1_234_567,
    dataset_length=5000,
    effective_batch=256,
)


def measured(per_s: float, mib: int, *, strayed_at: int | None = None, leak: float | None = None) -> Measured:
    parity = Parity(losses=(1.0,), strayed_at=strayed_at)
    found = measurement(per_s, half=per_s * 0.01, process=mib * MIB)
    found = found.model_copy(update={"parity": parity, "leak_bytes_per_step": leak})
    return Measured(measurement=found, seconds=10.0)


def ended(number: int, settings: Settings, outcome: Outcome, is_best: bool = False) -> events.TrialEnded:
    feasible = isinstance(outcome, Measured) and remark(outcome, BUDGET) is None
    return events.TrialEnded(number, settings, outcome, feasible, is_best)


SCRIPT: list[events.Event] = [
    events.TaskRead(FACTS),
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
    asked = SearchOptions(task="model.py", budget=BUDGET.limit, **options)
    progress = Progress(asked, clock)
    for event in script:
        progress.observe(event)
    return progress


def panel(progress: Progress, width: int = 80, max_rows: int = 10) -> str:
    return printed(draw(progress, max_rows), width)


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
    said = [roughly(x) for x in (2, 47, 57, 100, 130, 647, 3000, 9000)]
    assert said == ["5 s", "45 s", "1 min", "1.5 min", "2 min", "11 min", "50 min", "2.5 h"]
    assert [rate(x) for x in (12345.6, 812.4, 81.24, 8.124, 0.8124)] == ["12,346", "812", "81.2", "8.12", "0.812"]
    assert [size(x * MIB) for x in (3, 605, 4096, 7793)] == ["3.0 MiB", "605 MiB", "4 GiB", "7.61 GiB"]


def test_percentages_for_people():
    """No exponent, whatever the size."""
    assert [percent(share) for share in (0.042, -0.12, 0.9961, 18.6)] == ["+4.2 %", "-12 %", "+100 %", "+1,860 %"]


def test_the_job_that_a_task_states_is_repeated():
    assert "batch 256 (64 × 4), in bf16, clipped at 1; on Some CPU" in facts_words(
        FACTS.model_copy(update={"micro_batch": 64, "precision": "bf16", "max_grad_norm": 1.0})
    )
    assert "batch 256 (100 × 2, then 56)" in facts_words(FACTS.model_copy(update={"micro_batch": 100}))
    varying = FACTS.model_copy(update={"micro_batch": 128, "batch_varies": True})
    assert "batch 256, varying; " in facts_words(varying)  # in two passes over it (SAM), or in two parts of it


def test_each_event_is_one_plain_line():
    clock = Clock()
    progress = Progress(SearchOptions(task="model.py", budget=BUDGET.limit), clock)
    said = []
    for event in SCRIPT:
        clock.now += 1
        progress.observe(event)
        said.append(line(event, progress))
    assert all("\n" not in text for text in said)
    assert said[0] == ("[1 s] task: 1.23 M parameters, 12 blocks of Block, 5,000 samples, batch 256; on Some CPU (cpu)")
    assert said[1] == "[2 s] study model-1: up to 24 of 96 configurations are tried"
    assert said[2] == "[3 s] reference (the job as it stands) starts: batch 256"
    assert said[3].startswith("[4 s] reference: 352 samples/s ± 1.0 %, 802 MiB: over the budget; about ")
    assert said[6] == "[7 s] trial 1: out of memory at 640 MiB: the watchdog ended it"
    assert said[8] == "[9 s] trial 2: 812 samples/s ± 1.0 %, 471 MiB · 2.31x the reference (best so far)"


def test_lines_say_what_comes_after_the_trials():
    progress = watched(SCRIPT, Clock())
    said = [
        line(event, progress).removeprefix("[0 s] ")
        for event in (
            events.Stopped("all 8 trials were measured"),
            events.Stopped(events.INTERRUPTED),
            events.TrialStarted(2, REFERENCE, 0),
            events.TrialStarted(2, REFERENCE, 1),
            events.TrialStarted(2, REFERENCE, 4),
        )
    ]
    assert said == [
        "no more trials: all 8 trials were measured; the best are measured again",
        "no more trials: interrupted",
        "trial 2 again, to choose the best, starts: batch 256",
        "trial 2 again, round 1, starts in a fresh process: batch 256",
        "trial 2 again, round 4, starts in a fresh process, since those before leave it unsure: batch 256",
    ]


def test_a_round_beyond_the_planned_ones_is_said_to_be_one_and_no_time_is_foretold():
    rounds = [events.FinalistEnded(2, SPLIT, number, measured(812.4, 471)) for number in (1, 2, 3)]
    progress = watched([*TABLE, events.Stopped("enough"), *rounds, events.TrialStarted(2, SPLIT, 4)], Clock())
    assert "finalists, round 3: unsure, another runs" in panel(progress, width=120)
    assert " left" not in panel(progress, width=120)


def test_a_dry_run_says_what_is_likely_and_the_most():
    found = Preview(
        FACTS, {}, (), {"bf16: not with tcmalloc": 6}, 96, 24, 11, Expected(low_s=100.0, high_s=200.0, most_s=2000.0)
    )
    said = printed(explain(found, SearchOptions(task="model.py")), 200)
    words = "likely 1.5 min to 3.5 min: about 11 of at most 24 trials, then the best again in fresh processes"
    assert f"{words}; at most 33 min" in said


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


FOUR = [ended(n, SPLIT, measured(500.0, 471)) for n in range(4)]
ROOMY = [*SCRIPT[:2], *FOUR]
MANY = [events.TaskRead(FACTS.model_copy(update={"host_memory_bytes": MIB})), SCRIPT[1], *FOUR]
"""With memory for one process at a time: the best and the reference run in turn."""


def test_time_left_is_that_of_the_trials_that_are_likely_and_of_the_finalists():
    """Of 24 trials 11 are likely, and 4 are done. Three of the best are compared, and the best and the reference run
    three times each, 3 s longer in a fresh interpreter."""
    assert watched(MANY, Clock()).left_s == 7 * 10 + 3 * 10 + 6 * 13


def test_where_both_can_live_at_once_two_rounds_by_turns_are_expected():
    """A start takes 13 s less what of that is timed, both at once half as long again; each takes some eight turns of a
    second."""
    assert watched(ROOMY, Clock()).left_s == 7 * 10 + 3 * 10 + 2 * (1.5 * 13 + 2 * 8)


def test_rounds_by_turns_take_what_the_last_one_took():
    clock = Clock()
    started = events.TrialStarted(1, SPLIT, finalist_round=1, by_turns=True)
    progress = watched([*ROOMY, events.Stopped("enough"), started], clock)
    clock.now = 30.0
    for number in (1, 0):
        progress.observe(again(number, 1))
    assert progress.left_s == 30.0


def test_predictions_are_time_that_is_left_until_they_are_made():
    """About twice what it took to read the task."""
    read = [events.TaskRead(MANY[0].facts, 5.0), SCRIPT[1], MANY[2]]
    whole = watched(read, Clock()).left_s
    made = [events.PredictionStarted(90), events.PredictionEnded(90, 90)]
    assert whole - watched([*read, *made], Clock()).left_s == 10.0


def test_after_the_reference_a_search_without_an_end_says_how_long_it_likely_takes():
    said = line(FOUR[0], watched(ROOMY[:3], Clock()))
    assert said.endswith(
        "; about 3 min 21 s more: some 10 trials of 10 s, then the best again by turns with the reference"
    )
    assert line(MANY[2], watched(MANY[:3], Clock())).endswith("then the best again in fresh processes")
    assert " more: " not in line(FOUR[1], watched(ROOMY[:4], Clock()))


def test_a_search_with_an_end_says_nothing_of_how_long_it_takes():
    assert " more: " not in line(FOUR[0], watched(ROOMY[:3], Clock(), max_time=600.0))


def test_time_left_counts_down_while_a_trial_runs():
    clock = Clock()
    progress = watched([*MANY, events.TrialStarted(4, SPLIT)], clock)
    before = progress.left_s
    clock.now += 4
    assert progress.left_s == before - 4


def again(number: int, round_: int, seconds: float = 20.0) -> events.FinalistEnded:
    outcome = measured(500.0, 471).model_copy(update={"seconds": seconds})
    return events.FinalistEnded(number, SPLIT, round_, outcome)


@pytest.mark.parametrize(
    ("done", "left_s"),
    [
        ([], 3 * 10 + 6 * 13),
        ([again(1, 0)], 2 * 10 + 6 * 13),
        ([again(1, 0), again(2, 0), again(3, 0)], 6 * 13),
        ([again(1, 0), again(2, 0), again(3, 0), again(1, 1)], 5 * 20),  # as long as the first one took
        ([again(1, 1), again(0, 1), again(1, 2), again(0, 2), again(1, 3)], 20),
        ([again(0, 1)], 2 * 20),  # the reference is the best: it alone is repeated
    ],
)
def test_finalists_have_a_countdown_of_their_own(done, left_s):
    assert watched([*MANY, events.Stopped("enough"), *done], Clock()).left_s == left_s


def test_the_panel_says_that_the_time_left_has_the_finalists_in_it():
    assert "4 of 24 · about 2 min 58 s left, finalists included" in panel(watched(MANY, Clock()), width=120)
    words = panel(watched([*MANY, events.Stopped("enough"), again(1, 1)], Clock()), width=120)
    assert "finalists, round 1 · about 1 min 40 s left" in words


def test_time_left_never_passes_the_time_asked_for():
    clock = Clock()
    progress = watched(MANY, clock, max_time=100.0)
    clock.now = 70.0
    assert progress.left_s == 30.0


def styles_of(progress: Progress, row: str) -> dict[str, str]:
    """Each piece of a row of the panel with its style, as a terminal with colours gets it."""
    console = Console(file=io.StringIO(), width=250, force_terminal=True, color_system="standard")
    for line_ in console.render_lines(draw(progress, 20)):
        pieces = [(segment.text.strip(), str(segment.style or "")) for segment in line_]
        if pieces[0][0] == row:
            return {text: style for text, style in pieces if text}
    raise AssertionError(f"no row {row}")


BF16 = REFERENCE.model_copy(update={"precision": SPLIT.precision})
TABLE: list[events.Event] = [
    *SCRIPT[:2],
    ended(0, REFERENCE, measured(352.0, 802)),
    ended(1, BF16, measured(700.0, 471), is_best=True),
    ended(2, SPLIT, measured(812.4, 471), is_best=True),
    ended(3, SPLIT.model_copy(update={"allocator": REFERENCE.allocator}), measured(500.0, 460)),
    ended(4, SPLIT.model_copy(update={"precision": REFERENCE.precision}), Crashed(message="Segmentation fault")),
]


def test_a_row_that_is_fine_is_plain():
    """Neither red, as if it had failed, nor dim: also one that was the best until another was better."""
    for row in ("trial 1", "trial 3"):
        styles = styles_of(watched(TABLE, Clock()), row)
        assert {style for text, style in styles.items() if text != row} == {""}, styles


def test_the_best_so_far_is_green_and_says_so():
    styles = styles_of(watched(TABLE, Clock()), "trial 2")
    assert styles["812"] == styles["best so far:"] == "bold green"
    assert styles[settings_words(SPLIT, FACTS)] == ""


def test_what_fell_when_it_was_measured_again_is_the_best_no_more():
    """The next best is, and what fell says why, in its own row."""
    fell = events.FinalistEnded(2, SPLIT, 1, measured(812.4, 600))
    progress = watched([*TABLE, events.Stopped("enough"), fell], Clock())
    assert styles_of(progress, "trial 1")["best so far:"] == "bold green"
    assert "best so far:" not in styles_of(progress, "trial 2")
    assert styles_of(progress, "trial 2 again")["over the budget:"] == "red"


@pytest.mark.parametrize(("row", "words"), [("reference", "over the budget:"), ("trial 4", "crashed:")])
def test_what_failed_or_is_over_the_budget_is_red_in_its_reason_alone(row, words):
    styles = styles_of(watched(TABLE, Clock()), row)
    assert [text for text, style in styles.items() if "red" in style] == [words]


def test_a_bar_that_is_red_says_why():
    assert "802 MiB of 512 MiB, reference: over the budget" in panel(watched(TABLE[:3], Clock()), width=120)


def test_a_task_that_is_read_for_long_is_said_to_be_with_its_seconds():
    clock = Clock()
    progress = watched([], clock)
    clock.now = 12.0
    assert "reading the task, 12 s" in panel(progress)
    assert still(progress) == "[12 s] still reading the task, 12 s"
    clock.now = 31.0
    assert "does it train where it is imported?" in still(progress)
    progress.options = progress.options.model_copy(update={"command": ("python", "train.py")})
    assert still(progress) == "[31 s] still running model.py up to its third optimizer step, 31 s"


def test_predictions_are_counted_from_where_they_began():
    clock = Clock()
    progress = watched(SCRIPT[:4], clock)
    clock.now = 10.0
    progress.observe(events.PredictionStarted(36))
    clock.now = 18.0
    assert "predicting the memory and work of 36 configurations, 8 s" in panel(progress)
    assert still(progress) == "[18 s] still predicting the memory and work of 36 configurations, 8 s"
    progress.observe(events.PredictionEnded(36, 36))
    assert "predicting" not in panel(progress)


def test_a_trial_is_said_to_run_still_once_it_has_run_for_long():
    clock = Clock()
    progress = watched(SCRIPT, clock)
    clock.now = 29.0
    assert still(progress) is None
    clock.now = 30.0
    assert still(progress) == "[30 s] trial 3 still runs, 30 s"


@pytest.mark.parametrize(
    ("script", "is_ended", "words"),
    [
        ([], True, "Stopping: the task was still being read"),
        ([*SCRIPT[:4], events.PredictionStarted(36)], True, "Stopping the prediction"),
        (SCRIPT, False, "Finishing the running trials"),
    ],
)
def test_ctrl_c_ends_what_is_not_worth_waiting_for_and_says_so(script, is_ended, words, capfd):
    with watching(SearchOptions(task="model.py"), Console(file=io.StringIO())) as display:
        for event in script:
            display.observe(event)
        assert display.interrupted() is is_ended
    assert capfd.readouterr().err.startswith(words)


def test_an_outcome_on_one_line_has_the_innermost_frame():
    message = 'ended while training, at (innermost first):\n  File "model.py", line 3 in compute_loss\n  File "b.py"'
    words = 'timed out after 30 s: ended while training, at File "model.py", line 3 in compute_loss'
    assert outcome_words(TimedOut(deadline_s=30, message=message), BUDGET) == words


def test_rows_say_what_tells_them_apart():
    """Both have a batch of 256; the one that is bf16 besides says so, and no more."""
    other = REFERENCE.model_copy(update={"precision": SPLIT.precision})
    script = [*SCRIPT[:2], ended(0, REFERENCE, measured(500.0, 471)), ended(1, other, measured(600.0, 471))]
    (row,) = [line for line in panel(watched(script, Clock())).splitlines() if line.startswith("trial 1")]
    assert row.split()[-1] == "bf16"
    assert "batch" not in row


def test_a_gain_that_is_not_proven_is_none_in_the_headline():
    evidence = [
        Evidence(samples_per_s=Speed(value=v, low=0.5 * v, high=1.5 * v), peak={"process": MIB}) for v in (2.0, 1.0)
    ]
    plan = Plan(
        settings=Settings(),
        measured=evidence[0],
        reference=evidence[1],
        gain=Gain(speed=2.0, low=0.9, high=4.4, rounds=6, memory=1.0),
    )
    said = printed(summary(plan, Path("plan.yaml")), 100)
    assert "2.00x the reference's speed (no gain in speed is proven)" in said
    assert "2.00x the speed (95 %: 0.90x to 4.40x; 6 rounds in turn), 1.00x the memory" in said


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
    with watching(SearchOptions(task="model.py", budget=BUDGET.limit), console) as display:
        for event in SCRIPT:
            display.observe(event)
    said = console.file.getvalue()
    assert said.startswith("[0 s] reading the task: model.py\n")
    assert len(said.splitlines()) == 1 + len(SCRIPT)
    assert "\x1b" not in said
