"""A script's loaders and datasets from epoch to epoch: which loader a row is put on, and what a next epoch reads."""

from __future__ import annotations

import pytest
import torch
from script_lines import look_here, run_here
from torch.utils.data import DataLoader

from autotune.data.worker_queues import handed_on
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import TaskRef
from autotune.script.refusal import tell_once
from autotune.techniques.data_loading import DataLoading

HEAD = """
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
torch.manual_seed(0)
class Data(Dataset):
    def __init__(self, length, draws=False):
        self.length, self.draws, self.epoch, self.transform = length, draws, 0, None
    def __len__(self): return self.length
    def __getitem__(self, index):
        x = torch.full((4,), float(index + 100 * self.epoch))
        if self.draws: x += torch.rand(1)
        return x if self.transform is None else self.transform(x)
    def set_epoch(self, epoch): self.epoch = epoch
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
read = []
def step(*batches):
    optimizer.zero_grad()
    sum(model(x).square().mean() for x in batches).backward()
    optimizer.step()
    read.append([x[:, 0].tolist() for x in batches])
"""
INFINITE = """
class Repeated:
    def __init__(self, sampler): self.sampler = sampler
    def __iter__(self):
        while True: yield from iter(self.sampler)
class InfiniteDataLoader(DataLoader):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()
    def __len__(self): return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)): yield next(self.iterator)
train = InfiniteDataLoader(Data(16, draws=True), 4)
validation = InfiniteDataLoader(Data(6), 3)
for epoch in range(3):
    for x in train: step(x)
    with torch.no_grad():
        for x in validation: model(x)
"""
ZIPPED = """
source, target = DataLoader(Data(16, draws=True), 4), DataLoader(Data(12), 4)
for epoch in range(3):
    for pair in zip(source, target): step(*pair)
"""
HOST, KEPT = DataLoading(num_workers=0, cache="host"), DataLoading(num_workers=1, persistent_workers=True)
LOOP = "for epoch in range(3):\n    {before}\n    for x in loader: step(x)\n"
CHANGES = {
    "set_epoch": ("data = Data(12)", "data.set_epoch(epoch)"),
    "through the loader": ("data = Data(12)", "loader.dataset.set_epoch(epoch)"),
    "assigned through the loader": ("data = Data(12)", "loader.dataset.epoch = epoch"),
    "a transform": ("data = Data(12)", "data.transform = (lambda size: lambda x: x * size)(epoch + 1)"),
    "within others": (
        "inner = Data(6); data = Subset(ConcatDataset([inner, inner]), range(12))",
        "inner.epoch = epoch",
    ),
    "negatives drawn anew": ("data = TensorDataset(torch.rand(12, 4))", "data.tensors[0].add_(1)"),
}


@pytest.fixture(autouse=True)
def _alone():
    tell_once.cache_clear()
    with one_thread():
        yield


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run such a script here with settings applied: what it read, step by step."""

    def run(body, **settings):
        (tmp_path / "script.py").write_text(HEAD + body)
        return run_here(tmp_path / "script.py", monkeypatch, **settings)["read"]

    return run


@pytest.fixture
def looked_at(tmp_path, monkeypatch):
    """The facts of such a script."""

    def look(body):
        (tmp_path / "script.py").write_text(HEAD + body)
        return look_here(tmp_path / "script.py", monkeypatch)

    return look


def _changing(what):
    made, before = CHANGES[what]
    if what == "negatives drawn anew":
        made += "\n_step = step\ndef step(batch): _step(batch[0])"
    return f"{made}\nloader = DataLoader(data, 4)\n{LOOP.format(before=before)}"


@pytest.mark.medium
@pytest.mark.parametrize("row", [HOST, KEPT], ids=["cached", "kept"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_dataset_that_changes_between_epochs_is_read_as_it_is_then(what, row, run, capsys):
    """The plan's row ends there, with one line, and the job goes on."""
    expected = run(_changing(what))
    assert run(_changing(what), data_loading=row) == expected
    said = [line for line in capsys.readouterr().err.splitlines() if "data_loading" in line]
    ends = "its epoch is no longer cached" if row is HOST else "its workers are no longer kept"
    assert len(said) == 1
    assert ends in said[0]


