"""Ending requests through the core Control service: one call per id, each with its own outcome.

The engine keeps no record of these calls. Whatever reply is lost stays unverified, and nothing is
sent twice: an id could by then belong to another request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from app.backends.endpoint import CLOSED, was_asked_to_stop
from app.backends.port import EngineRefused
from app.backends.status_map import for_the_log, refusal_of
from app.domain.commands import AbortRequests
from app.domain.kinds import AbortOutcome, Verification
from app.domain.operation import JsonObject, JsonValue, OperationError, Progress
from app.domain.transitions import Completed, Fact, Progressed
from app.rpc.openengine.v1 import lifecycle_pb2

log = logging.getLogger(__name__)

_AT_ONCE = 8

Send = Callable[[lifecycle_pb2.AbortRequest], Coroutine[Any, Any, lifecycle_pb2.AbortResponse]]
"""One call with a deadline. Raises AioRpcError."""

_OUTCOMES = {
    lifecycle_pb2.ABORT_STATUS_ABORTED: AbortOutcome.ABORTED,
    lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
}


@dataclass(frozen=True, slots=True)
class _Reply:
    outcome: AbortOutcome
    refusal: OperationError | None = None


async def abort_requests(
    command: AbortRequests, send: Send, late: Callable[[], bool]
) -> AsyncGenerator[Fact, None]:
    """Progress while it goes, then Completed. `late`: the deadline is over, and what has not been
    sent by then has failed. Raises EngineRefused if the engine takes no such call at all from
    this gateway, so that nothing was done."""
    if command.all:
        every = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        reply = await _one(every, send)
        if reply.refusal is not None:
            raise EngineRefused(reply.refusal)
        yield _completed({}, reply.outcome)
        return
    outcomes: dict[str, AbortOutcome] = {}
    refusals: list[OperationError] = []
    ids = command.request_ids
    for start in range(0, len(ids), _AT_ONCE):
        if late():
            outcomes |= dict.fromkeys(ids[start:], AbortOutcome.FAILED)
            break
        some = ids[start : start + _AT_ONCE]
        calls = [_one(lifecycle_pb2.AbortRequest(request_id=each), send) for each in some]
        for each, reply in zip(some, await asyncio.gather(*calls), strict=True):
            outcomes[each] = reply.outcome
            if reply.refusal is not None:
                refusals.append(reply.refusal)
        if len(outcomes) < len(ids):
            yield Progressed(progress=Progress("aborting", len(outcomes), len(ids), "requests"))
    if len(refusals) == len(ids):
        raise EngineRefused(refusals[0])
    yield _completed(outcomes, None)


def all_unverified(command: AbortRequests) -> Completed:
    """How it ends when nobody heard the replies."""
    lost = AbortOutcome.UNVERIFIED
    return _completed(dict.fromkeys(command.request_ids, lost), lost if command.all else None)


async def _one(request: lifecycle_pb2.AbortRequest, send: Send) -> _Reply:
    try:
        response = await send(request)
    except CLOSED as closed:
        if was_asked_to_stop(closed):
            raise
        return _Reply(AbortOutcome.UNVERIFIED)
    except grpc.aio.AioRpcError as error:
        refusal = refusal_of(error)
        if refusal is None:
            log.warning("the reply to an abort was lost: %s", for_the_log(error))
            return _Reply(AbortOutcome.UNVERIFIED)
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return _Reply(AbortOutcome.NOT_FOUND)
        log.warning("an abort was refused: %s", for_the_log(error))
        return _Reply(AbortOutcome.FAILED, refusal)
    return _Reply(_OUTCOMES.get(response.status, AbortOutcome.UNVERIFIED))


def _completed(outcomes: dict[str, AbortOutcome], every: AbortOutcome | None) -> Completed:
    found = {*outcomes.values()} | ({every} if every is not None else set())
    requests: list[JsonValue] = [
        {"request_id": each, "outcome": outcome.value} for each, outcome in outcomes.items()
    ]
    result: JsonObject = {
        "changed": AbortOutcome.ABORTED in found,
        "requests": requests,
        "all": None if every is None else every.value,
    }
    unsure = AbortOutcome.UNVERIFIED in found
    return Completed(
        result=result,
        verification=Verification.UNVERIFIED if unsure else Verification.VERIFIED,
    )
