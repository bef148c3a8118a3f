"""A trainer's update in pieces: ONE operation of the ledger, a weight session. The pieces of one
caller are found by the ledger, so any gateway takes any of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import cast

from app.domain.commands import UpdateWeights, command_of
from app.domain.engine_payloads import EnginePayloadChunk
from app.domain.errors import ChunkOutOfOrder, EngineBusy, SessionClosed
from app.domain.kinds import Component, OperationKind, OperationState
from app.domain.operation import Operation
from app.domain.weight_sessions import (
    Chunk,
    Payload,
    SessionStage,
    SessionWeights,
    Stage,
    Transfer,
)
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import OrderFailed
from app.http.records import caller_of
from app.ledger.stages import Taken
from app.operations.sessions import StageRequest, is_staged
from app.operations.stage_sending import session_id_of

LEASE_MS = 600_000
"""A trainer that says nothing for so long is gone, and the engine must not stay as it left it."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The caller's session that is open on the engine."""

    operation: Operation
    session_id: str
    transfer: Transfer

    @property
    def update(self) -> UpdateWeights:
        begun = command_of(OperationKind.UPDATE_WEIGHTS, self.operation.request)
        return cast("UpdateWeights", begun)

    @property
    def components(self) -> tuple[Component, ...]:
        return self.update.components


async def open_session_of(call: CompatCall) -> OpenSession | None:
    """Begun by this caller at this layer."""
    for operation in await call.house.ledger.operations.open_ones(call.engine.id):
        session_id = session_id_of(operation)
        if session_id is not None and is_ours(call, session_id) and operation.actor == call.actor:
            begun = cast("UpdateWeights", command_of(operation.kind, operation.request))
            transfer = cast("SessionWeights", begun.source).transfer
            return OpenSession(operation, session_id, transfer)
    return None


def is_ours(call: CompatCall, session_id: str) -> bool:
    return session_id.startswith(f"{call.layer}-")


def transfer_of_latest(call: CompatCall, latest: Operation | None) -> Transfer | None:
    """How the pieces of that update travelled, if it is one of this layer's."""
    if latest is None or not is_ours(call, session_id_of(latest) or ""):
        return None
    begun = cast("UpdateWeights", command_of(latest.kind, latest.request))
    return cast("SessionWeights", begun.source).transfer


async def begin_session(
    call: CompatCall, command: UpdateWeights, part: str = "start"
) -> OpenSession:
    """Waited for until the engine has taken it on. What comes after that is told by the pieces.
    The source of `command` is a session. `part`: see `CompatCall.give`."""
    source = cast("SessionWeights", command.source)
    session_id, transfer = source.session_id, source.transfer
    try:
        operation = await call.begin(command, part)
    except EngineBusy:
        # Of the same call twice at once each has a session of another name.
        twin = await open_session_of(call)
        if twin is None or twin.transfer != transfer or twin.components != command.components:
            raise
        operation, session_id = twin.operation, twin.session_id
    operation = await call.until(operation, lambda one: one.engine_operation_id is not None)
    if operation.done and operation.state is not OperationState.SUCCEEDED:
        raise OrderFailed(operation)
    return OpenSession(operation, session_id, transfer)


async def take_piece(call: CompatCall, found: OpenSession, payload: Payload) -> None:
    """Waited for until every rank has staged it. A piece that is the very same as the latest one
    is that one sent again."""
    while True:
        try:
            index, operation = await _taken(call, found, payload)
            break
        except ChunkOutOfOrder:
            continue  # another piece of this caller's was taken meanwhile
    seen = await call.until(operation, lambda one: is_staged(one, index))
    if not is_staged(seen, index):
        raise OrderFailed(seen)


async def take_once(call: CompatCall, found: OpenSession, payload: EnginePayloadChunk) -> None:
    """As `take_piece`, of what the engine must not be sent twice: the very same as any earlier one
    of the session is that one sent again, whichever gateway took it."""
    stages = call.house.ledger.stages
    named = f"{found.operation.id} {payload.sha256}"
    while True:
        taken = await stages.taken(found.operation.id)
        request = StageRequest(
            engine_id=call.engine.id,
            command=SessionStage(found.session_id, Chunk(taken.chunks, payload)),
            actor=call.actor,
            caller=caller_of(call.request, call.who, call.note),
            key=f"{call.layer}-{hashlib.sha256(named.encode()).hexdigest()}",
            fingerprint=payload.sha256,
        )
        try:
            accepted = await call.house.sessions.go_on(request)
            break
        except ChunkOutOfOrder:
            continue  # another piece of this caller's was taken meanwhile
    index = taken.chunks
    if not accepted.fresh:  # it is among those that were taken by now
        index = (await stages.taken(found.operation.id)).chunks - 1
    seen = await call.until(accepted.operation, lambda one: is_staged(one, index))
    if not is_staged(seen, index) and seen.state is not OperationState.SUCCEEDED:
        raise OrderFailed(seen)


async def close_session(call: CompatCall, found: OpenSession, stage: Stage, part: str) -> Operation:
    """Or the very same call, which has closed the session already and is under way. Raises
    SessionClosed, UnknownSession."""
    stages = call.house.ledger.stages
    if stage == await _latest(call, found, await stages.taken(found.operation.id)):
        return found.operation
    try:
        return await _go_on(call, found, stage, part)
    except SessionClosed:
        if stage != await _latest(call, found, await stages.taken(found.operation.id)):
            raise
        return found.operation


async def _taken(call: CompatCall, found: OpenSession, payload: Payload) -> tuple[int, Operation]:
    """Its index."""
    taken = await call.house.ledger.stages.taken(found.operation.id)
    index = taken.chunks
    latest = await _latest(call, found, taken)
    if isinstance(latest, Chunk) and latest.payload == payload:
        return latest.index, found.operation
    operation = await _go_on(call, found, Chunk(index, payload), "piece")
    return index, operation


async def _latest(call: CompatCall, found: OpenSession, taken: Taken) -> Stage | None:
    if not taken.calls:
        return None
    (latest,) = await call.house.ledger.stages.after(found.operation.id, taken.calls - 1, 1)
    return latest.stage


async def _go_on(call: CompatCall, found: OpenSession, stage: Stage, part: str) -> Operation:
    request = StageRequest(
        engine_id=call.engine.id,
        command=SessionStage(found.session_id, stage),
        actor=call.actor,
        caller=caller_of(call.request, call.who, call.note),
        key=call.key(""),
        fingerprint=call.fingerprint(part),
    )
    return (await call.house.sessions.go_on(request)).operation
