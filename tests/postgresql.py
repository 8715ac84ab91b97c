"""A PostgreSQL server of one's own: on a socket, in a folder that goes with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Literal, Self


def missing() -> str | None:
    """Why there can be none here; None where there can."""
    if _program("initdb") is None:
        return "PostgreSQL's server is not installed"
    if os.geteuid() == 0 and subprocess.run([*_USER, "true"], capture_output=True).returncode:
        return "there is no user postgres, and PostgreSQL refuses to run as root"
    return None


class Cluster:
    """One that runs, until it is left."""

    def __init__(self) -> None:
        """Make it, as the user postgres where this is root, and start it.

        Raises:
            subprocess.CalledProcessError: it could not be made.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))  # a socket has a short path
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        self._run("initdb", "-A", "trust", "-U", "tuner", "--no-sync")
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        """Of one of its databases."""
        return f"postgresql+psycopg://tuner@/{database}?host={self.folder}"

    def create(self, name: str, template: str = "template1") -> str:
        """A database of its own, which is a copy; return its URL."""
        self._command(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def drop(self, name: str) -> None:
        """Forget a database, whoever uses it."""
        self._command(f"DROP DATABASE {name} WITH (FORCE)")

    def let_be_written(self, name: str, is_writable: bool) -> None:
        """Whether connections that come from now on may write to a database; those that are there end where not."""
        self._command(f"ALTER DATABASE {name} SET default_transaction_read_only = {'off' if is_writable else 'on'}")
        if not is_writable:
            self._command(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

    def _command(self, command: str) -> None:
        import psycopg  # an extra

        with psycopg.connect(f"user=tuner dbname=postgres host={self.folder}", autocommit=True) as connection:
            connection.execute(command.encode())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        flags = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-o", flags, "-l", str(self.folder / "log"), "-w", "start")

    def stop(self, mode: Literal["fast", "immediate"]) -> None:
        """Stop it; ``immediate`` as a crash does."""
        self._run("pg_ctl", "-m", mode, "-w", "stop")

    def _run(self, program: str, *options: str) -> None:
        as_user = _USER if os.geteuid() == 0 else ()
        command = [*as_user, str(_program(program)), "-D", str(self.folder / "data"), *options]
        with (self.folder / f"{program}.out").open("ab") as out:  # a pipe would be held open by the server
            subprocess.run(command, check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out)


_USER = ("runuser", "-u", "postgres", "--")


def _program(name: str) -> Path | None:
    return max(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), default=None)
