"""Private parts of other libraries, and state that outlives a call: each is listed, used, and missed aloud."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from autotune.internals import FEATURES, TRIED, broken, lost
from autotune.internals.probes import _holds, _NotLoaded
from autotune.internals.state import CACHES, MARKS, REPLACED, VARIABLES
from autotune.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune"
SOURCES = sorted(
    path
    for folder in (PACKAGE, PACKAGE / "workers", PACKAGE / "search_spaces")
    for path in folder.rglob("*.py")
    if path.parent != PACKAGE / "internals" or path.name == "fake_tensors.py"
)
LIBRARIES = (*TRIED, "pytorch_lightning")
PATHS = {re.split(r"[:(]", part)[0]: part for feature in FEATURES for part in feature.parts}
PARTS = {part for feature in FEATURES for part in feature.parts}
NAMES = {name for part in PARTS for name in re.findall(r"\w+", part.partition("(")[0])}
"""Of all parts, with those of the modules and classes that they are in."""
_BY_METACLASSES = {"_abc_impl", "_backward_cls"}
_PLAIN = {"_replace", "_asdict", "_fields", "_make"}
"""Public, of named tuples."""
_WORDS = {"removesuffix", "removeprefix", "startswith", "ContextVar", "create_model"}
"""What takes a text that is no name of an attribute."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"_[A-Za-z]\w*", name))


def of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names that a file gives to functions, classes, variables, parameters and attributes of ``self``."""
    found = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.arg():
                found.add(node.arg)
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found.add(node.attr)
    return frozenset(found)


@cache
def defined() -> frozenset[str]:
    return frozenset().union(*map(defined_in, SOURCES))


def private_uses(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of what a file takes of others that is private: what it imports, as a whole path; attributes, and
    words and keywords that name one, by their last name."""
    tree = tree_of(path)
    whole = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    pythons = {alias.asname or alias.name for node in whole for alias in node.names} & sys.stdlib_module_names
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=0):
                found = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Import():
                found = [alias.name for alias in node.names]
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")):
                found = [name] if name not in defined() else []
            case ast.Attribute(attr=name, value=ast.Name(id=owner)) if owner in pythons:
                found = []
            case ast.Attribute(attr=name):
                found = [name] if name not in _PLAIN and (name in NAMES or name not in defined_in(path)) else []
            case _:
                found = [word for word in words_of(node) if word not in defined()]
        yield from ((node.lineno, name) for name in found if any(map(is_private, name.split("."))))


def words_of(node: ast.AST) -> Iterator[str]:
    """Words that may name an attribute."""
    match node:
        case ast.Call(func=func, args=words, keywords=keywords) if ast.unparse(func).split(".")[-1] not in _WORDS:
            yield from (one.arg for one in keywords if one.arg)
        case ast.Dict(keys=words) | ast.Tuple(elts=words) | ast.Compare(comparators=words):
            pass
        case ast.Subscript(slice=word):
            words = [word]
        case _:
            return
    for one in words:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def is_listed(name: str) -> bool:
    """Whether the table has it: an imported path as it is, or as the beginning of one."""
    if "." not in name:
        return name in NAMES or name in MARKS
    if name.split(".")[0] not in LIBRARIES:
        return True
    return name in PATHS or any(path.startswith(f"{name}.") for path in PATHS)


@pytest.mark.medium
def test_every_private_part_that_is_used_is_in_the_table():
    """A word, or an attribute of ``self``, that our own code defines is none."""
    found = ((path, line, name) for path in SOURCES for line, name in private_uses(path))
    assert [f"{of(path)}:{line} {name}" for path, line, name in found if not is_listed(name)] == []


def test_every_part_of_the_table_is_used():
    """By its last name."""
    used = set()
    for node in (node for path in SOURCES for node in ast.walk(tree_of(path))):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                used.add(name)
            case ast.Constant(value=str(name)):
                used.add(name)
            case ast.FunctionDef(name=name):  # overrides one
                used.add(name)
    assert [part for part in sorted(PARTS) if re.findall(r"\w+", part.partition("(")[0])[-1] not in used] == []


