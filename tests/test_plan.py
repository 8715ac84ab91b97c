"""Plans as files: exact round trips, the committed schema, and what a hostile or mistaken file is answered with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.errors import PlanError, SpaceError
from autotune.files import replacing
from autotune.plan import Budget, Gain, Plan, TaskRef, load_plan
from autotune.schemas import SCHEMAS, schema_text
from autotune.search_spaces import SearchSpace, load_space, presets
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.techniques.support.facts import Identity, ReadLoader

GOLDEN = Path(__file__).parent / "golden" / "plan.yaml"
PACKAGE = Path(autotune.__file__).parent
HEAD = "schema: autotune/plan@1\n"


def test_the_golden_plan_is_written_back_to_the_letter():
    assert load_plan(GOLDEN).to_yaml() == GOLDEN.read_text()


def test_the_golden_plan_says_what_its_rows_say():
    plan = load_plan(GOLDEN)
    assert plan.budget.limit == 8 * 2**30
    assert plan.settings.batch == Batch(micro=64, accumulate=4)
    assert plan.settings.precision == Precision(kind="bf16")
    assert plan.gain == Gain(speed=2.31, memory=0.74)
    assert plan.reference is not None
    assert not plan.reference.fits


def test_a_saved_plan_is_read_back_equal(tmp_path: Path):
    plan = Plan(settings=Settings(batch=Batch(micro=3)), budget=Budget(limit=123_456_789, margin=0.1), notes=("a: b",))
    plan.save(tmp_path / "new" / "plan.yaml")
    assert load_plan(tmp_path / "new" / "plan.yaml") == plan


def test_a_plan_of_a_script_that_reads_a_stream_is_read_back_equal():
    """The stream does not say how long it is, and what is None is not written."""
    loader = ReadLoader(place=0, dataset="Stream", length=None)
    identity = Identity(model="1 block", names="9c1f5a02", batch="", loaders=(loader,))
    plan = Plan(
        settings=Settings(), task=TaskRef(source="train.py", fingerprint=f"sha256:{64 * '0'}", identity=identity)
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_gain_that_is_not_known_is_null_with_its_reason():
    plan = Plan(settings=Settings(), gain=Gain(speed=None, memory=None, reason="it did not fit"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert yaml.safe_load(plan.to_yaml())["gain"] == {"speed": None, "memory": None, "reason": "it did not fit"}


def test_a_technique_at_the_users_own_setting_has_no_row():
    plan = Plan(settings=Settings(batch=Batch(micro=3), precision=Precision(kind="default")))
    assert yaml.safe_load(plan.to_yaml())["settings"] == {"batch": {"micro": 3}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_is_current(name: str):
    """`python -m autotune.schemas` writes it."""
    assert (PACKAGE / name).read_text() == schema_text(SCHEMAS[name])


@pytest.mark.parametrize("path", [GOLDEN, *(PACKAGE / "search_spaces" / f"{name}.yaml" for name in presets())])
def test_the_committed_schemas_accept_our_own_files(path: Path):
    data = yaml.safe_load(path.read_text())
    jsonschema = pytest.importorskip("jsonschema")
    kind = data["schema"].removeprefix("autotune/").partition("@")[0]
    jsonschema.validate(data, json.loads((PACKAGE / f"{kind}.schema.json").read_text()))


@pytest.mark.parametrize(
    ("name", "rows"), [("plan.schema.json", "settings: {precison: {}}"), ("space.schema.json", "precison: auto")]
)
def test_the_committed_schemas_refuse_an_unknown_technique(name: str, rows: str):
    jsonschema = pytest.importorskip("jsonschema")
    version = name.partition(".")[0]
    data = yaml.safe_load(f"schema: autotune/{version}@1\n{rows}")
    with pytest.raises(jsonschema.ValidationError, match="precison"):
        jsonschema.validate(data, json.loads((PACKAGE / name).read_text()))


@pytest.mark.parametrize(
    "rows",
    [
        "budget: {limit: -5}",
        "budget: {limit: 0}",
        "budget: {limit: [1]}",
        "settings: {batch: {micro: true}}",
        "gain: {speed: nanx, memory: 1.0x}",
        "gain: {speed: -1.0x, memory: 1.0x}",
        "settings: {data_loading: {num_workers: 1000000}}",
        "settings: {data_loading: {num_workers: 4, prefetch_factor: 1000000000}}",
        "search: {trials: -1, seconds: 1, stopped: '', study: '', sampler: gain, seed: 0}",
    ],
)
def test_numbers_that_measure_nothing_are_refused(rows: str):
    with pytest.raises(PlanError, match=rows.split(":")[0]):
        Plan.from_yaml(HEAD + (rows if rows.startswith("settings") else f"settings: {{}}\n{rows}") + "\n")


MANY = "9" * 400


@pytest.mark.parametrize(
    "rows",
    [
        f"budget: {{limit: {MANY}}}",
        f"gain: {{speed: {MANY}, memory: 1.0x}}",
        f"gain: {{speed: '{MANY}x', memory: 1.0x}}",
        f"budget: {{limit: 0x{MANY}}}",
        f"notes: [{MANY}]",
        "budget: {margin: .nan}",
        "budget: {limit: -.inf}",
        "gain: {speed: 1.0e+300, memory: 1.0x}",
        f"search: {{trials: 1, seconds: 1, stopped: '', study: '', sampler: gain, seed: '{MANY}'}}",
    ],
)
def test_a_number_that_nothing_has_is_refused_wherever_it_stands(rows: str):
    with pytest.raises(PlanError, match=r"no number that anything here has|gain.speed|search.seed") as caught:
        Plan.from_yaml(f"{HEAD}settings: {{}}\n{rows}\n", "here.yaml")
    assert len(str(caught.value)) < 250


@pytest.mark.medium
def test_of_many_mistakes_the_first_twenty_are_told():
    rows = "".join(f"  technique_{number}: {{}}\n" for number in range(5000))
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(f"{HEAD}settings:\n{rows}", "here.yaml")
    *lines, last = str(caught.value).splitlines()
    assert len(lines) == 20
    assert last == "here.yaml: … and more: 5000 problems in all"


def test_a_mistake_of_any_length_is_one_short_line_that_a_terminal_only_shows():
    key = "\\e[31m\\u202E" + "x" * 900
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(f'{HEAD}settings: {{"{key}": 1, precision: {{kind: "{key}"}}}}', "here.yaml")
    lines = str(caught.value).splitlines()
    assert [line for line in lines if len(line) > 450 or not line.isprintable()] == []  # one names all techniques
    assert r"settings.\x1b[31m\u202exxx" in lines[-1]


BOMB = "a: &a [x, x]\n" + "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]" for i in range(9))

NOT_PLAIN = [
    ("!!python/object/apply:os.system ['true']", "not plain YAML.*python/object"),
    ("settings: !!python/object:autotune.plan.Plan {}", "not plain YAML.*python/object"),
    (BOMB, "aliases are not allowed"),
    ("settings: {}\nsettings: {}", "a key stands twice"),
    ("settings: [", "not plain YAML"),
    ("[" * 5000, "not plain YAML"),
    ("- 1", "expected a mapping with `schema`, but got list"),
    ("", "expected a mapping with `schema`, but got NoneType"),
    ("x" * (2**18 + 1), "at most 262144 characters"),
]

NOT_A_PLAN = [
    ("settings: {distilling: {kind: magic}}", "settings.distilling: unknown key. Use one of: batch, precision"),
    ("settings: {precision: {kind: fp8}}", "settings.precision.kind: .*'bf16'.*but got 'fp8'"),
    ("settings: {precision: {kind: bf16, knid: 1}}", "settings.precision.knid: unknown key. Use one of: kind"),
    ("settings: {batch: {micro: 0}}", "settings.batch.micro: .*greater than 0, but got 0"),
    (
        "settings: {batch: {micro: 4, accumulate: 2, effective: 9}}",
        "settings.batch: effective: .*hold 5 to 7 samples.*but got 9",
    ),
    ("settings: {}\nbudget: {limit: much}", "budget.limit: not a size: 'much'"),
    ("settings: {}\ntask: {source: a.py, fingerprint: none}", "task.fingerprint: .*but got 'none'"),
    ("{}", "settings: Field required"),
]


@pytest.mark.parametrize(("text", "message"), NOT_PLAIN, ids=range(len(NOT_PLAIN)))
@pytest.mark.parametrize(("model", "error"), [(Plan, PlanError), (SearchSpace, SpaceError)])
def test_a_hostile_file_is_refused_unread(
    model: type[Plan] | type[SearchSpace], error: type[Exception], text: str, message: str
):
    with pytest.raises(error, match=f"here.yaml: .*{message}"):
        model.from_yaml(text, "here.yaml")


@pytest.mark.parametrize(("text", "message"), NOT_A_PLAN, ids=range(len(NOT_A_PLAN)))
def test_a_mistake_is_answered_with_its_place_and_what_is_valid(text: str, message: str):
    with pytest.raises(PlanError, match=f"here.yaml: {message}"):
        Plan.from_yaml(text, "here.yaml")


def test_a_later_format_is_refused_with_the_one_that_is_read():
    with pytest.raises(PlanError, match=r"schema: .*autotune/plan@1.*but got 'autotune/plan@2'"):
        Plan.from_yaml("schema: autotune/plan@2\nsettings: {}")


def test_no_such_plan_names_the_command_that_writes_one(tmp_path: Path):
    with pytest.raises(PlanError, match=r"no such file. `autotune search"):
        load_plan(tmp_path / "plan.yaml")


def test_a_folder_is_no_plan(tmp_path: Path):
    with pytest.raises(PlanError, match="is no bundle of plans"):
        load_plan(tmp_path)


@pytest.mark.parametrize(("read", "error"), [(load_plan, PlanError), (load_space, SpaceError)])
def test_what_has_no_end_is_refused_unread(read: Callable[[str], object], error: type[Exception], tmp_path: Path):
    """A device, a pipe that nobody writes to, a file of a terabyte."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(2**40)
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path / "large"):
        with pytest.raises(error, match=r"cannot be read as .*(a regular file was expected|more than 262144 bytes)"):
            read(str(path))


