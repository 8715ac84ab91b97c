"""Which GPUs a machine has and which of them a process may use, as NVML and CUDA's driver tell it."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from autotune.batch.jobs import Jobs
from autotune.commands import where
from autotune.commands.batch import executors_for
from autotune.commands.where import default_device
from autotune.errors import UserError
from autotune.report.doctor import examine
from autotune.searches.options import SearchOptions
from autotune.units import MIB
from autotune.workers import cuda_driver, devices
from autotune.workers.devices import Gpu, installed_gpus, torch_builds, visible_gpus, why_no_gpu
from autotune.workers.local import LocalExecutor


class Card(NamedTuple):
    """A GPU of the machine: its instances where it is split."""

    gpu: Gpu
    instances: tuple[Gpu, ...] | None = None
    """None of a kind that cannot be split."""


def named(number: int, name: str, gib: int, kind: str = "GPU") -> Gpu:
    return Gpu(f"{kind}-{uuid.UUID(int=number)}", f"NVIDIA {name}", gib * 1024 * MIB)


GTX, RTX = named(1, "GeForce GTX 1060", 6), named(2, "GeForce RTX 4090", 24)
WHOLE = named(3, "A100-SXM4-40GB", 40)
SMALL, LARGE = named(4, "A100-SXM4-40GB MIG 1g.5gb", 5, "MIG"), named(5, "A100-SXM4-40GB MIG 3g.20gb", 20, "MIG")


class Errors(Exception):
    """NVML's."""


class NotFound(Errors):
    """NVML's, of a place without an instance."""


