"""Weights that a trainer sends in several calls. From start to finish they are ONE operation of the
ledger, a weight session.

    init       says how the pieces travel; it is kept for the start
    start      begins the session. Where pieces come from disk it begins with the first of them,
               which says where they lie
    update     one piece, waited for until every rank has staged it
    finish     commits, under the version that it names
    shutdown   calls a session off that is open, and forgets what init said
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from app.domain.commands import UnderPause, UpdateWeights, command_of
from app.domain.errors import ChunkOutOfOrder, EngineBusy, SessionClosed, UnknownSession
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Component,
    OperationKind,
    OperationState,
    WeightTransferBackend,
)
from app.domain.operation import Operation
from app.domain.weight_sessions import (
    AbortSession,
    Chunk,
    CommitSession,
    NcclTransfer,
    Payload,
    SessionStage,
    SessionWeights,
    Stage,
    Transfer,
    check_version,
)
from app.http.compat.announcements import Announced
from app.http.compat.asked import Asked, field
from app.http.compat.checkpoints import (
    UNNAMED,
    cache_policy_under,
    keep_whole,
    refuse_unless_as_started,
    refuse_unless_still,
    update_by,
)
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadBody, OrderFailed, WouldHarm
from app.http.compat.transfers import Piece, piece_of, transfer_of, ways
from app.http.records import caller_of
from app.http.refusals import Closing
from app.ledger.stages import Taken
from app.operations.sessions import StageRequest, is_staged
from app.operations.stage_sending import session_id_of

_PREFIX = "vllm-"
_LEASE_MS = 600_000
"""A trainer that says nothing for so long is gone, and the engine must not stay as it left it."""
_JOIN_S = 1800.0


@dataclass(frozen=True, slots=True)
class _Open:
    """The caller's session that is open on the engine."""

    operation: Operation
    session_id: str
    transfer: Transfer

    @property
    def components(self) -> tuple[Component, ...]:
        begun = command_of(OperationKind.UPDATE_WEIGHTS, self.operation.request)
        return cast("UpdateWeights", begun).components


def init_asked(asked: Asked) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", field(asked.model(), "init_info", dict))


def start_asked(asked: Asked) -> None:
    """Trainers send what an earlier release took; vLLM does not look at it."""
    asked.agrees_with({"is_checkpoint_format": True})


def update_asked(asked: Asked) -> Any:
    body = asked.model()
    if isinstance(body.get("update_info"), list):
        return body["update_info"]
    return field(body, "update_info", dict)


def finish_asked(asked: Asked) -> str | None:
    version = field(asked.model(optional=True), "weight_version", str, default=None)
    if version is not None:
        check_version(version, "/weight_version")
    return cast("str | None", version)


async def init(call: CompatCall, init_info: Mapping[str, Any]) -> None:
    """Where engines join a group by a call of its own, this is it: whoever opens the group waits
    for them in theirs."""
    transfer = transfer_of(init_info, ways(call.can))
    if isinstance(transfer, NcclTransfer):
        transfer.check_ranks(call.can.world_size)
        caller = caller_of(call.request, call.who, f"vLLM endpoint {call.name}")
        engine_id, groups = call.engine.id, call.house.groups
        joining = call.house.announcements.joined(
            engine_id,
            call.actor,
            transfer,
            lambda: groups.join(engine_id, transfer, caller, _JOIN_S),
        )
        with call.house.waiting.one_more(call.request):
            if await call.house.closing.unless(joining) is None:
                raise Closing
    call.house.announcements.keep(call.engine.id, call.actor, Announced(transfer))


async def start(call: CompatCall, _: None) -> None:
    await _start(call, Component.TARGET)


async def start_draft(call: CompatCall, _: None) -> None:
    await _start(call, Component.DRAFT)


