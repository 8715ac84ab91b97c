"""Loaders and datasets of frameworks from epoch to epoch: what a row of data loading is put on, and what ends it."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from frameworks import FRAMEWORKS, Data, Job, Told, epochs_of, trained
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from autotune.errors import PlanError
from autotune.integrations.loaders import put_at_first_epoch
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan
from autotune.script.refusal import tell_once
from autotune.techniques import Settings
from autotune.techniques.data_loading import DataLoading

HOST, KEPT = DataLoading(num_workers=0, cache="host"), DataLoading(num_workers=1, persistent_workers=True)
_NEEDS = {"ray": ("ray", "pandas", "pyarrow")}
INSTALLED = [
    pytest.param(name, marks=pytest.mark.skipif(bool(lacks), reason=f"{', '.join(lacks)} not installed"))
    for name in FRAMEWORKS
    for lacks in [[one for one in _NEEDS.get(name, (name,)) if importlib.util.find_spec(one) is None]]
]


@pytest.fixture(autouse=True)
def _alone():
    tell_once.cache_clear()
    with one_thread():
        yield


def of(row):
    return Plan(settings=Settings(data_loading=row))


class Rows(Data):
    """Samples of a tensor."""

    def __init__(self, length):
        super().__init__(length)
        self.rows = torch.arange(float(length))

    def __getitem__(self, index):
        return {"x": self.rows[index].expand(4).clone()}


def changing(what):
    """A job whose dataset is another in each epoch."""
    data = {"negatives drawn anew": Rows, "through the loader": Told}.get(what, Data)(12)
    held = Subset(ConcatDataset([data]), range(12)) if what == "within others" else data

    def before(loader, epoch):
        if what == "through the loader":
            loader.dataset.set_epoch(epoch)
        elif what == "assigned through the loader":
            loader.dataset.epoch = epoch
        elif what == "a transform":
            data.transform = (lambda size: lambda x: x * size)(epoch + 1)
        elif what == "negatives drawn anew" and epoch:
            data.rows.add_(100)
        elif what in ("an attribute", "within others"):
            data.epoch = epoch + 1

    return Job(held, None, before)


CHANGES = (
    "an attribute",
    "through the loader",
    "assigned through the loader",
    "a transform",
    "within others",
    "negatives drawn anew",
)


@pytest.mark.medium
@pytest.mark.parametrize("row", [HOST, KEPT], ids=["cached", "kept"])
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("framework", INSTALLED)
def test_a_dataset_that_changes_between_epochs_is_read_as_it_is_then(framework, what, row, capsys):
    """The plan's row ends there, with one line, and the job goes on."""
    expected = trained(framework, changing(what), None)
    assert len({tuple(epoch) for epoch in epochs_of(expected.read)}) == 3
    assert trained(framework, changing(what), of(row)) == expected
    said = [line for line in capsys.readouterr().err.splitlines() if "data_loading" in line]
    ends = "its epoch is no longer cached" if row is HOST else "its workers are no longer kept"
    assert len(said) == 1
    assert ends in said[0]


@pytest.mark.medium
@pytest.mark.parametrize("row", [HOST, KEPT], ids=["cached", "kept"])
@pytest.mark.parametrize("framework", INSTALLED)
def test_samples_that_are_drawn_anew_are(framework, row):
    job = Job(Data(12, draws=True), Data(8, draws=True))
    expected = trained(framework, job, None)
    found = trained(framework, job, of(row))
    if row is HOST:
        assert found == expected
    assert len({tuple(epoch) for epoch in epochs_of(found.read)}) == 3
    assert len({tuple(epoch) for epoch in epochs_of(found.validated)}) == 3


class Who(Data):
    """Samples that say which process has read them, and how many it had read."""

    num_read = 0

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(os.getpid()), dtype=torch.float64).float()}


class Counted(Data):
    """Notes each read here."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


@pytest.mark.medium
@pytest.mark.parametrize("framework", INSTALLED)
def test_a_row_is_in_force_where_the_dataset_stays_the_same(framework, capsys):
    """One worker for all epochs, beside the validation's none; an epoch that is read when training starts alone."""
    found = trained(framework, Job(Who(12), Who(8)), of(KEPT))
    (worker,) = {x for batch in found.read for x in batch}
    assert {x for batch in found.validated for x in batch} == {float(torch.tensor(float(os.getpid())))} != {worker}
    Counted.reads = 0
    trained(framework, Job(Counted(400), None), of(HOST))
    assert 400 <= Counted.reads < 800
    assert "no longer" not in capsys.readouterr().err


class Options(Data):
    """Says by which loader's worker it is read: 1, or 0 in the training process."""

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(torch.utils.data.get_worker_info() is not None))}


@pytest.mark.medium
@pytest.mark.parametrize("row", [HOST, KEPT], ids=["cached", "kept"])
@pytest.mark.parametrize("framework", INSTALLED)
def test_the_loader_of_the_validation_stays_the_jobs(framework, row):
    """Though its dataset would give the same: here another with each validation."""
    held_out = Data(8)

    def before(loader, epoch):
        held_out.epoch = epoch

    expected = trained(framework, Job(Data(12), held_out, before), None)
    assert len({tuple(epoch) for epoch in epochs_of(expected.validated)}) == 3
    assert trained(framework, Job(Data(12), held_out, before), of(row)) == expected
    assert {x for batch in trained(framework, Job(Data(12), Options(8)), of(KEPT)).validated for x in batch} == {0.0}


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_loader_that_the_row_cannot_be_put_on_ends_no_job_that_trains(has_stepped, capsys):
    """Its first epoch comes late: in a curriculum, or with a second dataset."""
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=None)
    put_at_first_epoch(of(HOST), loader, "cpu")
    if not has_stepped:
        with pytest.raises(PlanError, match="does not batch by itself"):
            list(loader)
        return
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert [float(x) for (x,) in loader] == [0.0, 1.0, 2.0, 3.0]
    assert "does not batch by itself. The loader is left as it is." in capsys.readouterr().err
