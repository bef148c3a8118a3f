"""The verb profile."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.ending import usage
from app.commands.http import Gateway, Json
from app.commands.ordering import Order, verb
from app.commands.orders import EngineId, engine_path
from app.domain.kinds import ProfilerKind


@verb
def profile(
    _gateway: Gateway,
    engine: EngineId,
    profiler: Annotated[ProfilerKind, typer.Option(help="Which.")] = ProfilerKind.TORCH,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps of the engine.")] = None,
    duration_ms: Annotated[int | None, typer.Option(min=1, help="Or how long.")] = None,
    record_shapes: Annotated[bool, typer.Option("--record-shapes")] = False,
    with_stack: Annotated[bool, typer.Option("--with-stack")] = False,
) -> Order:
    """Record what an engine does, into one file per rank."""
    if (steps is None) == (duration_ms is None):
        raise usage("say --steps, or --duration-ms")
    bound: Json = {"steps": steps} if duration_ms is None else {"duration_ms": duration_ms}
    more = {"record_shapes": record_shapes, "with_stack": with_stack}
    body = {"profiler": profiler.value, **bound, **{name: True for name in more if more[name]}}
    return Order(engine_path(engine, "/profiles"), body)