@pytest.mark.parametrize("path", ["x" * 5000, "plan\0.yaml", "x/" * 3000])
def test_a_path_that_no_file_can_have_is_refused(path: str):
    with pytest.raises(PlanError, match="cannot be read as a plan") as caught:
        load_plan(path)
    assert len(str(caught.value)) < 200


def test_bytes_that_are_no_text_are_no_plan(tmp_path: Path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read as a plan"):
        load_plan(tmp_path / "plan.yaml")


def test_a_path_that_cannot_be_written_leaves_what_is_there(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlanError, match="cannot be written"):
        Plan(settings=Settings()).save(tmp_path / "file" / "plan.yaml")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("before", [None, "mine"])
def test_a_writer_that_is_killed_leaves_nothing(before: str | None, tmp_path: Path):
    """By SIGKILL once everything is written but the name."""
    path = tmp_path / "plan.yaml"
    if before is not None:
        path.write_text(before)
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        Plan(settings=Settings()).save(path)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert os.listdir(tmp_path) == ([] if before is None else ["plan.yaml"])
    Plan(settings=Settings()).save(path)
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_what_a_killed_writer_had_to_leave_goes_with_the_next_write(tmp_path: Path):
    """Where a file needs a name while it is written (a trace; some file systems); that of a living writer stays."""
    pid = os.fork()
    if pid == 0:
        with replacing(tmp_path / "trace.json", PlanError):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = os.listdir(tmp_path)
    with replacing(tmp_path / "other.json", PlanError) as living:
        Plan(settings=Settings()).save(tmp_path / "plan.yaml")
        assert living.exists()
        assert left not in os.listdir(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["other.json", "plan.yaml"]


def test_a_plan_is_written_where_no_file_can_be_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    Plan(settings=Settings()).save(tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == Plan(settings=Settings())
    assert os.listdir(tmp_path) == ["plan.yaml"]