@pytest.mark.slow
def test_what_our_classes_override_of_private_names_is_in_the_table():
    """An override of a name that is private to a base of another library."""
    stray = []
    for path in SOURCES:
        name = f"autotune.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}"
        if "__main__" in name or "migrations" in name:
            continue
        for one in vars(importlib.import_module(name.removesuffix(".__init__"))).values():
            if inspect.isclass(one) and one.__module__.startswith("autotune"):
                bases = [base for base in one.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
                own = {word for word in vars(one) if is_private(word)} - _BY_METACLASSES
                stray += [f"{one.__name__}.{word}" for base in bases for word in own & vars(base).keys() - NAMES]
    assert stray == []


def test_what_a_technique_goes_by_is_in_the_table():
    asked = {one.goes_by for one in TECHNIQUES.values()} - {None}
    assert asked
    assert asked <= {feature.name for feature in FEATURES}


def test_the_versions_that_were_tried_are_those_that_are_tested():
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pinned[{"yaml": "PyYAML"}.get(name, name)] for name in TRIED} == TRIED


@pytest.mark.slow
def test_every_probe_holds_in_the_versions_that_are_installed():
    assert [reason for _, reason in broken(imports=True)] == []


@pytest.mark.parametrize(
    "part",
    [
        "torch.nn.Module._gone",
        "torch._gone.module.name",
        "torch.utils.data.DataLoader.__init__:_gone",
        "torch.nn.functional.mse_loss(inputs, weight)",
    ],
)
def test_a_part_that_is_gone_is_found_out(part):
    import torch  # noqa: F401 - a probe imports nothing

    assert not _holds(part, imports=False)


def test_a_part_behind_what_a_job_has_put_in_its_place_is_taken_to_be_there(monkeypatch):
    from torch.utils.data import DataLoader

    monkeypatch.setattr(DataLoader, "__init__", lambda self, *args, **kwargs: None)
    with pytest.raises(_NotLoaded):
        _holds("torch.utils.data.DataLoader.__init__:_iterator", imports=True)


