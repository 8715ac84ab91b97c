"""``autotune serve``: the service, until it is told to end; and its tokens."""

from __future__ import annotations

import gc
import ipaddress
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Literal

import uvicorn

from ...errors import UserError
from ...report.printing import print_json, tell
from ...service.problems import Problem
from ...service.service import DATABASE, Service, open_database, open_service
from ...service.store.database import Database
from ...service.store.tokens import RoleName, Tokens, expiry_s
from ...service.supervisor import RunnerOptions
from ...service.users import OWNER, Users
from ...service.web.app import make_app
from ...service.web.limits import BoundedProtocol
from ...service.web.proxy import Network
from ...service.web.webhook import check_url

LogFormat = Literal["text", "json"]
DEFAULT_STATE = Path("autotune-service")
_GRACE_S = 5
"""After a signal, for requests that are being answered."""


@dataclass(frozen=True)
class ServeOptions:
    """Where the service is, and how it runs searches."""

    host: str
    port: int
    state: Path
    database: str | None
    searches: int
    executor: str
    address: str | None
    shared: tuple[Path, ...]
    private: bool
    behind_proxy: str | None
    pass_env: tuple[str, ...]
    run_as: str | None
    certificate: Path | None
    key: Path | None
    keep: str | None
    webhook: str | None
    requests_per_s: float | None
    log_format: LogFormat


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; drivers are ended then, and their searches go on after the next start.

    Raises:
        UserError: it cannot.
    """
    log_to_stderr(options.log_format)
    keep_s = _seconds(options.keep, "--keep")
    if (options.certificate is None) != (options.key is None):
        raise UserError("--tls-certificate and --tls-key go together.")
    if options.address is not None and options.executor == "local":
        raise UserError("--address names a Ray cluster, but --executor is local. Leave one of them out.")
    for folder in options.shared:
        if not folder.is_dir():
            raise UserError(f"--shared {folder}: a folder was expected. Make it first, or name another.")
    for name in options.pass_env:
        if name not in os.environ:
            raise UserError(f"--pass-env {name}: it is not set here. Set it, or leave the option out.")
    if options.webhook is not None:
        check_url(options.webhook)
    users = None if options.run_as is None else Users(options.run_as)
    if users is not None:
        users.check()
        if options.executor != "local":
            raise UserError("--run-as: --executor local was expected. A Ray cluster runs trials as its own user.")
    address = [] if options.address is None else [f"--address={options.address}"]
    runner = RunnerOptions(
        num_searches=options.searches,
        driver_options=(f"--executor={options.executor}", *address),
        is_cluster=options.address is not None,
        pass_env=options.pass_env,
        run_as=users,
    )
    behind = _network(options.behind_proxy)
    service = open_service(
        options.state.resolve(), options.database, runner, shared=options.shared, private=options.private
    )
    config = uvicorn.Config(
        make_app(
            service,
            keep_s=keep_s,
            requests_per_s=options.requests_per_s,
            behind=behind,
            webhook=options.webhook,
        ),
        host=options.host,
        port=options.port,
        http=BoundedProtocol,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    try:
        if users is not None and (
            user := next(filter(None, map(users.find, ("", *service.tokens.submitters()))), None)
        ):
            user.check(runner.program, service.places.state / "searches")
        config.load()
    except UserError:
        service.close()
        raise
    except OSError as reason:  # ssl's own errors are
        service.close()
        raise UserError(
            f"--tls-certificate {options.certificate}, --tls-key {options.key}: they cannot be used: "
            f"{reason.strerror or reason}. Give a certificate and its key as PEM files."
        ) from None
    _tell_where(service, options)
    try:
        with suppress(KeyboardInterrupt):  # the signal that it ended for, which uvicorn raises again
            run(config)
    except SystemExit:
        raise UserError(
            f"--host {options.host} --port {options.port}: it cannot be bound. Is another server there? Choose a port."
        ) from None
    finally:
        service.close()


def run(config: uvicorn.Config, sockets: list[socket.socket] | None = None) -> None:
    """Answer until a signal. What was imported lives as long as the process, and would be looked at by each collection
    of all garbage: for 0.2 s, in which nobody is answered."""
    gc.collect()
    gc.freeze()
    uvicorn.Server(config).run(sockets)


def _tell_where(service: Service, options: ServeOptions) -> None:
    """The address, and where nobody has a token, one."""
    scheme = "http" if options.certificate is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{options.port}"
    tell(f"autotune serves {url}; Ctrl-C ends it, and searches go on when it is back.")
    tell(f"Its files are in {service.places.state}.")
    _tell_users(service, options.searches)
    if not service.tokens.are_there():
        secret = service.tokens.make_for_run()
        tell("There is no token: this one is an admin's until the server ends. `serve token create` makes others.")
        tell(f"  the page: {url}/#token={secret}")
        tell(f"  commands: export AUTOTUNE_TOKEN={secret}")


def _tell_users(service: Service, num_searches: int) -> None:
    """Whose processes tasks are, and what follows."""
    users = service.users
    if users is None:
        tell("Tasks run as its own user: they can read and change its files, so `submit` is as much as `admin`.")
    elif not users.are_by_owner:
        tell(f"Tasks run as {users.name}, which has one search at a time.")
        if num_searches > 1:
            tell(f"--searches {num_searches} has no effect with one user. One for each owner: {users.name}-{OWNER}.")
    else:
        tell(f"Tasks run as {users.name.replace(OWNER, 'OWNER')}, which has one search at a time.")
        if without := [name for name in service.tokens.submitters() if users.find(name) is None]:
            tell(f"There is no such user for {', '.join(without)}: what they submit is refused until there is.")


def create_token(state: Path | None, database: str | None, name: str, role: RoleName, expires: str, json: bool) -> None:
    """Print a new token, this once. A server that runs already takes it at once.

    Args:
        state: the service's folder, which is made where it was asked for; None is the default one.
        database: its URL; None is SQLite in ``state``.
        name: whose it is.
        role: what it may do.
        expires: ``30d``, or ``never``.
        json: print one document.

    Raises:
        UserError: the database cannot be used, there is no service and none was asked for, or ``expires`` is no time.
    """
    folder = (state or DEFAULT_STATE).resolve()
    is_new = database is None and not (folder / DATABASE).exists()
    try:
        row, secret = _tokens(state, database, begins=state is not None).create(
            name, role, _seconds(expires, "--expires")
        )
    except Problem as problem:
        raise UserError(f"--{problem.detail}") from None
    if json:
        print_json({**row.model_dump(), "token": secret})
    else:
        print(secret)
        where = "--database" if database else folder
        tell(f"Token {row.id} of {name}, role {role}, {_until(row.expires_at)}, for the service of {where}.")
        tell("It is not shown again.")
    if is_new:
        tell(f"There was no service in {folder}: it begins with this token.")


def list_tokens(state: Path | None, database: str | None, json: bool) -> None:
    """Print the tokens, without themselves."""
    rows = _tokens(state, database).all()
    if json:
        print_json({"tokens": [row.model_dump() for row in rows]})
        return
    if not rows:
        tell("There is no token.")
    for row in rows:
        print(f"{row.id}  {row.role:6}  {'revoked' if row.revoked_at else _until(row.expires_at):22}  {row.name}")


def revoke_token(state: Path | None, database: str | None, token_id: str) -> None:
    """From now on it is no token.

    Raises:
        UserError: there is none of that id.
    """
    try:
        _tokens(state, database).revoke(token_id)
        tell(f"Token {token_id} is revoked.")
    except Problem as problem:
        raise UserError(problem.detail) from None


def _tokens(state: Path | None, database: str | None, *, begins: bool = False) -> Tokens:
    """The tokens of a service that is there, or ``begins``.

    Raises:
        UserError: it is not.
    """
    folder = (state or DEFAULT_STATE).resolve()
    if database is None and not begins and not (folder / DATABASE).exists():
        raise UserError(
            f"{folder}: there is no service. Name its folder (--state FOLDER) or its --database as for `autotune "
            "serve`; `--state` of `token create` also begins a new one."
        )
    if database is None:
        return Tokens(open_database(folder, None, alone=False)[0])
    opened = Database(database)
    opened.migrate()
    return Tokens(opened)


def _seconds(text: str | None, option: str) -> float | None:
    try:
        return expiry_s(text)
    except Problem as problem:
        raise UserError(f"{option}: {problem.detail.removeprefix('expires: ')}") from None


def _network(text: str | None) -> Network | None:
    try:
        return None if text is None else ipaddress.ip_network(text)
    except ValueError:
        raise UserError(
            f"--behind-proxy {text}: the address was expected that the proxy's connections come from: 127.0.0.1, or a "
            "network such as 10.0.0.0/8."
        ) from None


def _until(expires_at: float | None) -> str:
    if expires_at is None:
        return "never expires"
    return time.strftime("until %Y-%m-%d %H:%M", time.localtime(expires_at))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``logger`` and ``message``; of a bug also ``traceback``."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return dumps(row)


def log_to_stderr(form: LogFormat) -> None:
    """Write what is worth knowing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
