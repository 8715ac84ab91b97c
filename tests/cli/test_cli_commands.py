"""Every command but search and verify: they run nothing, so they are quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import autotune, environment

from autotune import __version__
from autotune.plan import load_plan
from autotune.report import doctor

COMMANDS = ("search", "show", "report", "verify", "profile", "estimate", "run", "init", "doctor")
COMMANDS += ("serve", "submit", "status", "logs", "cancel", "resume", "prioritize", "fetch")
PLAN = """\
schema: autotune/plan@1
task: {source: model.py, fingerprint: 'sha256:%s'}
budget: {limit: 512 MiB, device: cpu}
settings:
  batch: {micro: 64, accumulate: 4}
  precision: {kind: bf16}
  checkpointing: {kind: blocks, every: 2}
  allocator: {kind: tcmalloc}
notes: [The effective batch was assumed.]
measured:
  samples_per_s: {value: 812.4, low: 806.1, high: 818.9, repeats: 3}
  peak: {process: 471 MiB}
reference:
  samples_per_s: {value: 352.0, low: 350.0, high: 354.0, repeats: 3}
  peak: {process: 802 MiB}
  fits: false
gain: {speed: 2.308x, memory: 0.587x}
environment: {torch: 2.13.0, device: Some CPU, autotune: 0.1.0, python: 3.11.2}
search: {trials: 14, seconds: 212.0, stopped: 14 trials are done, study: model-1, sampler: gain, seed: 0}
""" % ("0" * 64)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def test_with_json_a_mistaken_option_is_a_document_too(tmp_path, here):
    ended = here("search", "model.py", "--budget", "0", "--json", cwd=tmp_path)
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["error"].startswith("Invalid value for '--budget': a budget of 0 leaves no memory")
    assert "Invalid value for '--budget'" in ended.stderr


def test_the_version_is_the_packages(tmp_path):
    ended = autotune("--version", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, f"autotune {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_has_help(command, tmp_path, here):
    assert f"\n  {command} " in here("--help", cwd=tmp_path).stdout
    ended = here(command, "--help", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_show_says_what_the_plan_says(plan, tmp_path, here):
    said = " ".join(here("show", plan.name, cwd=tmp_path).stdout.split())
    for words in (
        "2.31x the reference's speed, within 512 MiB, on cpu",
        "micro-batch 64 × 4",
        "checkpoint every 2nd of the blocks",
        "812 samples/s (95 %: 806 to 819; 3 fresh processes)",
        "471 MiB of 512 MiB (92%; 3% is kept as a margin)",
        "352 samples/s (95 %: 350 to 354; 3 fresh processes); peak 802 MiB, over the budget",
        "2.31x the speed, 0.59x the memory",
        "14 trials in 3 min 32 s: 14 trials are done",
        "The effective batch was assumed.",
        'autotune.load_plan("plan.yaml")',
        "torch 2.13.0, Python 3.11.2",
    ):
        assert words in said


def test_show_keeps_to_80_columns_and_plain_text_in_a_pipe(plan, tmp_path, here):
    said = here("show", plan.name, cwd=tmp_path).stdout
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_show_json_is_the_plan_itself(plan, tmp_path, here):
    before = load_plan(plan)
    document = json.loads(here("show", plan, "--json", cwd=tmp_path).stdout)
    plan.write_text(json.dumps(document["plan"]))  # JSON is YAML
    assert load_plan(plan) == before


def test_run_hands_on_arguments_exit_code_and_the_plans_environment(plan, tmp_path):
    plan.write_text(PLAN.replace("tcmalloc", "expandable_segments"))
    code = (
        "import os, sys; print(os.environ['PYTORCH_ALLOC_CONF'], os.environ['AUTOTUNE_PLAN'], *sys.argv[1:]); exit(7)"
    )
    ended = autotune("run", plan.name, "--", sys.executable, "-c", code, "--json", "-h", cwd=tmp_path)
    assert ended.stdout.split() == ["expandable_segments:True", str(plan), "--json", "-h"]
    assert ended.returncode == 7


@pytest.mark.parametrize("flags", [[], ["--enforce"]], ids=str)
def test_run_tells_a_job_whether_it_is_to_keep_its_budget(plan, tmp_path, flags):
    plan.write_text(PLAN.replace("  allocator: {kind: tcmalloc}\n", ""))
    code = "import os; print(os.environ.get('AUTOTUNE_ENFORCE'))"
    ended = autotune("run", *flags, plan.name, "--", sys.executable, "-c", code, cwd=tmp_path)
    assert ended.stdout.split() == ["1" if flags else "None"]


def test_run_of_an_unknown_command_is_the_users_error(plan, tmp_path):
    plan.write_text(PLAN.replace("  allocator: {kind: tcmalloc}\n", ""))
    ended = autotune("run", plan, "--", "no-such-command", cwd=tmp_path)
    assert ended.returncode == 2
    assert "no-such-command: cannot be started: No such file or directory" in ended.stderr


def test_init_writes_a_file_once(tmp_path, here):
    assert here("init", "model.py", cwd=tmp_path).stdout == "model.py\n"
    written = (tmp_path / "model.py").read_text()
    ended = here("init", "model.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "model.py: exists already" in ended.stderr
    assert (tmp_path / "model.py").read_text() == written


def test_init_into_no_folder_is_the_users_error(tmp_path, here):
    ended = here("init", "nowhere/model.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "nowhere/model.py: cannot be written: No such file or directory" in ended.stderr


@pytest.mark.medium
def test_our_own_bug_shows_a_traceback_and_asks_for_a_report(plan):
    program = (
        "import sys, autotune.plan; sys.argv = ['autotune', 'show', 'plan.yaml']\n"
        "autotune.plan.Plan.from_yaml = classmethod(lambda *_: 1 / 0)\n"
        "from autotune.cli import main; main()"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=plan.parent, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
    assert "Please report it" in ended.stderr


def test_the_users_error_shows_no_traceback(tmp_path, here):
    ended = here("show", "none.yaml", "--json", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "none.yaml: no such file. `autotune search model.py` writes a plan.\n"
    assert json.loads(ended.stdout) == {"exit_code": 2, "error": ended.stderr.strip(), "kind": "PlanError"}


def test_doctor_says_what_this_machine_cannot_have(tmp_path, here):
    ended = here("doctor", "--json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    skipped = {(row["device"], row["technique"], row["setting"]) for row in json.loads(ended.stdout)["skipped"]}
    assert ("cpu", "precision", "fp16") in skipped
    of_devices = {"precision", "allocator", "compile", "attention", "optimizer_state"}
    assert {technique for _, technique, _ in skipped} <= of_devices, skipped
    assert {setting for _, technique, setting in skipped if technique == "attention"} == {
        "attention by efficient",
        "attention by cudnn",
    }


def test_doctor_says_how_to_get_what_pruning_needs(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch-pruning" else "1.0")
    said = [one for one in doctor.examine()["advice"] if "torch-pruning" in one]
    assert len(said) == 1
    assert said[0].startswith("`pruning` lacks torch-pruning: pip install ")
    assert "[pruning]" in said[0]
