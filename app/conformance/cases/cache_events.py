"""Cache events, and sessions of KV: what the core Control service tells of them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from app.conformance.cache_feed import Batch, CacheFeed, subscribed
from app.conformance.case import Case, Need, NotGiven, NotHeld, NotPromised, case, expect
from app.conformance.client import Client, brief
from app.conformance.record import Refusal
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import kv_pb2, lifecycle_pb2, server_pb2

_C = grpc.StatusCode
_NOT_HERE = (_C.PERMISSION_DENIED, _C.UNAUTHENTICATED, _C.UNIMPLEMENTED)
_NOT_THERE = (_C.INVALID_ARGUMENT, _C.OUT_OF_RANGE, _C.NOT_FOUND, _C.FAILED_PRECONDITION)
_FAR = 1_000_000
# Blocks are stored when they are full: so many tokens fill some of any usual size.
_TOKENS = 64


async def _sources(trial: Trial, *ranks: int) -> Any:
    request = kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=ranks)
    return await trial.client.of_control("GetKvEventSources", request)


async def _require(trial: Trial) -> tuple[kv_pb2.KvEventSource, ...]:
    """Raises NotPromised."""
    answer = await _sources(trial)
    if isinstance(answer, Refusal):
        if answer.code is _C.UNIMPLEMENTED:
            raise NotPromised("the engine offers no cache events")
        raise NotHeld("where cache events are to be had", str(answer))
    return tuple(answer.sources)


async def _require_streamed(trial: Trial) -> None:
    """Raises NotPromised where they are to be had elsewhere alone."""
    if not any(source.transport == "grpc" for source in await _require(trial)):
        raise NotPromised("the engine tells its cache events outside of gRPC")


def _feed(
    trial: Trial, client: Client | None = None, **fields: Any
) -> AbstractAsyncContextManager[CacheFeed]:
    return subscribed(client or trial.client, trial.record, trial.patience_s, **fields)


async def _flush(trial: Trial) -> None:
    """Raises NotPromised."""
    request = trial.flush()
    if pb.CACHE_KIND_PREFIX not in request.caches:
        raise NotPromised("the profile does not offer to flush prefix caches")
    await trial.client.completed(request)


async def _generated(trial: Trial) -> None:
    generation = trial.traffic.ask(_TOKENS)
    await generation.over(trial.patience_s, "while admission is open")
    expect(generation.whole, "a request to be answered", generation)


@case(
    "kvevents.sources",
    "Where cache events are to be had is told for each data-parallel rank; a rank that is not"
    " there is refused.",
)
async def sources(trial: Trial) -> None:
    found = await _require(trial)
    expect(bool(found), "a source", "none")
    for source in found:
        named = bool(source.transport) and source.HasField("data_parallel_rank")
        expect(named, "transport and rank of each source", brief(source))
    answer = await _sources(trial, _FAR)
    refused = isinstance(answer, Refusal) and answer.code in _NOT_THERE
    expect(refused, f"rank {_FAR} to be refused", brief(answer))


@case(
    "kvevents.admin-listener",
    "Cache events carry everybody's tokens: they are told on the admin listener alone.",
    Need.INFERENCE,
)
async def admin_listener(trial: Trial) -> None:
    await _require_streamed(trial)
    assert trial.options.inference is not None
    client = Client(trial.options.inference, trial.record, trial.patience_s)
    try:
        async with _feed(trial, client, include_snapshot=True) as feed:
            answer = await feed.next()
    finally:
        await client.close()
    refused = isinstance(answer, Refusal) and answer.code in _NOT_HERE
    expect(refused, "the subscription to be refused", brief(answer))


@case(
    "kvevents.snapshot",
    "A snapshot begins with a clearing, and its last batch has the number from which events go on.",
)
async def snapshot(trial: Trial) -> None:
    await _require_streamed(trial)
    async with _feed(trial, include_snapshot=True) as feed:
        last = await feed.snapshot()
        expect(last > 0, "a number above 0", last)
        first = feed.batches[0]
        begins = bool(first.events) and first.events[0].HasField("all_blocks_cleared")
        expect(begins, "a clearing to come first", brief(first))
        dated = all(batch.timestamp_unix_nanos for batch in feed.batches)
        expect(dated, "the time of each batch", brief(first))


@case(
    "kvevents.cleared",
    "A flush of the prefix cache is told as a clearing, and no block is left.",
    Need.INFERENCE,
)
async def cleared(trial: Trial) -> None:
    await _require_streamed(trial)
    async with _feed(trial, include_snapshot=True) as feed:
        await feed.snapshot()
        await _generated(trial)
        await _flush(trial)
        while not _clears(await feed.batch()):
            pass
        left = len(feed.view.blocks)
        expect(left == 0, "no block after the flush", left)


def _clears(batch: Batch) -> bool:
    return any(event.HasField("all_blocks_cleared") for event in batch.events)


@case(
    "kvevents.replay",
    "Batches are numbered without a gap, and can be had again under their numbers.",
    Need.INFERENCE,
)
async def replay(trial: Trial) -> None:
    await _require_streamed(trial)
    async with _feed(trial, include_snapshot=True) as feed:
        last = await feed.snapshot()
        await _generated(trial)
        await _flush(trial)
        await _generated(trial)
        first = [await feed.batch(), await feed.batch()]
    async with _feed(trial, start_sequence_number=last + 1) as feed:
        again = [await feed.batch(), await feed.batch()]
    expect(again == first, f"batches {_numbers(first)} as before", f"{_numbers(again)}, changed")


def _numbers(batches: list[Batch]) -> str:
    return " and ".join(str(batch.sequence_number) for batch in batches)


@case(
    "kvevents.unknown-number",
    "A number that cannot be had is refused, or answered with a snapshot where that was asked for:"
    " events are never left out in silence.",
)
async def unknown_number(trial: Trial) -> None:
    await _require_streamed(trial)
    async with _feed(trial, include_snapshot=True) as feed:
        number = await feed.snapshot() + _FAR
    async with _feed(trial, start_sequence_number=number) as feed:
        answer = await feed.next()
        refused = isinstance(answer, Refusal) and answer.code in _NOT_THERE
        expect(refused, f"batch {number} to be refused", brief(answer))
    async with _feed(trial, start_sequence_number=number, include_snapshot=True) as feed:
        await feed.snapshot()
        expect(feed.view.last < number, "a snapshot", f"batch {feed.view.last}")


@case(
    "kvevents.whole",
    "Who applies the events in order has the blocks that the engine has: those of a new snapshot.",
    Need.INFERENCE,
)
async def whole(trial: Trial) -> None:
    await _require_streamed(trial)
    async with _feed(trial, include_snapshot=True) as feed:
        await feed.snapshot()
        seen = 0
        for request in range(3):
            if request == 2 and trial.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
                await trial.client.completed(trial.flush())
            await _generated(trial)
            async with _feed(trial, include_snapshot=True) as fresh:
                last = await fresh.snapshot()
                await feed.reach(last)
                new = fresh.view.blocks
                # Nothing was computed meanwhile, and so the older view is no further.
                expect(feed.view.last == last, f"batch {last} to be the latest", feed.view.last)
            seen = max(seen, len(new))
            told = f"{len(new)} blocks of the snapshot"
            expect(feed.view.blocks == new, told, f"{len(feed.view.blocks)} others")
        if not seen:
            raise NotGiven(f"needs an engine that stores blocks of fewer than {_TOKENS} tokens")


@case(
    "abort.kv-session",
    "A KV session that is not there is NOT_FOUND, one without a name INVALID_ARGUMENT, and where"
    " the engine offers none UNIMPLEMENTED.",
)
async def kv_session(trial: Trial) -> None:
    info = await trial.client.of_control("GetServerInfo", server_pb2.GetServerInfoRequest())
    offered = not isinstance(info, Refusal) and info.kv_connector.enabled
    for name, code in ((f"{trial.prefix}-none", _C.NOT_FOUND), ("", _C.INVALID_ARGUMENT)):
        wanted = code if offered else _C.UNIMPLEMENTED
        session = kv_pb2.KvSessionRef(session_id=name)
        request = lifecycle_pb2.AbortRequest(kv_session=session)
        answer = await trial.client.of_control("Abort", request)
        refused = isinstance(answer, Refusal) and answer.code is wanted
        expect(refused, f"{wanted.name} for session {name!r}", brief(answer))


CASES: tuple[Case, ...] = (
    sources,
    admin_listener,
    snapshot,
    cleared,
    replay,
    unknown_number,
    whole,
    kv_session,
)