@pytest.mark.medium
@pytest.mark.parametrize("what", CHANGES)
def test_a_look_sees_what_the_script_does_between_two_epochs(what, looked_at):
    facts = looked_at(_changing(what).replace("range(3)", "range(10**6)"))
    assert "from one epoch to the next, its attributes have changed" in facts.epochs_differ
    assert all(row.cache == "none" and not row.persistent_workers for row in DataLoading.choices(facts))


@pytest.mark.medium
def test_a_dataset_that_stays_the_same_may_be_cached(looked_at):
    """Its schedule sees the length that it has in a job."""
    body = "loader = DataLoader(Data(400), 4)\nlengths = []\n" + LOOP.format(before="lengths.append(len(loader))")
    facts = looked_at(body + "assert lengths == [100] * 3\n")
    assert facts.epochs_differ is None
    assert any(row.cache == "host" for row in DataLoading.choices(facts))
    (loader,) = facts.identity.loaders
    assert (loader.dataset, loader.length, loader.place) == ("Data", 400, 0)


@pytest.mark.medium
def test_attributes_that_cannot_be_compared_leave_it_uncached(looked_at, run, capsys):
    body = "import threading\ndata = Data(12); data.lock = threading.Lock()\nloader = DataLoader(data, 4)\n"
    facts = looked_at(body + LOOP.format(before="pass"))
    assert "its attributes cannot be compared (cannot pickle '_thread.lock' object)" in facts.epochs_differ
    expected = run(body + LOOP.format(before="pass"))
    assert run(body + LOOP.format(before="pass"), data_loading=HOST) == expected
    assert "an epoch of Data is not cached: its attributes cannot be compared" in capsys.readouterr().err


@pytest.mark.medium
def test_what_reading_changes_is_no_change_of_the_scripts(looked_at):
    """A counter of reads, a list of samples that are kept: with each epoch there are more."""
    body = (
        "class Counted(Data):\n    kept = 0\n    def __getitem__(self, index):\n        self.kept += 1\n"
        "        return super().__getitem__(index)\nloader = DataLoader(Counted(12), 4)\n"
    )
    assert looked_at(body + LOOP.format(before="pass")).epochs_differ is None


@pytest.mark.medium
def test_an_infinite_loader_is_told_from_that_of_the_validation(looked_at, run, capsys):
    """Both make their iterators as they are built, with gradients on; facts are of what is trained on."""
    facts = looked_at(INFINITE)
    assert (facts.dataset_length, facts.effective_batch, facts.dataset_deterministic) == (16, 4, False)
    assert facts.epochs_differ is not None
    expected = run(INFINITE)
    assert run(INFINITE, data_loading=HOST) == expected
    assert "an epoch of Data is not cached: it draws random numbers or returns other" in capsys.readouterr().err
    assert run(INFINITE, data_loading=HOST, task=_task(facts)) == expected


def _task(facts):
    identity = facts.identity
    return TaskRef(source="script.py", fingerprint=facts.fingerprint, identity=identity)


@pytest.mark.medium
def test_of_two_loaders_that_are_read_in_turn_each_has_facts_of_its_own(looked_at, run):
    facts = looked_at(ZIPPED)
    assert [(one.place, one.length) for one in facts.identity.loaders] == [(0, 16), (1, 12)]
    assert not facts.dataset_deterministic
    expected = run(ZIPPED)
    assert run(ZIPPED, data_loading=HOST) == expected
    assert len({tuple(batches[0]) for batches in expected}) == len(expected)


