"""A storage's URL: the file that it names, and the password that nobody else may read."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from ...errors import StudyError

_PASSWORD = re.compile(r"^(?P<before>[\w+.-]*:?//[^:]*:|[^:/]*:(?!//))(?P<secret>.*)(?=@)", re.DOTALL)
_SECRET_OPTION = re.compile(
    r"(?P<before>[?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)(?P<secret>[^&]*)", re.IGNORECASE
)
_MASK = "***"


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for a server.

    Raises:
        StudyError: SQLite would keep it in memory, or elsewhere than the URL's path says.
    """
    scheme, _, rest = url.partition("://")
    if scheme.partition("+")[0] != "sqlite":
        return None
    if rest and not rest.startswith("/"):
        raise StudyError(f"--storage: a file has no server, but got {masked(url)!r}. Write sqlite:///path.db.")
    name, _, options = rest.removeprefix("/").partition("?")
    path = Path(name)
    if name in ("", ":memory:") or "mode=memory" in options:
        raise StudyError(f"--storage: a file was expected, but {url!r} keeps nothing. Write sqlite:///path.db.")
    if name.startswith("file:") or "uri=" in options or "\0" in name:
        raise StudyError(f"--storage: a plain path was expected, but got {url!r}. Write sqlite:///path.db.")
    if not path.name:
        raise StudyError(f"--storage: a file was expected, but {url!r} names a folder. Write sqlite:///path.db.")
    if path.parts[0].startswith("~"):
        home = path.expanduser() if path.parts[0] == "~" else "/home/you/path.db"
        raise StudyError(f"--storage: {name}: only a shell knows what ~ is. Write sqlite:///{home}.")
    return path


def sqlite_files(url: str) -> dict[str, Path]:
    """The files that SQLite keeps for a URL, which nothing else may be written to, by what they are.

    Raises:
        StudyError: as :func:`sqlite_path`.
    """
    path = sqlite_path(url)
    if path is None:
        return {}
    beside = {path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")}
    return {"the study": path, **{f"the study's {file.name}": file for file in sorted(beside)}}


def at(url: str, path: Path) -> str:
    """The SQLite URL of another path, with the same options."""
    scheme, _, rest = url.partition("://")
    _, question, options = rest.partition("?")
    return f"{scheme}:///{path}{question}{options}"


def masked(url: str) -> str:
    """The URL with its password masked."""
    for secret in (_PASSWORD, _SECRET_OPTION):
        url = secret.sub(rf"\g<before>{_MASK}", url)
    return url


def hidden(text: str, url: str) -> str:
    """A message about a storage, with its password masked."""
    secrets = [found["secret"] for pattern in (_PASSWORD, _SECRET_OPTION) for found in pattern.finditer(url)]
    spelled = {spelling for secret in secrets for spelling in (secret, unquote(secret)) if spelling}
    for spelling in sorted(spelled, key=len, reverse=True):
        text = text.replace(spelling, _MASK)
        for place, letter in enumerate(spelling):  # a bare @ in a password makes what follows it a part of the host
            if letter == "@":
                text = text.replace(f"{spelling[place + 1 :]}@", f"{_MASK}@")
    return text
