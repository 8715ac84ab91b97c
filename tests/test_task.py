"""``load_task``: what a task file may hold, and how what is missing is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import autotune
from autotune.errors import TaskError
from autotune.task import SIGNATURES
from autotune.task_file import load_task

REQUIRED = """
from torch import nn

def build_model():
    return nn.Linear(2, 1)

def build_dataset():
    return [1.0, 2.0]

def compute_loss(model, batch):
    return model(batch).mean()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the test's own folder; the folder leaves sys.path, and its modules sys.modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str, name: str = "model.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_functions_by_name_are_a_task(write):
    """The required three are enough; the rest has torch's defaults."""
    source = write(REQUIRED)
    task = load_task(source)
    assert task.source == source
    assert isinstance(task.build_model(), torch.nn.Linear)
    assert (task.batch_size, task.collate, dict(task.loader_options), task.shards_by_worker) == (None, None, {}, False)
    assert isinstance(task.make_optimizer(task.build_model()), torch.optim.AdamW)


def test_every_optional_piece_is_read(write):
    task = load_task(
        write(
            REQUIRED
            + "def build_optimizer(parameters): ...\ndef collate(samples): ...\ndef build_sampler(dataset): ...\n"
            + "def evaluate(model): return 0.5\nloader_options = {'num_workers': 2}\nbatch_size = 256\n"
            + "blocks = ['layers']\nshards_by_worker = True\nsomething_else = 3\n"
        )
    )
    assert task.evaluate(None) == 0.5
    assert task.loader_options == {"num_workers": 2}
    assert (task.batch_size, task.blocks, task.shards_by_worker) == (256, ["layers"], True)
    assert None not in (task.build_optimizer, task.collate, task.build_sampler)


def test_a_file_may_define_a_task(write):
    """``task`` without a name; any other by its name."""
    text = REQUIRED + (
        "import autotune\ntask = autotune.Task(build_model, build_dataset, compute_loss, batch_size=3)\n"
        "other = autotune.Task(build_model, build_dataset, compute_loss, batch_size=4)\n"
    )
    source = write(text)
    assert load_task(source).batch_size == 3
    named = load_task(f"{source}:other")
    assert (named.batch_size, named.source) == (4, f"{source}:other")


def test_a_name_that_is_no_task_is_an_error_with_those_there_are(write):
    source = write(REQUIRED + "import autotune\nsmall = autotune.Task(build_model, build_dataset, compute_loss)\n")
    with pytest.raises(TaskError, match=r"expected a Task called 'large', but found small\. Define `large = autotune"):
        load_task(f"{source}:large")
    with pytest.raises(TaskError, match="expected a Task called 'task', but found no Task"):
        load_task(f"{write(REQUIRED)}:task")


def test_modules_beside_the_file_can_be_imported(write):
    """As ``python model.py`` would; also when the working directory is another."""
    write("WIDTH = 5\n", "neighbour_of_model.py")
    task = load_task(write("from neighbour_of_model import WIDTH\n" + REQUIRED + "batch_size = WIDTH\n"))
    assert task.batch_size == 5


def test_classes_of_the_file_can_be_found_by_their_module(write):
    """What pickles to a spawned loader worker must be importable."""
    task = load_task(write(REQUIRED, "a_model_of_mine.py"))
    assert sys.modules[task.build_model.__module__].build_model is task.build_model


@pytest.mark.parametrize("name", ["torch.py", "random.py", "my model.py", "autotune.py"])
def test_a_file_may_be_called_as_a_module_is(write, name):
    """The loaded module of that name stays what it was."""
    before = sys.modules.get(Path(name).stem)
    assert load_task(write(REQUIRED, name)).build_dataset() == [1.0, 2.0]
    if before is not None:
        assert sys.modules[Path(name).stem] is before


def test_a_file_that_changed_is_read_again(write):
    assert load_task(write(REQUIRED + "batch_size = 1\n")).batch_size == 1
    assert load_task(write(REQUIRED + "batch_size = 22\n")).batch_size == 22


def test_missing_pieces_are_named_at_once_with_their_signatures(write):
    source = write("def build_model():\n    pass\n")
    with pytest.raises(TaskError) as error:
        load_task(source)
    message = str(error.value)
    assert f"{source}: missing build_dataset, compute_loss" in message
    assert all((SIGNATURES[name] in message) == (name != "build_model") for name in list(SIGNATURES)[:3])
    assert "autotune init" in message


