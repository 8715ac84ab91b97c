"""The command line that every command adds itself to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ..distribution import VERSION, requirement
from ..errors import AutotuneError, UserError
from ..report.printing import print_json

app = typer.Typer(
    name="autotune",
    epilog="Exit codes: 0 done, 1 our bug, 2 your input, 3 nothing fits or a plan no longer holds, "
    "130 interrupted with the best so far saved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autotune {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find, prove and write the fastest configuration of a PyTorch training job inside a memory budget."""


@contextmanager
def one_document(json: bool) -> Iterator[None]:
    """With ``--json``, stdout has one document also when it goes wrong."""
    try:
        yield
    except AutotuneError as error:
        if json:
            print_json({"exit_code": error.exit_code, "error": str(error), "kind": type(error).__name__})
        raise


@contextmanager
def service_installed() -> Iterator[None]:
    """Raises:
    UserError: what the service needs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(
            f"{missing.name} is not installed, which the service needs. Install it: "
            f"pip install {requirement('service')}."
        ) from None
