"""`chadburn token`: tokens of the demo's own issuer."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.target import DEMO_DIR, DemoDir, read_ready


class Client(StrEnum):
    """What a demo token can be for. Each role has an audience of its own."""

    OPERATOR = "operator"
    READER = "reader"
    INFERENCE = "inference"
    ENGINE = "engine"


def token(
    scope: Annotated[
        list[str] | None, typer.Option(help="Once per scope; else all that the client may have.")
    ] = None,
    client: Annotated[Client, typer.Option(help="Who the token is for.")] = Client.OPERATOR,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Print a token of the running demo, for example one with `--scope admin:read` alone."""
    from app.demo.folder import Folder
    from app.demo.tokens import TokenRefused, fetch_token

    ready = read_ready(demo_dir)
    if ready is None:
        raise usage(f"no demo is ready in {demo_dir}: chadburn demo")
    try:
        secret = Folder(ready.data_dir).issuer_secret.read_text(encoding="utf-8")
    except OSError as error:
        line = f"the demo's secret in {ready.data_dir} cannot be read: {error.strerror}"
        raise CommandFailed(Exit.REFUSED, line) from error
    scopes = [name for text in scope or [] for name in text.split()]
    try:
        print(asyncio.run(fetch_token(ready.issuer, client.value, secret, scopes)))
    except TokenRefused as error:
        exit_ = Exit.REFUSED if error.answered else Exit.UNREACHABLE
        raise CommandFailed(exit_, str(error)) from error
