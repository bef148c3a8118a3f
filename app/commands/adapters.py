"""`chadburn lora`: adapters of an engine."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from app.commands.ending import usage
from app.commands.http import Gateway, Json, connected
from app.commands.ordering import Order, verb
from app.commands.orders import EngineId, engine_path
from app.commands.printing import show, table
from app.commands.target import DEMO_DIR, DemoDir, Token, Url, gateway

app = typer.Typer(help="Adapters of an engine.", no_args_is_help=True)

AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter.")]


@app.command("list")
def list_loaded(
    engine: EngineId,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
    url: Url = None,
    token: Token = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """What an engine has loaded."""
    with connected(gateway(url, token, demo_dir)) as calls:
        found = calls.get(engine_path(engine, "/loras"))
    if as_json:
        show(found)
        return
    rows = [(lora["name"], lora["id"], lora["path"]) for lora in found["items"]]
    print(table(rows, ("NAME", "ID", "PATH")))


@verb
def load(
    _gateway: Gateway,
    engine: EngineId,
    name: AdapterName,
    path: Annotated[str, typer.Option(help="Its folder, as the engine's host sees it.")],
    number: Annotated[
        int | None, typer.Option("--id", min=1, help="Its number; else the engine chooses.")
    ] = None,
) -> Order:
    """Load an adapter."""
    body: Json = {"name": name, "path": path}
    if number is not None:
        body["id"] = number
    return Order(engine_path(engine, "/loras"), body)


@verb
def unload(_gateway: Gateway, engine: EngineId, name: AdapterName) -> Order:
    """Unload an adapter that no request uses."""
    # A client would take `.` and `..` out of the path, and name another resource.
    if {"", ".", ".."} & set(name.split("/")):
        raise usage("that name can't be part of a path")
    return Order(engine_path(engine, f"/loras/{quote(name)}"), {}, method="DELETE")


app.command()(load)
app.command()(unload)
