"""A command in mounts of its own, where other users may start this interpreter, and there are users of one's own."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def may_mount() -> bool:
    """Whether this process may have mounts of its own."""
    command = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def passable(users: Mapping[str, int] | None = None, place: Path | None = None) -> tuple[str, ...]:
    """Words before a command, which then sees the interpreter in folders that everybody may pass.

    Args:
        users: names with their numbers, which are users of the system for it.
        place: a folder to keep their list in.
    """
    closed = {
        str(parent): path
        for path in (Path(sys.base_prefix), Path(sys.prefix), ROOT)
        for parent in reversed(path.resolve().parents)
        if not parent.stat().st_mode & 0o001
    }
    script = "".join(
        f"mount --bind {path} /mnt && mount -t tmpfs -o mode=711 none {parent} && mkdir -p {path} && "
        f"mount --move /mnt {path} && "
        for parent, path in closed.items()
    )
    if users and place is not None:
        lines = "".join(f"{name}:x:{uid}:{uid}::/nonexistent:/usr/sbin/nologin\n" for name, uid in users.items())
        (place / "passwd").write_text(Path("/etc/passwd").read_text() + lines)
        script += f"mount --bind {place}/passwd /etc/passwd && "
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", f'{script}exec "$@"', "sh")
