"""The kit's feed of cache events: whoever applies them in order has the cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conformance.cache_view import CacheView
from app.enginekit.cache_events import (
    CacheEvent,
    CacheEventFeed,
    ClearedBlocks,
    RemovedBlocks,
    StoredBlock,
)
from app.enginekit.runtime import RequestRefused
from app.rpc.openengine.v1 import error_pb2, kv_pb2

pytestmark = pytest.mark.anyio

START = 1000


def feed(**options: Any) -> CacheEventFeed:
    return CacheEventFeed(block_size=2, now_ns=lambda: START, **options)


def block(key: bytes, parent: bytes = b"", **options: Any) -> StoredBlock:
    return StoredBlock(key=key, parent=parent, token_ids=(key[0], 7), **options)


def subscribed(
    to: CacheEventFeed, *, snapshot: bool = False, start: int = 0, ranks: Sequence[int] = ()
) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
    return to.subscribe(
        kv_pb2.SubscribeKvEventsRequest(
            include_snapshot=snapshot, start_sequence_number=start, data_parallel_ranks=ranks
        )
    )


async def batches(told: AsyncIterator[Any], count: int) -> list[kv_pb2.KvEventBatch]:
    async with asyncio.timeout(10):
        return [(await anext(told)).batch for _ in range(count)]


async def test_what_follows_is_told_as_it_happens() -> None:
    source = feed()
    source.tell([block(b"a")])
    told = subscribed(source)
    waiting = asyncio.create_task(batches(told, 2))
    await asyncio.sleep(0)
    source.tell([block(b"b", b"a", request_id="r"), block(b"c", b"b", request_id="r")])
    source.tell([RemovedBlocks((b"a",))])
    first, second = await waiting
    assert (first.sequence_number, second.sequence_number) == (START + 2, START + 3)
    (event,) = first.events  # one chain, one event
    stored = event.block_stored
    assert [one.value for one in stored.block_hashes] == [b"b", b"c"]
    assert (stored.parent_block_hash.value, list(stored.token_ids)) == (b"a", [98, 7, 99, 7])
    assert (stored.block_size, event.request_id) == (2, "r")
    assert [one.value for one in second.events[0].block_removed.block_hashes] == [b"a"]


async def test_a_snapshot_is_the_cache_and_what_follows_it_continues() -> None:
    source = feed()
    source.tell([block(b"x"), block(b"y", b"x", extra=("salt",))])
    source.tell([RemovedBlocks((b"x",))])
    source.tell([block(b"x")])  # again, and now after the block that follows it
    told = subscribed(source, snapshot=True)
    (snapshot,) = await batches(told, 1)
    assert snapshot.events[0].HasField("all_blocks_cleared")
    stored = [event.block_stored for event in snapshot.events[1:]]
    assert [one.block_hashes[0].value for one in stored] == [b"x", b"y"]
    assert stored[1].extra_keys[0].values == ["salt"]
    assert snapshot.sequence_number == START + 3
    source.tell([ClearedBlocks()])
    (after,) = await batches(told, 1)
    assert after.sequence_number == START + 4


async def test_a_large_snapshot_comes_in_parts_of_which_the_last_is_numbered() -> None:
    source = feed()
    keys = [number.to_bytes(2) for number in range(2500)]
    source.tell([block(key) for key in keys])
    parts = await batches(subscribed(source, snapshot=True), 3)
    assert [part.sequence_number for part in parts] == [0, 0, START + 1]
    view = CacheView()
    for part in parts:
        view.take(part)
    assert set(view.blocks) == set(keys)


async def test_blocks_that_follow_one_another_in_a_circle_have_a_snapshot() -> None:
    source = feed()
    source.tell([block(b"x"), block(b"y", b"x"), RemovedBlocks((b"x",)), block(b"x", b"y")])
    (snapshot,) = await batches(subscribed(source, snapshot=True), 1)
    view = CacheView()
    view.take(snapshot)
    assert {key: one.parent for key, one in view.blocks.items()} == {b"x": b"y", b"y": b"x"}


async def test_an_empty_cache_has_a_snapshot_too() -> None:
    (snapshot,) = await batches(subscribed(feed(), snapshot=True), 1)
    assert [event.WhichOneof("event") for event in snapshot.events] == ["all_blocks_cleared"]


async def test_missed_batches_are_told_again() -> None:
    source = feed(kept_batches=3)
    for key in (b"a", b"b", b"c", b"d"):
        source.tell([block(key)])
    told = await batches(subscribed(source, start=START + 2), 3)
    assert [batch.sequence_number for batch in told] == [START + 2, START + 3, START + 4]
    # Where the snapshot is not needed, it is not sent.
    (again,) = await batches(subscribed(source, start=START + 4, snapshot=True), 1)
    assert not again.events[0].HasField("all_blocks_cleared")


@pytest.mark.parametrize("start", [1, START + 1, START + 6])
async def test_what_cannot_be_told_again_is_refused_or_becomes_a_snapshot(start: int) -> None:
    """Too long ago, of an earlier life, or not yet."""
    source = feed(kept_batches=3)
    for key in (b"a", b"b", b"c", b"d"):
        source.tell([block(key)])
    with pytest.raises(RequestRefused, match="snapshot") as refused:
        await anext(subscribed(source, start=start))
    assert refused.value.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    (snapshot,) = await batches(subscribed(source, start=start, snapshot=True), 1)
    assert snapshot.events[0].HasField("all_blocks_cleared")


async def test_the_slow_are_ended_and_told_so() -> None:
    source = feed(kept_batches=3)
    told = subscribed(source, snapshot=True)
    await batches(told, 1)
    for number in range(5):
        source.tell([block(bytes([number]))])
    ended = await anext(told)
    assert ended.error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert ended.error.retryable
    assert "2 batches" in ended.error.message
    with pytest.raises(StopAsyncIteration):
        await anext(told)


async def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(RequestRefused, match="rank 3"):
        await anext(subscribed(feed(), ranks=[0, 3]))
    with pytest.raises(RequestRefused, match="rank 1"):
        feed().sources(kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=[1]))
    (source,) = feed().sources(kv_pb2.GetKvEventSourcesRequest()).sources
    assert (source.transport, source.data_parallel_rank) == ("grpc", 0)
    assert not source.HasField("endpoint_addr")


def at_once(told: AsyncIterator[Any]) -> kv_pb2.KvEventBatch:
    """A batch that is there: nothing is waited for, so no loop is needed."""
    step = anext(told)
    with pytest.raises(StopIteration) as done:
        step.send(None)  # type: ignore[attr-defined]
    batch: kv_pb2.KvEventBatch = done.value.value.batch
    return batch


KEYS = [bytes([number]) for number in range(6)]


@given(
    steps=st.lists(
        st.lists(st.sampled_from([*KEYS, b"clear"]), min_size=1, max_size=4), max_size=10
    ),
    joins_at=st.integers(0, 9),
    kept=st.integers(1, 8),
)
def test_every_subscriber_has_the_cache(steps: list[list[bytes]], joins_at: int, kept: int) -> None:
    """Whenever they come, and whether they begin with a snapshot or go on from a number."""
    source, real = feed(kept_batches=kept), dict[bytes, bytes]()
    late = CacheView()
    for at, step in enumerate(steps):
        if at == joins_at:
            late.take(at_once(subscribed(source, snapshot=True)))
        events: list[CacheEvent] = []
        for key in step:
            if key == b"clear":
                real.clear()
                events.append(ClearedBlocks())
            elif key in real:
                del real[key]
                events.append(RemovedBlocks((key,)))
            else:
                real[key] = next(reversed(real), b"")
                events.append(block(key, real[key]))
        source.tell(events)
        if late.last:
            late.take(at_once(subscribed(source, start=late.last + 1)))
            assert {key: one.parent for key, one in late.blocks.items()} == real
    assert source.blocks == len(real)
