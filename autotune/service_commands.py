"""The command line's words for the service: ``serve``, and ``submit | status | logs | cancel | fetch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .commands.arguments import (
    Address,
    AllowSplit,
    Budget,
    Device,
    EffectiveBatch,
    ExecutorName,
    Job,
    Json,
    Margin,
    MaxQualityDrop,
    MaxTime,
    Output,
    RecoveryLr,
    RecoverySteps,
    Sampler,
    Seed,
    Space,
    Trials,
    TrialTime,
)
from .errors import UserError
from .search.options import SearchOptions
from .units import format_percent

if TYPE_CHECKING:
    from .commands.remote import Server

__all__ = ["add_service_commands"]

OneDocument = Callable[[bool], AbstractContextManager[None]]
SearchId = Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id, as submit prints it.")]
Url = Annotated[str, typer.Option("--server", metavar="URL", envvar="AUTOTUNE_SERVER", help="The service.")]
State = Annotated[Path, typer.Option("--state", metavar="FOLDER", help="Where the service keeps its files.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="AUTOTUNE_DATABASE",
        help="postgresql+psycopg://user@host/name; a password is best given in the environment.",
        show_default="SQLite in the state folder",
        show_envvar=True,
    ),
]
_DEFAULT_STATE, _DEFAULT_URL = Path("autotune-service"), "http://127.0.0.1:8470"


def add_service_commands(app: typer.Typer, one_document: OneDocument) -> None:
    """Add them to the command line; ``one_document`` is what it does with ``--json``."""
    app.add_typer(_serve(one_document), name="serve", short_help="Run the service: searches submitted over HTTP.")
    _add_submit(app, one_document)
    _add_others(app, one_document)


def _serve(one_document: OneDocument) -> typer.Typer:
    serve = typer.Typer(invoke_without_command=True)

    @serve.callback()
    def run(
        context: typer.Context,
        host: Annotated[str, typer.Option(help="Address to bind; others than loopback need a token.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind.")] = 8470,
        state: State = _DEFAULT_STATE,
        database: DatabaseUrl = None,
        searches: Annotated[
            int, typer.Option(min=1, help="Searches at a time; two on one device disturb each other.")
        ] = 1,
        executor: ExecutorName = "ray",
        address: Address = None,
        shared: Annotated[
            list[Path] | None,
            typer.Option(metavar="FOLDER", help="Submits may name paths in it. Again for more.", show_default="none"),
        ] = None,
        tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="For HTTPS: the chain, PEM.")] = None,
        tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="For HTTPS: the key, PEM.")] = None,
        keep: Annotated[
            str | None,
            typer.Option(metavar="TIME", help="Forget what ended so long ago: 30d.", show_default="never"),
        ] = None,
        requests_per_second: Annotated[
            float | None, typer.Option(min=0.1, help="The most that one token may ask.", show_default="no limit")
        ] = None,
        log_format: Annotated[Literal["text", "json"], typer.Option(help="The form of the log.")] = "text",
    ) -> None:
        """Run the service: searches that are submitted over HTTP, each by a driver process of its own.

        It runs the code that it is sent, as its own user. Bound to loopback it asks nobody for a token until there is
        one; bound elsewhere it does not start without. Whatever is killed, a search goes on from what was measured.
        """
        if context.invoked_subcommand is not None:
            return
        with _installed():
            from .commands.serve import ServeOptions
            from .commands.serve import serve as command
        folders = tuple(shared or ())
        command(
            ServeOptions(
                host,
                port,
                state,
                database,
                searches,
                executor,
                address,
                folders,
                tls_certificate,
                tls_key,
                keep,
                requests_per_second,
                log_format,
            )
        )

    token = typer.Typer(no_args_is_help=True, help="Make, list and revoke tokens, also while the service runs.")
    serve.add_typer(token, name="token")

    @token.command("create")
    def create(
        role: Annotated[
            Literal["read", "submit", "admin"],
            typer.Option(help="read sees; submit runs code and changes searches; admin deletes, and makes tokens."),
        ],
        name: Annotated[str, typer.Option(help="Whose it is: shown with searches.")] = "token",
        expires: Annotated[str, typer.Option(metavar="TIME", help="30d, 12h or never.")] = "30d",
        state: State = _DEFAULT_STATE,
        database: DatabaseUrl = None,
        json: Json = False,
    ) -> None:
        """Make a token and print it, this once."""
        with one_document(json), _installed():
            from .commands.serve import create_token

            create_token(state, database, name, role, expires, json)

    @token.command("list")
    def list_all(state: State = _DEFAULT_STATE, database: DatabaseUrl = None, json: Json = False) -> None:
        """List the tokens: ids, roles, ends and names."""
        with one_document(json), _installed():
            from .commands.serve import list_tokens

            list_tokens(state, database, json)

    @token.command("revoke")
    def revoke(
        token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")],
        state: State = _DEFAULT_STATE,
        database: DatabaseUrl = None,
    ) -> None:
        """Revoke a token; who has it is not let in from now on."""
        with _installed():
            from .commands.serve import revoke_token

            revoke_token(state, database, token_id)

    return serve


def _add_submit(app: typer.Typer, one_document: OneDocument) -> None:
    @app.command(short_help="Submit a search to a service.")
    def submit(  # the command's options, one line each: typer's form
        job: Job,
        folder: Annotated[
            Path | None,
            typer.Option(metavar="FOLDER", help="What is sent.", show_default="the task's folder; the current one"),
        ] = None,
        name: Annotated[str | None, typer.Option(help="Shown in lists.", show_default="the task's")] = None,
        priority: Annotated[int, typer.Option(min=0, max=100, help="Higher runs first.")] = 50,
        budget: Budget = SearchOptions.budget_bytes,
        trials: Trials = SearchOptions.trials,
        max_time: MaxTime = SearchOptions.max_time_s,
        trial_time: TrialTime = SearchOptions.trial_time_s,
        space: Space = SearchOptions.space,
        effective_batch: EffectiveBatch = SearchOptions.effective_batch,
        allow_split: AllowSplit = SearchOptions.allow_split,
        max_quality_drop: MaxQualityDrop = SearchOptions.max_quality_drop,
        recovery_steps: RecoverySteps = SearchOptions.recovery_steps,
        recovery_lr: RecoveryLr = SearchOptions.recovery_lr,
        margin: Margin = SearchOptions.margin,
        seed: Seed = SearchOptions.seed,
        sampler: Sampler = SearchOptions.sampler,
        device: Device = None,
        wait: Annotated[bool, typer.Option("--wait", help="Show what happens, until it has ended.")] = False,
        server: Url = _DEFAULT_URL,
        json: Json = False,
    ) -> None:
        """Send a job's folder to a service, and queue a search: the options are those of `autotune search`.

        AUTOTUNE_TOKEN is the token. Prints the search's id and state; --wait leaves with its exit code.
        """
        spec: dict[str, Any] = {
            "name": name,
            "priority": priority,
            "trials": trials,
            "trial_time": f"{trial_time}s",
            "max_time": None if max_time is None else f"{max_time}s",
            "space": space,
            "effective_batch": effective_batch,
            "allow_split": allow_split,
            "max_quality_drop": None if max_quality_drop is None else str(max_quality_drop),
            "recovery_steps": recovery_steps,
            "recovery_lr": recovery_lr,
            "margin": margin,
            "seed": seed,
            "sampler": sampler,
            "device": device,
        }
        if budget is not None:
            spec["budget"] = f"{budget} B" if isinstance(budget, int) else format_percent(budget)
        if len(job) > 1:
            spec["command"], place = job, folder or Path()
        else:
            spec["task"], place = _task(job[0], folder)
        with one_document(json), _installed():
            from .commands.remote import submit as command

            raise typer.Exit(command(_server(server), spec, place, wait, json))


def _add_others(app: typer.Typer, one_document: OneDocument) -> None:
    @app.command(short_help="Show the searches of a service.")
    def status(
        search: Annotated[str | None, typer.Argument(metavar="SEARCH", help="One of them.", show_default="all")] = None,
        server: Url = _DEFAULT_URL,
        json: Json = False,
    ) -> None:
        """Show where a service's searches are, the newest first; or one of them."""
        with one_document(json), _installed():
            from .commands.remote import status as command

            command(_server(server), search, json)

    @app.command(short_help="Show what a search of a service says.")
    def logs(
        search: SearchId,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Its events, as they come.")] = False,
        server: Url = _DEFAULT_URL,
    ) -> None:
        """Print the end of what a search's driver printed."""
        with _installed():
            from .commands.remote import logs as command

            command(_server(server), search, follow)

    @app.command(short_help="End a search of a service.")
    def cancel(
        search: SearchId,
        now: Annotated[bool, typer.Option("--now", help="Without a plan; it can be resumed.")] = False,
        server: Url = _DEFAULT_URL,
        json: Json = False,
    ) -> None:
        """End a search: its running trials are finished, and the best so far is its plan."""
        with one_document(json), _installed():
            from .commands.remote import cancel as command

            command(_server(server), search, now, json)

    @app.command(short_help="Fetch the plan of a service's search.")
    def fetch(
        search: SearchId, output: Output = SearchOptions.output, server: Url = _DEFAULT_URL, json: Json = False
    ) -> None:
        """Write the plan that a search has come to."""
        with one_document(json), _installed():
            from .commands.remote import fetch as command

            command(_server(server), search, output, json)


def _server(url: str) -> Server:
    import os

    from .commands.remote import Server

    return Server(url, os.environ.get("AUTOTUNE_TOKEN") or None)


def _task(source: str, folder: Path | None) -> tuple[str, Path]:
    """The task as the service finds it in the folder, and the folder.

    Raises:
        UserError: it is no file in it.
    """
    from .task_file import split_source

    path, name = split_source(source)
    place = folder or path.parent
    if not path.resolve().is_relative_to(place.resolve()):
        raise UserError(f"{path}: a task file in {place.resolve()} was expected. Name the folder with --folder.")
    inside = path.resolve().relative_to(place.resolve()).as_posix()
    return inside if name is None else f"{inside}:{name}", place


@contextmanager
def _installed() -> Iterator[None]:
    """Raises:
    UserError: what the service needs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(
            f"{missing.name} is not installed, which the service needs. Install it: pip install 'autotune[service]'."
        ) from None
