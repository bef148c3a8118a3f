"""The verb continue-update: the calls that go on with a weight session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from app.commands.ending import usage
from app.commands.http import Gateway, Json
from app.commands.ordering import Order, verb
from app.commands.orders import EngineId, engine_path


@verb
def continue_update(
    _gateway: Gateway,
    engine: EngineId,
    session: Annotated[str, typer.Option(help="Its session_id, as it was begun with.")],
    chunk: Annotated[
        Path | None, typer.Option(help="A JSON file with a `chunk` of the HTTP API.")
    ] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="Instead, of a session from disk: which chunk, …")
    ] = None,
    file: Annotated[list[str] | None, typer.Option(help="… and its files, once per file.")] = None,
    commit: Annotated[
        int | None, typer.Option(min=0, help="All chunks are sent; so many there were.")
    ] = None,
    abort: Annotated[
        bool, typer.Option("--abort", help="Call it off: the weights stay as they are.")
    ] = False,
) -> Order:
    """Go on with an update in pieces, which update-weights --source has begun.

    With --wait the operation is followed to its end, not only until the chunk is staged.
    """
    stages: Json = {}
    if chunk is not None:
        stages["chunk"] = _read(chunk)
    if index is not None or file:
        if index is None or not file or chunk is not None:
            raise usage("say --chunk FILE, or --index N with --file NAME")
        stages["chunk"] = {"index": index, "disk": {"files": file}}
    if commit is not None:
        stages["commit"] = {"chunks": commit}
    if abort:
        stages["abort"] = {}
    if len(stages) != 1:
        raise usage("say one: a chunk, --commit N or --abort")
    body: Json = {"source": {"session": {"session_id": session, **stages}}}
    return Order(engine_path(engine, "/update-weights"), body)


def _read(file: Path) -> Json:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise usage(f"--chunk: {file} can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise usage(f"--chunk: {file} holds no JSON object")
    return found
