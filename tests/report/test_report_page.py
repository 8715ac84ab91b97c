"""``autotune report``: what is stored with a study, what the page says of it, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from command_line import Ended
from search_tables import BF16, BOTH, MIB, REFERENCE, SMALL, TCMALLOC, every, options, peak, row, run_search
from tags import Tags

from autotune.estimates import Prediction
from autotune.measure.measurement import CardState, Quality
from autotune.report.charts import scatter
from autotune.report.charts.axis import Axis
from autotune.report.page import study_page
from autotune.report.study import bought
from autotune.searches.store.forecast import Forecast, Range
from autotune.searches.store.read_study import Stored, read_study
from autotune.searches.store.study import Study
from autotune.searches.store.tried import Tried
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.workers import Failed, Measured, OutOfMemory

FOLDER = ".autotune"
TASK = "a<b>&c.py"
"""Names are anybody's."""
STUDY = "a_b__c.db"


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[None]:
    with contextlib.chdir(folder):
        Path("space.yaml").write_text(SMALL)
        yield


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study of a search of four configurations, with an ablation: tcmalloc alone takes 300 MiB, bf16
    alone runs out of memory where it runs as the winner's counterpart."""
    folder = tmp_path_factory.mktemp("searched")
    with elsewhere(folder):
        refused = OutOfMemory(peak_bytes=900 * MIB, message="<i>")
        rows = [row(TCMALLOC, peak_bytes=(300 * MIB,)), row(BF16, outcome=refused)]
        run_search(every(task=TASK, ablate=True, budget=700 * MIB), rows=rows)
    return folder


@pytest.fixture(scope="module")
def stored(searched: Path) -> Stored:
    return read_study(f"sqlite:///{searched}/{FOLDER}/{STUDY}")


@pytest.fixture(scope="module")
def text(stored: Stored) -> str:
    return study_page(stored)


@pytest.fixture
def folder(searched: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(searched, tmp_path / "copy"))


def tried(number: int, samples_per_s: float, mib: float, stored: Stored, settings: Settings = BOTH) -> Tried:
    """A trial with these figures, under the study's budget."""
    outcome = row(settings, samples_per_s=(samples_per_s,), peak_bytes=(round(mib * MIB),)).outcome_at(0)
    return Tried(number, settings, outcome, judge(outcome, stored.record.budget, 2**40))