def nvml(cards: Sequence[Card]) -> SimpleNamespace:
    """pynvml over these; a GPU without memory of its own says so."""

    def mig_mode(card: Card) -> list[int]:
        if card.instances is None:
            raise Errors("Not Supported")
        return [int(bool(card.instances)), 0]

    def instance(card: Card, place: int) -> Card:
        if place % 2 or place // 2 >= len(card.instances or ()):
            raise NotFound
        return Card((card.instances or ())[place // 2])

    def memory(card: Card) -> SimpleNamespace:
        if not card.gpu.memory_bytes:
            raise Errors("Not Supported")
        return SimpleNamespace(total=card.gpu.memory_bytes)

    return SimpleNamespace(
        NVMLError=Errors,
        NVMLError_NotFound=NotFound,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda number: cards[number],
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda card: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetName=lambda card: card.gpu.name,
        nvmlDeviceGetUUID=lambda card: card.gpu.uuid,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., None]:
    """This machine has these cards, and CUDA, which sees what is said: ``machine(cards, CUDA_VISIBLE_DEVICES,
    cuda)``."""

    def has(cards: Sequence[Card], chosen: str | None = None, cuda: Sequence[Gpu] | None = None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml(cards))
        monkeypatch.setattr(devices, "_DEV", tmp_path)
        (tmp_path / "nvidiactl").touch()
        if chosen is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

        def said() -> str:
            assert cuda is not None, "NVML tells it, and CUDA is not to be asked"
            return "".join(f"{gpu.uuid}\t{gpu.name}\t{gpu.memory_bytes - 1}\n" for gpu in cuda)

        monkeypatch.setattr(devices, "_said_by_cuda", said)

    return has


def test_a_split_gpu_is_its_instances_beside_the_whole_ones(machine):
    """Each by its own name and memory, wherever there is a gap between them."""
    machine([Card(WHOLE, ()), Card(named(6, "A100-SXM4-40GB", 40), (SMALL, LARGE)), Card(GTX)])
    assert installed_gpus() == visible_gpus() == (WHOLE, SMALL, LARGE, GTX)


@pytest.mark.parametrize(("name", "gpu"), [("1g.5gb", SMALL), ("3g.20gb", LARGE), ("A100-SXM4-40GB, 40", WHOLE)])
def test_an_instance_is_chosen_by_its_profile(machine, torch_for, name, gpu):
    torch_for(cuda="13.0")
    machine([Card(WHOLE, ()), Card(named(6, "A100-SXM4-40GB", 40), (SMALL, LARGE))])
    with LocalExecutor("cuda", name) as executor:
        assert executor.device_type == gpu.type
        assert [slot.name for slot in executor._slots] == [gpu.uuid]


def test_a_number_is_cudas(machine, torch_for):
    """It counts the fastest first: the card at the first place on the bus is its second."""
    torch_for(cuda="13.0")
    machine([Card(GTX), Card(RTX)], chosen="0", cuda=[RTX])
    assert visible_gpus() == (RTX,)
    with LocalExecutor("cuda", "4090") as executor:
        assert executor._slots[0].environment["CUDA_VISIBLE_DEVICES"] == RTX.uuid


def test_uuids_need_no_cuda(machine):
    """Nor do their beginnings."""
    machine([Card(GTX), Card(RTX), Card(WHOLE, (SMALL, LARGE))], chosen=f"{RTX.uuid[:-2]},{LARGE.uuid}, {SMALL.uuid}")
    assert visible_gpus()[1:] == (LARGE, SMALL)


@pytest.mark.parametrize("chosen", ["", "-1", "NoDevFiles", "GPU-f"])
def test_what_cuda_does_not_see_is_not_there(machine, chosen):
    machine([Card(GTX)], chosen, cuda=[])
    assert visible_gpus() == ()


def test_without_nvml_cuda_names_them(machine):
    """A container whose driver came without its tools; a Jetson, which has no memory of its own."""
    machine([], cuda=[RTX])
    assert visible_gpus() == (RTX._replace(memory_bytes=RTX.memory_bytes - 1),)
    machine([Card(named(7, "GB10", 0))], cuda=[GTX])
    assert visible_gpus() == (GTX._replace(memory_bytes=GTX.memory_bytes - 1),)


def test_without_a_drivers_file_nobody_is_asked(machine, tmp_path):
    machine([])
    (tmp_path / "nvidiactl").unlink()
    assert visible_gpus() == ()


class Driver:
    """CUDA's driver over these, as ctypes calls it."""

    def __init__(self, gpus: Sequence[Gpu], fails: int = 0) -> None:
        self._gpus, self._fails = gpus, fails

    def cuInit(self, flags: int) -> int:
        return self._fails

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> None:
        device._obj.value = number

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> None:
        name.value = self._gpus[device.value].name.encode()

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> None:
        memory._obj.value = self._gpus[device.value].memory_bytes

    def cuDeviceGetUuid_v2(self, identity: Any, device: ctypes.c_int) -> None:
        identity[:] = uuid.UUID(self._gpus[device.value].uuid[4:]).bytes


def test_cuda_tells_uuid_name_and_bytes():
    found = [*cuda_driver.rows(Driver([RTX, SMALL]))]
    assert found == [f"{gpu.uuid}\t{gpu.name}\t{gpu.memory_bytes}" for gpu in (RTX, SMALL)]
    assert [*cuda_driver.rows(Driver([RTX], fails=100))] == []


def test_the_program_needs_no_package_and_no_driver(tmp_path):
    """It says nothing where there is none."""
    ended = subprocess.run([sys.executable, "-I", cuda_driver.__file__], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


VERSION = """\
from typing import Optional
__version__ = '2.13.0'
cuda: Optional[str] = {cuda!r}
git_version = 'cuda'
hip: Optional[str] = {hip!r}
xpu: Optional[str] = {xpu!r}
"""
"""torch/version.py, as torch's tools/generate_torch_version.py writes it."""


@pytest.fixture
def torch_for(monkeypatch, tmp_path):
    """The installed torch is one that is built so."""
    find = devices.importlib.util.find_spec  # a library that is imported meanwhile asks for others

    def build(**builds):
        none = dict.fromkeys(("cuda", "hip", "xpu"))
        (tmp_path / "version.py").write_text(VERSION.format(**{**none, **builds}))
        spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec if name == "torch" else find(name))

    return build


def test_what_torch_is_built_for_is_read_without_it(torch_for, monkeypatch):
    """The version of conda's and of aarch64's build for CPUs has no "+cpu" in it."""
    torch_for()
    assert torch_builds() == {}
    torch_for(cuda="13.0")
    assert torch_builds() == {"cuda": "13.0"}
    torch_for(hip="6.4.43482")
    assert torch_builds() == {"hip": "6.4.43482"}
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert torch_builds() == {}


NO_CUDA = (
    "torch has no CUDA here, but a GPU is (NVIDIA GeForce GTX 1060). Install torch's CUDA build: https://pytorch.org."
)


@pytest.mark.parametrize(
    ("builds", "cards", "chosen", "cuda", "why"),
    [
        ({"cuda": "13.0"}, [Card(GTX)], None, None, None),
        ({"cuda": "13.0"}, [Card(GTX)], "0", [GTX], None),
        ({"cuda": "13.0"}, [Card(GTX)], "-1", [], None),
        ({"cuda": "13.0"}, [Card(GTX)], "", [], None),
        ({}, [Card(GTX)], None, None, NO_CUDA),
        (
            {"cuda": "13.0"},
            [Card(GTX)],
            "7",
            [],
            f"CUDA sees no GPU with CUDA_VISIBLE_DEVICES=7. Unset it, or name one of these: {GTX.uuid} ({GTX.name}).",
        ),
        ({"cuda": "13.0"}, [], None, [], "neither NVML nor CUDA finds a GPU by it. See whether `nvidia-smi` runs"),
        (
            {"hip": "6.4"},
            [],
            None,
            [],
            "this torch is built for AMD's GPUs (ROCm), which cannot be measured on. CPUs can",
        ),
        ({"xpu": "2025"}, [], None, [], "this torch is built for Intel's GPUs (XPU), which cannot be measured on."),
    ],
)
def test_a_gpu_that_is_left_unused_is_told_with_the_way_out(
    machine, torch_for, capfd, builds, cards, chosen, cuda, why
):
    """A search goes to the CPU then, says so once, and refuses ``--device cuda``."""
    machine(cards, chosen, cuda)
    torch_for(**builds)
    where._say_once.cache_clear()
    kinds = [default_device() for _ in range(2)]
    said = capfd.readouterr().err
    if why is None:
        assert kinds == ["cpu" if chosen in ("", "-1") else "cuda"] * 2
        assert said == ""
        return
    assert kinds == ["cpu", "cpu"]
    assert said.startswith("no GPU is used: ")
    assert said.count("\n") == 1
    assert why in said
    with pytest.raises(UserError, match=re.escape(f"device cuda: {why_no_gpu()}")):
        LocalExecutor("cuda")


def test_a_machine_without_a_gpu_is_told_nothing(machine, torch_for, tmp_path):
    machine([], cuda=[])
    (tmp_path / "nvidiactl").unlink()
    for builds in ({}, {"cuda": "13.0"}):
        torch_for(**builds)
        assert why_no_gpu() is None
    (tmp_path / "kfd").touch()
    assert why_no_gpu() == (
        f"an AMD GPU is here ({tmp_path}/kfd), which cannot be measured on. CPUs can be (--device cpu), and NVIDIA's "
        "GPUs."
    )


def test_apples_gpu_is_told_of(monkeypatch, torch_for):
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    torch_for()
    assert why_no_gpu().startswith("Apple's GPU (MPS) cannot be measured on. CPUs can be")


def test_doctor_lists_no_gpu_that_searches_leave_aside(machine, torch_for, monkeypatch):
    """torch for AMD's GPUs calls them cuda."""
    machine([], cuda=[])
    torch_for(hip="6.4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = examine()
    assert [device["type"] for device in found["devices"]] == ["cpu"]
    assert f"Searches measure the CPU: {why_no_gpu()}" in found["advice"]


THREE = [Card(RTX), Card(RTX._replace(uuid="GPU-b")), Card(RTX._replace(uuid="GPU-c"))]


@pytest.mark.parametrize(("size", "slots"), [(1, 3), (2, 1), (3, 1), (None, 1)])
def test_a_trial_of_several_processes_has_a_gpu_for_each(machine, torch_for, size, slots):
    """What is left over is too few for another trial; where the command states no number, all are one trial's."""
    torch_for(cuda="13.0")
    machine(THREE)
    with LocalExecutor("cuda", gpus_per_trial=size) as executor:
        seen = [slot.environment["CUDA_VISIBLE_DEVICES"].split(",") for slot in executor._slots]
    assert seen == [
        [card.gpu.uuid for card in THREE][at : at + (size or 3)] for at in range(0, slots * (size or 3), size or 3)
    ]


def test_more_processes_than_gpus_are_refused_before_any_trial(machine, torch_for):
    torch_for(cuda="13.0")
    machine(THREE)
    with pytest.raises(UserError, match=r"trains in 4 processes.* a trial has 3 x NVIDIA GeForce RTX 4090"):
        LocalExecutor("cuda", gpus_per_trial=4)
    machine([Card(WHOLE, (SMALL, SMALL._replace(uuid="MIG-b")))])
    with pytest.raises(UserError, match=r"trains in 2 processes.* sees one instance of a split GPU \(MIG\) alone"):
        LocalExecutor("cuda", gpus_per_trial=2)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("python train.py --nproc-per-node 4", 1),
        ("torchrun train.py", 1),
        ("torchrun --nproc-per-node 2 train.py", 2),
        ("torchrun --standalone --nproc_per_node=4 train.py", 4),
        ("python -m torch.distributed.run --nproc-per-node gpu train.py", None),
        ("torchrun --nproc-per-node=auto train.py", None),
        ("accelerate launch --num_processes 2 train.py", 2),
        ("accelerate launch train.py", None),
        ("accelerate launch --cpu train.py", 1),
    ],
)
def test_a_command_says_how_many_gpus_its_trials_take(monkeypatch, tmp_path, command, number):
    """As torchrun (torch/distributed/run.py, determine_local_world_size) and accelerate (commands/launch.py) count:
    without a number, or with gpu, one for each GPU that they see."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    options = SearchOptions(task="train.py", command=tuple(command.split()), device="cuda")
    assert where.Where("local", is_script=True).for_search(options).gpus_per_trial == number
    on_cpu = options.model_copy(update={"device": "cpu"})
    assert where.Where("local", is_script=True).for_search(on_cpu).gpus_per_trial == 1


def test_a_space_says_how_many_gpus_its_trials_take(tmp_path):
    (tmp_path / "space.yaml").write_text("parallel: [{kind: none}, {kind: ddp, processes: 2}]\nbatch: auto\n")
    options = SearchOptions(task="model.py", device="cuda")
    on_two = options.model_copy(update={"space": str(tmp_path / "space.yaml")})
    found = [where.Where("local").for_search(one).gpus_per_trial for one in (options, on_two)]
    assert found == [1, 2]


def test_a_batch_has_the_gpus_of_its_largest_job(machine, torch_for, tmp_path):
    """For each device that jobs ask for; a job that is going to fail asks for none."""
    torch_for(cuda="13.0")
    machine(THREE)
    jobs = [
        {"name": "one", "command": "python train.py"},
        {"name": "two", "command": "torchrun --nproc-per-node 2 train.py"},
        {"name": "bad", "command": "torchrun train"},
    ]
    place = where.Where("local", is_command=False)
    with executors_for(Jobs.model_validate({"jobs": jobs}), tmp_path / "jobs.yaml", place, "cuda") as found:
        assert found["cuda"].num_slots == 1
    with executors_for(Jobs.model_validate({"jobs": jobs[:1]}), tmp_path / "jobs.yaml", place, "cuda") as found:
        assert found["cuda"].num_slots == 3


def test_cards_that_sleep_have_time_to_wake(machine, monkeypatch, tmp_path):
    """Without the driver's persistence mode each takes some seconds, one after the other."""
    machine([Card(GTX), Card(RTX)])
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    asked = []
    monkeypatch.setattr(devices, "ask", lambda question, num_cards: asked.append(num_cards))
    assert installed_gpus() == ()
    assert asked == [8]