SCRIPTS = {
    "a loop at the top": "import sys\nmodel = 1\nsys.exit('it trains')\n",
    "a loop in main": "def main():\n    sys.exit('it trains')\nmain()\n",
    "a trainer's own methods": (
        "class Trainer:\n    def build_model(self): ...\n    def compute_loss(self, model, batch): ...\n"
        "Trainer().train()\n"
    ),
    "one that is configured by exec": (
        "from torch import *\nexec(open('configurator.py').read())\nconfig = {k: globals()[k] for k in ()}\n"
        "while True:\n    loss = model(x)\n    loss.backward()\n"
    ),
    "eval mode and arguments": "args = vars(parse())\nmodel.eval()\nmodel.modules()\n",
}


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("name", ["", ":large"])
def test_a_training_script_is_not_run(kind, name, write):
    """It would train for hours as "reading the task"."""
    source = write(SCRIPTS[kind], "train.py") + name
    with pytest.raises(TaskError) as error:
        load_task(source)
    message = str(error.value)
    assert (
        f"{source}: defines none of build_model, build_dataset, compute_loss, and no `{name[1:] or 'task'}`" in message
    )
    assert "If it is a training script" in message
    assert message.endswith("The file was not run.")
    assert all(SIGNATURES[name] in message for name in list(SIGNATURES)[:3])


ELSEWHERE = {
    "star import": "from neighbour_of_model import *\n",
    "import": "from neighbour_of_model import build_model, build_dataset, compute_loss\n",
    "import by another name": "import neighbour_of_model as n\nbuild_model = n.build_model\n",
    "exec": "exec(open(__file__.replace('model.py', 'neighbour_of_model.py')).read())\n",
    "globals": "import neighbour_of_model\nglobals().update(vars(neighbour_of_model))\n",
    "vars": "import neighbour_of_model\nvars().update(vars(neighbour_of_model))\n",
    "setattr": (
        "import sys, neighbour_of_model as n\n"
        "for name in ('build_model', 'build_dataset', 'compute_loss'):\n"
        "    setattr(sys.modules[__name__], name, getattr(n, name))\n"
    ),
    "sys.modules": "import sys, neighbour_of_model\nsys.modules[__name__].__dict__.update(vars(neighbour_of_model))\n",
    "__getattr__": "import neighbour_of_model\ndef __getattr__(name):\n    return getattr(neighbour_of_model, name)\n",
    "a branch": "if True:\n    import neighbour_of_model as n\n    build_model = n.build_model\n",
    "global": (
        "import neighbour_of_model as n\n"
        "def define():\n    global build_model\n    build_model = n.build_model\ndefine()\n"
    ),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_pieces_may_come_from_anywhere(kind, write):
    """Whatever the way: a file is refused unread only if nothing in it can define a piece."""
    write(REQUIRED, "neighbour_of_model.py")
    rest = "build_dataset, compute_loss = n.build_dataset, n.compute_loss\n"
    text = ELSEWHERE[kind]
    source = write(text + (("import neighbour_of_model as n\n" + rest) if "n.build_model" in text else ""))
    assert load_task(source).build_dataset() == [1.0, 2.0]


def test_wrong_pieces_are_named_at_once(write):
    """A function that is none, a batch size that is none, and options that are decided elsewhere: three lines."""
    wrong = "compute_loss = 3\nbatch_size = 0\nloader_options = {'shuffle': True, 'batch_size': 4, 'num_workers': 1}\n"
    source = write(REQUIRED + wrong)
    with pytest.raises(TaskError) as error:
        load_task(source)
    lines = str(error.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [source] * 3
    assert "compute_loss must be a function, but got int. Wanted: def compute_loss(model, batch)" in lines[0]
    assert "batch_size must be a whole number of samples, at least 1, but got 0" in lines[1]
    assert "but got batch_size, shuffle. Batching, order and collation have their own entries" in lines[2]


def test_what_the_job_does_today_is_read(write):
    task = load_task(
        write(REQUIRED + "batch_size = 32\nmicro_batch_size = 8\nprecision = 'bf16'\nmax_grad_norm = 1.0\n")
    )
    assert (task.micro_batch_size, task.precision, task.max_grad_norm) == (8, "bf16", 1.0)
    silent = load_task(write(REQUIRED))
    assert (silent.micro_batch_size, silent.precision, silent.max_grad_norm) == (None, None, None)


def test_an_uneven_micro_batch_is_todays_job_too(write):
    assert load_task(write(REQUIRED + "batch_size = 32\nmicro_batch_size = 12\n")).micro_batch_size == 12


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("micro_batch_size = 8", "micro_batch_size is 8, but there is no batch_size. Set it to the samples"),
        ("batch_size = 4\nmicro_batch_size = 8", "at most batch_size, the 4 samples of an optimizer step, but got 8"),
        ("batch_size = 4\nmicro_batch_size = 0", "micro_batch_size must be a whole number of samples, at least 1"),
        ("batch_size = 4\nmicro_batch_size = True", "micro_batch_size must be a whole number of samples, at least 1"),
        ("precision = 'half'", "precision must be one of fp32, tf32, bf16, fp16, but got 'half'"),
        ("precision = 16", "precision must be one of fp32, tf32, bf16, fp16, but got 16"),
        ("max_grad_norm = 0", "max_grad_norm must be a number above 0, but got 0"),
        ("max_grad_norm = '1.0'", "max_grad_norm must be a number above 0, but got '1.0'"),
        ("max_grad_norm = float('inf')", "max_grad_norm must be a number above 0, but got inf"),
    ],
)
def test_what_cannot_be_todays_job_is_refused_in_words(write, entries, words):
    with pytest.raises(TaskError) as error:
        load_task(write(REQUIRED + entries + "\n"))
    (line,) = str(error.value).splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ({"compute_loss": lambda batch: None}, r"compute_loss takes \(batch\), but is called with \(model, batch\)"),
        ({"build_optimizer": lambda: None}, r"build_optimizer takes \(\), but is called with \(parameters\)"),
        (
            {"collate": lambda samples, pad: None},
            r"collate takes \(samples, pad\), but is called with \(samples: list\)",
        ),
        ({"build_model": lambda width: None}, r"build_model takes \(width\), but is called with \(\)"),
    ],
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_found_before_anything_runs(piece, words):
    pieces = {"build_model": torch.nn.Module, "build_dataset": list, "compute_loss": lambda model, batch: None}
    with pytest.raises(TaskError, match=words):
        autotune.Task(**{**pieces, **piece})


