"""The house's walls: what may import what, and two roots in one package."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune"

FLOORS = (
    ("__main__",),
    ("cli", "api"),
    ("commands", "schemas"),
    ("integrations", "service"),
    ("report", "testing"),
    ("results",),
    ("batch",),
    ("searches",),
    ("script",),
    ("fitting",),
    ("words",),
    ("workers",),
    ("estimates",),
    ("measure",),
    ("training",),
    ("task_file",),
    ("plan", "search_spaces", "task"),
    ("data",),
    ("ranks",),
    ("techniques",),
    ("layers", "pruning"),
    ("bundle",),
    ("plain_yaml", "device_memory"),
    ("distribution", "files", "internals", "nested", "randomness"),
    ("units", "errors"),
)
"""From the roof down: a part imports from the floors below its own."""
LEVEL = {part: level for level, parts in enumerate(FLOORS) for part in parts}

SOURCES = sorted(
    {
        path.relative_to(ROOT)
        for folder in (PACKAGE, PACKAGE / "workers", PACKAGE / "search_spaces")
        for path in folder.rglob("*.py")
    }
)
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def imports(path: Path) -> Iterator[str]:
    """Full names of every module that a file imports, at its top or inside a function."""
    package = [*path.with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            if node.module:
                yield ".".join([*base, node.module])
            else:
                yield from (".".join([*base, alias.name]) for alias in node.names)


def files(path: Path) -> set[Path]:
    """Ours that a file imports: a module that it names itself, what it takes of another, and what ``import_module`` is
    given as text."""
    package, names = [*path.with_suffix("").parts][:-1], [*imports(path)]
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = package[: len(package) - node.level + 1] if node.level else []
            names += (".".join([*base, node.module, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            told = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            names.append(importlib.util.resolve_name(told, ".".join(package)))
    modules = (MODULES.get(name) or MODULES.get(name.rpartition(".")[0]) for name in names)
    return {module for module in modules if module is not None} - {path}


def part_of(name: str) -> str | None:
    """``plan`` of ``autotune.plan``; None for other packages and for ``autotune`` itself."""
    head, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if head == "autotune" and part not in ("", "__init__", "__version__") else None


def run(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_every_part_has_a_floor():
    """A new module says where it belongs."""
    parts = {part for path in SOURCES if (part := part_of(".".join(path.with_suffix("").parts)))}
    assert parts == LEVEL.keys()


def test_the_wheel_has_every_package():
    """It holds those alone that pyproject.toml names, while a checkout has all."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {*named} == {".".join(path.parent.parts) for path in SOURCES if path.name == "__init__.py"}


def test_the_picture_of_the_architecture_has_the_floors():
    """In their order: of each line the parts, before their description; on an indented line below, their folders."""
    page = (ROOT / "docs" / "inside" / "architecture.md").read_text(encoding="utf-8")
    picture = page.partition("```text\n")[2].partition("```")[0]
    drawn = re.findall(r"^([^\s,]+(?:, [^\s,]+)*).*\n((?: .*\n)?)", picture, re.M)
    folders = ((part, (PACKAGE / part).glob("*/__init__.py")) for floor in FLOORS for part in floor)
    held = {part: {path.parent.name for path in found} for part, found in folders}
    assert [(tuple(parts.split(", ")), set(re.findall(r"(\w+)/", below))) for parts, below in drawn] == [
        (floor, set().union(*(held[part] for part in floor))) for floor in FLOORS
    ]


