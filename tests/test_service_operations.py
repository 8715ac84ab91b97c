"""What keeps a service: logs for machines, limits for each token, and the examples in deploy/."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fastapi", reason="the extra `service` is not installed")

from autotune.service.logs import log_to_stderr
from autotune.service.problems import Problem
from autotune.service.web import limits

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_a_token_may_ask_so_often(monkeypatch):
    """10 a second: 20 at once, then one for each tenth of a second; another token has its own."""
    clock = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    limit = limits.RequestLimit(10.0)
    for _ in range(20):
        limit.take("ann")
    with pytest.raises(Problem, match="10 times a second") as refused:
        limit.take("ann")
    assert (refused.value.status, refused.value.more) == (429, {"retry_after": 1})
    limit.take("bob")
    clock[0] += 0.11
    limit.take("ann")


def test_a_line_of_the_log_is_an_object(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr("json")
    logging.getLogger("autotune.service").info("search %s: \n%s", "a", "b")
    row = json.loads(capsys.readouterr().err)
    assert (row["level"], row["message"]) == ("INFO", "search a: \nb")


def test_the_examples_can_be_read():
    """The pod has longer to end than its driver, and the service's options are those that there are."""
    cluster = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 60
    arguments = next(each for each in pod["containers"] if each["name"] == "autotune")["args"]
    entry = next(line for line in (DEPLOY / "Containerfile").read_text().splitlines() if line.startswith("ENTRYPOINT"))
    said = {*arguments, *json.loads(entry.removeprefix("ENTRYPOINT "))}
    slurm = (DEPLOY / "slurm.sh").read_text()
    assert subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"]).returncode == 0
    said |= {word for word in slurm.partition("autotune serve --host")[2].split() if word.startswith("--")}
    helped = subprocess.run([sys.executable, "-m", "autotune", "serve", "--help"], capture_output=True, text=True)
    for option in (each for each in said if each.startswith("--")):
        assert option in helped.stdout, option
