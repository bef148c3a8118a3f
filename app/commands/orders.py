"""The order verbs: pause, resume, flush, abort, release, restore, shutdown."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import Gateway, Json
from app.commands.ordering import Order, verb
from app.commands.printing import note
from app.domain.kinds import (
    CacheKind,
    ContentPolicy,
    DrainRule,
    NewRequests,
    PauseMode,
    ResourceKind,
)

EngineId = Annotated[str, typer.Argument(metavar="ENGINE", help="Id of the engine.")]


def engine_path(engine: str, rest: str = "") -> str:
    if engine in {"", ".", ".."} or "/" in engine:
        raise usage("an engine's id is not empty and has no slash")
    return f"/v1/engines/{quote(engine, safe='')}{rest}"


@verb
def pause(
    _gateway: Gateway,
    engine: EngineId,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of the work in flight.")],
    new_requests: Annotated[
        NewRequests, typer.Option(help="What becomes of requests that come meanwhile.")
    ] = NewRequests.HOLD,
    hold_limit_ms: Annotated[
        int | None, typer.Option(min=1, help="Longest a request is held.")
    ] = None,
) -> Order:
    """Close an engine's admission; what runs is drained, aborted or kept for later."""
    body: Json = {"mode": mode.value, "new_requests": new_requests.value}
    if hold_limit_ms is not None:
        body["hold_limit_ms"] = hold_limit_ms
    return Order(engine_path(engine, "/pause"), body)


@verb
def resume(
    gateway: Gateway,
    engine: EngineId,
    pause_epoch: Annotated[
        int | None, typer.Option(min=1, help="The pause to lift; else the one now in force.")
    ] = None,
) -> Order:
    """Open an engine's admission again.

    Without --pause-epoch the pause in force is read from the engine's facts and shown, and the
    order holds only while the engine is still at the revision that was read.
    """
    path = engine_path(engine, "/resume")
    if pause_epoch is not None:
        return Order(path, {"pause_epoch": pause_epoch})
    found = gateway.get(engine_path(engine))
    in_force = (found.get("facts") or {}).get("pause")
    if not in_force or not in_force["epoch"]:  # 0: a drain that has not taken effect
        how = "still drains" if in_force else "is not paused"
        line = f"engine {engine} {how}, as far as is known"
        if running := found.get("running_operation"):
            line += f"; an order runs: chadburn ops watch {running}, or ops cancel"
        raise CommandFailed(Exit.REFUSED, line)
    epoch, revision = int(in_force["epoch"]), found.get("revision")
    note(f"lifting pause {epoch} ({in_force['mode']}, by {in_force['by']}) at revision {revision}")
    return Order(path, {"pause_epoch": epoch}, revision, f"--pause-epoch {epoch}")


@verb
def flush(
    _gateway: Gateway,
    engine: EngineId,
    cache: Annotated[
        list[CacheKind] | None, typer.Option(help="Which cache, once per cache; else prefix.")
    ] = None,
) -> Order:
    """Empty an engine's caches."""
    named = [kind.value for kind in cache or [CacheKind.PREFIX]]
    return Order(engine_path(engine, "/flush-caches"), {"caches": named})


@verb
def abort(
    _gateway: Gateway,
    engine: EngineId,
    request_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[REQUEST]...", help="Requests to end.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="End all of them.")] = False,
) -> Order:
    """End requests of an engine before their time."""
    if everything == bool(request_ids):
        raise usage("name the requests to end, or say --all")
    body: Json = {"all": True} if everything else {"request_ids": request_ids}
    return Order(engine_path(engine, "/abort-requests"), body)


@verb
def shutdown(_gateway: Gateway, engine: EngineId) -> Order:
    """End an engine, and the requests it has with it."""
    return Order(engine_path(engine, "/shutdown"), {})


@verb
def release(
    _gateway: Gateway,
    engine: EngineId,
    resource: Annotated[list[ResourceKind], typer.Option(help="Which, once per resource.")],
    content: Annotated[
        ContentPolicy, typer.Option(help="Keep its content on the host, or drop it.")
    ],
    drain: Annotated[DrainRule, typer.Option(help="What becomes of the work in flight.")],
) -> Order:
    """Close an engine's admission and give memory of it back."""
    return Order(
        engine_path(engine, "/release-resources"),
        {
            "resources": [kind.value for kind in resource],
            "content": content.value,
            "drain": drain.value,
        },
    )


@verb
def restore(
    gateway: Gateway,
    engine: EngineId,
    resource: Annotated[
        list[ResourceKind] | None, typer.Option(help="Which, once per resource; else all released.")
    ] = None,
    release_epoch: Annotated[
        int | None, typer.Option(min=1, help="The latest release; else the one that is known.")
    ] = None,
) -> Order:
    """Take an engine's released memory again. Admission stays closed: resume opens it.

    What is not given is read from the engine's facts and shown, and the order holds only while the
    engine is still at the revision that was read.
    """
    path = engine_path(engine, "/restore-resources")
    named = [kind.value for kind in resource or []]
    if named and release_epoch is not None:
        return Order(path, {"resources": named, "release_epoch": release_epoch})
    found = gateway.get(engine_path(engine))
    facts = found.get("facts") or {}
    read = [] if named else [f"--resource {name}" for name in facts.get("released") or []]
    named = named or list(facts.get("released") or [])
    if not named or not facts.get("release_epoch"):
        line = f"nothing of engine {engine} is released, as far as is known"
        raise CommandFailed(Exit.REFUSED, line)
    epoch, revision = release_epoch or int(facts["release_epoch"]), found.get("revision")
    note(f"restoring {', '.join(named)} of release {epoch} at revision {revision}")
    read += [] if release_epoch else [f"--release-epoch {epoch}"]
    return Order(path, {"resources": named, "release_epoch": epoch}, revision, " ".join(read))
