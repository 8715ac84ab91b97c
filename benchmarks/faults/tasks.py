"""Hostile tasks: each is searched until its reference was measured or refused, and nothing of it outlives that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from . import stored
from .checks import clean
from .core import Complaints, Fault
from .ended import LONG_S, NoEnd
from .place import Place
from .scene import SEARCH, SPACE, plan_is_measured

_KIND = "tasks"
_HEALTHY = """\
import atexit, ctypes, itertools, os, random, resource, signal, sys, threading, time, warnings
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

batch_size = 32
steps = itertools.count(1)


def build_model():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def build_dataset():
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


_model, _dataset, _loss = build_model, build_dataset, compute_loss
"""
_Ends = Literal["refused", "measured", "either"]


def _in(hook: str, *lines: str) -> str:
    """A hook that does something, and then what it did."""
    before = {"build_model": "_model()", "build_dataset": "_dataset()", "compute_loss": "_loss(model, batch)"}
    arguments = "model, batch" if hook == "compute_loss" else ""
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {hook}({arguments}):\n{body}    return {before[hook]}\n"


def _loss(expression: str) -> str:
    return f"def compute_loss(model, batch):\n    loss = _loss(model, batch)\n    return {expression}\n"


def _returns(hook: str, expression: str, arguments: str = "") -> str:
    return f"def {hook}({arguments}):\n    return {expression}\n"


_REFUSED = {
    "raises at import": "raise RuntimeError('at import')\n",
    "a syntax error": "def (\n",
    "null bytes": "\0\n",
    "imports what is not there": "import no_such_module\n",
    "sys.exit at import": "sys.exit(0)\n",
    "os._exit at import": "os._exit(0)\n",
    "raises in build_model": _in("build_model", "raise ValueError('never')"),
    "raises in build_dataset": _in("build_dataset", "raise ValueError('never')"),
    "raises in compute_loss": _in("compute_loss", "raise ValueError('never')"),
    "raises in build_optimizer": "def build_optimizer(parameters):\n    raise ValueError('never')\n",
    "raises at step 5": _in("compute_loss", "if next(steps) == 5: raise ValueError('step 5')"),
    "raises KeyboardInterrupt": _in("compute_loss", "raise KeyboardInterrupt"),
    "raises BaseException": _in("compute_loss", "raise BaseException('base')"),
    "raises a message of 10 MB": _in("compute_loss", "raise ValueError('x' * 10_000_000)"),
    "raises a message of escapes": _in("compute_loss", "raise ValueError('\\x1b[2J\\x1b]0;t\\x07')"),
    "an error whose text raises": (
        "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n"
        + _in("compute_loss", "raise Bad")
    ),
    "endless recursion": _in("compute_loss", "return compute_loss(model, batch)"),
    "sys.exit(0) in a step": _in("compute_loss", "sys.exit(0)"),
    "sys.exit(3) in a step": _in("compute_loss", "sys.exit(3)"),
    "os._exit(0) in a step": _in("compute_loss", "os._exit(0)"),
    "segmentation fault": _in("compute_loss", "ctypes.string_at(0)"),
    "abort": _in("compute_loss", "os.abort()"),
    "SIGKILL to itself": _in("compute_loss", "os.kill(os.getpid(), 9)"),
    "SIGTERM to itself": _in("compute_loss", "os.kill(os.getpid(), 15)"),
    "a loss of NaN": _loss("loss * float('nan')"),
    "a loss of infinity": _loss("loss * float('inf')"),
    "NaN from step 3": _loss("loss if next(steps) < 3 else loss * float('nan')"),
    "a loss that is a vector": _loss("loss.expand(3)"),
    "a loss that is a float": _loss("loss.item()"),
    "a loss that is None": _loss("None"),
    "a loss that is a word": _loss("'low'"),
    "a loss without a graph": _loss("loss.detach()"),
    "a loss of integers": _loss("(loss * 0).long()"),
    "a loss and a count of 0": _loss("(loss, 0)"),
    "a loss and a negative count": _loss("(loss, -4)"),
    "a loss and a count of NaN": _loss("(loss, float('nan'))"),
    "a loss and a word": _loss("(loss, 'many')"),
    "three losses": _loss("(loss, 1, 2)"),
    "a model that is None": _returns("build_model", "None"),
    "a model that is a function": _returns("build_model", "len"),
    "a model class": _returns("build_model", "nn.Linear"),
    "a model without parameters": _returns("build_model", "nn.Identity()"),
    "a dataset that is None": _returns("build_dataset", "None"),
    "a dataset that is a number": _returns("build_dataset", "7"),
    "an empty dataset": _returns("build_dataset", "TensorDataset(torch.empty(0, 16), torch.empty(0, 1))"),
    "a dataset of negative length": (
        "class Bad(Dataset):\n    def __len__(self): return -1\n    def __getitem__(self, i): return 0\n"
        + _returns("build_dataset", "Bad()")
    ),
    "a dataset that raises at sample 40": (
        "class Bad(Dataset):\n    def __len__(self): return 512\n    def __getitem__(self, i):\n"
        "        if i == 40: raise ValueError('sample 40')\n        return _dataset()[i]\n"
        + _returns("build_dataset", "Bad()")
    ),
    "a loader worker that dies": (
        "loader_options = {'num_workers': 1}\nclass Bad(Dataset):\n    def __len__(self): return 512\n"
        "    def __getitem__(self, i):\n        os._exit(7)\n" + _returns("build_dataset", "Bad()")
    ),
    "an optimizer that is None": _returns("build_optimizer", "None", "parameters"),
    "an optimizer that is a word": _returns("build_optimizer", "'adam'", "parameters"),
    "a batch size of 0": "batch_size = 0\n",
    "a batch size of -8": "batch_size = -8\n",
    "a batch size that is a word": "batch_size = 'many'\n",
    "loader options that are a list": "loader_options = [1]\n",
    "a negative number of workers": "loader_options = {'num_workers': -1}\n",
    "keeps 1 MiB a step": _in("compute_loss", "kept.append(torch.ones(2**18))") + "kept = []\n",
    "takes more than the budget": _in("compute_loss", "kept.append(torch.ones(2**24))") + "kept = []\n",
    "hangs at import": "threading.Event().wait()\n",
    "hangs in a step": _in("compute_loss", "threading.Event().wait()"),
    "hangs and ignores SIGTERM": _in("compute_loss", "signal.signal(15, signal.SIG_IGN)", "threading.Event().wait()"),
}
_MEASURED = {
    "a child that stays": _in("build_model", "os.fork() or time.sleep(600)"),
    "a daemon of its own session": _in(
        "build_model", "if os.fork() == 0:", "    os.setsid()", "    os.fork() and os._exit(0)", "    time.sleep(600)"
    ),
    "a daemon with an empty environment": _in(
        "build_model", "import subprocess", "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)"
    ),
    "forty children": _in("build_model", "for _ in range(40):", "    os.fork() or (time.sleep(600), os._exit(0))"),
    "closes stdin, stdout and stderr": _in("build_model", "os.closerange(0, 3)"),
    "closes every file": _in("build_model", "os.closerange(0, 256)"),
    "prints 50 MB": _in("build_model", "for _ in range(800): print('x' * 65535)"),
    "prints binary": _in("build_model", "os.write(1, bytes(range(256)) * 1000)"),
    "prints escapes": _in("build_model", "print('\\x1b[2J\\x1b]0;title\\x07')"),
    "replaces sys.stdout": _in("build_model", "sys.stdout = sys.stderr = None"),
    "changes the directory": _in("build_model", "os.chdir('/')"),
    "changes the umask": _in("build_model", "os.umask(0o777)"),
    "changes its limits": _in("build_model", "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"),
    "ignores every signal": _in(
        "build_model", "for n in (1, 2, 3, 10, 12, 15): signal.signal(n, signal.SIG_IGN)"
    ),
    "changes the environment": _in("build_model", "os.environ.clear()"),
    "changes seeds": _in("compute_loss", "random.seed()"),
    "leaves a thread": _in("build_model", "threading.Thread(target=threading.Event().wait).start()"),
    "an atexit hook that hangs": _in("build_model", "atexit.register(threading.Event().wait)"),
    "an atexit hook that raises": _in("build_model", "atexit.register(lambda: 1 / 0)"),
    "warns a thousand times": _in("compute_loss", "[warnings.warn(str(n)) for n in range(1000)]"),
    "a __del__ that raises": (
        "class Bad:\n    def __del__(self): raise ValueError('del')\n" + _in("compute_loss", "Bad()")
    ),
    "a recursion limit of 150": _in("build_model", "sys.setrecursionlimit(150)"),
    "changes the default dtype": _in("build_model", "torch.set_default_dtype(torch.float64)"),
    "one thread": _in("build_model", "torch.set_num_threads(1)"),
    "turns gradients off and on": _in("build_model", "torch.set_grad_enabled(False); torch.set_grad_enabled(True)"),
    "replaces time.perf_counter": "time.perf_counter = lambda: 0.0\n",
    "replaces torch.manual_seed": "torch.manual_seed = lambda seed: None\n",
    "replaces os.replace": "os.replace = lambda *a, **k: 1 / 0\n",
    "stops itself for 2 s": _in(
        "build_model",
        "import subprocess",
        "subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {os.getpid()}'])",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ),
    "an endless dataset": (
        "class Endless(IterableDataset):\n    def __iter__(self):\n"
        "        while True: yield torch.randn(16), torch.randn(1)\n" + _returns("build_dataset", "Endless()")
    ),
    "unicode names": "模型 = build_model\nπ = 3.14\n",
    "calls itself numpy": "__name__ = 'numpy'\n",
    "deletes its own file": _in("build_model", "os.path.exists(__file__) and os.unlink(__file__)"),
    "deletes its temporary folder": _in(
        "build_model", "import glob, shutil, tempfile",
        "[shutil.rmtree(p, ignore_errors=True) for p in glob.glob(tempfile.gettempdir() + '/autotune-*')]",
    ),
    "deletes its working folder": _in("build_model", "import shutil", "shutil.rmtree(os.getcwd(), ignore_errors=True)"),
    "deletes the study": _in("build_model", "import shutil", "shutil.rmtree('.autotune', ignore_errors=True)"),
    "kills its fork server": _in(
        "build_model", "flag = os.environ['FAULT_TOLD'] + '/killed'",
        "os.path.exists(flag) or (open(flag, 'w').close(), os.kill(os.getppid(), 9))",
    ),
    "a daemon with an empty environment, and its fork server killed": _in(
        "build_model", "import subprocess", "flag = os.environ['FAULT_TOLD'] + '/killed'",
        "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)",
        "os.path.exists(flag) or (open(flag, 'w').close(), os.kill(os.getppid(), 9))",
    ),
}  # fmt: skip
_MAY_BE_REFUSED = {
    "deletes its own file", "deletes its temporary folder", "deletes its working folder", "deletes the study",
    "closes every file", "replaces os.replace", "replaces time.perf_counter", "calls itself numpy",
    "a recursion limit of 150", "changes the environment", "changes the umask", "changes its limits",
    "changes the default dtype", "an atexit hook that hangs",
}  # fmt: skip
"""Its own doing may also end it: with 2 and its own error."""
_MAY_BE_MEASURED = {"loader options that are a list", "a loss that is a float", "SIGTERM to itself"}
_FEW_ON_RAY = (
    "os._exit at import", "raises in compute_loss", "segmentation fault", "count of 0", "a loader worker that dies",
    "a daemon of its own", "empty environment", "closes every file", "prints binary", "ignores every signal",
    "an atexit hook that hangs", "deletes its temporary folder",
)  # fmt: skip


def faults() -> Iterator[Fault]:
    """Tasks by what they do, names of files, and some again on Ray."""
    for ends, tasks in (("refused", _REFUSED), ("measured", _MEASURED)):
        for name, code in tasks.items():
            either = name in _MAY_BE_REFUSED | _MAY_BE_MEASURED
            told = "either" if either else ends
            for executor in ("local", "ray"):
                if executor == "local" or any(part in name for part in _FEW_ON_RAY):
                    do = partial(_task, code=code, ends=told, executor=executor)
                    yield Fault(name, _KIND, executor, _EXPECTED[told], do)
    for name, file in _NAMES.items():
        yield Fault(f"a file called {name}", _KIND, "local", _EXPECTED["measured"], partial(_named, file=file))


_EXPECTED = {
    "refused": "exit 2 with the task's own error, nothing left",
    "measured": "measured as any other, nothing left",
    "either": "measured, or exit 2 with the task's own error; nothing left",
}
_NAMES = {
    "with blanks": "my model.py",
    "in unicode": "模型 é.py",
    "as a library": "random.py",
    "with quotes": 'it\'s "mine".py',
    "with a colon": "a:b.py",
    "with a question": "what?.py",
    "with a percent": "50%.py",
    "with a hash": "a#b.py",
    "as a number": "123.py",
    "of 200 letters": f"{'m' * 200}.py",
    "in a folder with blanks": "my folder/model.py",
    "with a new line": "a\nb.py",
}
_CODES = {"refused": (2,), "measured": (130, 0), "either": (0, 2, 130)}


def _task(place: Place, code: str, ends: _Ends, executor: str) -> Complaints:
    place.write("model.py", _HEALTHY + code)
    place.write("space.yaml", SPACE)
    hangs = "Event().wait()" in code and ends == "refused"
    limit = ("--max-time", "12s") if hangs else ("--budget", "900MiB") if "2**24" in code else ()
    return _searched(place, "model.py", ends, executor, *limit)


def _named(place: Place, file: str) -> Complaints:
    place.write(file, _HEALTHY)
    place.write("space.yaml", SPACE)
    return _searched(place, file, "measured", "local")


def _searched(place: Place, file: str, ends: _Ends, executor: str, *options: str) -> Complaints:
    arguments = [file if word == "model.py" else word for word in SEARCH]
    running = place.start(*arguments, "--executor", executor, *options)
    if running.comes(r"\] reference: \d", LONG_S):
        running.send(signal.SIGINT)
    try:
        ended = running.finish()
    except NoEnd as reason:
        return [str(reason)]
    place.expected.add(Path(file).parts[0])
    codes = (*_CODES[ends], 3, 130) if "--budget" in options else _CODES[ends]
    found = clean(ended, codes, of_user=True)
    databases = list((place.work / ".autotune").glob("*.db")) if place.work.is_dir() else []
    found += [one for path in databases for one in stored.read(path).doubles()]
    if ends == "either" or not place.work.is_dir():
        return found
    return found + plan_is_measured(place, ended)