async def _start(call: CompatCall, component: Component) -> None:
    found = await _open(call)
    if found is not None:
        taken = await call.house.ledger.stages.taken(found.operation.id)
        if taken.calls or found.components != (component,):
            raise WouldHarm(
                "a weight update of yours is open: finish it, or shut the transfer down"
            )
        return  # the same call once more, and nothing has come since
    announced = await _announced(call)
    facts = await call.facts()
    refuse_unless_still(facts)
    if announced.transfer is not None:
        await _begin(call, announced.transfer, component, facts, check_finite=False)
    else:
        waits = Announced(None, component, facts.pause_epoch)
        call.house.announcements.keep(call.engine.id, call.actor, waits)


async def update(call: CompatCall, update_info: Any) -> None:
    found = await _open(call)
    if found is None:
        announced = call.house.announcements.of(call.engine.id, call.actor)
        if announced is None or announced.component is None:
            raise WouldHarm("start_weight_update must be called before update_weights.")
        piece = piece_of(update_info, None)
        assert piece.transfer is not None
        facts = await call.facts()
        refuse_unless_still(facts)
        refuse_unless_as_started(announced, facts)
        component, finite = announced.component, piece.check_finite
        if WeightTransferBackend.DISK not in call.can.weight_sessions:
            keep_whole(call, announced, piece)
            return
        if piece.checkpoint is not None and piece.checkpoint.digests:
            raise BadBody("update_info.files goes with a checkpoint that is taken as a whole")
        found = await _begin(call, piece.transfer, component, facts, check_finite=finite)
        call.house.announcements.keep(call.engine.id, call.actor, Announced())
    else:
        piece = _piece_for(found, update_info)
    while True:
        try:
            index, operation = await _take_piece(call, found, piece.payload)
            break
        except ChunkOutOfOrder:
            continue  # another piece of this caller's was taken meanwhile
    seen = await call.until(operation, lambda one: is_staged(one, index))
    if not is_staged(seen, index):
        raise OrderFailed(seen)


async def finish(call: CompatCall, version: str | None) -> None:
    found = await _open(call)
    if found is None:
        announced = call.house.announcements.of(call.engine.id, call.actor)
        if announced is not None and announced.checkpoint is not None:
            await update_by(call, announced, announced.checkpoint, version)
        else:
            await _finished_already(call, version)
        return
    taken = await call.house.ledger.stages.taken(found.operation.id)
    try:
        operation = await _close(call, found, CommitSession(taken.chunks, version), "finish")
    except UnknownSession:  # it has ended meanwhile, by the same call most likely
        await _finished_already(call, version)
        return
    operation = await call.ended(operation)
    told = (operation.result or {}).get("weight_version")
    if version is not None and told != version:
        raise WouldHarm("the weights are updated, and the engine has not taken their version on")


async def shutdown(call: CompatCall, _: None) -> None:
    found = await _open(call)
    if found is not None:
        operation = await _close(
            call, found, AbortSession("the transfer was shut down"), "shutdown"
        )
        await call.until(operation, lambda one: one.done)
    call.house.announcements.keep(call.engine.id, call.actor, Announced(shut=True))


async def _begin(
    call: CompatCall,
    transfer: Transfer,
    component: Component,
    facts: EngineFacts,
    *,
    check_finite: bool,
) -> _Open:
    """Waited for until the engine has taken it on. What comes after that is told by the pieces."""
    session_id = f"{_PREFIX}{call.house.new_id()}"
    command = UpdateWeights(
        source=SessionWeights(session_id, transfer, _LEASE_MS),
        # What it is called is said at the end; until then, and without that, it stays.
        weight_version=facts.weights.version or UNNAMED,
        cache_policy=cache_policy_under(call, facts),
        admission=UnderPause(facts.pause_epoch or None),
        components=(component,),
        check_finite=check_finite,
    )
    try:
        operation = await call.begin(command, "start")
    except EngineBusy:
        # Of the same call twice at once each has a session of another name.
        twin = await _open(call)
        if twin is None or twin.transfer != transfer or twin.components != command.components:
            raise
        operation, session_id = twin.operation, twin.session_id
    operation = await call.until(operation, lambda one: one.engine_operation_id is not None)
    if operation.done and operation.state is not OperationState.SUCCEEDED:
        raise OrderFailed(operation)
    return _Open(operation, session_id, transfer)


