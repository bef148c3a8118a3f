"""`chadburn token`: that of a login, or one of the demo's own issuer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.target import DEMO_DIR, DemoDir, Ready, Url, login_at, plain, read_ready


class Client(StrEnum):
    """What a demo token can be for. Each role has an audience of its own."""

    OPERATOR = "operator"
    READER = "reader"
    INFERENCE = "inference"
    ENGINE = "engine"


def token(
    url: Url = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Of the demo: once per scope; else all that the client may have."),
    ] = None,
    client: Annotated[
        Client | None, typer.Option(help="Of the demo: who it is for; else the operator.")
    ] = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Print the token of your login at a gateway, renewed where it is due; or one of the running
    demo, for example with `--scope admin:read` alone."""
    ready = read_ready(demo_dir)
    if scope is None and client is None:
        login = _login(url, ready)
        if login is not None:
            print(plain(login()))
            return
    if ready is None:
        raise usage(f"no demo is ready in {demo_dir}: chadburn demo")
    if url and url.rstrip("/") != ready.base_url.rstrip("/"):
        raise usage(f"nobody is logged in at {url}: chadburn login --url {url}")
    scopes = [name for text in scope or [] for name in text.split()]
    print(_of_the_demo(ready, client or Client.OPERATOR, scopes))


def _login(url: str | None, ready: Ready | None) -> Callable[[], str] | None:
    gateway = url or (ready.base_url if ready is not None else None)
    if gateway is None:
        raise usage("give --url, of a gateway where you are logged in; no demo is ready here")
    login = login_at(gateway)
    if login is None and ready is None:
        raise usage(f"nobody is logged in at {gateway}: chadburn login --url {gateway}")
    return login


def _of_the_demo(ready: Ready, client: Client, scopes: list[str]) -> str:
    from app.demo.folder import Folder
    from app.demo.tokens import TokenRefused, fetch_token

    try:
        secret = Folder(ready.data_dir).issuer_secret.read_text(encoding="utf-8")
    except OSError as error:
        line = f"the demo's secret in {ready.data_dir} cannot be read: {error.strerror}"
        raise CommandFailed(Exit.REFUSED, line) from error
    try:
        return asyncio.run(fetch_token(ready.issuer, client.value, secret, scopes))
    except TokenRefused as error:
        exit_ = Exit.REFUSED if error.answered else Exit.UNREACHABLE
        raise CommandFailed(exit_, str(error)) from error
