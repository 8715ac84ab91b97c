"""The commands that ask a service, ``submit`` to ``fetch``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from ..searches.options import NOT_SUBMITTED, SearchedJob
from ..service.store.states import State
from .app import app, one_document, service_installed
from .arguments import Job as JobWords
from .arguments import Json, Output
from .options import ByPanel, takes_options

if TYPE_CHECKING:
    from ..service.client import Client

SearchId = Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id, as submit prints it.")]
Url = Annotated[str, typer.Option("--server", metavar="URL", envvar="AUTOTUNE_SERVER", help="The service.")]
_DEFAULT_URL = "http://127.0.0.1:8470"


@app.command(cls=ByPanel, short_help="Submit a search to a service.")
@takes_options(SearchedJob, without=NOT_SUBMITTED)
def submit(
    job: JobWords,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="What is sent.", show_default="the task's folder; the current one"),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="In place of sending one: the job's folder on storage that the service sees, as it is called there.",
            show_default="none: a folder is sent",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Shown in lists.", show_default="the task's")] = None,
    priority: Annotated[int, typer.Option(min=0, max=100, help="Higher runs first.")] = 50,
    wait: Annotated[bool, typer.Option("--wait", help="Show what happens, until it has ended.")] = False,
    server: Url = _DEFAULT_URL,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Send a job's folder to a service, and queue a search: the options are those of `autotune search`.

    AUTOTUNE_TOKEN is the token. Prints the search's id and state; --wait leaves with its exit code.
    """
    spec = {"name": name, "priority": priority, **given}
    with asking(server, json) as client:
        from ..commands.service.searches import submit as command

        raise typer.Exit(command(client, spec, _place(spec, job, folder, shared), wait, json))


@app.command(short_help="Show the searches of a service.")
def status(
    search: Annotated[str | None, typer.Argument(metavar="SEARCH", help="One of them.", show_default="all")] = None,
    state: Annotated[
        list[State] | None,
        typer.Option("--state", case_sensitive=False, help="Those in it. Again for more.", show_default="any"),
    ] = None,
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="Those of one owner.", show_default="all")] = None,
    name: Annotated[str | None, typer.Option(help="Those with this in their name.", show_default="any")] = None,
    server: Url = _DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show where a service's searches are, the newest first; or one of them."""
    with asking(server, json) as client:
        from ..commands.service.searches import status as command

        command(client, search, json, state=state, owner=owner, name=name)


@app.command(short_help="Show what a search of a service says.")
def logs(
    search: SearchId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Its events, as they come.")] = False,
    server: Url = _DEFAULT_URL,
) -> None:
    """Print the end of what a search's driver printed."""
    with asking(server) as client:
        from ..commands.service.searches import logs as command

        command(client, search, follow)


@app.command(short_help="End a search of a service.")
def cancel(
    search: SearchId,
    now: Annotated[bool, typer.Option("--now", help="Without a plan; it can be resumed.")] = False,
    server: Url = _DEFAULT_URL,
    json: Json = False,
) -> None:
    """End a search: its running trials are finished, and the best so far is its plan."""
    with asking(server, json) as client:
        from ..commands.service.searches import show

        show(client.cancel(search, "now" if now else "finish"), json)


@app.command(short_help="Go on with a search of a service.")
def resume(
    search: SearchId,
    max_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="From now on: 20m, 1.5h.", show_default="as before")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="In all, with those before.", show_default="as before")
    ] = None,
    server: Url = _DEFAULT_URL,
    json: Json = False,
) -> None:
    """Queue a search again that has failed or was cancelled: it goes on from what was measured."""
    with asking(server, json) as client:
        from ..commands.service.searches import show

        show(client.resume(search, max_time=max_time, trials=trials), json)


@app.command(short_help="Change a search's priority.")
def prioritize(
    search: SearchId,
    priority: Annotated[int, typer.Argument(min=0, max=100, help="Higher runs first; submit's default is 50.")],
    server: Url = _DEFAULT_URL,
    json: Json = False,
) -> None:
    """Let a search that waits begin before others, or after them."""
    with asking(server, json) as client:
        from ..commands.service.searches import show

        show(client.set_priority(search, priority), json)


@app.command(short_help="Fetch the plan of a service's search.")
def fetch(search: SearchId, output: Output = Path("plan.yaml"), server: Url = _DEFAULT_URL, json: Json = False) -> None:
    """Write the plan that a search has found."""
    with asking(server, json) as client:
        from ..commands.service.searches import fetch as command

        command(client, search, output, json)


@contextmanager
def asking(url: str, json: bool = False) -> Iterator[Client]:
    """A client of the service there, with AUTOTUNE_TOKEN; an error within the block is one document with ``json``."""
    with one_document(json), service_installed():
        from ..service.client import Client

        with Client(url, os.environ.get("AUTOTUNE_TOKEN")) as client:
            yield client


def _place(spec: dict[str, Any], job: list[str], folder: Path | None, shared: str | None) -> Path | None:
    """Put the job into ``spec``, and return the folder that is sent; None where the service sees it.

    Raises:
        UserError: the options exclude each other, or a task lies elsewhere.
    """
    is_script = len(job) > 1
    if shared is None and is_script:
        spec["command"] = job
        return folder or Path()
    if shared is None:
        spec["task"], place = _task(job[0], folder)
        return place
    if folder is not None or is_script:
        raise UserError(
            f"--shared: no {'script' if is_script else '--folder'} was expected with it. Send the job's folder: leave "
            "out --shared; or give a task file in the shared folder."
        )
    spec["folder"] = shared
    spec["task"] = job[0].removeprefix(f"{shared.rstrip('/')}/")
    return None


def _task(source: str, folder: Path | None) -> tuple[str, Path]:
    """The task as the service finds it in the folder, and the folder.

    Raises:
        UserError: it is no file in it.
    """
    from ..task_file import split_source

    path, name = split_source(source)
    place = folder or path.parent
    if not path.resolve().is_relative_to(place.resolve()):
        raise UserError(f"{path}: a task file in {place.resolve()} was expected. Name the folder with --folder.")
    inside = path.resolve().relative_to(place.resolve()).as_posix()
    return inside if name is None else f"{inside}:{name}", place
