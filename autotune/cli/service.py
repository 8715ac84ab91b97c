"""``autotune serve``: the service, and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .app import app, one_document, service_installed
from .arguments import Address, ExecutorName, Json

serve = typer.Typer(invoke_without_command=True)
app.add_typer(serve, name="serve", short_help="Run the service: searches submitted over HTTP.")
token = typer.Typer(no_args_is_help=True, help="Make, list and revoke tokens, also while the service runs.")
serve.add_typer(token, name="token")

_DATABASE: dict[str, Any] = {
    "metavar": "URL",
    "help": "postgresql+psycopg://user@host/name; a password is best given in the environment.",
    "show_default": "SQLite in the state folder",
}
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="FOLDER", help="Where the service keeps its files.", show_default="autotune-service"
    ),
]
DatabaseUrl = Annotated[str | None, typer.Option("--database", **_DATABASE)]
"""Of the commands below `serve`, which gives on what it was given: its environment variable, too."""


@serve.callback()
def run(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind.")] = 8470,
    state: State = None,
    database: Annotated[
        str | None, typer.Option("--database", envvar="AUTOTUNE_DATABASE", show_envvar=True, **_DATABASE)
    ] = None,
    searches: Annotated[int, typer.Option(min=1, help="Searches at a time; they share devices by trial.")] = 1,
    executor: ExecutorName = "ray",
    address: Address = None,
    shared: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Submits may name paths in it. Again for more.", show_default="none"),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Others' searches are seen by admins alone.")] = False,
    behind_proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Take client, name and scheme from X-Forwarded-For, -Host and -Proto of what comes from there.",
            show_default="no proxy",
        ),
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Hand tasks this environment variable: HF_TOKEN. Again for more.",
            show_default="none that may be a secret",
        ),
    ] = None,
    run_as: Annotated[
        str | None,
        typer.Option(
            metavar="USER",
            help="As root: tasks run as this user, which nothing else may run as, with no way to the service's files; "
            "autotune-{owner} is one for each owner, and lets searches of different owners run at a time.",
            show_default="the service's own user",
        ),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="For HTTPS: the chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="For HTTPS: the key, PEM.")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="Forget what ended so long ago: 30d.", show_default="never")
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="AUTOTUNE_WEBHOOK",
            show_envvar=True,
            help="POST each search that ends to this address, as JSON.",
            show_default="none",
        ),
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(min=0.1, help="The most that one token may ask.", show_default="no limit")
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="The form of the log.")] = "text",
) -> None:
    """Run the service: searches that are submitted over HTTP, each by a driver process of its own.

    It runs the code that it is sent, as its own user or that of --run-as, for whoever has a token (`serve token
    create`). Where there is none, it prints a link to its page with one that is an admin's until the server ends.
    Whatever is killed, a search goes on from what was measured.
    """
    if context.invoked_subcommand is not None:
        given = {"state": None if state is None else str(state), "database": database}
        context.default_map = {"token": dict.fromkeys(("create", "list", "revoke"), given)}
        return
    with service_installed():
        from ..commands.service.serve import DEFAULT_STATE, ServeOptions
        from ..commands.service.serve import serve as command
    folders = tuple(shared or ())
    command(
        ServeOptions(
            host,
            port,
            state or DEFAULT_STATE,
            database,
            searches,
            executor,
            address,
            folders,
            private,
            behind_proxy,
            tuple(pass_env or ()),
            run_as,
            tls_certificate,
            tls_key,
            keep,
            webhook,
            requests_per_second,
            log_format,
        )
    )


@token.command("create")
def create(
    role: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(
            help="read sees; submit runs code, and changes what is its own; admin changes all, and makes tokens."
        ),
    ],
    name: Annotated[str, typer.Option(help="Whose it is: who has a token of this name changes its searches.")],
    expires: Annotated[str, typer.Option(metavar="TIME", help="30d, 12h or never.")] = "30d",
    state: State = None,
    database: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Make a token and print it, this once."""
    with one_document(json), service_installed():
        from ..commands.service.serve import create_token

        create_token(state, database, name, role, expires, json)


@token.command("list")
def list_all(state: State = None, database: DatabaseUrl = None, json: Json = False) -> None:
    """List the tokens: ids, roles, ends and names."""
    with one_document(json), service_installed():
        from ..commands.service.serve import list_tokens

        list_tokens(state, database, json)


@token.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")],
    state: State = None,
    database: DatabaseUrl = None,
) -> None:
    """Revoke a token; who has it is not let in from now on."""
    with service_installed():
        from ..commands.service.serve import revoke_token

        revoke_token(state, database, token_id)
