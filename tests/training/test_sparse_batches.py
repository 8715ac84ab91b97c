"""Batches of sparse tensors: split, moved, counted in bytes, and compared by what they store."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autotune
from autotune.data.sameness import Sameness, reads_alike
from autotune.estimates.tracing.fake_step import FakeTraining, Untraceable
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.measure.dataset import inspect_dataset
from autotune.nested import bytes_in, rows_of, to_device
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch

WORDS, VALUES = 50, 3
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}
SPARSE = pytest.mark.parametrize("layout", LAYOUTS)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


class Texts(torch.utils.data.Dataset):
    """Sixteen rows of three words each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.stack([torch.randperm(WORDS, generator=generator)[:VALUES] for _ in range(16)])

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(WORDS).scatter(0, self.words[index], 0.5 + index), torch.tensor(index % 2)


def collate(layout):
    def of(rows):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        sparse = x if layout is None else x.to_sparse(layout=LAYOUTS[layout])
        return {"x": sparse.clone(), "y": y}  # the first may lie in more memory than it takes

    return of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(WORDS, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(x, self.table) if x.layout is not torch.strided else x @ self.table)


def loss(model, batch, most=100):
    if len(batch["y"]) > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def task(layout, most=100, size=8) -> autotune.Task:
    return autotune.Task(
        build_model=Net,
        build_dataset=Texts,
        compute_loss=lambda model, batch: loss(model, batch, most),
        collate=collate(layout),
        batch_size=size,
    )


def trained(layout, micro, most=100) -> tuple[list[int], Tensor]:
    """Of an epoch, what layouts and sizes the batches have, and the parameters."""
    plan = Plan(settings=Settings(batch=Batch(micro=micro, accumulate=8 // micro)))
    training = autotune.apply(plan, task(layout, most), seed=0, halve_when_out_of_memory=True)
    seen = []
    for batch in training.loader:
        seen.append((batch["x"].layout, len(batch["x"])))
        training.step(batch)
    return seen, torch.cat([p.detach().flatten() for p in training.model.parameters()])


@SPARSE
def test_they_are_split_into_micro_batches_that_train_what_dense_ones_do(layout):
    _, whole = trained(None, 8)
    seen, parameters = trained(layout, 2)
    assert seen == [(LAYOUTS[layout], 2)] * 8
    assert torch.allclose(parameters, whole, atol=1e-6)


@SPARSE
def test_they_are_halved_where_memory_runs_out(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, parameters = trained(layout, 8, most=3)
    assert torch.allclose(parameters, trained(None, 8)[1], atol=1e-6)


@SPARSE
def test_rows_of_one_keep_its_layout(layout):
    batch = collate(layout)([Texts()[index] for index in range(6)])
    part = rows_of(batch, 6, slice(2, 5))
    assert part["x"].layout is LAYOUTS[layout]
    assert torch.equal(part["x"].to_dense(), batch["x"].to_dense()[2:5])
    assert part["y"].tolist() == [0, 1, 0]


def test_rows_of_blocks_are_refused_in_words():
    for tensor in (torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).expand(4, 4, 4).to_sparse_csr()):
        with pytest.raises(ValueError, match=rf"rows of a tensor in {tensor.layout} of . dimensions are not taken"):
            rows_of(tensor, 4, slice(0, 2))


@SPARSE
def test_they_are_moved_as_they_are(layout):
    moved = to_device(collate(layout)([Texts()[0]]), torch.device("meta"), non_blocking=True)
    assert (moved["x"].layout, moved["x"].device.type) == (LAYOUTS[layout], "meta")


BYTES = {"coo": 4 * VALUES * (2 * 8 + 4), "csr": 5 * 8 + 4 * VALUES * (8 + 4), "csc": 51 * 8 + 4 * VALUES * (8 + 4)}
"""Of four samples: two numbers for each value; or a number for each value, and one more than there are rows, or
columns."""


@SPARSE
def test_their_bytes_are_those_of_what_they_store(layout):
    """In a batch, in a trace of a step, and in the dataset's size, which counts samples one by one."""
    batch = collate(layout)([Texts()[index] for index in range(4)])
    labels = 4 * 8
    assert bytes_in(batch) == BYTES[layout] + labels
    plan = Plan(settings=Settings(batch=Batch(micro=4, accumulate=1)))
    of_batch = [one for one in fit_probed_model(plan, task(layout, size=4)).at(4).allocations if one.kind == "batch"]
    assert sum(one.num_bytes for one in of_batch) == BYTES[layout] + labels
    assert inspect_dataset(task(layout), Texts()).num_bytes == 16 * bytes_in(collate(layout)([Texts()[0]]))


def test_their_step_is_run_and_not_traced():
    """A fake sparse tensor has no values, so that it would take no memory."""
    with pytest.raises(Untraceable, match="its batches are sparse"):
        FakeTraining(Plan(settings=Settings()), task("csr")).step(4)


class Held(Texts):
    """One sparse tensor, of which samples are rows."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        dense = torch.stack([super(Held, self).__getitem__(index)[0] for index in range(len(self))])
        self.all = dense.to_sparse(layout=LAYOUTS[layout])

    def __getitem__(self, index: int) -> Tensor:
        return self.all.to_sparse_coo().index_select(0, torch.tensor([index]))


@SPARSE
def test_a_dataset_that_holds_one_is_the_same_until_a_value_of_it_changes(layout):
    """Not by which tensor it is: its values may be written to, and an equal one may be made anew."""
    dataset = Held(layout)
    values = dataset.all._values() if layout == "coo" else dataset.all.values()
    seen = Sameness(dataset, collate=lambda rows: rows)
    assert seen.change() is None
    values[5] += 1
    assert seen.change() == "its attributes have changed"


def test_samples_that_are_read_twice_are_compared_by_their_values():
    """The layout and the places count too."""

    class Drawn(Texts):
        def __getitem__(self, index: int) -> Tensor:
            places = torch.randint(WORDS, (1, 2)) if index else torch.tensor([[1, 2]])
            return torch.sparse_coo_tensor(places, torch.ones(2), (WORDS,))

    assert reads_alike(Held("csr"), lambda rows: rows)
    assert not reads_alike(Drawn(), lambda rows: rows)
    assert reads_alike(Drawn(), lambda rows: rows, [0])
