"""The image of ``deploy/Containerfile``: built, and used by the commands that its first lines name.

    python -m benchmarks.service_image [--keep]

As root, with Debian's ``buildah`` and ``mmdebstrap``, and with pip's index. No registry of images is asked: the base,
``python:3.11-slim``, is made of the packages of Debian 12, whose Python is 3.11, too. Each command runs in a chroot,
with the machine's network, and the volume is a folder that begins as the image's, as Docker makes it: what Docker,
Podman and their namespaces do besides is not tried. A search is run in it to its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from autotune.service.client import Client
from autotune.workers.process import with_variable

from .rows import save_rows

ROOT = Path(__file__).resolve().parents[1]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
BASE, IMAGE = "docker.io/library/python:3.11-slim", "autotune-service"
_URL = "http://127.0.0.1:8470"
_LONGEST_START_S = 120.0
_MARK = f"AUTOTUNE_IMAGE={os.getpid()}"
"""Environment of what runs in the container, by which it is found."""


class Buildah:
    """Its commands, with images and containers of their own."""

    def __init__(self, folder: Path) -> None:
        self._command = ("buildah", "--root", str(folder / "root"), "--runroot", str(folder / "run"))

    def __call__(self, *arguments: str, **options: Any) -> str:
        """What a command prints.

        Raises:
            subprocess.CalledProcessError: it fails.
        """
        return subprocess.run(self.line(*arguments), check=True, stdout=subprocess.PIPE, text=True, **options).stdout

    def line(self, *arguments: str) -> list[str]:
        """A command's words."""
        return [*self._command, *arguments]


def main() -> None:
    """Build it, use it, print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="add the row to benchmarks/results/service-image-cpu.jsonl")
    arguments = parser.parse_args()
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"not here: {' and '.join(missing)}. Install them: apt-get install buildah mmdebstrap")
    if os.geteuid() != 0:
        raise SystemExit("root was expected: the image's files are made as root's")
    with tempfile.TemporaryDirectory(prefix="autotune-image-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        buildah = Buildah(Path(folder))
        try:
            row = _built(buildah, Path(folder))
            row |= _used(buildah, Path(folder))
        finally:
            buildah("rm", "--all")
            buildah("rmi", "--all", "--force")
    print(json.dumps(row, indent=2))
    if arguments.keep:
        print(save_rows("service-image", "cpu", [row]))
    sys.exit(not all(value for name, value in row.items() if name.startswith("is_")))


def _built(buildah: Buildah, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    packages = "--include=ca-certificates,python3-pip,python-is-python3"
    own = 'rm "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED'  # the base's Python is its user's own
    base = [
        "mmdebstrap",
        "--variant=minbase",
        packages,
        f"--customize-hook={own}",
        "bookworm",
        str(folder / "base.tar"),
    ]
    subprocess.run(base, check=True)
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(folder / "base.tar"), "/")
    buildah("commit", "--quiet", "--rm", container, BASE)
    made = time.monotonic()
    file = ("--file", str(CONTAINERFILE), "--ignorefile", str(ROOT / ".dockerignore"))
    mounts = [f"--volume={path}:{path}:ro" for path in _of_pip()]
    buildah("bud", "--isolation=chroot", "--pull-never", *file, *mounts, "--tag", IMAGE, str(ROOT))
    told = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    return {
        "base_s": round(made - began),
        "build_s": round(time.monotonic() - made),
        "user": told["User"],
        "entrypoint": shlex.join(told["Entrypoint"]),
        "is_without_checkout": "/src" not in _run(buildah, "ls", "/").split(),
    }


def _of_pip() -> list[str]:
    """Where this machine's pip takes packages from, as far as it is here."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {Path("/etc/pip.conf"), *map(Path, re.findall(r"(?<![\w:/])/[\w./-]+|(?<=file://)/[\w./-]+", said.stdout))}
    kept = sorted(path for path in found if path.exists())
    return [str(path) for path in kept if not any(path.is_relative_to(each) for each in kept if each != path)]


def _run(buildah: Buildah, *command: str) -> str:
    """What a command prints in a container of the image."""
    container = buildah("from", "--pull-never", IMAGE).strip()
    return buildah("run", "--isolation=chroot", container, "--", *command)


def _used(buildah: Buildah, folder: Path) -> dict[str, Any]:
    """`docker run` and `docker exec`, as they are written, and a search between."""
    container = buildah("from", "--pull-never", IMAGE).strip()
    volume = folder / "volume"
    shutil.copytree(Path(buildah("mount", container).strip()) / "home/autotune/state", volume)
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    owner = int(config["User"])
    os.chown(volume, owner, owner)
    inside = (f"--env={_MARK}", f"--volume={volume}:{config['WorkingDir']}", "--isolation=chroot", container, "--")
    (run,) = _lines("docker run")
    options = shlex.split(run.partition(f" {IMAGE} ")[2])
    command = buildah.line("run", *inside, *config["Entrypoint"], *options)
    with _running(command, folder / "log") as process:
        said = _until_up(process, folder / "log")
        found = re.search(r"AUTOTUNE_TOKEN=(atn_\S+)", said)
        assert found is not None, said
        with Client(_URL, found[1]) as client:
            (folder / "job").mkdir()
            shutil.copy(ROOT / "tests" / "tasks" / "healthy.py", folder / "job" / "model.py")
            spec = {"task": "model.py", "device": "cpu", "trials": 2, "trial_time": "0.2s", "sampler": "random"}
            search = client.wait(client.submit(folder / "job", **spec)["id"])
        (line,) = _lines("docker exec")
        token = buildah("run", *inside, *shlex.split(line.partition(" exec autotune ")[2])).strip()
        answers = {
            secret: httpx.get(f"{_URL}/v1/searches", headers={"Authorization": f"Bearer {secret}"}).status_code
            for secret in (token, "atn_other")
        }
        (service,) = (each for each in with_variable(_MARK) if os.stat(f"/proc/{each.pid}").st_uid == owner)
        os.kill(service.pid, signal.SIGTERM)  # as `docker stop` does
        code = process.wait(_LONGEST_START_S)
    state = volume / "autotune-service"
    return {
        "is_search_done": search["state"] == "SUCCEEDED",
        "is_token_of_same_state": answers == {token: 200, "atn_other": 401},
        "is_state_its_users": {path.stat().st_uid for path in (state, state / "service.db")} == {owner},
        "is_end_in_order": code == 0,
    }


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _until_up(process: subprocess.Popen[bytes], log: Path) -> str:
    ends = time.monotonic() + _LONGEST_START_S
    while process.poll() is None and time.monotonic() < ends:
        try:
            httpx.get(f"{_URL}/healthz").raise_for_status()
            return log.read_text()
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"the service did not start: {log.read_text()}")


def _lines(word: str) -> list[str]:
    return [line for line in CONTAINERFILE.read_text().splitlines() if line.startswith(f"# {word}")]


if __name__ == "__main__":
    main()
