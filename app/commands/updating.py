"""The verb update-weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.ending import usage
from app.commands.http import Gateway, Json
from app.commands.inline_tensors import tensors_of
from app.commands.ordering import Order, verb
from app.commands.orders import EngineId, engine_path
from app.domain.kinds import CachePolicy, Component, NewRequests, PauseMode


@verb
def update_weights(
    _gateway: Gateway,
    engine: EngineId,
    weight_version: Annotated[str, typer.Option(help="What the engine then calls its weights.")],
    disk: Annotated[
        str | None, typer.Option(help="Folder of safetensors files, as the engine's host sees it.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="Instead: a JSON file with any `source` of the HTTP API.")
    ] = None,
    inline: Annotated[
        Path | None,
        typer.Option(help="Instead: a safetensors file here, whose tensors go with the order."),
    ] = None,
    pause: Annotated[
        PauseMode | None, typer.Option(help="Pause in this mode meanwhile, then serve again.")
    ] = None,
    under_pause: Annotated[
        bool, typer.Option("--under-pause", help="The engine is paused already, and stays so.")
    ] = False,
    pause_epoch: Annotated[
        int | None, typer.Option(min=1, help="With --under-pause: refuse under any other.")
    ] = None,
    new_requests: Annotated[
        NewRequests | None, typer.Option(help="With --pause: what becomes of those that come.")
    ] = None,
    cache_policy: Annotated[
        CachePolicy, typer.Option(help="What becomes of KV of the earlier weights.")
    ] = CachePolicy.FLUSH,
    component: Annotated[
        list[Component] | None, typer.Option(help="Which, once per component; else target.")
    ] = None,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse NaN and infinity.")
    ] = False,
) -> Order:
    """Give an engine new weights, on all ranks or on none."""
    body: Json = {
        "source": _source(disk, source, inline),
        "weight_version": weight_version,
        "cache_policy": cache_policy.value,
    }
    if under_pause == (pause is not None):
        raise usage("say --pause MODE, or --under-pause")
    if pause is None:
        if new_requests is not None:
            raise usage("--new-requests goes with --pause")
        body["under_pause"] = {} if pause_epoch is None else {"pause_epoch": pause_epoch}
    else:
        if pause_epoch is not None:
            raise usage("--pause-epoch goes with --under-pause")
        rule = {} if new_requests is None else {"new_requests": new_requests.value}
        body["pause"] = {"mode": pause.value, **rule}
    if component:
        body["components"] = [part.value for part in component]
    if check_finite:
        body["check_finite"] = True
    return Order(engine_path(engine, "/update-weights"), body)


def _source(disk: str | None, file: Path | None, inline: Path | None) -> Any:
    if sum(given is not None for given in (disk, file, inline)) != 1:
        raise usage("say where weights come from: --disk FOLDER, --source FILE or --inline FILE")
    if inline is not None:
        return {"tensors": {"inline": {"tensors": tensors_of(inline)}}}
    if file is None:
        return {"disk": {"path": disk}}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise usage(f"--source: {file} can't be read as JSON: {error}") from error