def test_what_the_architecture_names_is_where_it_says():
    """``Budget.holds`` of `plan.py` is a name that is defined there, as is the class that it belongs to."""
    page = (ROOT / "docs" / "inside" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?!tests/)[\w/]+\.py)`((?:(?: \(|, )`(?!\w+\.py)[\w.]+`)*)", page)
    assert len(named) > 50
    missing = []
    for file, names in named:
        text = (PACKAGE / file).read_text(encoding="utf-8")
        parts = {part for name in re.findall(r"[\w.]+", names) for part in name.split(".")}
        missing += [f"{part} in {file}" for part in parts if not re.search(rf"(def|class) {part}\b", text)]
    assert missing == []


def test_no_folder_has_more_than_sixteen_modules():
    """Without those that are a package's own, such as ``__init__``."""
    held = Counter(path.parent for path in SOURCES if not path.stem.startswith("_"))
    assert {str(folder): count for folder, count in held.items() if count > 16} == {}


@pytest.mark.medium
def test_imports_point_down():
    """Also inside functions and for annotations."""
    wrong = [
        f"{path} imports {name}"
        for path in SOURCES
        for name in imports(path)
        if (own := part_of(".".join(path.with_suffix("").parts))) and (part := part_of(name)) and part != own
        if LEVEL[part] <= LEVEL[own]
    ]
    assert wrong == []


@pytest.mark.medium
def test_no_files_import_each_other_in_a_circle():
    """Also inside functions, for annotations and by ``import_module``. The face of ``techniques`` is left out: a
    technique names ``Settings`` for annotations, which is made of all of them."""
    arrows = {path: files(path) - {Path("autotune/techniques/__init__.py")} for path in SOURCES}
    circle = []
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as found:
        circle = [str(path) for path in found.args[1]]
    assert not circle, circle


@pytest.mark.medium
def test_no_rooms_of_a_part_import_each_other_in_a_circle():
    """``searches/store`` knows neither the sampler nor the predictions that are kept in it. What lies beside the rooms
    is of all of them."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for other in files(path):
            if path.parts[:2] == other.parts[:2] and len(path.parts) > 3 and len(other.parts) > 3:
                arrows["/".join(path.parts[:3])].add("/".join(other.parts[:3]))
    TopologicalSorter({room: others - {room} for room, others in arrows.items()}).prepare()


def test_a_technique_sees_its_base_and_its_facts_alone():
    """Techniques know nothing of each other but the settings that one may conflict with: their order is apply's."""
    support = (f"techniques.support.{name}" for name in ("base", "lossy", "facts"))
    on_modules = ("recomputed", "forwards", "elsewhere")
    recomputed, forwards, elsewhere = (f"autotune.techniques.support.{name}" for name in on_modules)
    in_bits = ("kept_state", "saved_state", "stores", "weight_codes", "freezing", "frozen_weight", "host_step", "flat")
    parts = (f"autotune.techniques.support.bits.{name}" for name in in_bits)
    kept, saved, stores, codes, freezing, frozen, host, flat = parts
    int8, float8 = (f"autotune.techniques.support.bits.{name}_linear" for name in ("int8", "float8"))
    rows, apart = (f"autotune.techniques.support.{name}" for name in ("rows", "apart"))
    on_disk = (
        "unnamed_file",
        "kept_content",
        "kept_on_host",
        "block_order",
        "offloaded_weight",
        "offloading",
        "copies",
        "updating",
    )
    file, content, on_host, order, offloaded, offloading, copies, updating = (
        f"autotune.techniques.support.disk.{name}" for name in on_disk
    )
    places = [f"autotune.techniques.support.disk.saved_{where}" for where in ("elsewhere", "to_disk", "to_host")]
    saved_elsewhere, pinned = places[0], "autotune.techniques.support.pinned"
    of_reversible = (f"autotune.techniques.support.reversible.{name}" for name in ("calls", "pair", "coupling"))
    calls, pair, coupling = of_reversible
    below = ("internals.fake_tensors", "errors", "units")
    allowed = {f"autotune.{name}" for name in (*support, "techniques.Settings", *below)}
    for path in (PACKAGE / "techniques").rglob("[a-z]*.py"):
        ours = {name for name in imports(path.relative_to(ROOT)) if name.startswith("autotune")}
        own = {
            "layers": ["autotune.layers"],
            "pruning": ["autotune.pruning"],
            "low_rank": ["autotune.pruning"],
            "checkpointing": [recomputed, forwards],
            "recomputed": [forwards],
            "reversible": [forwards, pair, coupling],
            "coupling": [calls, pair],
            "pair": [calls, recomputed, "autotune.techniques.checkpointing", "autotune.nested"],
            "calls": [recomputed],
            "compile": [recomputed],
            "frozen_weights": [freezing],
            "quantization": [freezing, int8],
            "freezing": [frozen, codes, elsewhere],
            "frozen_weight": [codes, elsewhere],
            "weight_codes": [stores],
            "tiles": [recomputed, "autotune.techniques.support.feed_forward"],
            "split": ["autotune.techniques.support.feed_forward"],
            "offload": [forwards, offloading, *places],
            "saved_to_disk": [file, saved_elsewhere],
            "saved_to_host": [copies, saved_elsewhere, forwards],
            "copies": [file, saved_elsewhere, pinned],
            "offloading": [offloaded, content, on_host, elsewhere],
            "offloaded_weight": [content, elsewhere],
            "kept_content": [file],
            "kept_on_host": [content, offloaded, copies, order, saved_elsewhere, pinned, file],
            "block_order": [copies],
            "optimizer_state": [kept, saved],
            "optimizer_step": [kept, updating],
            "updating": [content, offloaded, offloading],
            "sparse_gradients": [rows],
            "lazy_adam": [rows],
            "trained_weights": [kept, "autotune.techniques.support.bits", forwards],
            "rows": [apart],
            "kept_state": [apart, saved, stores, host, flat, elsewhere, updating],
            "host_step": [apart, flat, pinned],
            "saved_state": [stores, elsewhere],
            "parallel": [f"autotune.techniques.support.{one}" for one in ("replica", "split")],
            "precision": [float8, "autotune.techniques.support.tf32"],
            "float8_linear": [int8],
        }
        assert ours <= allowed.union(own.get(path.stem, ())), path.name


TESTED_BENCHMARKS = {
    "test_docs.py": "pages and a picture that benchmarks write",
    "script/test_same_training.py": "ten pairs of benchmarks.same_training",
    "service/test_service_leases.py": "races of benchmarks.service_faults",
    "techniques/test_pruning_places.py": "models of benchmarks.pruning",
}
"""Tests beside ``tests/benchmarks`` that run a part of a benchmark, and which."""


def test_what_tests_share_with_benchmarks_lies_with_the_tests():
    """A benchmark takes a server, a browser and tasks from ``tests``; tests take from it what they test."""
    users = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) benchmarks\b", path.read_text(encoding="utf-8"), re.M)
    }
    assert {name for name in users if not name.startswith("benchmarks/")} == TESTED_BENCHMARKS.keys()


NAMED_ELSEWHERE = {
    ("integrations/lightning/task.py", "optimizer_step"): (1, "a hook of Lightning's modules"),
    ("integrations/lightning/task.py", "optimizer"): (1, "a key of what Lightning's configure_optimizers returns"),
    ("integrations/lightning/task.py", "precision"): (2, "an argument of Lightning's Trainer, and a field of Task"),
    ("integrations/trainer_task.py", "precision"): (1, "a field of Task"),
    ("report/doctor.py", "pruning"): (1, "a group of dependencies in pyproject.toml"),
    ("searches/reuse.py", "precision"): (1, "what a task states: its measurements hold for that alone"),
    ("searches/store/record.py", "precision"): (1, "the same, as --resume tells it"),
    ("training/apply_plan.py", "optimizer"): (1, "an argument of autotune.apply"),
    ("training/resume.py", "optimizer"): (1, "a key of Training.state_dict()"),
    ("training/training.py", "optimizer"): (2, "the same, where it is saved and loaded"),
}
"""Names of techniques as text outside their own room: how often, and what it is there. None of them is the technique;
what a part wants to know of one is a fact that the technique declares."""


@pytest.mark.medium
def test_a_technique_is_named_in_its_own_room_alone():
    """But for words that are also others'; left out are ``batch``, which every job has, and ``optimizer_state``, which
    is a kind of memory too."""
    from autotune.techniques import TECHNIQUES

    others = {*TECHNIQUES} - {"batch", "optimizer_state"}
    named = Counter(
        (str(path.relative_to("autotune")), node.value)
        for path in SOURCES
        if path.parts[1] not in ("techniques", "testing")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in others
    )
    assert named == {where: count for where, (count, _) in NAMED_ELSEWHERE.items()}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("library", "homes"),
    [("optuna", {"searches"}), ("ray", {"workers/_ray_slot.py", "workers/ray_pool.py", "integrations/ray_train.py"})],
)
def test_optuna_and_ray_have_their_homes(library, homes):
    importers = {path for path in SOURCES if any(name.split(".")[0] == library for name in imports(path))}
    assert importers
    stray = [str(path) for path in importers if not any(str(path).startswith(f"autotune/{home}") for home in homes)]
    assert stray == []


CAUGHT = {
    "batch/run.py": "a bug in one job stops no other, and is its state",
    "data/lengths.py": "a user's length: a TaskError that names it; what collates to nothing alone has none",
    "data/packing.py": "a user's model or loss that takes no row of samples: packing is refused, with the reason",
    "data/sameness.py": "a user's dataset that cannot be read alone, or compared, is not cached: told where asked for",
    "estimates/tracing/fake_step.py": "over fake tensors: memory is found by real steps, with the reason",
    "fitting/job.py": "a user's model that does not take its batch: a TaskError that says so",
    "fitting/stand_in.py": "a user's model that cannot be copied: a TaskError that says so",
    "fitting/whole_batch.py": "a user's batch that cannot be copied: a TaskError that says so",
    "measure/life/other_phases.py": "a user's step on a smaller batch, or its samples",
    "layers/equivalent_ops.py": "a layer of the user's that fails on other inputs is none of torch's, and stays",
    "layers/sites.py": "over fake tensors: the structure decides, with a warning",
    "measure/checks/refused.py": "a change that the user's model raises with is left out, with the reason",
    "measure/checks/quality.py": "a user's evaluate: a TaskError that names it",
    "measure/exports/onnx_format.py": "what ONNX cannot hold: told in words",
    "measure/exports/program.py": "a user's infer that torch.export cannot take: words; samples that go into no batch",
    "measure/exports/reload.py": "what a runtime says of a file or a batch: told in words",
    "measure/lengths.py": "a model that cannot take longer samples than were read: they are a stated risk",
    "measure/cuts/judge.py": "a user's model that is cut: that candidate ends, with the reason",
    "measure/cuts/scan.py": "a user's model that is cut: its loss is infinite",
    "measure/timing/loading.py": "a user's dataset that cannot be read in a worker is loaded without: a note",
    "pruning/child.py": "a user's model: a PlanError that names it",
    "pruning/check.py": "a user's model, cut: what it fails in is left whole, with the reason",
    "pruning/surgery.py": "a user's model, or torch-pruning: a PlanError that names it",
    "script/launch.py": "a script: it ends as it would under Python",
    "script/plan/loader_row.py": "a user's dataset: no cache, with the reason",
    "script/trial/extents.py": "a user's batch sampler, and its dataset: what they tell is left out",
    "script/trial/look.py": "a user's dataset that cannot be read alone: its facts stay unknown",
    "service/runner.py": "a bug in one search ends no other, and is logged",
    "service/web/following.py": "all who wait for an answer are told",
    "task.py": "a user's after_step: a TaskError that names it",
    "techniques/support/feed_forward.py": "a user's module, symbolically: it is no feed-forward part",
    "training/halving.py": "a user's step that is out of memory: all else goes up",
    "training/skip_init.py": "a user's model that reads its values is built with them",
    "workers/_ray_slot.py": "Ray raises a plain Exception where a device that is waited for is given back",
    "workers/ray_pool.py": "Ray raises a plain Exception where it does not come up: TrialsLost",
    "workers/trial/child.py": "a trial: whatever ends it is its outcome",
    "workers/trial/traces.py": "a user's exception that cannot say its text",
}
"""Where whatever is raised is kept, and what is done about it."""


def test_what_may_be_anything_is_caught_where_a_users_code_runs_or_a_thread_begins():
    """``except Exception`` stands in the outermost frame of the command line; ``Caught`` where it is listed."""
    tries = [path for path in SOURCES for node in ast.walk(ast.parse((ROOT / path).read_text())) if _is_wide(node)]
    assert [str(path) for path in tries] == ["autotune/cli/main.py"]
    users = {str(path).removeprefix("autotune/") for path in SOURCES if "Caught(" in (ROOT / path).read_text()}
    assert users == CAUGHT.keys()


def _is_wide(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


LIGHT = """
import sys

def loaded_by(what, *heavy):
    print(what, *sorted({'torch', 'optuna', 'ray', 'numpy', *heavy} & set(sys.modules)), sep=': ', file=sys.stderr)

import autotune
loaded_by('import autotune')
from autotune.cli import main
sys.argv, sys.stdout = ['autotune', '--help'], open('/dev/null', 'w')
try: main()
except SystemExit: pass
loaded_by('autotune --help', 'rich')
autotune.load_plan('tests/golden/plan.yaml')
loaded_by('reading a plan')
from autotune.search_spaces import load_space
load_space('default')
loaded_by('reading a space')
import pathlib, autotune.commands.where, autotune.commands.plans.show
autotune.commands.plans.show.show(pathlib.Path('tests/golden/plan.yaml'), False)
loaded_by('showing a plan')
import autotune.commands.plans.run
loaded_by('what runs a job')
import autotune.integrations.lightning, autotune.integrations.ray_train
loaded_by('what to write elsewhere')
import autotune.workers
loaded_by('the worker contract')
"""


def test_torch_optuna_and_ray_are_not_loaded_by_what_needs_none():
    """They take seconds, and a driver may stand where there is no torch."""
    done = run("-c", LIGHT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 8
    assert [line for line in said if ":" in line] == []


@pytest.mark.medium
def test_a_driver_needs_no_torch():
    """The whole search side and every command are imported where importing torch fails."""
    files = (path.relative_to(ROOT).with_suffix("") for path in (PACKAGE / "commands").rglob("[a-z]*.py"))
    commands = ", ".join(".".join(path.parts) for path in files)
    done = run("-c", f"import sys; sys.modules['torch'] = None; import autotune.searches.driver, {commands}", cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["workers", "search_spaces"])
def test_the_second_root_is_a_link_within_the_package(name):
    """Committed as a relative link, so that a clone anywhere has it."""
    link = PACKAGE / name
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["workers", "search_spaces"])
def test_an_accidental_top_level_import_fails(name, tmp_path):
    """Loudly from the checkout's root, where the folder lies; elsewhere there is no such module."""
    at_root, elsewhere = (run("-c", f"import {name}", cwd=cwd) for cwd in (ROOT, tmp_path))
    assert "attempted relative import beyond top-level package" in at_root.stderr
    assert elsewhere.returncode == 1
