"""The verb reconfigure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from app.commands.ending import usage
from app.commands.http import Gateway, Json
from app.commands.ordering import Order, verb
from app.commands.orders import EngineId, engine_path
from app.domain.kinds import DrainRule


class Role(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@verb
def reconfigure(
    _gateway: Gateway,
    engine: EngineId,
    drain: Annotated[DrainRule, typer.Option(help="What becomes of the work in flight.")],
    role: Annotated[Role | None, typer.Option(help="What it does for others.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Ranks.")] = None,
    data_parallel_size: Annotated[int | None, typer.Option(min=1, help="Ranks.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="Requests.")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a step.")] = None,
) -> Order:
    """Give an engine another role, parallelism or limits; what is not named stays."""
    targets: Json = {
        "role": None if role is None else role.value,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "max_running_requests": max_running_requests,
        "max_batched_tokens": max_batched_tokens,
    }
    body = {name: wanted for name, wanted in targets.items() if wanted is not None}
    if not body:
        raise usage("name at least one target")
    return Order(engine_path(engine, "/reconfigure"), body | {"drain": drain.value})
