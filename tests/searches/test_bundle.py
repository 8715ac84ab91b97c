"""A bundle: shares and plans from the studies of searches on unlike devices, and the one for this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from search_tables import configurations, facts, options, row, run_search, speed

import autotune
from autotune.bundle import Bundle, Member, device_name
from autotune.commands.devices.search import bundle_lines, save
from autotune.errors import PlanError, UserError
from autotune.plan import Plan
from autotune.searches.winner.unlike import SharedTraining


def study(name: str, slower: float, **known: Any) -> str:
    """A search on a device that is so many times slower than the table's; its storage."""
    found = facts(num_threads=int(4 / slower), **known)
    found = found.model_copy(update={"device": found.device.model_copy(update={"name": device_name("cpu")})})
    rows = [row(one, samples_per_s=(speed(one) / slower,)) for one in configurations(found)]
    run_search(options(storage=f"sqlite:///{name}", trials=12), known=found, rows=rows)
    return name


def shared(*studies: tuple[str, int]) -> tuple[Bundle, list[Plan]]:
    """By what the studies have; of each, how many ranks."""
    training = SharedTraining.read(studies)
    shares = training.expected()
    return training.bundle(shares), [one.plan for one in shares]


@pytest.fixture
def studies(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [study("fast.db", 1), study("slow.db", 2)]


@pytest.mark.medium
def test_each_type_has_a_plan_and_a_share(studies, monkeypatch):
    """The one twice as fast takes twice as many of 64 samples, or as near to it as the micro-batches that were tried
    are fine; each process loads its own plan."""
    training = SharedTraining.read([(one, 1) for one in studies])
    shares = training.expected()
    bundle = save(training, shares, Path("both"))
    assert any("(64 GiB, 4 threads): 4" in line for line in bundle_lines(bundle, shares, Path("both")))
    rows = yaml.safe_load(Path("both/bundle.yaml").read_text())["plans"]
    assert sum(one["samples"] for one in rows) == 64
    assert rows[0]["samples"] in (40, 48)
    for threads, one in zip((4, 2), rows, strict=True):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        settings = autotune.load_plan("both").settings
        assert settings.parallel.effective == 64
        assert settings.parallel.processes == 2
        assert settings.batch is not None
        assert settings.batch.num_samples == one["samples"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(PlanError, match=r"no plan is for this process's device, .*\(3 threads\); there are plans for"):
        autotune.load_plan("both")


@pytest.mark.medium
def test_ranks_of_one_type_take_as_many_each(studies):
    bundle, plans = shared((studies[0], 1), (studies[1], 2))
    first, second = (one.samples for one in bundle.plans)
    assert first + 2 * second == 64
    assert [plan.settings.parallel.processes for plan in plans] == [3, 3]


@pytest.mark.slow
def test_what_cannot_be_shared_is_said(studies):
    study("other.db", 4, fingerprint="sha256:" + "b" * 64)
    study("normed.db", 4, split_error=0.2)
    said = {
        "is of another task": ["fast.db", "other.db"],
        "2 ranks or more": ["fast.db"],
        "--allow-split permits it": ["fast.db", "normed.db"],
        "two rows are of one device": ["fast.db", "fast.db"],
    }
    for words, names in said.items():
        with pytest.raises(UserError, match=words):
            shared(*((name, 1) for name in names))


def test_a_device_is_told_as_people_read_it():
    """The exact bytes of a machine's memory are a long number."""
    one = Member(plan="a.yaml", type="cpu", device="A CPU", memory=25276063744, threads=1, samples=1, step_s=1.0)
    assert one.describe() == "A CPU (23.54 GiB, 1 thread)"


def test_a_folder_that_is_no_bundle_is_said(tmp_path):
    with pytest.raises(PlanError, match=r"a folder without bundle.yaml is no bundle"):
        autotune.load_plan(tmp_path)
