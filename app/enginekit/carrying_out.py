"""What each kind of order does, once accepted: admission, ranks, and the facts it changes.

A new kind is a reader in `requests`, a function in a module of its own, a row in `CARRYING_OUT`,
and the form of its result in `results`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from app.domain.commands import FlushCaches
from app.domain.kinds import CacheKind, OperationKind
from app.enginekit.adapters import load_lora, unload_lora
from app.enginekit.errands import Ending, Errand, flushed_rows
from app.enginekit.pausing import pause, resume
from app.enginekit.reconfiguring import reconfigure
from app.enginekit.records import NO_CHANGE, REVISION, Counters
from app.enginekit.releasing import release, restore
from app.enginekit.runtime import Observation
from app.enginekit.updating import update_weights


async def flush_caches(errand: Errand) -> Ending:
    command = cast("FlushCaches", errand.command)
    state = errand.state
    conclusion = await errand.over_ranks()
    asked = set(command.caches)
    flushed = [cache for cache in conclusion.flushed if cache.kind in asked]
    # Blocks in use hold on to what older weights computed, so the count of updates stands.
    clean = CacheKind.PREFIX in asked and not any(cache.blocks_in_use for cache in flushed)
    changed = conclusion.changed or (clean and state.weights.updates_since_flush > 0)

    def settle(_: Counters, seen: Observation | None) -> None:
        state.flushed(seen, clean=clean)

    return Ending(
        result=lambda _: {"changed": changed, "caches": flushed_rows(flushed)},
        change=REVISION if changed else NO_CHANGE,
        settle=settle if changed else None,
        proved=conclusion.proved,
    )


CARRYING_OUT: Mapping[OperationKind, Callable[[Errand], Awaitable[Ending]]] = {
    OperationKind.FLUSH_CACHES: flush_caches,
    OperationKind.PAUSE: pause,
    OperationKind.RESUME: resume,
    OperationKind.RELEASE_RESOURCES: release,
    OperationKind.RESTORE_RESOURCES: restore,
    OperationKind.UPDATE_WEIGHTS: update_weights,
    OperationKind.RECONFIGURE_SERVING: reconfigure,
    OperationKind.LOAD_LORA: load_lora,
    OperationKind.UNLOAD_LORA: unload_lora,
}
