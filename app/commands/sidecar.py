"""`chadburn sidecar`: administer an engine that knows nothing of it, from a process beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.ending import CommandFailed, Exit
from app.commands.sidecar_options import Common, key_in, serve, with_common

if TYPE_CHECKING:
    from app.sidecars.vllm.dialect import VllmDialect

app = typer.Typer(
    name="sidecar",
    help="Administer an engine over its own HTTP endpoints.",
    no_args_is_help=True,
)


@app.command()
@with_common
def vllm(
    common: Common,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Holds the API key of the engine's /v1 routes.")
    ] = None,
    sleep_unconfigured: Annotated[
        bool,
        typer.Option(
            "--sleep-unconfigured",
            help="Offer release also where the engine gives no memory back: to try things out.",
        ),
    ] = False,
) -> None:
    """Administer a vLLM server, started with VLLM_SERVER_DEV_MODE=1, from beside it."""

    def dialect() -> VllmDialect:
        from app.sidecars.vllm.dialect import VllmDialect

        return VllmDialect(key=key_in(engine_key_file))

    serve(common, dialect, unconfigured_release=sleep_unconfigured)


@app.command()
def sglang(url: str = "") -> None:
    """Not there yet."""
    raise _not_there("sglang", url)


@app.command()
def trtllm(url: str = "") -> None:
    """Not there yet."""
    raise _not_there("trtllm", url)


def _not_there(engine: str, _url: str) -> CommandFailed:
    return CommandFailed(Exit.USAGE, f"there is no sidecar for {engine} yet; there is one for vllm")