def test_random_numbers_that_reading_draws_are_not_missed_by_what_draws_next(run, capsys):
    """A noise of 0: the samples are the same each time, but the source's noise is drawn from the same generator."""
    body = (
        "class Still(Data):\n    def __getitem__(self, index): return super().__getitem__(index) + 0 * torch.rand(4)\n"
        + ZIPPED.replace("Data(12)", "Still(12)")
    )
    expected = run(body)
    assert run(body, data_loading=HOST) == expected
    assert "an epoch of Still is not cached: it draws random numbers" in capsys.readouterr().err


LOOPS = {
    "the epoch is cached": (HOST, ""),
    "no workers": (DataLoading(num_workers=0), ""),
    "the caching ends": (HOST, "data.epoch = epoch // 2"),
}


@pytest.mark.parametrize("what", LOOPS)
def test_an_epoch_draws_as_many_random_numbers_as_with_workers_that_stay(what, run):
    """The script's own, which draw their seed once; samples are shuffled, and more is drawn in each epoch."""
    row, before = LOOPS[what]
    body = (
        "data = Data(12)\nloader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)\n"
        f"for epoch in range(4):\n    {before}\n    read.append(torch.rand(2).tolist())\n"
        "    for x in loader: step(x); read[-1] = (x[:, 0] % 100).tolist()\n"
    )
    assert run(body, data_loading=row) == run(body)


@pytest.mark.medium
def test_a_row_is_put_only_on_the_loader_that_the_plan_was_found_with(looked_at, run, capsys):
    body = "loader = DataLoader(Data(12), 4)\n" + LOOP.format(before="pass")
    task = _task(looked_at(body))
    run(body, data_loading=HOST, task=task)
    assert "applied: epoch cached in host memory" in capsys.readouterr().err
    run(body.replace("Data(12)", "Data(16)"), data_loading=HOST, task=task)
    said = capsys.readouterr().err
    assert "data_loading is not applied: it is put on the loaders that the plan was found with" in said
    assert "applied: nothing but the job as it is" in said


def test_samples_that_a_script_changes_in_place_come_back_as_they_were(run):
    """A collate that takes a key out of each sample: what is kept is a copy."""
    body = (
        "class Dicts(Data):\n    def __getitem__(self, index): return {'x': super().__getitem__(index)}\n"
        "def collate(samples): return torch.stack([one.pop('x') for one in samples])\n"
        "loader = DataLoader(Dicts(12), 4, collate_fn=collate)\n" + LOOP.format(before="pass")
    )
    expected = run(body)
    assert run(body, data_loading=HOST) == expected


HELD = """
import os
class Who(Data):
    def __getitem__(self, index):
        return torch.full((4,), float(os.getpid()), dtype=torch.float64).float()
loader = DataLoader(Who(12), 4)
batches = iter(loader)
for number in range(12):
    try: x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    step(x)
"""
PEEKED = """
loader = DataLoader(Data(12, draws=True), 4, shuffle=True)
for epoch in range(3):
    for number, x in enumerate(loader):
        step(x)
        if number + 1 == len(loader): step(next(iter(loader)))
"""


def test_workers_are_kept_where_a_loop_holds_the_epoch_that_has_ended(run):
    assert len({x for (batch,) in run(HELD, data_loading=KEPT) for x in batch}) == 1


def test_workers_end_with_the_epoch_that_they_were_handed_on_to():
    """And the epoch that had them stays at its end."""
    loader = DataLoader(torch.arange(12), 4, num_workers=1, persistent_workers=True)
    first = iter(loader)
    read = list(first)
    (worker,) = first._workers
    loader._iterator = handed_on(first)
    second = iter(loader)
    assert not list(first)
    del first
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in read]
    assert worker.is_alive()
    del second, loader
    assert not worker.is_alive()


def test_an_epoch_goes_to_its_end_though_a_next_one_began_at_its_last_batch(run):
    seen = run(PEEKED, data_loading=KEPT)
    assert len(seen) == len(run(PEEKED)) == 12
    for first in range(0, 12, 4):
        whole = sorted(int(x) for (batch,) in seen[first : first + 3] for x in batch)
        assert whole == list(range(12))
