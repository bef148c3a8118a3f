"""The first rank's word about its prefix cache, as the kit tells it."""

from __future__ import annotations

from collections.abc import Callable

from app.enginekit.cache_events import (
    CacheEvent,
    CacheEventFeed,
    ClearedBlocks,
    RemovedBlocks,
    StoredBlock,
)
from app.reference_engine.cache_changes import (
    BlockRemoved,
    BlockStored,
    CacheChange,
    CacheChanged,
    CacheCleared,
)
from app.reference_engine.engine import Engine


def feed_of(engine: Engine, now_ns: Callable[[], int]) -> CacheEventFeed:
    """Of an engine that has served nothing yet. It has one data-parallel rank, which is 0."""
    feed = CacheEventFeed(block_size=engine.settings.block_size, now_ns=now_ns)

    def take(changed: CacheChanged) -> None:
        feed.tell([_event(change) for change in changed.changes])

    engine.on_cache = take
    return feed


def _event(change: CacheChange) -> CacheEvent:
    match change:
        case BlockStored(salt=salt):
            return StoredBlock(
                key=bytes.fromhex(change.digest),
                parent=bytes.fromhex(change.parent),
                token_ids=change.token_ids,
                request_id=change.request_id,
                lora_id=change.adapter,
                lora_name=change.adapter_name,
                extra=(salt,) if salt else (),
            )
        case BlockRemoved(digest=digest):
            return RemovedBlocks((bytes.fromhex(digest),))
        case CacheCleared():
            return ClearedBlocks()
