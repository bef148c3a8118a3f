"""Weights from a checkpoint on disk, and the ends of updates in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from app.domain.commands import SetWeightVersion, UpdateWeights
from app.domain.facts import EngineFacts
from app.domain.kinds import Component, WeightSourceKind
from app.domain.weight_sessions import (
    CommitSession,
    DiskChunk,
    DiskTransfer,
    SessionWeights,
    check_version,
)
from app.domain.weight_sources import DiskWeights, WeightSource
from app.http.compat.checkpoints import UNNAMED
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadBody
from app.http.compat.sessions import LEASE_MS, begin_session, close_session, take_piece
from app.http.compat.sglang import pieces
from app.http.compat.sglang.bodies import DiskBody, EndBody, VersionBody
from app.http.compat.sglang.memory import held
from app.http.compat.sglang.opening import open_again
from app.http.compat.transfers import is_path

_FORMATS = (None, "auto", "safetensors")


@dataclass(frozen=True, slots=True)
class Updated:
    version: str
    requests_held: int


async def from_disk(call: CompatCall, body: DiskBody) -> Updated:
    path = _checkpoint(body)
    if body.weight_version is not None:
        check_version(body.weight_version, "/weight_version")
    await pieces.refuse_open(call)
    facts = await call.facts()
    if WeightSourceKind.DISK in call.can.weight_sources:
        command = await _command(call, body, facts, DiskWeights(str(path)))
        # A name that is still in force tells a repetition; a path alone may hold new files.
        named = body.weight_version is not None
        earlier = await call.earlier(command, lasting=named)
        if earlier is None:
            await call.give(command)
        else:
            await call.ended(earlier)
    else:
        await _by_session(call, body, facts, path)
    await open_again(call)
    return Updated((await call.facts()).weights.version or UNNAMED, held(facts))


async def end(call: CompatCall, body: EndBody) -> None:
    await pieces.end(call, body)
    await open_again(call)


async def set_version(call: CompatCall, body: VersionBody) -> str:
    """Requests go on: a name is no reason to end them, as it is there unless it is told not to."""
    check_version(body.new_version, "/new_version")
    await pieces.commit_singles(call)
    await call.give(SetWeightVersion(weight_version=body.new_version))
    return body.new_version


async def _by_session(
    call: CompatCall, body: DiskBody, facts: EngineFacts, path: PurePosixPath
) -> None:
    """For an engine that takes files, but not by one order."""
    source = SessionWeights(
        f"{call.layer}-bounded-{call.house.new_id()}", DiskTransfer(str(path.parent)), LEASE_MS
    )
    found = await begin_session(call, await _command(call, body, facts, source))
    await take_piece(call, found, DiskChunk((path.name,)))
    await call.ended(await close_session(call, found, CommitSession(1), "commit"))


async def _command(
    call: CompatCall, body: DiskBody, facts: EngineFacts, source: WeightSource
) -> UpdateWeights:
    return UpdateWeights(
        source=source,
        weight_version=body.weight_version or facts.weights.version or UNNAMED,
        cache_policy=pieces.cache_policy_of(call, facts, flush=body.flush_cache),
        admission=await pieces.admission_of(call, facts, abort_all=body.abort_all_requests),
        components=(Component.TARGET,),
    )


def _checkpoint(body: DiskBody) -> PurePosixPath:
    """Raises BadBody. What SGLang ends over, or takes from elsewhere than a disk, is not sent."""
    path = PurePosixPath(body.model_path)
    if not path.is_absolute() or not path.name or not is_path(body.model_path):
        raise BadBody("model_path must be the absolute path of a folder on the engine's machine")
    if body.load_format not in _FORMATS:
        raise BadBody("load_format may be auto or safetensors")
    if body.manifest is not None:
        raise BadBody("manifest is not taken by this gateway")
    if body.recapture_cuda_graph:
        raise BadBody("recapture_cuda_graph is part of no order of this gateway")
    return path