def test_a_feature_that_is_asked_for_by_its_name_is_in_the_table():
    """A name that is written wrongly would be taken for one that goes by no private parts."""
    asked = {
        node.args[0].value
        for node in (node for path in SOURCES for node in ast.walk(tree_of(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lost"
        if isinstance(node.args[0], ast.Constant)
    }
    assert asked
    assert asked <= {feature.name for feature in FEATURES}


def test_a_feature_without_private_parts_is_there():
    """As Ray Train's integration is."""
    assert lost("ray") is None


# What happens where a part is gone. Each in a process of its own, in which torch is changed before ours is imported.

COMMON = """
import torch
{change}
import autotune
from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.techniques import Settings, lost_techniques
from torch import nn

def job():
    return autotune.Task(
        build_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)),
        build_dataset=lambda: [torch.ones(4) for _ in range(32)],
        compute_loss=lambda model, batch: model(batch).mean(),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )

def refused(**settings):
    try:
        autotune.apply(Plan(settings=Settings(**settings)), job())
    except PlanError as error:
        return str(error)
    return 'applied'
"""

UNHEEDED = "torch.nn.Module.__call__ = lambda self, *args, **kwargs: self._call_impl(*args, **kwargs)"
"""A torch that does not heed ``_compiled_call_impl``."""
NO_HOOKS = "del torch._C._autograd._top_saved_tensors_default_hooks"
NO_FAKES = "import torch._subclasses.fake_tensor as fake_tensor; del fake_tensor.FakeCopyMode"


def without(change: str, code: str) -> str:
    """What ``code`` prints in such a process."""
    text = COMMON.format(change=change) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "technique", "part"),
    [
        (UNHEEDED, "compile={'kind': 'model'}", "torch.nn.Module._compiled_call_impl"),
        (NO_HOOKS, "layers={'kind': 'exact'}", "torch._C._autograd._top_saved_tensors_default_hooks"),
    ],
)
def test_a_technique_whose_part_is_gone_is_searched_without_and_refused_in_a_plan(change, technique, part):
    name = technique.partition("=")[0]
    said = without(
        change,
        f"""
        from autotune.measure.inspect import inspect_task
        from autotune.measure.measurement import InspectOptions
        print(inspect_task(job(), InspectOptions(), "cpu").left_out[{name!r}])
        print(refused({technique}))
        print(refused())
        """,
    )
    found, in_plan, stock = said.splitlines()
    assert re.fullmatch(rf"torch \S+ has no {re.escape(part)} as torch {TRIED['torch']} has", found)
    assert in_plan.startswith(f"settings.{name}: {found}.")
    assert stock == "applied"


@pytest.mark.slow
def test_without_fake_tensors_memory_is_found_by_real_steps_and_the_reason_told():
    said = without(
        NO_FAKES,
        """
        from autotune.estimates.max_batch import estimate
        from autotune.estimates import EstimateOptions
        found = estimate(job(), EstimateOptions(reference_batch=4))
        print(found.how, found.reason, sep='|')
        print(lost_techniques())
        """,
    )
    first, techniques = said.splitlines()
    how, reason = first.split("|")
    assert how == "probed"
    assert "has no torch._subclasses.fake_tensor.FakeCopyMode" in reason
    assert techniques == "{}"


@pytest.mark.slow
def test_a_script_is_not_run_with_a_plan_that_its_torch_would_not_heed():
    said = without(
        UNHEEDED,
        """
        from autotune.script.plan.hooks import ScriptHooks
        from types import SimpleNamespace
        try:
            ScriptHooks(SimpleNamespace(plan=Plan(settings=Settings()))).install()
        except SystemExit as ended:
            print(ended.code, ended.reason)
        """,
    )
    assert said.startswith("2 torch")
    assert "_compiled_call_impl" in said


@pytest.mark.slow
def test_doctor_names_a_part_that_is_gone_and_what_happens_without_it():
    said = without(NO_HOOKS, "from autotune.cli.tasks import doctor; doctor()")
    line = next(row for row in said.split("Missing here")[1].splitlines() if "layers" in row)
    assert "layers" in line
    assert "_top_saved_tensors_default_hooks" in said.split("Missing here")[1]


# State.

_CHANGES = re.compile("append|add|update|pop|clear|setdefault|discard|remove|extend|insert|set|reset")


def module_names(path: Path) -> set[str]:
    """Variables of a module."""
    targets = [node.targets for node in tree_of(path).body if isinstance(node, ast.Assign)]
    targets += [[node.target] for node in tree_of(path).body if isinstance(node, ast.AnnAssign)]
    return {one.id for row in targets for one in row if isinstance(one, ast.Name)}


def stored(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement stores to, or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AugAssign(target=target):
            yield target


def changed_variables(path: Path) -> Iterator[str]:
    """Of a module: assigned by ``global``, changed in place, or a lock that is taken."""
    names = module_names(path)
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Global(names=words):
                yield from words
            case ast.Call(func=ast.Attribute(attr=attr, value=ast.Name(id=name))) if (
                name in names and _CHANGES.fullmatch(attr)
            ):
                yield name
            case ast.With(items=items):
                yield from (ast.unparse(one.context_expr) for one in items if ast.unparse(one.context_expr) in names)
        for target in stored(node):
            if isinstance(target, ast.Subscript | ast.Attribute) and isinstance(target.value, ast.Name):
                yield from {target.value.id} & names


def replaced(path: Path) -> Iterator[str]:
    """What a file puts in the place of another library's, or has called for every object."""
    tree, own = tree_of(path), module_names(path)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="patch"), args=[owner, ast.Constant(value=name), *_]):
                yield f"{ast.unparse(owner)}.{name}"
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=owner), *_]) if owner in imported:
                yield "setattr"
            case ast.Call(func=ast.Name(id=name)) if name.startswith("register_") and name in imported:
                yield name
        for target in stored(node):
            place = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(place, ast.Attribute) and ast.unparse(place).split(".")[0] in imported - own:
                yield ast.unparse(place)


def kept_results(path: Path) -> Iterator[str]:
    """Functions of a module with a cache."""
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(one) for one in node.decorator_list):
            yield node.name


EVERY = sorted([*SOURCES, *(PACKAGE / "internals").glob("p*.py")])


@pytest.mark.parametrize(
    ("find", "listed"), [(changed_variables, VARIABLES), (kept_results, CACHES)], ids=["variables", "caches"]
)
def test_state_of_a_module_is_listed(find, listed):
    assert {f"{of(path)}:{name}" for path in EVERY for name in find(path)} == listed.keys()


def test_what_is_replaced_in_other_libraries_is_listed():
    """By a call that the code shows; some owners are known at run time alone."""
    found = {f"{of(path)}:{name}" for path in EVERY for name in replaced(path)}
    assert found - REPLACED.keys() == set()
    assert {row for row in REPLACED.keys() - found if not row.endswith(":setattr")} == set()


def test_attributes_on_a_users_objects_are_listed():
    found = {word for path in EVERY for word in re.findall(r"\b_autotune_[a-z_]+\b", path.read_text())}
    assert found == MARKS.keys()