def cells(text: str, start: str) -> list[str]:
    """The words of one table row."""
    found = re.search(rf"<tr[^>]*>\s*<td>{re.escape(start)}</td>.*?</tr>", text, re.DOTALL)
    assert found is not None, start
    return [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", found[0], re.DOTALL)]


# What a study keeps


def test_a_forecast_is_the_median_with_the_interval_of_a_normal_logarithm():
    found = Range.of(math.log(100.0), 0.1**2)
    assert found is not None
    assert found.value == pytest.approx(100.0)
    assert (found.low, found.high) == pytest.approx((100 * math.exp(-0.196), 100 * math.exp(0.196)))


def test_what_is_hardly_known_is_no_forecast():
    assert Range.of(0.0, 1.1) is None


@pytest.mark.medium
def test_each_trial_after_the_reference_keeps_what_was_expected_of_it(tmp_path):
    """Predicted peaks are right here, so that each is expected as it is measured."""
    with elsewhere(tmp_path):
        predict = lambda settings: Prediction(peak_bytes=peak(settings), flops_per_sample=1e9, bytes_per_sample=1e6)  # noqa: E731
        run_search(options(), predict=predict)
        found = read_study(f"sqlite:///{FOLDER}/model.db")
    assert found.forecasts.keys() == {one.number for one in found.tried} - {0}
    for one in found.tried[1:]:
        expected = found.forecasts[one.number].peak_bytes
        assert expected is not None
        assert expected.low < peak(one.settings) < expected.high
    ratios = [bar.value for bar in scatter.misses(found, "peak")]
    assert ratios == pytest.approx([1.0] * (len(found.tried) - 1), rel=0.05)


@pytest.mark.medium
def test_a_study_keeps_the_plan_that_its_search_wrote(searched, stored):
    assert stored.plan is not None
    assert stored.plan.to_yaml() == (searched / "plan.yaml").read_text()
    assert stored.winner is not None
    assert stored.winner.settings == BOTH


def test_a_budget_in_percent_is_in_bytes(tmp_path):
    with elsewhere(tmp_path):
        run_search(options(budget="90%"))
        found = read_study(f"sqlite:///{FOLDER}/model.db")
    assert found.record.budget.limit == int(0.9 * peak(REFERENCE)) // MIB * MIB


# The front


def test_the_front_has_what_nothing_beats_in_both(stored):
    """By (samples/s, MiB): B is as large as A and slower, D is slower than C with more memory, E is over the budget."""
    figures = {1: (100, 300), 2: (90, 300), 3: (120, 400), 4: (110, 500), 5: (150, 800), 6: (100, 310)}
    rows = [tried(number, *row, stored) for number, row in figures.items()]
    assert [row.number for row in scatter.front(rows)] == [1, 3, 5]


def test_a_trial_that_strays_is_on_no_front(stored):
    good = tried(1, 100, 300, stored)
    measured = good.outcome.measurement
    strays = measured.model_copy(update={"parity": measured.parity.model_copy(update={"strayed_at": 3})})
    outcome = Measured(measurement=strays.model_copy(update={"samples_per_s": measured.samples_per_s}))
    bad = Tried(2, BOTH, outcome, judge(outcome, stored.record.budget, 2**40))
    assert scatter.front([bad, good]) == [good]


def test_the_studys_front_is_tcmalloc_alone_then_both(stored, text):
    """101.9 samples/s at 300 MiB, 166.3 at 496 MiB; the reference has 97.0 at 840 MiB; bf16 alone ran out of memory."""
    drawn = scatter.tradeoff(stored)
    assert drawn is not None
    by_settings = {one.number: one.settings for one in stored.tried}
    assert {by_settings[dot.number].canonical() for dot in drawn.dots if dot.is_on_front} == {
        TCMALLOC.canonical(),
        BOTH.canonical(),
    }
    kinds = {by_settings[dot.number].canonical(): dot.kind for dot in drawn.dots}
    assert kinds == {
        REFERENCE.canonical(): "over",
        BF16.canonical(): "out of memory",
        TCMALLOC.canonical(): "fits",
        BOTH.canonical(): "fits",
    }
    assert f'd="{drawn.front}"' in text


def test_places_are_proportional():
    """From 300 to 500 with a tenth of the range on either side: 280 to 520; 400 is in the middle."""
    axis = Axis.of([300.0, 500.0])
    assert (axis.low, axis.high) == (280.0, 520.0)
    assert axis.place(400.0, 640) == 320
    assert axis.ticks == (300.0, 350.0, 400.0, 450.0, 500.0)


def test_ticks_of_bytes_are_round_in_their_unit():
    ticks = Axis.of([300 * MIB, 840 * MIB], is_bytes=True).ticks
    assert [tick / MIB for tick in ticks] == [400, 600, 800]


def test_no_label_covers_a_mark_or_another_label(stored):
    """Fifty trials along one front, close together."""
    rows = tuple(tried(number, 100 + number, 300 + 2 * number, stored) for number in range(1, 51))
    drawn = scatter.tradeoff(replace(stored, tried=rows, plan=None))
    assert drawn is not None
    labelled = [dot for dot in drawn.dots if dot.label]
    assert labelled
    boxes = [scatter._box(dot) for dot in labelled]
    assert not any(scatter._meet(one, other) for at, one in enumerate(boxes) for other in boxes[:at])
    marks = [(dot.x - 5, dot.y - 5, dot.x + 5, dot.y + 5) for dot in drawn.dots]
    assert not any(scatter._meet(box, mark) for box in boxes for mark in marks)


# What choices bought


def test_what_a_choice_bought_is_the_plan_over_the_plan_without_it(stored, text):
    """Both 166.3 samples/s at 497 MiB; without bf16, tcmalloc alone, 101.9 at 300 MiB: 1.63 times as fast. Without
    tcmalloc, bf16 alone, which does not run."""
    precision, allocator = bought(stored)
    assert precision.technique == "precision"
    assert precision.speed == "1.63x (95 %: 1.63x to 1.63x; 2 rounds)"
    assert precision.peak == "497 MiB, without it 300 MiB"
    assert precision.said == "faster with it"
    assert allocator.said == "without it: out of memory at 900 MiB: <i>"
    assert cells(text, "precision")[2] == precision.speed


def test_without_an_ablation_the_page_says_how_to_have_one(stored):
    plain = replace(stored, evidence={})
    assert bought(plain) == []
    assert "--resume --ablate" in study_page(plain)


# The page


def test_every_trial_is_in_the_page_in_order_with_its_figures_and_what_came_of_it(stored, text):
    assert re.findall(r'<tr id="trial-(\d+)"', text) == ["0", "1", "2", "3"]
    assert set(re.findall(r'<a href="#trial-(\d+)"', text)) == {"0", "1", "2", "3"}
    assert cells(text, "reference")[1:4] == ["97.0 ± 1.0 %", "1.00x", "840 MiB"]
    assert cells(text, "reference")[-1].startswith("over the budget by 166 MiB")
    number = next(one.number for one in stored.tried if one.settings == BOTH)
    assert cells(text, f"trial {number}")[1:4] == ["166 ± 1.0 %", "1.72x", "496 MiB"]
    assert cells(text, f"trial {number}")[-1] == "the plan"


def test_the_page_is_whole_and_fetches_nothing(text):
    tags = Tags(text).seen
    assert {"svg", "path", "table", "style"} <= {tag for tag, _ in tags}
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    assert re.findall(r"http|@import|url\(|src=", text) == []
    assert "prefers-color-scheme: dark" in text


def test_names_are_escaped(text):
    """The task's and a message's."""
    assert "a&lt;b&gt;&amp;c.py" in text
    assert "&lt;i&gt;" in text
    assert not {"b", "i"} & {tag for tag, _ in Tags(text).seen}


def test_a_search_that_has_not_ended_has_a_page(stored):
    text = study_page(replace(stored, plan=None, evidence={}))
    assert "the search has not ended. The fastest so far: trial " in text
    assert "166 samples/s ± 1.0 %, 496 MiB" in text
    assert "What each choice bought" not in text
    assert len(re.findall(r'<tr id="trial-', text)) == 4


def test_a_study_without_a_measurement_has_its_trials(stored):
    failed = Failed(message="RuntimeError: no", traceback="")
    rows = (Tried(1, BOTH, failed, judge(failed, stored.record.budget, 2**40)),)
    text = study_page(replace(stored, tried=rows, plan=None, evidence={}, forecasts={}))
    Tags(text)
    assert "RuntimeError: no" in text
    assert "none of 1 trial so far can be used" in text
    assert "<svg" not in text


def test_quality_is_a_column_where_it_was_measured(stored, text):
    assert ">quality<" not in text
    one = stored.tried[0]
    judged = one.outcome.measurement.model_copy(update={"quality": Quality(value=0.9312, error=0.004)})
    rows = (replace(one, outcome=one.outcome.model_copy(update={"measurement": judged})), *stored.tried[1:])
    assert "0.931 ± 0.004" in cells(study_page(replace(stored, tried=rows)), "reference")


def test_what_a_gpu_was_like_is_a_column_where_its_driver_told(stored, text):
    assert ">GPU<" not in text
    one = stored.tried[0]
    card = CardState(
        clock_mhz=1305, least_clock_mhz=1290, lowered=("for heat",), power_w=310.4, temperature_c=71, others=0.0
    )
    timed = one.outcome.measurement.model_copy(update={"card": card})
    rows = (replace(one, outcome=one.outcome.model_copy(update={"measurement": timed})), *stored.tried[1:])
    said = "1,305 MHz (at least 1,290), lowered for heat, 310 W, 71 °C"
    assert said in cells(study_page(replace(stored, tried=rows)), "reference")


def test_predictions_are_held_against_what_was_measured(stored):
    """Predicted 160 samples/s of 166.3: 4 % more; within an interval from 150 to 170."""
    number = next(one.number for one in stored.tried if one.settings == BOTH)
    forecast = Forecast(samples_per_s=Range(low=150, value=160, high=170), peak_bytes=None)
    text = study_page(replace(stored, forecasts={number: forecast}))
    assert "4 % off at the median; 1 of 1 within their 95 % intervals" in text
    assert cells(text, f"trial {number}")[3] == "160"


def test_three_hundred_trials_make_a_page_of_less_than_a_megabyte(stored):
    rows = tuple(tried(number, 100 + number % 37, 300 + number % 53, stored) for number in range(300))
    forecast = Forecast(samples_per_s=Range(low=90, value=100, high=110), peak_bytes=None)
    text = study_page(replace(stored, tried=rows, forecasts={one.number: forecast for one in rows}))
    assert len(text.encode()) < 2**20
    assert re.findall(r'<tr id="trial-(\d+)"', text) == [str(number) for number in range(300)]


# The command


@pytest.fixture
def report(here: Callable[..., Ended], folder: Path) -> Callable[..., Ended]:
    return lambda *arguments: here("report", *arguments, cwd=folder)


def assert_refused(ended: Ended, *words: str) -> None:
    said = " ".join(ended.stderr.split())
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert [word for word in words if word not in said] == [], ended.stderr
    assert "This is a bug in autotune" not in said


def test_a_path_and_a_url_name_the_same_study_and_an_older_page_is_overwritten(folder, report):
    (folder / "page.html").write_text("older")
    ended = report(f"{FOLDER}/{STUDY}", "-o", "page.html")
    assert (ended.returncode, ended.stdout) == (0, "page.html\n"), ended.stderr
    text = (folder / "page.html").read_text()
    assert report(f"sqlite:///{FOLDER}/{STUDY}").stdout == "report.html\n"
    assert (folder / "report.html").read_text() == text
    said = json.loads(report(f"{FOLDER}/{STUDY}", "--json").stdout)
    assert (said["path"], said["trials"], said["ablated"]) == ("report.html", 4, ["precision", "allocator"])


def test_the_newest_study_is_reported_unless_one_is_named(folder, report):
    with contextlib.chdir(folder):
        run_search(options(task=TASK, trials=2))
    assert json.loads(report(f"{FOLDER}/{STUDY}", "--json").stdout)["study"] == "a<b>&c-2"
    named = report(f"{FOLDER}/{STUDY}", "--json", "--study", "a<b>&c-1")
    assert json.loads(named.stdout)["trials"] == 4
    assert_refused(report(f"{FOLDER}/{STUDY}", "--study", "x"), "there is no study x. It holds a<b>&c-2, a<b>&c-1.")


def test_no_such_study(report):
    assert_refused(report("none.db"), "none.db: no such study", "--storage", f"{FOLDER}/{STUDY}.")


def test_an_empty_file_stays_empty(folder, report):
    (folder / "empty.db").touch()
    assert_refused(report("empty.db"), "empty.db: no such study")
    assert (folder / "empty.db").read_bytes() == b""


def test_a_page_never_takes_the_place_of_a_studys_files(folder, report):
    """SQLite would read a page as its write-ahead log."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path = f"good.db{suffix}"
        assert_refused(report("good.db", "-o", path), f"{path}: that is the study")
        assert not (folder / path).exists()


def test_a_file_that_is_no_study(folder, report):
    assert_refused(report("plan.yaml"), "plan.yaml: not a readable study")
    assert_refused(report("."), "a file was expected")


def test_a_storage_without_a_study(folder, report):
    optuna.storages.RDBStorage(f"sqlite:///{folder}/bare.db")
    assert_refused(report("bare.db"), "It holds none: search first")


@pytest.mark.medium
def test_a_study_none_of_whose_trials_has_ended(stored, folder, report):
    study = Study.create(f"sqlite:///{folder}/begun.db", "model", stored.record)
    study.begin(study.ask({}), REFERENCE)
    study.close()
    assert_refused(report("begun.db"), "no trial of study model-1 has ended", "--resume")


def test_a_study_of_another_version(folder, report):
    with sqlite3.connect(folder / FOLDER / STUDY) as database:
        database.execute("UPDATE study_user_attributes SET value_json = '{}' WHERE key = 'facts'")
    database.close()
    assert_refused(report(f"{FOLDER}/{STUDY}"), "the study is not of this version")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (".", "a file was expected, but it is a folder"),
        (f"{FOLDER}/{STUDY}", "that is the study itself"),
        (f"{FOLDER}/page.html", "holds the studies"),
        ("/proc/nothing/page.html", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_or_is_something_else(folder, report, output, said):
    before = (folder / FOLDER / STUDY).read_bytes()
    assert_refused(report(f"{FOLDER}/{STUDY}", "-o", output), said, "with -o")
    assert (folder / FOLDER / STUDY).read_bytes() == before


def test_a_plan_that_is_the_job_as_it_stands_bought_nothing(stored):
    assert stored.plan is not None
    plan = stored.plan.model_copy(update={"settings": REFERENCE})
    text = study_page(replace(stored, plan=plan))
    assert "Nothing: the plan is the job as it stands." in text
    assert cells(text, "reference")[-2] == "batch 64"