async def _take_piece(call: CompatCall, found: _Open, payload: Payload) -> tuple[int, Operation]:
    """Its index. A piece that is the very same as the latest one is that one sent again."""
    taken = await call.house.ledger.stages.taken(found.operation.id)
    index = taken.chunks
    latest = await _latest(call, found, taken)
    if isinstance(latest, Chunk) and latest.payload == payload:
        return latest.index, found.operation
    operation = await _go_on(call, found, Chunk(index, payload), "piece")
    return index, operation


async def _close(call: CompatCall, found: _Open, stage: Stage, part: str) -> Operation:
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


async def _latest(call: CompatCall, found: _Open, taken: Taken) -> Stage | None:
    if not taken.calls:
        return None
    (latest,) = await call.house.ledger.stages.after(found.operation.id, taken.calls - 1, 1)
    return latest.stage


async def _go_on(call: CompatCall, found: _Open, stage: Stage, part: str) -> Operation:
    note = f"vLLM endpoint {call.name}"
    request = StageRequest(
        engine_id=call.engine.id,
        command=SessionStage(found.session_id, stage),
        actor=call.actor,
        caller=caller_of(call.request, call.who, note),
        key=call.key(""),
        fingerprint=call.fingerprint(part),
    )
    return (await call.house.sessions.go_on(request)).operation


async def _open(call: CompatCall) -> _Open | None:
    for operation in await call.house.ledger.operations.open_ones(call.engine.id):
        session_id = session_id_of(operation)
        ours = session_id is not None and session_id.startswith(_PREFIX)
        if session_id is not None and ours and operation.actor == call.actor:
            begun = cast("UpdateWeights", command_of(operation.kind, operation.request))
            return _Open(operation, session_id, cast("SessionWeights", begun.source).transfer)
    return None


async def _announced(call: CompatCall) -> Announced:
    """What init said; after a restart of the gateway, what the caller's latest update was by."""
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and not known.shut:
        return known
    latest = None if known is not None else await call.latest(OperationKind.UPDATE_WEIGHTS)
    if latest is not None and (session_id_of(latest) or "").startswith(_PREFIX):
        begun = cast("UpdateWeights", command_of(latest.kind, latest.request))
        transfer = cast("SessionWeights", begun.source).transfer
        if isinstance(transfer, NcclTransfer):
            return Announced(transfer)
    if WeightTransferBackend.DISK in ways(call.can):
        return Announced()  # of files nothing has to be said before
    raise WouldHarm("Weight transfer not initialized. Call init_weight_transfer_engine first.")


async def _finished_already(call: CompatCall, version: str | None) -> None:
    """Whether this is a finish once more, of an update that has ended so."""
    announced = call.house.announcements.of(call.engine.id, call.actor)
    if announced is not None and announced.component is not None:
        raise WouldHarm("no weights were sent since start_weight_update")
    latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
    if latest is not None and (latest.reason or "").startswith("vLLM endpoint"):
        if not latest.done:
            latest = await call.ended(latest)
        told = (latest.result or {}).get("weight_version")
        succeeded = latest.state is OperationState.SUCCEEDED
        same = succeeded and version in (None, told)
        if same and (await call.facts()).revision == latest.revision:
            return
    raise WouldHarm("finish_weight_update called without a matching start_weight_update.")


def _piece_for(found: _Open, update_info: Any) -> Piece:
    piece = piece_of(update_info, found.transfer)
    if piece.transfer is not None and piece.transfer != found.transfer:
        raise BadBody("the pieces of one update from disk lie in one folder")
    return piece
