"""A script under the launcher, without a plan: nothing tells it from one that Python runs by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import environment

from autotune.script.command import under_launcher

SCRIPT = """from helper import VALUE
import atexit, os, pickle, sys
class Mine:
    pass
def f():
    return 1 / 0
atexit.register(lambda: print("atexit", Mine.__name__))
main = sys.modules["__main__"]
print(VALUE, sys.argv, os.getcwd(), sys.path[0], sys.path.count(sys.path[0]))
print(__name__, __file__, __package__, __spec__ and __spec__.name)
print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, vars(main) is globals(), "torch" in sys.modules)
print("autotune" in sys.modules and "AUTOTUNE" in "".join(os.environ))
"""
ENDINGS = {
    "by itself": "",
    "an error": "f()\n",
    "a code": "sys.exit(3)\n",
    "words": "sys.exit('no')\n",
    "at once": "os._exit(4)\n",
}


def said(command, folder):
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_cannot_tell_the_launcher_from_python(ending, tmp_path):
    """What it sees, what it prints, its traceback and its exit code."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "src" / "train.py").write_text(SCRIPT + ENDINGS[ending])
    command = [sys.executable, "src/train.py", "--x", "-m", "1"]
    assert said(under_launcher(command), tmp_path) == said(command, tmp_path)


def test_a_file_that_names_its_python_cannot_either(tmp_path):
    """A script that is run by itself, and a program that pip has installed."""
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -u\n{SCRIPT}")
    program.chmod(0o755)
    command = [str(program), "--x", "1"]
    launched = under_launcher(command)
    assert launched[:2] == [sys.executable, "-u"]
    assert said(launched, tmp_path) == said(command, tmp_path)


def test_a_module_cannot_either(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    (package / "__main__.py").write_text(SCRIPT)
    command = [sys.executable, "-u", "-m", "package", "--x"]
    assert said(under_launcher(command), tmp_path) == said(command, tmp_path)


def test_torch_is_watched_for_whoever_imports_it(tmp_path):
    """A module that stands for torch: what was to be done is done once it is whole, and it looks like itself. Somebody
    may have looked for it before (datasets, transformers)."""
    (tmp_path / "late.py").write_text("VALUE = 1\n")
    program = (
        "import sys; from autotune.script.launch import when_imported\n"
        "when_imported('late', lambda: print('arrived', sys.modules['late'].VALUE))\n"
        "import importlib.util as u; print(u.find_spec('late').origin.endswith('late.py'))\n"
        "print('before'); import late; import late as again; print(late.__loader__ is late.__spec__.loader, 'after')\n"
        "print(type(late.__loader__).__name__)\n"
    )
    _, out, err = said([sys.executable, "-c", program], tmp_path)
    assert (out, err) == ("True\nbefore\narrived 1\nTrue after\nSourceFileLoader\n", "")
