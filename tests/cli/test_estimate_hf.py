"""``autotune estimate --hf``: the task file that a configuration becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.commands.starter import write_task
from autotune.errors import UserError
from autotune.task_file import load_task

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, in the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "My model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder


@pytest.mark.parametrize("name", ["My model", "My model/config.json"])
def test_a_folder_or_its_configuration_becomes_a_task_file(model, name):
    """It is named by the folder, and loads from anywhere."""
    source = write_task(Path(name), 16, None)
    assert source == ".autotune/hf/my-model-16.py"
    task = load_task(source)
    assert tuple(task.build_dataset()[0]["input_ids"].shape) == (16,)


def test_a_changed_configuration_is_another_task_file(model):
    """Traces are kept by the content of files that were loaded, of which a configuration is none."""
    before = Path(write_task(model, 16, 4)).read_text()
    (model / "config.json").write_text(json.dumps(GPT2 | {"attn_pdrop": 0.5}))
    assert Path(write_task(model, 16, 4)).read_text() != before
    assert sum(p.numel() for p in load_task(".autotune/hf/my-model-16-lora-4.py").build_model().parameters())


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_without_a_configuration_its_place_is_named(model, name):
    with pytest.raises(UserError, match=r"a model's config\.json was expected, or the folder that holds it"):
        write_task(Path(name), 16, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "was expected, but got neither"),
        (("model.py", "--hf", "My model"), "was expected, but got both"),
        (("model.py", "--sequence", "8", "--lora"), "--sequence, --lora: only with --hf"),
        (("--hf", "nowhere"), "--hf nowhere: a model's config.json was expected"),
        (("--hf", "My model", "--lora", "0"), "Invalid value for '--lora'"),
    ],
)
def test_what_does_not_go_together_is_refused(model, here, words, told):
    ended = here("estimate", *words, cwd=model.parent)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_a_configuration_that_transformers_does_not_know_exits_with_2(model, here):
    (model / "config.json").write_text('{"model_type": "mine"}')
    ended = here("estimate", "--hf", "My model", "--card", "t4", cwd=model.parent)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "its model_type is 'mine'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_configuration_is_planned_for_cards(model, here):
    ended = here("estimate", "--hf", "My model", "--sequence", "16", "--lora", "--card", "t4,h100", cwd=model.parent)
    assert ended.returncode == 0, ended.stderr
    assert "my-model-16-lora-8.py: the largest micro-batch" in ended.stdout
    assert "T4" in ended.stdout
