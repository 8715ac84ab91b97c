"""The user that tasks run as, where it is another than the server's: root's server gives it one search's folder at a
time, takes it back, and ends whatever runs as it."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class User:
    """A user of the service's own."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def process(self) -> dict[str, Any]:
        """What ``Popen`` is given for a process of theirs."""
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups, "umask": 0o077}

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables in place of the server's own, for a search in ``folder``."""
        return {"USER": self.name, "LOGNAME": self.name, "HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp"}

    def give(self, folder: Path) -> None:
        """Give it a search's folder; no process of theirs runs, which could change it meanwhile."""
        for name in ("home", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        folder.chmod(0o700)
        for _, _, files, here in os.fwalk(folder):
            os.chown(here, self.uid, self.gid)
            for name in files:
                if os.stat(name, dir_fd=here, follow_symlinks=False).st_nlink == 1:  # else it may be another's file
                    os.chown(name, self.uid, self.gid, dir_fd=here, follow_symlinks=False)

    def end_all(self) -> None:
        """SIGKILL to all that runs as it."""
        command = ["sh", "-c", "kill -s KILL -- -1"]
        subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, **self.process)

    def check(self, program: Sequence[str], folder: Path) -> None:
        """Start ``autotune`` as it.

        Raises:
            UserError: it cannot.
        """
        try:
            ended = subprocess.run([*program, "--version"], cwd=folder, capture_output=True, text=True, **self.process)
        except OSError as reason:
            said = str(reason)
        else:
            said = (
                "" if ended.returncode == 0 else ended.stderr.strip().rpartition("\n")[2] or "it ended without a word"
            )
        if said:
            raise UserError(
                f"--run-as {self.name}: it cannot start {program[0]} in {folder}: {said}. Let it pass through "
                "all folders above both (chmod o+x), and read Python's."
            )


def take_back(folder: Path) -> None:
    """Nobody but the server has a search's folder any more."""
    os.chown(folder, os.geteuid(), os.getegid(), follow_symlinks=False)
    folder.chmod(0o700)


def let_pass(state: Path, user: User) -> None:
    """Let the user through to a search's folder, once one is given to it, and to nothing else; of an earlier server's
    tasks nothing runs on."""
    user.end_all()
    for path in state.iterdir():
        path.chmod(0o700 if path.is_dir() else 0o600)
    for path in (state / "searches").iterdir():
        take_back(path)
    for path in (state, state / "searches"):
        path.chmod(0o711)


def find_user(name: str) -> User:
    """The user of that name.

    Raises:
        UserError: there is none, it is root, or this process cannot start one of theirs.
    """
    if os.geteuid() != 0:
        raise UserError(f"--run-as {name}: root alone can run tasks as another user. Start the service as root.")
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise UserError(
            f"--run-as {name}: there is no such user. Make one that nothing else runs as: useradd --system {name}"
        ) from None
    if found.pw_uid == 0:
        raise UserError(f"--run-as {name}: a user was expected that nothing else runs as, and not root.")
    return User(name, found.pw_uid, found.pw_gid, tuple(os.getgrouplist(name, found.pw_gid)))
