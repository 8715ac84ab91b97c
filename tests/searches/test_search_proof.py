"""A search that proves nothing says so in the first line of its result, and with ``--require-proof`` ends with 3."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Ended, run_here
from search_tables import BF16, BOTH, MIB, REFERENCE, TCMALLOC, facts, options, row, run_search, small_search

from autotune.workers.table import Row, TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")

ALIKE = [row(one, samples_per_s=(104.0, 99.0), peak_bytes=(MIB, MIB)) for one in (BF16, TCMALLOC, BOTH)]
"""Of the pairs, some say 1.04 and others 0.99."""
SLOWER = [row(one, samples_per_s=(1.0,)) for one in (BF16, TCMALLOC, BOTH)]
AT_100 = row(REFERENCE, samples_per_s=(100.0,))


def unproven(rows: list[Row], **changes) -> str | None:
    return run_search(options(**changes), rows=rows).plan.gain.unproven


def test_a_gain_whose_interval_has_1_in_it_is_unproven():
    assert unproven([*ALIKE, AT_100]).startswith("its speed is 0.9")


def test_the_job_as_it_stands_for_a_plan_is_unproven():
    assert unproven(SLOWER) == "nothing was seen to be faster than the job as it stands, which is the plan"


def test_what_fell_when_it_was_measured_again_had_been_seen_to_be_faster():
    limit = 2000 * MIB
    rows = [row(one, samples_per_s=(200.0,) * 6, peak_bytes=(MIB, *[limit] * 5)) for one in (BF16, TCMALLOC, BOTH)]
    plan = run_search(options(budget=limit), rows=rows).plan
    assert plan.settings == REFERENCE
    assert plan.gain.unproven == "what could be faster than the job as it stands fell when it was measured again"


def test_rounds_that_were_all_disturbed_prove_nothing():
    busy = [row(one, disturbed=(0.5,)) for one in (REFERENCE, BF16, TCMALLOC, BOTH)]
    assert unproven(busy) == "other work took 50% of the time or more whenever the plan was measured"


def test_a_proven_gain_and_a_plan_that_fits_where_the_job_does_not_are_no_such():
    assert small_search().plan.gain.unproven is None
    assert unproven([row(one, samples_per_s=(10.0,)) for one in (BF16, TCMALLOC, BOTH)], budget=600 * MIB) is None


@pytest.mark.parametrize(
    ("rows", "flags", "code"), [(ALIKE, ["--require-proof"], 3), (ALIKE, [], 0), ([], ["--require-proof"], 0)]
)
def test_the_first_line_says_so_and_the_exit_code_if_asked(rows, flags, code, monkeypatch, capsys):
    Path("model.py").write_text("def build_model(): ...\n")
    known = [row(one) for one in (BF16, TCMALLOC, BOTH)]
    executor = TableExecutor(facts(), [AT_100, *known, *rows])
    asked = ["search", "model.py", "--space", "space.yaml", "--executor", "local", *flags]
    ended: Ended = run_here(executor, monkeypatch, capsys, *asked, cwd=Path.cwd())
    assert ended.returncode == code, ended.stderr
    assert Path("plan.yaml").exists()
    said = ended.stderr.splitlines()
    result = next((number for number, line in enumerate(said) if line.startswith("plan.yaml: ")), None)
    assert result is not None
    assert said[result - 1].startswith("nothing is proven: ") == bool(rows)
    assert ("--require-proof: nothing is proven" in ended.stderr) == (code == 3)
