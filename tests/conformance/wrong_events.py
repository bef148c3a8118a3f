"""Wrong about cache events, and about sessions of KV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from app.enginekit.cache_events import CacheEvent, ClearedBlocks
from app.rpc.openengine.v1 import kv_pb2, lifecycle_pb2
from tests.conformance.complete_engine import CompleteEngine
from tests.conformance.faulty import Fault, Forged

_SUBSCRIBE = "SubscribeKvEvents"


class SourcesOfNoRank(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetKvEventSources":
            for source in answer.sources:
                source.ClearField("data_parallel_rank")
        return answer


class AnyRankHasSources(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "GetKvEventSources":
            raise Forged(kv_pb2.GetKvEventSourcesResponse())
        await super().refuse(method, request, context, status)


class TellsEverybody(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == _SUBSCRIBE and status.code is grpc.StatusCode.PERMISSION_DENIED:
            batch = kv_pb2.KvEventBatch(sequence_number=1)
            await context.write(kv_pb2.SubscribeKvEventsResponse(batch=batch))
        else:
            await super().refuse(method, request, context, status)


class SnapshotWithoutClearing(Fault):
    def told(self, method: str, request: Any, event: Any) -> Iterable[Any]:
        if method == _SUBSCRIBE and event.batch.events[0].HasField("all_blocks_cleared"):
            del event.batch.events[0]
        return (event,)


class SnapshotIsNotWhole(Fault):
    """Of what is stored the last chain is left out."""

    def told(self, method: str, request: Any, event: Any) -> Iterable[Any]:
        if method == _SUBSCRIBE and request.include_snapshot and len(event.batch.events) > 1:
            del event.batch.events[-1]
        return (event,)


class SkipsBatches(Fault):
    def told(self, method: str, request: Any, event: Any) -> Iterable[Any]:
        if method == _SUBSCRIBE and event.batch.sequence_number % 3 == 0:
            return ()
        return (event,)


class NumbersAnew(Fault):
    """What is told again has other numbers than before."""

    def told(self, method: str, request: Any, event: Any) -> Iterable[Any]:
        if method == _SUBSCRIBE and request.start_sequence_number:
            event.batch.sequence_number += 1
        return (event,)


class HearsEventsFromNow(Fault):
    """A number to go on from is not looked at."""

    async def asked(self, method: str, request: Any) -> Any:
        if method == _SUBSCRIBE:
            request.start_sequence_number = 0
        return request


class FlushesInSilence(CompleteEngine):
    def tell(self, *events: CacheEvent) -> None:
        super().tell(*(event for event in events if not isinstance(event, ClearedBlocks)))


class EvictsInSilence(Fault):
    """That a block is gone is seen in a snapshot alone."""

    def told(self, method: str, request: Any, event: Any) -> Iterable[Any]:
        if method == _SUBSCRIBE:
            kept = [one for one in event.batch.events if not one.HasField("block_removed")]
            del event.batch.events[:]
            event.batch.events.extend(kept)
        return (event,)


class AbortsAnySession(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "Abort" and request.HasField("kv_session"):
            status_ = lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED
            raise Forged(lifecycle_pb2.AbortResponse(status=status_))
        await super().refuse(method, request, context, status)