@pytest.mark.parametrize("value", ["True", "2.5", "'8'", "-1"])
def test_a_batch_size_is_a_positive_whole_number(write, value):
    with pytest.raises(TaskError, match="batch_size must be a whole number"):
        load_task(write(REQUIRED + f"batch_size = {value}\n"))


def test_loader_options_are_a_dict(write):
    with pytest.raises(TaskError, match="loader_options must be a dict, but got list"):
        load_task(write(REQUIRED + "loader_options = [1]\n"))


@pytest.mark.parametrize("source", ["absent.py", "absent.py:task", "."])
def test_no_such_file_says_how_to_begin(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"no such file\. `autotune init"):
        load_task(source)


def test_a_file_of_another_kind_is_an_error(write):
    with pytest.raises(TaskError, match=r"not a Python file\. Name a file that ends in \.py"):
        load_task(write("schema: autotune/plan@1\n", "plan.yaml"))


def test_what_the_file_raises_comes_through_and_leaves_no_half_module(write):
    """The user's own error, for their own traceback; a second try does not find the broken module."""
    source = write(REQUIRED + "import no_such_module_anywhere\n", "broken_model.py")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            load_task(source)
    assert "broken_model" not in sys.modules


def test_build_optimizer_receives_parameters_or_the_model(write):
    """The model where its argument is called so, every parameter in order otherwise."""
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    seen = []

    def by_model(model):
        seen.append(model)
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def by_parameters(params):
        seen.append(params)
        return torch.optim.SGD(params, lr=1.0)

    pieces = (torch.nn.Module, list, lambda model, batch: None)
    for build in (by_model, by_parameters):
        autotune.Task(*pieces, build_optimizer=build).make_optimizer(model)
    assert seen[0] is model
    assert all(a is b for a, b in zip(seen[1], model.parameters(), strict=True))


def test_the_default_optimizer_holds_what_trains():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    task = autotune.Task(torch.nn.Module, list, lambda model, batch: None)
    (group,) = task.make_optimizer(model).param_groups
    assert [p.shape for p in group["params"]] == [p.shape for p in model[1].parameters()]
