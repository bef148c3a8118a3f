"""vLLM's pausing and sleeping, and what undoes it."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.commands import FlushCaches, ReleaseResources, RestoreResources
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CacheKind,
    ContentPolicy,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.scopes import Scope
from app.http.compat import pauses
from app.http.compat.asked import Asked
from app.http.compat.backing import flushes
from app.http.compat.giving import CompatCall
from app.http.compat.pauses import drain_of, lift, pause_of
from app.http.compat.refusals import BadBody, WouldHarm

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.DRAIN, "keep": PauseMode.KEEP}
_TAGS = {"weights": ResourceKind.WEIGHTS, "kv_cache": ResourceKind.KV_CACHE}
_SCHEDULING = "scheduling"
_SLEEPS = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
_CONTENT = {1: ContentPolicy.PRESERVE, 2: ContentPolicy.DISCARD}


@dataclass(frozen=True, slots=True)
class PauseAsked:
    mode: PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class SleepAsked:
    level: int
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Woken:
    """`tags` None: none were named, so all are meant."""

    awake: bool
    tags: tuple[str, ...] | None


def pause_asked(asked: Asked) -> PauseAsked:
    asked.only("mode", "clear_cache")
    mode = asked.word("mode", tuple(_MODES), "abort")
    clear = asked.flag("clear_cache", default=True)
    asked.agrees_with({"mode": mode, "clear_cache": clear})
    return PauseAsked(_MODES[mode], clear)


def sleep_asked(asked: Asked) -> SleepAsked:
    # Clients are about that name tags here as well, which has never had an effect.
    asked.only("level", "mode", "tags")
    level = asked.number("level", default=1, least=0, most=2)
    mode = asked.word("mode", tuple(_MODES), "abort")
    asked.agrees_with({"level": level, "mode": mode})
    return SleepAsked(level, _MODES[mode])


def tags_asked(asked: Asked) -> tuple[str, ...] | None:
    """Raises BadBody for a tag that vLLM would take without doing anything."""
    asked.only("tags")
    tags = asked.texts("tags")
    asked.agrees_with({"tags": list(tags) or None})
    if any(tag not in _TAGS and tag != _SCHEDULING for tag in tags):
        known = ", ".join((*_TAGS, _SCHEDULING))
        raise BadBody(f"There is a tag that is not known, and nothing was done. Tags: {known}.")
    return tags or None


async def pause(call: CompatCall, asked: PauseAsked) -> None:
    clears = (
        asked.clear_cache
        and asked.mode is not PauseMode.KEEP
        and flushes(CacheKind.PREFIX)(call.can)
    )
    if clears:
        await call.need(Scope.CACHE)
    await call.give(pause_of(call, asked.mode))
    if clears:
        await call.give(FlushCaches(caches=(CacheKind.PREFIX,)), "clear_cache")


async def resume(call: CompatCall, _: None) -> None:
    await pauses.resume(call, "the engine is asleep: wake it up, which also resumes it")


async def sleep(call: CompatCall, asked: SleepAsked) -> int:
    """The level that it is in now."""
    release = ReleaseResources(
        resources=tuple(kind for kind in _SLEEPS if kind in call.can.resources),
        content=_CONTENT.get(asked.level, ContentPolicy.PRESERVE),
        drain=drain_of(call.can),
    )
    earlier = await call.earlier(release) if asked.level else None
    if earlier is not None:  # the pause before it is told by it
        await call.ended(earlier)
        return _level(await call.facts())
    await call.give(pause_of(call, asked.mode), "pause")
    if asked.level:
        await call.give(release, "release")
    return _level(await call.facts())


async def wake_up(call: CompatCall, tags: tuple[str, ...] | None) -> Woken:
    facts = await call.facts()
    wanted = _SLEEPS if tags is None else tuple(_TAGS[tag] for tag in tags if tag in _TAGS)
    asleep = tuple(kind for kind in ResourceKind if kind in facts.released)
    back = tuple(kind for kind in asleep if tags is None or kind in wanted)
    if back:
        restore = RestoreResources(resources=back, release_epoch=facts.release_epoch)
        await call.give(restore, "restore")
        facts = await call.facts()
    usable = facts.weights.state in (WeightsState.VALID, WeightsState.UNKNOWN)
    if not facts.released and usable and facts.admission is not Admission.OPEN:
        await lift(call, facts, "resume")
        facts = await call.facts()
    return Woken(facts.admission is Admission.OPEN and not facts.released, tags)


async def release_kv_cache(call: CompatCall, _: None) -> None:
    facts = await call.facts()
    if facts.admission is not Admission.PAUSED:
        raise WouldHarm("release_kv_cache_memory() requires a completed pause first")
    if facts.released:
        raise WouldHarm("release_kv_cache_memory() requires all memory to be resident")
    await call.give(
        ReleaseResources(
            resources=(ResourceKind.KV_CACHE,),
            content=ContentPolicy.DISCARD,
            drain=drain_of(call.can),
        )
    )


async def is_paused(call: CompatCall, _: None) -> bool:
    facts = await call.facts()
    if facts.admission is Admission.UNKNOWN:
        raise WouldHarm("the engine does not say whether it is paused")
    return facts.admission is not Admission.OPEN


async def is_sleeping(call: CompatCall, _: None) -> bool:
    """As vLLM says it: also of an engine that is only paused."""
    facts = await call.facts()
    if not facts.released and facts.admission is Admission.UNKNOWN:
        raise WouldHarm("the engine does not say whether it is asleep or paused")
    return bool(facts.released) or facts.admission is not Admission.OPEN


def _level(facts: EngineFacts) -> int:
    if not facts.released:
        return 0
    return 2 if facts.weights.state is WeightsState.MISSING else 1
