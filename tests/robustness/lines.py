"""The orders of the matrix: what each needs to make sense, how it is given, what ranks do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

import grpc

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.enginekit.client import refusal_of
from tests.reference_engine.calling import Told
from tests.reference_engine.serving import PATIENCE_S
from tests.robustness.stage import Stage

TERMINAL = ("completed", "failed", "cancelled")
KEEP, ABORT, DRAIN = pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_DRAIN
WEIGHTS, KV_CACHE = pb.RESOURCE_KIND_WEIGHTS, pb.RESOURCE_KIND_KV_CACHE
PRESERVE, DISCARD = pb.CONTENT_POLICY_PRESERVE, pb.CONTENT_POLICY_DISCARD


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an order ended, and what was said of its ranks. ``accepted`` False: it never began."""

    applied: bool
    accepted: bool = True
    ranks: tuple[int, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """``prepare``, ``commit``, ``conclude``: the entry of the order log that each phase is to a
    rank; ``conclude`` None: none. ``before`` brings an engine that serves to where the order makes
    sense."""

    name: str
    prepare: str
    commit: str
    conclude: str | None = None
    give: Callable[[Stage], Awaitable[End]]
    before: Callable[[Stage], Awaitable[None]] | None = None

    def entry(self, phase: str) -> str | None:
        return {"prepare": self.prepare, "commit": self.commit, "conclude": self.conclude}[phase]


async def _end(told: Told) -> End:
    """Exactly one end, whatever it is."""
    try:
        last = await told.end()
    except grpc.aio.AioRpcError as refused:
        assert told.events == []
        return End(applied=False, accepted=False, message=refused.details() or "")
    ends = [one for one in told.events if one.WhichOneof("event") in TERMINAL]
    assert ends == [last]
    if last.WhichOneof("event") == "completed":
        return End(applied=True)
    failed = last.failed
    return End(applied=False, ranks=tuple(failed.ranks), message=failed.message)


async def _flush(stage: Stage) -> End:
    request = pb.FlushCachesRequest(idempotency_key=uuid4().hex, caches=[pb.CACHE_KIND_PREFIX])
    return await _end(Told(stage.clients.admin.FlushCaches(request, timeout=PATIENCE_S)))


def _pause(mode: pb.PauseMode.ValueType) -> Callable[[Stage], Awaitable[End]]:
    async def give(stage: Stage) -> End:
        return await _end(stage.clients.pause(mode))

    return give


async def _paused(stage: Stage) -> None:
    await stage.clients.pause(KEEP).completed()


async def _emptied(stage: Stage) -> None:
    await stage.clients.pause(ABORT).completed()


async def _resume(stage: Stage) -> End:
    epoch = (await stage.clients.profile()).pause_epoch
    request = pb.ResumeRequest(idempotency_key=uuid4().hex, pause_epoch=epoch)
    return await _end(Told(stage.clients.admin.Resume(request, timeout=PATIENCE_S)))


def _release(content: pb.ContentPolicy.ValueType) -> Callable[[Stage], Awaitable[End]]:
    async def give(stage: Stage) -> End:
        return await _end(stage.clients.release(WEIGHTS, KV_CACHE, content=content))

    return give


async def _released(stage: Stage) -> None:
    await stage.clients.release(WEIGHTS, KV_CACHE, content=PRESERVE).completed()


async def _restore(stage: Stage) -> End:
    epoch = (await stage.clients.profile()).release_epoch
    return await _end(stage.restore(WEIGHTS, KV_CACHE, epoch=epoch))


async def _update_from_disk(stage: Stage) -> End:
    version = await stage.other_version()
    around = pb.PauseAround(mode=KEEP)
    return await _end(stage.clients.update(version, disk=stage.disk(version), pause=around))


async def _update_from_memory(stage: Stage) -> End:
    version = await stage.other_version()
    told = stage.clients.update(version, tensors=stage.shared(version), under_pause=pb.UnderPause())
    return await _end(told)


async def _limits(stage: Stage) -> End:
    """Of a paused and empty engine, so that what the ranks are asked is the order's own."""
    request = pb.ReconfigureServingRequest(
        idempotency_key=uuid4().hex,
        max_running_requests=stage.another_limit(),
        drain=pb.DRAIN_RULE_WAIT,
    )
    return await _end(Told(stage.clients.admin.ReconfigureServing(request, timeout=PATIENCE_S)))


async def _answered(call: Awaitable[None]) -> End:
    """Of an order that is answered with its outcome, and has no events."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        info = refusal_of(error).metadata
        ranks = tuple(int(rank) for rank in info.get("ranks", "").split(",") if rank)
        return End(
            applied=False,
            accepted="operation_id" in info,
            ranks=ranks,
            message=error.details() or "",
        )
    return End(applied=True)


async def _load(stage: Stage) -> End:
    return await _answered(stage.load("tone"))


async def _loaded(stage: Stage) -> None:
    await stage.load("tone")


async def _unload(stage: Stage) -> End:
    return await _answered(stage.unload("tone"))


LINES = (
    Line(name="flush", prepare="ReadLoad", commit="FlushPrefixCache", give=_flush),
    Line(name="pause-drain", prepare="ReadLoad", commit="SetGate", give=_pause(DRAIN)),
    Line(name="pause-abort", prepare="ReadLoad", commit="SetGate", give=_pause(ABORT)),
    Line(name="pause-keep", prepare="ReadLoad", commit="SetGate", give=_pause(KEEP)),
    Line(name="resume", prepare="ReadLoad", commit="SetGate", give=_resume, before=_paused),
    Line(
        name="release-discard",
        prepare="PrepareRelease",
        commit="CommitChange",
        conclude="SettleChange",
        give=_release(DISCARD),
    ),
    Line(
        name="release-preserve",
        prepare="PrepareRelease",
        commit="CommitChange",
        conclude="SettleChange",
        give=_release(PRESERVE),
    ),
    Line(
        name="restore",
        prepare="PrepareRestore",
        commit="CommitChange",
        conclude="SettleChange",
        give=_restore,
        before=_released,
    ),
    Line(
        name="update-disk",
        prepare="PrepareUpdate",
        commit="CommitChange",
        conclude="SettleChange",
        give=_update_from_disk,
    ),
    Line(
        name="reconfigure-limits",
        prepare="ReadLoad",
        commit="SetLimits",
        give=_limits,
        before=_emptied,
    ),
    Line(
        name="lora-load",
        prepare="PrepareLoad",
        commit="CommitChange",
        conclude="SettleChange",
        give=_load,
    ),
    Line(
        name="lora-unload",
        prepare="PrepareUnload",
        commit="CommitChange",
        conclude="SettleChange",
        give=_unload,
        before=_loaded,
    ),
    Line(
        name="update-memory",
        prepare="PrepareUpdate",
        commit="CommitChange",
        conclude="SettleChange",
        give=_update_from_memory,
        before=_paused,
    ),
)
