"""``autotune profile``: through the command line, and what it says of a profile."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from answering import Answering
from command_line import Ended, autotune, start
from screen import printed
from tags import Tags

from autotune.commands.profile import profile_task
from autotune.errors import NothingFits, PlanError, TaskError
from autotune.measure.profiling.allocations import OUTSIDE
from autotune.measure.profiling.types import Area, ModuleRow, PeakMoment, Profile, Timeline
from autotune.plan import Peak, Plan, TaskRef
from autotune.report.charts.memory import HEIGHT, WIDTH, chart
from autotune.report.folding import lines
from autotune.report.page import page
from autotune.report.profile import as_json, cells, changes, columns, explain, line, notes
from autotune.results import Change, Profiling, WhatToProfile
from autotune.techniques import TECHNIQUES, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.testing.facts import BARE
from autotune.units import MIB
from autotune.workers import STOPPED, Crashed, Inspected, NonFinite, OutOfMemory, Profiled, TimedOut

SETTINGS = Settings(batch=Batch(micro=8))


LATE = """\
import time
import healthy
from healthy import batch_size, build_dataset, build_model
seen = []
def compute_loss(model, batch):
    seen.append(1)
    if len(seen) > 6: raise ValueError('late')
    return healthy.compute_loss(model, batch)
"""
"""It gets through the inspection and the first steps."""


@pytest.fixture
def run(here: Callable[..., Ended], folder: Path) -> Callable[..., Ended]:
    return lambda *options, task="healthy.py": here("profile", task, "--device", "cpu", *options, cwd=folder)


# The command


@pytest.mark.slow
def test_the_table_the_page_and_the_trace(folder):
    """One run of everything: rows in forward order, what would help, the peak in words; both files whole."""
    options = ("--device", "cpu", "--html", "out/page.html", "--trace", "out/trace.json")
    ended = autotune("profile", "healthy.py", *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[:2] for row in rows[3:7]] == [
        ["Sequential", "Sequential"],
        ["0", "Linear"],
        ["1", "Tanh"],
        ["2", "Linear"],
    ]
    assert "The peak of the tensors, " in ended.stdout
    assert "With one technique changed" in ended.stdout
    assert "with bf16: peak" in ended.stderr or "bf16" not in ended.stderr
    assert "USDT" not in ended.stdout + ended.stderr
    assert "\x1b" not in ended.stdout
    assert ended.left_behind == []
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["page.html", "trace.json"]
    trace = json.loads((folder / "out" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"0", "1", "2", "backward: 0", "forward", "backward", "optimizer", "[memory]"} <= names
    assert len([name for name in names if str(name).startswith("ProfilerStep#")]) == 2
    assert "Sequential" in (folder / "out" / "page.html").read_text()


@pytest.mark.medium
def test_json_is_one_document_with_the_rows(folder, run):
    ended = run("--json", "--alone", "--batch", "4")
    document = json.loads(ended.stdout)
    assert [row["name"] for row in document["modules"]] == ["", "0", "1", "2", OUTSIDE]
    assert document["settings"] == {"batch": {"micro": 4}}
    assert document["modules"][2]["kept_bytes"] == 4 * 8 * 4  # tanh's output
    assert document["modules"][0]["num_parameters"] == 4 * 8 + 8 + 8 + 1
    assert sum(document["peak"]["by_kind"].values()) == document["peak"]["num_bytes"]
    assert document["changes"] == []


@pytest.mark.medium
def test_a_plan_is_in_force(folder, run):
    (folder / "plan.yaml").write_text(
        "schema: autotune/plan@1\nsettings:\n  batch: {micro: 4, accumulate: 2}\n  checkpointing: {kind: blocks}\n"
    )
    ended = run("--plan", "plan.yaml", "--json", "--alone")
    document = json.loads(ended.stdout)
    assert document["settings"]["checkpointing"] == {"kind": "blocks"}
    assert (document["micro_batch"], document["accumulate"]) == (4, 2)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("task", "options", "code", "words"),
    [
        ("no_model.py", (), 2, "no_model.py: no such file. `autotune init no_model.py` writes a starting file."),
        ("healthy.py", ("--plan", "no.yaml"), 2, "no.yaml"),
        ("healthy.py", ("--batch", "65"), 2, "--batch 65: the dataset has 64 samples. Ask for at most that."),
        ("healthy.py", ("--batch", "0"), 2, "Invalid value for '--batch'"),
        ("healthy.py", ("--depth", "-1"), 2, "Invalid value for '--depth'"),
        ("healthy.py", ("--html", "healthy.py"), 2, "that is the task itself. Choose another path with --html."),
        ("healthy.py", ("--html", "."), 2, "a file was expected, but it is a folder. Choose another path with --html."),
        ("healthy.py", ("--html", "a", "--trace", "./a"), 2, "that is the other output itself"),
        ("healthy.py", ("--trace", "healthy.py/t.json"), 2, "cannot be written"),
    ],
)
def test_bad_input_is_said_and_nothing_is_left(folder, task, options, code, words, run):
    before = sorted(folder.iterdir())
    ended = run(*options, task=task)
    assert ended.returncode == code
    assert words in " ".join(ended.stderr.split())
    assert "bug in autotune" not in ended.stderr
    assert ended.stdout == ""
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_a_job_that_the_device_does_not_hold_exits_with_3(folder, run):
    (folder / "huge.py").write_text(
        "import torch\nfrom healthy import *\n\n\ndef build_model():\n    return torch.nn.Linear(2**24, 2**24)\n"
    )
    ended = run("--json", task="huge.py")
    assert (ended.returncode, json.loads(ended.stdout)["exit_code"]) == (3, 3)
    assert "since it does not fit on this device: out of memory" in ended.stderr


@pytest.mark.medium
def test_a_failure_leaves_no_trace_file(folder, run):
    (folder / "late.py").write_text(LATE)
    (folder / "t.json").write_text("mine")
    ended = run("--trace", "t.json", task="late.py")
    assert (ended.returncode, (folder / "t.json").read_text()) == (2, "mine")
    assert "ValueError: late" in ended.stderr
    assert not list(folder.glob(".autotune-*"))


@pytest.mark.slow
def test_an_interrupted_step_leaves_nothing(folder):
    (folder / "slow.py").write_text(LATE.replace("raise ValueError('late')", "time.sleep(600)"))
    running = start("profile", "slow.py", "--device", "cpu", "--trace", "t.json", cwd=folder)
    running.read_until("profiles: batch 8")
    running.process.send_signal(signal.SIGTERM)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "", []), ended.stderr
    assert "Interrupted before the step was measured" in ended.stderr
    assert not (folder / "t.json").exists()
    assert not list(folder.glob(".autotune-*"))


@pytest.mark.slow
def test_what_was_measured_before_an_interruption_is_printed(folder):
    """The first techniques are measured; then one hangs."""
    (folder / "hangs.py").write_text(
        "import pathlib, time, healthy\nfrom healthy import *\n"
        "def compute_loss(model, batch):\n"
        f"    if pathlib.Path({str(folder / 'hang')!r}).exists():\n        time.sleep(600)\n"
        "    return healthy.compute_loss(model, batch)\n"
    )
    running = start("profile", "hangs.py", "--device", "cpu", "--json", "--html", "page.html", cwd=folder)
    running.read_until("profiles: batch 8")
    running.read_until("with ")
    (folder / "hang").touch()
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.left_behind) == (130, []), ended.stderr
    document = json.loads(ended.stdout)
    measured, left_out = document["changes"], document["not_measured"]
    assert document["exit_code"] == 130
    assert document["modules"][0]["forward_s"] > 0
    assert {one["outcome"] for one in measured} == {"profiled"}
    assert len({json.dumps([one["technique"], one["setting"]]) for one in (*measured, *left_out)}) > len(measured) > 0
    assert ": interrupted" in (folder / "page.html").read_text()


# What is tried


def test_techniques_that_touch_no_step_are_not_tried():
    in_step = {name for name, technique in TECHNIQUES.items() if technique.is_in_step()}
    assert {"batch", "data_loading", "allocator"} == set(TECHNIQUES) - in_step


class Answers(Answering):
    """Facts for the inspection, then outcomes in order; the last again and again."""

    def __init__(self, facts, *outcomes):
        self.requests = []
        self._answers = [Inspected(facts=facts), *outcomes]

    def answer(self, request):
        self.requests.append(request)
        return self._answers[min(len(self.requests), len(self._answers)) - 1]


def ask(executor, **changes):
    return profile_task(WhatToProfile("healthy.py", "cpu", **changes), executor, lambda event: None)


def test_each_choice_in_the_step_is_asked_for_once_and_the_job_alone_is_timed():
    facts = BARE.model_copy(update={"num_blocks": 2, "shapes_vary": False, "optimizer_implementations": ("foreach",)})
    executor = Answers(facts, Profiled(profile=profile_of(blocks([MIB]))))
    found = ask(executor, trace=Path("/t.json"))
    asked = [change.technique for change in found.changes]
    assert asked == [
        *Layers.choices(facts)[1:], *Checkpointing.choices(facts)[1:], Offload(kind="activations"),
        Optimizer(kind="foreach"),
    ]  # fmt: skip
    _, base, *others = executor.requests
    assert base.plan.settings == SETTINGS
    assert (base.options.trace, base.options.num_timed_steps) == ("/t.json", 5)
    assert {(one.options.trace, one.options.num_timed_steps) for one in others} == {(None, 0)}
    assert [one.plan.settings.checkpointing for one in others][-3:] == [
        *Checkpointing.choices(facts)[2:],
        Checkpointing(),
        Checkpointing(),
    ]


def test_what_an_interruption_left_out_is_named():
    facts = BARE.model_copy(update={"num_blocks": 1})
    found = ask(Answers(facts, Profiled(profile=profile_of(blocks([MIB]))), Crashed(message="SIGSEGV"), STOPPED))
    assert [change.outcome.kind for change in found.changes] == ["crashed"]
    assert found.not_measured == (
        *Layers.choices(facts)[2:],
        Checkpointing(kind="blocks"),
        Offload(kind="activations"),
    )
    words = "memory-saving layers with 8-bit derivatives, checkpoint all 1 blocks, activations on disk: interrupted"
    assert list(changes(found))[-1] == ("not measured", words)


def test_a_technique_that_fails_is_a_row_that_says_so():
    facts = BARE.model_copy(update={"num_blocks": 1})
    base, crashed = Profiled(profile=profile_of(blocks([MIB]))), Crashed(message="Segmentation fault (SIGSEGV)")
    found = ask(Answers(facts, base, crashed))
    assert {change.profile for change in found.changes} == {None}
    assert ("checkpoint all 1 blocks", "crashed: Segmentation fault (SIGSEGV)") in list(changes(found))


def test_a_step_that_fits_nowhere_is_no_fault_of_the_users():
    with pytest.raises(NothingFits, match=r"healthy.py: the step does not fit on this device: out of memory at 1 MiB"):
        ask(Answers(BARE, OutOfMemory(peak_bytes=MIB, message="no more")))


@pytest.mark.parametrize(
    "outcome",
    [NonFinite(step=1, message="the loss is not finite"), Crashed(message="SIGSEGV"), TimedOut(deadline_s=9)],
    ids=lambda outcome: outcome.kind,
)
def test_what_ends_the_step_otherwise_is_a_task_error(outcome):
    with pytest.raises(TaskError, match=r"healthy.py: the step cannot be profiled: "):
        ask(Answers(BARE, outcome))


def test_a_plan_that_cannot_be_had_here_is_said_before_anything_runs():
    executor = Answers(BARE)
    with pytest.raises(PlanError, match=r"settings.precision: cannot be had here: bare CPU has no bfloat16 arithmetic"):
        ask(executor, plan=Plan(settings=Settings(precision=Precision(kind="bf16"))))
    assert len(executor.requests) == 1


def test_another_models_plan_is_refused():
    task = TaskRef(source="other.py", fingerprint="sha256:" + 64 * "1")
    with pytest.raises(
        PlanError, match=r"it was found for other.py .*, but healthy.py is another task .*or the batch shapes differ"
    ):
        ask(Answers(BARE), plan=Plan(settings=Settings(), task=task))


# What is said


def row(name, kept=0, type="Linear", **changes):
    fields = {"num_parameters": 0, "peak_bytes": kept, "forward_s": 0.001, "backward_s": 0.002}
    return ModuleRow(name=name, type=type, kept_bytes=kept, **{**fields, **changes})


def blocks(kept):
    """A model of a stem and blocks that keep so many bytes each."""
    rows = [row("", sum(kept), "Net"), row("stem"), row("blocks", sum(kept), "ModuleList")]
    for number, each in enumerate(kept):
        rows += [row(f"blocks.{number}", each, "Block"), row(f"blocks.{number}.inner", each // 2)]
    return (*rows, row(OUTSIDE, type=""))


def profile_of(rows, peak=12 * MIB, **changes):
    live = ((8 * MIB, 8 * MIB, 8 * MIB), (0, peak - 8 * MIB, MIB))
    names = (("parameter", "parameter"), ("block", rows[1].name))
    fields = {
        "modules": rows,
        "peak": PeakMoment(
            num_bytes=peak, phase="backward", module="stem", position=0.25, by_kind={"activation": peak}
        ),
        "first_step_peak_bytes": peak,
        "process": Peak(process=400 * MIB),
        "micro_batch": 8,
        "accumulate": 1,
        "timeline": Timeline(
            moments=(0, 1, 2),
            num_moments=3,
            spans=(("forward", 0), ("backward", 1)),
            areas=tuple(Area(name=n, kind=k, live_bytes=b) for (k, n), b in zip(names, live, strict=True)),
        ),
    }
    return Profile(**{**fields, **changes})


def profiling(base, *changes):
    return Profiling("model.py", SETTINGS, BARE.model_copy(update={"num_blocks": 3}), base, changes)


def test_alike_blocks_are_one_line_with_their_sums():
    shown = lines(blocks([MIB] * 12))
    assert [(one.label, one.depth) for one in shown] == [
        ("Net", 0), ("stem", 1), ("blocks.0-11 (12x)", 1), ("inner", 2), (OUTSIDE, 0)
    ]  # fmt: skip
    assert shown[2].sum("kept_bytes") == 12 * MIB


def test_blocks_that_differ_are_lines_of_their_own():
    shown = lines(blocks([MIB, MIB, 2 * MIB, MIB]), depth=2)
    assert [one.label for one in shown if one.type == "Block"] == ["0-1 (2x)", "2", "3"]


@pytest.mark.parametrize(("depth", "deepest"), [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_depth_cuts_the_table(depth, deepest):
    shown = lines(blocks([MIB, 2 * MIB]), depth)
    assert max(one.depth for one in shown) == deepest


def test_a_deep_model_is_cut_to_a_screen():
    rows = [row("", 1, "Net"), *(row(".".join(["a"] * depth + [str(n)]), n) for depth in range(3) for n in range(20))]
    assert len(lines((*rows, row("a"), row("a.a"), row(OUTSIDE)))) <= 26


def test_the_change_that_frees_most_is_named_with_its_bytes():
    halved = Change(Precision(kind="bf16"), Profiled(profile=profile_of(blocks([2 * MIB] * 3), peak=10 * MIB)))
    quartered = Change(Checkpointing(kind="blocks"), Profiled(profile=profile_of(blocks([MIB] * 3), peak=9 * MIB)))
    found = profiling(profile_of(blocks([4 * MIB] * 3)), halved, quartered)
    shown = lines(found.base.modules)[2]
    assert cells(shown, found)[-1] == "9.0 MiB by checkpoint all 3 blocks"
    assert cells(shown, found)[5:7] == ("3.0 ms", "6.0 ms")
    assert as_json(found)["modules"][3]["would_free_most"] == {
        "technique": "checkpointing", "setting": {"kind": "blocks"}, "freed_bytes": 3 * MIB
    }  # fmt: skip


def test_what_pruning_frees_is_said_in_bytes_and_parameters_and_what_allows_it():
    """12 MiB become 9; the first row is the whole model."""
    rows = blocks([MIB])
    smaller = (rows[0].model_copy(update={"num_parameters": rows[0].num_parameters - 10}), *rows[1:])
    change = Change(Pruning(kind="structured"), Profiled(profile=profile_of(smaller, peak=9 * MIB)))
    ((what, said),) = changes(profiling(profile_of(rows), change))
    assert what == "prune 25% of widths"
    assert said.startswith("12 MiB → 9.0 MiB (-25%)")
    before, after = rows[0].num_parameters, smaller[0].num_parameters
    assert said.endswith(f"; {before:,} → {after:,} parameters; lossy, only with --max-quality-drop")


def test_a_change_that_ran_out_of_memory_is_said_so():
    change = Change(Precision(kind="bf16"), OutOfMemory(peak_bytes=MIB, message="no more"))
    assert line(change) == "with bf16: out of memory at 1.0 MiB: no more"
    found = profiling(profile_of(blocks([MIB])), change)
    assert cells(lines(found.base.modules)[0], found)[-1] == ""
    assert as_json(found)["changes"][0]["failure"] == "out of memory at 1.0 MiB: no more"
    assert "what would free most of it" not in columns(profiling(profile_of(blocks([MIB]))))


def test_the_first_steps_higher_peak_and_heavy_hooks_are_notes():
    base = profile_of(blocks([MIB]), first_step_peak_bytes=20 * MIB, step_s=0.010, timed_step_s=0.020)
    said = " ".join(notes(base))
    assert "the process was charged 400 MiB" in said
    assert "the first step's peak is higher: 20 MiB" in said
    assert "a step takes 10.0 ms, and 20.0 ms with the hooks" in said
    assert len(list(notes(profile_of(blocks([MIB]))))) == 1


# The page


def test_the_page_is_whole_names_the_modules_and_fetches_nothing():
    text = page(profiling(profile_of(blocks([MIB, 2 * MIB]))))
    tags = Tags(text).seen
    assert {"svg", "path", "table", "style"} <= {tag for tag, _ in tags}
    assert not {"script", "link", "img"} & {tag for tag, _ in tags}
    assert re.findall(r"https?:|@import|url\(", text) == []
    assert "stem" in text
    assert "prefers-color-scheme: dark" in text


def test_names_of_modules_are_escaped():
    rows = (row("", MIB, "Net"), row("<script>alert(1)</script>", MIB, 'A"<b>'), row(OUTSIDE))
    base = profile_of(rows, peak=9 * MIB)
    text = page(profiling(base.model_copy(update={"peak": base.peak.model_copy(update={"module": "<i>"})})))
    assert "script" not in {tag for tag, _ in Tags(text).seen}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<i>" not in text.replace('<i style="background', "")


def test_the_chart_stacks_areas_and_marks_the_peak():
    """Two areas of 8 and 4 MiB at the peak, 12 % of headroom, in the second of two equal phases."""
    drawn = chart(profile_of(blocks([MIB]), phases_s={"forward": 0.5, "backward": 0.5}), peak_at=1)
    assert drawn.peak_y == pytest.approx(HEIGHT * (1 - 1 / 1.12))
    assert drawn.peak_x == WIDTH / 2
    assert [(band.x, band.width) for band in drawn.bands] == [(0, WIDTH / 2), (WIDTH / 2, WIDTH / 2)]
    assert [shape.peak_bytes for shape in drawn.shapes] == [8 * MIB, 4 * MIB]
    assert [num_bytes / MIB for _, num_bytes in drawn.ticks] == [0, 5, 10]


# The terminal


def test_what_a_terminal_would_act_on_in_a_name_is_escaped():
    rows = (row("", 2, "Net"), row("a\n\x1b[31m", MIB, "B\r"), row(OUTSIDE, type=""))
    found = profiling(profile_of(rows))
    assert cells(lines(rows)[1], found)[:2] == (r"  a\n\x1b[31m", r"B\r")


@pytest.mark.slow
def test_nobody_reads_its_progress(folder):
    running = start("profile", "healthy.py", "--device", "cpu", "--alone", "--json", cwd=folder)
    running.process.stderr.close()
    document = json.loads(running.process.stdout.read())
    assert document["modules"][0]["name"] == ""
    assert running.process.wait(600) == 0


def test_a_bad_option_is_named_in_the_document_too(folder, run):
    ended = run("--json", "--batch", "0")
    assert "Invalid value for '--batch'" in json.loads(ended.stdout)["error"]
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("width", "missing"),
    [
        (60, "type, parameters, what would free most of it"),
        (80, "what would free most of it"),
        (120, "type, parameters"),
        (200, None),
    ],
)
def test_a_narrow_terminal_cuts_names_and_leaves_out_columns_but_cuts_no_figure(width, missing):
    name = "a_module_with_a_name_that_is_longer_than_most_3"
    rows = (row("", 1234 * MIB, "Net", num_parameters=123_456_789), row(name, 345 * MIB), row(OUTSIDE, MIB, type=""))
    change = Change(Layers(kind="rounding"), Profiled(profile=profile_of((row(""), row(name), row(OUTSIDE)))))
    found = profiling(profile_of(rows), change)
    said = printed(explain(found), width).splitlines()
    assert max(map(len, said)) <= width
    heading, *shown = said[2:6]
    for line_, each in zip(shown, lines(rows), strict=True):
        figures = dict(zip(columns(found)[1:], cells(each, found)[1:], strict=True))
        assert [title for title, figure in figures.items() if title in heading and figure not in line_] == []
    assert re.match(r"  a.*3  ", shown[1])
    assert [title for title in columns(found) if title not in heading] == (missing.split(", ") if missing else [])
    assert (f"no room for: {missing}" in " ".join(said)) == bool(missing)
