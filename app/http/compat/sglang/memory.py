"""Pauses and memory, as SGLang's clients order them.

SGLang asks for no pause around a release of memory: it serves until then, and again after all is
back. An engine of ours closes admission with a release, and a restore never opens it. So a release
makes a pause of its own where there is none, and whatever gives the engine back its last missing
part lifts that one, and no other.
"""

from __future__ import annotations

import asyncio

from app.domain.capabilities import Capabilities
from app.domain.commands import FlushCaches, ReleaseResources, RestoreResources
from app.domain.errors import ChadburnError, UnsupportedOperation
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CacheKind,
    ContentPolicy,
    PauseMode,
    ResourceKind,
)
from app.domain.operation import JsonObject
from app.http.compat import pauses
from app.http.compat.giving import CompatCall
from app.http.compat.pauses import drain_of, pause_of
from app.http.compat.refusals import BadBody, OutcomeUnknown, WouldHarm
from app.http.compat.sglang.bodies import ContinueBody, PauseBody, TagsBody
from app.http.compat.sglang.opening import open_again
from app.http.compat.sglang.pieces import call_off, commit_singles, refuse_open

_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}
_TAGS = {
    "weights": ResourceKind.WEIGHTS,
    "kv_cache": ResourceKind.KV_CACHE,
    "cuda_graph": ResourceKind.EXECUTION_GRAPHS,
}
_FLUSH_MS = 5000
_BETWEEN_FLUSHES_S = 0.5


async def flush(call: CompatCall, timeout_s: float) -> None:
    """Until nothing is in the way, or for so long. Raises WouldHarm: something was."""
    await commit_singles(call)
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    tries = 0
    while True:
        left_s = max(ends_at - loop.time(), 0.0)
        done = await call.give(
            FlushCaches(caches=(CacheKind.PREFIX,)),
            f"flush {tries}" if tries else "",
            deadline_ms=max(_FLUSH_MS, int(left_s * 1000)),
        )
        if not _in_use(done.result or {}):
            return
        tries += 1
        if left_s <= 0:
            why = "Timed out waiting for idle state." if timeout_s else "Flush cache failed."
            raise WouldHarm(why)
        await asyncio.sleep(min(_BETWEEN_FLUSHES_S, left_s))


async def pause(call: CompatCall, body: PauseBody) -> None:
    """Whoever pauses anew has given up what was being sent before."""
    await call_off(call)
    await call.give(pause_of(call, _MODES[body.mode]))


async def proceed(call: CompatCall, _: ContinueBody) -> None:
    """`continue_generation`. Nothing to be lifted is no error there."""
    await commit_singles(call)
    await refuse_open(call)
    await pauses.resume(call, "memory of the engine is released: resume it first")


async def release(call: CompatCall, body: TagsBody) -> None:
    facts = await call.facts()
    kinds = tuple(kind for kind in _named(call.can, body) if kind not in facts.released)
    if not kinds:
        return
    if facts.admission is Admission.OPEN:
        await call.give(pause_of(call, _own_mode(call.can)), "pause")
    try:
        for content, some in _by_content(call.can, kinds):
            order = ReleaseResources(resources=some, content=content, drain=drain_of(call.can))
            await call.give(order, f"release {content.value}")
    except OutcomeUnknown:
        raise
    except ChadburnError:
        await open_again(call)
        raise


async def resume(call: CompatCall, body: TagsBody) -> None:
    """What is not released is where it should be: SGLang ends over that."""
    await commit_singles(call)
    facts = await call.facts()
    kinds = tuple(kind for kind in _named(call.can, body) if kind in facts.released)
    if kinds:
        await call.give(
            RestoreResources(resources=kinds, release_epoch=facts.release_epoch), "restore"
        )
    await open_again(call)


async def ready(call: CompatCall, _: None) -> bool:
    return (await call.facts()).serving


def held(facts: EngineFacts) -> int:
    """Requests that a pause has stopped in the middle."""
    return 0 if facts.pause is None else facts.pause.requests_kept


def _named(can: Capabilities, body: TagsBody) -> tuple[ResourceKind, ...]:
    """None named: all that the engine can give back. Raises BadBody, UnsupportedOperation."""
    if not body.tags:
        return tuple(kind for kind in ResourceKind if kind in can.resources)
    if any(tag not in _TAGS for tag in body.tags):
        known = ", ".join(_TAGS)
        raise BadBody(f"there is a tag that is not known, and nothing was done; tags: {known}")
    wanted = {_TAGS[tag] for tag in body.tags}
    kinds = tuple(kind for kind in ResourceKind if kind in wanted and kind in can.resources)
    # Clients name all three of an engine that has recorded no graphs.
    if not kinds or wanted - set(kinds) - {ResourceKind.EXECUTION_GRAPHS}:
        raise UnsupportedOperation("this engine does not give back what the tags name")
    return kinds


def _by_content(
    can: Capabilities, kinds: tuple[ResourceKind, ...]
) -> list[tuple[ContentPolicy, tuple[ResourceKind, ...]]]:
    """Content is kept where the engine can keep it: in one order where all agree, else in two."""
    for content in (ContentPolicy.PRESERVE, ContentPolicy.DISCARD):
        if all(content in can.resources[kind] for kind in kinds):
            return [(content, kinds)]
    keeps = tuple(kind for kind in kinds if ContentPolicy.PRESERVE in can.resources[kind])
    drops = tuple(kind for kind in kinds if kind not in keeps)
    return [(ContentPolicy.PRESERVE, keeps), (ContentPolicy.DISCARD, drops)]


def _own_mode(can: Capabilities) -> PauseMode:
    """Requests that run are waited for, where the engine can wait."""
    return PauseMode.DRAIN if PauseMode.DRAIN in can.pause_modes else PauseMode.ABORT


def _in_use(result: JsonObject) -> bool:
    caches = result.get("caches")
    rows = caches if isinstance(caches, list) else []
    return any(isinstance(one, dict) and bool(one.get("blocks_in_use")) for one in rows)
