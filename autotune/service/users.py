"""The users that tasks run as, where they are others than the server's: root's server gives one a search's folder,
takes it back, and ends whatever runs as it."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

OWNER = "{owner}"
"""Stands for an owner's name in ``--run-as``."""


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
        self.end_all()
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


@dataclass(frozen=True)
class Users:
    """The users of ``--run-as``, each for one search at a time."""

    name: str
    """With :data:`OWNER` in it there is one for each owner of searches, else one for all."""

    @property
    def are_by_owner(self) -> bool:
        """Whether there is one for each owner."""
        return OWNER in self.name

    def find(self, owner: str) -> User | None:
        """The user that this owner's tasks run as; None where there is none."""
        try:
            found = pwd.getpwnam(self.name.replace(OWNER, owner))
        except KeyError:
            return None
        groups = os.getgrouplist(found.pw_name, found.pw_gid)
        return User(found.pw_name, found.pw_uid, found.pw_gid, tuple(groups)) if found.pw_uid else None

    def why_none(self, owner: str) -> str:
        """What is to be said where :meth:`find` finds none."""
        name = self.name.replace(OWNER, owner)
        whose = f" of {owner}" if self.are_by_owner else ""
        return (
            f"tasks{whose} run as the user {name} of the service's machine, but there is no such user, or it is root. "
            f"An admin makes one, which nothing else may run as: useradd --system {shlex.quote(name)}"
        )

    def check(self) -> None:
        """See that this process may start tasks as them.

        Raises:
            UserError: it may not, or there can be none.
        """
        if os.geteuid() != 0:
            raise UserError(
                f"--run-as {self.name}: root alone can run tasks as another user. Start the service as root."
            )
        if self.name == OWNER:
            raise UserError(
                f"--run-as {OWNER}: more than the owner's name was expected, such as autotune-{OWNER}. "
                "All that runs as a task's user is ended with its search: it may be nobody's own account."
            )
        if not self.are_by_owner and self.find("") is None:
            raise UserError(f"--run-as {self.name}: {self.why_none('')}")

    def let_pass(self, state: Path) -> None:
        """Let them through to a search's folder, once one is given to them, and to nothing else; of an earlier server's
        tasks nothing runs on."""
        for path in state.iterdir():
            path.chmod(0o700 if path.is_dir() else 0o600)
        for path in (state / "searches").iterdir():
            if (user := self._of(path.stat().st_uid)) is not None:
                user.end_all()
            take_back(path)
        for path in (state, state / "searches"):
            path.chmod(0o711)

    def _of(self, uid: int) -> User | None:
        """The one of that number; None where it is nobody's of them."""
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            return None
        before, _, after = self.name.partition(OWNER)
        found = self.find(name.removeprefix(before).removesuffix(after))
        return found if found is not None and found.uid == uid else None
