"""`chadburn demo`, and the development issuer that it runs as a process of its own."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.ending import CommandFailed, Exit
from app.commands.target import DEMO_DIR
from app.demo.plan import (
    ADMIN_AUDIENCE,
    DEFAULT_PORT,
    ENGINE_AUDIENCE,
    INFERENCE_AUDIENCE,
    TOKEN_TTL_S,
    DemoRefused,
    Plan,
)

if TYPE_CHECKING:
    from app.demo.announcing import Running


def demo(
    data_dir: Annotated[
        Path, typer.Option(envvar="CHADBURN_DEMO__DIR", help="Data and logs; mode 0700.")
    ] = DEMO_DIR,
    port: Annotated[
        int, typer.Option(help="Of the gateway; the next three are taken too. 0: free ones.")
    ] = DEFAULT_PORT,
    ready_file: Annotated[
        Path | None, typer.Option(help="Also write addresses and tokens here once all is ready.")
    ] = None,
    traffic: Annotated[int, typer.Option(min=0, help="Generations to keep running.")] = 0,
    step_delay_ms: Annotated[
        int, typer.Option(min=0, help="Slows the engine down, so that it can be watched.")
    ] = 40,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face Llama checkpoint; else a small one made at first start."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that divide the engine's model, each a process.")
    ] = 2,
) -> None:
    """Run a token issuer, an engine and a gateway on this machine until Ctrl-C."""
    # It brings grpc with it, which the other verbs do without.
    from app.demo.running import run

    plan = Plan(
        data_dir=data_dir,
        port=port,
        ready_file=ready_file,
        traffic=traffic,
        step_delay_ms=step_delay_ms,
        checkpoint=checkpoint,
        ranks=tensor_parallel_size,
    )
    print("Starting issuer, engine and gateway ...", flush=True)
    try:
        asyncio.run(run(plan, lambda running: print(welcome(running), flush=True)))
    except DemoRefused as error:
        raise CommandFailed(Exit.FAULT, f"demo: {error}") from error
    print("All processes of the demo have ended.")


def welcome(running: Running) -> str:
    """Lines to copy. The token comes from a file that only its owner can read."""
    from app.devidp.codes import page_code

    url, engine = running.base_url, running.engine
    header = f"-H @{shlex.quote(str(running.folder.operator_header))}"
    pause = (
        f"curl -sS {header} -H 'Content-Type: application/json'"
        f' -H "Idempotency-Key: $(date +%s%N)" -d \'{{"mode":"drain"}}\''
        f" {url}/v1/engines/{engine}/pause"
    )
    update = ""
    if running.next_weights is not None:
        update = (
            f"\n  chadburn update-weights {engine} --disk {shlex.quote(running.next_weights)}"
            f" \\\n    --weight-version v2 --pause drain --wait"
        )
    return f"""
Chadburn is ready at {url}
  engine {engine}: inference {running.inference_address}, admin {running.admin_address}
  data and logs in {running.folder.path}

Order a pause:
  {pause}
Follow the events:
  curl -sSN {header} -H 'Accept: text/event-stream' {url}/v1/events
Be a person to the gateway until chadburn logout; the page asks for {page_code(running.secret)}:
  chadburn login
Or, in this folder:
  chadburn generate "the bridge rings"
  chadburn pause {engine} --mode drain --wait
  chadburn resume {engine} --wait{update}
Or look at it and give orders in a browser, where you log in with the same code:
  {url}/ui/
Ctrl-C ends everything."""


def dev_issuer(
    secret_file: Annotated[Path, typer.Option(help="The secret all its clients show.")],
    data_dir: Annotated[Path, typer.Option(help="Where its key is kept.")],
    ready_file: Annotated[Path, typer.Option(help="Where to say its address.")],
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    token_ttl_s: Annotated[int, typer.Option(min=1)] = TOKEN_TTL_S,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin")] = False,
) -> None:
    """A token issuer for development; loopback only."""
    from app.demo.folder import write_json
    from app.demo.parent import end_with_stdin as tie
    from app.devidp.issuer import DevIssuer, KeyFileUnsafe
    from app.devidp.running import DevIssuerSettings
    from app.devidp.running import run as run_issuer

    if end_with_stdin:
        tie()

    def ready(issuer: DevIssuer) -> None:
        write_json(ready_file, {"issuer": issuer.issuer})

    try:
        settings = DevIssuerSettings(
            secret=secret_file.read_text(encoding="utf-8"),
            admin_audience=ADMIN_AUDIENCE,
            inference_audience=INFERENCE_AUDIENCE,
            engine_audience=ENGINE_AUDIENCE,
            port=port,
            data_dir=data_dir,
            token_ttl_s=token_ttl_s,
        )
        run_issuer(settings, ready)
    except (OSError, ValueError, KeyFileUnsafe) as error:
        raise CommandFailed(Exit.FAULT, f"issuer: {error}") from error
