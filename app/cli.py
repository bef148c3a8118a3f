"""The `chadburn` command: all its verbs, and how errors of theirs reach the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app import __version__
from app.commands import adapters, engines, operations, orders, profiling, sidecar
from app.commands.auditing import audit
from app.commands.conforming import conformance
from app.commands.continuing import continue_update
from app.commands.database import db
from app.commands.demonstration import demo, dev_issuer
from app.commands.ending import CommandFailed, Exit
from app.commands.generating import generate
from app.commands.logins import login, logout
from app.commands.policing import policy
from app.commands.posture import posture
from app.commands.reconfiguring import reconfigure
from app.commands.serving import engine, serve
from app.commands.tokens import token
from app.commands.updating import update_weights

SERVING, ORDERS, LOOKING, TRYING = "Serve", "Give orders", "Look", "Try it out"
BEING = "Say who you are"

app = typer.Typer(
    name="chadburn",
    help="Engine-order telegraph for LLM inference engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"chadburn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Engine-order telegraph for LLM inference engines.

    Exit codes: 0 done, 2 usage, 3 failed, 4 cancelled, 5 outcome not known, 6 refused,
    7 unreachable, 1 a fault of this program.
    """


app.command(rich_help_panel=TRYING)(demo)
app.command("dev-issuer", hidden=True)(dev_issuer)
app.command(rich_help_panel=BEING)(login)
app.command(rich_help_panel=BEING)(logout)
app.command(rich_help_panel=BEING)(token)
app.command(rich_help_panel=TRYING)(generate)
app.command(rich_help_panel=SERVING)(serve)
app.command(rich_help_panel=SERVING)(engine)
app.command(rich_help_panel=SERVING)(conformance)
app.command(rich_help_panel=ORDERS)(orders.pause)
app.command(rich_help_panel=ORDERS)(orders.resume)
app.command(rich_help_panel=ORDERS)(orders.flush)
app.command(rich_help_panel=ORDERS)(orders.abort)
app.command(rich_help_panel=ORDERS)(orders.release)
app.command(rich_help_panel=ORDERS)(orders.restore)
app.command(rich_help_panel=ORDERS)(orders.shutdown)
app.command(rich_help_panel=ORDERS)(update_weights)
app.command(rich_help_panel=ORDERS)(continue_update)
app.command(rich_help_panel=ORDERS)(reconfigure)
app.command(rich_help_panel=SERVING)(posture)
app.add_typer(sidecar.app, name="sidecar", rich_help_panel=SERVING)
app.add_typer(db, name="db", rich_help_panel=SERVING)
app.add_typer(policy, name="policy", rich_help_panel=SERVING)
app.add_typer(audit, name="audit", rich_help_panel=SERVING)
app.add_typer(adapters.app, name="lora", rich_help_panel=ORDERS)
app.add_typer(profiling.app, name="profile", rich_help_panel=ORDERS)
app.add_typer(engines.app, name="engines", rich_help_panel=LOOKING)
app.add_typer(operations.app, name="ops", rich_help_panel=LOOKING)


def main() -> None:
    """Never a traceback for what a user can mend: one line and a documented code."""
    try:
        app()
    except CommandFailed as failed:
        print(f"chadburn: {failed.line}", file=sys.stderr)
        sys.exit(failed.exit)
    except KeyboardInterrupt:
        print("chadburn: interrupted", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
