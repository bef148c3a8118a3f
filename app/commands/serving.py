"""Commands that serve: the gateway and the reference engine; and those for the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.domain.errors import ChadburnError, Unavailable

EndWithStdin = Annotated[
    bool,
    typer.Option(
        "--end-with-stdin", hidden=True, help="End when standard input closes: with the parent."
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file; CHADBURN_… variables stand above it.")
]


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: a free one.")] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Run the gateway."""
    from app.main import serve as serve_gateway

    _tie(end_with_stdin)
    given = {"host": host, "port": port}
    serve_gateway(_settings(config, {k: v for k, v in given.items() if v is not None}))


db = typer.Typer(help="The ledger's database.", no_args_is_help=True)


@db.command()
def upgrade(config: Config = None) -> None:
    """Bring the schema to this release's; creates the database where there is none."""
    from app.ledger.schema import upgrade as upgrade_ledger

    print(f"schema {_on_the_ledger(upgrade_ledger, config)}")


@db.command()
def check(config: Config = None) -> None:
    """Say whether the schema is this release's; changes nothing."""
    from app.ledger.schema import check as check_ledger

    print(f"schema {_on_the_ledger(check_ledger, config)} is current")


def _on_the_ledger(act: Callable[[str], Awaitable[str]], config: Path | None) -> str:
    """Runs one of the functions that take the database's URL and answer its revision."""

    async def run() -> str:
        return await act(_settings(config, {}).ledger_url)

    try:
        return asyncio.run(run())
    except Unavailable as error:
        raise CommandFailed(Exit.UNREACHABLE, error.message) from error
    except ChadburnError as error:
        raise CommandFailed(Exit.REFUSED, error.message) from error


def _settings(config: Path | None, given: dict[str, Any]) -> Any:
    from app.settings import SettingsError, load_settings

    try:
        return load_settings(config, **given)
    except SettingsError as error:
        raise usage(f"settings: {error}") from error


def _tie(end_with_stdin: bool) -> None:
    if end_with_stdin:
        from app.demo.parent import end_with_stdin as tie

        tie()
