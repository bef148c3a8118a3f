"""`chadburn profile`: what an engine does, recorded into one file per rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import Gateway, Json, connected
from app.commands.ordering import Order, followed, teller, verb
from app.commands.orders import EngineId, engine_path
from app.commands.printing import exit_of, operation_line, show, table
from app.commands.target import DEMO_DIR, DemoDir, Token, Url, gateway
from app.domain.kinds import ProfilerKind

app = typer.Typer(help="Record what an engine does.", no_args_is_help=True)

ProfileId = Annotated[
    str, typer.Argument(metavar="PROFILE", help="Its operation, or what the engine calls it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]


@verb
def start(
    _gateway: Gateway,
    engine: EngineId,
    profiler: Annotated[ProfilerKind, typer.Option(help="Which.")] = ProfilerKind.TORCH,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps of the engine.")] = None,
    duration_ms: Annotated[
        int | None, typer.Option(min=1, help="Or how long; else until it is stopped.")
    ] = None,
    record_shapes: Annotated[bool, typer.Option("--record-shapes")] = False,
    with_stack: Annotated[bool, typer.Option("--with-stack")] = False,
) -> Order:
    """Record what an engine does, into one file per rank."""
    if steps is not None and duration_ms is not None:
        raise usage("say --steps, or --duration-ms")
    bound = {"steps": steps, "duration_ms": duration_ms}
    more = {"record_shapes": record_shapes, "with_stack": with_stack}
    body: Json = {
        "profiler": profiler.value,
        **{name: value for name, value in bound.items() if value is not None},
        **{name: True for name in more if more[name]},
    }
    return Order(engine_path(engine, "/profiles"), body)


@app.command()
def stop(
    engine: EngineId,
    profile: ProfileId,
    wait: Annotated[bool, typer.Option("--wait", help="Until its files exist.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that --wait waits.")] = 600.0,
    reason: Annotated[str | None, typer.Option(help="Kept in the audit.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Record no more, and write the files."""
    with connected(gateway(url, token, demo_dir)) as calls:
        body = {} if reason is None else {"reason": reason}
        operation = calls.post(_path(engine, profile, "/stop"), body)
        if wait and not operation["done"]:
            operation = followed(calls, operation["id"], timeout, teller(as_json))
    if as_json:
        show(operation)
    else:
        print(operation_line(operation))
    raise typer.Exit(exit_of(operation))


@app.command("list")
def list_profiles(
    engine: EngineId,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Those that were ordered through the gateway, newest first."""
    with connected(gateway(url, token, demo_dir)) as calls:
        found = list(calls.pages(engine_path(engine, "/profiles")))
    if as_json:
        show({"items": found})
        return
    rows = [
        (one["id"], one["profiler"], one["state"], one["created_at"], len(one["artifacts"]))
        for one in found
    ]
    print(table(rows, ("PROFILE", "PROFILER", "STATE", "ORDERED", "FILES")))


@app.command()
def get(
    engine: EngineId,
    profile: ProfileId,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """One of them with its files, as JSON."""
    with connected(gateway(url, token, demo_dir)) as calls:
        show(calls.get(_path(engine, profile)))


@app.command()
def download(
    engine: EngineId,
    profile: ProfileId,
    into: Annotated[Path, typer.Option("--into", help="A folder; made if it is not there.")],
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Only these; may be repeated. Else all.")
    ] = None,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Fetch its files. Each is there whole, as the engine has left it, or not at all."""
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.get(_path(engine, profile))
        wanted = [one for one in found["artifacts"] if not rank or one["rank"] in rank]
        if not wanted or (rank and len(wanted) < len(set(rank))):
            state = found["state"]
            raise CommandFailed(Exit.REFUSED, f"the profile is {state} and has no such file")
        for one in wanted:
            name = f"{found['id']}-{Path(one['path']).name}"
            path = _path(engine, profile, "/artifact")
            with calls.download(path, rank=one["rank"]) as pieces:
                _keep(pieces, into / name, one)
            print(into / name)


def _keep(pieces: Iterator[bytes], path: Path, artifact: Json) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    digest, size = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                file.write(piece)
        if (size, digest.hexdigest()) != (artifact["size_bytes"], artifact["sha256"]):
            raise CommandFailed(Exit.FAULT, f"what came for {path.name} is not what was announced")
        aside.replace(path)
    except OSError as error:
        raise usage(f"{path} can't be written: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)


def _path(engine: Any, profile: str, rest: str = "") -> str:
    if profile in ("", ".", ".."):
        raise usage("that is no profile")
    return engine_path(engine, f"/profiles/{quote(profile, safe='')}{rest}")


app.command()(start)
