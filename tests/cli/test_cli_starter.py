"""The file that ``autotune init`` writes is a task that runs, and so are its optional pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.commands.starter import write_starter
from autotune.errors import TaskError
from autotune.task import SIGNATURES, Task
from autotune.task_file import load_task


def starter(folder: Path, with_optional: bool) -> Task:
    path = folder / f"starter_{with_optional}.py"
    write_starter(path)
    text = path.read_text()
    if with_optional:
        head, mark, optional = text.partition("# Everything below is optional.\n")
        path.write_text(head + mark + "".join(line.removeprefix("# ") for line in optional.splitlines(keepends=True)))
    return load_task(str(path))


@pytest.mark.parametrize("with_optional", [False, True])
def test_it_trains(with_optional, tmp_path):
    """Three steps on one batch, with the file's own pieces: the loss falls."""
    import torch

    torch.manual_seed(0)
    task = starter(tmp_path, with_optional)
    model, dataset = task.build_model(), task.build_dataset()
    optimizer = task.make_optimizer(model)
    batch = torch.utils.data.default_collate([dataset[index] for index in range(task.batch_size)])
    losses = []
    for _ in range(3):
        loss = task.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_it_shows_every_optional_piece(tmp_path):
    task = starter(tmp_path, with_optional=True)
    absent = [name for name in SIGNATURES if getattr(task, name) is None]
    assert absent == ["pack", "build_loader"]  # rows of tokens need none; or a dataset
    assert task.loader_options
    assert task.shards_by_worker
    assert task.blocks
    assert (task.micro_batch_size, task.precision, task.max_grad_norm) == (32, "bf16", 1.0)


def test_its_quality_is_of_each_example(tmp_path):
    task = starter(tmp_path, with_optional=True)
    assert all(score in (0, 1) for score in task.evaluate(task.build_model()))


@pytest.mark.parametrize("name", ["", ".", "model.txt"])
def test_what_is_no_python_files_name_is_refused_with_one_that_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"ends in .py. Use model.py"):
        write_starter(Path(name))
